//! How a batch program is kept off its lane: by checks inside it, or from outside.

use super::answers::{IdleClass, Library};
use super::{Enough, Examine, Finding, Machine, Mechanism};
use crate::host::source::SourceError;

pub(super) const MECHANISMS: &[Mechanism] = &[
    Mechanism { name: "inject-guard", enough: Enough::Yes, examine: Examine::By(guard) },
    Mechanism {
        name: "inject-inlined",
        enough: Enough::If("for programs with checks in their source"),
        examine: Examine::By(inlined),
    },
    Mechanism {
        name: "inject-hooks",
        enough: Enough::If("for programs built with -pg or -finstrument-functions"),
        examine: Examine::By(hooks),
    },
    Mechanism {
        name: "inject-patchable",
        enough: Enough::If("for programs built with -fpatchable-function-entry"),
        examine: Examine::By(patchable),
    },
    later("inject-entries", "function entries of any dynamic program rewritten as it is loaded"),
    later("inject-java", "checks in bytecode, by a Java agent"),
];

const fn later(name: &'static str, what: &'static str) -> Mechanism {
    Mechanism { name, enough: Enough::Yes, examine: Examine::NotInThisVersion(what) }
}

/// The batch runs at SCHED_IDLE, so that its guard has the lane whenever it wants it.
fn guard(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    Ok(match &machine.answers.idle_class {
        IdleClass::Granted => {
            Finding::yes("any program: a guard holds its lane while the request lane is busy")
        }
        IdleClass::Refused(error) => Finding::no(
            format!("a batch thread may not lower itself to SCHED_IDLE: {error}"),
            "allow sched_setscheduler(2) in the seccomp profile or the security module's policy",
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
