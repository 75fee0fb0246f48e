//! Double-time error (DTE): decides which rates to keep.
//!
//! A rate is the change of a counter divided by the change of the clock. If the observer is delayed
//! within a sample, the rate is wrong. Such a delay also makes the time between the samples' starts
//! differ from the time between their ends. The paper keeps a rate if these two times agree within
//! 1 %.
//!
//! For short times this rule is too strict, because the two times differ for three other reasons:
//!
//! - the clock advances in steps, so each end may be off by one;
//! - a clock reading takes longer at one time than at another;
//! - a line may have to come from the observed CPU, or may already be here.
//!
//! So the rule has a floor. A delay that is shorter than a line transfer cannot be distinguished
//! from a value that was already that old when it was read.

use crate::clock::Clock;

/// The tolerance of the paper.
pub const TOLERANCE_PERCENT: u64 = 1;
/// The floor in steps of the clock.
const FLOOR_STEPS: u64 = 2;
/// The floor of a clock with fine steps: about the time of one reading.
const FLOOR_NS: u64 = 20;

/// The difference that is tolerated between samples of any length. `round_trip` is a line's round
/// trip in ticks.
pub fn floor_ticks(clock: &Clock, round_trip: Option<u64>) -> u64 {
    let of_clock = clock.step_ticks.saturating_mul(FLOOR_STEPS).max(clock.ticks(FLOOR_NS));
    of_clock.max(round_trip.unwrap_or(0))
}

/// Returns whether to keep the rate between two samples. `starts` is the time between their starts,
/// and `ends` is the time between their ends.
#[inline(always)]
pub fn keep(starts: u64, ends: u64, floor_ticks: u64) -> bool {
    keep_by_paper(starts, ends) || starts.abs_diff(ends) <= floor_ticks
}

/// The paper's rule without the floor, for comparison.
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
}
