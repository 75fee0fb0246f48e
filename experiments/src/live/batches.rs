//! Starts and ends the batch programs next to the service, one on each batch lane. Collects their
//! results and the reports of `elfen run`.
//!
//! A program of `elfen-batch` reports its work when it ends, and must not end by itself.
//!
//! A program of the user's own may end at any time. If it ends with status 0, it is started again.
//! It does not report its work. So its work is the CPU time of its process and all descendants, and
//! ended processes count. This CPU time includes naps in the program's checks. If the kernel counts
//! the time on the lane, the report of `elfen run` has the exact figure.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;

use elfen_machine::process::{below, name_of};
use elfen_run::figures::Figures;
use elfen_run::latency::Latency;
use elfen_run::report::RunReport;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde::Deserialize;

use super::os::{self, ChildSetup, Rank};
use super::plan::{Spec, label};
use super::process::{Process, Rig, START_TIMEOUT, STOP_TIMEOUT, poll_until};
use super::{LiveError, usage};
use crate::record::{Plan, Scenario};

/// A batch ends by itself this long after the run, in case the process that should end it has died.
const AT_MOST: Duration = Duration::from_secs(120);
/// The time limit for the launcher to write its report after its batch has ended.
const REPORT_TIMEOUT: Duration = Duration::from_secs(2);
/// The name of the processes of `elfen run` itself. The lines that it prints begin with
/// `ELFEN_SAYS`.
const ELFEN: &str = "elfen";
const ELFEN_SAYS: &str = "elfen: ";

/// The running batch programs, one on each batch lane.
#[derive(Debug)]
pub(super) struct Batches(Vec<Batch>);

/// The work of the batches on all lanes.
#[derive(Debug, Default)]
pub(super) struct BatchResults {
    /// `None` for a program of the user's own, which does not report its work.
    pub(super) per_second: Option<f64>,
    pub(super) unit: Option<String>,
    pub(super) checksums: Vec<String>,
    pub(super) reports: Vec<RunReport>,
    /// How often a program ended by itself and was started again.
    pub(super) ends: u32,
}

/// The fields of the output of `elfen-batch` that are used here.
#[derive(Debug, Deserialize)]
pub(super) struct BatchOutput {
    pub(super) per_second: f64,
    unit: String,
    checksum: String,
}

/// How a program is started on its lane, for the first time and again.
#[derive(Clone, Debug)]
struct Launch {
    name: String,
    /// Whether the program is the user's own.
    is_own: bool,
    argv: Vec<OsString>,
    setup: ChildSetup,
    /// The files for the program's stdout and its stderr.
    files: [PathBuf; 2],
    /// The file for the report of `elfen run`; `None` for a program that is started directly.
    report: Option<PathBuf>,
}

/// A batch program on its lane.
#[derive(Debug)]
struct Batch {
    launch: Launch,
    process: Process,
    /// The CPU time of the processes that have ended.
    finished_ns: u64,
    /// The CPU time of the running process at the last sample. If the process ends and `elfen run`
    /// has no kernel account of it, this is the only known value.
    last_seen_ns: u64,
    ends: u32,
    report: Option<RunReport>,
}

impl Batches {
    pub(super) fn none() -> Self {
        Self(Vec::new())
    }

    /// Starts the program on every batch lane. `service_name` is the name under which the service
    /// publishes its requests, if it publishes them.
    pub(super) fn start(
        rig: &Rig,
        plan: &Plan,
        spec: &Spec,
        program: &str,
        service_name: Option<&str>,
        duration: Duration,
    ) -> Result<Self, LiveError> {
        let is_own = label(&plan.command).is_some_and(|label| label == program);
        let argv: Vec<OsString> = if is_own {
            plan.command.iter().map(OsString::from).collect()
        } else {
            let duration = format!("{}s", (duration + AT_MOST).as_secs());
            let words = [program, "--json", "--duration", &duration].map(OsString::from);
            let emulation = rig.machine.emulation_options().into_iter().map(OsString::from);
            let batch = rig.programs.batch.clone().into_os_string();
            [batch].into_iter().chain(words).chain(emulation).collect()
        };
        let lane = |(request, batch): (u32, u32)| {
            let report = rig.scratch.path(&format!("report-{batch}.json"));
            let (name, setup, front) = match baseline_rank(spec.scenario) {
                Some(rank) => ("elfen-batch", ChildSetup::on(batch, rank), Vec::new()),
                None => {
                    let lanes = format!("{request}:{batch}");
                    let words = elfen_run(rig, plan, spec, service_name, &lanes, &report);
                    ("elfen run", launcher_setup(), words)
                }
            };
            Batch::start(Launch {
                name: if is_own { program } else { name }.to_owned(),
                is_own,
                report: (!front.is_empty()).then_some(report),
                argv: front.into_iter().chain(argv.iter().cloned()).collect(),
                setup,
                files: rig.scratch.output_files(),
            })
        };
        rig.machine.batch_lanes().map(lane).collect::<Result<_, _>>().map(Self)
    }

    /// Fails if a program of `elfen-batch` has ended. A program of the user's own is started again.
    pub(super) fn check_alive(&mut self) -> Result<(), LiveError> {
        self.0.iter_mut().try_for_each(Batch::restart_if_ended)
    }

    /// Returns the CPU time of all batches so far, in nanoseconds.
    pub(super) fn used_ns(&mut self) -> u64 {
        self.0.iter_mut().map(Batch::used_ns).sum()
    }

    /// Ends all batches and collects their results. Returns `None` without batches, or if a batch
    /// does not end. A batch that never gets its lane cannot write its report, and has done almost
    /// no work.
    pub(super) fn end(self) -> Result<Option<BatchResults>, LiveError> {
        let mut done = (!self.0.is_empty()).then(BatchResults::default);
        for batch in self.0 {
            let Some(results) = &mut done else { break };
            if !batch.end(results)? {
                done = None;
            }
        }
        Ok(done)
    }
}

/// Returns the scheduling rank of a batch in a baseline. Returns `None` for a policy, whose batch
/// `elfen run` starts.
fn baseline_rank(scenario: Scenario) -> Option<Rank> {
    match scenario {
        Scenario::None | Scenario::Unrestrained => Some(Rank::Normal),
        Scenario::Nice19 => Some(Rank::Nice(19)),
        Scenario::SchedIdle => Some(Rank::Idle),
        Scenario::CoreScheduling => Some(Rank::OwnCore),
        Scenario::BorrowIdle
        | Scenario::FixedBudget
        | Scenario::RefreshBudget
        | Scenario::DynamicBudget
        | Scenario::SloBudget => None,
    }
}

/// Sets up the launcher of `elfen run`. It gets SIGTERM when this process dies, and forwards the
/// signal to its batch. SIGKILL would leave the batch running.
fn launcher_setup() -> ChildSetup {
    ChildSetup { death_signal: libc::SIGTERM, ..ChildSetup::anywhere(Rank::Normal) }
}

/// Returns the words of the command line before the program.
fn elfen_run(
    rig: &Rig,
    plan: &Plan,
    spec: &Spec,
    service_name: Option<&str>,
    lanes: &str,
    report: &Path,
) -> Vec<OsString> {
    let mut words = vec!["run", "--lanes", lanes, "--source", &plan.source];
    words.extend(service_name.into_iter().flat_map(|name| ["--service", name]));
    words.extend(spec.options());
    words.extend(plan.checks.iter().flat_map(|checks| ["--checks", checks]));
    let words = words.into_iter().map(OsString::from);
    let report = ["--json-out".into(), report.into(), "--".into()];
    let elfen = rig.programs.elfen.clone().into_os_string();
    [elfen].into_iter().chain(words).chain(report).collect()
}

impl Launch {
    fn start(&self) -> Result<Process, LiveError> {
        if let Some(report) = &self.report {
            // Later, an existing report shows that the program was started.
            fs::remove_file(report).ok();
        }
        let program = self.argv.first().map_or_else(|| OsStr::new(""), OsString::as_os_str);
        let mut command = Command::new(program);
        command.args(self.argv.iter().skip(1));
        let [out, err] = self.files.clone();
        // A program of the user's own may print more than the disk can hold.
        let out = if self.is_own { PathBuf::from("/dev/null") } else { out };
        Process::spawn(&self.name, command, &self.setup, [out, err])
    }
}

impl Batch {
    /// Starts the program and waits until it runs.
    fn start(launch: Launch) -> Result<Self, LiveError> {
        let process = launch.start()?;
        let mut batch =
            Self { launch, process, finished_ns: 0, last_seen_ns: 0, ends: 0, report: None };
        let started = poll_until(START_TIMEOUT, || {
            let ended = batch.process.try_wait()?.is_some();
            Ok((ended || batch.has_started()).then_some(()))
        })?;
        started.ok_or_else(|| batch.process.not_ready(START_TIMEOUT))?;
        Ok(batch)
    }

    /// Whether the program itself runs, because `elfen run` attaches to its lane first. A program
    /// of `elfen-batch` also has to have its handler for SIGTERM: before that, the signal would end
    /// it without a report.
    fn has_started(&self) -> bool {
        let id = self.process.id();
        let is_program = |pid: &u32| name_of(*pid).is_some_and(|name| name != ELFEN);
        let programs = match self.launch.report {
            None => vec![id],
            Some(_) => below(id).into_iter().filter(is_program).collect(),
        };
        programs.iter().any(|&pid| self.launch.is_own || usage::has_handler(pid, libc::SIGTERM))
    }

    /// If a program of the user's own has ended, starts it again.
    fn restart_if_ended(&mut self) -> Result<(), LiveError> {
        if !self.launch.is_own {
            return self.process.check_alive();
        }
        self.process.truncate_stderr()?;
        if let Some(status) = self.process.try_wait()? {
            self.account_end(status)?;
            self.process = self.launch.start()?;
        }
        Ok(())
    }

    /// Adds the results of a program that ended by itself. Fails if its exit status is not 0.
    fn account_end(&mut self, status: ExitStatus) -> Result<(), LiveError> {
        let written = self.launch.report.as_deref().map(|file| (file, file.metadata()));
        let ran = match written {
            None => None,
            Some((file, Ok(data))) if data.len() > 0 => Some(read_report(file)?),
            Some(_) => return Err(self.process.failure_of("elfen run", status)),
        };
        if !status.success() {
            let message = last_stderr_line(&self.process.stderr_text());
            return Err(LiveError::OwnFailed { name: self.launch.name.clone(), status, message });
        }
        self.ends += 1;
        self.add_results(ran);
        Ok(())
    }

    fn add_results(&mut self, ran: Option<RunReport>) {
        self.finished_ns += match (&ran, &self.launch.report) {
            (Some(report), _) => report.figures.ran_ns().unwrap_or(self.last_seen_ns),
            (None, None) => self.process.spent_ns,
            // `elfen run` was killed before it wrote its report.
            (None, Some(_)) => self.last_seen_ns,
        };
        self.last_seen_ns = 0;
        self.report = match (self.report.take(), ran) {
            (Some(before), Some(after)) => Some(add_reports(&before, after)),
            (before, after) => after.or(before),
        };
    }

    /// Returns the CPU time of this batch so far, in nanoseconds.
    fn used_ns(&mut self) -> u64 {
        let pid = self.process.id();
        let now_ns = match self.launch.report {
            None => usage::family_cpu_ns(pid),
            Some(_) => usage::batch_cpu_ns(pid),
        };
        // A process that has just been reaped may be missing from a reading.
        self.last_seen_ns = self.last_seen_ns.max(now_ns);
        self.finished_ns + self.last_seen_ns
    }

    /// Ends the program and all its descendants, and adds its results. Returns false if a program
    /// of `elfen-batch` did not end in time.
    fn end(mut self, done: &mut BatchResults) -> Result<bool, LiveError> {
        if !self.launch.is_own {
            self.process.check_alive()?;
            if !self.stop(STOP_TIMEOUT) {
                return Ok(false);
            }
            let ended: BatchOutput = self.process.finish_json(None, Duration::ZERO)?;
            done.per_second = Some(done.per_second.unwrap_or(0.0) + ended.per_second);
            done.unit = Some(ended.unit);
            done.checksums.push(ended.checksum);
            self.report = self.launch.report.as_deref().map(read_report).transpose()?;
        } else if let Some(status) = self.process.try_wait()? {
            self.account_end(status)?;
        } else {
            self.used_ns();
            self.stop(STOP_TIMEOUT);
            let ran = self.launch.report.as_deref().and_then(|file| read_report(file).ok());
            self.add_results(ran);
        }
        done.ends += self.ends;
        done.reports.extend(self.report.take());
        Ok(true)
    }

    /// Ends the program and all its descendants. A descendant that outlived the program would run
    /// during the next measurement. Returns whether the program ended in time.
    fn stop(&mut self, timeout: Duration) -> bool {
        let pid = self.process.id();
        let family = usage::Descendants::of(pid);
        match self.launch.report {
            None => {
                let _gone = killpg(Pid::from_raw(pid.cast_signed()), Signal::SIGTERM);
            }
            // The launcher forwards the signal and writes its report.
            Some(_) => os::send(pid, libc::SIGTERM),
        }
        let in_time = self.process.wait(timeout);
        if !in_time {
            let late = usage::Descendants::of(pid);
            // A shell that ignores SIGTERM would start its next command, so it gets SIGKILL first.
            if self.launch.report.is_none() {
                os::send(pid, libc::SIGKILL);
            }
            late.kill();
        }
        family.kill();
        // A launcher whose batch was killed still writes its report.
        if !self.process.wait(REPORT_TIMEOUT) {
            os::send(pid, libc::SIGKILL);
            self.process.wait(timeout);
        }
        in_time
    }
}

/// Ends the program with its descendants, also if the measurement fails.
impl Drop for Batch {
    fn drop(&mut self) {
        if matches!(self.process.try_wait(), Ok(None)) {
            self.stop(REPORT_TIMEOUT);
        }
    }
}

/// Returns the last line on stderr that is not from `elfen run`, or the last line if all are.
fn last_stderr_line(message: &str) -> String {
    let lines = || message.lines().rev().map(str::trim).filter(|line| !line.is_empty());
    let own = lines().find(|line| !line.starts_with(ELFEN_SAYS));
    own.or_else(|| lines().next()).unwrap_or("it printed no message").to_owned()
}

pub(crate) fn read_report(file: &Path) -> Result<RunReport, LiveError> {
    let name = "elfen run".to_owned();
    let text = fs::read_to_string(file)
        .map_err(LiveError::io(format!("reading the report {}", file.display())))?;
    serde_json::from_str(&text).map_err(|error| LiveError::Garbled { name, why: error.to_string() })
}

/// Adds up two consecutive runs of the program. Times are added. The latencies are those of the run
/// with more samples. All other values are those of the last run.
fn add_reports(before: &RunReport, after: RunReport) -> RunReport {
    let add = |one: Option<u64>, other: Option<u64>| one.zip(other).map(|(a, b)| a + b);
    let more = |one: Latency, other: Latency| if one.n > other.n { one } else { other };
    let (first, last) = (&before.figures, &after.figures);
    RunReport {
        wall_ns: before.wall_ns + after.wall_ns,
        request_busy_ns: add(before.request_busy_ns, after.request_busy_ns),
        figures: Figures {
            borrowed_ns: add(first.borrowed_ns, last.borrowed_ns),
            overlapped_ns: add(first.overlapped_ns, last.overlapped_ns),
            napped_ns: first.napped_ns + last.napped_ns,
            naps: first.naps + last.naps,
            reaction_ns: more(first.reaction_ns, last.reaction_ns),
            wake_ns: more(first.wake_ns, last.wake_ns),
        },
        ..after
    }
}

#[cfg(test)]
mod tests {
    use super::super::scratch::Scratch;
    use super::*;
    use std::time::Instant;

    fn until(what: &str, mut done: impl FnMut() -> bool) {
        let begin = Instant::now();
        while !done() {
            assert!(begin.elapsed() < Duration::from_secs(60), "{what} does not happen");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Goal: the CPU time of all descendants counts, and all of them end with the batch. Method: a
    /// shell whose child works and ends, and which then ignores SIGTERM.
    #[test]
    fn all_descendants_count_and_end() {
        let scratch = Scratch::new(1).unwrap();
        let work = "i=0; while [ $i -lt 40000 ]; do i=$((i+1)); done";
        let script = format!("sh -c '{work}'; trap '' TERM; echo done >&2; sleep 600; sleep 600");
        let launch = Launch {
            name: "sh".to_owned(),
            is_own: true,
            argv: ["sh", "-c", &script].map(OsString::from).to_vec(),
            setup: ChildSetup::anywhere(Rank::Normal),
            files: scratch.output_files(),
            report: None,
        };
        let mut parent = Batch::start(launch).unwrap();
        until("the end of its child", || parent.process.stderr_text().contains("done"));
        let used_ns = parent.used_ns();
        assert!(used_ns >= 10_000_000, "{used_ns}");
        let pid = parent.process.id();
        until("its next child", || !below(pid).is_empty());
        let child = below(pid)[0];
        parent.end(&mut BatchResults::default()).unwrap();
        until("the end of both", || {
            [pid, child].iter().all(|&pid| name_of(pid).as_deref() != Some("sleep"))
        });
        // SIGTERM ended the shell's child, so the shell may have started its next command.
        let group = Pid::from_raw(pid.cast_signed());
        until("the end of all", || killpg(group, None).is_err());
    }

    #[test]
    fn lines_of_the_program_are_preferred_to_those_of_elfen() {
        let message = "elfen: borrow-idle on lanes 0:1\nno luck\n\nelfen: 1.2s: borrowed 1s\n";
        assert_eq!(last_stderr_line(message), "no luck");
        assert_eq!(last_stderr_line("elfen: program \"x\": none\n"), "elfen: program \"x\": none");
    }

    /// Goal: two runs add up. Method: compute the sums by hand. If one run has no account, the sum
    /// has none.
    #[test]
    fn runs_one_after_the_other_add_up() {
        let report = |ran: Option<u64>, n: u64| RunReport {
            wall_ns: 100,
            request_busy_ns: Some(10),
            figures: Figures {
                borrowed_ns: ran,
                overlapped_ns: ran,
                reaction_ns: Latency { n, median: Some(n), ..Latency::default() },
                ..Figures::default()
            },
            ..RunReport::default()
        };
        let both = add_reports(&report(Some(40), 9), report(Some(2), 3));
        assert_eq!((both.wall_ns, both.request_busy_ns), (200, Some(20)));
        assert_eq!((both.figures.ran_ns(), both.figures.reaction_ns.n), (Some(84), 9));
        assert_eq!(add_reports(&report(None, 0), report(Some(2), 0)).figures.ran_ns(), None);
    }
}
