//! The generator against a service with known response times: measured percentiles beside those of
//! queueing theory.
//!
//! Two truths stand beside each measurement. `theory` is the stationary distribution, which a
//! finite run approaches slowly; `plan` is Lindley's recursion over the very arrivals and service
//! times of the run, which leaves no sampling error. The verdict is against `plan`: within 2 % or
//! 20 us.
//!
//! On a shared machine others take CPUs away, which is no fault of the generator. Neither it nor the
//! service sleeps, so both know when they were kept from running, and requests that this touched are
//! left out of plan and measurement alike ([`super::undisturbed`]).

use super::arrivals::{Arrivals, End};
use super::driver::{Line, Pulse};
use super::engine::Limits;
use super::pauses::Pause;
use super::protocol::Protocol;
use super::queries::{QuerySet, Target};
use super::record::Distribution;
use super::reference::{Reference, ServiceTimes};
use super::run::{Invocation, RunError, Settings};
use super::theory::{Model, lindley, response_mean, response_quantile};
use super::undisturbed::{Interval, undisturbed};
use crate::affinity::{PinError, allowed, pin};
use crate::units::{Nanos, micros};
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};
use thiserror::Error;

const TOLERANCE_SHARE: f64 = 0.02;
const TOLERANCE_US: f64 = 20.0;
/// A percentile of fewer requests is chance.
const FEWEST: usize = 200;
const LOADS: [f64; 3] = [0.3, 0.6, 0.8];
const QUANTILES: [(&str, f64); 4] = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)];

#[derive(Clone, Copy, Debug)]
pub(crate) struct Check {
    /// The mean service time of the reference service.
    pub(crate) service_ns: Nanos,
    /// Of each of the six runs.
    pub(crate) duration_ns: Nanos,
    pub(crate) seed: u64,
    /// As in [`Line`]; the reference service sleeps where the generator does.
    pub(crate) spin_ns: Option<Nanos>,
    pub(crate) most_late_ns: Option<Nanos>,
}

#[derive(Debug, Error)]
pub(crate) enum CheckError {
    #[error("starting the reference service: {0}")]
    Reference(io::Error),
    #[error(transparent)]
    Pin(#[from] PinError),
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(
        "others took a CPU away {pauses} times, and disturbed all but {kept} of {all} requests of a \
         run; give the check two CPUs that nobody else uses"
    )]
    Disturbed { pauses: usize, kept: usize, all: usize },
    #[error("{failed} of {all} requests of the check failed; it measures nothing")]
    Failures { failed: u64, all: u64 },
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) model: &'static str,
    pub(crate) load: f64,
    pub(crate) rps: f64,
    pub(crate) requests: usize,
    /// Of these, requests that nothing disturbed: the figures are theirs.
    pub(crate) kept: usize,
    pub(crate) what: &'static str,
    pub(crate) theory_us: f64,
    pub(crate) plan_us: f64,
    pub(crate) measured_us: f64,
    pub(crate) within: bool,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Outcome {
    pub(crate) rows: Vec<Row>,
    /// Worst of the six runs, of the requests that were kept.
    pub(crate) late_p50_us: f64,
    pub(crate) late_p99_us: f64,
    pub(crate) late_max_us: f64,
    /// How often generator or service was kept from running, over all six runs.
    pub(crate) pauses: usize,
    pub(crate) passed: bool,
}

impl Check {
    pub(crate) fn run(&self, mut progress: impl FnMut(&str)) -> Result<Outcome, CheckError> {
        let mut outcome = Outcome {
            rows: Vec::new(),
            late_p50_us: 0.0,
            late_p99_us: 0.0,
            late_max_us: 0.0,
            pauses: 0,
            passed: true,
        };
        for (model, name) in [(Model::Md1, "M/D/1"), (Model::Mm1, "M/M/1")] {
            for load in LOADS {
                progress(&format!("{name} at {:.0} % load", load * 100.0));
                let run = self.measure(model, load)?;
                outcome.pauses += run.pauses;
                let Kept { late, .. } = &run.kept;
                let worst = |sofar: &mut f64, ns| *sofar = sofar.max(micros(ns));
                worst(&mut outcome.late_p50_us, late.quantile_ns(0.5));
                worst(&mut outcome.late_p99_us, late.quantile_ns(0.99));
                worst(&mut outcome.late_max_us, late.max_ns());
                outcome.rows.extend(self.compare(model, name, load, &run));
            }
        }
        outcome.passed = outcome.rows.iter().all(|row| row.within);
        Ok(outcome)
    }

    fn service_times(&self, model: Model) -> ServiceTimes {
        let exponential = model == Model::Mm1;
        ServiceTimes { exponential, mean_ns: self.service_ns, stall: None }
    }

    fn measure(&self, model: Model, load: f64) -> Result<Run, CheckError> {
        let any_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let times = self.service_times(model);
        let reference = Reference::bind(any_port, times, self.seed, self.spin_ns.is_some())
            .map_err(CheckError::Reference)?;
        let address = reference.address().map_err(CheckError::Reference)?;
        // The service on the last CPU, the generator on the first: they spin, and must not share
        // one.
        let cpus = allowed()?;
        let settings = self.settings(address, load, cpus.first().copied());
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let serving = scope.spawn(|| {
                if let Some(last) = cpus.last() {
                    pin(*last)?;
                }
                reference.serve(&stop).map_err(CheckError::Reference)
            });
            let run = settings.run(self.seed, &Arc::new(Pulse::default()));
            stop.store(true, Relaxed);
            let pauses = serving.join().expect("the reference service panicked")?;
            let run = run?;
            match run.recorder.errors() {
                0 => self.keep(model, settings, run, pauses),
                failed => Err(CheckError::Failures { failed, all: run.recorder.requests() }),
            }
        })
    }

    /// Leaves out what was disturbed, of the plan as well.
    fn keep(
        &self,
        model: Model,
        settings: Settings,
        mut run: Invocation,
        of_service: Vec<Pause>,
    ) -> Result<Run, CheckError> {
        let since = |at: Instant| at.saturating_duration_since(run.origin).as_nanos();
        let ns = |at: Instant| Nanos::try_from(since(at)).unwrap_or(Nanos::MAX);
        let interval = |pause: &Pause| Interval { from_ns: ns(pause.from), to_ns: ns(pause.to) };
        let intervals: Vec<Interval> = run.pauses.iter().chain(&of_service).map(interval).collect();
        let pauses = intervals.len();
        let samples = &mut run.recorder.samples;
        samples.sort_by_key(|sample| sample.index);
        let planned = self.planned(model, &settings);
        let counts = undisturbed(samples, &planned, intervals);
        let mut kept = Kept::default();
        for ((sample, planned), _) in
            samples.iter().zip(planned).zip(counts).filter(|(_, counts)| *counts)
        {
            kept.plan.record(planned);
            kept.measured.record(sample.latency_ns());
            kept.late.record(sample.late_ns().unwrap_or(0));
        }
        let (all, number) = (samples.len(), kept.number());
        if number < FEWEST {
            return Err(CheckError::Disturbed { pauses, kept: number, all });
        }
        Ok(Run { settings, requests: all, pauses, kept })
    }

    fn settings(&self, address: SocketAddr, load: f64, cpu: Option<usize>) -> Settings {
        let target = Target {
            protocol: Protocol::Http,
            host: address.ip().to_string(),
            port: address.port(),
            path: "/".into(),
        };
        let connections = 64;
        Settings {
            line: Line {
                address,
                protocol: Protocol::Http,
                connections,
                patience: Duration::from_secs(5),
                spin_ns: self.spin_ns,
                notes_pauses: self.spin_ns.is_none(),
            },
            queries: Arc::new(QuerySet::of_target(&target).expect("`/` is a good target")),
            arrivals: Arrivals::Exponential,
            rps: load * 1e9 / self.service_ns as f64,
            end: End::At(self.duration_ns),
            warmup_ns: 0,
            limits: Limits {
                connections,
                pipeline: 64,
                timeout_ns: 60_000_000_000,
                // Noted pauses explain what is late, and leave it out.
                most_late_ns: self.most_late_ns.filter(|_| self.spin_ns.is_some()),
                starving_fails: true,
            },
            threads: 1,
            cpus: cpu.into_iter().collect(),
            every_request: true,
            interval_log: false,
        }
    }

    fn compare(&self, model: Model, name: &'static str, load: f64, run: &Run) -> Vec<Row> {
        let Kept { plan, measured, .. } = &run.kept;
        let row = |what, theory: f64, plan_us: f64, measured_us: f64| {
            let tolerance = (plan_us * TOLERANCE_SHARE).max(TOLERANCE_US);
            Row {
                model: name,
                load,
                rps: run.settings.rps,
                requests: run.requests,
                kept: run.kept.number(),
                what,
                theory_us: theory * micros(self.service_ns),
                plan_us,
                measured_us,
                within: (measured_us - plan_us).abs() <= tolerance,
            }
        };
        let mut rows: Vec<Row> = QUANTILES
            .iter()
            .map(|(what, quantile)| {
                let theory = response_quantile(model, load, *quantile);
                let [plan, measured] = [plan, measured].map(|d| micros(d.quantile_ns(*quantile)));
                row(what, theory, plan, measured)
            })
            .collect();
        let [plan, measured] = [plan, measured].map(|d| d.mean_ns() / 1e3);
        rows.push(row("mean", response_mean(model, load), plan, measured));
        rows
    }

    /// The response times of this very plan.
    fn planned(&self, model: Model, settings: &Settings) -> Vec<Nanos> {
        let arrivals = settings.plan(self.seed).map(|arrival| arrival.at_ns);
        lindley(arrivals, self.service_times(model).iter(self.seed)).collect()
    }
}

/// One run, without what was disturbed.
struct Run {
    settings: Settings,
    requests: usize,
    pauses: usize,
    kept: Kept,
}

#[derive(Default)]
struct Kept {
    plan: Distribution,
    measured: Distribution,
    late: Distribution,
}

impl Kept {
    fn number(&self) -> usize {
        usize::try_from(self.measured.count()).unwrap_or(usize::MAX)
    }
}

impl Outcome {
    pub(crate) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_header([
            "model",
            "load",
            "requests",
            "kept",
            "",
            "theory us",
            "plan us",
            "measured us",
            "off us",
            "",
        ]);
        for row in &self.rows {
            table.add_row([
                row.model.to_owned(),
                format!("{:.0} %", row.load * 100.0),
                row.requests.to_string(),
                row.kept.to_string(),
                row.what.to_owned(),
                format!("{:.0}", row.theory_us),
                format!("{:.0}", row.plan_us),
                format!("{:.0}", row.measured_us),
                format!("{:+.0}", row.measured_us - row.plan_us),
                if row.within { "ok" } else { "OFF" }.to_owned(),
            ]);
        }
        for column in [1, 2, 3, 5, 6, 7, 8] {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        format!(
            "{table}\nsend schedule's error (worst run): p50 {:.1} us, p99 {:.1} us, max {:.1} \
             us\nothers took a CPU away {} times; requests that this disturbed were not kept\n{}",
            self.late_p50_us,
            self.late_p99_us,
            self.late_max_us,
            self.pauses,
            if self.passed {
                "passed: every figure is within 2 % or 20 us of its plan"
            } else {
                "FAILED: a figure is off by more than 2 % and 20 us"
            }
        )
    }
}
