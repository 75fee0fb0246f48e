//! Loop, Matrix and Flush of the thesis's section 5.4, in C (built with `-pg`) and in Rust.
//!
//! Both versions do the same and return the same checksum, so that one checks the other. What each
//! takes of the core is known: Loop the front end (IPC 1), Matrix the functional units, Flush the
//! first-level data cache.

use super::{Program, Work, Wrong, mix};
use std::hint::black_box;

const SIDE: usize = 5;
const FLUSH_WORDS: usize = 32 * 1024 / size_of::<u64>();

const LOOP_CALLS: u64 = 1_000_000;
const MATRIX_CALLS: u64 = 20_000;
const FLUSH_CALLS: u64 = 2_000;

mod c {
    // SAFETY: as declared in c/micro.h. Where no pointer is passed, any arguments will do.
    unsafe extern "C" {
        pub(super) safe fn elfen_micro_loop(seed: u64, calls: u64) -> u64;
        pub(super) safe fn elfen_micro_matrix(seed: u64, calls: u64) -> u64;
        pub(super) fn elfen_micro_flush(seed: u64, calls: u64, buffer: *mut u64) -> u64;
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Loop,
    Matrix,
    Flush,
}

/// One of the three, in C or in Rust.
#[derive(Debug)]
pub(super) struct Micro {
    kind: Kind,
    in_c: bool,
    seed: u64,
    buffer: Box<[u64; FLUSH_WORDS]>,
}

impl Micro {
    pub(super) fn new(kind: Kind, in_c: bool, seed: u64) -> Self {
        Self { kind, in_c, seed, buffer: Box::new([0; FLUSH_WORDS]) }
    }
}

impl Program for Micro {
    fn work(&self) -> Work {
        match self.kind {
            Kind::Loop => Work { amount: LOOP_CALLS, unit: "calls" },
            Kind::Matrix => Work { amount: MATRIX_CALLS, unit: "products" },
            Kind::Flush => Work { amount: FLUSH_CALLS, unit: "buffers" },
        }
    }

    fn iterate(&mut self) -> Result<u64, Wrong> {
        let seed = self.seed;
        Ok(match (self.kind, self.in_c) {
            (Kind::Loop, true) => c::elfen_micro_loop(seed, LOOP_CALLS),
            (Kind::Loop, false) => call_nothing(seed, LOOP_CALLS),
            (Kind::Matrix, true) => c::elfen_micro_matrix(seed, MATRIX_CALLS),
            (Kind::Matrix, false) => multiply_matrices(seed, MATRIX_CALLS),
            (Kind::Flush, true) => {
                let buffer = self.buffer.as_mut_ptr();
                // SAFETY: the buffer is ours alone for the call, and has the words that micro.h
                // says it must have (`FLUSH_WORDS`).
                unsafe { c::elfen_micro_flush(seed, FLUSH_CALLS, buffer) }
            }
            (Kind::Flush, false) => flush_buffer(seed, FLUSH_CALLS, &mut self.buffer),
        })
    }
}

#[inline(never)]
fn nothing() {
    black_box(());
}

fn call_nothing(seed: u64, calls: u64) -> u64 {
    let mut done = 0_u64;
    for _ in 0..calls {
        nothing();
        done += 1;
    }
    mix(seed ^ done)
}

type Matrix = [[f64; SIDE]; SIDE];

#[inline(never)]
fn multiply(a: &Matrix, b: &Matrix, out: &mut Matrix) {
    for i in 0..SIDE {
        for j in 0..SIDE {
            let mut sum = 0.0;
            for k in 0..SIDE {
                sum += a[i][k] * b[k][j];
            }
            out[i][j] = sum;
        }
    }
    black_box(out);
}

/// A number in [-1, 1) from the top 53 bits: exact, so the same in every language.
fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / 4_503_599_627_370_496.0 - 1.0
}

fn multiply_matrices(seed: u64, calls: u64) -> u64 {
    let mut state = seed;
    let (mut a, mut b, mut out) = (Matrix::default(), Matrix::default(), Matrix::default());
    for (a, b) in a.iter_mut().flatten().zip(b.iter_mut().flatten()) {
        state = mix(state);
        *a = unit(state);
        state = mix(state);
        *b = unit(state);
    }
    let places = (0..SIDE).flat_map(|column| (0..SIDE).map(move |row| (row, column))).cycle();
    let mut sum = 0;
    for (_, (row, column)) in (0..calls).zip(places) {
        multiply(&a, &b, &mut out);
        sum = mix(sum ^ out[row][column].to_bits());
        b[row][column] = unit(sum);
    }
    sum
}

#[inline(never)]
fn flush(buffer: &mut [u64; FLUSH_WORDS]) {
    buffer.fill(0);
    black_box(buffer);
}

fn flush_buffer(seed: u64, calls: u64, buffer: &mut [u64; FLUSH_WORDS]) -> u64 {
    let mut sum = seed;
    for _ in 0..calls {
        let at = usize::try_from(sum % FLUSH_WORDS as u64).expect("below the buffer's length");
        buffer[at] = sum;
        black_box(&mut *buffer);
        flush(buffer);
        sum = mix(sum.wrapping_add(buffer[at]).wrapping_add(1));
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(8))]

        /// Goal: C and Rust do the same work. Method: their checksums, for any seed.
        #[test]
        fn c_and_rust_agree(seed: u64) {
            for kind in [Kind::Loop, Kind::Matrix, Kind::Flush] {
                let checksum = |in_c| Micro::new(kind, in_c, seed).iterate().expect("no check");
                prop_assert_eq!(checksum(true), checksum(false), "{:?}", kind);
            }
        }
    }

    /// Goal: a flush that leaves a word behind shows. Method: the sum's recursion with a word left.
    #[test]
    fn a_missed_word_changes_the_sum() {
        let mut buffer = [0; FLUSH_WORDS];
        let honest = flush_buffer(9, 1, &mut buffer);
        assert_eq!(honest, mix(9 + 1));
        assert_ne!(honest, mix(9 + 9 + 1), "what it would be had the word stayed");
    }
}
