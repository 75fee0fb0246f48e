//! Which lanes are taken to share a core: pairs of a request lane and its batch lanes, as in `0:1`,
//! `0:1,2:3`, or `0:1,2,3` on a core of four lanes.

use std::fmt;
use std::str::FromStr;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lanes {
    pairs: Vec<Pair>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Pair {
    request: u32,
    batch: Vec<u32>,
}

/// Beyond any machine's.
const HIGHEST: u32 = 1 << 16;

impl FromStr for Lanes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected =
            || format!("`{text}` names no pairs of lanes: write them as in 0:1 or 0:1,2:3");
        let cpu = |text: &str| text.parse().ok().filter(|cpu| *cpu < HIGHEST).ok_or_else(expected);
        let mut pairs: Vec<Pair> = Vec::new();
        for word in text.split(',') {
            match (word.split_once(':'), pairs.last_mut()) {
                (Some((request, batch)), _) => {
                    pairs.push(Pair { request: cpu(request)?, batch: vec![cpu(batch)?] });
                }
                (None, Some(pair)) => pair.batch.push(cpu(word)?),
                (None, None) => return Err(expected()),
            }
        }
        let mut all: Vec<u32> = pairs.iter().flat_map(Pair::lanes).collect();
        all.sort_unstable();
        match all.windows(2).find(|two| two[0] == two[1]) {
            Some(two) => Err(format!("`{text}` names lane {} twice", two[0])),
            None => Ok(Self { pairs }),
        }
    }
}

impl fmt::Display for Lanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, Pair { request, batch }) in self.pairs.iter().enumerate() {
            let batch: Vec<String> = batch.iter().map(u32::to_string).collect();
            write!(f, "{}{request}:{}", if at == 0 { "" } else { "," }, batch.join(","))?;
        }
        Ok(())
    }
}

impl Pair {
    fn lanes(&self) -> impl Iterator<Item = u32> {
        [self.request].into_iter().chain(self.batch.iter().copied())
    }
}

impl Lanes {
    /// The batch lanes beside a request lane.
    pub fn beside(&self, request: u32) -> Option<&[u32]> {
        let pair = self.pairs.iter().find(|pair| pair.request == request)?;
        Some(&pair.batch)
    }

    /// The request lane beside a batch lane.
    pub fn request_of(&self, batch: u32) -> Option<u32> {
        let pair = self.pairs.iter().find(|pair| pair.batch.contains(&batch))?;
        Some(pair.request)
    }

    /// Every batch lane with its request lane.
    pub fn pairs(&self) -> impl Iterator<Item = (u32, u32)> {
        let of = |pair: &Pair| {
            let request = pair.request;
            pair.batch.clone().into_iter().map(move |batch| (request, batch))
        };
        self.pairs.iter().flat_map(of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: pairs are read, found from either side, and shown as written. Method: two of two lanes
    /// and one of four.
    #[test]
    fn pairs_are_read() {
        let lanes: Lanes = "0:1,2,3,8:9".parse().expect("well formed");
        assert_eq!(lanes.beside(0), Some(&[1, 2, 3][..]));
        assert_eq!((lanes.beside(8), lanes.beside(1)), (Some(&[9][..]), None));
        assert_eq!((lanes.request_of(3), lanes.request_of(0)), (Some(0), None));
        assert_eq!(lanes.pairs().collect::<Vec<_>>(), [(0, 1), (0, 2), (0, 3), (8, 9)]);
        assert_eq!(lanes.to_string(), "0:1,2,3,8:9");
    }

    /// Goal: what names no pairs is refused, and so is a lane with two parts to play. Method: each.
    #[test]
    fn other_texts_are_refused() {
        for text in ["", "0", "0:", ":1", "0-1", "0:1:2", "1,0:2", "0:x", "0:70000", "-1:0"] {
            let error = text.parse::<Lanes>().expect_err(text);
            assert!(error.contains("as in 0:1"), "{error}");
        }
        for text in ["0:0", "0:1,1:2", "0:1,0:2", "0:1,1"] {
            let error = text.parse::<Lanes>().expect_err(text);
            assert!(error.contains("twice"), "{error}");
        }
    }
}
