//! The environment of the tests of `elfen run`: a service with its page, runs that a shell starts,
//! and what the kernel reports about processes.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use elfen_rt::memory::{Access, Memory};
use elfen_rt::service::Service;
use elfen_rt::signal::lane::{LaneSlot, LaneState};
use elfen_rt::signal::page::Page;

use crate::needs;
use crate::process::wait_until;

/// A service of the test, for lane 0 of pair 0:1. Its page is removed when this value drops.
pub(crate) struct Serving {
    service: Option<Service>,
    pub(crate) name: String,
}

impl Serving {
    pub(crate) fn start() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        needs::two_cpus();
        let name = format!("run-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed));
        Self { service: Some(Service::open(&name, 1).unwrap()), name }
    }

    pub(crate) fn service(&self) -> &Service {
        self.service.as_ref().unwrap()
    }

    /// `elfen run` next to this service, on pair 0:1.
    pub(crate) fn elfen(&self, options: &[&str], program: &[&str]) -> Command {
        elfen(&self.name, options, program)
    }
}

/// `elfen run` next to a service of this name, on pair 0:1.
fn elfen(service: &str, options: &[&str], program: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfen"));
    command.args(["run", "--lanes", "0:1", "--source", "service", "--service", service]);
    command.args(options).arg("--").args(program);
    command.env_remove("ELFEN_LANES");
    command
}

/// Drops the capabilities for hardware counters from a command, even if root starts it.
pub(crate) fn without_counters(mut command: Command) -> Command {
    const CAP_SYS_ADMIN: i32 = 21;
    const CAP_PERFMON: i32 = 38;
    const CAP_BPF: i32 = 39;
    let give_up = || {
        for capability in [CAP_SYS_ADMIN, CAP_PERFMON, CAP_BPF] {
            // SAFETY: prctl takes numbers. It fails for ordinary users, which have no capabilities.
            unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
        }
        Ok(())
    };
    // SAFETY: between fork and exec, `give_up` makes only system calls.
    unsafe { command.pre_exec(give_up) };
    command
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.service.take().unwrap().remove().unwrap();
    }
}

pub(crate) fn exists(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    !status.is_empty() && !status.contains("State:\tZ")
}

/// Waits until a page no longer exists. It exists while a process has it mapped, such as a
/// supervisor that is still ending, or an `elfen status` of another test.
pub(crate) fn wait_until_gone(page: i32) {
    wait_until("the page's end", || Memory::attach_id(page, Access::Read).is_err());
}

pub(crate) fn parent_of(pid: u32) -> u32 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:\t"));
    parent.unwrap().parse().unwrap()
}

pub(crate) fn kill(pid: u32, signal: i32) {
    // SAFETY: kill takes numbers; the caller started this process.
    assert_eq!(unsafe { libc::kill(i32::try_from(pid).unwrap(), signal) }, 0);
}

/// A run whose batch has printed its process id and its ELFEN_RUN.
pub(crate) struct Running {
    pub(crate) launcher: Child,
    pub(crate) output: BufReader<ChildStdout>,
    pub(crate) batch: u32,
    pub(crate) inheritance: Vec<String>,
}

impl Running {
    pub(crate) fn start(serving: &Serving, script: &str) -> Self {
        Self::start_next_to(&serving.name, script)
    }

    /// Starts a run next to the service of another process.
    pub(crate) fn start_next_to(service: &str, script: &str) -> Self {
        Self::start_by(&[], service, script)
    }

    /// Starts a run through another program, such as `nice` or `chrt`.
    pub(crate) fn start_by(by: &[&str], service: &str, script: &str) -> Self {
        let script = format!("echo $$ $ELFEN_RUN; {script}");
        let plain = elfen(service, &[], &["sh", "-c", &script]);
        let words = by.iter().map(OsStr::new).chain([plain.get_program()]).chain(plain.get_args());
        let words: Vec<&OsStr> = words.collect();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).env_remove("ELFEN_LANES").process_group(0);
        Self::of(command)
    }

    /// Starts a run whose program first prints its process id and its ELFEN_RUN. The program's
    /// input ends when the run ends.
    pub(crate) fn of(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut launcher = command.spawn().unwrap();
        let mut output = BufReader::new(launcher.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let mut words = line.split_whitespace().map(str::to_owned);
        let batch = words.next().expect("the batch prints its id").parse().unwrap();
        Self { launcher, output, batch, inheritance: words.collect() }
    }

    pub(crate) fn supervisor(&self) -> u32 {
        parent_of(self.batch)
    }

    /// Kills both supervisors, the second after it has taken over from the first.
    pub(crate) fn kill_supervisors(&self) {
        let (supervisor, launcher) = (self.supervisor(), self.launcher.id());
        let spare = parent_of(supervisor);
        assert_eq!(parent_of(spare), launcher);
        kill(supervisor, libc::SIGKILL);
        wait_until("the spare takes over", || parent_of(self.batch) == spare);
        kill(spare, libc::SIGKILL);
        wait_until("the launcher takes over", || parent_of(self.batch) == launcher);
    }

    pub(crate) fn lanes(&self) -> Page<LaneSlot> {
        let id = self.inheritance[1].parse().unwrap();
        Page::open(Memory::attach_id(id, Access::Read).unwrap()).unwrap()
    }

    /// Whether the only lane is in this state.
    pub(crate) fn is(&self, state: LaneState) -> bool {
        let lanes = self.lanes();
        lanes.slot(0).is_some_and(|slot| slot.state().is_some_and(|(found, _)| found == state))
    }

    pub(crate) fn rest_of_output(&mut self) -> String {
        let mut text = String::new();
        self.output.read_to_string(&mut text).unwrap();
        text
    }

    pub(crate) fn end(mut self) -> ExitStatus {
        // Waiting also closes the input.
        self.launcher.wait().unwrap()
    }
}

/// A failed test must not leave a batch behind.
impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(None) = self.launcher.try_wait() {
            kill(self.batch, libc::SIGKILL);
            self.launcher.kill().ok();
            self.launcher.wait().ok();
        }
    }
}
