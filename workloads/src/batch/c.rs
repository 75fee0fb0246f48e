//! Loop, Matrix and Flush from section 5.4 of the thesis, as in the thesis: in C, built with `-pg`.
//!
//! Each uses a known part of the core: Loop the front end (IPC 1), Matrix the functional units,
//! Flush the first-level data cache. `elfen-batch` has them in Rust, with the same checksums.

use super::program::{Program, Work, Wrong};

/// 32 KB, the same as in micro.h.
pub const FLUSH_WORDS: usize = 32 * 1024 / size_of::<u64>();

mod micro {
    // SAFETY: as declared in c/micro.h. Functions without pointers accept any arguments.
    unsafe extern "C" {
        pub(super) safe fn elfen_micro_loop(seed: u64, calls: u64) -> u64;
        pub(super) safe fn elfen_micro_matrix(seed: u64, calls: u64) -> u64;
        pub(super) fn elfen_micro_flush(seed: u64, calls: u64, buffer: *mut u64) -> u64;
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Loop,
    Matrix,
    Flush,
}

impl Kind {
    pub fn work(self) -> Work {
        match self {
            Self::Loop => Work { amount: 1_000_000, unit: "calls" },
            Self::Matrix => Work { amount: 20_000, unit: "products" },
            Self::Flush => Work { amount: 2_000, unit: "buffers" },
        }
    }
}

#[derive(Debug)]
pub struct MicroInC {
    kind: Kind,
    seed: u64,
    buffer: Box<[u64; FLUSH_WORDS]>,
}

impl MicroInC {
    pub fn new(kind: Kind, seed: u64) -> Self {
        Self { kind, seed, buffer: Box::new([0; FLUSH_WORDS]) }
    }
}

impl Program for MicroInC {
    fn work(&self) -> Work {
        self.kind.work()
    }

    fn iterate(&mut self) -> Result<u64, Wrong> {
        let (seed, calls) = (self.seed, self.work().amount);
        Ok(match self.kind {
            Kind::Loop => micro::elfen_micro_loop(seed, calls),
            Kind::Matrix => micro::elfen_micro_matrix(seed, calls),
            Kind::Flush => {
                let buffer = self.buffer.as_mut_ptr();
                // SAFETY: no other code uses the buffer during the call, and it has the
                // `FLUSH_WORDS` that micro.h requires.
                unsafe { micro::elfen_micro_flush(seed, calls, buffer) }
            }
        })
    }
}
