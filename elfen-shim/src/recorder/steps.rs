//! How far apart samples were: counts in buckets, in memory that is there already.

/// 16 to a power of two of ticks.
const BUCKETS: usize = 64 * 16;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Steps(Vec<u32>);

impl Steps {
    pub(super) fn new() -> Self {
        Self(vec![0; BUCKETS])
    }

    #[inline(always)]
    pub(super) fn add(&mut self, ticks: u64) {
        self.0[bucket_of(ticks)] += 1;
    }

    /// The smallest value that `percent` of all do not exceed.
    pub(super) fn quantile(&self, percent: u64) -> u64 {
        let total: u64 = self.0.iter().map(|&count| u64::from(count)).sum();
        let rank = (total * percent).div_ceil(100).max(1);
        let mut below = 0;
        for (index, &count) in self.0.iter().enumerate() {
            below += u64::from(count);
            if below >= rank {
                return ticks_of(index);
            }
        }
        0
    }
}

fn bucket_of(ticks: u64) -> usize {
    let power = 63 - (ticks | 1).leading_zeros();
    let below = if power >= 4 { ticks >> (power - 4) & 15 } else { ticks & 15 };
    let power = usize::try_from(power).unwrap_or(0);
    (power * 16 + usize::try_from(below).unwrap_or(0)).min(BUCKETS - 1)
}

fn ticks_of(bucket: usize) -> u64 {
    let (power, below) = (bucket / 16, bucket as u64 % 16);
    match power {
        0..4 => below,
        power => (16 + below) << (power - 4),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_found_again_within_a_sixteenth() {
        let mut steps = Steps::new();
        (1..=1_000).for_each(|ticks| steps.add(ticks * 100));
        for (percent, expected) in [(1, 1_000), (50, 50_000), (99, 99_000)] {
            let found = steps.quantile(percent);
            assert!((expected - expected / 16..=expected).contains(&found), "{percent}: {found}");
        }
        assert_eq!(Steps::new().quantile(50), 0);
    }
}
