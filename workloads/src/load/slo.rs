//! Whether a run kept a service level objective, and the search for the highest rate that keeps it.

use super::record::{Recorder, median};
use crate::units::show_nanos;
use elfen_rt::policy::slo::{Slo, SloError};
use std::fmt;
use std::str::FromStr;

/// "At least this share of all requests is answered well within this time", as `slo-budget` takes
/// it: `p99=100ms`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Objective(Slo);

impl FromStr for Objective {
    type Err = SloError;

    fn from_str(text: &str) -> Result<Self, SloError> {
        text.parse().map(Self)
    }
}

impl fmt::Display for Objective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percentile = f64::from(self.0.per_million) / 1e4;
        write!(f, "p{percentile} <= {}", show_nanos(self.0.latency_ns))
    }
}

impl Objective {
    pub(crate) fn quantile(&self) -> f64 {
        f64::from(self.0.per_million) / 1e6
    }

    /// The share of one invocation's requests that missed the bound; a failed request missed it,
    /// however fast it failed.
    pub(crate) fn missed_share(&self, recorder: &Recorder) -> f64 {
        let requests = recorder.requests();
        if requests == 0 {
            return 1.0;
        }
        let slow = recorder.latency.count() - recorder.latency.count_up_to(self.0.latency_ns);
        (slow + recorder.errors()) as f64 / requests as f64
    }

    /// Whether the median invocation kept the objective.
    pub(crate) fn is_met(&self, missed_shares: &[f64]) -> bool {
        median(missed_shares).is_some_and(|missed| missed <= 1.0 - self.quantile() + 1e-9)
    }
}

/// A search gives up so far below where it began.
const LOWEST_SHARE: f64 = 1.0 / 1024.0;
const MOST_PROBES: u32 = 60;

/// Which rate to try next: doubles or halves to bracket the highest good rate, then halves the
/// bracket on a logarithmic scale. Pure: the caller runs the probes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RateSearch {
    good: Option<f64>,
    bad: Option<f64>,
    first: f64,
    /// Stop when the bracket's ends differ by less than this share.
    precision: f64,
    probes: u32,
}

impl RateSearch {
    pub(crate) fn new(first_rps: f64, precision: f64) -> Self {
        Self { good: None, bad: None, first: first_rps, precision, probes: 0 }
    }

    pub(crate) fn next_rps(&self) -> Option<f64> {
        if self.probes >= MOST_PROBES {
            return None;
        }
        match (self.good, self.bad) {
            (None, None) => Some(self.first),
            (Some(good), None) => Some(good * 2.0),
            (None, Some(bad)) => Some(bad / 2.0).filter(|rps| *rps >= self.first * LOWEST_SHARE),
            (Some(good), Some(bad)) => {
                (bad > good * (1.0 + self.precision)).then(|| (good * bad).sqrt())
            }
        }
    }

    pub(crate) fn tried(&mut self, rps: f64, met: bool) {
        self.probes += 1;
        if met {
            self.good = Some(rps);
        } else {
            self.bad = Some(rps);
        }
    }

    /// The highest rate that was tried and kept the objective.
    pub(crate) fn best(&self) -> Option<f64> {
        self.good
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::protocol::{Failure, Timing};
    use crate::load::record::Sample;
    use proptest::prelude::*;

    /// Goal: objectives are shown as people read them; failures and slow answers both count as
    /// missed; exactly the allowed share passes. Method: one with decimals; 100 requests.
    #[test]
    fn failures_miss_the_objective() {
        let slo: Objective = "p99.9=5ms".parse().expect("well formed");
        assert_eq!(slo.to_string(), "p99.9 <= 5.00 ms");
        let slo: Objective = "p98=1ms".parse().expect("well formed");
        let missed = |slow: u64, failed: u64| {
            let mut recorder = Recorder::new(0, false);
            for index in 0..100 {
                let done_ns = if index < slow { 2_000_000 } else { 500_000 };
                let failed = (slow..slow + failed).contains(&index);
                recorder.record(&Sample {
                    index,
                    query: 0,
                    connection: None,
                    intended_ns: 0,
                    sent_ns: Some(0),
                    done_ns,
                    result: if failed { Err(Failure::Status(503)) } else { Ok(()) },
                    timing: Timing::default(),
                });
            }
            slo.missed_share(&recorder)
        };
        assert!(slo.is_met(&[missed(1, 1)]));
        assert!(!slo.is_met(&[missed(2, 1)]) && !slo.is_met(&[missed(0, 3)]));
        assert!(slo.is_met(&[missed(0, 0), missed(50, 0), missed(2, 0)]), "the median counts");
        assert!(
            !slo.is_met(&[slo.missed_share(&Recorder::new(0, false))]),
            "no requests, no proof"
        );
    }

    proptest! {
        /// Goal: the search ends at the border between good and bad, wherever it is. Method: any
        /// border and start.
        #[test]
        fn the_border_is_found(
            first in 0.02f64..1e6, share in 0.001f64..1_000.0, precision in 0.005f64..0.2,
        ) {
            let border = first * share;
            let mut search = RateSearch::new(first, precision);
            while let Some(rps) = search.next_rps() {
                search.tried(rps, rps <= border);
            }
            let best = search.best().expect("the lowest rate is below the border");
            let near = best <= border && best * (1.0 + precision) >= border;
            prop_assert!(near, "{best} for {border}");
        }

        /// Goal: a service that never keeps its objective ends the search without an answer.
        /// Method: any start.
        #[test]
        fn hopeless_searches_end(first in 0.02f64..1e7) {
            let mut search = RateSearch::new(first, 0.02);
            while let Some(rps) = search.next_rps() {
                search.tried(rps, false);
            }
            prop_assert_eq!(search.best(), None);
        }
    }
}
