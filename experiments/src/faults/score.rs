//! Compares the time that Tailor charged to each cause with the injectors' ground truth.

use elfen_tailor::account::{Account, charges};
use elfen_tailor::replay::quantile;
use elfen_tailor::segment::{ExplainedRequest, is_named_by};
use elfen_tailor::trace::Trace;
use serde::Serialize;

use super::injectors::Injection;
use super::recording::Stolen;

/// The result for one fault.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Score {
    /// The name of the fault.
    pub cause: &'static str,
    pub injections: usize,
    /// Requests that overlapped with the fault for at least a millisecond.
    pub touched: usize,
    /// Touched requests to which Tailor charged the overlap, within 10 % or 0.3 ms.
    pub within: usize,
    /// Touched requests in which the fault is more than half of the excess over the median latency.
    /// `named` counts those in which the explanation names the cause first.
    pub dominant: usize,
    pub named: usize,
    pub injected_ns: u64,
    pub charged_ns: u64,
    /// The first requests with a wrong charge, or with another cause named first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub missed: Vec<Mismatch>,
}

/// A request whose explanation differs from the injector's ground truth.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Mismatch {
    pub arrived_ns: u64,
    pub latency_ns: u64,
    pub injected_ns: u64,
    /// All charges, the largest first.
    pub charged: Vec<(String, u64)>,
}

#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct CheckReport {
    pub requests: usize,
    pub complete: usize,
    pub lost_events: u64,
    pub scores: Vec<Score>,
    /// The faults that could not be injected on this machine, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<String>,
    /// The time that the hypervisor stole from the services' CPU.
    pub stolen: Stolen,
    pub holds: bool,
}

impl CheckReport {
    pub(super) fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.complete += other.complete;
        self.lost_events += other.lost_events;
        for score in other.scores {
            match self.scores.iter_mut().find(|own| own.cause == score.cause) {
                Some(own) => own.add(score),
                None => self.scores.push(score),
            }
        }
        self.stolen.add(other.stolen);
    }

    /// Sets `holds`. A check without scores fails.
    pub(super) fn judge(&mut self) {
        self.holds = !self.scores.is_empty() && self.scores.iter().all(Score::holds);
    }
}

impl Score {
    /// Adds the result for the same fault in another recording.
    fn add(&mut self, other: Self) {
        self.injections += other.injections;
        self.touched += other.touched;
        self.within += other.within;
        self.dominant += other.dominant;
        self.named += other.named;
        self.injected_ns += other.injected_ns;
        self.charged_ns += other.charged_ns;
        self.missed.extend(other.missed);
        self.missed.truncate(MISMATCHES_MAX);
    }

    /// Adds a request that the fault touched.
    fn add_request(
        &mut self,
        wanted: &str,
        one: &ExplainedRequest,
        injected_ns: u64,
        median_ns: u64,
        charged: Vec<(String, u64)>,
    ) {
        // Several charges may belong to one cause: a thread may wait for a file in several
        // functions.
        let (own, others): (Vec<_>, Vec<_>) =
            charged.iter().partition(|(name, _)| is_named_by(name, wanted));
        let charged_ns: u64 = own.iter().map(|(_, ns)| *ns).sum();
        self.touched += 1;
        self.injected_ns += injected_ns;
        self.charged_ns += charged_ns;
        let tolerance_ns = TOLERANCE_NS.max(injected_ns / 10);
        let mut is_right = charged_ns.abs_diff(injected_ns) <= tolerance_ns;
        self.within += usize::from(is_right);
        let excess_ns = one.latency_ns().saturating_sub(median_ns);
        if injected_ns * 2 > excess_ns {
            self.dominant += 1;
            let is_first = charged_ns > 0 && others.iter().all(|(_, ns)| *ns <= charged_ns);
            self.named += usize::from(is_first);
            is_right &= is_first;
        }
        if !is_right && self.missed.len() < MISMATCHES_MAX {
            self.missed.push(Mismatch {
                arrived_ns: one.arrived_ns,
                latency_ns: one.latency_ns(),
                injected_ns,
                charged,
            });
        }
    }

    fn holds(&self) -> bool {
        let most = |part: usize, of: usize| part * 100 >= of * 95;
        self.touched > 0 && most(self.within, self.touched) && most(self.named, self.dominant)
    }
}

const TOUCHED_MIN_NS: u64 = 1_000_000;
const TOLERANCE_NS: u64 = 300_000;
/// The highest number of wrong requests that are kept for each cause.
const MISMATCHES_MAX: usize = 10;

/// A fault in a recording: its name, the cause to which it must be charged, and its injections.
pub(super) type Injected = (&'static str, &'static str, Vec<Injection>);

pub(super) fn score(trace: &Trace, injections: &[Injected], runs: usize) -> CheckReport {
    let account = Account::of(trace);
    let mut latencies: Vec<u64> =
        account.explained.iter().map(ExplainedRequest::latency_ns).collect();
    latencies.sort_unstable();
    let median_ns = quantile(&latencies, 500_000);
    let score_of = |(name, cause, all): &Injected| {
        let mut score = Score { cause: name, injections: runs, ..Score::default() };
        for one in &account.explained {
            let injected_ns = all.iter().map(|injection| injected_ns(injection, one)).sum();
            if injected_ns >= TOUCHED_MIN_NS {
                score.add_request(cause, one, injected_ns, median_ns, charges(one, trace));
            }
        }
        score
    };
    CheckReport {
        requests: account.explained.len() + account.incomplete.len(),
        complete: account.explained.len(),
        lost_events: trace.gaps.iter().map(|gap| gap.count).sum(),
        scores: injections.iter().map(score_of).collect(),
        ..CheckReport::default()
    }
}

/// Returns how much of the request's time the injection took.
fn injected_ns(injection: &Injection, one: &ExplainedRequest) -> u64 {
    if let Some(connection) = injection.connection {
        // The injection affects only the request itself, which its client timed. The requests
        // behind it only wait in the queue.
        let is_it = one.connection == connection
            && injection.from_ns <= one.arrived_ns
            && one.arrived_ns < injection.to_ns;
        return if is_it { injection.effective_ns } else { 0 };
    }
    one.ended_ns.min(injection.to_ns).saturating_sub(one.arrived_ns.max(injection.from_ns))
}
