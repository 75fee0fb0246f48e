//! The batch programs beside the service: started in their places, and what they did.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use super::os::{Place, Rank};
use super::plan::Spec;
use super::process::{Process, wait_for};
use super::programs::Programs;
use super::scratch::Scratch;
use super::{LiveError, Machine, usage};
use crate::record::Company;

/// The command of the batch programs, as the kernel names its processes.
const COMMAND: &str = "elfen-batch";
/// For `elfen run` to attach, and for its program to start on a lane that others use as well.
const TO_START: Duration = Duration::from_secs(20);
/// For an iteration to end: the longest takes some ten milliseconds of a lane's time.
const TO_END: Duration = Duration::from_secs(5);
/// Should nobody be left to end it, a batch ends by itself after this much more.
const AT_MOST: Duration = Duration::from_secs(120);

/// Batch programs that run, one on each batch lane.
#[derive(Debug)]
pub(super) struct Batches {
    lanes: Vec<Lane>,
}

#[derive(Debug)]
struct Lane {
    process: Process,
    /// The batch program itself, which `elfen run` starts.
    batch: u32,
    report: Option<std::path::PathBuf>,
}

/// What they did, over all lanes.
#[derive(Debug, Default)]
pub(super) struct Done {
    pub(super) per_second: f64,
    pub(super) unit: String,
    /// Of every lane.
    pub(super) checksums: Vec<String>,
    pub(super) reports: Vec<Value>,
}

/// What a batch is started with.
pub(super) struct Start<'a> {
    pub(super) programs: &'a Programs,
    pub(super) scratch: &'a Scratch,
    pub(super) machine: &'a Machine,
    /// As in `elfen run --signal`.
    pub(super) signal: &'a str,
    pub(super) lasting: Duration,
}

impl Start<'_> {
    pub(super) fn batches(&self, spec: &Spec, program: &str) -> Result<Batches, LiveError> {
        let lane = |(number, (request, batch))| self.lane(spec, program, number, request, batch);
        let lanes = (0..).zip(self.machine.batch_lanes()).map(lane);
        Ok(Batches { lanes: lanes.collect::<Result<_, _>>()? })
    }

    fn lane(
        &self,
        spec: &Spec,
        program: &str,
        number: u32,
        request: u32,
        batch: u32,
    ) -> Result<Lane, LiveError> {
        let seconds = (self.lasting + AT_MOST).as_secs();
        let duration = format!("{seconds}s");
        let words = [program, "--json", "--duration", &duration];
        let direct = |rank| {
            let mut command = Command::new(&self.programs.batch);
            command.args(words);
            let place = Place::on(batch, rank);
            let mut process = Process::start(COMMAND, command, &place, self.scratch)?;
            let batch = process.id();
            wait_for(&mut process, TO_START, |_| is_ready(batch).then_some(()))?;
            Ok(Lane { process, batch, report: None })
        };
        match spec.company {
            Company::None | Company::Unrestrained => direct(Rank::Normal),
            Company::Nice19 => direct(Rank::Nice(19)),
            Company::SchedIdle => direct(Rank::Idle),
            Company::CoreScheduling => direct(Rank::OwnCore),
            Company::BorrowIdle
            | Company::FixedBudget
            | Company::RefreshBudget
            | Company::DynamicBudget
            | Company::SloBudget => {
                let report = self.scratch.path(&format!("report-{number}.json"));
                let mut command = Command::new(&self.programs.elfen);
                let lanes = format!("{request}:{batch}");
                command.args(["run", "--lanes", &lanes, "--signal", self.signal]);
                command.args(["--service", self.scratch.service()]);
                command.args(spec.options()).arg("--report").arg(&report);
                command.arg("--").arg(&self.programs.batch).args(words);
                self.through_elfen(command, report)
            }
        }
    }

    /// When we are killed the front must not be: it would leave its batch to go on. SIGTERM it passes on.
    fn through_elfen(
        &self,
        command: Command,
        report: std::path::PathBuf,
    ) -> Result<Lane, LiveError> {
        let place = Place { last_word: libc::SIGTERM, ..Place::anywhere(Rank::Normal) };
        let mut process = Process::start("elfen run", command, &place, self.scratch)?;
        let batch = wait_for(&mut process, TO_START, |process| {
            let family = usage::descendants(process.id());
            family
                .into_iter()
                .find(|&pid| usage::name_of(pid).as_deref() == Some(COMMAND) && is_ready(pid))
        })?;
        Ok(Lane { process, batch, report: Some(report) })
    }
}

/// Whether a batch program has come as far as to end with its report when it is asked to.
fn is_ready(batch: u32) -> bool {
    usage::catches(batch, libc::SIGTERM)
}

impl Batches {
    pub(super) fn none() -> Self {
        Self { lanes: Vec::new() }
    }

    pub(super) fn lives(&mut self) -> Result<(), LiveError> {
        self.lanes.iter_mut().try_for_each(|lane| lane.process.lives())
    }

    /// CPU time so far, in nanoseconds.
    pub(super) fn used_ns(&self) -> u64 {
        self.lanes.iter().map(|lane| usage::of_process(lane.batch)).sum()
    }

    /// Ends them all; nothing if there were none, or if one napped on: a batch that others never let run can't come to its
    /// report, and has done next to nothing.
    pub(super) fn end(self) -> Result<Option<Done>, LiveError> {
        let mut done = Done::default();
        if self.lanes.is_empty() {
            return Ok(None);
        }
        for lane in self.lanes {
            let name = lane.process.name().to_owned();
            let ended = match lane.process.finish_json(Some(libc::SIGTERM), TO_END) {
                Err(LiveError::Stuck { .. }) => return Ok(None),
                ended => ended?,
            };
            let garbled =
                |why: &str| LiveError::Garbled { name: name.clone(), why: why.to_owned() };
            done.per_second +=
                ended["per_second"].as_f64().ok_or_else(|| garbled("no per_second"))?;
            let text = |key: &str| ended[key].as_str().map(str::to_owned);
            done.unit = text("unit").ok_or_else(|| garbled("no unit"))?;
            done.checksums.push(text("checksum").ok_or_else(|| garbled("no checksum"))?);
            done.reports.extend(lane.report.map(|file| read_report(&file)).transpose()?);
        }
        Ok(Some(done))
    }
}

fn read_report(file: &Path) -> Result<Value, LiveError> {
    let name = "elfen run".to_owned();
    let text = std::fs::read_to_string(file)
        .map_err(LiveError::io(format!("reading the report {}", file.display())))?;
    serde_json::from_str(&text).map_err(|error| LiveError::Garbled { name, why: error.to_string() })
}
