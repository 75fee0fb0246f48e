//! Marsaglia's xorshift generator: three shifts, no allocation, and equal numbers for equal seeds.
//! It is fast enough to run between two samples, and safe in a signal handler.

/// A generator of 64-bit random numbers.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn of(seed: u64) -> Self {
        // From 0, xorshift only produces 0.
        Self(seed.max(1))
    }

    #[inline(always)]
    pub fn draw(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Draws a number below `count`, which must be at least 1.
    #[inline(always)]
    pub fn below(&mut self, count: u64) -> u64 {
        let scaled = (u128::from(self.draw()) * u128::from(count)) >> 64;
        u64::try_from(scaled).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_numbers_below_a_limit_are_equally_frequent() {
        for seed in [0, 1, 88_172_645_463_325_252] {
            let mut random = Random::of(seed);
            let mut counts = [0_u32; 7];
            // The first numbers of a small seed are small.
            (0..20).for_each(|_| _ = random.draw());
            for _ in 0..70_000 {
                counts[usize::try_from(random.below(7)).unwrap()] += 1;
            }
            assert!(counts.iter().all(|count| (9_500..10_500).contains(count)), "{counts:?}");
            assert_eq!(random.below(1), 0);
        }
    }
}
