//! Checks the requirements of tests beyond Rust and a C compiler. Tests with such requirements are
//! `#[ignore]`d with the reason. If such a test runs on a machine that lacks something, it fails
//! here and names what is missing.
//!
//! A process that keeps CPU 0 busy acts as an endless request. A process that keeps CPU 1 busy
//! leaves 0.3 % of it to a batch at SCHED_IDLE. So if a test's batch has to finish work, both CPUs
//! must idle now and then.

#![allow(dead_code, reason = "each test program uses some of these functions")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::thread::sleep;
use std::time::{Duration, Instant};

#[track_caller]
pub(crate) fn root() {
    assert!(nix::unistd::geteuid().is_root(), "needs root");
}

#[track_caller]
pub(crate) fn two_cpus() {
    let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    assert_ne!(online.trim(), "0", "needs two CPUs");
}

/// Requires that other processes leave some time of CPUs 0 and 1.
#[track_caller]
pub(crate) fn idle_lanes() {
    two_cpus();
    if let Some(cpu) = busy_cpu() {
        panic!("needs two idle CPUs: others keep CPU {cpu} busy");
    }
}

/// Requires that these programs are installed.
#[track_caller]
pub(crate) fn programs(names: &[&str]) {
    let missing: Vec<&&str> = names.iter().filter(|name| find(name).is_none()).collect();
    assert!(missing.is_empty(), "needs {missing:?}, which are not installed");
}

pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap() + ":/usr/sbin";
    path.split(':').map(|folder| Path::new(folder).join(program)).find(|file| file.is_file())
}

/// The path of another program of this workspace, next to `elfen`.
#[track_caller]
pub(crate) fn built(program: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_BIN_EXE_elfen")).with_file_name(program);
    assert!(path.is_file(), "needs {program}, which `cargo test --workspace` builds");
    path
}

/// CPU 0 or 1, if other processes keep it busy for 20 s.
fn busy_cpu() -> Option<usize> {
    const PATIENCE: Duration = Duration::from_secs(20);
    static BUSY: OnceLock<Option<usize>> = OnceLock::new();
    *BUSY.get_or_init(|| [0, 1].into_iter().find(|&cpu| !idles_within(cpu, PATIENCE)))
}

/// Whether a CPU idles for a tenth of a period of about 200 ms, within a limit.
fn idles_within(cpu: usize, limit: Duration) -> bool {
    let begin = Instant::now();
    while begin.elapsed() < limit {
        let before = idle_ticks(cpu);
        sleep(Duration::from_millis(200));
        if idle_ticks(cpu) - before >= 2 {
            return true;
        }
    }
    false
}

fn idle_ticks(cpu: usize) -> u64 {
    let stat = fs::read_to_string("/proc/stat").unwrap();
    let line = stat.lines().find(|line| line.starts_with(&format!("cpu{cpu} ")));
    line.unwrap().split_whitespace().nth(4).unwrap().parse().unwrap()
}
