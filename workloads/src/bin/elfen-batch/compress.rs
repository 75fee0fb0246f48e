//! Compression by LZMA: matches against the last 64 KB, and an adaptive range coder.
//!
//! The input is text generated from the seed. Each iteration compresses the text, unpacks it and
//! compares. Its memory accesses are random and its branches are hard to predict, as in common
//! batch programs.

use elfen_rt::check;
use lzma_rust2::{LzmaOptions, LzmaReader, LzmaWriter};
use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use std::io::{self, Read, Write};
use workloads::batch::{Program, Work, Wrong, checksum};
use workloads::text::{Lexicon, word};

const INPUT_BYTES: usize = 128 * 1024;
const WORDS: u32 = 20_000;
const WINDOW_BYTES: u32 = 1 << 16;
/// The bytes between two checks, which take a few microseconds.
const STEP_BYTES: usize = 32;

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
        let packed = pack(&self.input).map_err(|_| Wrong("the text was not compressed"))?;
        match unpack(&packed) {
            Ok(unpacked) if unpacked == self.input => Ok(checksum(&packed)),
            _ => Err(Wrong("what was unpacked is not what was compressed")),
        }
    }
}

fn pack(input: &[u8]) -> io::Result<Vec<u8>> {
    let mut options = LzmaOptions::with_preset(1);
    options.dict_size = WINDOW_BYTES;
    let size = Some(input.len() as u64);
    let mut packing = LzmaWriter::new_use_header(Vec::new(), &options, size)?;
    for step in input.chunks(STEP_BYTES) {
        check!();
        packing.write_all(step)?;
    }
    packing.finish()
}

fn unpack(packed: &[u8]) -> io::Result<Vec<u8>> {
    let mut unpacking = LzmaReader::new_mem_limit(packed, u32::MAX, None)?;
    let mut unpacked = Vec::with_capacity(INPUT_BYTES);
    let mut step = [0; STEP_BYTES];
    loop {
        check!();
        match unpacking.read(&mut step)? {
            0 => return Ok(unpacked),
            got => unpacked.extend_from_slice(&step[..got]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: text is compressed, and equal seeds give equal bytes. A change of the packed bytes is
    /// detected. Method: iterations of two seeds; the size, and the checksum twice; one packed byte
    /// changed.
    #[test]
    fn text_shrinks() {
        let mut program = Compress::new(1);
        let mut packed = pack(&program.input).expect("memory takes everything");
        assert!(packed.len() * 2 < INPUT_BYTES, "{} bytes left", packed.len());
        assert_eq!(program.iterate(), Ok(checksum(&packed)));
        assert_eq!(program.iterate(), program.iterate());
        assert_ne!(program.iterate(), Compress::new(2).iterate());
        let middle = packed.len() / 2;
        packed[middle] ^= 1;
        assert!(unpack(&packed).ok().as_ref() != Some(&program.input));
    }
}
