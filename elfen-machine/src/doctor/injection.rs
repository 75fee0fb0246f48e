//! How a batch program is kept off its lane: by checks inside it, or by a guard.

use super::answers::{Attach, Library, Rank};
use super::finding::{Enough, Finding, Machine, Mechanism};
use crate::source::SourceError;

pub(super) const MECHANISMS: &[Mechanism] = &[
    Mechanism { name: "inject-guard", enough: Enough::Yes, examine: guard },
    Mechanism { name: "inject-live", enough: Enough::No, examine: live },
    Mechanism {
        name: "inject-inlined",
        enough: Enough::If("for programs with checks in their source"),
        examine: inlined,
    },
    Mechanism {
        name: "inject-hooks",
        enough: Enough::If("for programs built with -pg or -finstrument-functions"),
        examine: hooks,
    },
    Mechanism {
        name: "inject-patchable",
        enough: Enough::If("for programs built with -fpatchable-function-entry"),
        examine: patchable,
    },
];

/// The batch runs at SCHED_IDLE and its guard at nice 0, so that the guard gets the lane as soon as
/// it wakes.
fn guard(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let answers = machine.answers;
    Ok(match (&answers.idle_class, &answers.guard_rank) {
        (Rank::Granted, Rank::Granted) => Finding::yes(
            "any program: a guard, at nice 0 and so above its batch at SCHED_IDLE, holds its lane \
             while the request lane is busy",
        ),
        (Rank::Refused(error), _) => Finding::no(
            format!("a batch thread may not lower itself to SCHED_IDLE: {error}"),
            "allow sched_setscheduler(2) in the seccomp profile or the security module's policy",
        ),
        (_, Rank::Refused(error)) => Finding::no(
            format!("guards may not have nice 0 and SCHED_OTHER, so they hold no lane: {error}"),
            "start elfen without `nice`, `chrt` or a unit's Nice=, or give it CAP_SYS_NICE",
        ),
    })
}

/// Only root with all capabilities may trace any process. Where Yama restricts it, only an ancestor
/// or a process with CAP_SYS_PTRACE may.
fn live(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let yama = machine.source.text("/proc/sys/kernel/yama/ptrace_scope")?;
    let several = machine.lanes.pairs.iter().map(|pair| pair.batch.iter().count()).sum::<usize>();
    Ok(match (&machine.answers.attach, yama.as_deref().map(str::trim)) {
        (attach, _) if *attach != Attach::Attached => Finding::no(
            "running programs get no checks: checks read the eBPF task map, and another eBPF \
             program has to find the loops without checks",
            "see task-map-attach above",
        ),
        (_, Some("3")) => Finding::no(
            "running programs get no checks: Yama lets no process trace another",
            "boot with another kernel.yama.ptrace_scope; it cannot be lowered",
        ),
        _ => {
            let what = if several > 1 { ON_SEVERAL_LANES } else { ON_ONE_LANE };
            let unnoted = if machine.answers.filters == Some(false) { UNNOTED } else { "" };
            Finding::yes(format!("{what}{unnoted}"))
        }
    })
}

const ON_ONE_LANE: &str = "any 64-bit program on one batch lane: while it runs, its guard writes \
     checks into its loops, and into the Java methods that HotSpot compiles; for the code of other \
     JITs and for time in the kernel, only the guard reacts";
const ON_SEVERAL_LANES: &str = "any 64-bit program whose threads register with rseq, as the GNU C \
     library since 2.35 has them do: while it runs, its guards write checks into its loops, and \
     into the Java methods that HotSpot compiles, for which they occupy all lanes for a moment; \
     other programs, such as Go's, get checks on one lane only (--lanes 0:1); for the code of \
     other JITs and for time in the kernel, only the guards react";
const UNNOTED: &str = "; eBPF does not show here when a program begins to filter its system calls, \
     so code in the C library notes it: use --inject guard for a program that filters without that \
     library, such as Go's";

fn inlined(_: &Machine<'_>) -> Result<Finding, SourceError> {
    let what = "programs with checks in their source: elfen_rt::check!(), elfen_check()";
    Ok(Finding::yes(what))
}

fn hooks(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let what = "programs built with -pg, -pg -mfentry or -finstrument-functions";
    Ok(by_the_library(what, machine))
}

fn patchable(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    Ok(by_the_library("programs built with -fpatchable-function-entry=43", machine))
}

fn by_the_library(what: &str, machine: &Machine<'_>) -> Finding {
    match &machine.answers.preload_library {
        Library::Found(path) => Finding::yes(format!("{what}, by {path}")),
        Library::Missing(why) => Finding::no(
            format!("{what}: {why}"),
            "build all of Elfen (`cargo build --release`), or name the folder in ELFEN_LIB",
        ),
    }
}
