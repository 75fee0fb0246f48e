//! The batch programs next to the service: started on their lanes, ended, and what they did.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use elfen_machine::process::below;
use elfen_run::report::Report;
use serde::Deserialize;

use super::os::{ChildSetup, Rank};
use super::own_program::{LaunchSpec, OwnBatch, OwnProgram, read_report};
use super::plan::Spec;
use super::process::{Process, START_TIMEOUT, STOP_TIMEOUT, wait_for};
use super::scratch::Scratch;
use super::{LiveError, Machine, Programs, usage};
use crate::record::Scenario;

/// The name of the batch processes in /proc.
const COMMAND: &str = "elfen-batch";
/// If no process is left to end it, a batch ends itself this long after the run.
const AT_MOST: Duration = Duration::from_secs(120);

/// The running batch programs, one on each batch lane.
#[derive(Debug)]
pub(super) struct Batches {
    lanes: Vec<Lane>,
}

#[derive(Debug)]
enum Lane {
    /// A program of `elfen-batch`, which reports its work when it ends.
    Elfen(ElfenBatch),
    Own(Box<OwnBatch>),
}

#[derive(Debug)]
struct ElfenBatch {
    process: Process,
    /// The process of the batch program, which may be a descendant of `process`.
    batch: u32,
    report: Option<PathBuf>,
}

/// The work of the batches on all lanes.
#[derive(Debug, Default)]
pub(super) struct BatchResults {
    /// `None` for a program of the user's own, which does not report its work.
    pub(super) per_second: Option<f64>,
    pub(super) unit: Option<String>,
    pub(super) checksums: Vec<String>,
    pub(super) reports: Vec<Report>,
    /// How often a program ended by itself and was started again.
    pub(super) ends: u32,
}

/// The part of the output of `elfen-batch` that is used here.
#[derive(Debug, Deserialize)]
pub(super) struct BatchOutput {
    pub(super) per_second: f64,
    unit: String,
    checksum: String,
}

/// Everything that starting a batch requires.
pub(super) struct BatchStarter<'a> {
    pub(super) programs: &'a Programs,
    pub(super) scratch: &'a Scratch,
    pub(super) machine: &'a Machine,
    /// As in `elfen run --source`.
    pub(super) source: &'a str,
    pub(super) own: &'a OwnProgram,
    /// The name under which the service publishes its requests, if it does.
    pub(super) service_name: Option<&'a str>,
    pub(super) duration: Duration,
}

/// How a batch is restrained.
enum Restraint {
    Direct(Rank),
    Elfen,
}

fn restraint_of(scenario: Scenario) -> Restraint {
    match scenario {
        Scenario::None | Scenario::Unrestrained => Restraint::Direct(Rank::Normal),
        Scenario::Nice19 => Restraint::Direct(Rank::Nice(19)),
        Scenario::SchedIdle => Restraint::Direct(Rank::Idle),
        Scenario::CoreScheduling => Restraint::Direct(Rank::OwnCore),
        Scenario::BorrowIdle
        | Scenario::FixedBudget
        | Scenario::RefreshBudget
        | Scenario::DynamicBudget
        | Scenario::SloBudget => Restraint::Elfen,
    }
}

/// The launcher of `elfen run` gets SIGTERM when this process dies, and forwards it. SIGKILL would
/// leave its batch running.
fn launcher_setup() -> ChildSetup {
    ChildSetup { death_signal: libc::SIGTERM, ..ChildSetup::anywhere(Rank::Normal) }
}

impl BatchStarter<'_> {
    pub(super) fn start_all(&self, spec: &Spec, program: &str) -> Result<Batches, LiveError> {
        let own = self.own.has_label(program);
        let lane = |(number, (request, batch))| -> Result<Lane, LiveError> {
            let lane = BatchLane { number, request, batch };
            Ok(if own {
                Lane::Own(Box::new(self.start_own(spec, program, lane)?))
            } else {
                Lane::Elfen(self.start_elfen_batch(spec, program, lane)?)
            })
        };
        let lanes = (0..).zip(self.machine.batch_lanes()).map(lane);
        Ok(Batches { lanes: lanes.collect::<Result<_, _>>()? })
    }

    fn start_elfen_batch(
        &self,
        spec: &Spec,
        program: &str,
        lane: BatchLane,
    ) -> Result<ElfenBatch, LiveError> {
        let seconds = (self.duration + AT_MOST).as_secs();
        let duration = format!("{seconds}s");
        let words = [program, "--json", "--duration", &duration].map(str::to_owned);
        let words: Vec<String> =
            words.into_iter().chain(self.machine.emulation_options()).collect();
        match restraint_of(spec.scenario) {
            Restraint::Direct(rank) => {
                let mut command = Command::new(&self.programs.batch);
                command.args(&words);
                let setup = ChildSetup::on(lane.batch, rank);
                let mut process = Process::start(COMMAND, command, &setup, self.scratch)?;
                let batch = process.id();
                wait_for(&mut process, START_TIMEOUT, |_| is_ready(batch).then_some(()))?;
                Ok(ElfenBatch { process, batch, report: None })
            }
            Restraint::Elfen => {
                let report = self.report(lane);
                let mut command = Command::new(&self.programs.elfen);
                command.args(self.options(spec, lane, &report));
                command.arg(&self.programs.batch).args(&words);
                self.start_through_elfen(command, report)
            }
        }
    }

    /// Starts the user's program.
    fn start_own(&self, spec: &Spec, label: &str, lane: BatchLane) -> Result<OwnBatch, LiveError> {
        let argv = self.own.command.iter().map(OsString::from);
        let (argv, setup, report) = match restraint_of(spec.scenario) {
            Restraint::Direct(rank) => (argv.collect(), ChildSetup::on(lane.batch, rank), None),
            Restraint::Elfen => {
                let report = self.report(lane);
                let elfen = self.programs.elfen.clone().into_os_string();
                let options = self.options(spec, lane, &report);
                let argv = [elfen].into_iter().chain(options).chain(argv);
                (argv.collect(), launcher_setup(), Some(report))
            }
        };
        let err = self.scratch.path(&format!("own-{}.err", lane.number));
        LaunchSpec { label: label.to_owned(), argv, setup, err, report }.start_batch()
    }

    fn report(&self, lane: BatchLane) -> PathBuf {
        self.scratch.path(&format!("report-{}.json", lane.number))
    }

    /// The arguments of `elfen run` before the program.
    fn options(&self, spec: &Spec, lane: BatchLane, report: &Path) -> Vec<OsString> {
        let lanes = format!("{}:{}", lane.request, lane.batch);
        let mut words = vec!["run", "--lanes", &lanes, "--source", self.source];
        if let Some(service_name) = self.service_name {
            words.extend(["--service", service_name]);
        }
        words.extend(spec.options());
        if let Some(checks) = &self.own.checks {
            words.extend(["--checks", checks]);
        }
        let mut words: Vec<OsString> = words.into_iter().map(OsString::from).collect();
        words.extend(["--json-out".into(), report.into(), "--".into()]);
        words
    }

    fn start_through_elfen(
        &self,
        command: Command,
        report: PathBuf,
    ) -> Result<ElfenBatch, LiveError> {
        let mut process = Process::start("elfen run", command, &launcher_setup(), self.scratch)?;
        let batch = wait_for(&mut process, START_TIMEOUT, |process| {
            let family = below(process.id());
            family
                .into_iter()
                .find(|&pid| usage::process_name(pid).as_deref() == Some(COMMAND) && is_ready(pid))
        })?;
        Ok(ElfenBatch { process, batch, report: Some(report) })
    }
}

/// A batch lane, its number, and its request lane.
#[derive(Clone, Copy)]
struct BatchLane {
    number: u32,
    request: u32,
    batch: u32,
}

/// Whether a batch program handles SIGTERM by now: before that, the signal would end it without its
/// report.
fn is_ready(batch: u32) -> bool {
    usage::has_handler(batch, libc::SIGTERM)
}

impl Batches {
    pub(super) fn none() -> Self {
        Self { lanes: Vec::new() }
    }

    /// Fails if a program of `elfen-batch` has ended. A program of the user's own is started again.
    pub(super) fn check_alive(&mut self) -> Result<(), LiveError> {
        self.lanes.iter_mut().try_for_each(|lane| match lane {
            Lane::Elfen(lane) => lane.process.check_alive(),
            Lane::Own(lane) => lane.restart_if_ended(),
        })
    }

    /// CPU time so far, in nanoseconds.
    pub(super) fn used_ns(&mut self) -> u64 {
        let used_ns = |lane: &mut Lane| match lane {
            Lane::Elfen(lane) => usage::process_cpu_ns(lane.batch),
            Lane::Own(lane) => lane.used_ns(),
        };
        self.lanes.iter_mut().map(used_ns).sum()
    }

    /// Ends all batches and collects their results. `None` if there are none, or if one does not
    /// end: a batch that never gets its lane cannot write its report, and has done next to nothing.
    pub(super) fn end(self) -> Result<Option<BatchResults>, LiveError> {
        let mut done = BatchResults::default();
        if self.lanes.is_empty() {
            return Ok(None);
        }
        for lane in self.lanes {
            match lane {
                Lane::Elfen(lane) => {
                    if !lane.end(&mut done)? {
                        return Ok(None);
                    }
                }
                Lane::Own(lane) => {
                    let (ends, report) = lane.end()?;
                    done.ends += ends;
                    done.reports.extend(report);
                }
            }
        }
        Ok(Some(done))
    }
}

impl ElfenBatch {
    /// Returns whether the batch has ended.
    fn end(self, done: &mut BatchResults) -> Result<bool, LiveError> {
        let ended: BatchOutput = match self.process.finish_json(Some(libc::SIGTERM), STOP_TIMEOUT) {
            Err(LiveError::Stuck { .. }) => return Ok(false),
            ended => ended?,
        };
        done.per_second = Some(done.per_second.unwrap_or(0.0) + ended.per_second);
        done.unit = Some(ended.unit);
        done.checksums.push(ended.checksum);
        done.reports.extend(self.report.map(|file| read_report(&file)).transpose()?);
        Ok(true)
    }
}
