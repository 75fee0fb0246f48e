//! The experiments of Shadow Profiling (CGO 2007): accuracy, slowdown, page faults and coverage for
//! some lengths of shadows and some loads.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use elfen_console::duration::number;
use elfen_rt::clock::monotonic_ns;
use nix::sys::resource::{UsageWho, getrusage};
use serde::Serialize;

use super::programs::Program;
use crate::bench::{BenchError, Explain, Progress};

const FIX: &str = "see what `elfen profile` says about it";

/// What to run.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Instructions of a shadow, as `elfen profile record --sample` takes them.
    pub(crate) samples: Vec<String>,
    /// CPUs that shadows may use.
    pub(crate) loads: Vec<f64>,
    /// How often a program does its work while it is sampled.
    pub(crate) rounds: u32,
}

/// One configuration, in the mean of all programs.
#[derive(Clone, Serialize, Debug)]
pub(crate) struct Configuration {
    pub(crate) sample: String,
    pub(crate) load: f64,
    pub(crate) programs: Vec<Outcome>,
}

/// One program in one configuration.
#[derive(Clone, Serialize, Debug)]
pub(crate) struct Outcome {
    pub(crate) program: &'static str,
    pub(crate) shadows: f64,
    /// Weight match of paths with the exact profile.
    pub(crate) accuracy: f64,
    /// How far the invariance of results differs from the exact one (Diff-Top), in percent.
    pub(crate) values: f64,
    /// Time divided by that without the profiler.
    pub(crate) slowdown: f64,
    /// Page faults per second, divided by those without the profiler.
    pub(crate) faults: f64,
    /// The part of all instructions that shadows executed, in percent.
    pub(crate) coverage: f64,
    /// System calls of the shadows, by [`KINDS`].
    pub(crate) calls: [f64; KINDS.len()],
}

/// The shares of system calls of one program, in percent, by their kinds.
#[derive(Clone, Serialize, Debug)]
pub(crate) struct Calls {
    pub(crate) program: &'static str,
    pub(crate) percent: [f64; KINDS.len()],
}

#[derive(Clone, Serialize, Debug)]
pub(crate) struct Experiment {
    pub(crate) configurations: Vec<Configuration>,
    pub(crate) calls: Vec<Calls>,
    /// Programs that are not installed.
    pub(crate) missing: Vec<&'static str>,
}

/// A mean of a number over the programs of a configuration.
pub(crate) fn mean(outcomes: &[Outcome], of: impl Fn(&Outcome) -> f64) -> f64 {
    let found: Vec<f64> = outcomes.iter().map(of).filter(|value| value.is_finite()).collect();
    found.iter().sum::<f64>() / number(found.len() as u64)
}

/// How long something took, and its page faults.
#[derive(Clone, Copy, Debug)]
struct Cost {
    ns: f64,
    faults: f64,
}

struct Laboratory<'a> {
    elfen: &'a Path,
    folder: &'a Path,
    plan: &'a Plan,
}

pub(crate) fn run(
    (elfen, folder): (&Path, &Path),
    programs: &[Program],
    plan: &Plan,
    progress: Progress<'_>,
) -> Result<Experiment, BenchError> {
    let laboratory = Laboratory { elfen, folder, plan };
    let mut configurations: Vec<Configuration> = Vec::new();
    for sample in &plan.samples {
        for &load in &plan.loads {
            let sample = sample.clone();
            configurations.push(Configuration { sample, load, programs: Vec::new() });
        }
    }
    let mut calls = Vec::new();
    for program in programs {
        progress(&format!("{}: exact profile", program.name));
        let exact = laboratory.exact(program)?;
        let executed = laboratory.report(&exact)?["instructions"].as_f64().unwrap_or(0.0);
        let mut sums = [0.0; KINDS.len()];
        for one in &mut configurations {
            progress(&format!("{}: {} at load {}", program.name, one.sample, one.load));
            let native = laboratory.native(program)?;
            let outcome = laboratory.sampled(program, one, &exact, native, executed)?;
            for (sum, count) in sums.iter_mut().zip(outcome.calls) {
                *sum += count;
            }
            one.programs.push(outcome);
        }
        let all = sums.iter().sum::<f64>().max(1.0);
        calls.push(Calls { program: program.name, percent: sums.map(|sum| sum / all * 100.0) });
    }
    Ok(Experiment { configurations, calls, missing: Vec::new() })
}

/// The kinds of system calls, as `elfen profile report --json` names them.
pub(crate) const KINDS: [&str; 5] = ["harmless", "output", "input", "other", "ends"];

impl Laboratory<'_> {
    fn path(&self, program: &Program, what: &str) -> PathBuf {
        self.folder.join(format!("{}.{what}", program.name))
    }

    fn exact(&self, program: &Program) -> Result<PathBuf, BenchError> {
        let path = self.path(program, "exact");
        let mut words = self.record(&["--by", "everything", "--what", "paths,values"], &path);
        words.extend(program.words(1));
        execute(&words)?;
        Ok(path)
    }

    /// The words of `elfen profile record`, up to the program.
    fn record(&self, options: &[&str], file: &Path) -> Vec<OsString> {
        let mut words: Vec<OsString> = vec![self.elfen.into()];
        words.extend(["profile", "record", "-q"].map(OsString::from));
        words.extend(options.iter().map(OsString::from));
        words.extend(["-o".into(), file.into(), "--".into()]);
        words
    }

    fn native(&self, program: &Program) -> Result<Cost, BenchError> {
        execute(&program.words(self.plan.rounds))
    }

    fn sampled(
        &self,
        program: &Program,
        configuration: &Configuration,
        exact: &Path,
        native: Cost,
        executed: f64,
    ) -> Result<Outcome, BenchError> {
        let path = self.path(program, "shadows");
        let load = configuration.load.to_string();
        // Only the load limits the shadows, as in the paper.
        let options =
            ["--by", "shadows", "--what", "paths,values", "--cost", "50%", "--load", &load];
        let more = ["--sample", &configuration.sample, "--max-stall", "1s"];
        let mut words = self.record(&[&options[..], &more].concat(), &path);
        words.extend(program.words(self.plan.rounds));
        let cost = execute(&words)?;
        let report = self.report(&path)?;
        let part = |name: &str| report[name].as_f64().unwrap_or(0.0);
        let words = ["compare".as_ref(), exact.as_os_str(), path.as_os_str()];
        let compared = self.printed(&words)?;
        let paths =
            compared["rows"].as_array().into_iter().flatten().find(|row| row["what"] == "paths");
        let accuracy = paths.and_then(|row| row["weight_match"].as_f64()).unwrap_or(0.0);
        let rounds = f64::from(self.plan.rounds);
        let count = |kind: &str| report["system_calls"][kind].as_f64().unwrap_or(0.0);
        Ok(Outcome {
            program: program.name,
            shadows: part("bursts"),
            accuracy,
            values: compared["values"]["difference"].as_f64().unwrap_or(1.0) * 100.0,
            slowdown: cost.ns / native.ns,
            faults: part("page_faults") / cost.ns / (native.faults / native.ns),
            coverage: part("instructions") / (executed * rounds).max(1.0) * 100.0,
            calls: KINDS.map(count),
        })
    }

    fn report(&self, file: &Path) -> Result<serde_json::Value, BenchError> {
        self.printed(&["report".as_ref(), file.as_os_str()])
    }

    /// The JSON object that a command of `elfen profile` prints.
    fn printed(&self, words: &[&OsStr]) -> Result<serde_json::Value, BenchError> {
        crate::bench::profile::printed(self.elfen, words)
    }
}

/// Runs a program without its output.
fn execute(words: &[OsString]) -> Result<Cost, BenchError> {
    let (program, arguments) =
        words.split_first().ok_or_else(|| BenchError::failed("no program is named", FIX))?;
    let null = || File::options().read(true).write(true).open("/dev/null");
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stderr(Stdio::null());
    command.stdout(null().explain("/dev/null", FIX)?);
    let faults =
        || getrusage(UsageWho::RUSAGE_CHILDREN).map_or(0, |usage| usage.minor_page_faults());
    let before = (monotonic_ns(), faults());
    let status = command.status().explain(format!("running {}", program.display()), FIX)?;
    if !status.success() {
        let why = format!("{} failed: {status}", program.display());
        return Err(BenchError::failed(why, FIX));
    }
    #[expect(clippy::cast_precision_loss, reason = "faults are far below 2^53")]
    let faults = (faults() - before.1) as f64;
    Ok(Cost { ns: number(monotonic_ns() - before.0), faults })
}
