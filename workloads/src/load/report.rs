//! The output of a run: figures for scripts (`--json`), a table for people, warnings about the
//! figures, and the file of all requests (`--csv`).

use super::driver::{Run, Settings};
use super::record::{Distribution, median, median_ci95};
use crate::units::{Nanos, micros, show_us};
use elfen_console::duration;
use elfen_console::table::lines;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, Write};

/// A quantile with fewer requests beyond it than this is unreliable.
const FEWEST_BEYOND: f64 = 10.0;
/// The last answer may arrive this share of the run after the last request. Beyond that, a warning
/// reports it.
const TOLERABLE_TAIL: f64 = 0.05;
/// A warning reports an error of the generator if it exceeds both of these bounds.
const WORTH_US: f64 = 20.0;
const WORTH_SHARE: f64 = 0.02;

/// Figures of a latency distribution, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Figures<T> {
    pub(crate) p50: T,
    pub(crate) p90: T,
    pub(crate) p99: T,
    pub(crate) p999: T,
    pub(crate) max: T,
    pub(crate) mean: T,
}

pub(crate) type Latency = Figures<f64>;
/// 95 % confidence intervals of the medians over runs.
pub(crate) type LatencyCi = Figures<[f64; 2]>;

impl Latency {
    pub(crate) fn of(distribution: &Distribution) -> Self {
        let at = |quantile| micros(distribution.quantile_ns(quantile));
        Self {
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: micros(distribution.max_ns()),
            mean: distribution.mean_ns().round() / 1e3,
        }
    }
}

impl<T> Figures<T> {
    /// Computes each figure with `of`, which receives the accessor of that figure.
    fn each(of: impl Fn(fn(&Latency) -> f64) -> Option<T>) -> Option<Self> {
        Some(Self {
            p50: of(|l| l.p50)?,
            p90: of(|l| l.p90)?,
            p99: of(|l| l.p99)?,
            p999: of(|l| l.p999)?,
            max: of(|l| l.max)?,
            mean: of(|l| l.mean)?,
        })
    }

    pub(crate) fn figures(self) -> [T; 6] {
        [self.p50, self.p90, self.p99, self.p999, self.max, self.mean]
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Late {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

impl Late {
    fn of(distribution: &Distribution) -> Self {
        Self {
            p50: micros(distribution.quantile_ns(0.5)),
            p99: micros(distribution.quantile_ns(0.99)),
            max: micros(distribution.max_ns()),
        }
    }
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct RunReport {
    pub(crate) intended_rps: f64,
    pub(crate) achieved_rps: f64,
    pub(crate) requests: u64,
    pub(crate) errors: u64,
    pub(crate) error_kinds: BTreeMap<String, u64>,
    pub(crate) latency_us: Latency,
    pub(crate) late_us: Late,
    /// How long a sleeping generator took to wake. An answer that arrived meanwhile was seen late
    /// by as much.
    pub(crate) wake_us: Option<Late>,
    /// The queue and service times that the service reports, if it does.
    pub(crate) queue_us: Option<Latency>,
    pub(crate) service_us: Option<Latency>,
    /// Requests that waited in the generator because no connection had room.
    pub(crate) waited_for_connection: u64,
    pub(crate) lost_connections: u64,
    pub(crate) seed: u64,
}

/// One JSON object. For several runs, figures at the top are medians, counts are sums, and the
/// lateness is that of the worst run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct LoadReport {
    pub(crate) target: String,
    pub(crate) protocol: &'static str,
    pub(crate) arrivals: &'static str,
    pub(crate) connections: usize,
    pub(crate) pipeline: usize,
    pub(crate) queries: u32,
    pub(crate) intended_rps: f64,
    pub(crate) achieved_rps: f64,
    pub(crate) requests: u64,
    pub(crate) errors: u64,
    pub(crate) latency_us: Latency,
    pub(crate) latency_us_ci95: Option<LatencyCi>,
    pub(crate) late_us: Late,
    pub(crate) seed: u64,
    pub(crate) runs: Vec<RunReport>,
    pub(crate) warnings: Vec<String>,
}

impl RunReport {
    pub(crate) fn new(run: &Run, intended_rps: f64) -> Self {
        let recorder = &run.recorder;
        let reported = |distribution: &Distribution| {
            (distribution.count() > 0).then(|| Latency::of(distribution))
        };
        Self {
            intended_rps,
            achieved_rps: run.achieved_rps(),
            requests: recorder.requests(),
            errors: recorder.errors(),
            error_kinds: recorder.errors.iter().map(|(kind, n)| (kind.to_string(), *n)).collect(),
            latency_us: Latency::of(&recorder.latency),
            late_us: Late::of(&recorder.late),
            wake_us: (run.overslept.count() > 0).then(|| Late::of(&run.overslept)),
            queue_us: reported(&recorder.queue),
            service_us: reported(&recorder.service),
            waited_for_connection: recorder.waited,
            lost_connections: run.lost,
            seed: run.seed,
        }
    }
}

impl LoadReport {
    /// `measured` must not be empty.
    pub(crate) fn new(target: String, settings: &Settings, measured: &[Run], seed: u64) -> Self {
        let rps = settings.rps;
        let runs: Vec<_> = measured.iter().map(|run| RunReport::new(run, rps)).collect();
        let over = |of: fn(&RunReport) -> f64| -> Vec<f64> { runs.iter().map(of).collect() };
        let worst = |of: fn(&RunReport) -> f64| over(of).into_iter().fold(0.0, f64::max);
        let latencies = |of: fn(&Latency) -> f64| -> Vec<f64> {
            runs.iter().map(|one| of(&one.latency_us)).collect()
        };
        let latency_us =
            Latency::each(|of| median(&latencies(of))).expect("there is a run to report");
        Self {
            target,
            protocol: settings.protocol.name(),
            arrivals: settings.arrivals.name(),
            connections: settings.limits.connections,
            pipeline: settings.limits.pipeline,
            queries: settings.queries.len(),
            intended_rps: rps,
            achieved_rps: median(&over(|one| one.achieved_rps)).unwrap_or(0.0),
            requests: runs.iter().map(|one| one.requests).sum(),
            errors: runs.iter().map(|one| one.errors).sum(),
            latency_us,
            latency_us_ci95: LatencyCi::each(|of| median_ci95(&latencies(of), seed)),
            late_us: Late {
                p50: worst(|one| one.late_us.p50),
                p99: worst(|one| one.late_us.p99),
                max: worst(|one| one.late_us.max),
            },
            seed,
            warnings: warnings(measured, settings),
            runs,
        }
    }
}

/// Warnings for readers of the figures. Each kind appears once, with the text of its first run.
fn warnings(runs: &[Run], settings: &Settings) -> Vec<String> {
    let all: Vec<_> = runs.iter().map(|run| warnings_of(run, settings)).collect();
    let of_kind = |kind: usize| {
        let texts = all.iter().enumerate();
        let mut shown = texts.filter_map(|(number, one)| Some((number, one[kind].as_ref()?)));
        let (first, text) = shown.next()?;
        Some(match (runs.len(), shown.count()) {
            (1, _) => text.clone(),
            (_, 0) => format!("run {first}: {text}"),
            (_, others) => format!("run {first}: {text} (similar in {others} more runs)"),
        })
    };
    (0..KINDS).filter_map(of_kind).collect()
}

const KINDS: usize = 7;

fn warnings_of(run: &Run, settings: &Settings) -> [Option<String>; KINDS] {
    let recorder = &run.recorder;
    let (failed, waited, lost) = (recorder.errors(), recorder.waited, run.lost);
    let requests = recorder.requests();
    let kinds: Vec<String> =
        recorder.errors.iter().map(|(kind, count)| format!("{kind}: {count}")).collect();
    let kinds = kinds.join(", ");
    // How the generator's lateness affects a tail latency, and its waking a median latency.
    let us = |of: &Distribution, quantile| micros(of.quantile_ns(quantile));
    let matters = |own: f64, latency: f64| own > WORTH_US && own > latency * WORTH_SHARE;
    let late = us(&recorder.late, 0.99);
    let is_tardy = matters(late, us(&recorder.latency, 0.99)) && waited == 0;
    let wake = us(&run.overslept, 0.5);
    let is_sleepy = matters(wake, us(&recorder.latency, 0.5));
    let measured = recorder.last_intended_ns.saturating_sub(settings.warmup_ns);
    let tail = recorder.last_done_ns.saturating_sub(recorder.last_intended_ns);
    let is_overloaded = tail as f64 > measured as f64 * TOLERABLE_TAIL;
    let beyond = recorder.latency.count() as f64 * 0.001;
    [
        (failed > 0).then(|| {
            format!("{failed} of {requests} requests failed ({kinds}); the latencies exclude them")
        }),
        (waited > 0).then(|| {
            format!(
                "{waited} of {requests} requests waited for a connection: the service did not see \
                 the planned arrivals (the wait is in their latency); more --connections or \
                 --pipeline"
            )
        }),
        is_tardy.then(|| {
            format!(
                "1 % of the requests were sent more than {} late, which is part of their latency: \
                 the machine is too busy for the generator",
                show_us(late)
            )
        }),
        (lost > 0)
            .then(|| format!("{lost} connections were closed during the run and opened again")),
        is_overloaded.then(|| {
            format!(
                "the last answer came {} after the last request was due: the service may not keep \
                 up, and the latencies grow with the length of the run",
                duration::show(tail)
            )
        }),
        is_sleepy.then(|| {
            format!(
                "the generator took {} to wake (median), which is part of the latency of each \
                 answer that arrived while it slept; with --busy it does not sleep",
                show_us(wake)
            )
        }),
        (beyond < FEWEST_BEYOND).then(|| {
            format!(
                "p999 is based on only {beyond:.0} slower requests; 10 of them \
                require 10000 requests"
            )
        }),
    ]
}

impl LoadReport {
    pub(crate) fn table(&self) -> String {
        let mut text = String::new();
        self.write_table(&mut text).expect("a String takes everything");
        text
    }

    fn write_table(&self, out: &mut String) -> std::fmt::Result {
        writeln!(
            out,
            "{} ({}), {} arrivals, {} connections, pipeline {}, {} queries",
            self.target,
            self.protocol,
            self.arrivals,
            self.connections,
            self.pipeline,
            self.queries
        )?;
        writeln!(
            out,
            "rate: {:.1} rps intended, {:.1} rps achieved; {} requests, {} errors; seed {}",
            self.intended_rps, self.achieved_rps, self.requests, self.errors, self.seed
        )?;
        out.push_str(&self.latencies());
        if self.runs.len() > 1 {
            let seeds = self.runs.iter().enumerate();
            let seeds = seeds.map(|(number, one)| {
                row(&format!("{number}, {}", one.seed), one.latency_us.figures().map(show_us))
            });
            out.push_str(&table("run, seed", &seeds.collect::<Vec<_>>()));
        }
        let [p50, p99, max] = [self.late_us.p50, self.late_us.p99, self.late_us.max].map(show_us);
        writeln!(out, "send schedule's error: p50 {p50}, p99 {p99}, max {max}")?;
        self.warnings.iter().try_for_each(|warning| writeln!(out, "warning: {warning}"))
    }

    fn latencies(&self) -> String {
        let one = self.runs.len() == 1;
        let name = if one { "latency" } else { "latency, median of runs" };
        let mut rows = vec![row(name, self.latency_us.figures().map(show_us))];
        if let Some(ci) = &self.latency_us_ci95 {
            let shown = |[low, high]: [f64; 2]| format!("{} .. {}", show_us(low), show_us(high));
            rows.push(row("  95 % confidence", ci.figures().map(shown)));
        }
        if let [only] = self.runs.as_slice() {
            for (name, reported) in [("in queue", only.queue_us), ("in service", only.service_us)] {
                rows.extend(reported.map(|of| row(name, of.figures().map(show_us))));
            }
        }
        table("", &rows)
    }
}

fn table(first: &str, rows: &[Vec<String>]) -> String {
    lines(&[first, "p50", "p90", "p99", "p99.9", "max", "mean"], rows)
}

fn row(name: &str, figures: [String; 6]) -> Vec<String> {
    [name.to_owned()].into_iter().chain(figures).collect()
}

pub(crate) const CSV_HEADER: &str = "run,seed,query,connection,intended_us,sent_us,done_us,\
                                     latency_us,late_us,queue_us,service_us,outcome,added_us";

/// Writes one line per request, in the order of intended times. Times count from the end of the
/// warm-up.
pub(crate) fn write_csv(out: &mut impl Write, number: usize, run: &Run) -> io::Result<()> {
    let us = |ns: Nanos| format!("{:.3}", micros(ns));
    let or_empty = |ns: Option<Nanos>| ns.map(us).unwrap_or_default();
    let since = |ns: Nanos| ns - run.recorder.warmup_ns;
    for sample in &run.recorder.samples {
        let outcome = sample.result.map_or_else(|failure| failure.to_string(), |()| "ok".into());
        let cells = [
            number.to_string(),
            run.seed.to_string(),
            sample.query.to_string(),
            sample.connection.map(|at| at.to_string()).unwrap_or_default(),
            us(since(sample.intended_ns)),
            or_empty(sample.sent_ns.map(since)),
            us(since(sample.done_ns)),
            us(sample.latency_ns()),
            or_empty(sample.late_ns()),
            or_empty(sample.timing.queue_ns),
            or_empty(sample.timing.service_ns),
            outcome,
            or_empty(sample.timing.added_ns),
        ];
        writeln!(out, "{}", cells.join(","))?;
    }
    Ok(())
}
