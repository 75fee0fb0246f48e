//! Tests whether Tailor's predictions are right on this machine. Recordings with a fault alternate
//! with recordings without faults. The p99 predicted without the cause is compared with the p99
//! measured without it.

use std::io;
use std::time::Duration;

use elfen_kernel::events::Detail;
use elfen_tailor::rank::SlowThreshold;
use elfen_tailor::report::{TailorReport, report};
use serde::Serialize;

use super::recording::{CheckError, Load, record_while};
use super::service::{ServiceKind, TestService};
use super::{EVERY, Fault, Plan, reserve_cpu};

/// The numbers of threads of the services.
const WORKERS: [usize; 2] = [1, 4];
/// The highest relative error of the median.
const TOLERANCE: f64 = 0.15;

/// The predictions for one cause.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Prediction {
    pub workers: usize,
    pub cause: &'static str,
    pub pairs: usize,
    /// Pairs without a prediction, because the replay was invalid.
    pub replay_off: usize,
    /// The median p99 with the cause, predicted without it, and measured without it.
    pub with_p99_ns: u64,
    pub foreseen_p99_ns: Option<u64>,
    pub seen_p99_ns: u64,
    /// The median of the predicted p99 divided by the measured p99.
    pub ratio: Option<f64>,
    pub ratios: Vec<f64>,
}

impl Prediction {
    /// Whether at least half of the pairs have a prediction. With fewer, the median says too
    /// little.
    pub fn is_predicted(&self) -> bool {
        self.ratio.is_some() && self.replay_off * 2 <= self.pairs
    }

    /// Whether the median error is small enough. A cause without predictions fails, because the
    /// user asked for it.
    pub fn holds(&self) -> bool {
        self.is_predicted() && self.ratio.is_some_and(|ratio| (ratio - 1.0).abs() <= TOLERANCE)
    }
}

#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct WhatIfReport {
    pub rows: Vec<Prediction>,
    pub holds: bool,
}

/// The p99 for one cause in one pair of recordings.
struct Pair {
    with_ns: u64,
    predicted_ns: Option<u64>,
    measured_ns: u64,
}

/// Checks each fault of the plan in `pairs` pairs of recordings. A recording lasts until all its
/// faults are injected.
pub fn check_predictions(plan: &Plan, pairs: usize) -> Result<WhatIfReport, CheckError> {
    let cpu = reserve_cpu()?;
    let mut rows = Vec::new();
    for workers in WORKERS {
        let mut service = TestService::start(ServiceKind::Realtime, cpu, workers)?;
        let mut all: Vec<Vec<Pair>> = plan.faults.iter().map(|_| Vec::new()).collect();
        for _ in 0..pairs {
            let mut predictions = Vec::new();
            for fault in &plan.faults {
                let report = record_and_report(&mut service, plan, Some(*fault))?;
                let without_ns = report.without.as_ref().and_then(|w| w.latency_ns).map(|l| l.p99);
                predictions.push((report.latency_ns.p99, without_ns));
            }
            let measured_ns = record_and_report(&mut service, plan, None)?.latency_ns.p99;
            for (of, (with_ns, predicted_ns)) in all.iter_mut().zip(predictions) {
                of.push(Pair { with_ns, predicted_ns, measured_ns });
            }
        }
        let rows_of = plan.faults.iter().zip(all);
        rows.extend(rows_of.map(|(fault, of)| row(workers, fault.name, &of)));
    }
    let holds = rows.iter().all(Prediction::holds);
    Ok(WhatIfReport { rows, holds })
}

/// Records a service with a fault, and predicts the p99 without the fault's cause. If `fault` is
/// `None`, records the service without faults for the same time.
fn record_and_report(
    service: &mut TestService,
    plan: &Plan,
    fault: Option<&'static Fault>,
) -> Result<TailorReport, CheckError> {
    let times = Plan { faults: fault.into_iter().collect(), ..plan.clone() };
    let act = |service: &mut TestService| match fault {
        Some(_) => times.inject_all(service).map(drop),
        None => {
            std::thread::sleep(EVERY * times.runs);
            Ok(())
        }
    };
    let load = Load::uneven(plan.requests_a_second);
    let trace = record_while(service, Detail::Sched, load, act)?.trace;
    let without: Vec<String> = fault.iter().map(|fault| fault.removed.to_owned()).collect();
    let shown = report(&trace, SlowThreshold::Quantile(990_000), 0, &without);
    Ok(shown.map_err(|nothing| io::Error::other(nothing.to_string()))?)
}

fn row(workers: usize, cause: &'static str, pairs: &[Pair]) -> Prediction {
    let given = || pairs.iter().filter_map(|pair| Some((pair.predicted_ns?, pair.measured_ns)));
    let ms = |ns: u64| Duration::from_nanos(ns).as_secs_f64() * 1e3;
    let mut ratios: Vec<f64> =
        given().map(|(predicted, measured)| ms(predicted) / ms(measured)).collect();
    ratios.sort_by(f64::total_cmp);
    Prediction {
        workers,
        cause,
        pairs: pairs.len(),
        replay_off: pairs.len() - ratios.len(),
        with_p99_ns: median(pairs.iter().map(|pair| pair.with_ns)).unwrap_or(0),
        foreseen_p99_ns: median(given().map(|(predicted, _)| predicted)),
        seen_p99_ns: median(pairs.iter().map(|pair| pair.measured_ns)).unwrap_or(0),
        ratio: median_of_sorted(&ratios),
        ratios,
    }
}

fn median(values: impl Iterator<Item = u64>) -> Option<u64> {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    values.get(values.len() / 2).copied()
}

/// Returns the median of sorted values. For an even number of values, it is the mean of the middle
/// two.
fn median_of_sorted(sorted: &[f64]) -> Option<f64> {
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
    fn predictions_are_compared_with_their_own_pair() {
        let pair =
            |predicted_ns, measured_ns| Pair { with_ns: 15_000_000, predicted_ns, measured_ns };
        let pairs = [
            pair(Some(1_100_000), 1_000_000),
            pair(Some(3_000_000), 2_000_000),
            pair(None, 500_000),
            pair(Some(1_800_000), 2_000_000),
        ];
        let row = row(4, "stop", &pairs);
        assert_eq!((row.pairs, row.replay_off, row.ratios.len()), (4, 1, 3));
        assert!(row.ratio.is_some_and(|ratio| (ratio - 1.1).abs() < 1e-9) && row.holds());
        assert!(!Prediction { ratio: Some(0.8), ..row.clone() }.holds());
        assert!(!Prediction { ratio: None, replay_off: 4, ..row.clone() }.holds(), "no prediction");
        assert!(Prediction { replay_off: 2, ..row.clone() }.holds(), "half of the pairs");
        assert!(!Prediction { replay_off: 3, ..row }.holds(), "fewer than half");
        assert_eq!(median_of_sorted(&[1.0, 2.0]), Some(1.5));
        assert_eq!(median_of_sorted(&[]), None);
    }
}
