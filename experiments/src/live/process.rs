//! A child: started in its place, its output kept in files, ended whatever happens.
//!
//! Files and not pipes, because no thread empties a pipe while a measurement runs.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;

use super::os::{self, Place};
use super::scratch::Scratch;
use super::usage::Members;
use super::{LiveError, go_on};

/// For a child that is asked to end because we end.
const LAST_PATIENCE: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// For `elfen run` to attach, and for its program to start on a lane that others use as well.
pub(super) const TO_START: Duration = Duration::from_secs(20);
/// For a batch to end: an iteration of `elfen-batch` takes some ten milliseconds of a lane's time.
pub(crate) const TO_END: Duration = Duration::from_secs(5);
/// Of what a program of the user's own says on stderr, no more is kept.
const SAID_MAX: u64 = 1 << 20;

#[derive(Debug)]
pub(crate) struct Process {
    name: String,
    child: Child,
    out: PathBuf,
    err: PathBuf,
    status: Option<ExitStatus>,
    /// CPU time of it and of all that it had waited for, once it has ended.
    spent_ns: u64,
}

impl Process {
    pub(super) fn start(
        name: &str,
        command: Command,
        place: &Place,
        scratch: &Scratch,
    ) -> Result<Self, LiveError> {
        Self::spawn(name, command, place, Self::files(scratch))
    }

    fn files(scratch: &Scratch) -> [PathBuf; 2] {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Relaxed);
        ["out", "err"].map(|kind| scratch.path(&format!("{number}.{kind}")))
    }

    /// As `start`, and it can be told something by its standard input.
    pub(super) fn start_told(
        name: &str,
        command: Command,
        place: &Place,
        scratch: &Scratch,
    ) -> Result<Self, LiveError> {
        Self::spawn_with(Stdio::piped(), name, command, place, Self::files(scratch))
    }

    /// Tells it a line.
    pub(super) fn tell(&self, line: &str) -> Result<(), LiveError> {
        let input = self.child.stdin.as_ref().ok_or(io::ErrorKind::BrokenPipe);
        let told = input.map_err(io::Error::from).and_then(|mut input| writeln!(input, "{line}"));
        told.map_err(LiveError::io(format!("telling {} something", self.name)))
    }

    /// A program of the user's own: its stdout goes nowhere, and its stderr to this file.
    pub(super) fn start_quietly(
        name: &str,
        command: Command,
        place: &Place,
        err: PathBuf,
    ) -> Result<Self, LiveError> {
        Self::spawn(name, command, place, [PathBuf::from("/dev/null"), err])
    }

    /// Its stdout and its stderr go to these files.
    pub(crate) fn spawn(
        name: &str,
        command: Command,
        place: &Place,
        files: [PathBuf; 2],
    ) -> Result<Self, LiveError> {
        Self::spawn_with(Stdio::null(), name, command, place, files)
    }

    fn spawn_with(
        stdin: Stdio,
        name: &str,
        mut command: Command,
        place: &Place,
        [out, err]: [PathBuf; 2],
    ) -> Result<Self, LiveError> {
        let failed = |error| LiveError::Io { what: format!("starting {name}"), error };
        // Appended to, so that a file that is cut goes on at its beginning.
        let file = |path: &PathBuf| {
            let emptied = File::create(path);
            emptied
                .and_then(|_| OpenOptions::new().append(true).open(path))
                .map_err(LiveError::io(format!("writing {}", path.display())))
        };
        command.stdin(stdin).stdout(file(&out)?).stderr(file(&err)?);
        // All that a run compares is one user's, also what it starts by `elfen run`.
        command.env_remove("SUDO_UID");
        os::prepare(&mut command, place);
        let child = command.spawn().map_err(failed)?;
        Ok(Self { name: name.to_owned(), child, out, err, status: None, spent_ns: 0 })
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Fails if it has ended.
    pub(super) fn lives(&mut self) -> Result<(), LiveError> {
        match self.ended()? {
            None => Ok(()),
            Some(status) => Err(self.failure(status)),
        }
    }

    pub(crate) fn ended(&mut self) -> Result<Option<ExitStatus>, LiveError> {
        if self.status.is_none() {
            let before_ns = os::waited_for_ns();
            let waited = self.child.try_wait();
            self.status = waited.map_err(LiveError::io(format!("waiting for {}", self.name)))?;
            self.spent_ns = os::waited_for_ns().saturating_sub(before_ns);
        }
        Ok(self.status)
    }

    pub(super) fn spent_ns(&self) -> u64 {
        self.spent_ns
    }

    /// What it has said on stderr.
    pub(crate) fn said(&self) -> String {
        fs::read(&self.err).map_or_else(|_| String::new(), |said| lossy(&said))
    }

    /// A program of the user's own may say more than there is room for.
    pub(crate) fn forget_much(&self) -> Result<(), LiveError> {
        let failed = || LiveError::io(format!("cutting {}", self.err.display()));
        if fs::metadata(&self.err).map_err(failed())?.len() > SAID_MAX {
            let file = OpenOptions::new().write(true).open(&self.err).map_err(failed())?;
            file.set_len(0).map_err(failed())?;
        }
        Ok(())
    }

    /// What it has printed so far.
    pub(super) fn printed(&self) -> String {
        fs::read_to_string(&self.out).unwrap_or_default()
    }

    /// Waits for its end, asks it to end if `asking` says so, and gives what it printed. Any status
    /// but 0 is a failure.
    pub(super) fn finish(
        mut self,
        asking: Option<i32>,
        patience: Duration,
    ) -> Result<String, LiveError> {
        if let (Some(signal), None) = (asking, self.ended()?) {
            os::send(self.id(), signal);
        }
        let begin = Instant::now();
        loop {
            if let Some(status) = self.ended()? {
                return if status.success() {
                    Ok(self.printed())
                } else {
                    Err(self.failure(status))
                };
            }
            go_on()?;
            if begin.elapsed() > patience {
                let (name, seconds) = (self.name.clone(), patience.as_secs());
                return Err(LiveError::Stuck { name, seconds });
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// What it printed, as one JSON value.
    pub(super) fn finish_json<T: DeserializeOwned>(
        self,
        asking: Option<i32>,
        patience: Duration,
    ) -> Result<T, LiveError> {
        let name = self.name.clone();
        let text = self.finish(asking, patience)?;
        serde_json::from_str(&text)
            .map_err(|error| LiveError::Garbled { name, why: error.to_string() })
    }

    fn failure(&self, status: ExitStatus) -> LiveError {
        self.failure_of(&self.name, status)
    }

    pub(super) fn failure_of(&self, name: &str, status: ExitStatus) -> LiveError {
        let said = self.said();
        let said = said.lines().last().unwrap_or("it said nothing").to_owned();
        let name = name.to_owned();
        // Its own name begins its line already.
        let said = said.strip_prefix(&format!("{name}: ")).map_or(said.clone(), str::to_owned);
        LiveError::Failed { name, status, said }
    }

    pub(crate) fn wait(&mut self, patience: Duration) -> bool {
        let begin = Instant::now();
        while matches!(self.ended(), Ok(None)) {
            if begin.elapsed() > patience {
                return false;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        true
    }
}

/// Asked first; then killed, with all that it started: `elfen run` alone would leave its batch
/// behind, and a shell that heeds SIGTERM what it started.
impl Drop for Process {
    fn drop(&mut self) {
        if !matches!(self.ended(), Ok(None)) {
            return;
        }
        let family = Members::of(self.id());
        os::send(self.id(), libc::SIGTERM);
        if !self.wait(LAST_PATIENCE) {
            let late = Members::of(self.id());
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

/// Waits for something that a child does.
pub(super) fn wait_for<T>(
    process: &mut Process,
    patience: Duration,
    mut done: impl FnMut(&Process) -> Option<T>,
) -> Result<T, LiveError> {
    let begin = Instant::now();
    loop {
        go_on()?;
        if let Some(result) = done(process) {
            return Ok(result);
        }
        process.lives()?;
        if begin.elapsed() > patience {
            let (name, seconds) = (process.name.clone(), patience.as_secs());
            return Err(LiveError::NotReady { name, seconds });
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use super::super::os::Rank;
    use super::*;
    use crate::live::usage;
    use elfen_machine::process::below;
    use serde_json::Value;

    fn start(script: &str, scratch: &Scratch) -> Process {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let place = Place::anywhere(Rank::Normal);
        Process::start("it", command, &place, scratch).unwrap()
    }

    /// Goal: output and failures of a child are told as they are. Method: one that prints, one that
    /// fails, one that prints what is no JSON, one that does not end.
    #[test]
    fn children_are_told_apart() {
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

    /// Goal: a child that ignores SIGTERM ends with us all the same, and so does the family of one
    /// that heeds it. Method: shells with a child, dropped.
    #[test]
    fn nobody_outlives_us() {
        outlived_by_nobody("trap '' TERM; sh -c 'sleep 600; :' & echo ready; wait; wait");
        outlived_by_nobody("sh -c 'sleep 600; :' & echo ready; wait; wait");
    }

    fn outlived_by_nobody(script: &str) {
        let scratch = Scratch::new(1).unwrap();
        let mut parent = start(script, &scratch);
        wait_for(&mut parent, Duration::from_secs(60), |p| {
            p.printed().contains("ready").then_some(())
        })
        .unwrap();
        let family = below(parent.id());
        assert!(!family.is_empty());
        let id = parent.id();
        drop(parent);
        let lives =
            |pid: u32| usage::name_of(pid).is_some_and(|name| name == "sh" || name == "sleep");
        // The process that adopts the orphans collects them when it comes to it.
        let begin = Instant::now();
        while family.iter().chain([&id]).any(|&pid| lives(pid) && !is_over(pid)) {
            assert!(begin.elapsed() < Duration::from_secs(60), "{family:?} live on");
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn is_over(pid: u32) -> bool {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.is_empty() || status.contains("State:\tZ") || status.contains("State:\tX")
    }
}
