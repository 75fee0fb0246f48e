//! Fixtures for the tests of live runs: `elfen-lab` with its own folder for temporary files, and
//! checks that it leaves nothing behind.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub(crate) use elfen_machine::process::below as descendants;
use elfen_rt::signal::service::ServiceReader;
use serde_json::Value;

/// Live runs use two CPUs, so only one test runs at a time.
static TURN: Mutex<()> = Mutex::new(());

/// A folder for one test's files, with a subfolder for temporary files.
pub(crate) struct Sandbox {
    folder: PathBuf,
    _turn: MutexGuard<'static, ()>,
}

impl Sandbox {
    pub(crate) fn new(test: &str) -> Self {
        two_cpus();
        let programs = Path::new(env!("CARGO_BIN_EXE_elfen-lab")).parent().unwrap();
        for program in ["elfen", "elfen-search", "elfen-load", "elfen-batch", "elfen-hedge"] {
            let is_built = programs.join(program).is_file();
            assert!(is_built, "needs {program}, which `cargo test --workspace` builds");
        }
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("live-{test}"));
        fs::remove_dir_all(&folder).ok();
        fs::create_dir_all(folder.join("tmp")).unwrap();
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        Self { folder, _turn: turn }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Returns the command `elfen-lab` with this folder.
    pub(crate) fn lab(&self, words: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_elfen-lab"));
        command.args(words.split_whitespace()).current_dir(&self.folder);
        command.env("TMPDIR", self.path("tmp"));
        command.env_remove("ELFEN_LANES").stdin(Stdio::null());
        command
    }

    /// Runs a command. Returns its exit status, its stdout and its stderr.
    pub(crate) fn run(&self, words: &str) -> (Option<i32>, String, String) {
        let output = self.lab(words).output().unwrap();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    }

    /// Runs a command, which must succeed, and returns its output.
    #[track_caller]
    pub(crate) fn output(&self, words: &str) -> String {
        let (status, out, said) = self.run(words);
        assert_eq!(status, Some(0), "{words}: {said}");
        out
    }

    /// Runs a command, which must succeed, and returns the JSON object that it prints.
    #[track_caller]
    pub(crate) fn json(&self, words: &str) -> Value {
        serde_json::from_str(&self.output(words)).unwrap()
    }

    /// Asserts that a command fails with this status and message.
    #[track_caller]
    pub(crate) fn assert_fails(&self, words: &str, status: i32, says: &str) {
        let (found, _, said) = self.run(words);
        assert_eq!(found, Some(status), "{words}: {said}");
        assert!(said.contains(says), "{words}: {said}");
        assert!(said.lines().last().unwrap().starts_with("elfen: "), "{said}");
    }

    /// Starts a command in the background and keeps its output.
    pub(crate) fn start(&self, words: &str) -> Running {
        let mut command = self.lab(words);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        Running::of(command.spawn().unwrap())
    }

    /// Returns the names of the temporary folders of live runs. They contain the names of the
    /// services.
    pub(crate) fn scratch(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path("tmp")).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.collect()
    }

    /// Asserts that no temporary file and no service's page is left. `scratch` has the names of the
    /// folders that existed during the run.
    #[track_caller]
    pub(crate) fn assert_nothing_left(&self, scratch: &[String]) {
        assert_eq!(self.scratch(), Vec::<String>::new());
        for service in scratch.iter().filter_map(|name| name.split_once('.')) {
            assert!(ServiceReader::open(service.0).is_err(), "the page of {service:?} is left");
        }
    }
}

/// Failed tests keep their files for inspection.
impl Drop for Sandbox {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            fs::remove_dir_all(&self.folder).ok();
        }
    }
}

#[track_caller]
pub(crate) fn two_cpus() {
    let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    assert_ne!(online.trim(), "0", "needs two CPUs");
}

/// A running `elfen-lab`, or a program that it measures. It ends with its test.
pub(crate) struct Running {
    child: Option<Child>,
}

impl Running {
    pub(crate) fn of(child: Child) -> Self {
        Self { child: Some(child) }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.as_ref().expect("it has not been waited for").id()
    }

    pub(crate) fn signal(&self, signal: i32) {
        kill(self.id(), signal);
    }

    pub(crate) fn end(mut self) -> Output {
        self.child.take().expect("it is waited for once").wait_with_output().unwrap()
    }

    /// Waits for a descendant with this name.
    #[track_caller]
    pub(crate) fn await_child(&self, name: &str) -> u32 {
        let mut found = None;
        wait_until(&format!("a child named {name}"), || {
            let family = descendants(self.id());
            found = family.into_iter().find(|&pid| name_of(pid).as_deref() == Some(name));
            found.is_some()
        });
        found.unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            kill(child.id(), libc::SIGTERM);
            child.wait().ok();
        }
    }
}

pub(crate) fn kill(pid: u32, signal: i32) {
    // SAFETY: kill takes only numbers; the caller started this process.
    unsafe { libc::kill(i32::try_from(pid).unwrap(), signal) };
}

/// Waits until `done` returns true. Two minutes allow for a busy machine.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(120), "{what} does not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn name_of(process: u32) -> Option<String> {
    Some(fs::read_to_string(format!("/proc/{process}/comm")).ok()?.trim_end().to_owned())
}

/// Whether a process with this id and one of these names still runs.
pub(crate) fn lives(pid: u32, names: &[&str]) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let over = status.is_empty() || status.contains("State:\tZ") || status.contains("State:\tX");
    !over && name_of(pid).is_some_and(|name| names.contains(&name.as_str()))
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
