//! A child process: started with its CPUs and priority, its output kept in files, and always ended.
//!
//! Output goes to files and not to pipes, because no thread empties a pipe during a measurement.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;

use super::os::{self, ChildSetup, Rank};
use super::scratch::Scratch;
use super::usage::Descendants;
use super::{LiveError, check_interrupted};

/// Time for a child to end after SIGTERM, when its handle is dropped.
const TERM_TIMEOUT: Duration = Duration::from_secs(2);
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Time for `elfen run` to attach, and for its program to start on a busy lane.
pub(super) const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Time for a batch to end: an iteration of `elfen-batch` takes some ten milliseconds of a lane's
/// time.
pub(crate) const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// The most stderr that is kept of a program of the user's own.
const STDERR_MAX: u64 = 1 << 20;

#[derive(Debug)]
pub(crate) struct Process {
    name: String,
    child: Child,
    out: PathBuf,
    err: PathBuf,
    status: Option<ExitStatus>,
    /// CPU time of the child and of the descendants that it reaped, once it has ended.
    spent_ns: u64,
}

impl Process {
    pub(super) fn start(
        name: &str,
        command: Command,
        setup: &ChildSetup,
        scratch: &Scratch,
    ) -> Result<Self, LiveError> {
        Self::spawn(name, command, setup, Self::files(scratch))
    }

    fn files(scratch: &Scratch) -> [PathBuf; 2] {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Relaxed);
        ["out", "err"].map(|kind| scratch.path(&format!("{number}.{kind}")))
    }

    /// Starts a child at normal priority on any CPU.
    pub(super) fn start_anywhere(
        name: &str,
        command: Command,
        scratch: &Scratch,
    ) -> Result<Self, LiveError> {
        Self::start(name, command, &ChildSetup::anywhere(Rank::Normal), scratch)
    }

    /// Like `start_anywhere`, with a pipe as stdin.
    pub(super) fn start_with_stdin(
        name: &str,
        command: Command,
        scratch: &Scratch,
    ) -> Result<Self, LiveError> {
        let setup = ChildSetup::anywhere(Rank::Normal);
        Self::spawn_with(Stdio::piped(), name, command, &setup, Self::files(scratch))
    }

    /// Writes a line to its stdin.
    pub(super) fn write_line(&self, line: &str) -> Result<(), LiveError> {
        let input = self.child.stdin.as_ref().ok_or(io::ErrorKind::BrokenPipe);
        let written =
            input.map_err(io::Error::from).and_then(|mut input| writeln!(input, "{line}"));
        written.map_err(LiveError::io(format!("writing to {}", self.name)))
    }

    /// Starts a program of the user's own: its stdout is discarded, and its stderr goes to this
    /// file.
    pub(super) fn start_without_stdout(
        name: &str,
        command: Command,
        setup: &ChildSetup,
        err: PathBuf,
    ) -> Result<Self, LiveError> {
        Self::spawn(name, command, setup, [PathBuf::from("/dev/null"), err])
    }

    /// Starts a child whose stdout and stderr go to these files.
    pub(crate) fn spawn(
        name: &str,
        command: Command,
        setup: &ChildSetup,
        files: [PathBuf; 2],
    ) -> Result<Self, LiveError> {
        Self::spawn_with(Stdio::null(), name, command, setup, files)
    }

    fn spawn_with(
        stdin: Stdio,
        name: &str,
        mut command: Command,
        setup: &ChildSetup,
        [out, err]: [PathBuf; 2],
    ) -> Result<Self, LiveError> {
        let failed = |error| LiveError::Io { what: format!("starting {name}"), error };
        // Opened for appending, so that output continues at the beginning of a file that was
        // truncated.
        let file = |path: &PathBuf| {
            let emptied = File::create(path);
            emptied
                .and_then(|_| OpenOptions::new().append(true).open(path))
                .map_err(LiveError::io(format!("writing {}", path.display())))
        };
        command.stdin(stdin).stdout(file(&out)?).stderr(file(&err)?);
        // All programs that are compared run as the same user, also those that `elfen run` starts.
        command.env_remove("SUDO_UID");
        os::configure(&mut command, setup);
        let child = command.spawn().map_err(failed)?;
        Ok(Self { name: name.to_owned(), child, out, err, status: None, spent_ns: 0 })
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Fails if it has ended.
    pub(super) fn check_alive(&mut self) -> Result<(), LiveError> {
        match self.try_wait()? {
            None => Ok(()),
            Some(status) => Err(self.failure(status)),
        }
    }

    pub(crate) fn try_wait(&mut self) -> Result<Option<ExitStatus>, LiveError> {
        if self.status.is_none() {
            let before_ns = os::reaped_cpu_ns();
            let waited = self.child.try_wait();
            self.status = waited.map_err(LiveError::io(format!("waiting for {}", self.name)))?;
            self.spent_ns = os::reaped_cpu_ns().saturating_sub(before_ns);
        }
        Ok(self.status)
    }

    pub(super) fn spent_ns(&self) -> u64 {
        self.spent_ns
    }

    /// Its stderr so far.
    pub(crate) fn stderr_text(&self) -> String {
        fs::read(&self.err).map_or_else(|_| String::new(), |said| lossy(&said))
    }

    /// Empties its stderr file if that is large: a program of the user's own may print more than
    /// there is room for.
    pub(crate) fn truncate_stderr(&self) -> Result<(), LiveError> {
        let failed = || LiveError::io(format!("cutting {}", self.err.display()));
        if fs::metadata(&self.err).map_err(failed())?.len() > STDERR_MAX {
            let file = OpenOptions::new().write(true).open(&self.err).map_err(failed())?;
            file.set_len(0).map_err(failed())?;
        }
        Ok(())
    }

    /// Its stdout so far.
    pub(super) fn stdout_text(&self) -> String {
        fs::read_to_string(&self.out).unwrap_or_default()
    }

    /// Sends a signal if one is given, waits for the end of the child, and returns its stdout. Any
    /// exit status but 0 is a failure.
    pub(super) fn finish(
        mut self,
        signal: Option<i32>,
        timeout: Duration,
    ) -> Result<String, LiveError> {
        if let (Some(signal), None) = (signal, self.try_wait()?) {
            os::send(self.id(), signal);
        }
        let begin = Instant::now();
        loop {
            if let Some(status) = self.try_wait()? {
                return if status.success() {
                    Ok(self.stdout_text())
                } else {
                    Err(self.failure(status))
                };
            }
            check_interrupted()?;
            if begin.elapsed() > timeout {
                let (name, seconds) = (self.name.clone(), timeout.as_secs());
                return Err(LiveError::Stuck { name, seconds });
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Like `finish`, for stdout with one JSON value.
    pub(super) fn finish_json<T: DeserializeOwned>(
        self,
        signal: Option<i32>,
        timeout: Duration,
    ) -> Result<T, LiveError> {
        let name = self.name.clone();
        let text = self.finish(signal, timeout)?;
        serde_json::from_str(&text)
            .map_err(|error| LiveError::Garbled { name, why: error.to_string() })
    }

    fn failure(&self, status: ExitStatus) -> LiveError {
        self.failure_of(&self.name, status)
    }

    pub(super) fn failure_of(&self, name: &str, status: ExitStatus) -> LiveError {
        let said = self.stderr_text();
        let said = said.lines().last().unwrap_or("it said nothing").to_owned();
        let name = name.to_owned();
        let said = said.strip_prefix("elfen: ").map_or(said.clone(), str::to_owned);
        LiveError::Failed { name, status, said }
    }

    pub(crate) fn wait(&mut self, timeout: Duration) -> bool {
        let begin = Instant::now();
        while matches!(self.try_wait(), Ok(None)) {
            if begin.elapsed() > timeout {
                return false;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        true
    }
}

/// Sends SIGTERM and then SIGKILL, also to the descendants. `elfen run` would leave its batch
/// behind, and a shell that handles SIGTERM would leave its children.
impl Drop for Process {
    fn drop(&mut self) {
        if !matches!(self.try_wait(), Ok(None)) {
            return;
        }
        let family = Descendants::of(self.id());
        os::send(self.id(), libc::SIGTERM);
        if !self.wait(TERM_TIMEOUT) {
            let late = Descendants::of(self.id());
            os::send(self.id(), libc::SIGKILL);
            let _killed = self.child.wait();
            late.kill();
        }
        family.kill();
    }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Waits until `done` returns a value. Fails if the child ends before.
pub(super) fn wait_for<T>(
    process: &mut Process,
    timeout: Duration,
    mut done: impl FnMut(&Process) -> Option<T>,
) -> Result<T, LiveError> {
    let begin = Instant::now();
    loop {
        check_interrupted()?;
        if let Some(result) = done(process) {
            return Ok(result);
        }
        process.check_alive()?;
        if begin.elapsed() > timeout {
            let (name, seconds) = (process.name.clone(), timeout.as_secs());
            return Err(LiveError::NotReady { name, seconds });
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::usage;
    use elfen_machine::process::below;
    use serde_json::Value;

    fn start(script: &str, scratch: &Scratch) -> Process {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let setup = ChildSetup::anywhere(Rank::Normal);
        Process::start("it", command, &setup, scratch).unwrap()
    }

    /// Goal: output and failures of a child are reported. Method: a child that prints, one that
    /// fails, one whose output is no JSON, and one that does not end.
    #[test]
    fn output_and_failures_are_reported() {
        let scratch = Scratch::new(1).unwrap();
        let long = Duration::from_secs(60);
        let printed: Value = start("echo '{\"x\":1}'", &scratch).finish_json(None, long).unwrap();
        assert_eq!(printed["x"], 1);
        let failed = start("echo 'it: no luck' >&2; exit 3", &scratch).finish(None, long);
        let failed = failed.unwrap_err().to_string();
        assert_eq!(failed, "it ended early (exit status: 3): no luck");
        let garbled = start("echo x", &scratch).finish_json::<Value>(None, long);
        assert!(matches!(garbled, Err(LiveError::Garbled { .. })), "{garbled:?}");
        let stuck = start("exec sleep 600", &scratch).finish(None, Duration::ZERO);
        assert!(matches!(stuck, Err(LiveError::Stuck { .. })), "{stuck:?}");
        let asked = start("exec sleep 600", &scratch).finish(Some(libc::SIGTERM), long);
        assert!(matches!(asked, Err(LiveError::Failed { .. })), "{asked:?}");
    }

    /// Goal: a child that ignores SIGTERM is ended, and so are the descendants of a child that
    /// handles it. Method: shells with a child, dropped.
    #[test]
    fn a_dropped_child_ends_with_all_descendants() {
        assert_all_end("trap '' TERM; sh -c 'sleep 600; :' & echo ready; wait; wait");
        assert_all_end("sh -c 'sleep 600; :' & echo ready; wait; wait");
    }

    fn assert_all_end(script: &str) {
        let scratch = Scratch::new(1).unwrap();
        let mut parent = start(script, &scratch);
        wait_for(&mut parent, Duration::from_secs(60), |p| {
            p.stdout_text().contains("ready").then_some(())
        })
        .unwrap();
        let family = below(parent.id());
        assert!(!family.is_empty());
        let id = parent.id();
        drop(parent);
        let lives =
            |pid: u32| usage::process_name(pid).is_some_and(|name| name == "sh" || name == "sleep");
        // The process that adopts orphans reaps them at some later time.
        let begin = Instant::now();
        while family.iter().chain([&id]).any(|&pid| lives(pid) && !is_over(pid)) {
            assert!(begin.elapsed() < Duration::from_secs(60), "{family:?} live on");
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    fn is_over(pid: u32) -> bool {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.is_empty() || status.contains("State:\tZ") || status.contains("State:\tX")
    }
}
