//! Parses pairs that a user gives: `0:1,2:3`, `0:1,2,3`, `0:1-7:2`.
//!
//!   PAIRS = PAIR {"," PAIR}
//!   PAIR  = CPU ":" SPAN {"," SPAN}
//!   SPAN  = CPU | CPU "-" CPU [":" STRIDE]
//!
//! A colon also precedes the stride of a range, as in taskset's lists. This is unambiguous: a colon
//! after a single number begins a pair, and a colon after a range begins its stride. So
//! `0:1,2-6:2,8:9` is the pairs `0:1,2,4,6` and `8:9`, and `0-3:4` is not a pair.
//!
//! Parsing does not depend on the machine. `lanes` checks whether the CPUs exist.

use std::fmt;

use super::cpulist::{self, CpuSet, ListError};

/// A request lane and the batch lanes that borrow from it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pair {
    pub request: u32,
    /// At least one lane, and not the request lane.
    pub batch: CpuSet,
}

impl Pair {
    pub fn lanes(&self) -> impl Iterator<Item = u32> {
        std::iter::once(self.request).chain(self.batch.iter())
    }
}

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PairError {
    #[error("the list of pairs is empty")]
    Empty,
    #[error("invalid pair {0:?}: a pair begins with one request lane and a colon")]
    NoRequest(String),
    #[error("request lane {0} has no batch lane")]
    NoBatch(u32),
    #[error("CPU {0} is named twice, and a lane has one role")]
    Twice(u32),
    #[error(transparent)]
    List(#[from] ListError),
}

/// Parses a list of at least one pair, in which no CPU occurs twice.
pub fn parse(list: &str) -> Result<Vec<Pair>, PairError> {
    if list.trim().is_empty() {
        return Err(PairError::Empty);
    }
    let mut pairs: Vec<Pair> = Vec::new();
    let mut named = CpuSet::default();
    let mut name = |cpu| if named.insert(cpu) { Ok(cpu) } else { Err(PairError::Twice(cpu)) };
    for token in list.split(',').map(str::trim) {
        let (request, batch) = split(token);
        if let Some(request) = request {
            let request = name(cpulist::cpu(request)?)?;
            if batch.is_empty() {
                return Err(PairError::NoBatch(request));
            }
            pairs.push(Pair { request, batch: CpuSet::default() });
        }
        let pair = pairs.last_mut().ok_or_else(|| PairError::NoRequest(token.to_owned()))?;
        for cpu in cpulist::span(batch)?.cpus() {
            pair.batch.insert(name(cpu)?);
        }
    }
    Ok(pairs)
}

/// Splits off the request lane if the token begins a pair. The rest is a span of batch lanes.
fn split(token: &str) -> (Option<&str>, &str) {
    match token.split_once(':') {
        Some((request, batch)) if !request.contains('-') => (Some(request), batch),
        _ => (None, token),
    }
}

/// Prints a pair in the syntax that [`parse`] reads.
impl fmt::Display for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.request, self.batch)
    }
}

/// Prints a list of pairs in the syntax that [`parse`] reads.
pub fn list(pairs: &[Pair]) -> String {
    pairs.iter().map(Pair::to_string).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pair(request: u32, batch: &[u32]) -> Pair {
        Pair { request, batch: batch.iter().copied().collect() }
    }

    /// Goal: every form of the grammar has its documented meaning. Method: each form and its pairs.
    /// `elfen/tests/lanes` has invalid forms, with their messages.
    #[test]
    fn reads_every_form() {
        let forms: [(&str, Vec<Pair>); 8] = [
            ("0:1", vec![pair(0, &[1])]),
            ("0:1,2:3", vec![pair(0, &[1]), pair(2, &[3])]),
            ("0:1,2,3", vec![pair(0, &[1, 2, 3])]),
            ("0:1-3,4:5,7", vec![pair(0, &[1, 2, 3]), pair(4, &[5, 7])]),
            ("0:1-7:2", vec![pair(0, &[1, 3, 5, 7])]),
            ("0:1,2-6:2,8:9", vec![pair(0, &[1, 2, 4, 6]), pair(8, &[9])]),
            ("3:2,1", vec![pair(3, &[1, 2])]),
            (" 0:1, 2:3\n", vec![pair(0, &[1]), pair(2, &[3])]),
        ];
        for (text, pairs) in forms {
            assert_eq!(parse(text), Ok(pairs), "{text:?}");
        }
    }

    /// Pairs over distinct CPUs: a shuffled list of CPUs cut into pieces of two or more.
    fn pairs() -> impl Strategy<Value = Vec<Pair>> {
        let cpus = prop::collection::btree_set(0..=600u32, 2..40);
        let shuffled = cpus.prop_map(Vec::from_iter).prop_shuffle();
        (shuffled, 2..6usize).prop_map(|(cpus, size)| {
            let pieces = cpus.chunks(size).filter(|piece| piece.len() > 1);
            pieces.map(|piece| pair(piece[0], &piece[1..])).collect()
        })
    }

    proptest! {
        /// Goal: printed pairs are parsed back. Method: any pairs, printed and parsed.
        #[test]
        fn parses_what_it_prints(pairs in pairs()) {
            prop_assert_eq!(parse(&list(&pairs)), Ok(pairs));
        }

        /// Goal: no input panics, and no CPU is in two pairs. Method: random strings of the
        /// grammar's characters.
        #[test]
        fn never_panics_on_near_misses(text in "[0-9:, -]{0,24}") {
            let pairs = parse(&text).unwrap_or_default();
            let mut named = CpuSet::default();
            for cpu in pairs.iter().flat_map(Pair::lanes) {
                prop_assert!(named.insert(cpu), "{cpu} twice in {text:?}");
            }
            prop_assert!(pairs.iter().all(|pair| !pair.batch.is_empty()));
        }
    }
}
