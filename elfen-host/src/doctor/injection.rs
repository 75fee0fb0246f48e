//! How a batch program is kept off its lane: by checks inside it, or from outside.

use super::answers::{Library, Rank};
use super::finding::{Enough, Finding, Machine, Mechanism};
use crate::source::SourceError;

pub(super) const MECHANISMS: &[Mechanism] = &[
    Mechanism { name: "inject-guard", enough: Enough::Yes, examine: guard },
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

/// The batch runs at SCHED_IDLE and its guard at nice 0, so that the guard has the lane whenever it
/// wants it.
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
