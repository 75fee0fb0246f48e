//! CPU lists as taskset and the kernel write them: `0,3,7-11`, `0-31:2`.
//!
//! A list is first parsed into spans, because its users differ: the kernel's lists may name a CPU
//! twice, a user's lists must not. Spans also make `0-4294967295` cheap to reject. Parsing does not
//! depend on the machine. `MAX_CPU` bounds the memory of a set.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// The highest CPU number accepted: Linux is built for at most 8192 CPUs today.
pub const MAX_CPU: u32 = 65_535;

/// A range `first-last:stride`. A single CPU has `first == last`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    first: u32,
    last: u32,
    stride: u32,
}

impl Span {
    pub fn cpus(self) -> impl Iterator<Item = u32> {
        // `MAX_CPU` fits into the usize of every machine that runs Linux.
        (self.first..=self.last).step_by(usize::try_from(self.stride).unwrap_or(usize::MAX))
    }
}

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ListError {
    #[error("the CPU list is empty")]
    Empty,
    #[error("a CPU number is missing")]
    Missing,
    #[error("{0:?} is not a CPU number")]
    NotACpu(String),
    #[error("{0} is above {MAX_CPU}, the highest CPU number of any machine")]
    TooHigh(String),
    #[error("the range {0:?} is in reverse order")]
    Backwards(String),
    #[error("{0:?} is not a stride: a stride is a number above 0, after a range, as in 0-31:2")]
    NotAStride(String),
}

/// The spans of a list, at least one.
pub fn spans(list: &str) -> Result<Vec<Span>, ListError> {
    if list.trim().is_empty() {
        return Err(ListError::Empty);
    }
    list.split(',').map(|token| span(token.trim())).collect()
}

/// One element of a list: `7`, `7-11` or `7-11:2`.
pub fn span(token: &str) -> Result<Span, ListError> {
    let Some((first, rest)) = token.split_once('-') else {
        let only = cpu(token)?;
        return Ok(Span { first: only, last: only, stride: 1 });
    };
    let (last, stride) = match rest.split_once(':') {
        Some((last, stride)) => (last, parse_stride(stride)?),
        None => (rest, 1),
    };
    let first = cpu(first)?;
    let last = cpu(last)?;
    if first > last {
        return Err(ListError::Backwards(token.to_owned()));
    }
    Ok(Span { first, last, stride })
}

/// Parses a CPU number, which has only digits.
pub fn cpu(digits: &str) -> Result<u32, ListError> {
    if digits.is_empty() {
        return Err(ListError::Missing);
    }
    if !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(ListError::NotACpu(digits.to_owned()));
    }
    let too_high = || ListError::TooHigh(digits.to_owned());
    digits.parse().ok().filter(|&cpu| cpu <= MAX_CPU).ok_or_else(too_high)
}

fn parse_stride(digits: &str) -> Result<u32, ListError> {
    let not_a_stride = || ListError::NotAStride(digits.to_owned());
    cpu(digits).ok().filter(|&stride| stride > 0).ok_or_else(not_a_stride)
}

/// A set of CPUs, printed as a list.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct CpuSet(BTreeSet<u32>);

impl CpuSet {
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// Adds a CPU. Returns `false` if the set had it already.
    pub fn insert(&mut self, cpu: u32) -> bool {
        self.0.insert(cpu)
    }

    /// Removes and returns the lowest CPU.
    pub fn pop_first(&mut self) -> Option<u32> {
        self.0.pop_first()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn last(&self) -> Option<u32> {
        self.0.last().copied()
    }

    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.iter().copied()
    }

    /// The CPUs that are in both sets.
    pub fn and(&self, other: &Self) -> Self {
        Self(&self.0 & &other.0)
    }

    /// The CPUs that are not in `other`.
    pub fn without(&self, other: &Self) -> Self {
        Self(&self.0 - &other.0)
    }

    pub fn is_subset(&self, other: &Self) -> bool {
        self.0.is_subset(&other.0)
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        Self(cpus.into_iter().collect())
    }
}

impl FromStr for CpuSet {
    type Err = ListError;

    fn from_str(list: &str) -> Result<Self, ListError> {
        Ok(spans(list)?.into_iter().flat_map(Span::cpus).collect())
    }
}

/// Prints the shortest list without strides; prints nothing for the empty set.
impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.iter().peekable();
        let mut comma = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while let Some(next) = cpus.next_if(|&next| next == last + 1) {
                last = next;
            }
            match last - first {
                0 => write!(f, "{comma}{first}")?,
                1 => write!(f, "{comma}{first},{last}")?,
                _ => write!(f, "{comma}{first}-{last}")?,
            }
            comma = ",";
        }
        Ok(())
    }
}

impl serde::Serialize for CpuSet {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Goal: lists are parsed as the kernel and taskset write them. Method: each form, compared
    /// with the shortest list of the same set.
    #[test]
    fn reads_every_form() {
        let forms = [
            ("7", "7"),
            ("0-1", "0,1"),
            ("0,2-4,9", "0,2-4,9"),
            ("3,1,2,1", "1-3"),
            ("0-31:8", "0,8,16,24"),
            ("0-3:9", "0"),
            ("4-4", "4"),
            ("65535", "65535"),
        ];
        for (list, shortest) in forms {
            assert_eq!(list.parse::<CpuSet>().unwrap().to_string(), shortest, "{list}");
        }
        assert_eq!("".parse::<CpuSet>(), Err(ListError::Empty));
        assert_eq!("0-4294967295".parse::<CpuSet>(), Err(ListError::TooHigh("4294967295".into())));
    }

    proptest! {
        /// Goal: parsing a printed set gives the same set. Method: any set that is not empty.
        #[test]
        fn parses_what_it_prints(cpus in prop::collection::btree_set(0..=MAX_CPU, 1..50)) {
            let set: CpuSet = cpus.into_iter().collect();
            prop_assert_eq!(set.to_string().parse::<CpuSet>(), Ok(set));
        }
    }
}
