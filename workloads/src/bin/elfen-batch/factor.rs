//! A matrix factorisation: LU with partial pivoting of a random dense matrix, held against the
//! matrix.
//!
//! Long regular inner loops over floating-point rows: few branches, high IPC, no function entries
//! for a long time.

use elfen_rt::check;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use workloads::batch::{Program, Work, Wrong, checksum};

const SIDE: usize = 160;
/// Far above rounding (about side * 1e-16), far below any mistake.
const TOLERANCE: f64 = 1e-10;

#[derive(Debug)]
pub(super) struct Factor {
    matrix: Matrix,
}

#[derive(Clone, Debug)]
struct Matrix(Vec<f64>);

impl Matrix {
    fn row(&self, row: usize) -> &[f64] {
        &self.0[row * SIDE..(row + 1) * SIDE]
    }
}

/// L (unit diagonal, below) and U (on and above the diagonal) of the matrix with its rows in
/// `order`.
struct Factors {
    lu: Matrix,
    order: Vec<usize>,
}

impl Factor {
    pub(super) fn new(seed: u64) -> Self {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        Self { matrix: Matrix((0..SIDE * SIDE).map(|_| rng.random_range(-1.0..1.0)).collect()) }
    }
}

impl Program for Factor {
    fn work(&self) -> Work {
        Work { amount: 1, unit: "factorisations" }
    }

    fn iterate(&mut self) -> Result<u64, Wrong> {
        let factors = factorise(&self.matrix).ok_or(Wrong("a random matrix was singular"))?;
        if largest_residual(&self.matrix, &factors) > TOLERANCE {
            return Err(Wrong("the factors do not multiply to the matrix"));
        }
        let bytes: Vec<u8> = factors.lu.0.iter().flat_map(|x| x.to_le_bytes()).collect();
        Ok(checksum(&bytes))
    }
}

/// `None` for a singular matrix.
fn factorise(matrix: &Matrix) -> Option<Factors> {
    let mut lu = matrix.clone();
    let mut order: Vec<usize> = (0..SIDE).collect();
    for step in 0..SIDE {
        let size = |row: &usize| lu.row(*row)[step].abs();
        let pivot = (step..SIDE).max_by(|a, b| size(a).total_cmp(&size(b)))?;
        if lu.row(pivot)[step] == 0.0 {
            return None;
        }
        order.swap(step, pivot);
        (0..SIDE).for_each(|column| lu.0.swap(step * SIDE + column, pivot * SIDE + column));
        let (done, below) = lu.0.split_at_mut((step + 1) * SIDE);
        let top = &done[step * SIDE..];
        for row in below.chunks_exact_mut(SIDE) {
            check!();
            row[step] /= top[step];
            let factor = row[step];
            for (entry, above) in row[step + 1..].iter_mut().zip(&top[step + 1..]) {
                *entry -= factor * above;
            }
        }
    }
    Some(Factors { lu, order })
}

/// The largest entry of |PA - LU|, a random sample of it: one column in sixteen.
fn largest_residual(matrix: &Matrix, factors: &Factors) -> f64 {
    let mut largest: f64 = 0.0;
    for row in 0..SIDE {
        for column in (row % 16..SIDE).step_by(16) {
            check!();
            let below = factors.lu.row(row);
            let product: f64 = (0..=row.min(column))
                .map(|k| if k == row { 1.0 } else { below[k] } * factors.lu.row(k)[column])
                .sum();
            let off = (matrix.row(factors.order[row])[column] - product).abs();
            // `max` would pass over a NaN.
            largest = largest.max(if off.is_nan() { f64::INFINITY } else { off });
        }
    }
    largest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: factors multiply to the matrix, the same each time, and a wrong one is noticed.
    /// Method: one matrix; each of a few entries of its factors disturbed, one by NaN.
    #[test]
    fn factors_are_verified() {
        let mut program = Factor::new(5);
        let sum = program.iterate().expect("a good factorisation");
        assert_eq!(program.iterate(), Ok(sum));
        assert_ne!(Factor::new(6).iterate(), Ok(sum));
        for (row, column) in [(0, 0), (7, 100), (100, 7), (SIDE - 1, SIDE - 1)] {
            for off in [1e-3, f64::NAN] {
                let mut factors = factorise(&program.matrix).expect("not singular");
                factors.lu.0[row * SIDE + column] += off;
                assert!(largest_residual(&program.matrix, &factors) > TOLERANCE, "{row} {column}");
            }
        }
    }

    /// Goal: a singular matrix has no factors. Method: one with two equal rows, and one of zeros.
    #[test]
    fn singular_matrices_are_refused() {
        assert!(factorise(&Matrix(vec![0.0; SIDE * SIDE])).is_none());
        let mut matrix = Factor::new(1).matrix;
        matrix.0.copy_within(0..SIDE, SIDE);
        let residue = factorise(&matrix).map(|factors| factors.lu.row(SIDE - 1)[SIDE - 1].abs());
        assert!(residue.is_none_or(|last| last < 1e-9), "{residue:?}");
    }
}
