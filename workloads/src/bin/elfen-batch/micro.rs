//! Loop, Matrix and Flush of the thesis's section 5.4 in Rust, with a check at each entry.
//!
//! They do the same work as the C programs in c/micro.c and return the same checksums, so that each
//! version verifies the other.

use elfen_rt::check;
use std::hint::black_box;
use workloads::batch::{FLUSH_WORDS, Kind, Program, Work, Wrong, mix};

const SIDE: usize = 5;

#[derive(Debug)]
pub(super) struct Micro {
    kind: Kind,
    seed: u64,
    buffer: Box<[u64; FLUSH_WORDS]>,
}

impl Micro {
    pub(super) fn new(kind: Kind, seed: u64) -> Self {
        Self { kind, seed, buffer: Box::new([0; FLUSH_WORDS]) }
    }
}

impl Program for Micro {
    fn work(&self) -> Work {
        self.kind.work()
    }

    fn iterate(&mut self) -> Result<u64, Wrong> {
        let (seed, calls) = (self.seed, self.work().amount);
        Ok(match self.kind {
            Kind::Loop => call_nothing(seed, calls),
            Kind::Matrix => multiply_matrices(seed, calls),
            Kind::Flush => flush_buffer(seed, calls, &mut self.buffer),
        })
    }
}

#[inline(never)]
fn nothing() {
    check!();
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
    check!();
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

/// A number in [-1, 1) from the top 53 bits. It is exact, so C and Rust compute the same number.
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
    check!();
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
    use workloads::batch::MicroInC;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(8))]

        /// Goal: C and Rust do the same work. Method: their checksums, for any seed.
        #[test]
        fn c_and_rust_agree(seed: u64) {
            for kind in [Kind::Loop, Kind::Matrix, Kind::Flush] {
                let in_c = MicroInC::new(kind, seed).iterate();
                prop_assert_eq!(in_c, Micro::new(kind, seed).iterate(), "{:?}", kind);
            }
        }
    }

    /// Goal: a flush that misses a word changes the checksum. Method: the formula of the checksum,
    /// with and without the word.
    #[test]
    fn a_missed_word_changes_the_sum() {
        let mut buffer = [0; FLUSH_WORDS];
        let honest = flush_buffer(9, 1, &mut buffer);
        assert_eq!(honest, mix(9 + 1));
        assert_ne!(honest, mix(9 + 9 + 1), "what it would be had the word stayed");
    }
}
