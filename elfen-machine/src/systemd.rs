//! Controls systemd, which owns the cgroups of its units, through its own commands.
//!
//! A value that is written directly into a file of a unit's cgroup lasts until systemd's next
//! reload. So this module sets properties with `systemctl`, only until the next boot. A command
//! that hangs is killed.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::cgroup::CgroupPath;
use crate::cpulist::CpuSet;

const PATIENCE: Duration = Duration::from_secs(5);
/// After a command hung, no command is started for this time. The caller must keep checking fences,
/// and a watchdog ends a caller that hangs for ten seconds.
const REST: Duration = Duration::from_secs(30);
static HUNG: Mutex<Option<Instant>> = Mutex::new(None);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{command} cannot be started: {error}")]
    NotStarted { command: String, error: std::io::Error },
    #[error("{command}: systemd has not answered within 5 s")]
    Hangs { command: String },
    #[error("{command}: {said}")]
    Failed { command: String, said: String },
}

/// Whether systemd is process 1.
pub fn is_running() -> bool {
    Path::new("/run/systemd/system").is_dir()
        && fs::read_to_string("/proc/1/comm").is_ok_and(|name| name.trim() == "systemd")
}

/// systemd's version: the first number that it prints.
pub fn version() -> Result<u32, String> {
    let text = run("systemctl", &["--version"]).map_err(|error| error.to_string())?;
    let number = text.split_whitespace().nth(1).and_then(|word| word.parse().ok());
    number.ok_or_else(|| format!("it says {:?}", text.lines().next().unwrap_or_default()))
}

/// The units that match a name or a pattern and have a cgroup now, each with its cgroup.
pub fn cgroups_of(pattern: &str) -> Result<Vec<(String, CgroupPath)>, Error> {
    let units =
        if pattern.contains(['*', '?', '[']) { listed(pattern)? } else { vec![pattern.to_owned()] };
    let mut found = Vec::new();
    for unit in units {
        let path = run("systemctl", &["show", "--property=ControlGroup", "--value", "--", &unit])?;
        // A unit without a cgroup does not run.
        if let Some(path) = CgroupPath::parse(path.trim()).filter(|path| !path.is_root()) {
            found.push((unit, path));
        }
    }
    Ok(found)
}

fn listed(pattern: &str) -> Result<Vec<String>, Error> {
    let words = ["list-units", "--all", "--plain", "--no-legend", "--full", "--", pattern];
    let text = run("systemctl", &words)?;
    Ok(text.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect())
}

/// Confines a unit to these lanes and ranks it below its siblings. Also confines it to memory of
/// these nodes, if any are given.
pub fn fence(unit: &str, lanes: &CpuSet, nodes: &CpuSet) -> Result<(), Error> {
    set_all(unit, "CPUWeight=idle", lanes, nodes)
}

/// Confines a unit to these lanes without changing its rank.
pub fn keep_to(unit: &str, lanes: &CpuSet) -> Result<(), Error> {
    set(unit, &[&allowed(lanes)])
}

/// Turns a unit into an ordinary one. Needs the list of all CPUs, because an empty list changes
/// nothing.
pub fn release(unit: &str, all: &CpuSet, nodes: &CpuSet) -> Result<(), Error> {
    set_all(unit, "CPUWeight=100", all, nodes)
}

fn set_all(unit: &str, weight: &str, lanes: &CpuSet, nodes: &CpuSet) -> Result<(), Error> {
    let memory = format!("AllowedMemoryNodes={nodes}");
    let memory = (!nodes.is_empty()).then_some(memory.as_str());
    let both = [weight, &allowed(lanes)];
    set(unit, &both.into_iter().chain(memory).collect::<Vec<_>>())
}

fn allowed(lanes: &CpuSet) -> String {
    format!("AllowedCPUs={lanes}")
}

fn set(unit: &str, properties: &[&str]) -> Result<(), Error> {
    let words = ["set-property", "--runtime", "--", unit];
    run("systemctl", &[&words, properties].concat()).map(drop)
}

/// Moves a running process into a new scope inside a slice.
pub fn put_into(slice: &str, process: u32) -> Result<(), Error> {
    let name = format!("elfen-{process}.scope");
    let process = process.to_string();
    let words = [
        "call",
        "org.freedesktop.systemd1",
        "/org/freedesktop/systemd1",
        "org.freedesktop.systemd1.Manager",
        "StartTransientUnit",
        "ssa(sv)a(sa(sv))",
        &name,
        "fail",
        "2",
        "PIDs",
        "au",
        "1",
        &process,
        "Slice",
        "s",
        slice,
        "0",
    ];
    run("busctl", &words).map(drop)
}

fn run(program: &str, words: &[&str]) -> Result<String, Error> {
    let command = || format!("`{program} {}`", words.join(" "));
    let mut hung = HUNG.lock().unwrap_or_else(PoisonError::into_inner);
    if hung.is_some_and(|at| at.elapsed() < REST) {
        return Err(Error::Hangs { command: command() });
    }
    let child = Command::new(program)
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = child.map_err(|error| Error::NotStarted { command: command(), error })?;
    let began = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if began.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Ok(None) | Err(_) => {
                // It is unknown whether the command took effect; the next check shows it.
                child.kill().ok();
                child.wait().ok();
                *hung = Some(Instant::now());
                return Err(Error::Hangs { command: command() });
            }
        }
    };
    let mut out = String::new();
    let mut said = String::new();
    // The output is shorter than the pipe's buffer. Output that is not UTF-8 contains no name of a
    // unit.
    child.stdout.take().map(|mut pipe| pipe.read_to_string(&mut out));
    child.stderr.take().map(|mut pipe| pipe.read_to_string(&mut said));
    if status.success() {
        Ok(out)
    } else {
        let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
        Err(Error::Failed { command: command(), said })
    }
}
