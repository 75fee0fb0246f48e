//! One run of the user's program: alone on the batch lane, or under `elfen run`.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::thread;
use std::time::Duration;

use elfen_console::programs::find_program;
use elfen_run::report::Report;

use super::output::Ended;
use crate::live::os::{self, ChildSetup, Rank};
use crate::live::own_program::read_report;
use crate::live::process::{Process, STOP_TIMEOUT};
use crate::live::usage::Descendants;
use crate::live::{LiveError, check_interrupted};

/// We wake up on a CPU that may be the request lane, where that is a moment of overlap.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// For a front whose batch was killed.
const TO_REPORT: Duration = Duration::from_secs(2);
/// More output than this fills the disk that others use as well.
const OUTPUT_MAX: u64 = 1 << 30;

const ELFEN_RUN: &str = "elfen run";
/// Lines of `elfen run` itself begin so.
const ELFEN_SAYS: &str = "elfen: ";

/// How a program is started.
#[derive(Clone, Debug)]
pub(super) struct Starts<'a> {
    pub(super) lanes: (u32, u32),
    /// The program and its arguments.
    pub(super) words: &'a [OsString],
    /// For `elfen run`.
    pub(super) options: &'a [String],
    pub(super) folder: &'a Path,
    /// Whether anybody reads what it prints.
    pub(super) keeps_output: bool,
}

#[derive(Debug)]
pub(super) struct Running {
    process: Process,
    output: Option<PathBuf>,
    /// Of an `elfen run`.
    report: Option<PathBuf>,
    /// Whether we told it to end.
    stopped: bool,
}

impl Starts<'_> {
    /// On the batch lane, with nobody to watch over it.
    pub(super) fn alone(&self, output: &str) -> Result<Running, LiveError> {
        let program = self.words.first().map_or_else(|| OsStr::new(""), OsString::as_os_str);
        let mut command = Command::new(program);
        command.args(self.words.iter().skip(1));
        let setup = ChildSetup::on(self.lanes.1, Rank::Normal);
        self.start(&program.to_string_lossy(), command, &setup, output, None)
    }

    pub(super) fn under(&self, inject: &str) -> Result<Running, LiveError> {
        let report = self.folder.join("report.json");
        let mut command = self.elfen_run(inject)?;
        command.arg("--report").arg(&report).arg("--").args(self.words);
        // The front passes it on; killed, it would leave its batch behind.
        let setup =
            ChildSetup { death_signal: libc::SIGTERM, ..ChildSetup::anywhere(Rank::Normal) };
        self.start(ELFEN_RUN, command, &setup, "output", Some(report))
    }

    /// Fails, in the words of `elfen run`, where it would refuse the program.
    pub(super) fn check(&self, inject: &str) -> Result<(), LiveError> {
        let mut command = self.elfen_run(inject)?;
        command.args(["--dry-run", "--"]).args(self.words);
        let setup = ChildSetup::anywhere(Rank::Normal);
        let mut running = self.start(ELFEN_RUN, command, &setup, "output", None)?;
        let status = running.wait_until(|| false)?;
        match status {
            Some(status) if !status.success() => Err(running.refusal(status)),
            _ => Ok(()),
        }
    }

    fn elfen_run(&self, inject: &str) -> Result<Command, LiveError> {
        let (request, batch) = self.lanes;
        let mut command = Command::new(find_program("elfen")?);
        // The same user's as where it runs alone.
        command.env_remove("SUDO_UID");
        command.args(["run", "--policy", "borrow-idle", "--signal", "tasks", "--inject", inject]);
        command.args(["--lanes", &format!("{request}:{batch}")]).args(self.options);
        Ok(command)
    }

    fn start(
        &self,
        name: &str,
        command: Command,
        setup: &ChildSetup,
        output: &str,
        report: Option<PathBuf>,
    ) -> Result<Running, LiveError> {
        if let Some(report) = &report {
            // One that is there afterwards is this run's.
            fs::remove_file(report).ok();
        }
        let output = self.keeps_output.then(|| self.folder.join(output));
        let out = output.clone().unwrap_or_else(|| PathBuf::from("/dev/null"));
        let files = [out, self.folder.join("errors")];
        let process = Process::spawn(name, command, setup, files)?;
        Ok(Running { process, output, report, stopped: false })
    }
}

impl Running {
    pub(super) fn id(&self) -> i32 {
        self.process.id().cast_signed()
    }

    /// Its status when it has ended; nothing if `enough` says so first.
    pub(super) fn wait_until(
        &mut self,
        mut enough: impl FnMut() -> bool,
    ) -> Result<Option<ExitStatus>, LiveError> {
        loop {
            if let Some(status) = self.process.try_wait()? {
                return Ok(Some(status));
            }
            check_interrupted()?;
            self.refuse_much_output()?;
            self.process.truncate_stderr()?;
            if enough() {
                return Ok(None);
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    fn refuse_much_output(&self) -> Result<(), LiveError> {
        let Some(output) = &self.output else { return Ok(()) };
        let length = fs::metadata(output).map_or(0, |data| data.len());
        if length <= OUTPUT_MAX {
            return Ok(());
        }
        Err(LiveError::Refused {
            why: "the program prints more than 1 GiB, which would have to be kept".to_owned(),
            fix: "have it print elsewhere (`sh -c 'PROGRAM > FILE'`), or give --rounds 0",
        })
    }

    /// Ends what has not ended yet.
    pub(super) fn stop(&mut self) {
        self.stopped = true;
        let pid = self.process.id();
        let family = Descendants::of(pid);
        os::send(pid, libc::SIGTERM);
        self.process.wait(STOP_TIMEOUT);
        // What heeds no SIGTERM, and what a shell that heeded it left behind: it would run beside
        // the next measurement. A front that waits still has its report to write.
        family.kill();
        self.process.wait(TO_REPORT);
    }

    /// What `elfen run` says of a run that has ended. One that says nothing did not run the
    /// program, or was stopped before it came to that.
    pub(super) fn report(&mut self) -> Result<Option<Report>, LiveError> {
        let Some(file) = &self.report else { return Ok(None) };
        let written = fs::metadata(file).is_ok_and(|data| data.len() > 0);
        match self.process.try_wait()? {
            Some(status) if !written && self.stopped && status.signal().is_some() => Ok(None),
            Some(status) if !written => Err(self.refusal(status)),
            _ => read_report(file).map(Some),
        }
    }

    /// Of an `elfen run`; a screen may stand below its line.
    fn refusal(&self, status: ExitStatus) -> LiveError {
        let said = self.process.stderr_text();
        let line = said.lines().rev().find_map(|line| line.strip_prefix(ELFEN_SAYS));
        let said = line.unwrap_or("it said nothing").to_owned();
        LiveError::Failed { name: ELFEN_RUN.to_owned(), status, said }
    }

    /// For one that ended by itself; nothing where nobody reads what it printed.
    pub(super) fn ended(&self, status: ExitStatus) -> Option<Ended> {
        Some(Ended { status: as_shell(status), output: self.output.clone()? })
    }
}

fn as_shell(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use elfen_machine::process::below;
    use std::time::Instant;

    fn started<'a>(starts: &Starts<'a>, script: &str) -> Running {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let setup = ChildSetup::anywhere(Rank::Normal);
        let report = starts.folder.join("report.json");
        starts.start(ELFEN_RUN, command, &setup, "output", Some(report)).unwrap()
    }

    /// Goal: what a program has started ends with it, so that it runs beside no other measurement.
    /// Method: a shell whose child lives on when the shell ends.
    #[test]
    fn what_a_stopped_program_leaves_behind_ends() {
        let folder = tempfile::tempdir().unwrap();
        let (words, options, folder) = (&[], &[], folder.path());
        let starts = Starts { lanes: (0, 1), words, options, folder, keeps_output: false };
        let mut shell = started(&starts, "sleep 600 & wait");
        let pid = shell.process.id();
        shell.wait_until(|| !below(pid).is_empty()).unwrap();
        let left = below(pid);
        shell.stop();
        let lives = |pid: &u32| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
            stat.is_ok_and(|stat| stat.contains("(sleep)") && !stat.contains(") Z"))
        };
        let begin = Instant::now();
        while left.iter().any(lives) {
            assert!(begin.elapsed() < Duration::from_secs(60), "{left:?} live on");
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Goal: a run that is told to end before it has begun reports nothing, and no failure; one
    /// that ends so by itself is one. Method: shells that write no report.
    #[test]
    fn a_run_that_is_stopped_early_is_no_failure() {
        let folder = tempfile::tempdir().unwrap();
        let (words, options, folder) = (&[], &[], folder.path());
        let starts = Starts { lanes: (0, 1), words, options, folder, keeps_output: false };
        let mut stopped = started(&starts, "exec sleep 60");
        stopped.stop();
        assert!(stopped.report().unwrap().is_none());
        let mut killed = started(&starts, "kill -TERM $$");
        killed.wait_until(|| false).unwrap();
        assert!(matches!(killed.report(), Err(LiveError::Failed { .. })));
    }
}
