//! How a batch thread gives its lane away without giving it up.

use super::{Examine, Finding, Machine, Mechanism};
use crate::host::source::SourceError;

pub(super) const MECHANISMS: &[Mechanism] = &[
    later("nap-device", "MWAIT in the kernel, by the nanonap module"),
    later("nap-umwait", "UMWAIT on the task slot, on Intel CPUs with WAITPKG"),
    later("nap-mwaitx", "MWAITX on the task slot, on AMD CPUs"),
    later("nap-block", "sleeping in the kernel until the request lane idles"),
    Mechanism { name: "nap-spin", enough: true, examine: Examine::By(spin) },
];

const fn later(name: &'static str, what: &'static str) -> Mechanism {
    Mechanism { name, enough: true, examine: Examine::NotInThisVersion(what) }
}

fn spin(_: &Machine<'_>) -> Result<Finding, SourceError> {
    Ok(Finding::yes("PAUSE until the request lane idles: runs anywhere, and yields the least"))
}
