//! What one invocation measured: every latency from the intended send time, and how late the sends
//! were.
//!
//! Recording a request is a few array increments, because it happens between two sends. Everything
//! else is kept only when asked for.

use super::outcome::{Failure, Timing};
use crate::units::Nanos;
use hdrhistogram::Histogram;
use std::collections::BTreeMap;

/// Three digits: a recorded value is off by less than 0.1 %.
const DIGITS: u8 = 3;
/// Longer latencies count as this long; the longest run is shorter.
const LONGEST_NS: Nanos = 24 * 3600 * 1_000_000_000;
/// Few enough that a window holds many busy periods of the service, enough for a test on their
/// order.
pub(crate) const WINDOWS: usize = 20;

/// One finished request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sample {
    pub(crate) index: u64,
    pub(crate) query: u32,
    /// Which connection carried it; `None` if none ever did.
    pub(crate) connection: Option<usize>,
    pub(crate) intended_ns: Nanos,
    /// When its first byte went to the kernel; `None` if it never did.
    pub(crate) sent_ns: Option<Nanos>,
    pub(crate) done_ns: Nanos,
    pub(crate) result: Result<(), Failure>,
    pub(crate) timing: Timing,
}

impl Sample {
    pub(crate) fn latency_ns(&self) -> Nanos {
        self.done_ns.saturating_sub(self.intended_ns)
    }

    pub(crate) fn late_ns(&self) -> Option<Nanos> {
        self.sent_ns.map(|sent| sent.saturating_sub(self.intended_ns))
    }
}

/// A histogram that also knows the exact sum and maximum.
#[derive(Clone, Debug)]
pub(crate) struct Distribution {
    histogram: Histogram<u64>,
    sum_ns: u128,
    max_ns: Nanos,
}

impl Default for Distribution {
    fn default() -> Self {
        let histogram = Histogram::new_with_bounds(1, LONGEST_NS, DIGITS)
            .expect("the bounds are constants that hdrhistogram accepts");
        Self { histogram, sum_ns: 0, max_ns: 0 }
    }
}

impl Distribution {
    pub(crate) fn record(&mut self, ns: Nanos) {
        self.histogram.saturating_record(ns);
        self.sum_ns += u128::from(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    pub(crate) fn count(&self) -> u64 {
        self.histogram.len()
    }

    pub(crate) fn quantile_ns(&self, quantile: f64) -> Nanos {
        self.histogram.value_at_quantile(quantile).min(self.max_ns)
    }

    pub(crate) fn max_ns(&self) -> Nanos {
        self.max_ns
    }

    pub(crate) fn mean_ns(&self) -> f64 {
        if self.count() == 0 { 0.0 } else { self.sum_ns as f64 / self.count() as f64 }
    }

    pub(crate) fn sum_ns(&self) -> u128 {
        self.sum_ns
    }

    /// How many values are at most `ns`.
    pub(crate) fn count_up_to(&self, ns: Nanos) -> u64 {
        if ns >= self.max_ns { self.count() } else { self.histogram.count_between(0, ns) }
    }
}

/// Mean latency over one stretch of intended send times.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Window {
    pub(crate) answers: u64,
    pub(crate) sum_ns: u128,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Keep {
    /// Requests intended before this are sent and not recorded.
    pub(crate) warmup_ns: Nanos,
    /// When the last request is planned; windows divide the time from the warm-up to here.
    pub(crate) planned_end_ns: Nanos,
    pub(crate) every_request: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Recorder {
    keep: Keep,
    /// Latency of the requests that were answered well.
    pub(crate) latency: Distribution,
    /// Actual minus intended send time, of every request that was sent.
    pub(crate) late: Distribution,
    pub(crate) queue: Distribution,
    pub(crate) service: Distribution,
    pub(crate) errors: BTreeMap<Failure, u64>,
    /// Requests that waited because no connection had room for them.
    pub(crate) waited: u64,
    pub(crate) last_intended_ns: Nanos,
    pub(crate) last_done_ns: Nanos,
    pub(crate) windows: [Window; WINDOWS],
    pub(crate) samples: Vec<Sample>,
}

impl Recorder {
    pub(crate) fn new(keep: Keep) -> Self {
        Self {
            keep,
            latency: Distribution::default(),
            late: Distribution::default(),
            queue: Distribution::default(),
            service: Distribution::default(),
            errors: BTreeMap::new(),
            waited: 0,
            last_intended_ns: 0,
            last_done_ns: 0,
            windows: [Window::default(); WINDOWS],
            samples: Vec::new(),
        }
    }

    pub(crate) fn keep(&self) -> Keep {
        self.keep
    }

    pub(crate) fn measures(&self, intended_ns: Nanos) -> bool {
        intended_ns >= self.keep.warmup_ns
    }

    pub(crate) fn record(&mut self, sample: &Sample) {
        if !self.measures(sample.intended_ns) {
            return;
        }
        self.last_intended_ns = self.last_intended_ns.max(sample.intended_ns);
        self.last_done_ns = self.last_done_ns.max(sample.done_ns);
        if let Some(late) = sample.late_ns() {
            self.late.record(late);
        }
        if self.keep.every_request {
            self.samples.push(*sample);
        }
        if let Err(failure) = sample.result {
            *self.errors.entry(failure).or_default() += 1;
            return;
        }
        let latency = sample.latency_ns();
        self.latency.record(latency);
        if let Some(queue) = sample.timing.queue_ns {
            self.queue.record(queue);
        }
        if let Some(service) = sample.timing.service_ns {
            self.service.record(service);
        }
        self.record_window(sample.intended_ns - self.keep.warmup_ns, latency);
    }

    fn record_window(&mut self, since_ns: Nanos, latency: Nanos) {
        let span = self.keep.planned_end_ns.saturating_sub(self.keep.warmup_ns).max(1);
        let at = u128::from(since_ns) * WINDOWS as u128 / u128::from(span);
        let at = usize::try_from(at).unwrap_or(WINDOWS).min(WINDOWS - 1);
        self.windows[at].answers += 1;
        self.windows[at].sum_ns += u128::from(latency);
    }

    pub(crate) fn errors(&self) -> u64 {
        self.errors.values().sum()
    }

    /// Requests that ended, well or not.
    pub(crate) fn requests(&self) -> u64 {
        self.latency.count() + self.errors()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KEEP: Keep = Keep { warmup_ns: 1_000, planned_end_ns: 101_000, every_request: true };

    fn sample(intended_ns: Nanos, latency: Nanos, result: Result<(), Failure>) -> Sample {
        Sample {
            index: intended_ns,
            query: 0,
            connection: Some(0),
            intended_ns,
            sent_ns: Some(intended_ns + 5),
            done_ns: intended_ns + latency,
            result,
            timing: Timing { queue_ns: Some(latency / 4), ..Timing::default() },
        }
    }

    /// Goal: the warm-up is left out, failures are counted and kept out of the latencies. Method:
    /// one request each.
    #[test]
    fn warmup_and_failures_are_kept_apart() {
        let mut recorder = Recorder::new(KEEP);
        recorder.record(&sample(999, 1 << 40, Ok(())));
        recorder.record(&sample(1_000, 100, Ok(())));
        recorder.record(&sample(2_000, 1 << 40, Err(Failure::Timeout)));
        assert_eq!((recorder.latency.count(), recorder.latency.max_ns()), (1, 100));
        assert_eq!((recorder.errors(), recorder.requests()), (1, 2));
        assert_eq!((recorder.late.count(), recorder.late.max_ns()), (2, 5));
        assert_eq!((recorder.queue.max_ns(), recorder.service.count()), (25, 0));
        assert_eq!(recorder.samples.len(), 2);
    }

    /// Goal: windows divide the time from warm-up to plan's end. Method: one request at each
    /// border.
    #[test]
    fn windows_follow_the_intended_time() {
        let mut recorder = Recorder::new(KEEP);
        for at in [1_000, 5_999, 6_000, 100_999, 150_000] {
            recorder.record(&sample(at, 10, Ok(())));
        }
        let answers = recorder.windows.map(|window| window.answers);
        assert_eq!((answers[0], answers[1], answers[19]), (2, 1, 2));
    }

    proptest! {
        // A recorder is a megabyte of histograms.
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Goal: quantiles are right to 0.1 %, whatever was recorded. Method: any values against
        /// the sorted list.
        #[test]
        fn quantiles_are_right(
            mut values in proptest::collection::vec(1u64..10_000_000_000, 1..400),
            quantile in 0.0f64..=1.0,
        ) {
            let mut distribution = Distribution::default();
            values.iter().for_each(|value| distribution.record(*value));
            values.sort_unstable();
            let rank = (quantile * values.len() as f64).ceil().max(1.0);
            let ranked = values.iter().zip(1u32..).find(|(_, n)| f64::from(*n) >= rank);
            let (exact, _) = ranked.expect("a quantile has a rank");
            let got = distribution.quantile_ns(quantile) as f64;
            prop_assert!((got / *exact as f64 - 1.0).abs() < 0.001, "{got} instead of {exact}");
            let mean = values.iter().sum::<u64>() as f64 / values.len() as f64;
            prop_assert!((distribution.mean_ns() / mean - 1.0).abs() < 1e-9);
        }
    }
}
