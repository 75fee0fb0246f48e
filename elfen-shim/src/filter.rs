//! Double-time error: which rates count.
//!
//! A rate is the change of a counter by the change of the clock. If the observer was held up inside
//! of a sample, the two ends of the sample no longer tell the same time, and the rate is wrong: so
//! it is left out. The paper keeps a rate if the two differences agree within a hundredth. Short
//! ones disagree by more: by a step of the clock at each end, where it advances in steps, by as
//! much as reading it takes now longer and now shorter, and by the time in which a line comes from
//! the observed, or is here already. Who is held up for no longer than a line may take is off by no
//! more than the age of what he reads, which nobody can tell.

use crate::clock::Clock;

/// A hundredth, as the paper has it.
pub const TOLERANCE_PERCENT: u64 = 1;
/// Steps of the clock that two differences may disagree by at any length.
const FLOOR_STEPS: u64 = 2;
/// And this, however fine its steps are: about what a reading takes.
const FLOOR_NS: u64 = 20;

/// How far two differences may be apart at any length, where a line goes there and back in so many
/// ticks.
pub fn floor_ticks(clock: &Clock, round_trip: Option<u64>) -> u64 {
    let of_clock = clock.step_ticks.saturating_mul(FLOOR_STEPS).max(clock.ticks(FLOOR_NS));
    of_clock.max(round_trip.unwrap_or(0))
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
    fn the_floor_is_two_steps_or_a_reading_or_a_line() {
        let clock =
            |step_ticks| Clock { ticks_per_second: 2_600_000_000, step_ticks, unit_ticks: 0 };
        let floor = |step_ticks| floor_ticks(&clock(step_ticks), None);
        assert_eq!([1, 2, 26, 40].map(floor), [52, 52, 52, 80]);
        assert_eq!([0, 50, 300].map(|line| floor_ticks(&clock(26), Some(line))), [52, 52, 300]);
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
