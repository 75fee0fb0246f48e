//! A child: started in its place, its output kept in files, ended whatever happens.
//!
//! Files and not pipes, because nobody empties a pipe while a measurement runs.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::os::{self, Place};
use super::scratch::Scratch;
use super::{LiveError, go_on, usage};

/// For a child that is asked to end because we end.
const LAST_PATIENCE: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(5);

#[derive(Debug)]
pub(super) struct Process {
    name: String,
    child: Child,
    out: PathBuf,
    err: PathBuf,
    status: Option<ExitStatus>,
}

impl Process {
    pub(super) fn start(
        name: &str,
        mut command: Command,
        place: &Place,
        scratch: &Scratch,
    ) -> Result<Self, LiveError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Relaxed);
        let [out, err] = ["out", "err"].map(|kind| scratch.path(&format!("{number}.{kind}")));
        let failed = |error| LiveError::Io { what: format!("starting {name}"), error };
        let file = |path: &PathBuf| {
            File::create(path).map_err(LiveError::io(format!("writing {}", path.display())))
        };
        command.stdin(Stdio::null()).stdout(file(&out)?).stderr(file(&err)?);
        os::prepare(&mut command, place);
        let child = command.spawn().map_err(failed)?;
        Ok(Self { name: name.to_owned(), child, out, err, status: None })
    }

    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Fails if it has ended.
    pub(super) fn lives(&mut self) -> Result<(), LiveError> {
        match self.ended()? {
            None => Ok(()),
            Some(status) => Err(self.failure(status)),
        }
    }

    pub(super) fn ended(&mut self) -> Result<Option<ExitStatus>, LiveError> {
        if self.status.is_none() {
            let waited = self.child.try_wait();
            self.status = waited.map_err(LiveError::io(format!("waiting for {}", self.name)))?;
        }
        Ok(self.status)
    }

    /// What it has printed so far.
    pub(super) fn printed(&self) -> String {
        fs::read_to_string(&self.out).unwrap_or_default()
    }

    /// Waits for its end, asks it to end if `asking` says so, and gives what it printed. Any status but 0 is a failure.
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

    pub(super) fn finish_json(
        self,
        asking: Option<i32>,
        patience: Duration,
    ) -> Result<Value, LiveError> {
        let name = self.name.clone();
        let text = self.finish(asking, patience)?;
        serde_json::from_str(&text)
            .map_err(|error| LiveError::Garbled { name, why: error.to_string() })
    }

    fn failure(&self, status: ExitStatus) -> LiveError {
        let said = fs::read_to_string(&self.err).unwrap_or_default();
        let said = said.lines().last().unwrap_or("it said nothing").to_owned();
        let name = self.name.clone();
        // Its own name begins its line already.
        let said = said.strip_prefix(&format!("{name}: ")).map_or(said.clone(), str::to_owned);
        LiveError::Failed { name, status, said }
    }

    fn wait(&mut self, patience: Duration) -> bool {
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

/// Asked first; then killed, with all that it started: `elfen run` alone would leave its batch behind.
impl Drop for Process {
    fn drop(&mut self) {
        if !matches!(self.ended(), Ok(None)) {
            return;
        }
        os::send(self.id(), libc::SIGTERM);
        if self.wait(LAST_PATIENCE) {
            return;
        }
        let family = usage::descendants(self.id());
        family.into_iter().chain([self.id()]).for_each(|pid| os::send(pid, libc::SIGKILL));
        let _killed = self.child.wait();
    }
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

    fn start(script: &str, scratch: &Scratch) -> Process {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let place = Place::anywhere(Rank::Normal);
        Process::start("it", command, &place, scratch).unwrap()
    }

    /// Goal: output and failures of a child are told as they are. Method: one that prints, one that fails, one that prints
    /// what is no JSON, one that does not end.
    #[test]
    fn children_are_told_apart() {
        let scratch = Scratch::new(1).unwrap();
        let long = Duration::from_secs(60);
        let printed = start("echo '{\"x\":1}'", &scratch).finish_json(None, long).unwrap();
        assert_eq!(printed["x"], 1);
        let failed = start("echo 'it: no luck' >&2; exit 3", &scratch).finish(None, long);
        let failed = failed.unwrap_err().to_string();
        assert_eq!(failed, "it ended early (exit status: 3): no luck");
        let garbled = start("echo x", &scratch).finish_json(None, long);
        assert!(matches!(garbled, Err(LiveError::Garbled { .. })), "{garbled:?}");
        let stuck = start("exec sleep 600", &scratch).finish(None, Duration::ZERO);
        assert!(matches!(stuck, Err(LiveError::Stuck { .. })), "{stuck:?}");
        let asked = start("exec sleep 600", &scratch).finish(Some(libc::SIGTERM), long);
        assert!(matches!(asked, Err(LiveError::Failed { .. })), "{asked:?}");
    }

    /// Goal: who ignores SIGTERM ends with us all the same, and so does its family. Method: a shell with a child, dropped.
    #[test]
    fn nobody_outlives_us() {
        let scratch = Scratch::new(1).unwrap();
        let mut stubborn =
            start("trap '' TERM; sh -c 'sleep 600; :' & echo ready; wait; wait", &scratch);
        wait_for(&mut stubborn, Duration::from_secs(60), |p| {
            p.printed().contains("ready").then_some(())
        })
        .unwrap();
        let family = usage::descendants(stubborn.id());
        assert!(!family.is_empty());
        let parent = stubborn.id();
        drop(stubborn);
        let lives =
            |pid: u32| usage::name_of(pid).is_some_and(|name| name == "sh" || name == "sleep");
        // Whoever adopts the orphans collects them when it comes to it.
        let begin = Instant::now();
        while family.iter().chain([&parent]).any(|&pid| lives(pid) && !is_over(pid)) {
            assert!(begin.elapsed() < Duration::from_secs(60), "{family:?} live on");
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn is_over(pid: u32) -> bool {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.is_empty() || status.contains("State:\tZ") || status.contains("State:\tX")
    }
}
