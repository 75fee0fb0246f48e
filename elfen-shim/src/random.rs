//! Numbers that are drawn between two samples, in a signal's handler and in tests: three shifts,
//! nothing allocated, and the same numbers from the same seed (Marsaglia's xorshift).

/// See the head of this file.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn of(seed: u64) -> Self {
        // 0 is followed by itself.
        Self(seed.max(1))
    }

    #[inline(always)]
    pub fn draw(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// One of so many, which are at least one.
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
    fn each_of_few_comes_about_as_often() {
        for seed in [0, 1, 88_172_645_463_325_252] {
            let mut random = Random::of(seed);
            let mut counts = [0_u32; 7];
            // The first of a small seed are small.
            (0..20).for_each(|_| _ = random.draw());
            for _ in 0..70_000 {
                counts[usize::try_from(random.below(7)).unwrap()] += 1;
            }
            assert!(counts.iter().all(|count| (9_500..10_500).contains(count)), "{counts:?}");
            assert_eq!(random.below(1), 0);
        }
    }
}
