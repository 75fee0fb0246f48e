//! What `elfen shim` may observe here, and with which rights. A program that it starts itself can
//! always be observed if there is a clock.

use super::answers::{Attach, Counting, Handed, ShimAccess};
use super::finding::{Enough, Finding, Machine, Mechanism};
use crate::source::SourceError;

pub(super) const MECHANISMS: &[Mechanism] = &[
    Mechanism { name: "shim-clock", enough: Enough::No, examine: clock },
    Mechanism { name: "shim-tasks", enough: Enough::No, examine: tasks },
    Mechanism { name: "shim-map-files", enough: Enough::No, examine: map_files },
    Mechanism { name: "shim-ptrace", enough: Enough::No, examine: ptrace },
    Mechanism { name: "shim-names", enough: Enough::No, examine: names },
    Mechanism { name: "shim-counts", enough: Enough::No, examine: counts },
];

const CLOCKS: &str = "/sys/devices/system/clocksource/clocksource0/available_clocksource";

/// The kernel offers the time stamp counter as a clock only if it has found no fault with it.
fn clock(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    Ok(match machine.source.text(CLOCKS)? {
        Some(clocks) if clocks.split_whitespace().any(|clock| clock == "tsc") => {
            Finding::yes("the kernel trusts the time stamp counter, which dates each sample")
        }
        Some(clocks) => Finding::no(
            format!("the kernel does not trust the time stamp counter; its clocks are {clocks}"),
            "use a machine whose counter neither stops nor changes its rate",
        ),
        None => Finding::warn(format!("there is no {CLOCKS}"), "mount /sys"),
    })
}

fn tasks(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let answers = machine.answers;
    Ok(match (&answers.attach, &answers.handed) {
        (Attach::Attached, _) | (_, Handed::Mapped) => Finding::yes(
            "each sample shows the thread that runs on the lane, so threads are followed from one \
             lane to another",
        ),
        _ => Finding::warn(
            "samples do not show which thread runs: while a thread waits for a CPU, its state is \
             read from /proc each 100 us, and its tags are its last ones",
            "see task-map-elfend or task-map-attach above",
        ),
    })
}

fn of(machine: &Machine<'_>, finding: impl FnOnce(&ShimAccess) -> Finding) -> Finding {
    let unknown = || Finding::warn("the recording does not say", "record the machine again");
    machine.answers.looks.as_ref().map_or_else(unknown, finding)
}

fn map_files(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    Ok(of(machine, |access| match &access.map_files_refused {
        None => Finding::yes(
            "memory that other programs share can be mapped, so a sample is one load: \
             /proc/PID/map_files opens",
        ),
        Some(why) => Finding::warn(
            format!(
                "/proc/PID/map_files: {why}; memory that other programs share is read by system \
                 calls instead, each 100 us"
            ),
            "run it as root, or with CAP_CHECKPOINT_RESTORE",
        ),
    }))
}

/// What `-p` and `--share` may do with processes that `elfen shim` has not started.
fn ptrace(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let yama = machine.source.text("/proc/sys/kernel/yama/ptrace_scope")?;
    Ok(of(machine, |access| match (yama.as_deref(), access.trace_any) {
        (Some("3"), _) => Finding::no(
            "Yama lets no process trace another, so `-p` sees at most memory that others share",
            "boot with another kernel.yama.ptrace_scope; it cannot be lowered",
        ),
        (_, true) => Finding::yes("any running process may be observed (`-p`)"),
        (None | Some("0"), false) => {
            Finding::yes("running processes of this user may be observed (`-p`)")
        }
        (Some(scope), false) => Finding::warn(
            format!(
                "kernel.yama.ptrace_scope is {scope}: only programs that `elfen shim` has started \
                 may be observed, not running ones (`-p`)"
            ),
            "run it as root, or set it to 0 (as root: `sysctl kernel.yama.ptrace_scope=0`)",
        ),
    }))
}

/// What `--count-at` needs: hardware that counts for own threads.
fn counts(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    Ok(match &machine.answers.cycles.of_this_thread {
        Counting::Counts => Finding::yes(
            "functions that `--count-at` names can publish the instructions and cycles of their \
             thread",
        ),
        Counting::NoCounter(error) => Finding::warn(
            format!("no hardware counts for threads (perf_event_open: {error}): no `--count-at`"),
            "see hardware-counters above; a program may publish its own counts",
        ),
        Counting::NotPermitted | Counting::NoCall => Finding::warn(
            "threads may not count what they execute: no `--count-at`",
            "see hardware-counters above",
        ),
    })
}

fn names(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    Ok(of(machine, |access| match access.debug_symbols {
        0 => Finding::warn(
            "functions and globals have the names in their own files; stripped files have none, \
             and /usr/lib/debug has no symbols for them",
            "install the debug symbols of programs to look at (Debian: PACKAGE-dbgsym)",
        ),
        _ => Finding::yes(
            "functions and globals have the names in their files, or those below /usr/lib/debug if \
             the files are stripped",
        ),
    }))
}
