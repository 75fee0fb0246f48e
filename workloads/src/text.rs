//! Text that resembles a language: a random stream of words whose frequencies follow Zipf's law.
//!
//! Equal seeds give equal text on every machine, because all calculations use integers. `powf` and
//! `ln` could give other words with another libm.

use rand::{Rng, RngExt};

const CONSONANTS: &[u8; 20] = b"tnsrhldcmfpgwybvkxjq";
const VOWELS: &[u8; 5] = b"eaoiu";
const SYLLABLES: u32 = 100;

/// Words by rank, the most frequent first.
#[derive(Debug)]
pub struct Lexicon {
    /// Sum of the weights of all words up to and including each rank.
    cumulative: Vec<u64>,
}

impl Lexicon {
    /// The word of rank `r` has the weight `1 / (r + 2.7)`: Zipf's law with Mandelbrot's shift.
    pub fn new(words: u32) -> Self {
        let weights = (0..u64::from(words)).map(|rank| (10 << 40) / (10 * rank + 27));
        let cumulative = weights.scan(0, |sum, weight| {
            *sum += weight;
            Some(*sum)
        });
        Self { cumulative: cumulative.collect() }
    }

    /// A random rank.
    pub fn sample(&self, rng: &mut impl Rng) -> u32 {
        let total = self.cumulative.last().copied().unwrap_or(1);
        let drawn = rng.random_range(0..total);
        let rank = self.cumulative.partition_point(|sum| *sum <= drawn);
        u32::try_from(rank).expect("below the number of words")
    }
}

/// The word of a rank, made of syllables. Frequent words have fewer syllables, and all words are
/// distinct.
pub fn word(rank: u32) -> String {
    let mut word = Vec::new();
    let mut rest = rank;
    loop {
        let syllable = rest % SYLLABLES;
        word.push(CONSONANTS[(syllable / 5) as usize]);
        word.push(VOWELS[(syllable % 5) as usize]);
        rest /= SYLLABLES;
        if rest == 0 {
            break;
        }
        // Subtracting one makes the words distinct. Otherwise, a word with an additional first
        // syllable could have the same rank.
        rest -= 1;
    }
    String::from_utf8(word).expect("ASCII letters")
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand_xoshiro::Xoshiro256PlusPlus;
    use std::collections::HashSet;

    /// Goal: all ranks have distinct words, and rarer words are not shorter. Method: the first
    /// 200,000.
    #[test]
    fn words_are_distinct() {
        let words: Vec<String> = (0..200_000).map(word).collect();
        assert_eq!(words.iter().collect::<HashSet<_>>().len(), words.len());
        assert!(words.windows(2).all(|pair| pair[0].len() <= pair[1].len()));
        assert_eq!((words[0].as_str(), words[99].len(), words[100].len()), ("te", 2, 4));
    }

    /// Goal: the stream is the same with every machine and compiler. Method: its first ranks.
    #[test]
    fn the_stream_is_fixed() {
        let lexicon = Lexicon::new(100_000);
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(42);
        let ranks: Vec<u32> = (0..6).map(|_| lexicon.sample(&mut rng)).collect();
        assert_eq!(ranks, [13_668, 65, 84_147, 4_063, 10_936, 1_208]);
    }
}
