//! Ranks the causes of the tail by how much faster slow requests would have been without each
//! cause.

use std::collections::{BTreeMap, BTreeSet};

use crate::causes::{Causes, add, is_removable, sorted};
use crate::long_code::LongCode;
use crate::neighbours::{self, NeighbourRow};
use crate::queues::{OwnTime, Queues};
use crate::replay::{Parts, Replay, quantile};
use crate::segment::{BURST, COMBINED, ExplainedRequest, WORK, saturating_sum};
use crate::trace::Trace;

/// The limit above which requests count as slow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlowThreshold {
    /// Requests above this quantile, in millionths.
    Quantile(u64),
    AboveNs(u64),
}

/// A cause and its effect on the tail.
#[derive(Clone, PartialEq, Debug, serde::Serialize)]
pub struct RankedCause {
    pub cause: String,
    /// The cause's share of all charges of slow requests.
    pub share: f64,
    pub share_ci95: (f64, f64),
    /// The mean charge of a slow request, and the mean time of a request in the middle.
    pub tail_ns: u64,
    pub middle_ns: u64,
    pub whatif_p99_ns: Option<u64>,
    pub whatif_p999_ns: Option<u64>,
    /// The number of slow requests that this cause contributed to.
    pub requests: usize,
}

/// The relative error of quantiles in a replay without a change.
#[derive(Clone, Copy, PartialEq, Debug, Default, serde::Serialize)]
pub struct ReplayError {
    pub p50: f64,
    pub p99: f64,
    pub p999: f64,
}

/// The share of the requests' own time outside of their service slots, during slots of other
/// requests.
#[derive(Clone, Copy, PartialEq, Debug, Default, serde::Serialize)]
pub struct OffSlot {
    pub all: f64,
    /// The same for slow requests.
    pub tail: f64,
}

impl OffSlot {
    /// Above this share, predictions of the replay are not used.
    pub const MOST: f64 = 0.05;

    fn of(own: &[OwnTime], slow: &[usize]) -> Self {
        let share_of = |own: &mut dyn Iterator<Item = &OwnTime>| {
            let mut off_slot_ns = 0_u64;
            let mut all_ns = 0_u64;
            for one in own {
                off_slot_ns = off_slot_ns.saturating_add(one.off_slot_ns);
                all_ns = all_ns.saturating_add(one.all_ns);
            }
            share(off_slot_ns, all_ns)
        };
        let tail = share_of(&mut slow.iter().map(|&at| &own[at]));
        Self { all: share_of(&mut own.iter()), tail }
    }

    pub fn is_small(&self) -> bool {
        self.all <= Self::MOST && self.tail <= Self::MOST
    }
}

#[derive(Clone, PartialEq, Debug)]
pub struct Ranking {
    pub threshold_ns: u64,
    /// Indices of the slow requests, the slowest first.
    pub slow: Vec<usize>,
    /// The causes and charges of each slow request, in the same order. The largest charge is first.
    pub charges: Vec<Vec<(String, u64)>>,
    pub rows: Vec<RankedCause>,
    pub replay_error: ReplayError,
    pub replay_aside: OffSlot,
    /// What ran on the other lanes of the service's cores, the longest time first.
    pub beside: Vec<NeighbourRow>,
    /// The functions behind `long`, if a clock has sampled the service.
    pub long_code: Option<LongCode>,
    /// Sorted latencies without the named causes; `None` if the replay is not valid.
    pub without: Option<Vec<u64>>,
}

/// The user named a cause that no request has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NoSuchCause {
    pub requested: String,
    /// The causes that requests have, the largest first.
    pub available: Vec<String>,
}

const P50: u64 = 500_000;
const P99: u64 = 990_000;
const P999: u64 = 999_000;
/// The number of resamplings for a confidence interval.
const ROUNDS: usize = 200;
/// The most causes that are replayed, the largest first.
const CAUSES_REPLAYED_MAX: usize = 64;

fn share(part: u64, whole: u64) -> f64 {
    use elfen_console::duration::number;
    if whole == 0 { 0.0 } else { number(part) / number(whole) }
}

/// Ranks the causes of slow requests, and predicts the latencies without the causes in `without`.
/// `explained` holds complete requests, sorted by arrival.
pub fn rank(
    explained: &[ExplainedRequest],
    trace: &Trace,
    slow: SlowThreshold,
    without: &[String],
) -> Result<Ranking, NoSuchCause> {
    let latencies = sorted(explained.iter().map(ExplainedRequest::latency_ns));
    let threshold_ns = match slow {
        SlowThreshold::Quantile(per_million) => quantile(&latencies, per_million),
        SlowThreshold::AboveNs(ns) => ns,
    };
    let mut slow: Vec<usize> =
        (0..explained.len()).filter(|&at| explained[at].latency_ns() > threshold_ns).collect();
    slow.sort_by_key(|&at| std::cmp::Reverse(explained[at].latency_ns()));
    let causes = Causes::of(explained, trace);
    let by_cause: Vec<Parts> = explained.iter().map(|one| causes.parts_of_request(one)).collect();
    let queues = Queues::of(explained);
    // Queueing is not a part of a request's service: its time is the service of the requests that
    // were served meanwhile.
    let queue = causes.queue_cause();
    let replay = Replay::of(&queues.jobs, &queues.slots, |job, spans| {
        let mut parts = causes.parts_in_spans(&explained[job], spans);
        for parts in &mut parts {
            parts.retain(|(cause, _)| Some(*cause) != queue);
        }
        parts
    });
    let unchanged = sorted(replay.latencies_without(|_, _| 0).into_iter());
    let error = |per_million| {
        let (replayed, recorded) =
            (quantile(&unchanged, per_million), quantile(&latencies, per_million));
        share(replayed.abs_diff(recorded), recorded)
    };
    let replay_error = ReplayError { p50: error(P50), p99: error(P99), p999: error(P999) };
    let replay_aside = OffSlot::of(&queues.own, &slow);
    let removed = removed_causes(without, &causes, &by_cause)?;
    let without = replay_aside.is_small().then(|| sorted(removed.latencies(&replay).into_iter()));
    let charged = if replay_aside.is_small() {
        by_replay(&replay, &by_cause, &slow, &causes)
    } else {
        by_time(&by_cause, &slow, &causes)
    };
    let rows = rows(explained, &by_cause, &slow, &causes, &charged);
    let charges = charged.of.iter().map(|charges| {
        let mut named: Vec<(String, u64)> =
            charges.iter().map(|(cause, ns)| (charged.name(*cause, &causes), *ns)).collect();
        named.sort_by_key(|(_, ns)| std::cmp::Reverse(*ns));
        named
    });
    let charges = charges.collect();
    let beside = neighbours::rows(explained, &causes.costs, &slow, &middle_requests(explained));
    let long = slow.iter().copied().filter(|&at| causes.is_long(&by_cause[at])).collect();
    let long_code = LongCode::of(explained, trace, &long);
    Ok(Ranking {
        threshold_ns,
        charges,
        slow,
        rows,
        replay_error,
        replay_aside,
        beside,
        long_code,
        without,
    })
}

/// Causes that are removed together.
struct RemovedCauses {
    causes: BTreeSet<usize>,
    /// Whether queueing that no cause explains is also removed.
    burst: bool,
}

fn removed_causes(
    names: &[String],
    causes: &Causes,
    by_cause: &[Parts],
) -> Result<RemovedCauses, NoSuchCause> {
    let totals = totals(by_cause, causes);
    let mut removed = RemovedCauses { causes: BTreeSet::new(), burst: false };
    for name in names {
        if name == BURST {
            removed.burst = true;
            continue;
        }
        let meant: Vec<usize> = causes.matching(name).filter(|&cause| totals[cause] > 0).collect();
        if meant.is_empty() {
            let mut available: Vec<usize> = (0..totals.len()).collect();
            available.retain(|&at| totals[at] > 0 && is_removable(&causes.names[at]));
            available.sort_by_key(|&cause| std::cmp::Reverse(totals[cause]));
            let available = available.into_iter().map(|cause| causes.names[cause].clone());
            let available = available.chain([BURST.to_owned()]).collect();
            return Err(NoSuchCause { requested: name.clone(), available });
        }
        removed.causes.extend(meant);
    }
    Ok(removed)
}

impl RemovedCauses {
    fn latencies(&self, replay: &Replay) -> Vec<u64> {
        let mut left =
            replay.latencies_without(|of, ns| if self.causes.contains(&of) { ns } else { 0 });
        if self.burst {
            let (bare, served) =
                (replay.latencies_without(|_, ns| ns), replay.service_times_without(|_, ns| ns));
            left = served_without_queue(&left, &bare, &served).collect();
        }
        left
    }
}

/// The total time of each cause.
fn totals(by_cause: &[Parts], causes: &Causes) -> Vec<u64> {
    let mut totals = vec![0_u64; causes.names.len()];
    for (cause, ns) in by_cause.iter().flatten() {
        totals[*cause] = totals[*cause].saturating_add(*ns);
    }
    totals
}

/// What slow requests are charged with, and the predicted tail without each cause.
struct TailCharges {
    /// The charges of each slow request, in the order of the slow requests.
    of: Vec<Vec<(usize, u64)>>,
    whatif: BTreeMap<usize, (u64, u64)>,
    /// The indices of the causes that are not kinds of segments.
    burst: usize,
    together: usize,
}

impl TailCharges {
    fn name(&self, cause: usize, causes: &Causes) -> String {
        match cause {
            cause if cause == self.burst => BURST.to_owned(),
            cause if cause == self.together => COMBINED.to_owned(),
            cause => causes.names[cause].clone(),
        }
    }
}

fn by_time(by_cause: &[Parts], slow: &[usize], causes: &Causes) -> TailCharges {
    let of = slow.iter().map(|&at| by_cause[at].clone()).collect();
    let burst = causes.names.len();
    TailCharges { of, whatif: BTreeMap::new(), burst, together: burst + 1 }
}

fn by_replay(replay: &Replay, by_cause: &[Parts], slow: &[usize], causes: &Causes) -> TailCharges {
    let burst = causes.names.len();
    let together = causes.names.len() + 1;
    let mut charged =
        TailCharges { of: vec![Vec::new(); slow.len()], whatif: BTreeMap::new(), burst, together };
    let with = replay.latencies_without(|_, _| 0);
    let totals = totals(by_cause, causes);
    let mut largest: Vec<usize> = (0..totals.len()).filter(|&cause| totals[cause] > 0).collect();
    largest.sort_by_key(|&cause| std::cmp::Reverse(totals[cause]));
    largest.truncate(CAUSES_REPLAYED_MAX);
    for &cause in &largest {
        let without = replay.latencies_without(|of, ns| if of == cause { ns } else { 0 });
        for (charges, &at) in charged.of.iter_mut().zip(slow) {
            let ns = with[at].saturating_sub(without[at]);
            if ns > 0 {
                charges.push((cause, ns));
            }
        }
        let without = sorted(without.into_iter());
        charged.whatif.insert(cause, (quantile(&without, P99), quantile(&without, P999)));
    }
    let (bare, served) =
        (replay.latencies_without(|_, ns| ns), replay.service_times_without(|_, ns| ns));
    for (charges, &at) in charged.of.iter_mut().zip(slow) {
        let single = saturating_sum(charges.iter().map(|(_, ns)| *ns));
        let all = with[at].saturating_sub(bare[at]);
        let left = bare[at].saturating_sub(served[at]);
        for (cause, ns) in [(together, all.saturating_sub(single)), (burst, left)] {
            if ns > 0 {
                charges.push((cause, ns));
            }
        }
    }
    let without_queue = sorted(served_without_queue(&with, &bare, &served));
    charged.whatif.insert(burst, (quantile(&without_queue, P99), quantile(&without_queue, P999)));
    charged
}

/// Latencies without the queueing that remains even if all causes are removed.
fn served_without_queue<'a>(
    with: &'a [u64],
    bare: &'a [u64],
    served: &'a [u64],
) -> impl Iterator<Item = u64> + 'a {
    let queued = bare.iter().zip(served).map(|(bare, served)| bare.saturating_sub(*served));
    with.iter().zip(queued).map(|(with, queued)| with.saturating_sub(queued))
}

/// Indices of the requests between the 40th and the 60th percentile.
pub(crate) fn middle_requests(explained: &[ExplainedRequest]) -> Vec<usize> {
    let mut by_latency: Vec<usize> = (0..explained.len()).collect();
    by_latency.sort_by_key(|&at| explained[at].latency_ns());
    by_latency[by_latency.len() * 2 / 5..(by_latency.len() * 3).div_ceil(5)].to_vec()
}

fn rows(
    explained: &[ExplainedRequest],
    by_cause: &[Parts],
    slow: &[usize],
    causes: &Causes,
    charged: &TailCharges,
) -> Vec<RankedCause> {
    let mut sums: BTreeMap<usize, (u64, usize)> = BTreeMap::new();
    for (cause, ns) in charged.of.iter().flatten() {
        let (sum, requests) = sums.entry(*cause).or_default();
        *sum = sum.saturating_add(*ns);
        *requests += 1;
    }
    let all = saturating_sum(sums.values().map(|(ns, _)| *ns));
    let middle = middle_requests(explained);
    let mean = |of: &[usize], cause: usize| {
        let parts = of
            .iter()
            .flat_map(|&at| &by_cause[at])
            .filter(|(of, _)| *of == cause)
            .map(|(_, ns)| *ns);
        saturating_sum(parts) / (of.len() as u64).max(1)
    };
    let intervals = intervals(explained, slow, charged);
    let row = |(&cause, &(ns, requests)): (&usize, &(u64, usize))| RankedCause {
        cause: charged.name(cause, causes),
        share: share(ns, all),
        share_ci95: intervals.get(&cause).copied().unwrap_or((0.0, 0.0)),
        tail_ns: ns / (slow.len() as u64).max(1),
        middle_ns: mean(&middle, cause),
        whatif_p99_ns: charged.whatif.get(&cause).map(|(p99, _)| *p99),
        whatif_p999_ns: charged.whatif.get(&cause).map(|(_, p999)| *p999),
        requests,
    };
    let mut rows: Vec<RankedCause> = sums.iter().map(row).filter(|row| row.cause != WORK).collect();
    rows.sort_by(|a, b| b.share.total_cmp(&a.share));
    rows
}

/// Bootstrap intervals of the shares. The bootstrap resamples whole busy periods, because the
/// requests of one period share their causes.
fn intervals(
    explained: &[ExplainedRequest],
    slow: &[usize],
    charged: &TailCharges,
) -> BTreeMap<usize, (f64, f64)> {
    let mut period_of = vec![0_usize; explained.len()];
    let mut period = 0;
    let mut busy_until_ns = 0;
    for (at, one) in explained.iter().enumerate() {
        if one.arrived_ns > busy_until_ns {
            period += 1;
        }
        busy_until_ns = busy_until_ns.max(one.ended_ns);
        period_of[at] = period;
    }
    let mut periods: BTreeMap<usize, BTreeMap<usize, u64>> = BTreeMap::new();
    for (&at, charges) in slow.iter().zip(&charged.of) {
        let sums = periods.entry(period_of[at]).or_default();
        for (cause, ns) in charges {
            add(sums, *cause, *ns);
        }
    }
    let periods: Vec<BTreeMap<usize, u64>> = periods.into_values().collect();
    if periods.is_empty() {
        return BTreeMap::new();
    }
    let mut drawn: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    // A constant seed, so that the same trace gives the same report.
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for round in 0..ROUNDS {
        let mut sums: BTreeMap<usize, u64> = BTreeMap::new();
        for _ in 0..periods.len() {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let at = usize::try_from(random % periods.len() as u64).unwrap_or(0);
            for (cause, ns) in &periods[at] {
                add(&mut sums, *cause, *ns);
            }
        }
        let all = saturating_sum(sums.values().copied());
        for (cause, ns) in sums {
            let shares = drawn.entry(cause).or_default();
            // In earlier rounds without this cause its share was 0.
            shares.resize(round, 0.0);
            shares.push(share(ns, all));
        }
    }
    let interval = |mut shares: Vec<f64>| {
        shares.resize(ROUNDS, 0.0);
        shares.sort_by(f64::total_cmp);
        (shares[ROUNDS / 40], shares[ROUNDS - 1 - ROUNDS / 40])
    };
    drawn.into_iter().map(|(cause, shares)| (cause, interval(shares))).collect()
}
