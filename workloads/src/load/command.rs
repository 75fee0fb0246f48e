//! What `elfen-load` does with its arguments: measure, search, or be the service that is measured.

use super::args::{Args, SettingsError};
use super::csv;
use super::driver::{DriveError, Pulse};
use super::engine::Overrun;
use super::queries::{QueryError, Target};
use super::reference::Reference;
use super::report::{Probe, Report, SearchReport};
use super::run::{Invocation, RunError, Settings};
use super::slo::{Objective, RateSearch};
use super::stats::median;
use super::trace::TraceError;
use crate::command;
use crate::process::interrupt;
use crate::units::{micros, show_nanos};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;
use thiserror::Error;

const PROGRAM: &str = "elfen-load";
const INTERRUPTED: u8 = 130;
const REDRAW_EVERY: Duration = Duration::from_millis(200);

#[derive(Debug, Error)]
enum LoadError {
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error(transparent)]
    Run(#[from] RunError),
    #[error("writing {path}: {error}; free some space, or name another file")]
    Log { path: PathBuf, error: io::Error },
    #[error("serving at {address}: {error}; choose an address that is free")]
    Reference { address: SocketAddr, error: io::Error },
    #[error("even {rps:.2} rps misses {slo}; the service can't keep this objective")]
    NoRate { slo: Objective, rps: f64 },
    #[error("at {rps:.1} rps {overrun}; {slo} was kept up to {kept:.1} rps, the rest is unknown")]
    GeneratorIsTheLimit { rps: f64, overrun: Overrun, slo: Objective, kept: f64 },
    #[error("installing the handler of Ctrl-C: {0}")]
    Interrupt(#[from] nix::errno::Errno),
    #[error("interrupted before anything was measured")]
    NothingMeasured,
    #[error("writing to the standard output: {0}")]
    Output(#[from] io::Error),
}

impl LoadError {
    /// Wrong arguments, rather than a failure.
    fn is_usage(&self) -> bool {
        match self {
            Self::Settings(error) => !matches!(
                error,
                SettingsError::Queries(QueryError::Read { .. })
                    | SettingsError::Trace(TraceError::Read { .. })
                    | SettingsError::Resolve { .. }
            ),
            _ => false,
        }
    }
}

pub fn main() -> ExitCode {
    let args: Args = match command::parse(PROGRAM) {
        Ok(args) => args,
        Err(status) => return status,
    };
    match run(&args) {
        Ok(()) if interrupt::asked() && args.reference_server.is_none() => {
            ExitCode::from(INTERRUPTED)
        }
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is_usage() => command::usage(PROGRAM, &error.to_string()),
        Err(LoadError::NothingMeasured) => {
            command::complain(PROGRAM, &LoadError::NothingMeasured.to_string());
            ExitCode::from(INTERRUPTED)
        }
        Err(error) => command::failure(PROGRAM, &error.to_string()),
    }
}

fn run(args: &Args) -> Result<(), LoadError> {
    interrupt::install()?;
    if let Some(address) = args.reference_server {
        return serve_reference(args, address)
            .map_err(|error| LoadError::Reference { address, error });
    }
    let target = args.url.as_ref().expect("clap requires it here");
    let settings = args.settings(target)?;
    if settings.queries.skipped > 0 {
        let skipped = settings.queries.skipped;
        command::complain(PROGRAM, &format!("left out {skipped} tasks that are no text query"));
    }
    let report = match args.search {
        Some(slo) => search(args, target, settings, slo)?,
        None => measure(args, target, &settings)?,
    };
    print(args, &report)
}

fn serve_reference(args: &Args, address: SocketAddr) -> io::Result<()> {
    let reference = Reference::bind(address, args.reference_service(), args.seed)?;
    // A port of 0 asks for any: say which it is.
    command::say(&format!("serving on {}\n", reference.address()?))?;
    reference.serve()
}

fn print(args: &Args, report: &Report) -> Result<(), LoadError> {
    Ok(command::say(&if args.json { json(report)? } else { report.table() })?)
}

fn json(report: &impl Serialize) -> io::Result<String> {
    Ok(serde_json::to_string(report)? + "\n")
}

fn measure(args: &Args, target: &Target, settings: &Settings) -> Result<Report, LoadError> {
    // Opened first: a path that can't be written is better known before the run than after.
    let mut csv = args.csv.as_deref().map(Log::create).transpose()?;
    if let Some(csv) = &mut csv {
        csv.write(|out| writeln!(out, "{}", csv::HEADER))?;
    }
    let runs = invocations(args, settings, |number, run| match &mut csv {
        Some(csv) => csv.write(|out| csv::write(out, number, run)),
        None => Ok(()),
    })?;
    if let Some(csv) = csv {
        csv.finish()?;
    }
    Ok(report(args, target, settings, &runs))
}

fn report(args: &Args, target: &Target, settings: &Settings, runs: &[Invocation]) -> Report {
    let url =
        format!("{}://{}:{}{}", target.protocol.name(), target.host, target.port, target.path);
    let mut report = Report::new(url, settings, runs, args.seed);
    let bound = args.late_bound_ns();
    if args.allow_late && report.late_us.max > micros(bound) {
        let bound = show_nanos(bound);
        report.warnings.insert(
            0,
            format!("requests were sent later than the bound of {bound} (--allow-late)"),
        );
    }
    if interrupt::asked() {
        report.warnings.insert(0, "interrupted: these figures are of the time until then".into());
    }
    report
}

/// Runs all invocations at the settings' rate; `each` sees every one as it ends.
fn invocations(
    args: &Args,
    settings: &Settings,
    mut each: impl FnMut(usize, &Invocation) -> Result<(), LoadError>,
) -> Result<Vec<Invocation>, LoadError> {
    let mut runs = Vec::new();
    for number in 0..args.invocations {
        if interrupt::asked() {
            break;
        }
        let seed = args.seed.wrapping_add(number.into());
        let mut run = with_progress(args, settings, number, |pulse| settings.run(seed, pulse))?;
        if run.recorder.requests() == 0 && interrupt::asked() {
            break;
        }
        each(runs.len(), &run)?;
        // Written by now, and by far the largest part.
        run.recorder.samples = Vec::new();
        runs.push(run);
    }
    if runs.is_empty() { Err(LoadError::NothingMeasured) } else { Ok(runs) }
}

fn search(
    args: &Args,
    target: &Target,
    mut settings: Settings,
    slo: Objective,
) -> Result<Report, LoadError> {
    let mut search = RateSearch::new(settings.rps, args.search_precision);
    let mut probes = Vec::new();
    let mut best = None;
    while let Some(rps) = search.next_rps() {
        settings.rps = rps;
        let runs = match invocations(args, &settings, |_, _| Ok(())) {
            Err(LoadError::Run(RunError::Drive(DriveError::Late { overrun, .. })))
                if best.is_some() =>
            {
                let kept = search.best().unwrap_or(0.0);
                return Err(LoadError::GeneratorIsTheLimit { rps, overrun, slo, kept });
            }
            other => other?,
        };
        if interrupt::asked() {
            return Err(LoadError::NothingMeasured);
        }
        let missed: Vec<f64> = runs.iter().map(|run| slo.missed_share(&run.recorder)).collect();
        let at_quantile =
            |run: &Invocation| micros(run.recorder.latency.quantile_ns(slo.quantile()));
        let latencies: Vec<f64> = runs.iter().map(at_quantile).collect();
        let met = slo.is_met(&missed);
        probes.push(Probe {
            rps,
            met,
            missed_share: median(&missed).unwrap_or(1.0),
            latency_us: median(&latencies).unwrap_or(0.0),
        });
        search.tried(rps, met);
        if met {
            best = Some(report(args, target, &settings, &runs));
        }
    }
    let rps = settings.rps;
    let mut report = best.ok_or(LoadError::NoRate { slo, rps })?;
    let highest_rps = search.best().unwrap_or(0.0);
    report.search = Some(SearchReport { slo: slo.to_string(), highest_rps, probes });
    Ok(report)
}

/// Draws a bar on a terminal, from a thread of its own: the sending thread only counts.
fn with_progress<T>(
    args: &Args,
    settings: &Settings,
    number: u32,
    work: impl FnOnce(&Arc<Pulse>) -> T,
) -> T {
    let pulse = Arc::new(Pulse::default());
    if !io::stderr().is_terminal() {
        return work(&pulse);
    }
    let expected = settings.plan(0).expected_requests(settings.rps);
    let bar = ProgressBar::with_draw_target(Some(expected), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("{msg} {bar:40} {pos}/{len} requests {elapsed}");
    bar.set_style(style.expect("the template is a constant"));
    bar.set_message(format!("{:.0} rps, {}/{}", settings.rps, number + 1, args.invocations));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let drawing = scope.spawn(|| {
            // Relaxed: the flag publishes nothing but itself.
            while !done.load(Relaxed) {
                bar.set_position(pulse.answered());
                thread::park_timeout(REDRAW_EVERY);
            }
            bar.finish_and_clear();
        });
        let result = work(&pulse);
        done.store(true, Relaxed);
        drawing.thread().unpark();
        result
    })
}

/// A file that is written while measuring; its errors name it.
struct Log {
    path: PathBuf,
    out: BufWriter<File>,
}

impl Log {
    fn create(path: &Path) -> Result<Self, LoadError> {
        let path = path.to_owned();
        match File::create(&path) {
            Ok(file) => Ok(Self { path, out: BufWriter::new(file) }),
            Err(error) => Err(LoadError::Log { path, error }),
        }
    }

    fn write(
        &mut self,
        with: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
    ) -> Result<(), LoadError> {
        with(&mut self.out).map_err(|error| LoadError::Log { path: self.path.clone(), error })
    }

    fn finish(mut self) -> Result<(), LoadError> {
        self.write(|out| out.flush())
    }
}
