//! `elfen-batch`: programs to borrow with, whose work can be counted and checked.
//!
//! Each program repeats one iteration. Every iteration of a seed does the same work and must return
//! the same checksum, so that borrowed work can be compared with work alone, however often it was
//! stopped in between; what an iteration computes is verified where it can be (what was compressed
//! is unpacked, a solution is checked against its clauses).

pub mod command;
mod compress;
mod corunner;
mod factor;
mod json;
mod micro;
mod rangecoder;
mod sat;

/// One iteration's amount of work.
#[derive(Clone, Copy, Debug)]
struct Work {
    amount: u64,
    unit: &'static str,
}

/// A result that is not what it must be: the machine or the program computed wrongly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wrong(&'static str);

trait Program {
    fn work(&self) -> Work;

    /// Does it once, verifies it, and returns its checksum.
    fn iterate(&mut self) -> Result<u64, Wrong>;
}

/// One step of splitmix64: the same in c/micro.c.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A checksum of bytes, eight at a time.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(bytes.len() as u64, |sum, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        mix(sum ^ u64::from_le_bytes(word))
    })
}
