//! `slo-budget`: the user states the SLO, and the budget follows the measured tail. Ours; not in
//! the thesis.
//!
//! Two parts that meet in the control page. At a check, `slo-budget` is `refresh-budget` with the
//! budget found there ([`super::Policy::SloBudget`]). That budget is set here, once a window, by
//! the keeper's [`Controller`]: up slowly while the tail has headroom, down fast when it nears the
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

/// A verdict on the tail takes as many requests as have this many beyond the quantile: for p99,
/// 1600. Half of that cuts the budget by chance too often, twice that sees a burst too late
/// (`elfen lab plan` over a simulated day with bursts).
const BEYOND: u64 = 16;

/// The full range of the budget is climbed in this many verdicts.
const CLIMB: u64 = 8;

/// Verdicts without growth after the budget was cut: bursts come in trains.
const REST: u32 = 2;

/// After this many windows without a request, what was known before them is out of date.
const SILENCE: u32 = 8;

/// Where the tail stands between 0 and the SLO, in sixteenths. Buckets are a sixteenth wide and a
/// request counts as the longest of its bucket, so a tail found at the SLO is still below it.
const GROW_BELOW: u64 = 13;
const HALVE_FROM: u64 = 15;
const ZERO_FROM: u64 = 16;

/// Sets the budget of `slo-budget`, window by window.
#[derive(Clone, Debug)]
pub struct Controller {
    slo: Slo,
    budget_ns: u64,
    /// Good verdicts until the budget may grow again.
    rest: u32,
    /// Windows without a request until now.
    silent: u32,
    gathered: Gathered,
}

/// Requests since the last verdict, and those of them that took longer than a mark.
#[derive(Clone, Copy, Debug, Default)]
struct Gathered {
    requests: u64,
    over_grow: u64,
    over_halve: u64,
    over_zero: u64,
}

/// What the requests so far say about the tail.
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
        Self { slo, budget_ns: 0, rest: 0, silent: 0, gathered: Gathered::default() }
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
            if self.silent >= SILENCE {
                *self = Self::new(self.slo);
            }
            return 0;
        }
        self.silent = 0;
        self.gathered.add(counts, self.slo.latency_ns);
        let tail = self.gathered.tail(&self.slo);
        if tail != Tail::Unknown {
            self.gathered = Gathered::default();
        }
        match tail {
            Tail::Unknown | Tail::Near => {}
            Tail::Headroom if self.rest > 0 => self.rest -= 1,
            Tail::Headroom => {
                let step_ns = self.slo.latency_ns.div_ceil(CLIMB);
                self.budget_ns = self.budget_ns.saturating_add(step_ns).min(self.slo.latency_ns);
            }
            Tail::TooNear => (self.budget_ns, self.rest) = (self.budget_ns / 2, REST),
            Tail::AtTheSlo => (self.budget_ns, self.rest) = (0, REST),
        }
        self.budget_ns
    }
}

impl Gathered {
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

    /// Bad news does not wait for the last request: as soon as more are late than a full verdict
    /// allows, the rest cannot make up for it.
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

    fn quiet() -> Window {
        window(ENOUGH, 10 * MS)
    }

    fn grown() -> Controller {
        let mut controller = Controller::new(SLO);
        for _ in 0..CLIMB {
            controller.window(Some(&quiet()));
        }
        assert_eq!(controller.budget_ns, SLO.latency_ns);
        controller
    }

    /// Headroom in every window: no step is larger than its part of the SLO, and the top is the
    /// SLO's latency.
    #[test]
    fn the_budget_climbs_slowly() {
        let mut controller = Controller::new(SLO);
        let mut before_ns = 0;
        for _ in 0..2 * CLIMB {
            let budget_ns = controller.window(Some(&quiet()));
            assert!(budget_ns - before_ns <= SLO.latency_ns.div_ceil(CLIMB));
            before_ns = budget_ns;
        }
        assert_eq!(before_ns, SLO.latency_ns);
    }

    /// The load steps up within one window: the very next budget is smaller or zero, while the tail
    /// is still within the SLO; and that takes fewer requests than growth.
    #[test]
    fn a_tail_that_nears_the_slo_takes_the_budget_at_once() {
        assert_eq!(grown().window(Some(&window(ENOUGH, 88 * MS))), SLO.latency_ns);
        assert_eq!(grown().window(Some(&window(ENOUGH, 95 * MS))), SLO.latency_ns / 2);
        assert_eq!(grown().window(Some(&window(ENOUGH, 99 * MS))), 0);
        let mut few = [0; BUCKETS];
        few[bucket_of(SLO.latency_ns)] = BEYOND + 1;
        assert_eq!(grown().window(Some(&few)), 0);
        few[bucket_of(SLO.latency_ns)] = BEYOND;
        assert_eq!(grown().window(Some(&few)), SLO.latency_ns);
    }

    /// A burst is over: the budget stays down for a while, then climbs from zero.
    #[test]
    fn the_budget_does_not_come_back_with_the_first_quiet_window() {
        let mut controller = grown();
        controller.window(Some(&window(ENOUGH, 150 * MS)));
        for _ in 0..REST {
            assert_eq!(controller.window(Some(&quiet())), 0);
        }
        assert_eq!(controller.window(Some(&quiet())), SLO.latency_ns.div_ceil(CLIMB));
    }

    /// Silence is no headroom: the budget is gone while it lasts, and has to be earned anew if it
    /// lasts long or the page is gone.
    #[test]
    fn silence_ends_the_budget() {
        let silence = [0; BUCKETS];
        let mut controller = grown();
        assert_eq!(controller.window(Some(&silence)), 0);
        assert_eq!(controller.window(Some(&quiet())), SLO.latency_ns, "a moment without requests");
        for _ in 0..SILENCE {
            assert_eq!(controller.window(Some(&silence)), 0);
        }
        assert_eq!(controller.window(Some(&quiet())), SLO.latency_ns.div_ceil(CLIMB));
        let mut controller = grown();
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

    /// p99 of 2000 requests is the 1980th: twenty may be slow, the next one is the tail.
    #[test]
    fn one_in_a_hundred_may_be_slow() {
        let budget_after = |slow: u64| {
            let mut counts = [0; BUCKETS];
            counts[bucket_of(MS)] = 2000 - slow;
            counts[bucket_of(99 * MS)] = slow;
            grown().window(Some(&counts))
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
