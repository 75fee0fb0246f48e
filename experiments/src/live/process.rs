//! A child process. It starts with its CPUs and its priority, writes its output to files, and
//! always ends. A [`Rig`] has what starting a child requires.
//!
//! The output goes to files instead of pipes, because during a measurement no thread empties a
//! pipe.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use elfen_console::programs::find_program;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use serde::de::DeserializeOwned;

use super::os::{self, ChildSetup, Rank};
use super::scratch::Scratch;
use super::usage::Descendants;
use super::{LiveError, Machine, check_interrupted};

/// The time limit for a child to end after SIGTERM, when its handle is dropped.
const TERM_TIMEOUT: Duration = Duration::from_secs(2);
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// The time limit for `elfen run` to attach, and for its program to start on a busy lane.
pub(crate) const START_TIMEOUT: Duration = Duration::from_secs(20);
/// The time limit for a batch to end. An iteration of `elfen-batch` takes about ten milliseconds of
/// a lane's time.
pub(crate) const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// How much stderr of a program of the user's own is kept, in bytes.
const STDERR_MAX: u64 = 1 << 20;

#[derive(Debug)]
pub(crate) struct Process {
    name: String,
    child: Child,
    out: PathBuf,
    err: PathBuf,
    status: Option<ExitStatus>,
    /// The CPU time of the child and of the descendants that it reaped. It is known once the child
    /// has ended.
    pub(super) spent_ns: u64,
}

impl Process {
    pub(crate) fn start(
        name: &str,
        command: Command,
        setup: &ChildSetup,
        scratch: &Scratch,
    ) -> Result<Self, LiveError> {
        Self::spawn(name, command, setup, scratch.output_files())
    }

    /// Starts a child at normal priority on any CPU.
    pub(crate) fn start_anywhere(
        name: &str,
        command: Command,
        scratch: &Scratch,
    ) -> Result<Self, LiveError> {
        Self::start(name, command, &ChildSetup::anywhere(Rank::Normal), scratch)
    }

    /// Starts a child whose stdout and stderr go to these files.
    pub(crate) fn spawn(
        name: &str,
        mut command: Command,
        setup: &ChildSetup,
        [out, err]: [PathBuf; 2],
    ) -> Result<Self, LiveError> {
        // The file is open for appending, so that output continues at its beginning after it was
        // truncated.
        let file = |path: &PathBuf| {
            let emptied = File::create(path);
            emptied
                .and_then(|_| OpenOptions::new().append(true).open(path))
                .map_err(LiveError::io(format!("writing {}", path.display())))
        };
        let input = if setup.takes_input { Stdio::piped() } else { Stdio::null() };
        command.stdin(input).stdout(file(&out)?).stderr(file(&err)?);
        // All compared programs run as the same user. This includes the programs that `elfen run`
        // starts.
        command.env_remove("SUDO_UID");
        os::configure(&mut command, setup);
        let child = command.spawn().map_err(LiveError::io(format!("starting {name}")))?;
        Ok(Self { name: name.to_owned(), child, out, err, status: None, spent_ns: 0 })
    }

    /// Writes a line to the child's stdin.
    pub(crate) fn write_line(&self, line: &str) -> Result<(), LiveError> {
        let input = self.child.stdin.as_ref().ok_or(io::ErrorKind::BrokenPipe);
        let written =
            input.map_err(io::Error::from).and_then(|mut input| writeln!(input, "{line}"));
        written.map_err(LiveError::io(format!("writing to {}", self.name)))
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Fails if the child has ended.
    pub(crate) fn check_alive(&mut self) -> Result<(), LiveError> {
        self.try_wait()?.map_or(Ok(()), |status| Err(self.failure_of(&self.name, status)))
    }

    pub(crate) fn try_wait(&mut self) -> Result<Option<ExitStatus>, LiveError> {
        if self.status.is_none() {
            let before_ns = reaped_cpu_ns();
            let waited = self.child.try_wait();
            self.status = waited.map_err(LiveError::io(format!("waiting for {}", self.name)))?;
            self.spent_ns = reaped_cpu_ns().saturating_sub(before_ns);
        }
        Ok(self.status)
    }

    /// Returns the child's stderr so far.
    pub(crate) fn stderr_text(&self) -> String {
        fs::read(&self.err).map_or_else(|_| String::new(), |message| lossy(&message))
    }

    /// Empties the child's stderr file if it is large. A program of the user's own may print more
    /// than the disk can hold.
    pub(crate) fn truncate_stderr(&self) -> Result<(), LiveError> {
        let cut = || -> io::Result<()> {
            if fs::metadata(&self.err)?.len() > STDERR_MAX {
                OpenOptions::new().write(true).open(&self.err)?.set_len(0)?;
            }
            Ok(())
        };
        cut().map_err(LiveError::io(format!("cutting {}", self.err.display())))
    }

    /// Returns the child's stdout so far.
    pub(crate) fn stdout_text(&self) -> String {
        fs::read_to_string(&self.out).unwrap_or_default()
    }

    /// Sends a signal if one is given, waits for the end of the child, and returns its stdout.
    /// Fails if the exit status is not 0.
    pub(crate) fn finish(
        &mut self,
        signal: Option<i32>,
        timeout: Duration,
    ) -> Result<String, LiveError> {
        if let (Some(signal), None) = (signal, self.try_wait()?) {
            os::send(self.id(), signal);
        }
        match poll_until(timeout, || self.try_wait())? {
            Some(status) if status.success() => Ok(self.stdout_text()),
            Some(status) => Err(self.failure_of(&self.name, status)),
            None => {
                let (name, seconds) = (self.name.clone(), timeout.as_secs());
                Err(LiveError::Stuck { name, seconds })
            }
        }
    }

    /// Like `finish`, but parses stdout as one JSON value.
    pub(crate) fn finish_json<T: DeserializeOwned>(
        &mut self,
        signal: Option<i32>,
        timeout: Duration,
    ) -> Result<T, LiveError> {
        let text = self.finish(signal, timeout)?;
        serde_json::from_str(&text)
            .map_err(|error| LiveError::Garbled { name: self.name.clone(), why: error.to_string() })
    }

    pub(super) fn failure_of(&self, name: &str, status: ExitStatus) -> LiveError {
        let message = self.stderr_text();
        let message = message.lines().last().unwrap_or("it printed no message");
        // Elfen's programs begin their messages with this name, which is removed.
        let message = message.strip_prefix("elfen: ").unwrap_or(message).to_owned();
        LiveError::Failed { name: name.to_owned(), status, message }
    }

    /// Waits until `done` returns a value. Fails if the child ends before.
    pub(crate) fn wait_for<T>(
        &mut self,
        timeout: Duration,
        mut done: impl FnMut(&Self) -> Option<T>,
    ) -> Result<T, LiveError> {
        let found = poll_until(timeout, || {
            let found = done(self);
            if found.is_none() {
                self.check_alive()?;
            }
            Ok(found)
        })?;
        found.ok_or_else(|| self.not_ready(timeout))
    }

    pub(super) fn not_ready(&self, timeout: Duration) -> LiveError {
        LiveError::NotReady { name: self.name.clone(), seconds: timeout.as_secs() }
    }

    /// Waits for the end of the child, even if a signal has asked this process to end. Returns
    /// whether the child has ended.
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

/// Sends SIGTERM and then SIGKILL, also to the descendants. After SIGKILL, `elfen run` would leave
/// its batch running. A shell that handles SIGTERM would leave its children.
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

/// The programs of Elfen that experiments start.
#[derive(Debug)]
pub(super) struct Programs {
    pub(super) elfen: PathBuf,
    pub(super) search: PathBuf,
    pub(super) load: PathBuf,
    pub(super) batch: PathBuf,
}

/// What starting the programs of an experiment requires.
#[derive(Debug)]
pub(super) struct Rig {
    pub(super) programs: Programs,
    pub(super) machine: Machine,
    pub(super) scratch: Scratch,
}

impl Rig {
    pub(super) fn new(machine: Machine) -> Result<Self, LiveError> {
        let programs = Programs {
            elfen: find_program("elfen")?,
            search: find_program("elfen-search")?,
            load: find_program("elfen-load")?,
            batch: find_program("elfen-batch")?,
        };
        let lanes = u32::try_from(machine.pairs.len()).unwrap_or(u32::MAX);
        let scratch =
            Scratch::new(lanes).map_err(LiveError::io("making a folder for temporary files"))?;
        Ok(Self { programs, machine, scratch })
    }

    pub(super) fn start(
        &self,
        name: &str,
        command: Command,
        setup: &ChildSetup,
    ) -> Result<Process, LiveError> {
        Process::start(name, command, setup, &self.scratch)
    }

    /// Starts a child at normal priority on any CPU.
    pub(crate) fn start_anywhere(
        &self,
        name: &str,
        command: Command,
    ) -> Result<Process, LiveError> {
        Process::start_anywhere(name, command, &self.scratch)
    }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns the CPU time of all children that this process has reaped, and of the descendants that
/// they reaped.
fn reaped_cpu_ns() -> u64 {
    let used = getrusage(UsageWho::RUSAGE_CHILDREN);
    let ns = |usage: nix::sys::resource::Usage| {
        (usage.user_time().num_nanoseconds() + usage.system_time().num_nanoseconds()).unsigned_abs()
    };
    used.map_or(0, ns)
}

/// Polls until `done` returns a value. Returns `None` after the timeout. Fails after Ctrl-C.
pub(crate) fn poll_until<T>(
    timeout: Duration,
    mut done: impl FnMut() -> Result<Option<T>, LiveError>,
) -> Result<Option<T>, LiveError> {
    let begin = Instant::now();
    loop {
        if let Some(result) = done()? {
            return Ok(Some(result));
        }
        check_interrupted()?;
        if begin.elapsed() > timeout {
            return Ok(None);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use elfen_machine::process::{below, name_of};
    use serde_json::Value;

    fn start(script: &str) -> (Process, Scratch) {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let scratch = Scratch::new(1).unwrap();
        (Process::start_anywhere("it", command, &scratch).unwrap(), scratch)
    }

    /// Goal: the output and the failures of a child are reported. Method: a child that prints, one
    /// that fails, one that prints invalid JSON, and one that does not end.
    #[test]
    fn output_and_failures_are_reported() {
        let long = Duration::from_secs(60);
        let finish = |script, signal, timeout| start(script).0.finish_json(signal, timeout);
        let printed: Value = finish("echo '{\"x\":1}'", None, long).unwrap();
        assert_eq!(printed["x"], 1);
        let failed =
            finish("echo 'elfen: no luck' >&2; exit 3", None, long).unwrap_err().to_string();
        assert_eq!(failed, "it ended early (exit status: 3): no luck");
        let garbled = finish("echo x", None, long);
        assert!(matches!(garbled, Err(LiveError::Garbled { .. })), "{garbled:?}");
        let stuck = finish("exec sleep 600", None, Duration::ZERO);
        assert!(matches!(stuck, Err(LiveError::Stuck { .. })), "{stuck:?}");
        let asked = finish("exec sleep 600", Some(libc::SIGTERM), long);
        assert!(matches!(asked, Err(LiveError::Failed { .. })), "{asked:?}");
    }

    /// Goal: a dropped child that ignores SIGTERM ends, and a dropped child that handles it ends
    /// with its descendants. Method: shells with a child.
    #[test]
    fn a_dropped_child_ends_with_all_descendants() {
        assert_all_end("trap '' TERM; sh -c 'sleep 600; :' & echo ready; wait; wait");
        assert_all_end("sh -c 'sleep 600; :' & echo ready; wait; wait");
    }

    fn assert_all_end(script: &str) {
        let (mut parent, _scratch) = start(script);
        let ready = |it: &Process| it.stdout_text().contains("ready").then_some(());
        parent.wait_for(Duration::from_secs(60), ready).unwrap();
        let family = [below(parent.id()), vec![parent.id()]].concat();
        assert!(family.len() > 1);
        drop(parent);
        let is_over = |pid: u32| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            status.is_empty() || status.contains("State:\tZ") || status.contains("State:\tX")
        };
        let lives = |pid: u32| {
            name_of(pid).is_some_and(|name| name == "sh" || name == "sleep") && !is_over(pid)
        };
        // The process that adopts orphans may reap them later.
        let begin = Instant::now();
        while family.iter().any(|&pid| lives(pid)) {
            assert!(begin.elapsed() < Duration::from_secs(60), "{family:?} live on");
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}
