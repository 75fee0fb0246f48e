//! What `elfen-batch` and `elfen-batch-c` share: a program repeats one iteration, and what it did
//! is counted and checked.
//!
//! Every iteration of a seed does the same work and must return the same checksum, so that borrowed
//! work can be compared with work alone, however often it was stopped in between.
//!
//! The programs themselves are in their binaries. Those in Rust have a check in their source, and a
//! binary that has one is known by it: nothing of it may reach the binary of the programs in C,
//! which are checked through their `-pg` entries instead.

mod c;
mod repeat;

pub use c::{FLUSH_WORDS, Kind, MicroInC};
pub use repeat::{Repetition, run};

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
}

/// One step of splitmix64: the same in c/micro.c.
pub fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A checksum of bytes, eight at a time.
pub fn checksum(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(bytes.len() as u64, |sum, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        mix(sum ^ u64::from_le_bytes(word))
    })
}
