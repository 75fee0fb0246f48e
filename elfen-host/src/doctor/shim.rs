//! What `elfen shim` may look at here, and as whom. A program that it starts can be looked at
//! whatever this says, as far as it has a clock.

use super::answers::{Attach, Counting, Handed, Looks};
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

/// The kernel offers the counter as a clock only if it found no fault with it.
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
            "who runs on a lane is known at every sample, so threads are followed from one to \
             another",
        ),
        _ => Finding::warn(
            "who runs is not known: of a thread that waits for a CPU, the state that /proc has is \
             read each 100 us, and its tags are those that it said last",
            "see to task-map-elfend or task-map-attach above",
        ),
    })
}

fn of(machine: &Machine<'_>, finding: impl FnOnce(&Looks) -> Finding) -> Finding {
    let not_said = || Finding::warn("the recording does not say", "record the machine anew");
    machine.answers.looks.as_ref().map_or_else(not_said, finding)
}

fn map_files(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    Ok(of(machine, |looks| match &looks.map_files_refused {
        None => Finding::yes(
            "memory that other programs share is mapped here as well, so that a sample is a load: \
             /proc/PID/map_files opens",
        ),
        Some(why) => Finding::warn(
            format!(
                "/proc/PID/map_files: {why}; memory that others share is read by system calls \
                 instead, each 100 us"
            ),
            "run it as root, or with CAP_CHECKPOINT_RESTORE",
        ),
    }))
}

/// What `-p` and `--share` may do to processes that this one has not started.
fn ptrace(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let yama = machine.source.text("/proc/sys/kernel/yama/ptrace_scope")?;
    Ok(of(machine, |looks| match (yama.as_deref(), looks.trace_any) {
        (Some("3"), _) => Finding::no(
            "Yama lets no process look into another, so `-p` sees what others share at most",
            "boot with another kernel.yama.ptrace_scope; it cannot be lowered",
        ),
        (_, true) => Finding::yes("any process that runs may be looked into (`-p`)"),
        (None | Some("0"), false) => {
            Finding::yes("processes of this user that run may be looked into (`-p`)")
        }
        (Some(scope), false) => Finding::warn(
            format!(
                "kernel.yama.ptrace_scope is {scope}: only programs that `elfen shim` has started \
                 may be looked into, and none that run (`-p`)"
            ),
            "run it as root, or set it to 0 (as root: `sysctl kernel.yama.ptrace_scope=0`)",
        ),
    }))
}

/// What `--count-at` takes: hardware that counts for one's own threads.
fn counts(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    Ok(match &machine.answers.cycles.of_this_thread {
        Counting::Counts => Finding::yes(
            "functions that `--count-at` names can publish the instructions and cycles of their \
             thread",
        ),
        Counting::NoCounter(error) => Finding::warn(
            format!("no hardware counts for threads (perf_event_open: {error}): no `--count-at`"),
            "see to hardware-counters above; a program may publish its own counts",
        ),
        Counting::NotPermitted | Counting::NoCall => Finding::warn(
            "threads may not count what they execute: no `--count-at`",
            "see to hardware-counters above",
        ),
    })
}

fn names(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    Ok(of(machine, |looks| match looks.debug_symbols {
        0 => Finding::warn(
            "functions and globals have the names that their own files give them; stripped files \
             give none, and /usr/lib/debug holds no symbols for them",
            "install the debug symbols of programs to look at (Debian: PACKAGE-dbgsym)",
        ),
        _ => Finding::yes(
            "functions and globals have the names that their files give them, or, of stripped \
             ones, those below /usr/lib/debug",
        ),
    }))
}
