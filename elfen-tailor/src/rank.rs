//! The causes of the tail, the largest first, by how much faster its requests would have been.

use std::collections::{BTreeMap, BTreeSet};

use crate::causes::{Causes, add, is_removable, sorted};
use crate::explained::Explained;
use crate::neighbours::{self, BesideRow};
use crate::queues::{Own, Queues};
use crate::replay::{Parts, Replay, quantile};
use crate::segment::{BURST, TOGETHER, WORK, total};
use crate::trace::Tale;

/// What counts as slow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Slow {
    /// Above this quantile, of a million.
    Quantile(u64),
    AboveNs(u64),
}

/// A cause and what it did to the tail.
#[derive(Clone, PartialEq, Debug, serde::Serialize)]
pub struct Row {
    pub cause: String,
    /// Of all charges of the tail.
    pub share: f64,
    pub share_ci95: (f64, f64),
    /// What a request of the tail had of it, and one of the middle, on average.
    pub tail_ns: u64,
    pub middle_ns: u64,
    pub whatif_p99_ns: Option<u64>,
    pub whatif_p999_ns: Option<u64>,
    /// Slow requests that it had a part in.
    pub requests: usize,
}

/// By how much quantiles, replayed unchanged, are off.
#[derive(Clone, Copy, PartialEq, Debug, Default, serde::Serialize)]
pub struct ReplayError {
    pub p50: f64,
    pub p99: f64,
    pub p999: f64,
}

/// Of what requests did themselves, the part that no turn of theirs explains: it was done while
/// others had theirs.
#[derive(Clone, Copy, PartialEq, Debug, Default, serde::Serialize)]
pub struct Aside {
    pub all: f64,
    /// Of slow requests.
    pub tail: f64,
}

impl Aside {
    /// More is left aside than what could be said of a change.
    pub const MOST: f64 = 0.05;

    fn of(own: &[Own], slow: &[usize]) -> Self {
        let share_of = |own: &mut dyn Iterator<Item = &Own>| {
            let (mut aside_ns, mut all_ns) = (0_u64, 0_u64);
            for one in own {
                aside_ns = aside_ns.saturating_add(one.aside_ns);
                all_ns = all_ns.saturating_add(one.all_ns);
            }
            share(aside_ns, all_ns)
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
    /// Indices of slow requests, the slowest first.
    pub slow: Vec<usize>,
    /// Of each slow request, in the same order: causes and charges, the largest first.
    pub charges: Vec<Vec<(String, u64)>>,
    pub rows: Vec<Row>,
    pub replay_error: ReplayError,
    pub replay_aside: Aside,
    /// Who ran on the other lanes of their cores, the one that did longest first.
    pub beside: Vec<BesideRow>,
    /// Latencies without the causes that were named, sorted; `None` if the replay isn't believed.
    pub without: Option<Vec<u64>>,
}

/// A cause was named that no request had.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NoSuchCause {
    pub asked: String,
    /// Those that there are, the largest first.
    pub there: Vec<String>,
}

const P50: u64 = 500_000;
const P99: u64 = 990_000;
const P999: u64 = 999_000;
/// Resamplings for an interval.
const ROUNDS: usize = 200;
/// Causes with less than this share of all time, in the tail too, are not replayed.
const MOST_CAUSES: usize = 64;

fn share(part: u64, whole: u64) -> f64 {
    use elfen_console::duration::number;
    if whole == 0 { 0.0 } else { number(part) / number(whole) }
}

/// Ranks the causes of the slow ones among complete requests, which are sorted by arrival; and says
/// what latencies would be without those that are named.
pub fn rank(
    explained: &[Explained],
    tale: &Tale,
    slow: Slow,
    without: &[String],
) -> Result<Ranking, NoSuchCause> {
    let latencies = sorted(explained.iter().map(Explained::latency_ns));
    let threshold_ns = match slow {
        Slow::Quantile(per_million) => quantile(&latencies, per_million),
        Slow::AboveNs(ns) => ns,
    };
    let mut slow: Vec<usize> =
        (0..explained.len()).filter(|&at| explained[at].latency_ns() > threshold_ns).collect();
    slow.sort_by_key(|&at| std::cmp::Reverse(explained[at].latency_ns()));
    let causes = Causes::of(explained, tale);
    let by_cause: Vec<Parts> = explained.iter().map(|one| causes.all(one)).collect();
    let queues = Queues::of(explained);
    // Who waits for his turn is in no service: what he waits behind has the time in its own.
    let queue = causes.queue();
    let replay = Replay::of(&queues.jobs, &queues.turns, |job, spans| {
        let mut parts = causes.parts(&explained[job], spans);
        parts.iter_mut().for_each(|parts| parts.retain(|(cause, _)| Some(*cause) != queue));
        parts
    });
    let unchanged = sorted(replay.without(|_, _| 0).into_iter());
    let error = |per_million| {
        let (told, seen) = (quantile(&unchanged, per_million), quantile(&latencies, per_million));
        share(told.abs_diff(seen), seen)
    };
    let replay_error = ReplayError { p50: error(P50), p99: error(P99), p999: error(P999) };
    let replay_aside = Aside::of(&queues.own, &slow);
    let absent = absent(without, &causes, &by_cause)?;
    let without = replay_aside.is_small().then(|| sorted(absent.latencies(&replay).into_iter()));
    let charged = match replay_aside.is_small() {
        true => by_replay(&replay, &by_cause, &slow, &causes),
        false => by_time(&by_cause, &slow, &causes),
    };
    let rows = rows(explained, &by_cause, &slow, &causes, &charged);
    let charges = charged.of.iter().map(|charges| {
        let mut named: Vec<(String, u64)> =
            charges.iter().map(|(cause, ns)| (charged.name(*cause, &causes), *ns)).collect();
        named.sort_by_key(|(_, ns)| std::cmp::Reverse(*ns));
        named
    });
    let charges = charges.collect();
    let beside = neighbours::rows(explained, &causes.slowing, &slow, &middle(explained));
    Ok(Ranking { threshold_ns, charges, slow, rows, replay_error, replay_aside, beside, without })
}

/// Causes that are to be taken away together.
struct Absent {
    causes: BTreeSet<usize>,
    /// And the queueing that no cause explains.
    burst: bool,
}

fn absent(names: &[String], causes: &Causes, by_cause: &[Parts]) -> Result<Absent, NoSuchCause> {
    let totals = totals(by_cause, causes);
    let mut absent = Absent { causes: BTreeSet::new(), burst: false };
    for name in names {
        if name == BURST {
            absent.burst = true;
            continue;
        }
        let meant: Vec<usize> = causes.named(name).filter(|&cause| totals[cause] > 0).collect();
        if meant.is_empty() {
            let mut there: Vec<usize> = (0..totals.len()).collect();
            there.retain(|&at| totals[at] > 0 && is_removable(&causes.names[at]));
            there.sort_by_key(|&cause| std::cmp::Reverse(totals[cause]));
            let there = there.into_iter().map(|cause| causes.names[cause].clone());
            let there = there.chain([BURST.to_owned()]).collect();
            return Err(NoSuchCause { asked: name.clone(), there });
        }
        absent.causes.extend(meant);
    }
    Ok(absent)
}

impl Absent {
    fn latencies(&self, replay: &Replay) -> Vec<u64> {
        let mut left = replay.without(|of, ns| if self.causes.contains(&of) { ns } else { 0 });
        if self.burst {
            let (bare, served) = (replay.without(|_, ns| ns), replay.served(|_, ns| ns));
            left = served_without_queue(&left, &bare, &served).collect();
        }
        left
    }
}

/// What each cause had of all requests.
fn totals(by_cause: &[Parts], causes: &Causes) -> Vec<u64> {
    let mut totals = vec![0_u64; causes.names.len()];
    for (cause, ns) in by_cause.iter().flatten() {
        totals[*cause] = totals[*cause].saturating_add(*ns);
    }
    totals
}

/// Charges of slow requests, and what the tail would be without each cause.
struct Charged {
    /// In the order of the slow requests.
    of: Vec<Vec<(usize, u64)>>,
    whatif: BTreeMap<usize, (u64, u64)>,
    /// Numbers of causes that are no kind of segment.
    burst: usize,
    together: usize,
}

impl Charged {
    fn name(&self, cause: usize, causes: &Causes) -> String {
        match cause {
            cause if cause == self.burst => BURST.to_owned(),
            cause if cause == self.together => TOGETHER.to_owned(),
            cause => causes.names[cause].clone(),
        }
    }
}

fn by_time(by_cause: &[Parts], slow: &[usize], causes: &Causes) -> Charged {
    let of = slow.iter().map(|&at| by_cause[at].clone()).collect();
    let burst = causes.names.len();
    Charged { of, whatif: BTreeMap::new(), burst, together: burst + 1 }
}

fn by_replay(replay: &Replay, by_cause: &[Parts], slow: &[usize], causes: &Causes) -> Charged {
    let (burst, together) = (causes.names.len(), causes.names.len() + 1);
    let mut charged =
        Charged { of: vec![Vec::new(); slow.len()], whatif: BTreeMap::new(), burst, together };
    let with = replay.without(|_, _| 0);
    let totals = totals(by_cause, causes);
    let mut largest: Vec<usize> = (0..totals.len()).filter(|&cause| totals[cause] > 0).collect();
    largest.sort_by_key(|&cause| std::cmp::Reverse(totals[cause]));
    largest.truncate(MOST_CAUSES);
    for &cause in &largest {
        let without = replay.without(|of, ns| if of == cause { ns } else { 0 });
        for (charges, &at) in charged.of.iter_mut().zip(slow) {
            let ns = with[at].saturating_sub(without[at]);
            if ns > 0 {
                charges.push((cause, ns));
            }
        }
        let without = sorted(without.into_iter());
        charged.whatif.insert(cause, (quantile(&without, P99), quantile(&without, P999)));
    }
    let (bare, served) = (replay.without(|_, ns| ns), replay.served(|_, ns| ns));
    for (charges, &at) in charged.of.iter_mut().zip(slow) {
        let single = total(charges.iter().map(|(_, ns)| *ns));
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

/// Latencies without the queueing that no cause explains.
fn served_without_queue<'a>(
    with: &'a [u64],
    bare: &'a [u64],
    served: &'a [u64],
) -> impl Iterator<Item = u64> + 'a {
    let queued = bare.iter().zip(served).map(|(bare, served)| bare.saturating_sub(*served));
    with.iter().zip(queued).map(|(with, queued)| with.saturating_sub(queued))
}

/// Requests from p40 to p60.
pub(crate) fn middle(explained: &[Explained]) -> Vec<usize> {
    let mut by_latency: Vec<usize> = (0..explained.len()).collect();
    by_latency.sort_by_key(|&at| explained[at].latency_ns());
    by_latency[by_latency.len() * 2 / 5..(by_latency.len() * 3).div_ceil(5)].to_vec()
}

fn rows(
    explained: &[Explained],
    by_cause: &[Parts],
    slow: &[usize],
    causes: &Causes,
    charged: &Charged,
) -> Vec<Row> {
    let mut sums: BTreeMap<usize, (u64, usize)> = BTreeMap::new();
    for (cause, ns) in charged.of.iter().flatten() {
        let (sum, requests) = sums.entry(*cause).or_default();
        (*sum, *requests) = (sum.saturating_add(*ns), *requests + 1);
    }
    let all = total(sums.values().map(|(ns, _)| *ns));
    let middle = middle(explained);
    let mean = |of: &[usize], cause: usize| {
        let parts = of
            .iter()
            .flat_map(|&at| &by_cause[at])
            .filter(|(of, _)| *of == cause)
            .map(|(_, ns)| *ns);
        total(parts) / (of.len() as u64).max(1)
    };
    let intervals = intervals(explained, slow, charged);
    let row = |(&cause, &(ns, requests)): (&usize, &(u64, usize))| Row {
        cause: charged.name(cause, causes),
        share: share(ns, all),
        share_ci95: intervals.get(&cause).copied().unwrap_or((0.0, 0.0)),
        tail_ns: ns / (slow.len() as u64).max(1),
        middle_ns: mean(&middle, cause),
        whatif_p99_ns: charged.whatif.get(&cause).map(|(p99, _)| *p99),
        whatif_p999_ns: charged.whatif.get(&cause).map(|(_, p999)| *p999),
        requests,
    };
    let mut rows: Vec<Row> = sums.iter().map(row).filter(|row| row.cause != WORK).collect();
    rows.sort_by(|a, b| b.share.total_cmp(&a.share));
    rows
}

/// Shares, if the busy periods of the service had been others: each is drawn as a whole, since
/// requests of one period share their causes.
fn intervals(
    explained: &[Explained],
    slow: &[usize],
    charged: &Charged,
) -> BTreeMap<usize, (f64, f64)> {
    let mut period_of = vec![0_usize; explained.len()];
    let (mut period, mut busy_until_ns) = (0, 0);
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
    // Any constant: the same tale has the same report.
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
        let all = total(sums.values().copied());
        for (cause, ns) in sums {
            let shares = drawn.entry(cause).or_default();
            // Rounds in which it was not drawn had none of it.
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
