//! How a batch thread gives its lane away without giving it up.

use super::{Enough, Examine, Finding, Machine, Mechanism};
use crate::host::source::SourceError;

pub(super) const MECHANISMS: &[Mechanism] = &[
    nap("nap-device", Examine::By(device)),
    nap("nap-umwait", Examine::By(umwait)),
    nap("nap-mwaitx", Examine::By(mwaitx)),
    nap(
        "nap-block",
        Examine::NotInThisVersion("sleeping in the kernel until the request lane idles"),
    ),
    nap("nap-spin", Examine::By(spin)),
];

const fn nap(name: &'static str, examine: Examine) -> Mechanism {
    Mechanism { name, enough: Enough::Yes, examine }
}

fn device(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let what = "MWAIT in the kernel, by the nanonap module";
    Ok(later(what, machine.answers.cpu.monitor, "MONITOR", "an x86 CPU that shows MONITOR"))
}

fn umwait(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let what = "UMWAIT on the task slot";
    Ok(later(what, machine.answers.cpu.waitpkg, "WAITPKG", "an Intel CPU with WAITPKG"))
}

fn mwaitx(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let what = "MWAITX on the task slot";
    Ok(later(what, machine.answers.cpu.mwaitx, "MWAITX", "an AMD CPU with MWAITX"))
}

/// A nap of a later version, and whether this CPU could run it.
fn later(what: &str, has: bool, feature: &str, cpu: &str) -> Finding {
    if has {
        let why = format!("not in this version: {what}; this CPU has {feature}");
        return Finding::no(why, "use a version that has it");
    }
    let why = format!("not in this version: {what}; this CPU shows no {feature}");
    Finding::no(why, format!("use {cpu}, and a version that has it"))
}

fn spin(_: &Machine<'_>) -> Result<Finding, SourceError> {
    Ok(Finding::yes("PAUSE until the request lane idles: runs anywhere, and yields the least"))
}
