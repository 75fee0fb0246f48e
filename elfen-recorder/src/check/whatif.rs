//! Is a what-if to be believed here? Recordings with a cause and without any take turns, and the
//! p99 that the former foresees without its cause is held against that of the latter.

use std::io;
use std::time::Duration;

use elfen_kernel::events::Detail;
use elfen_tailor::rank::SlowThreshold;
use elfen_tailor::report::{Report, report};
use serde::Serialize;

use super::load::Load;
use super::recording::{Recorded, Subject, recorded};
use super::server::Served;
use super::{Failed, Kind, Plan, hurt, stage};

/// Threads that serve, by turns.
const WORKERS: [usize; 2] = [1, 4];
/// How far the median may be off.
const TOLERANCE: f64 = 0.15;

/// What was foreseen of one cause.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Foreseen {
    pub workers: usize,
    pub cause: Kind,
    pub pairs: usize,
    /// Of those, in which nothing was foreseen, as the replay was off.
    pub replay_off: usize,
    /// Medians: with the cause, without it as foreseen, and without it.
    pub with_p99_ns: u64,
    pub foreseen_p99_ns: Option<u64>,
    pub seen_p99_ns: u64,
    /// The median of what was foreseen by what was seen.
    pub ratio: Option<f64>,
    pub ratios: Vec<f64>,
}

impl Foreseen {
    /// In half of the pairs at least: what is foreseen seldom is not shown to be right.
    pub fn is_foreseen(&self) -> bool {
        self.ratio.is_some() && self.replay_off * 2 <= self.pairs
    }

    /// Nothing foreseen is nothing that holds: it was asked for.
    pub fn holds(&self) -> bool {
        self.is_foreseen() && self.ratio.is_some_and(|ratio| (ratio - 1.0).abs() <= TOLERANCE)
    }
}

#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct WhatIf {
    pub rows: Vec<Foreseen>,
    pub holds: bool,
}

/// Of one cause in one pair.
struct Pair {
    with_ns: u64,
    foreseen_ns: Option<u64>,
    seen_ns: u64,
}

/// Each kind of the plan in so many pairs, of recordings as long as its injections take.
pub fn foresee(plan: &Plan, pairs: usize) -> Result<WhatIf, Failed> {
    let cpu = stage()?;
    let mut rows = Vec::new();
    for workers in WORKERS {
        let served = Served::start(cpu, false, workers)?;
        let port = served.port;
        let mut subject = Subject { served, port, cpu };
        let mut all: Vec<Vec<Pair>> = plan.kinds.iter().map(|_| Vec::new()).collect();
        for _ in 0..pairs {
            let mut foreseen = Vec::new();
            for &kind in &plan.kinds {
                let times = Plan { kinds: vec![kind], ..plan.clone() };
                let told;
                (told, subject) = turn(subject, plan, Some(kind), move |served: &mut Served| {
                    hurt(&times, served, port, cpu).map(drop)
                })?;
                let without_ns = told.without.as_ref().and_then(|w| w.latency_ns).map(|l| l.p99);
                foreseen.push((told.latency_ns.p99, without_ns));
            }
            let time = plan.every * plan.injections;
            let told;
            (told, subject) = turn(subject, plan, None, move |_: &mut Served| {
                std::thread::sleep(time);
                Ok(())
            })?;
            let seen_ns = told.latency_ns.p99;
            for (of, (with_ns, foreseen_ns)) in all.iter_mut().zip(foreseen) {
                of.push(Pair { with_ns, foreseen_ns, seen_ns });
            }
        }
        let rows_of = plan.kinds.iter().zip(all);
        rows.extend(rows_of.map(|(&cause, of)| row(workers, cause, &of)));
    }
    let holds = rows.iter().all(Foreseen::holds);
    Ok(WhatIf { rows, holds })
}

/// Records a service while something is done to it, and reports on it without a cause.
fn turn(
    subject: Subject<Served>,
    plan: &Plan,
    without: Option<Kind>,
    act: impl FnOnce(&mut Served) -> io::Result<()> + Send + 'static,
) -> Result<(Report, Subject<Served>), Failed> {
    let Recorded { trace, subject, .. } =
        recorded(subject, Detail::Sched, Load::uneven(plan.requests_a_second), act)?;
    let without: Vec<String> = without.iter().map(|kind| kind.taken_away()).collect();
    let told = report(&trace, SlowThreshold::Quantile(990_000), 0, &without);
    Ok((told.map_err(|nothing| io::Error::other(nothing.to_string()))?, subject))
}

fn row(workers: usize, cause: Kind, pairs: &[Pair]) -> Foreseen {
    let given = || pairs.iter().filter_map(|pair| Some((pair.foreseen_ns?, pair.seen_ns)));
    let ms = |ns: u64| Duration::from_nanos(ns).as_secs_f64() * 1e3;
    let mut ratios: Vec<f64> = given().map(|(told, seen)| ms(told) / ms(seen)).collect();
    ratios.sort_by(f64::total_cmp);
    Foreseen {
        workers,
        cause,
        pairs: pairs.len(),
        replay_off: pairs.len() - ratios.len(),
        with_p99_ns: median(pairs.iter().map(|pair| pair.with_ns)).unwrap_or(0),
        foreseen_p99_ns: median(given().map(|(told, _)| told)),
        seen_p99_ns: median(pairs.iter().map(|pair| pair.seen_ns)).unwrap_or(0),
        ratio: middle(&ratios),
        ratios,
    }
}

fn median(values: impl Iterator<Item = u64>) -> Option<u64> {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    values.get(values.len() / 2).copied()
}

/// Of sorted ones: of two in the middle, what lies between them.
fn middle(sorted: &[f64]) -> Option<f64> {
    let half = sorted.len() / 2;
    match sorted.len() % 2 {
        1 => Some(sorted[half]),
        _ => Some(f64::midpoint(*sorted.get(half.checked_sub(1)?)?, sorted[half])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_foreseen_is_held_against_its_own_pair() {
        let pair = |foreseen_ns, seen_ns| Pair { with_ns: 15_000_000, foreseen_ns, seen_ns };
        let pairs = [
            pair(Some(1_100_000), 1_000_000),
            pair(Some(3_000_000), 2_000_000),
            pair(None, 500_000),
            pair(Some(1_800_000), 2_000_000),
        ];
        let row = row(4, Kind::Stop, &pairs);
        assert_eq!((row.pairs, row.replay_off, row.ratios.len()), (4, 1, 3));
        assert!(row.ratio.is_some_and(|ratio| (ratio - 1.1).abs() < 1e-9) && row.holds());
        assert!(!Foreseen { ratio: Some(0.8), ..row.clone() }.holds());
        assert!(!Foreseen { ratio: None, replay_off: 4, ..row.clone() }.holds(), "not foreseen");
        assert!(Foreseen { replay_off: 2, ..row.clone() }.holds(), "every other time");
        assert!(!Foreseen { replay_off: 3, ..row }.holds(), "seldom");
        assert_eq!(middle(&[1.0, 2.0]), Some(1.5));
        assert_eq!(middle(&[]), None);
    }
}
