//! Runs `elfen-load`: measures a service, or is the reference service.

use super::args::LoadArgs;
use super::driver::Settings;
use super::queries::Target;
use super::reference;
use super::report::{CSV_HEADER, LoadReport, write_csv};
use crate::process::{catch_interrupts, interrupted};
use crate::units::micros;
use elfen_console::command::{self, Outcome};
use elfen_console::duration;
use elfen_console::failure::{Failure, Status};
use elfen_console::output;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::process::ExitCode;

pub fn main() -> ExitCode {
    command::main::<LoadArgs>(|_| Ok(()), run)
}

fn run(args: LoadArgs, out: &mut dyn Write) -> Outcome {
    catch_interrupts()?;
    if let Some(address) = args.reference_server {
        // Port 0 requests any free port, so the chosen address is printed.
        let ready = |address| writeln!(out, "serving on {address}").and_then(|()| out.flush());
        let times = args.service.unwrap_or_default();
        reference::serve(address, times, args.seed, ready).map_err(|error| {
            let (what, fix) = (format!("serving at {address}"), "choose an address that is free");
            Failure::new(Status::Failed, what, error, fix)
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    let target = args.url.as_ref().expect("clap requires it here");
    let settings = args.settings(target)?;
    if settings.queries.skipped > 0 {
        let skipped = settings.queries.skipped;
        output::warn(&format!("skipped {skipped} tasks that are not text queries"));
    }
    let report = measure(&args, target, &settings)?;
    output::print(out, args.json, &report, || report.table())?;
    let status = if interrupted() { Status::Interrupted as u8 } else { 0 };
    Ok(ExitCode::from(status))
}

fn measure(args: &LoadArgs, target: &Target, settings: &Settings) -> Result<LoadReport, Failure> {
    // The file is created before the run, so that an unwritable path is reported at once.
    let mut csv = args.csv.as_deref().map(Log::create).transpose()?;
    let mut runs = Vec::new();
    for number in 0..args.runs {
        if interrupted() {
            break;
        }
        let mut run = settings.run(args.seed.wrapping_add(number.into()))?;
        if run.recorder.requests() == 0 && interrupted() {
            break;
        }
        if let Some(csv) = &mut csv {
            csv.write(|out| write_csv(out, runs.len(), &run))?;
        }
        // The samples are in the file by now, and are by far the largest part of a run.
        run.recorder.samples = Vec::new();
        runs.push(run);
    }
    if runs.is_empty() {
        let (why, fix) = ("interrupted before anything was measured", "let it run longer");
        return Err(Failure::new(Status::Interrupted, "measuring", why, fix));
    }
    if let Some(mut csv) = csv {
        csv.write(|out| out.flush())?;
    }
    let mut report = LoadReport::new(target.url(), settings, &runs, args.seed);
    if args.allow_late && report.late_us.max > micros(args.max_late) {
        let bound = duration::show(args.max_late);
        let warning = format!("requests were sent later than the bound of {bound} (--allow-late)");
        report.warnings.insert(0, warning);
    }
    if interrupted() {
        report.warnings.insert(0, "interrupted: the figures cover the time until then".into());
    }
    Ok(report)
}

/// The file with all requests, which is written while measuring. Errors name its path.
struct Log<'a> {
    path: &'a Path,
    out: BufWriter<File>,
}

impl<'a> Log<'a> {
    fn create(path: &'a Path) -> Result<Self, Failure> {
        let file =
            File::create(path).map_err(|error| Failure::unwritable("requests", path, error))?;
        let mut log = Self { path, out: BufWriter::new(file) };
        log.write(|out| writeln!(out, "{CSV_HEADER}"))?;
        Ok(log)
    }

    fn write(
        &mut self,
        with: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
    ) -> Result<(), Failure> {
        with(&mut self.out).map_err(|error| Failure::unwritable("requests", self.path, error))
    }
}
