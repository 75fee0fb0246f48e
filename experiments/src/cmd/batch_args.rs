//! The options of `simulate` and `plan` for the batch program, its polls, and how its lane naps.

use std::path::{Path, PathBuf};
use std::time::Duration;

use elfen_console::duration;
use elfen_console::failure::{Failure, Status};
use elfen_rt::clock::nanos;
use serde::Serialize;

use super::model_file::ModelFile;
use simulator::batches::{self, CHECKS, GUARD, KINDS, Kind, NAPS};
use simulator::pair::{Batch, Polling, Signal};
use simulator::time::{nanoseconds, real};

/// What a command models if no option says otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Usual {
    /// The thesis's batch: checks in the batch's source, and nanonap.
    Thesis,
    /// What `elfen run` gives to any program on any machine: a guard, and naps with PAUSE.
    Run,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum BatchChecks {
    /// The batch has checks, in its source or patched in, and polls itself
    Source,
    /// The batch has no checks; a guard polls, as `elfen run` does for any program
    Guard,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum SignalName {
    /// The task map, and the requests that the service publishes
    Service,
    /// Only the task map: fixed-budget then has one budget for each busy period, and the other
    /// budget policies become borrow-idle
    Tasks,
}

#[derive(clap::Args, Debug)]
pub(crate) struct BatchArgs {
    /// Take slowdowns and naps from this TOML file, which `elfen lab calibrate` writes, instead of
    /// the thesis
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,

    /// The batch program: a name from the --model file, or one of the thesis: `typical` (slows
    /// requests by a factor of 1.5) or `pause` (IPC 0.01; by a factor of 1.37) [default: the first]
    #[arg(long, value_name = "NAME")]
    batch: Option<String>,

    /// Slowdown of a request while the batch runs, instead of the value for --batch
    #[arg(long, value_name = "FACTOR", value_parser = slowdown)]
    slowdown: Option<f64>,

    /// Slowdown of the batch while a request runs, instead of the value for --batch
    #[arg(long, value_name = "FACTOR", value_parser = slowdown)]
    batch_slowdown: Option<f64>,

    /// Whether the batch or a guard polls [default: source in simulate, as in the thesis; guard in
    /// plan, as in `elfen run`]
    #[arg(long, value_enum)]
    batch_checks: Option<BatchChecks>,

    /// The time between two checks of the batch [default: 1us]
    #[arg(long, value_name = "TIME", value_parser = duration::parse,
        conflicts_with = "poll_interval")]
    check_interval: Option<Duration>,

    /// The time between two polls of the guard of a batch without checks [default: 500us]
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    poll_interval: Option<Duration>,

    /// What the polls read about the request lane
    #[arg(long, value_enum, default_value = "service")]
    source: SignalName,

    /// How the batch lane naps while requests run [default: the first of the --model file; device,
    /// the thesis's nanonap, in simulate; spin, which every machine has, in plan]
    #[arg(long, value_name = "NAP",
        value_parser = clap::builder::PossibleValuesParser::new(NAPS.map(|nap| nap.name)))]
    nap: Option<String>,

    /// Slowdown of a request while the batch lane naps [default: that of the nap; 1.37 for spin,
    /// which executes PAUSE, and 1 for the others]
    #[arg(long, value_name = "FACTOR", value_parser = slowdown)]
    nap_slowdown: Option<f64>,

    /// The time from the poll that decides to nap until the lane naps [default: that of the nap]
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    sleep: Option<Duration>,

    /// The time from the start of the request lane's idle period until the batch runs [default:
    /// that of the nap]
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    wake: Option<Duration>,
}

impl BatchArgs {
    /// Returns the parameters that every output prints with its figures.
    pub(crate) fn parameters(&self, usual: Usual) -> Result<Parameters, Failure> {
        let polling = self.polling(usual)?;
        let mut all = match &self.model {
            Some(file) => self.of_file(file, usual)?,
            None => self.built_in(usual)?,
        };
        match polling {
            Polling::Checks { every_ns } => all.check_ns = Some(every_ns),
            Polling::Guard { every_ns } => all.poll_interval_ns = Some(every_ns),
        }
        if self.source == SignalName::Tasks {
            all.signal = "tasks";
        }
        let given = &mut all.given;
        let mut note = |option, is_given: bool| given.extend(is_given.then_some(option));
        note("slowdown", set(&mut all.request_slowdown, self.slowdown));
        note("batch-slowdown", set(&mut all.batch_slowdown, self.batch_slowdown));
        note("batch-checks", self.batch_checks.is_some());
        note("check-interval", self.check_interval.is_some());
        note("poll-interval", self.poll_interval.is_some());
        note("nap", self.nap.is_some());
        note("nap-slowdown", set(&mut all.nap_slowdown, self.nap_slowdown));
        note("sleep", set(&mut all.sleep_ns, self.sleep.map(nanos)));
        note("wake", set(&mut all.wake_ns, self.wake.map(nanos)));
        Ok(all)
    }

    fn polling(&self, usual: Usual) -> Result<Polling, Failure> {
        let by_default = match usual {
            _ if self.check_interval.is_some() => BatchChecks::Source,
            _ if self.poll_interval.is_some() => BatchChecks::Guard,
            Usual::Thesis => BatchChecks::Source,
            Usual::Run => BatchChecks::Guard,
        };
        let every = |time: Option<Duration>, usual: Polling| time.map_or(usual.every_ns(), nanos);
        match self.batch_checks.unwrap_or(by_default) {
            BatchChecks::Source if self.poll_interval.is_some() => {
                Err(no_use("source", "--poll-interval", "a guard", "--check-interval 1us"))
            }
            BatchChecks::Guard if self.check_interval.is_some() => Err(no_use(
                "guard",
                "--check-interval",
                "checks in the program",
                "--poll-interval 500us",
            )),
            BatchChecks::Source => {
                Ok(Polling::Checks { every_ns: every(self.check_interval, CHECKS) })
            }
            BatchChecks::Guard => Ok(Polling::Guard { every_ns: every(self.poll_interval, GUARD) }),
        }
    }

    fn built_in(&self, usual: Usual) -> Result<Parameters, Failure> {
        let kind = self.batch.as_deref().map_or(Ok(&KINDS[0]), built_in)?;
        let nap = self.nap_of_thesis(usual);
        let source = "the numbers of the thesis".to_owned();
        Ok(Parameters::new(source, kind.name, &kind.on(&nap, CHECKS), &nap))
    }

    fn nap_of_thesis(&self, usual: Usual) -> batches::Nap {
        let usual = match usual {
            Usual::Thesis => "device",
            Usual::Run => "spin",
        };
        batches::nap(self.nap.as_deref().unwrap_or(usual)).unwrap_or(NAPS[0])
    }

    fn of_file(&self, file: &Path, usual: Usual) -> Result<Parameters, Failure> {
        let model = ModelFile::read(file)?;
        let interference = model.interference(self.batch.as_deref()).ok_or_else(|| {
            let names: Vec<&str> = model.batch.iter().map(|batch| batch.name.as_str()).collect();
            let name = self.batch.as_deref().unwrap_or_default();
            let why = format!("{} has no such program", file.display());
            let fix = format!("use one of {}", names.join(", "));
            Failure::new(Status::Usage, format!("batch {name:?}"), why, fix)
        })?;
        let siblings = if model.machine.siblings { "" } else { ", not measured on SMT" };
        let (nap, of_thesis) = match model.nap(self.nap.as_deref()) {
            Some(measured) => (measured.nap(), measured.lacking()),
            None => (self.nap_of_thesis(usual), vec!["nap"]),
        };
        let source = format!("{} ({}{siblings})", file.display(), model.machine.cpu);
        let batch = interference.beside(&nap);
        Ok(Parameters { of_thesis, ..Parameters::new(source, &interference.name, &batch, &nap) })
    }
}

/// Sets a parameter to the value of its option, if the option is given. Returns whether it is
/// given.
fn set<T>(parameter: &mut T, value: Option<T>) -> bool {
    let is_given = value.is_some();
    if let Some(value) = value {
        *parameter = value;
    }
    is_given
}

fn no_use(checks: &str, option: &str, polls: &str, instead: &str) -> Failure {
    let what = format!("--batch-checks {checks}");
    let why = format!("{option} applies only to {polls}");
    Failure::new(Status::Usage, what, why, format!("use {instead}, or omit {option}"))
}

fn built_in(name: &str) -> Result<&'static Kind, Failure> {
    KINDS.iter().find(|kind| kind.name == name).ok_or_else(|| {
        let names = KINDS.map(|kind| kind.name).join(" or ");
        let fix = format!("use {names}, or a program of a file with --model");
        Failure::new(Status::Usage, format!("batch {name:?}"), "there is no such program", fix)
    })
}

/// The parameters of a simulation, under the names that every output uses.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Parameters {
    source: String,
    /// Parameters that the file does not give. They have the thesis's values.
    of_thesis: Vec<&'static str>,
    /// Options on the command line. They override the source.
    given: Vec<&'static str>,
    batch: String,
    request_slowdown: f64,
    batch_slowdown: f64,
    /// The time between two checks in the batch's source; null if a guard polls.
    check_ns: Option<u64>,
    /// The time between two polls of a guard; null if the batch has checks.
    poll_interval_ns: Option<u64>,
    signal: &'static str,
    nap: &'static str,
    nap_slowdown: f64,
    sleep_ns: u64,
    wake_ns: u64,
}

impl Parameters {
    fn new(source: String, name: &str, batch: &Batch, nap: &batches::Nap) -> Self {
        let factor = |milli| real(milli) / 1000.0;
        Self {
            source,
            of_thesis: Vec::new(),
            given: Vec::new(),
            batch: name.to_owned(),
            request_slowdown: factor(batch.request_slowdown_milli),
            batch_slowdown: factor(batch.batch_slowdown_milli),
            check_ns: None,
            poll_interval_ns: None,
            signal: "service",
            nap: nap.name,
            nap_slowdown: factor(nap.slowdown_milli),
            sleep_ns: nap.sleep_ns,
            wake_ns: nap.wake_ns,
        }
    }

    pub(crate) fn batch(&self) -> Batch {
        let milli = |factor: f64| nanoseconds(factor * 1000.0);
        Batch {
            request_slowdown_milli: milli(self.request_slowdown),
            batch_slowdown_milli: milli(self.batch_slowdown),
            nap_slowdown_milli: milli(self.nap_slowdown),
            polling: self.polling(),
            signal: if self.signal == "tasks" { Signal::Tasks } else { Signal::Service },
            sleep_ns: self.sleep_ns,
            wake_ns: self.wake_ns,
            ipc_after_ns: 0,
        }
    }

    pub(crate) fn has_guard(&self) -> bool {
        self.poll_interval_ns.is_some()
    }

    fn polling(&self) -> Polling {
        match (self.check_ns, self.poll_interval_ns) {
            (_, Some(every_ns)) => Polling::Guard { every_ns },
            (check_ns, None) => {
                Polling::Checks { every_ns: check_ns.unwrap_or_else(|| CHECKS.every_ns()) }
            }
        }
    }

    /// Returns the parameters as two lines of text.
    pub(crate) fn text(&self) -> String {
        let Self { source, batch, request_slowdown, batch_slowdown, nap, nap_slowdown, .. } = self;
        let [sleep, wake] = [self.sleep_ns, self.wake_ns].map(duration::show);
        let given: Vec<String> = self.given.iter().map(|option| format!("--{option}")).collect();
        let given =
            if given.is_empty() { String::new() } else { format!(" and {}", given.join(", ")) };
        let of_thesis = match self.of_thesis.as_slice() {
            [] => String::new(),
            lacking => format!(
                " ({}: from the thesis, as the file lacks them)",
                lacking.join(
                    ", \
                "
                )
            ),
        };
        let every = duration::show(self.polling().every_ns());
        let polls = match self.polling() {
            Polling::Checks { .. } => format!(
                "by checks in the batch's source, every {every}; for programs without checks, use \
                 --batch-checks guard"
            ),
            Polling::Guard { .. } => format!(
                "by a guard, every {every}, as under `elfen run` without checks; for programs with \
                 checks, use --batch-checks source"
            ),
        };
        let signal = if self.signal == "tasks" { " of the task map only" } else { "" };
        format!(
            "parameters: {source}{given}: batch {batch}, slowdown of requests {request_slowdown} \
             x, of the batch {batch_slowdown} x; nap {nap}, slowdown of requests {nap_slowdown} x, \
             time to sleep {sleep}, to wake {wake}{of_thesis}\npolls{signal}: {polls}\n"
        )
    }

    /// Returns advice for a lane that uses a part of its core while it naps.
    pub(crate) fn advice(&self) -> Option<&'static str> {
        (self.nap == "spin").then_some(
            "nap spin executes PAUSE, which every machine supports, but which slows requests down; \
             if `elfen doctor` shows that a machine supports device, umwait or mwaitx, add --nap \
             with that name",
        )
    }
}

/// Parses a factor for clap, and rounds it to a thousandth.
fn slowdown(text: &str) -> Result<f64, String> {
    let factor = text.parse().ok().filter(|factor| (1.0..=1000.0).contains(factor));
    let factor = factor.map(|factor: f64| real(nanoseconds(factor * 1000.0)) / 1000.0);
    factor.ok_or_else(|| "a slowdown must be a factor from 1 to 1000, as in 1.5".to_owned())
}
