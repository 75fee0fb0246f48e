//! Compares the time charged to requests with the injectors' ground truth.

use std::collections::BTreeMap;

use elfen_tailor::account::{Account, charges};
use elfen_tailor::replay::quantile;
use elfen_tailor::segment::ExplainedRequest;
use elfen_tailor::segment::{BURST, LONG, is_named_by};
use elfen_tailor::trace::Trace;
use serde::Serialize;

use super::inject::{HOG, Injection, RIVAL};
use super::server::HOLDER;
use super::steal::Stolen;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum InjectedCause {
    Stop,
    Hog,
    Rival,
    Lock,
    Long,
    Io,
    Burst,
    Nagle,
    Softirq,
    Gc,
    Fresh,
}

impl InjectedCause {
    pub const ALL: [Self; 11] = [
        Self::Stop,
        Self::Hog,
        Self::Rival,
        Self::Lock,
        Self::Long,
        Self::Io,
        Self::Burst,
        Self::Nagle,
        Self::Softirq,
        Self::Gc,
        Self::Fresh,
    ];
}

impl InjectedCause {
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Hog => "hog",
            Self::Rival => "rival",
            Self::Lock => "lock",
            Self::Long => "long",
            Self::Io => "io",
            Self::Burst => "burst",
            Self::Nagle => "nagle",
            Self::Softirq => "softirq",
            Self::Gc => "gc",
            Self::Fresh => "fresh",
        }
    }

    /// Whether it can be injected into any of our services; other causes need one of their own.
    pub fn works_on_any_service(self) -> bool {
        !matches!(self, Self::Rival | Self::Softirq | Self::Gc | Self::Fresh)
    }

    /// The cause to take out for a prediction without it.
    pub(super) fn removed_cause(self) -> String {
        match self {
            Self::Long => LONG.to_owned(),
            Self::Burst => BURST.to_owned(),
            other => other.cause(),
        }
    }

    /// What the explanation calls it.
    pub(super) fn cause(self) -> String {
        match self {
            Self::Stop => "stopped".to_owned(),
            Self::Hog => format!("preempted:{HOG}"),
            Self::Rival => format!("preempted:{RIVAL}"),
            Self::Lock => format!("lock:{HOLDER}"),
            Self::Long => "work".to_owned(),
            Self::Io => "io:page-fault".to_owned(),
            Self::Burst => "queue".to_owned(),
            Self::Nagle => "tcp-out".to_owned(),
            Self::Softirq => "softirq:NET_RX".to_owned(),
            Self::Gc => "gc".to_owned(),
            Self::Fresh => "classload".to_owned(),
        }
    }
}

/// The result of one cause.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Score {
    pub cause: InjectedCause,
    pub injections: usize,
    /// Requests that it overlapped for at least a millisecond.
    pub touched: usize,
    /// Touched requests that were charged the overlap, within 10 % or 0.3 ms.
    pub within: usize,
    /// Touched requests in which the cause is more than half of the excess; `named` counts those
    /// that have it first.
    pub dominant: usize,
    pub named: usize,
    pub injected_ns: u64,
    pub charged_ns: u64,
    /// The first requests that were charged a wrong time, or had another cause first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub missed: Vec<Mismatch>,
}

/// A request whose explanation differs from its injector.
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
    /// Causes that could not be injected here, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<String>,
    /// Of the services' CPU.
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

    /// Without any score the check fails.
    pub(super) fn judge(&mut self) {
        self.holds = !self.scores.is_empty() && self.scores.iter().all(Score::holds);
    }
}

impl Score {
    /// Adds the result of another recording.
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

    fn holds(&self) -> bool {
        let most = |part: usize, of: usize| part * 100 >= of * 95;
        self.touched > 0 && most(self.within, self.touched) && most(self.named, self.dominant)
    }
}

const TOUCHED_MIN_NS: u64 = 1_000_000;
const TOLERANCE_NS: u64 = 300_000;
/// Limit of wrong requests that are kept for each cause.
const MISMATCHES_MAX: usize = 10;

pub(super) type Injections = BTreeMap<InjectedCause, Vec<Injection>>;

pub(super) fn score(trace: &Trace, injections: &Injections, times: usize) -> CheckReport {
    let account = Account::of(trace);
    let mut latencies: Vec<u64> =
        account.explained.iter().map(ExplainedRequest::latency_ns).collect();
    latencies.sort_unstable();
    let median_ns = quantile(&latencies, 500_000);
    let scores: Vec<Score> = injections
        .iter()
        .map(|(&kind, of)| score_of((kind, of, times), trace, &account, median_ns))
        .collect();
    CheckReport {
        requests: account.explained.len() + account.incomplete.len(),
        complete: account.explained.len(),
        lost_events: trace.gaps.iter().map(|gap| gap.count).sum(),
        scores,
        ..CheckReport::default()
    }
}

fn score_of(
    (kind, injections, times): (InjectedCause, &[Injection], usize),
    trace: &Trace,
    account: &Account,
    median_ns: u64,
) -> Score {
    let wanted = kind.cause();
    let mut score = Score {
        cause: kind,
        injections: times,
        touched: 0,
        within: 0,
        dominant: 0,
        named: 0,
        injected_ns: 0,
        charged_ns: 0,
        missed: Vec::new(),
    };
    for one in &account.explained {
        let injected_ns: u64 = injections.iter().map(|injection| injected_ns(injection, one)).sum();
        if injected_ns < TOUCHED_MIN_NS {
            continue;
        }
        let charges = charges(one, trace);
        // Several names may stand for one cause: a file may be waited for in several functions.
        let (own, others): (Vec<_>, Vec<_>) =
            charges.iter().partition(|(name, _)| is_named_by(name, &wanted));
        let charged_ns: u64 = own.iter().map(|(_, ns)| *ns).sum();
        score.touched += 1;
        score.injected_ns += injected_ns;
        score.charged_ns += charged_ns;
        let tolerance_ns = TOLERANCE_NS.max(injected_ns / 10);
        let mut is_right = charged_ns.abs_diff(injected_ns) <= tolerance_ns;
        score.within += usize::from(is_right);
        let excess_ns = one.latency_ns().saturating_sub(median_ns);
        if injected_ns * 2 > excess_ns {
            score.dominant += 1;
            let is_first = charged_ns > 0 && others.iter().all(|(_, ns)| *ns <= charged_ns);
            score.named += usize::from(is_first);
            is_right &= is_first;
        }
        if !is_right && score.missed.len() < MISMATCHES_MAX {
            score.missed.push(Mismatch {
                arrived_ns: one.arrived_ns,
                latency_ns: one.latency_ns(),
                injected_ns,
                charged: charges,
            });
        }
    }
    score
}

/// How much of a request's time an injection took.
fn injected_ns(injection: &Injection, one: &ExplainedRequest) -> u64 {
    if let Some(connection) = injection.connection {
        // Only the request itself, whose client took its times. Requests behind it only queue.
        let is_it = one.connection == connection
            && injection.from_ns <= one.arrived_ns
            && one.arrived_ns < injection.to_ns;
        return if is_it { injection.effective_ns } else { 0 };
    }
    one.ended_ns.min(injection.to_ns).saturating_sub(one.arrived_ns.max(injection.from_ns))
}
