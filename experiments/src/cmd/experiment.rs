//! `elfen lab experiment`: measures every combination of load, scenario and batch program on this
//! machine.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use elfen_console::failure::{Failure, Status, named};
use elfen_console::output::print;
use serde::Serialize;

use super::experiment_args::{ExperimentArgs, WHAT};
use super::meter::Meter;
use super::{live_args, live_rows};
use crate::expected;
use crate::live::experiment::{self as live_experiment, Experiment, Results};
use crate::live::plan::{self, Job};
use crate::live::summary::{self, Row};
use crate::live::{self, LiveError};
use crate::record::Setup;

#[derive(Serialize)]
struct ExperimentReport<'a> {
    results: &'a Path,
    setup: Option<&'a Setup>,
    rows: Vec<Row>,
    remarks: Vec<String>,
}

pub(crate) fn run(args: &ExperimentArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let experiment = args.experiment()?;
    if args.dry_run {
        return dry_run(&experiment, out);
    }
    live::install_signal_handlers().map_err(|error| args.failure(&error))?;
    for file in [&args.html, &args.json_out].into_iter().flatten() {
        live_args::writable(file)?;
    }
    live_args::writable(&args.output)?;
    args.service_times.as_deref().map_or(Ok(()), live_args::writable)?;
    let mut results = Results::open(&args.output).map_err(|error| args.failure(&error))?;
    args.check_same_experiment(&experiment, &results)?;
    if let (true, Some(file)) = (results.lines.is_empty(), &args.service_times) {
        // The file may have service times of an earlier experiment, so it is emptied.
        fs::write(file, "").map_err(|error| Failure::unwritable("file", file, error))?;
    }
    let meter = Meter::new();
    let done = experiment.run(&mut results, &mut |progress| meter.show_progress(progress));
    drop(meter);
    done.map_err(|error| args.failure(&error))?;
    if let Some(file) = &args.html {
        live_args::write_page(file, "Elfen: an experiment", &[], &results.lines)?;
    }
    let mut rows = summary::rows(&results.lines);
    expected::foresee(&mut rows, &results.lines);
    let right = live_rows::all_right(&rows);
    let remarks = live_rows::remarks(&results.lines, &rows);
    let report = ExperimentReport { results: &args.output, setup: results.setup(), rows, remarks };
    if let Some(file) = &args.json_out {
        live_args::write_report(file, &report)?;
    }
    print(out, args.json, &report, || report.text())?;
    Ok(if right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl ExperimentArgs {
    fn failure(&self, error: &LiveError) -> Failure {
        let file = self.output.display();
        match error {
            LiveError::Interrupted(signal) => {
                let fix = format!("repeat the command to make the runs that are missing in {file}");
                Failure::new(Status::of_signal(*signal), WHAT, error, fix)
            }
            LiveError::Locked | LiveError::NoResults(_) => {
                live_args::failure(&named("results", &self.output), error)
            }
            _ => live_args::failure(WHAT, error),
        }
    }

    /// Refuses a results file of another plan or another machine.
    fn check_same_experiment(
        &self,
        experiment: &Experiment,
        results: &Results,
    ) -> Result<(), Failure> {
        let name = named("results", &self.output);
        let refuse = |why: &str| {
            let fix =
                "choose another file with --output, or repeat the command in the file's first line";
            Failure::new(Status::Usage, name.clone(), why, fix)
        };
        let Some(begun) = results.setup() else {
            let has_no_setup = !results.lines.is_empty();
            return if has_no_setup {
                Err(refuse("its first line is not a setup"))
            } else {
                Ok(())
            };
        };
        let mut wanted = live_experiment::setup(&experiment.order, &experiment.plan, String::new());
        if experiment.order.index.is_some() {
            // The number of documents of an existing index is known only once the index is open.
            wanted.documents = begun.documents;
        }
        live_experiment::first_difference(begun, &wanted).map_or(Ok(()), |why| Err(refuse(&why)))
    }
}

fn dry_run(experiment: &Experiment, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let Experiment { plan, specs, order, .. } = experiment;
    // The load in percent needs the capacity, which is not measured in a dry run.
    let jobs = plan::jobs(plan, specs, experiment.capacity_rps.unwrap_or(1.0));
    let each = Duration::from_secs_f64(plan.warmup_s + plan.duration_s);
    let count = u32::try_from(jobs.len()).unwrap_or(u32::MAX);
    let mut text = format!(
        "{} runs on lanes {}, at least {} s, in this order:\n",
        jobs.len(),
        order.machine.lanes(),
        each.saturating_mul(count).as_secs()
    );
    for Job { spec, batch, load, rps, invocation, .. } in &jobs {
        let load = match plan.rates.contains(rps) {
            true => format!("{rps} requests/s"),
            false => format!("{:.0} %", load * 100.0),
        };
        let batch = batch.as_ref().map_or_else(String::new, |batch| format!(" with {batch}"));
        text += &format!("{invocation}: {load}, {}{batch}\n", spec);
    }
    out.write_all(text.as_bytes()).map_err(Failure::output)?;
    Ok(ExitCode::SUCCESS)
}

impl ExperimentReport<'_> {
    fn text(&self) -> String {
        let mut text = live_rows::text(&self.rows) + "\n";
        if let Some(Setup { capacity_rps, documents, plan, .. }) = self.setup {
            let service = plan.as_ref().and_then(|plan| plan.service.as_ref());
            let of = match service {
                None => format!("searches per second in {documents} documents"),
                Some(service) => format!("requests per second to {}", service.url),
            };
            text += &format!("100 % load is {capacity_rps:.0} {of}\n");
        }
        self.remarks.iter().for_each(|remark| text += &format!("{remark}\n"));
        text + &format!("results: {}\n", self.results.display())
    }
}
