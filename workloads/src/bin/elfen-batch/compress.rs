//! Compression: matches against the last 64 KB (LZ77 over a hash chain) and an adaptive range
//! coder.
//!
//! The input is seeded text; each iteration compresses it, unpacks it again and compares. Much
//! memory is read at random, and branches are hard to predict: a batch program like those people
//! run.

use super::rangecoder::{Bit, Decoder, Encoder};
use elfen_rt::check;
use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use workloads::batch::{Program, Work, Wrong, checksum};
use workloads::text::{Lexicon, word};

const INPUT_BYTES: usize = 128 * 1024;
const WORDS: u32 = 20_000;

const WINDOW: usize = 1 << 16;
const SHORTEST: usize = 4;
const LONGEST: usize = SHORTEST + 255;
const HASH_BITS: u32 = 14;
/// How many earlier places with the same hash are looked at.
const TRIES: usize = 16;

#[derive(Debug)]
pub(super) struct Compress {
    input: Vec<u8>,
}

impl Compress {
    pub(super) fn new(seed: u64) -> Self {
        let lexicon = Lexicon::new(WORDS);
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut input = Vec::with_capacity(INPUT_BYTES + 16);
        while input.len() < INPUT_BYTES {
            input.extend(word(lexicon.sample(&mut rng)).bytes());
            input.push(b' ');
        }
        input.truncate(INPUT_BYTES);
        Self { input }
    }
}

impl Program for Compress {
    fn work(&self) -> Work {
        Work { amount: INPUT_BYTES as u64, unit: "bytes" }
    }

    fn iterate(&mut self) -> Result<u64, Wrong> {
        let packed = pack(&self.input);
        match unpack(&packed, self.input.len()) {
            Some(unpacked) if unpacked == self.input => Ok(checksum(&packed)),
            _ => Err(Wrong("what was unpacked is not what was compressed")),
        }
    }
}

/// The probabilities of everything that is coded.
struct Models {
    is_match: Bit,
    /// By the byte before.
    literal: Vec<[Bit; 256]>,
    length: [Bit; 256],
    distance_high: [Bit; 256],
    /// By the high byte.
    distance_low: Vec<[Bit; 256]>,
}

impl Models {
    fn new() -> Self {
        let tree = [Bit::default(); 256];
        Self {
            is_match: Bit::default(),
            literal: vec![tree; 256],
            length: tree,
            distance_high: tree,
            distance_low: vec![tree; 256],
        }
    }
}

fn pack(input: &[u8]) -> Vec<u8> {
    let mut encoder = Encoder::new();
    let mut models = Models::new();
    let mut chains = Chains::new();
    let mut at = 0;
    while at < input.len() {
        check!();
        let found = chains.longest(input, at);
        encoder.bit(&mut models.is_match, found.is_some());
        let length = match found {
            Some((length, distance)) => {
                encoder.tree(&mut models.length, 8, u32::from(length));
                let [high, low] = distance.to_be_bytes();
                encoder.tree(&mut models.distance_high, 8, high.into());
                encoder.tree(&mut models.distance_low[usize::from(high)], 8, low.into());
                usize::from(length) + SHORTEST
            }
            None => {
                let before = if at == 0 { 0 } else { input[at - 1] };
                let tree = &mut models.literal[usize::from(before)];
                encoder.tree(tree, 8, input[at].into());
                1
            }
        };
        (at..at + length).for_each(|place| chains.enter(input, place));
        at += length;
    }
    encoder.finish()
}

/// `None` if the bytes are nothing that `pack` made.
fn unpack(packed: &[u8], length: usize) -> Option<Vec<u8>> {
    let mut decoder = Decoder::new(packed);
    let mut models = Models::new();
    let mut out: Vec<u8> = Vec::with_capacity(length);
    while out.len() < length {
        check!();
        if decoder.bit(&mut models.is_match) {
            let length = decoder.tree(&mut models.length, 8) as usize + SHORTEST;
            let high = decoder.tree(&mut models.distance_high, 8);
            let low = decoder.tree(&mut models.distance_low[high as usize], 8);
            let start = out.len().checked_sub((high << 8 | low) as usize + 1)?;
            // Byte by byte: a match may reach into what it makes.
            for place in start..start + length {
                out.push(out[place]);
            }
        } else {
            let before = out.last().copied().unwrap_or(0);
            let byte = decoder.tree(&mut models.literal[usize::from(before)], 8);
            out.push(u8::try_from(byte).ok()?);
        }
    }
    Some(out)
}

/// Where each four bytes were seen last, and before that.
struct Chains {
    /// The latest place of each hash, plus one.
    heads: Vec<usize>,
    /// For each place in the window, the one before with the same hash, plus one.
    earlier: Vec<usize>,
}

impl Chains {
    fn new() -> Self {
        Self { heads: vec![0; 1 << HASH_BITS], earlier: vec![0; WINDOW] }
    }

    fn hash(input: &[u8], at: usize) -> Option<usize> {
        let bytes = input.get(at..at + SHORTEST)?.first_chunk::<4>()?;
        let hash = u32::from_le_bytes(*bytes).wrapping_mul(0x9e37_79b1) >> (32 - HASH_BITS);
        Some(hash as usize)
    }

    fn enter(&mut self, input: &[u8], at: usize) {
        if let Some(hash) = Self::hash(input, at) {
            self.earlier[at % WINDOW] = self.heads[hash];
            self.heads[hash] = at + 1;
        }
    }

    /// The longest match that begins before `at`: its length over the shortest, its distance less
    /// one.
    fn longest(&self, input: &[u8], at: usize) -> Option<(u8, u16)> {
        let mut place = self.heads[Self::hash(input, at)?];
        let mut best = SHORTEST - 1;
        let mut best_distance = 0;
        let limit = LONGEST.min(input.len() - at);
        for _ in 0..TRIES {
            let Some(start) = place.checked_sub(1).filter(|start| at - start <= WINDOW) else {
                break;
            };
            let same = input[start..].iter().zip(&input[at..at + limit]);
            let length = same.take_while(|(a, b)| a == b).count();
            if length > best {
                (best, best_distance) = (length, at - start);
            }
            place = self.earlier[start % WINDOW];
        }
        let length = u8::try_from(best.checked_sub(SHORTEST)?).ok()?;
        Some((length, u16::try_from(best_distance - 1).ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Goal: text is compressed, to the same bytes for the same seed. Method: one iteration of two
    /// seeds; the size, and the checksum twice.
    #[test]
    fn text_shrinks() {
        let mut program = Compress::new(1);
        let packed = pack(&program.input);
        assert!(packed.len() * 2 < INPUT_BYTES, "{} bytes left", packed.len());
        assert_eq!(program.iterate(), Ok(checksum(&packed)));
        assert_eq!(program.iterate(), program.iterate());
        assert_ne!(program.iterate(), Compress::new(2).iterate());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Goal: any bytes survive, far beyond the window too. Method: repeated random pieces.
        #[test]
        fn everything_survives(
            piece in proptest::collection::vec(0u8..6, 0..400), repeats in 1usize..300,
        ) {
            let input = piece.repeat(repeats);
            prop_assert_eq!(unpack(&pack(&input), input.len()), Some(input));
        }

        /// Goal: damaged bytes are refused or unpacked to something, never a panic. Method: noise.
        #[test]
        fn noise_is_survived(noise in proptest::collection::vec(any::<u8>(), 0..300)) {
            let unpacked = unpack(&noise, 1_000);
            prop_assert!(unpacked.is_none_or(|bytes| bytes.len() >= 1_000));
        }
    }
}
