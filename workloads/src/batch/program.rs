//! A batch program: an iteration with a known amount of work and a verified result.

use crate::beside::{Slowdown, Tally};
use crate::units::seconds;
use rand::{Rng, SeedableRng};
use rand_xoshiro::SplitMix64;
use serde::Serialize;

/// The amount of work of one iteration.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    pub amount: u64,
    pub unit: &'static str,
}

/// A wrong result: the machine or the program computed incorrectly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wrong(pub &'static str);

pub trait Program {
    fn work(&self) -> Work;

    /// Runs one iteration, verifies it, and returns its checksum.
    fn iterate(&mut self) -> Result<u64, Wrong>;

    /// What was emulated, if anything.
    fn emulated_core(&self) -> Option<EmulatedCore> {
        None
    }
}

/// How much an emulated core slowed a program down.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct EmulatedCore {
    pub(super) slowdown: f64,
    /// How long it ran next to a busy request lane, and how much time the emulation added.
    pub(super) beside_s: f64,
    pub(super) added_s: f64,
}

impl EmulatedCore {
    pub fn of(slowdown: Slowdown, tally: Tally) -> Self {
        let (beside_s, added_s) = (seconds(tally.all.beside_ns), seconds(tally.added_ns));
        Self { slowdown: slowdown.factor(), beside_s, added_s }
    }
}

/// One step of splitmix64, the same as in c/micro.c.
pub fn mix(x: u64) -> u64 {
    SplitMix64::seed_from_u64(x).next_u64()
}

/// A checksum of bytes, in words of eight.
pub fn checksum(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(bytes.len() as u64, |sum, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        mix(sum ^ u64::from_le_bytes(word))
    })
}
