//! What `elfen-load` does with its arguments: measure, or be the service that is measured.

use super::args::Args;
use super::driver::Settings;
use super::error::LoadError;
use super::queries::Target;
use super::reference;
use super::report::{CSV_HEADER, Report, write_csv};
use crate::command;
use crate::process::{catch_interrupts, interrupted};
use crate::units::{micros, show_nanos};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

const PROGRAM: &str = "elfen-load";
const INTERRUPTED: u8 = 130;
const REDRAW_EVERY: Duration = Duration::from_millis(200);

pub fn main() -> ExitCode {
    let args: Args = match command::parse(PROGRAM) {
        Ok(args) => args,
        Err(status) => return status,
    };
    match run(&args) {
        Ok(()) if interrupted() && args.reference_server.is_none() => ExitCode::from(INTERRUPTED),
        Ok(()) => ExitCode::SUCCESS,
        Err(LoadError::Usage(problem)) => command::usage(PROGRAM, &problem),
        Err(error) => {
            command::complain(PROGRAM, &error.to_string());
            match error {
                LoadError::NothingMeasured => ExitCode::from(INTERRUPTED),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

fn run(args: &Args) -> Result<(), LoadError> {
    let failed = |what: &str, error| LoadError::Failed(format!("{what}: {error}"));
    catch_interrupts().map_err(|error| failed("installing the handler of Ctrl-C", error.into()))?;
    if let Some(address) = args.reference_server {
        // A port of 0 asks for any: say which it is.
        let ready = |address| command::say(&format!("serving on {address}\n"));
        let times = args.service.unwrap_or_default();
        return reference::serve(address, times, args.seed, ready).map_err(|error| {
            let advice = "choose an address that is free";
            LoadError::Failed(format!("serving at {address}: {error}; {advice}"))
        });
    }
    let target = args.url.as_ref().expect("clap requires it here");
    let settings = args.settings(target)?;
    if settings.queries.skipped > 0 {
        let skipped = settings.queries.skipped;
        command::complain(PROGRAM, &format!("left out {skipped} tasks that are no text query"));
    }
    let report = measure(args, target, &settings)?;
    let text = match args.json {
        true => serde_json::to_string(&report).map_err(io::Error::from)? + "\n",
        false => report.table(),
    };
    command::say(&text).map_err(|error| failed("writing to the standard output", error))
}

fn measure(args: &Args, target: &Target, settings: &Settings) -> Result<Report, LoadError> {
    // Opened first: a path that can't be written is better known before the run than after.
    let mut csv = args.csv.as_deref().map(Log::create).transpose()?;
    let mut runs = Vec::new();
    for number in 0..args.invocations {
        if interrupted() {
            break;
        }
        let bar = bar(args, settings, number);
        let run = settings.run(args.seed.wrapping_add(number.into()), &bar);
        bar.finish_and_clear();
        let mut run = run?;
        if run.recorder.requests() == 0 && interrupted() {
            break;
        }
        if let Some(csv) = &mut csv {
            csv.write(|out| write_csv(out, runs.len(), &run))?;
        }
        // Written by now, and by far the largest part.
        run.recorder.samples = Vec::new();
        runs.push(run);
    }
    if runs.is_empty() {
        return Err(LoadError::NothingMeasured);
    }
    if let Some(mut csv) = csv {
        csv.write(|out| out.flush())?;
    }
    let mut report = Report::new(target.url(), settings, &runs, args.seed);
    if args.allow_late && report.late_us.max > micros(args.max_late) {
        let bound = show_nanos(args.max_late);
        let warning = format!("requests were sent later than the bound of {bound} (--allow-late)");
        report.warnings.insert(0, warning);
    }
    if interrupted() {
        report.warnings.insert(0, "interrupted: these figures are of the time until then".into());
    }
    Ok(report)
}

/// A bar on a terminal, which a thread of its own draws: the sending thread only counts.
fn bar(args: &Args, settings: &Settings, number: u32) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let expected = Some(settings.expected_requests());
    let bar = ProgressBar::with_draw_target(expected, ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("{msg} {bar:40} {pos}/{len} requests {elapsed}");
    bar.set_style(style.expect("the template is a constant"));
    bar.set_message(format!("{:.0} rps, {}/{}", settings.rps, number + 1, args.invocations));
    bar.enable_steady_tick(REDRAW_EVERY);
    bar
}

/// The file of every request, which is written while measuring; its errors name it.
struct Log<'a> {
    path: &'a Path,
    out: BufWriter<File>,
}

impl<'a> Log<'a> {
    fn create(path: &'a Path) -> Result<Self, LoadError> {
        let file = File::create(path).map_err(|error| unwritten(path, &error))?;
        let mut log = Self { path, out: BufWriter::new(file) };
        log.write(|out| writeln!(out, "{CSV_HEADER}"))?;
        Ok(log)
    }

    fn write(
        &mut self,
        with: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
    ) -> Result<(), LoadError> {
        with(&mut self.out).map_err(|error| unwritten(self.path, &error))
    }
}

fn unwritten(path: &Path, error: &io::Error) -> LoadError {
    let advice = "free some space, or name another file";
    LoadError::Failed(format!("writing {}: {error}; {advice}", path.display()))
}
