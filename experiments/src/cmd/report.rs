//! `elfen lab report`: writes one HTML file with figures. The figures show live runs, the simulated
//! chapter 5 of the thesis, both, or one recording of `elfen shim`.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status, named};
use elfen_console::output::warn;
use elfen_console::shell;

use super::model_file::{Interference, ModelFile};
use crate::record;
use crate::report::simulated::{self, Impossible, Naps, Parameters, Simulation};
use crate::report::{HtmlReport, live, shim};

const EXAMPLES: &str = "\
Examples:
  elfen lab report                           the thesis's figures, simulated
  elfen lab report runs.jsonl --html it.html the results of an experiment
  elfen lab report run.shim --html it.html   a recording of `elfen shim -o`
  elfen lab bench nap --json > nap.json
  elfen lab report runs.jsonl --naps nap.json
  elfen lab report runs.jsonl --json | jq '.figures[] | {id, reading}'

The file is self-contained. The numbers of each figure can be saved from it as CSV.";

/// The output file if the user names none.
const OUTPUT: &str = "report.html";

/// Draw live runs, or simulations of the thesis's figures, as one HTML file
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct LabReportArgs {
    /// JSON lines of live runs, or a recording of `elfen shim`; without a file, the thesis's
    /// figures are simulated
    results: Option<PathBuf>,

    /// Also simulate the thesis's figures, in addition to those of live runs
    #[arg(long)]
    thesis: bool,

    /// Simulate with the slowdowns and nap times of this TOML file, which `elfen lab calibrate`
    /// writes, instead of those of the thesis
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,

    /// The output of `elfen lab bench nap --json`, for the figure of naps
    #[arg(long = "naps", value_name = "FILE")]
    nap: Option<PathBuf>,

    /// The file for the page; - for standard output [default: report.html, nothing with --json]
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Simulated requests for each point
    #[arg(long, value_name = "N", default_value_t = 200_000)]
    requests: u64,

    /// The same seed gives the same report
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// Print the figures' numbers as one JSON object
    #[arg(long, conflicts_with = "html")]
    json: bool,
}

pub(crate) fn run(args: &LabReportArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let report = args.report()?;
    let html = report.html().map_err(|error| {
        let fix = "remove these numbers from the files";
        Failure::new(Status::Failed, "the report", error, fix)
    })?;
    if args.json {
        elfen_console::output::print_json(out, &report)?;
        return Ok(ExitCode::SUCCESS);
    }
    let output = args.html.as_deref().unwrap_or(Path::new(OUTPUT));
    if output == Path::new("-") {
        out.write_all(html.as_bytes()).map_err(Failure::output)?;
        return Ok(ExitCode::SUCCESS);
    }
    let name = output.display();
    fs::write(output, &html).map_err(|error| Failure::unwritable("page", output, error))?;
    writeln!(out, "{name}: {} figures", report.figures.len()).map_err(Failure::output)?;
    Ok(ExitCode::SUCCESS)
}

impl LabReportArgs {
    fn report(&self) -> Result<HtmlReport, Failure> {
        let naps = self.nap.as_deref().map(measured_naps).transpose()?;
        let mut report = match &self.results {
            Some(file) if is_recording(file) => self.of_recording(file)?,
            Some(file) => of_results(file)?,
            None => self.simulated()?,
        };
        if self.results.is_some() && self.simulates() {
            let simulated = self.simulated()?;
            report.title = "Elfen: live runs, and simulations of the thesis's figures".to_owned();
            report.notes.extend(simulated.notes);
            report.tables.extend(simulated.tables);
            report.figures.extend(simulated.figures);
        }
        report.command = self.command();
        if self.simulates() || naps.is_some() {
            let command = match &self.nap {
                Some(_) => format!("elfen lab bench nap --json\n{}", report.command),
                None => report.command.clone(),
            };
            report.figures.push(simulated::naps(naps.as_ref(), &command));
        }
        Ok(report)
    }

    fn of_recording(&self, file: &Path) -> Result<HtmlReport, Failure> {
        let recording = elfen_shim::recording::open(file).map_err(|error| {
            let fix = "use a file that `elfen shim -o` wrote";
            Failure::new(Status::Failed, named("recording", file), error, fix)
        })?;
        Ok(shim::report(&recording, &self.command()))
    }

    fn simulates(&self) -> bool {
        self.results.is_none() || self.thesis || self.model.is_some()
    }

    fn simulated(&self) -> Result<HtmlReport, Failure> {
        let parameters = self.parameters()?;
        let (requests, seed) = (self.requests, self.seed);
        let simulation = Simulation { parameters, requests, seed, command: self.command() };
        simulation.report().map_err(|error: Impossible| {
            let fix = "use another number for --requests";
            Failure::new(Status::Usage, "the simulation", error, fix)
        })
    }

    /// Returns the thesis's parameters, or those of a file, with the thesis's demand.
    fn parameters(&self) -> Result<Parameters, Failure> {
        let Some(file) = &self.model else { return Ok(Parameters::default()) };
        let model = ModelFile::read(file)?;
        let on = if model.machine.siblings { "on" } else { "not on SMT, but on" };
        let batch = |of: &Interference| (of.name.clone(), model.batch(of));
        Ok(Parameters {
            origin: format!(
                "{} (calibrated {on} {}) and the demand of the thesis",
                file.display(),
                model.machine.cpu
            ),
            batches: model.batch.iter().map(batch).collect(),
            options: format!("--model {}", shell_word(file)),
            are_of_thesis: false,
            ..Parameters::default()
        })
    }

    /// Returns the command line that makes the same report. It leaves out the output file.
    fn command(&self) -> String {
        let mut words = vec!["elfen lab report".to_owned()];
        words.extend(self.results.as_deref().map(shell_word));
        if self.thesis {
            words.push("--thesis".to_owned());
        }
        if self.simulates() {
            words.push(format!("--requests {} --seed {}", self.requests, self.seed));
        }
        words.extend(self.model.as_deref().map(|file| format!("--model {}", shell_word(file))));
        words.extend(self.nap.as_deref().map(|file| format!("--naps {}", shell_word(file))));
        words.join(" ")
    }
}

/// Whether the file begins like a recording.
fn is_recording(file: &Path) -> bool {
    let mut begins = [0; elfen_shim::recording::MAGIC.len()];
    // Only regular files are read here: the bytes of a pipe can be read only once.
    file.is_file()
        && fs::File::open(file).and_then(|mut file| file.read_exact(&mut begins)).is_ok()
        && begins == elfen_shim::recording::MAGIC
}

fn of_results(file: &Path) -> Result<HtmlReport, Failure> {
    const FIX: &str = "name a file that `elfen lab experiment` wrote";
    let results = record::read(&read(file, "results")?);
    let results = results.map_err(|error| {
        wrong(file, "results", format!("not the results of an experiment: {error}"), FIX)
    })?;
    if let Some(line) = results.cut {
        warn(&format!("{}: line {line} is truncated, so it is ignored", named("results", file)));
    }
    live::report(&results.lines).map_err(|error| wrong(file, "results", error, FIX))
}

fn measured_naps(file: &Path) -> Result<Naps, Failure> {
    let naps = serde_json::from_slice(&read(file, "nap")?);
    naps.map_err(|error| {
        wrong(file, "nap", error, "use the output of `elfen lab bench nap --json`")
    })
}

fn read(file: &Path, what: &str) -> Result<Vec<u8>, Failure> {
    fs::read(file).map_err(|error| wrong(file, what, error, "choose a file that can be read"))
}

fn wrong(file: &Path, what: &str, error: impl std::fmt::Display, fix: &str) -> Failure {
    Failure::new(Status::Failed, named(what, file), error, fix)
}

/// Quotes a path for a shell, if necessary.
fn shell_word(path: &Path) -> String {
    shell::word(&path.display().to_string())
}
