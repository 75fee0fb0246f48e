//! The corpus: articles in an artificial language. Equal seeds give equal articles on every
//! machine.
//!
//! Word frequencies follow Zipf's law. Most articles are short and a few are long. Each article has
//! its own random stream, so article 7 does not depend on the number of articles.

use crate::text::{Lexicon, word};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use std::sync::Arc;

const WORDS: u32 = 200_000;

/// An article has `SHORTEST + n * n / SPREAD` words for a random `n` up to `WIDEST`: 40 to 1040,
/// 373 on average.
const SHORTEST: u32 = 40;
const WIDEST: u32 = 400;
const SPREAD: u32 = 160;
const TITLE_WORDS: usize = 3;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Article {
    pub(super) title: String,
    pub(super) body: String,
}

/// An endless iterator over the articles.
#[derive(Clone, Debug)]
pub(super) struct Corpus {
    lexicon: Arc<Lexicon>,
    words: Arc<[String]>,
    seed: u64,
    next: u64,
}

impl Corpus {
    pub(super) fn new(seed: u64) -> Self {
        let words = (0..WORDS).map(word).collect();
        Self { lexicon: Arc::new(Lexicon::new(WORDS)), words, seed, next: 0 }
    }

    fn rng(&self, article: u64) -> Xoshiro256PlusPlus {
        // Seeding expands the number through splitmix64, so articles with adjacent numbers are not
        // similar.
        Xoshiro256PlusPlus::seed_from_u64(
            self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(article),
        )
    }

    /// The ranks of an article's words.
    pub(super) fn ranks(&self, article: u64) -> Vec<u32> {
        let mut rng = self.rng(article);
        let width = rng.random_range(0..=WIDEST);
        let length = SHORTEST + width * width / SPREAD;
        (0..length).map(|_| self.lexicon.sample(&mut rng)).collect()
    }

    fn article(&self, article: u64) -> Article {
        let ranks = self.ranks(article);
        let text = |ranks: &[u32]| {
            let words: Vec<&str> =
                ranks.iter().map(|rank| self.words[*rank as usize].as_str()).collect();
            words.join(" ")
        };
        Article { title: text(&ranks[..TITLE_WORDS]), body: text(&ranks) }
    }
}

impl Iterator for Corpus {
    type Item = Article;

    fn next(&mut self) -> Option<Article> {
        let article = self.article(self.next);
        self.next += 1;
        Some(article)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the corpus never changes. Method: a hash of its first hundred articles.
    #[test]
    fn the_corpus_is_fixed() {
        let text: String = Corpus::new(1).take(100).map(|article| article.body + "\n").collect();
        let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        assert_eq!((text.len(), hash), (199_196, 3_790_963_930_557_883_718));
    }
}
