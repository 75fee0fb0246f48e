//! A batch program of the user's own, on one lane, and the reports of `elfen run`.
//!
//! Unlike `elfen-batch`, such a program does not report its work, and it may end at any time. Its
//! work is the CPU time of the process and all its descendants, including those that have ended. A
//! program that ends with status 0 is started again. CPU time includes naps in the program's
//! checks; where the kernel counts the time on the lane, the report of `elfen run` has the exact
//! figure.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use elfen_machine::process::below;
use elfen_run::figures::Figures;
use elfen_run::latency::Latency;
use elfen_run::report::Report;

use super::os::{self, ChildSetup};
use super::process::{Process, START_TIMEOUT, STOP_TIMEOUT};
use super::{LiveError, POLL_INTERVAL, check_interrupted, usage};

/// The user's program with its arguments; empty if there is none.
#[derive(Clone, Debug, Default)]
pub struct OwnProgram {
    pub command: Vec<String>,
    /// The value of `elfen run --checks`.
    pub checks: Option<String>,
}

impl OwnProgram {
    pub(super) fn has_label(&self, batch: &str) -> bool {
        label(&self.command).is_some_and(|label| label == batch)
    }
}

/// The name of the program in results: the last part of its path.
pub fn label(command: &[String]) -> Option<String> {
    let program = Path::new(command.first()?);
    let name = program.file_name().unwrap_or(program.as_os_str());
    Some(name.to_string_lossy().into_owned())
}

/// The name of the processes of `elfen run` itself.
const ELFEN: &str = "elfen";
/// Time for the launcher to write its report after its batch has ended.
const REPORT_TIMEOUT: Duration = Duration::from_secs(2);
/// The beginning of the lines that `elfen run` itself prints.
const ELFEN_SAYS: &str = "elfen: ";

/// How the program is started on its lane, at first and again.
#[derive(Clone, Debug)]
pub(super) struct LaunchSpec {
    pub(super) label: String,
    pub(super) argv: Vec<OsString>,
    pub(super) setup: ChildSetup,
    /// The file for its stderr.
    pub(super) err: PathBuf,
    /// The file for the report of `elfen run`; `None` for a program that is started directly.
    pub(super) report: Option<PathBuf>,
}

#[derive(Debug)]
pub(super) struct OwnBatch {
    spec: LaunchSpec,
    process: Process,
    /// CPU time of the processes that have ended.
    finished_ns: u64,
    /// CPU time of the running process at the last sample. It is all that is known of a process
    /// that has ended since, where `elfen run` has no kernel account.
    last_seen_ns: u64,
    pub(super) ends: u32,
    report: Option<Report>,
}

impl LaunchSpec {
    fn start(&self) -> Result<Process, LiveError> {
        if let Some(report) = &self.report {
            // The existence of a report shows later that the program was started.
            fs::remove_file(report).ok();
        }
        let program = self.argv.first().map_or_else(|| OsStr::new(""), OsString::as_os_str);
        let mut command = Command::new(program);
        command.args(self.argv.iter().skip(1));
        Process::start_without_stdout(&self.label, command, &self.setup, self.err.clone())
    }

    pub(super) fn start_batch(self) -> Result<OwnBatch, LiveError> {
        let process = self.start()?;
        let mut lane = OwnBatch {
            spec: self,
            process,
            finished_ns: 0,
            last_seen_ns: 0,
            ends: 0,
            report: None,
        };
        let begin = Instant::now();
        while lane.process.try_wait()?.is_none() && !lane.has_started() {
            check_interrupted()?;
            if begin.elapsed() > START_TIMEOUT {
                let (name, seconds) = (lane.spec.label.clone(), START_TIMEOUT.as_secs());
                return Err(LiveError::NotReady { name, seconds });
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(lane)
    }
}

impl OwnBatch {
    /// Whether the program itself runs: `elfen run` attaches first.
    fn has_started(&self) -> bool {
        let others = |pid: &u32| usage::process_name(*pid).is_some_and(|name| name != ELFEN);
        self.spec.report.is_none() || below(self.process.id()).iter().any(others)
    }

    /// Starts the program again if it has ended.
    pub(super) fn restart_if_ended(&mut self) -> Result<(), LiveError> {
        self.process.truncate_stderr()?;
        if let Some(status) = self.process.try_wait()? {
            self.account_end(status)?;
            self.ends += 1;
            self.process = self.spec.start()?;
        }
        Ok(())
    }

    /// Adds the results of a program that has ended. An exit status other than 0 is a failure.
    fn account_end(&mut self, status: ExitStatus) -> Result<(), LiveError> {
        let written = self.spec.report.as_deref().map(|file| (file, file.metadata()));
        let ran = match written {
            None => None,
            Some((file, Ok(data))) if data.len() > 0 => Some(read_report(file)?),
            Some(_) => return Err(self.process.failure_of("elfen run", status)),
        };
        if !status.success() {
            let (name, said) =
                (self.spec.label.clone(), last_stderr_line(&self.process.stderr_text()));
            return Err(LiveError::OwnFailed { name, status, said });
        }
        self.add_results(ran);
        Ok(())
    }

    fn add_results(&mut self, ran: Option<Report>) {
        self.finished_ns += match (&ran, &self.spec.report) {
            (Some(report), _) => report.figures.ran_ns().unwrap_or(self.last_seen_ns),
            (None, None) => self.process.spent_ns(),
            // `elfen run` was killed before it wrote its report.
            (None, Some(_)) => self.last_seen_ns,
        };
        self.last_seen_ns = 0;
        self.report = match (self.report.take(), ran) {
            (Some(before), Some(after)) => Some(add_reports(&before, after)),
            (before, after) => after.or(before),
        };
    }

    /// CPU time so far, in nanoseconds.
    pub(super) fn used_ns(&mut self) -> u64 {
        let pid = self.process.id();
        let now_ns = match self.spec.report {
            None => usage::family_cpu_ns(pid),
            Some(_) => usage::batch_cpu_ns(pid),
        };
        // A process that is just being reaped may be missing in a reading.
        self.last_seen_ns = self.last_seen_ns.max(now_ns);
        self.finished_ns + self.last_seen_ns
    }

    /// Ends the program and all its descendants. Returns how often it ended by itself, and the
    /// report of `elfen run`.
    pub(super) fn end(mut self) -> Result<(u32, Option<Report>), LiveError> {
        if let Some(status) = self.process.try_wait()? {
            self.account_end(status)?;
            return Ok((self.ends + 1, self.report.take()));
        }
        self.used_ns();
        self.stop(STOP_TIMEOUT);
        let ran = self.spec.report.as_deref().and_then(|file| read_report(file).ok());
        self.add_results(ran);
        Ok((self.ends, self.report.take()))
    }

    /// Ends all descendants, too: a process that outlived its parent would run during the next
    /// measurement.
    fn stop(&mut self, timeout: Duration) {
        let pid = self.process.id();
        let family = usage::Descendants::of(pid);
        match self.spec.report {
            None => os::send_group(pid, libc::SIGTERM),
            // The launcher forwards the signal and writes its report.
            Some(_) => os::send(pid, libc::SIGTERM),
        }
        let late = match self.process.wait(timeout) {
            true => None,
            false => Some(usage::Descendants::of(pid)),
        };
        // A shell that ignores SIGTERM would start its next command.
        if late.is_some() && self.spec.report.is_none() {
            os::send(pid, libc::SIGKILL);
        }
        family.kill();
        late.iter().for_each(usage::Descendants::kill);
        // A launcher whose batch was killed still writes its report.
        if !self.process.wait(REPORT_TIMEOUT) {
            os::send(pid, libc::SIGKILL);
            self.process.wait(timeout);
        }
    }
}

/// Ends the program with its descendants, however the measurement ends.
impl Drop for OwnBatch {
    fn drop(&mut self) {
        if matches!(self.process.try_wait(), Ok(None)) {
            self.stop(REPORT_TIMEOUT);
        }
    }
}

/// The last line on stderr that is not from `elfen run`; else its last line.
fn last_stderr_line(said: &str) -> String {
    let lines = || said.lines().rev().map(str::trim).filter(|line| !line.is_empty());
    let own = lines().find(|line| !line.starts_with(ELFEN_SAYS));
    own.or_else(|| lines().next()).unwrap_or("it said nothing").to_owned()
}

pub(crate) fn read_report(file: &Path) -> Result<Report, LiveError> {
    let name = "elfen run".to_owned();
    let text = fs::read_to_string(file)
        .map_err(LiveError::io(format!("reading the report {}", file.display())))?;
    serde_json::from_str(&text).map_err(|error| LiveError::Garbled { name, why: error.to_string() })
}

/// The sum of two consecutive runs of the program. Times are added, latencies are those of the run
/// with more samples, and the rest is that of the last run.
fn add_reports(before: &Report, after: Report) -> Report {
    let add = |one: Option<u64>, other: Option<u64>| one.zip(other).map(|(a, b)| a + b);
    let more = |one: Latency, other: Latency| if one.n > other.n { one } else { other };
    let (first, last) = (&before.figures, &after.figures);
    Report {
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
    use super::super::os::Rank;
    use super::super::scratch::Scratch;
    use super::*;

    fn start_shell(script: &str, scratch: &Scratch) -> OwnBatch {
        let argv = ["sh", "-c", script].map(OsString::from).to_vec();
        let setup = ChildSetup::anywhere(Rank::Normal);
        let err = scratch.path("own.err");
        LaunchSpec { label: "sh".to_owned(), argv, setup, err, report: None }.start_batch().unwrap()
    }

    fn until(what: &str, mut done: impl FnMut() -> bool) {
        let begin = Instant::now();
        while !done() {
            assert!(begin.elapsed() < Duration::from_secs(60), "{what} does not happen");
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Goal: a program that ends with status 0 is started again; a failure is reported with its
    /// status and its last line. Method: a shell that ends at once, and a shell that fails.
    #[test]
    fn programs_are_started_again_unless_they_fail() {
        let scratch = Scratch::new(1).unwrap();
        let mut short = start_shell("exit 0", &scratch);
        until("the third end", || {
            short.restart_if_ended().unwrap();
            short.ends >= 3
        });
        short.end().unwrap();
        let mut failing = start_shell("echo first >&2; echo no luck >&2; exit 7", &scratch);
        let mut error = None;
        until("its failure", || {
            error = failing.restart_if_ended().err();
            error.is_some()
        });
        let error = error.unwrap().to_string();
        assert_eq!(error, "sh ended by itself (exit status: 7): no luck");
    }

    /// Goal: the CPU time of all descendants counts, and none of them outlives the batch. Method: a
    /// shell whose child works and ends, and a shell that ignores SIGTERM.
    #[test]
    fn all_descendants_count_and_end() {
        let scratch = Scratch::new(1).unwrap();
        let work = "i=0; while [ $i -lt 40000 ]; do i=$((i+1)); done";
        let script = format!("sh -c '{work}'; trap '' TERM; echo done >&2; sleep 600; sleep 600");
        let mut parent = start_shell(&script, &scratch);
        until("the end of its child", || parent.process.stderr_text().contains("done"));
        let used_ns = parent.used_ns();
        assert!(used_ns >= 10_000_000, "{used_ns}");
        let pid = parent.process.id();
        until("its next child", || !below(pid).is_empty());
        let child = below(pid)[0];
        parent.end().unwrap();
        until("the end of both", || {
            [pid, child].iter().all(|&pid| usage::process_name(pid).as_deref() != Some("sleep"))
        });
        // SIGTERM ended its child, so the shell has started the next.
        let group = nix::unistd::Pid::from_raw(pid.cast_signed());
        until("the end of all", || nix::sys::signal::killpg(group, None).is_err());
    }

    #[test]
    fn lines_of_the_program_are_preferred_to_those_of_elfen() {
        let said = "elfen: borrow-idle on lanes 0:1\nno luck\n\nelfen: 1.2s: borrowed 1s\n";
        assert_eq!(last_stderr_line(said), "no luck");
        assert_eq!(last_stderr_line("elfen: program \"x\": none\n"), "elfen: program \"x\": none");
        assert_eq!(last_stderr_line(""), "it said nothing");
    }

    #[test]
    fn labels_are_the_last_part_of_a_path() {
        let label = |word: &str| label(&[word.to_owned()]);
        assert_eq!(label("/usr/bin/xz").as_deref(), Some("xz"));
        assert_eq!(label("xz").as_deref(), Some("xz"));
        assert_eq!(super::label(&[]), None);
    }

    /// Goal: two runs add up. Method: by hand; without an account the sum has none.
    #[test]
    fn runs_one_after_the_other_add_up() {
        let report = |ran: Option<u64>, n: u64| Report {
            wall_ns: 100,
            request_busy_ns: Some(10),
            figures: Figures {
                borrowed_ns: ran,
                overlapped_ns: ran,
                reaction_ns: Latency { n, median: Some(n), ..Latency::default() },
                ..Figures::default()
            },
            ..Report::default()
        };
        let both = add_reports(&report(Some(40), 9), report(Some(2), 3));
        assert_eq!((both.wall_ns, both.request_busy_ns), (200, Some(20)));
        assert_eq!((both.figures.ran_ns(), both.figures.reaction_ns.n), (Some(84), 9));
        assert_eq!(add_reports(&report(None, 0), report(Some(2), 0)).figures.ran_ns(), None);
    }

    /// Goal: a report without a figure is refused, and not read as zero. Method: a report of `elfen
    /// run`, whole and with a renamed key.
    #[test]
    fn a_report_without_its_figures_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("report.json");
        let text = serde_json::to_string(&Report { wall_ns: 7, ..Report::default() }).unwrap();
        fs::write(&file, &text).unwrap();
        assert_eq!(read_report(&file).unwrap().wall_ns, 7);
        fs::write(&file, text.replace("overlapped_ns", "overlap_ns")).unwrap();
        let refused = read_report(&file);
        assert!(
            matches!(&refused, Err(LiveError::Garbled { why, .. })
                if why.contains("overlapped_ns")),
            "{refused:?}"
        );
    }
}
