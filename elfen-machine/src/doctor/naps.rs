//! How a batch thread naps, which frees its lane without giving the lane away. In the order in
//! which naps are tried.

use super::answers::{Attach, Nanonap, Nap};
use super::finding::{Enough, Finding, Machine, Mechanism};
use crate::pair::Pair;
use crate::source::SourceError;

pub(super) const MECHANISMS: &[Mechanism] = &[
    nap("nap-device", device),
    nap("nap-umwait", umwait),
    nap("nap-mwaitx", mwaitx),
    nap("nap-block", block),
    nap("nap-spin", spin),
];

const fn nap(
    name: &'static str,
    examine: fn(&Machine<'_>) -> Result<Finding, SourceError>,
) -> Mechanism {
    Mechanism { name, enough: Enough::Yes, examine }
}

const SHOWS_MONITOR: &str = "use a CPU with MONITOR/MWAIT, or a virtual machine that shows it";

fn device(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    Ok(match &machine.answers.nanonap {
        // Says so now, before the user builds the module in vain.
        Nanonap::Absent if machine.answers.monitor == Some(false) => Finding::no(
            "this CPU shows no MONITOR/MWAIT that works, which the module needs",
            SHOWS_MONITOR,
        ),
        Nanonap::Opened { waits: false, .. } => {
            Finding::no("the module finds no MONITOR/MWAIT that works on this CPU", SHOWS_MONITOR)
        }
        Nanonap::Opened { waits: true, ties: 0 } => {
            let pair = machine.lanes.pairs.first().map_or("0:1".to_owned(), Pair::to_string);
            let load = format!("`modprobe -r nanonap` and `modprobe nanonap pairs={pair}`");
            Finding::no(
                "the module found no siblings, so that no lane can wake another",
                format!("load it again with these pairs (as root: {load})"),
            )
        }
        Nanonap::Opened { .. } => {
            Finding::yes("the module waits in the kernel, on a word that the request lane writes")
        }
        Nanonap::Absent | Nanonap::NotPermitted | Nanonap::Refused(_) => {
            Finding::no("the nanonap module cannot be used", "see nanonap-module")
        }
    })
}

const C0_2: &str = "/sys/devices/system/cpu/umwait_control/enable_c02";

fn umwait(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let c0_2 = machine.source.text(C0_2)?;
    Ok(match &machine.answers.umwait {
        Nap::Missing(why) => Finding::no(
            why.as_str(),
            "use an Intel CPU with WAITPKG, or a virtual machine that shows it",
        ),
        Nap::Works if c0_2.as_deref() == Some("0") => Finding::warn(
            "UMWAIT may not enter C0.2, so it frees less of the core",
            format!("permit it (as root: `echo 1 > {C0_2}`)"),
        ),
        Nap::Works => Finding::yes("UMWAIT on the request lane's task slot"),
    })
}

fn mwaitx(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    Ok(match &machine.answers.mwaitx {
        Nap::Missing(why) => Finding::no(
            why.as_str(),
            "use an AMD CPU with MWAITX, or a virtual machine that shows it",
        ),
        Nap::Works => Finding::yes("MWAITX on the request lane's task slot"),
    })
}

/// A process that may attach the sched_switch program may attach the waking program, too.
fn block(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    Ok(match &machine.answers.attach {
        Attach::Attached => Finding::yes(
            "asleep in the kernel, for programs with checks; waking takes tens of microseconds",
        ),
        _ => Finding::no(
            "no eBPF program can be attached, so nothing would wake a sleeping thread",
            "see task-map-attach",
        ),
    })
}

fn spin(_: &Machine<'_>) -> Result<Finding, SourceError> {
    // Thesis, section 5.2: next to PAUSE a request takes 1.37 times as long as without.
    Ok(Finding::warn(
        "PAUSE runs anywhere, but takes as much from a request on the same core as a program of \
         low IPC",
        "load the nanonap module, or use a CPU with WAITPKG or MWAITX",
    ))
}
