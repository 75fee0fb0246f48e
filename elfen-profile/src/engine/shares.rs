//! How well the shares of code are known, by what single shadows have shown.
//!
//! Executions within a shadow depend on each other: a loop that runs has run before. Shadows are
//! taken at independent random times. So the error of a share is that of the mean of the shadows.

use rustc_hash::FxHashMap;

/// Parts with a smaller share do not count.
const SHARE_MIN: f64 = 0.01;
/// Fewer shadows tell nothing of their spread.
const SHADOWS_MIN: u64 = 10;

#[derive(Debug, Default)]
pub(crate) struct Shares {
    /// By part: the sum of its shares in the shadows, and the sum of their squares.
    sums: FxHashMap<u32, (f64, f64)>,
    shadows: u64,
}

impl Shares {
    /// Adds a shadow: the instructions of each part.
    pub(crate) fn add(&mut self, parts: impl Iterator<Item = (u32, u64)> + Clone) {
        let all: u64 = parts.clone().map(|(_, instructions)| instructions).sum();
        if all == 0 {
            return;
        }
        self.shadows += 1;
        for (part, instructions) in parts {
            let share = instructions as f64 / all as f64;
            let (sum, squares) = self.sums.entry(part).or_default();
            *sum += share;
            *squares += share * share;
        }
    }

    /// The largest relative standard error of a share. `None` if there are too few shadows, or no
    /// part has a share that counts.
    pub(crate) fn error(&self) -> Option<f64> {
        let shadows = self.shadows as f64;
        if self.shadows < SHADOWS_MIN {
            return None;
        }
        let errors = self.sums.values().filter_map(|(sum, squares)| {
            let mean = sum / shadows;
            let variance = (squares / shadows - mean * mean).max(0.0) / (shadows - 1.0);
            (mean >= SHARE_MIN).then(|| variance.sqrt() / mean)
        });
        errors.reduce(f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;

    /// Goal: the error is that of the shares. Method: shadows that see one of two halves, so
    /// that shares have a binomial distribution; parts below the limit, and few shadows.
    #[test]
    fn the_error_is_the_spread_of_the_shadows() {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
        let mut shares = Shares::default();
        assert_eq!(shares.error(), None);
        for _ in 0..400 {
            let part = u32::from(random.random_bool(0.5));
            // Whatever the shadow's length.
            let length = random.random_range(1_000..100_000_u64);
            shares.add([(part, length), (2, length / 500)].into_iter());
        }
        // sqrt(0.5 * 0.5 / 400) / 0.5
        let error = shares.error().unwrap();
        assert!((error - 0.05).abs() < 0.005, "{error}");
        let mut few = Shares::default();
        for _ in 1..SHADOWS_MIN {
            few.add([(0, 10)].into_iter());
        }
        assert_eq!(few.error(), None);
        few.add([(0, 10)].into_iter());
        few.add(std::iter::empty());
        assert_eq!(few.error(), Some(0.0));
    }
}
