//! A batch program of the user's own, on one lane.
//!
//! Unlike `elfen-batch` it says nothing of what it got done and may come to its end at any time. So
//! its work is the CPU time of its whole family, those that have ended included, and one that ended
//! well is started again. Where the kernel counts what it ran, the report of `elfen run` says more,
//! as CPU time has naps in the program's own checks in it.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use elfen_machine::process::below;
use elfen_run::report::Report;

use super::os::{self, Place};
use super::process::{Process, TO_END, TO_START};
use super::reported::{read_report, together};
use super::{LOOK_EVERY, LiveError, go_on, usage};

/// The user's program with its arguments; no words if there is none.
#[derive(Clone, Debug, Default)]
pub struct Own {
    pub command: Vec<String>,
    /// As in `elfen run --inject`.
    pub inject: Option<String>,
}

impl Own {
    pub(super) fn is(&self, batch: &str) -> bool {
        label(&self.command).is_some_and(|label| label == batch)
    }
}

/// The program as rows name it: the last part of its name.
pub fn label(command: &[String]) -> Option<String> {
    let program = Path::new(command.first()?);
    let name = program.file_name().unwrap_or(program.as_os_str());
    Some(name.to_string_lossy().into_owned())
}

/// The name of `elfen run`'s own processes.
const ELFEN: &str = "elfen";
/// For a front whose batch is gone.
const TO_REPORT: Duration = Duration::from_secs(2);
/// Lines of `elfen run` itself begin so.
const ELFEN_SAYS: &str = "elfen: ";

/// How it is started on a lane, and again.
#[derive(Clone, Debug)]
pub(super) struct Started {
    pub(super) label: String,
    pub(super) words: Vec<OsString>,
    pub(super) place: Place,
    /// Where its stderr goes.
    pub(super) err: PathBuf,
    /// Where `elfen run` writes its report; nothing for a program that is started directly.
    pub(super) report: Option<PathBuf>,
}

#[derive(Debug)]
pub(super) struct Lane {
    started: Started,
    process: Process,
    /// CPU time of those that have come to their end.
    ended_ns: u64,
    /// CPU time of the one that runs, when it was looked at last. Under an `elfen run` whose kernel
    /// counts nothing, it is all that is known of one that has ended since.
    seen_ns: u64,
    pub(super) ends: u32,
    report: Option<Report>,
}

impl Started {
    fn start(&self) -> Result<Process, LiveError> {
        if let Some(report) = &self.report {
            // A report that is there afterwards shows that the program was started.
            fs::remove_file(report).ok();
        }
        let program = self.words.first().map_or_else(|| OsStr::new(""), OsString::as_os_str);
        let mut command = Command::new(program);
        command.args(self.words.iter().skip(1));
        Process::start_quietly(&self.label, command, &self.place, self.err.clone())
    }

    pub(super) fn lane(self) -> Result<Lane, LiveError> {
        let process = self.start()?;
        let mut lane =
            Lane { started: self, process, ended_ns: 0, seen_ns: 0, ends: 0, report: None };
        let begin = Instant::now();
        while lane.process.ended()?.is_none() && !lane.has_begun() {
            go_on()?;
            if begin.elapsed() > TO_START {
                let (name, seconds) = (lane.started.label.clone(), TO_START.as_secs());
                return Err(LiveError::NotReady { name, seconds });
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(lane)
    }
}

impl Lane {
    /// `elfen run` has other things to do first.
    fn has_begun(&self) -> bool {
        let others = |pid: &u32| usage::name_of(*pid).is_some_and(|name| name != ELFEN);
        self.started.report.is_none() || below(self.process.id()).iter().any(others)
    }

    /// Starts it again if it came to its end.
    pub(super) fn goes_on(&mut self) -> Result<(), LiveError> {
        self.process.forget_much()?;
        if let Some(status) = self.process.ended()? {
            self.came_to_its_end(status)?;
            self.ends += 1;
            self.process = self.started.start()?;
        }
        Ok(())
    }

    /// Takes over what it leaves; a status of its own that is not 0 is a failure.
    fn came_to_its_end(&mut self, status: ExitStatus) -> Result<(), LiveError> {
        let written = self.started.report.as_deref().map(|file| (file, file.metadata()));
        let ran = match written {
            None => None,
            Some((file, Ok(data))) if data.len() > 0 => Some(read_report(file)?),
            Some(_) => return Err(self.process.failure_of("elfen run", status)),
        };
        if !status.success() {
            let (name, said) = (self.started.label.clone(), last_words(&self.process.said()));
            return Err(LiveError::OwnFailed { name, status, said });
        }
        self.take_over(ran);
        Ok(())
    }

    fn take_over(&mut self, ran: Option<Report>) {
        self.ended_ns += match (&ran, &self.started.report) {
            (Some(report), _) => report.figures.ran_ns().unwrap_or(self.seen_ns),
            (None, None) => self.process.spent_ns(),
            // `elfen run` was killed before it could say.
            (None, Some(_)) => self.seen_ns,
        };
        self.seen_ns = 0;
        self.report = match (self.report.take(), ran) {
            (Some(before), Some(after)) => Some(together(&before, after)),
            (before, after) => after.or(before),
        };
    }

    /// CPU time so far, in nanoseconds.
    pub(super) fn used_ns(&mut self) -> u64 {
        let pid = self.process.id();
        let now_ns = match self.started.report {
            None => usage::of_family(pid),
            Some(_) => usage::of_batch(pid),
        };
        // A process that has just been waited for may be missing in one reading.
        self.seen_ns = self.seen_ns.max(now_ns);
        self.ended_ns + self.seen_ns
    }

    /// Ends it and all that it started; gives what `elfen run` reported of it.
    pub(super) fn end(mut self) -> Result<(u32, Option<Report>), LiveError> {
        if let Some(status) = self.process.ended()? {
            self.came_to_its_end(status)?;
            return Ok((self.ends + 1, self.report.take()));
        }
        self.used_ns();
        self.stop(TO_END);
        let ran = self.started.report.as_deref().and_then(|file| read_report(file).ok());
        self.take_over(ran);
        Ok((self.ends, self.report.take()))
    }

    /// A process that outlived its parent would run beside the next measurement.
    fn stop(&mut self, patience: Duration) {
        let pid = self.process.id();
        let family = usage::Members::of(pid);
        match self.started.report {
            None => os::send_group(pid, libc::SIGTERM),
            // The front passes it on, and reports.
            Some(_) => os::send(pid, libc::SIGTERM),
        }
        let late = match self.process.wait(patience) {
            true => None,
            false => Some(usage::Members::of(pid)),
        };
        // A shell that ignores SIGTERM would go on to its next command.
        if late.is_some() && self.started.report.is_none() {
            os::send(pid, libc::SIGKILL);
        }
        family.kill();
        late.iter().for_each(usage::Members::kill);
        // A front whose batch was killed has its report to write.
        if !self.process.wait(TO_REPORT) {
            os::send(pid, libc::SIGKILL);
            self.process.wait(patience);
        }
    }
}

/// Whatever ends a measurement, the program's family ends with it.
impl Drop for Lane {
    fn drop(&mut self) {
        if matches!(self.process.ended(), Ok(None)) {
            self.stop(TO_REPORT);
        }
    }
}

/// The last line that the program said; where it said nothing, that of `elfen run`.
fn last_words(said: &str) -> String {
    let lines = || said.lines().rev().map(str::trim).filter(|line| !line.is_empty());
    let own = lines().find(|line| !line.starts_with(ELFEN_SAYS));
    own.or_else(|| lines().next()).unwrap_or("it said nothing").to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::os::Rank;
    use super::super::scratch::Scratch;
    use super::*;

    fn lane(script: &str, scratch: &Scratch) -> Lane {
        let words = ["sh", "-c", script].map(OsString::from).to_vec();
        let place = Place::anywhere(Rank::Normal);
        let err = scratch.path("own.err");
        Started { label: "sh".to_owned(), words, place, err, report: None }.lane().unwrap()
    }

    fn until(what: &str, mut done: impl FnMut() -> bool) {
        let begin = Instant::now();
        while !done() {
            assert!(begin.elapsed() < Duration::from_secs(60), "{what} does not happen");
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Goal: one that ends well is started again, and one that fails is told with its status and
    /// its last line. Method: a shell that ends at once, and one that fails.
    #[test]
    fn ends_are_told_apart() {
        let scratch = Scratch::new(1).unwrap();
        let mut short = lane("exit 0", &scratch);
        until("the third end", || {
            short.goes_on().unwrap();
            short.ends >= 3
        });
        short.end().unwrap();
        let mut failing = lane("echo first >&2; echo no luck >&2; exit 7", &scratch);
        let mut error = None;
        until("its failure", || {
            error = failing.goes_on().err();
            error.is_some()
        });
        let error = error.unwrap().to_string();
        assert_eq!(error, "sh ended by itself (exit status: 7): no luck");
    }

    /// Goal: CPU time of children counts, of those that have ended as well, and no process of the
    /// family stays. Method: a shell whose child works and ends, and one that ignores SIGTERM.
    #[test]
    fn the_whole_family_counts_and_ends() {
        let scratch = Scratch::new(1).unwrap();
        let work = "i=0; while [ $i -lt 40000 ]; do i=$((i+1)); done";
        let script = format!("sh -c '{work}'; trap '' TERM; echo done >&2; sleep 600; sleep 600");
        let mut parent = lane(&script, &scratch);
        until("the end of its child", || parent.process.said().contains("done"));
        let used_ns = parent.used_ns();
        assert!(used_ns >= 10_000_000, "{used_ns}");
        let pid = parent.process.id();
        until("its next child", || !below(pid).is_empty());
        let child = below(pid)[0];
        parent.end().unwrap();
        until("the end of both", || {
            [pid, child].iter().all(|&pid| usage::name_of(pid).as_deref() != Some("sleep"))
        });
        // SIGTERM has ended its child, and so it has had another.
        let group = nix::unistd::Pid::from_raw(pid.cast_signed());
        until("the end of all", || nix::sys::signal::killpg(group, None).is_err());
    }

    #[test]
    fn the_programs_own_last_words_go_before_those_of_elfen() {
        let said = "elfen: borrow-idle on lanes 0:1\nno luck\n\nelfen: 1.2s: borrowed 1s\n";
        assert_eq!(last_words(said), "no luck");
        assert_eq!(last_words("elfen: program \"x\": none\n"), "elfen: program \"x\": none");
        assert_eq!(last_words(""), "it said nothing");
    }

    #[test]
    fn labels_are_the_last_part_of_a_name() {
        let label = |word: &str| label(&[word.to_owned()]);
        assert_eq!(label("/usr/bin/xz").as_deref(), Some("xz"));
        assert_eq!(label("xz").as_deref(), Some("xz"));
        assert_eq!(super::label(&[]), None);
    }
}
