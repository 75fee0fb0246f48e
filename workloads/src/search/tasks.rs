//! A query set for the corpus, in luceneutil's task format and of the thesis's size.
//!
//! Its demand resembles that of Figure 5.1. Most queries are words that occur in few articles, and
//! some are frequent words. A few are conjunctions, phrases and fuzzy words, which take one or two
//! orders of magnitude longer.

use super::corpus::Corpus;
use crate::text::word;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use std::ops::Range;

/// Ranks of words that occur in most articles, in some, and in few.
const HIGH: Range<u32> = 5..100;
const MED: Range<u32> = 100..2_000;
const LOW: Range<u32> = 2_000..50_000;
/// Ranks of words that are long enough for misspellings.
const LONG: Range<u32> = 10_100..50_000;

type Make = fn(&mut Maker<'_>) -> String;

/// The number of tasks of each kind: 1141 in total, as in the thesis.
const KINDS: [(&str, u32, Make); 13] = [
    ("HighTerm", 60, |make| make.term(HIGH)),
    ("MedTerm", 200, |make| make.term(MED)),
    ("LowTerm", 400, |make| make.term(LOW)),
    ("AndHighHigh", 40, |make| make.both("+", HIGH, HIGH)),
    ("AndHighMed", 80, |make| make.both("+", HIGH, MED)),
    ("AndHighLow", 80, |make| make.both("+", HIGH, LOW)),
    ("OrHighHigh", 20, |make| make.both("", HIGH, HIGH)),
    ("OrHighMed", 40, |make| make.both("", HIGH, MED)),
    ("OrHighLow", 40, |make| make.both("", HIGH, LOW)),
    ("Phrase", 80, |make| make.phrase("")),
    ("SloppyPhrase", 20, |make| make.phrase("~4")),
    ("Fuzzy1", 51, |make| make.term(LONG) + "~1"),
    ("Fuzzy2", 30, |make| make.term(LONG) + "~2"),
];

struct Maker<'a> {
    corpus: &'a Corpus,
    docs: u64,
    rng: Xoshiro256PlusPlus,
}

impl Maker<'_> {
    fn term(&mut self, ranks: Range<u32>) -> String {
        word(self.rng.random_range(ranks))
    }

    fn both(&mut self, sign: &str, first: Range<u32>, second: Range<u32>) -> String {
        format!("{sign}{} {sign}{}", self.term(first), self.term(second))
    }

    /// A phrase of two adjacent words of some article.
    fn phrase(&mut self, slop: &str) -> String {
        let ranks = self.corpus.ranks(self.rng.random_range(0..self.docs));
        let at = self.rng.random_range(0..ranks.len() - 1);
        format!("\"{} {}\"{slop}", word(ranks[at]), word(ranks[at + 1]))
    }
}

/// The query set for the first `docs` articles of the corpus with this seed, one task per element.
pub(super) fn tasks(docs: u64, seed: u64) -> Vec<String> {
    let corpus = Corpus::new(seed);
    let rng = Xoshiro256PlusPlus::seed_from_u64(!seed);
    let mut maker = Maker { corpus: &corpus, docs: docs.max(1), rng };
    let mut tasks = Vec::new();
    for (kind, count, make) in KINDS {
        tasks.extend((0..count).map(|_| format!("{kind}: {}", make(&mut maker))));
    }
    tasks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::search::query;

    /// Goal: there are as many tasks as in the thesis. All are valid queries, and equal seeds give
    /// equal tasks. Method: two seeds.
    #[test]
    fn tasks_are_good_queries() {
        let all = tasks(100, 1);
        assert_eq!(all.len(), 1_141);
        for task in &all {
            let (_, query) = task.split_once(": ").expect("a category");
            query::parse(query).unwrap_or_else(|error| panic!("{task}: {error}"));
        }
        assert_eq!(all, tasks(100, 1));
        assert_ne!(all, tasks(100, 2));
    }
}
