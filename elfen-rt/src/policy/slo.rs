//! `slo-budget`: the user states the SLO, and the budget follows the measured tail. Ours; not in
//! the thesis.
//!
//! Two parts that meet in the control page. At a check, `slo-budget` is `refresh-budget` with the
//! budget found there ([`super::Policy::SloBudget`]). That budget is set here, once a window, by
//! whoever watches the service: up slowly while the tail has headroom, down fast when it nears the
//! SLO, and to zero before it gets there.
//!
//! Zero is the answer to doubt: too few requests to know the tail, a window without any, a service
//! that stopped publishing. With a budget of zero `slo-budget` is `borrow-idle`, which costs the
//! service nothing.

use core::fmt;
use core::str::FromStr;

use crate::signal::histogram::{BUCKETS, bucket_top_ns};

/// "`per_million` of a million requests finish within `latency_ns`".
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slo {
    pub per_million: u32,
    pub latency_ns: u64,
}

/// Requests per latency, in the buckets of the service page's histogram: the difference of two
/// readings.
pub type Window = [u64; BUCKETS];

/// A request weighs this much when it is counted, and 7/8 of that a window later: integers that
/// fade without a rest.
const WEIGHT: u64 = 1 << 16;
const FADE: u64 = 8;

/// A tail is known once this many requests lie beyond the quantile: with 4, the estimate is off by
/// half at most often enough to react to, and p99 takes 400 requests.
const BEYOND_MIN: u64 = 4;

/// The full range of the budget is climbed in this many windows.
const CLIMB_WINDOWS: u64 = 64;

/// Where the tail stands between 0 and the SLO, in sixteenths. Buckets are a sixteenth wide, so
/// nothing finer is known.
const GROW_BELOW: u64 = 11;
const HALVE_FROM: u64 = 13;
const ZERO_FROM: u64 = 15;

/// Windows without growth after the budget was cut: bursts come in trains.
const REST_WINDOWS: u32 = 8;

/// Sets the budget of `slo-budget`, window by window.
#[derive(Clone, Debug)]
pub struct Controller {
    slo: Slo,
    budget_ns: u64,
    /// Windows until the budget may grow again.
    rest: u32,
    /// The windows so far, each fading with age.
    weights: Window,
}

impl Controller {
    /// Starts as `borrow-idle`.
    pub fn new(slo: Slo) -> Self {
        Self { slo, budget_ns: 0, rest: 0, weights: [0; BUCKETS] }
    }

    pub fn budget_ns(&self) -> u64 {
        self.budget_ns
    }

    /// The budget for the next window, from the requests that finished in this one; `None` if
    /// nobody publishes.
    pub fn window(&mut self, finished: Option<&Window>) -> u64 {
        let Some(counts) = finished else {
            *self = Self::new(self.slo);
            return 0;
        };
        self.fade_in(counts);
        // The last window alone sees a change at once; all of them together see a tail that one
        // cannot hold. `None` is less than any tail: it is the answer only if neither is known.
        let tail_ns = self.tail_ns(counts, 1).max(self.tail_ns(&self.weights, WEIGHT));
        let silent = counts.iter().all(|&count| count == 0);
        let before_ns = self.budget_ns;
        self.budget_ns =
            tail_ns.filter(|_| !silent).map_or(0, |tail_ns| self.budget_after(tail_ns));
        self.rest =
            if self.budget_ns < before_ns { REST_WINDOWS } else { self.rest.saturating_sub(1) };
        self.budget_ns
    }

    fn fade_in(&mut self, counts: &Window) {
        for (weight, &count) in self.weights.iter_mut().zip(counts) {
            let kept = *weight - *weight / FADE;
            *weight = kept.saturating_add(count.saturating_mul(WEIGHT));
        }
    }

    /// The latency at the SLO's quantile; `None` if fewer than [`BEYOND_MIN`] requests of this
    /// weight lie beyond it.
    fn tail_ns(&self, counts: &Window, weight: u64) -> Option<u64> {
        let total: u128 = counts.iter().map(|&count| u128::from(count)).sum();
        let beyond = total * u128::from(1_000_000u32.saturating_sub(self.slo.per_million));
        if beyond < u128::from(BEYOND_MIN * weight) * 1_000_000 {
            return None;
        }
        let mut above = 0u128;
        // From the top, the first bucket that more requests reach than may lie beyond the quantile.
        let bucket = counts.iter().rposition(|&count| {
            above += u128::from(count);
            above * 1_000_000 > beyond
        });
        bucket.map(bucket_top_ns)
    }

    fn budget_after(&self, tail_ns: u64) -> u64 {
        let latency_ns = self.slo.latency_ns;
        let sixteenths = u128::from(tail_ns) * 16;
        let reaches = |part: u64| sixteenths >= u128::from(latency_ns) * u128::from(part);
        if reaches(ZERO_FROM) {
            0
        } else if reaches(HALVE_FROM) {
            self.budget_ns / 2
        } else if reaches(GROW_BELOW) || self.rest > 0 {
            self.budget_ns
        } else {
            let step_ns = latency_ns.div_ceil(CLIMB_WINDOWS);
            self.budget_ns.saturating_add(step_ns).min(latency_ns)
        }
    }
}

/// What is wrong with the text of an SLO.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SloError;

impl fmt::Display for SloError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "an SLO is a percentile above 0 and below 100, and a latency: p99=100ms, p99.9=500us",
        )
    }
}

impl core::error::Error for SloError {}

/// `p99=100ms`, `p99.9=500us`: whole numbers of ns, us, ms or s; up to four decimals of a
/// percentile.
impl FromStr for Slo {
    type Err = SloError;

    fn from_str(text: &str) -> Result<Self, SloError> {
        let (quantile, latency) = text.split_once('=').ok_or(SloError)?;
        let per_million = quantile.strip_prefix('p').and_then(per_million).ok_or(SloError)?;
        let latency_ns = latency_ns(latency).ok_or(SloError)?;
        if per_million == 0 || per_million >= 1_000_000 || latency_ns == 0 {
            return Err(SloError);
        }
        Ok(Self { per_million, latency_ns })
    }
}

/// A percentile in millionths: `99.9` is 999,000.
fn per_million(text: &str) -> Option<u32> {
    let (whole, decimals) = text.split_once('.').unwrap_or((text, "0"));
    let places = u32::try_from(decimals.len()).ok().filter(|places| *places <= 4)?;
    let part = digits(decimals)? * 10u64.checked_pow(4 - places)?;
    u32::try_from(digits(whole)?.checked_mul(10_000)?.checked_add(part)?).ok()
}

fn latency_ns(text: &str) -> Option<u64> {
    let unit = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = text.split_at(unit);
    let unit_ns = match unit {
        "ns" => 1,
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        _ => return None,
    };
    digits(number)?.checked_mul(unit_ns)
}

/// `parse` alone would take a sign.
fn digits(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signal::histogram::bucket_of;
    use proptest::prelude::*;

    const MS: u64 = 1_000_000;
    const SLO: Slo = Slo { per_million: 990_000, latency_ns: 100 * MS };

    /// A window whose p99 is `tail_ns`.
    fn window(requests: u64, tail_ns: u64) -> Window {
        let mut counts = [0; BUCKETS];
        let beyond = requests / 50;
        counts[bucket_of(tail_ns / 10)] = requests - beyond;
        counts[bucket_of(tail_ns)] += beyond;
        counts
    }

    fn grown() -> Controller {
        let mut controller = Controller::new(SLO);
        for _ in 0..CLIMB_WINDOWS {
            controller.window(Some(&window(1000, 10 * MS)));
        }
        assert_eq!(controller.budget_ns(), SLO.latency_ns);
        controller
    }

    /// Headroom in every window: no step is larger than a 64th of the SLO, and the top is the SLO's
    /// latency.
    #[test]
    fn the_budget_climbs_slowly() {
        let mut controller = Controller::new(SLO);
        let mut before_ns = 0;
        for _ in 0..2 * CLIMB_WINDOWS {
            let budget_ns = controller.window(Some(&window(1000, 10 * MS)));
            assert!(budget_ns - before_ns <= SLO.latency_ns.div_ceil(CLIMB_WINDOWS));
            before_ns = budget_ns;
        }
        assert_eq!(before_ns, SLO.latency_ns);
    }

    /// The load steps up within one window: the very next budget is zero, while the tail is still
    /// within the SLO.
    #[test]
    fn a_tail_that_nears_the_slo_takes_the_whole_budget_at_once() {
        assert_eq!(grown().window(Some(&window(1000, 95 * MS))), 0);
        assert_eq!(grown().window(Some(&window(1000, 85 * MS))), SLO.latency_ns / 2);
    }

    /// A burst is over: the budget stays down for a while, then climbs from zero.
    #[test]
    fn the_budget_does_not_come_back_with_the_first_quiet_window() {
        let mut controller = grown();
        controller.window(Some(&window(1000, 150 * MS)));
        for _ in 0..REST_WINDOWS {
            assert_eq!(controller.window(Some(&window(1000, 10 * MS))), 0);
        }
        let budget_ns = controller.window(Some(&window(1000, 10 * MS)));
        assert_eq!(budget_ns, SLO.latency_ns.div_ceil(CLIMB_WINDOWS));
    }

    /// p99 of 500 requests is the 495th: five may be slow, the sixth is the tail.
    #[test]
    fn one_in_a_hundred_may_be_slow() {
        let tail_ns = |slow: u64| {
            let mut counts = [0; BUCKETS];
            counts[bucket_of(MS)] = 500 - slow;
            counts[bucket_of(90 * MS)] = slow;
            Controller::new(SLO).tail_ns(&counts, 1)
        };
        assert_eq!(tail_ns(5), Some(bucket_top_ns(bucket_of(MS))));
        assert_eq!(tail_ns(6), Some(bucket_top_ns(bucket_of(90 * MS))));
    }

    /// Silence, whether the page is gone or nothing finishes, is no headroom; and what was known
    /// before it is no knowledge after the page was gone.
    #[test]
    fn silence_ends_the_budget() {
        let mut controller = grown();
        assert_eq!(controller.window(Some(&[0; BUCKETS])), 0);
        let mut controller = grown();
        assert_eq!(controller.window(None), 0);
        assert_eq!(controller.window(Some(&window(100, 10 * MS))), 0, "100 requests show no p99");
    }

    /// Windows of 50 requests show no p99 each, but eight of them together do.
    #[test]
    fn sparse_windows_add_up() {
        let mut controller = Controller::new(SLO);
        let grows = (0..100).find(|_| controller.window(Some(&window(100, 10 * MS))) > 0);
        assert!(grows.is_some_and(|windows| windows >= 3), "{grows:?}");
    }

    #[test]
    fn an_slo_is_read_as_written() {
        let slo = |text: &str| text.parse::<Slo>();
        assert_eq!(slo("p99=100ms"), Ok(SLO));
        assert_eq!(slo("p99.9=500us"), Ok(Slo { per_million: 999_000, latency_ns: 500_000 }));
        assert_eq!(slo("p50.0001=2s"), Ok(Slo { per_million: 500_001, latency_ns: 2_000_000_000 }));
        for wrong in [
            "",
            "p99",
            "p99=",
            "p99=0",
            "p99=0ms",
            "p0=1ms",
            "p100=1ms",
            "p99=100",
            "99=1ms",
            "p-1=1ms",
            "p99=-1ms",
            "p99=+1ms",
            "p99=1.5ms",
            "p99.99999=1ms",
            "p99=1 ms",
            "p=1ms",
            "p.5=1ms",
            "p99=99999999999999999999s",
            "p99=ms",
            "p99=18446744073709551615s",
        ] {
            assert_eq!(slo(wrong), Err(SloError), "{wrong}");
        }
    }

    proptest! {
        /// The tail is the histogram's bucket of the value that the sorted list has there.
        #[test]
        fn the_tail_is_the_quantile(latencies in prop::collection::vec(0u64..200 * MS, 400..900)) {
            let mut counts = [0; BUCKETS];
            for &latency_ns in &latencies {
                counts[bucket_of(latency_ns)] += 1;
            }
            let mut sorted = latencies;
            sorted.sort_unstable();
            let truth_ns = sorted[(sorted.len() * 99).div_ceil(100) - 1];
            let tail_ns = Controller::new(SLO).tail_ns(&counts, 1);
            prop_assert_eq!(tail_ns, Some(bucket_top_ns(bucket_of(truth_ns))));
        }

        /// Two controllers with the same past, one meets a longer tail: it never grants more.
        #[test]
        fn more_headroom_never_means_a_smaller_budget(
            past in prop::collection::vec((0u64..2000, 1u64..120), 0..20),
            requests in 0u64..5000, tails in (0u64..200 * MS, 0u64..200 * MS),
        ) {
            let mut short = Controller::new(SLO);
            for (requests, tail_ms) in past {
                short.window(Some(&window(requests, tail_ms * MS)));
            }
            let mut long = short.clone();
            let long_ns = long.window(Some(&window(requests, tails.0.max(tails.1))));
            let short_ns = short.window(Some(&window(requests, tails.0.min(tails.1))));
            prop_assert!(long_ns <= short_ns);
        }

        /// Any counts, any SLO: no panic, and the budget stays within the SLO's latency.
        #[test]
        fn any_window_gives_a_budget_within_the_slo(
            per_million: u32, latency_ns: u64,
            windows in prop::collection::vec(
                prop::collection::vec((0..BUCKETS, any::<u64>()), 0..8), 0..8,
            ),
        ) {
            let mut controller = Controller::new(Slo { per_million, latency_ns });
            for entries in windows {
                let mut counts = [0; BUCKETS];
                for (bucket, count) in entries {
                    counts[bucket] = count;
                }
                prop_assert!(controller.window(Some(&counts)) <= latency_ns);
            }
        }
    }
}
