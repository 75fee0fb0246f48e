//! `slo-budget`: the user states an SLO, and the budget follows the measured tail latency. This
//! policy is not in the thesis.
//!
//! It has two parts, connected by the control page. At a check, `slo-budget` is `refresh-budget`
//! with the budget from that page ([`super::Policy::SloBudget`]). The supervisor's [`Controller`]
//! sets that budget once a window. It raises the budget slowly while the tail has headroom, lowers
//! it fast when the tail nears the SLO, and sets it to zero before the tail reaches the SLO.
//!
//! The budget is also zero in doubt: with too few requests to know the tail, in a window without
//! requests, and after a service stopped publishing. With a budget of zero, `slo-budget` is
//! `borrow-idle`, which does not slow the service down.

use core::fmt;
use core::str::FromStr;

use crate::signal::histogram::{BUCKETS, bucket_top_ns};

/// A service-level objective: `per_million` of a million requests finish within `latency_ns`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slo {
    pub per_million: u32,
    pub latency_ns: u64,
}

/// The requests of one window by latency, in the buckets of the service page's histogram: the
/// difference of two readings.
pub type Window = [u64; BUCKETS];

/// The tail is judged when this many requests are beyond the quantile: for p99, after 1600
/// requests. Half of that cuts the budget by chance too often, and twice that sees a burst too late
/// (`elfen lab plan` over a simulated day with bursts).
const BEYOND: u64 = 16;

/// How many verdicts it takes to raise the budget from 0 to its maximum.
const CLIMB: u64 = 8;

/// Verdicts without growth after the budget was cut, because bursts often follow each other.
const PAUSE: u32 = 2;

/// After this many windows without a request, earlier requests are ignored.
const SILENT_MAX: u32 = 8;

/// Limits of the tail, in sixteenths of the SLO. Buckets are a sixteenth wide, and a request counts
/// as the longest of its bucket, so a tail found at the SLO is still below it.
const GROW_BELOW: u64 = 13;
const HALVE_FROM: u64 = 15;
const ZERO_FROM: u64 = 16;

/// Sets the budget of `slo-budget`, window by window.
#[derive(Clone, Debug)]
pub struct Controller {
    slo: Slo,
    budget_ns: u64,
    /// Good verdicts until the budget may grow again.
    pause: u32,
    /// Windows without a request until now.
    silent: u32,
    counts_so_far: TailCounts,
}

/// The requests since the last verdict, and how many of them exceeded each limit.
#[derive(Clone, Copy, Debug, Default)]
struct TailCounts {
    requests: u64,
    over_grow: u64,
    over_halve: u64,
    over_zero: u64,
}

/// Where the tail is, judged by the requests so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Tail {
    Unknown,
    Headroom,
    Near,
    TooNear,
    AtTheSlo,
}

impl Controller {
    /// Starts as `borrow-idle`.
    pub fn new(slo: Slo) -> Self {
        Self { slo, budget_ns: 0, pause: 0, silent: 0, counts_so_far: TailCounts::default() }
    }

    /// The budget for the next window, from the requests that finished in this one; `None` if no
    /// service publishes.
    pub fn window(&mut self, finished: Option<&Window>) -> u64 {
        let Some(counts) = finished else {
            *self = Self::new(self.slo);
            return 0;
        };
        if counts.iter().all(|&count| count == 0) {
            self.silent = self.silent.saturating_add(1);
            if self.silent >= SILENT_MAX {
                *self = Self::new(self.slo);
            }
            return 0;
        }
        self.silent = 0;
        self.counts_so_far.add(counts, self.slo.latency_ns);
        let tail = self.counts_so_far.tail(&self.slo);
        if tail != Tail::Unknown {
            self.counts_so_far = TailCounts::default();
        }
        match tail {
            Tail::Unknown | Tail::Near => {}
            Tail::Headroom if self.pause > 0 => self.pause -= 1,
            Tail::Headroom => {
                let step_ns = self.slo.latency_ns.div_ceil(CLIMB);
                self.budget_ns = self.budget_ns.saturating_add(step_ns).min(self.slo.latency_ns);
            }
            Tail::TooNear => {
                self.budget_ns /= 2;
                self.pause = PAUSE;
            }
            Tail::AtTheSlo => {
                self.budget_ns = 0;
                self.pause = PAUSE;
            }
        }
        self.budget_ns
    }
}

impl TailCounts {
    fn add(&mut self, counts: &Window, latency_ns: u64) {
        let over = |sixteenths: u64| {
            let mark = u128::from(latency_ns) * u128::from(sixteenths);
            let late =
                |&(bucket, _): &(usize, &u64)| u128::from(bucket_top_ns(bucket)) * 16 >= mark;
            sum(counts.iter().enumerate().filter(late).map(|(_, &count)| count))
        };
        self.requests = self.requests.saturating_add(sum(counts.iter().copied()));
        self.over_grow = self.over_grow.saturating_add(over(GROW_BELOW));
        self.over_halve = self.over_halve.saturating_add(over(HALVE_FROM));
        self.over_zero = self.over_zero.saturating_add(over(ZERO_FROM));
    }

    /// Judges the tail. A bad verdict needs fewer requests than a good one: as soon as more
    /// requests are late than a full verdict allows, the remaining requests cannot change the
    /// result.
    fn tail(&self, slo: &Slo) -> Tail {
        let beyond = 1_000_000u32.saturating_sub(slo.per_million);
        let allowed = u128::from(self.requests) * u128::from(beyond) / 1_000_000;
        let full = allowed >= u128::from(BEYOND);
        let too_many = |late: u64| u128::from(late) > allowed.max(u128::from(BEYOND));
        if too_many(self.over_zero) {
            Tail::AtTheSlo
        } else if too_many(self.over_halve) {
            Tail::TooNear
        } else if !full {
            Tail::Unknown
        } else if too_many(self.over_grow) {
            Tail::Near
        } else {
            Tail::Headroom
        }
    }
}

fn sum(counts: impl Iterator<Item = u64>) -> u64 {
    counts.fold(0, u64::saturating_add)
}

/// The text of an SLO is invalid.
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

/// Parses digits only; `parse` would accept a sign.
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

    /// Enough for a verdict on p99.
    const ENOUGH: u64 = 100 * BEYOND;

    /// A window in which every fiftieth request took `tail_ns`.
    fn window(requests: u64, tail_ns: u64) -> Window {
        let mut counts = [0; BUCKETS];
        let beyond = requests.div_ceil(50);
        counts[bucket_of(tail_ns / 10)] = requests - beyond;
        counts[bucket_of(tail_ns)] += beyond;
        counts
    }

    fn quiet_window() -> Window {
        window(ENOUGH, 10 * MS)
    }

    fn grown_controller() -> Controller {
        let mut controller = Controller::new(SLO);
        for _ in 0..CLIMB {
            controller.window(Some(&quiet_window()));
        }
        assert_eq!(controller.budget_ns, SLO.latency_ns);
        controller
    }

    /// With headroom in every window, no step is larger than its part of the SLO, and the maximum
    /// is the SLO's latency.
    #[test]
    fn the_budget_climbs_slowly() {
        let mut controller = Controller::new(SLO);
        let mut before_ns = 0;
        for _ in 0..2 * CLIMB {
            let budget_ns = controller.window(Some(&quiet_window()));
            assert!(budget_ns - before_ns <= SLO.latency_ns.div_ceil(CLIMB));
            before_ns = budget_ns;
        }
        assert_eq!(before_ns, SLO.latency_ns);
    }

    /// After the load steps up within one window, the next budget is smaller or zero, while the
    /// tail is still within the SLO. This takes fewer requests than growth.
    #[test]
    fn a_tail_that_nears_the_slo_cuts_the_budget_at_once() {
        assert_eq!(grown_controller().window(Some(&window(ENOUGH, 88 * MS))), SLO.latency_ns);
        assert_eq!(grown_controller().window(Some(&window(ENOUGH, 95 * MS))), SLO.latency_ns / 2);
        assert_eq!(grown_controller().window(Some(&window(ENOUGH, 99 * MS))), 0);
        let mut few = [0; BUCKETS];
        few[bucket_of(SLO.latency_ns)] = BEYOND + 1;
        assert_eq!(grown_controller().window(Some(&few)), 0);
        few[bucket_of(SLO.latency_ns)] = BEYOND;
        assert_eq!(grown_controller().window(Some(&few)), SLO.latency_ns);
    }

    /// After a burst, the budget stays down for a while, then climbs from zero.
    #[test]
    fn the_budget_does_not_return_with_the_first_quiet_window() {
        let mut controller = grown_controller();
        controller.window(Some(&window(ENOUGH, 150 * MS)));
        for _ in 0..PAUSE {
            assert_eq!(controller.window(Some(&quiet_window())), 0);
        }
        assert_eq!(controller.window(Some(&quiet_window())), SLO.latency_ns.div_ceil(CLIMB));
    }

    /// A window without requests shows no headroom: the budget is zero in it. After many such
    /// windows, or without a page, the budget starts again from zero.
    #[test]
    fn the_budget_is_zero_without_requests() {
        let silence = [0; BUCKETS];
        let mut controller = grown_controller();
        assert_eq!(controller.window(Some(&silence)), 0);
        assert_eq!(
            controller.window(Some(&quiet_window())),
            SLO.latency_ns,
            "a moment without requests"
        );
        for _ in 0..SILENT_MAX {
            assert_eq!(controller.window(Some(&silence)), 0);
        }
        assert_eq!(controller.window(Some(&quiet_window())), SLO.latency_ns.div_ceil(CLIMB));
        let mut controller = grown_controller();
        assert_eq!(controller.window(None), 0);
        assert_eq!(controller.window(Some(&window(100, 10 * MS))), 0, "100 requests show no p99");
    }

    /// Windows too small to show a p99 add up to one that does.
    #[test]
    fn sparse_windows_add_up() {
        let mut controller = Controller::new(SLO);
        let grows = (1..100).find(|_| controller.window(Some(&window(100, 10 * MS))) > 0);
        assert_eq!(grows, Some(ENOUGH / 100));
    }

    /// p99 of 2000 requests is the 1980th: twenty requests may be slow, and one more makes the tail
    /// slow.
    #[test]
    fn one_in_a_hundred_may_be_slow() {
        let budget_after = |slow: u64| {
            let mut counts = [0; BUCKETS];
            counts[bucket_of(MS)] = 2000 - slow;
            counts[bucket_of(99 * MS)] = slow;
            grown_controller().window(Some(&counts))
        };
        assert_eq!(budget_after(20), SLO.latency_ns);
        assert_eq!(budget_after(21), 0);
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
        /// Of two controllers with the same past, the one with the longer tail never sets a larger
        /// budget.
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
