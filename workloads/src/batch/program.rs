//! What a batch program is: an iteration whose amount of work is known, and whose result is
//! checked.

use crate::beside::{Slowdown, Tally};
use crate::units::seconds;
use rand::{Rng, SeedableRng};
use rand_xoshiro::SplitMix64;
use serde::Serialize;

/// One iteration's amount of work.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    pub amount: u64,
    pub unit: &'static str,
}

/// A result that is not what it must be: the machine or the program computed wrongly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wrong(pub &'static str);

pub trait Program {
    fn work(&self) -> Work;

    /// Does it once, verifies it, and returns its checksum.
    fn iterate(&mut self) -> Result<u64, Wrong>;

    /// What was emulated, if anything was.
    fn emulated_core(&self) -> Option<EmulatedCore> {
        None
    }
}

/// How an emulated core slowed a program down.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct EmulatedCore {
    pub(super) slowdown: f64,
    /// How long it ran beside a busy request lane, and how much longer it took for that.
    pub(super) beside_s: f64,
    pub(super) added_s: f64,
}

impl EmulatedCore {
    pub fn of(slowdown: Slowdown, tally: Tally) -> Self {
        let (beside_s, added_s) = (seconds(tally.all.beside_ns), seconds(tally.added_ns));
        Self { slowdown: slowdown.factor(), beside_s, added_s }
    }
}

/// One step of splitmix64: the same in c/micro.c.
pub fn mix(x: u64) -> u64 {
    SplitMix64::seed_from_u64(x).next_u64()
}

/// A checksum of bytes, eight at a time.
pub fn checksum(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(bytes.len() as u64, |sum, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        mix(sum ^ u64::from_le_bytes(word))
    })
}
