//! The batch programs beside the service: started in their places, and what they did.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use elfen_machine::process::below;
use elfen_run::report::Report;
use serde::Deserialize;

use super::os::{Place, Rank};
use super::own::{self, Own};
use super::plan::Spec;
use super::process::{Process, TO_END, TO_START, wait_for};
use super::reported::read_report;
use super::scratch::Scratch;
use super::{LiveError, Machine, Programs, usage};
use crate::record::Company;

/// The command of the batch programs, as the kernel names its processes.
const COMMAND: &str = "elfen-batch";
/// Should no process be left to end it, a batch ends by itself after this much more.
const AT_MOST: Duration = Duration::from_secs(120);

/// Batch programs that run, one on each batch lane.
#[derive(Debug)]
pub(super) struct Batches {
    lanes: Vec<Lane>,
}

#[derive(Debug)]
enum Lane {
    /// One of `elfen-batch`, which says what it got done.
    Ours(Ours),
    Own(Box<own::Lane>),
}

#[derive(Debug)]
struct Ours {
    process: Process,
    /// The batch program itself, which `elfen run` starts.
    batch: u32,
    report: Option<PathBuf>,
}

/// The work that batches did, over all lanes.
#[derive(Debug, Default)]
pub(super) struct Done {
    /// Nothing of a program of the user's own, which says nothing of its work.
    pub(super) per_second: Option<f64>,
    pub(super) unit: Option<String>,
    /// Of every lane.
    pub(super) checksums: Vec<String>,
    pub(super) reports: Vec<Report>,
    /// How often a program came to its end and was started again.
    pub(super) ends: u32,
}

/// What a batch program prints when it ends, as far as it matters here.
#[derive(Debug, Deserialize)]
pub(super) struct Worked {
    pub(super) per_second: f64,
    unit: String,
    checksum: String,
}

/// What a batch is started with.
pub(super) struct Start<'a> {
    pub(super) programs: &'a Programs,
    pub(super) scratch: &'a Scratch,
    pub(super) machine: &'a Machine,
    /// As in `elfen run --signal`.
    pub(super) signal: &'a str,
    pub(super) own: &'a Own,
    /// The name under which the service publishes its requests, if it does.
    pub(super) page: Option<&'a str>,
    pub(super) lasting: Duration,
}

/// How a batch is held to its lane.
enum Held {
    Directly(Rank),
    ThroughElfen,
}

fn held(company: Company) -> Held {
    match company {
        Company::None | Company::Unrestrained => Held::Directly(Rank::Normal),
        Company::Nice19 => Held::Directly(Rank::Nice(19)),
        Company::SchedIdle => Held::Directly(Rank::Idle),
        Company::CoreScheduling => Held::Directly(Rank::OwnCore),
        Company::BorrowIdle
        | Company::FixedBudget
        | Company::RefreshBudget
        | Company::DynamicBudget
        | Company::SloBudget => Held::ThroughElfen,
    }
}

/// When we are killed the front must not be: it would leave its batch to go on. SIGTERM it passes
/// on.
fn place_of_front() -> Place {
    Place { last_word: libc::SIGTERM, ..Place::anywhere(Rank::Normal) }
}

impl Start<'_> {
    pub(super) fn batches(&self, spec: &Spec, program: &str) -> Result<Batches, LiveError> {
        let own = self.own.is(program);
        let lane = |(number, (request, batch))| -> Result<Lane, LiveError> {
            let lane = On { number, request, batch };
            Ok(match own {
                true => Lane::Own(Box::new(self.own_lane(spec, program, lane)?)),
                false => Lane::Ours(self.lane(spec, program, lane)?),
            })
        };
        let lanes = (0..).zip(self.machine.batch_lanes()).map(lane);
        Ok(Batches { lanes: lanes.collect::<Result<_, _>>()? })
    }

    fn lane(&self, spec: &Spec, program: &str, on: On) -> Result<Ours, LiveError> {
        let seconds = (self.lasting + AT_MOST).as_secs();
        let duration = format!("{seconds}s");
        let words = [program, "--json", "--duration", &duration].map(str::to_owned);
        let words: Vec<String> = words.into_iter().chain(self.machine.beside()).collect();
        match held(spec.company) {
            Held::Directly(rank) => {
                let mut command = Command::new(&self.programs.batch);
                command.args(&words);
                let place = Place::on(on.batch, rank);
                let mut process = Process::start(COMMAND, command, &place, self.scratch)?;
                let batch = process.id();
                wait_for(&mut process, TO_START, |_| is_ready(batch).then_some(()))?;
                Ok(Ours { process, batch, report: None })
            }
            Held::ThroughElfen => {
                let report = self.report(on);
                let mut command = Command::new(&self.programs.elfen);
                command.args(self.options(spec, on, &report));
                command.arg(&self.programs.batch).args(&words);
                self.through_elfen(command, report)
            }
        }
    }

    /// The user's program with its own words alone.
    fn own_lane(&self, spec: &Spec, label: &str, on: On) -> Result<own::Lane, LiveError> {
        let words = self.own.command.iter().map(OsString::from);
        let (words, place, report) = match held(spec.company) {
            Held::Directly(rank) => (words.collect(), Place::on(on.batch, rank), None),
            Held::ThroughElfen => {
                let report = self.report(on);
                let elfen = self.programs.elfen.clone().into_os_string();
                let options = self.options(spec, on, &report);
                let words = [elfen].into_iter().chain(options).chain(words);
                (words.collect(), place_of_front(), Some(report))
            }
        };
        let err = self.scratch.path(&format!("own-{}.err", on.number));
        own::Started { label: label.to_owned(), words, place, err, report }.lane()
    }

    fn report(&self, on: On) -> PathBuf {
        self.scratch.path(&format!("report-{}.json", on.number))
    }

    /// Of `elfen run`, as far as the program.
    fn options(&self, spec: &Spec, on: On, report: &Path) -> Vec<OsString> {
        let lanes = format!("{}:{}", on.request, on.batch);
        let mut words = vec!["run", "--lanes", &lanes, "--signal", self.signal];
        if let Some(page) = self.page {
            words.extend(["--service", page]);
        }
        words.extend(spec.options());
        if let Some(inject) = &self.own.inject {
            words.extend(["--inject", inject]);
        }
        let mut words: Vec<OsString> = words.into_iter().map(OsString::from).collect();
        words.extend(["--report".into(), report.into(), "--".into()]);
        words
    }

    fn through_elfen(&self, command: Command, report: PathBuf) -> Result<Ours, LiveError> {
        let mut process = Process::start("elfen run", command, &place_of_front(), self.scratch)?;
        let batch = wait_for(&mut process, TO_START, |process| {
            let family = below(process.id());
            family
                .into_iter()
                .find(|&pid| usage::name_of(pid).as_deref() == Some(COMMAND) && is_ready(pid))
        })?;
        Ok(Ours { process, batch, report: Some(report) })
    }
}

/// A batch lane, the how many-th it is, and its request lane.
#[derive(Clone, Copy)]
struct On {
    number: u32,
    request: u32,
    batch: u32,
}

/// Whether a batch program has come as far as to end with its report when it is asked to.
fn is_ready(batch: u32) -> bool {
    usage::catches(batch, libc::SIGTERM)
}

impl Batches {
    pub(super) fn none() -> Self {
        Self { lanes: Vec::new() }
    }

    /// Fails if one has ended that should not have; one of the user's own is started again.
    pub(super) fn lives(&mut self) -> Result<(), LiveError> {
        self.lanes.iter_mut().try_for_each(|lane| match lane {
            Lane::Ours(lane) => lane.process.lives(),
            Lane::Own(lane) => lane.goes_on(),
        })
    }

    /// CPU time so far, in nanoseconds.
    pub(super) fn used_ns(&mut self) -> u64 {
        let used_ns = |lane: &mut Lane| match lane {
            Lane::Ours(lane) => usage::of_process(lane.batch),
            Lane::Own(lane) => lane.used_ns(),
        };
        self.lanes.iter_mut().map(used_ns).sum()
    }

    /// Ends them all; nothing if there were none, or if one napped on: a batch that others never
    /// let run can't come to its report, and has done next to nothing.
    pub(super) fn end(self) -> Result<Option<Done>, LiveError> {
        let mut done = Done::default();
        if self.lanes.is_empty() {
            return Ok(None);
        }
        for lane in self.lanes {
            match lane {
                Lane::Ours(lane) => {
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

impl Ours {
    /// Whether it could end.
    fn end(self, done: &mut Done) -> Result<bool, LiveError> {
        let ended: Worked = match self.process.finish_json(Some(libc::SIGTERM), TO_END) {
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
