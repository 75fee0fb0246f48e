//! Double-time error: which rates count.
//!
//! A rate is the change of a counter by the change of the clock. If the observer was held up inside
//! of a sample, the two ends of the sample no longer tell the same time, and the rate is wrong: so
//! it is left out. The paper keeps a rate if the two differences agree within a hundredth. Short
//! ones disagree by more: by a step of the clock at each end, where it advances in steps, and by as
//! much as reading it takes now longer and now shorter.

use crate::clock::Clock;

/// A hundredth, as the paper has it.
pub const TOLERANCE_PERCENT: u64 = 1;
/// Steps of the clock that two differences may disagree by at any length.
const FLOOR_STEPS: u64 = 2;
/// And this, however fine its steps are: about what a reading takes.
const FLOOR_NS: u64 = 20;

/// How far two differences may be apart at any length.
pub fn floor_ticks(clock: &Clock) -> u64 {
    clock.step_ticks.saturating_mul(FLOOR_STEPS).max(clock.ticks(FLOOR_NS))
}

/// Whether the rate over this sample counts: `starts` and `ends` are the differences of the two
/// ends of a sample to those of the one before.
#[inline(always)]
pub fn keep(starts: u64, ends: u64, floor_ticks: u64) -> bool {
    keep_by_paper(starts, ends) || starts.abs_diff(ends) <= floor_ticks
}

/// The paper's own rule, for comparison.
pub fn keep_by_paper(starts: u64, ends: u64) -> bool {
    let apart = starts.abs_diff(ends).checked_mul(100 / TOLERANCE_PERCENT);
    apart.is_some_and(|apart| apart <= starts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_is_two_steps_or_a_reading() {
        let floor =
            |step_ticks| floor_ticks(&Clock { ticks_per_second: 2_600_000_000, step_ticks });
        assert_eq!([1, 2, 26, 40].map(floor), [52, 52, 52, 80]);
    }

    #[test]
    fn the_floor_or_a_hundredth() {
        for (starts, ends, kept, by_paper) in [
            (10_000, 10_100, true, true),
            (10_000, 10_101, false, false),
            (10_000, 9_900, true, true),
            (10_000, 9_899, false, false),
            (300, 352, true, false),
            (300, 353, false, false),
            (300, 248, true, false),
            (0, 52, true, false),
            (0, 53, false, false),
            (u64::MAX, 0, false, false),
        ] {
            assert_eq!(keep(starts, ends, 52), kept, "{starts} {ends}");
            assert_eq!(keep_by_paper(starts, ends), by_paper, "{starts} {ends}");
        }
    }

    /// The paper's example: the observer is interrupted for 10 us inside of a sample, and the
    /// counter seems to run at many times its rate.
    #[test]
    fn an_interruption_inside_a_sample_is_left_out_twice() {
        let ends = [(0, 100), (1_000, 27_100), (28_000, 28_100), (29_000, 29_100)];
        let kept: Vec<bool> = ends
            .windows(2)
            .map(|pair| keep(pair[1].0 - pair[0].0, pair[1].1 - pair[0].1, 52))
            .collect();
        assert_eq!(kept, [false, false, true]);
    }
}
