//! Checks which parts of Elfen can run on this machine, and what prevents the others.
//!
//! Each check is a pure function of what was read through `Source` and of the kernel's `Answers`,
//! so a recording of any machine gives the same report as that machine. `CHECKS` has a line for
//! each check, in the order of the report. The subcommand prints the report.

pub mod answers;
mod checks;
mod conflicts;
mod finding;

use Enough::{If, No, Yes};
use Group::{Checks, Conflicts, Fences, Naps, Shim, Signals, Tailor};
pub use finding::{Check, Enough, Finding, Group, Machine, NEEDS, Status, Verdict, alternatives};
use finding::{Found, warn};

use crate::source::SourceError;

type Probe = fn(&Machine<'_>) -> Found;

const A_SERVICE: &str =
    "for requests that a service publishes (`elfen run --source service --service NAME`)";
const IN_SOURCE: &str = "for programs with checks in their source";
const HOOKED: &str = "for programs built with -pg or -finstrument-functions";
const PATCHABLE: &str = "for programs built with -fpatchable-function-entry";

/// The group, the name (short and stable, because scripts search for it), whether it is enough, and
/// the probe. In signals and naps, the order is the one in which they are tried.
const CHECKS: [(Group, &str, Enough, Probe); 45] = [
    (Group::Lanes, "pairs", Yes, checks::pairs),
    (Group::Lanes, "smt", No, checks::smt),
    (Signals, "kernel-version", No, checks::kernel_version),
    (Signals, "kernel-types", No, checks::kernel_types),
    (Signals, "sched-switch", No, checks::sched_switch),
    (Signals, "task-map-elfend", Yes, checks::task_map_elfend),
    (Signals, "task-map-attach", Yes, checks::task_map_attach),
    (Signals, "service-page", If(A_SERVICE), checks::service_page),
    (Signals, "nanonap-module", Yes, checks::nanonap_module),
    (Signals, "hardware-counters", No, checks::hardware_counters),
    (Naps, "nap-device", Yes, checks::nap_device),
    (Naps, "nap-umwait", Yes, checks::nap_umwait),
    (Naps, "nap-mwaitx", Yes, checks::nap_mwaitx),
    (Naps, "nap-block", Yes, checks::nap_block),
    (Naps, "nap-spin", Yes, checks::nap_spin),
    (Checks, "checks-guard", Yes, checks::checks_guard),
    (Checks, "checks-live", No, checks::checks_live),
    (Checks, "checks-inlined", If(IN_SOURCE), checks::checks_inlined),
    (Checks, "checks-hooks", If(HOOKED), checks::checks_hooks),
    (Checks, "checks-patchable", If(PATCHABLE), checks::checks_patchable),
    (Fences, "fence-idle", No, checks::fence_idle),
    (Fences, "fence-rank", No, checks::fence_rank),
    (Fences, "fence-cpuset", No, checks::fence_cpuset),
    (Fences, "fence-freeze", No, checks::fence_freeze),
    (Fences, "fence-systemd", No, checks::fence_systemd),
    (Shim, "shim-clock", No, checks::shim_clock),
    (Shim, "shim-tasks", No, checks::shim_tasks),
    (Shim, "shim-map-files", No, checks::shim_map_files),
    (Shim, "shim-ptrace", No, checks::shim_ptrace),
    (Shim, "shim-names", No, checks::shim_names),
    (Shim, "shim-counts", No, checks::shim_counts),
    (Tailor, "tailor-sched", No, checks::tailor_sched),
    (Tailor, "tailor-sockets", No, checks::tailor_sockets),
    (Tailor, "tailor-full", No, checks::tailor_full),
    (Tailor, "tailor-jvm", No, checks::tailor_jvm),
    (Conflicts, "sched-ext-off", No, conflicts::sched_ext_off),
    (Conflicts, "core-scheduling-off", No, conflicts::core_scheduling_off),
    (Conflicts, "autogroup-off", No, conflicts::autogroup_off),
    (Conflicts, "topology-shown", No, conflicts::topology_shown),
    (Conflicts, "irqs-elsewhere", No, |m| on_lanes(m, conflicts::irqs_elsewhere)),
    (Conflicts, "request-lanes-isolated", No, |m| on_lanes(m, conflicts::request_lanes_isolated)),
    (Conflicts, "nohz-full", No, |m| on_lanes(m, conflicts::nohz_full)),
    (Conflicts, "governor-performance", No, |m| on_lanes(m, conflicts::governor_performance)),
    (Conflicts, "idle-yields-core", No, |m| on_lanes(m, conflicts::idle_yields_core)),
    (Conflicts, "idle-wakes-fast", No, |m| on_lanes(m, conflicts::idle_wakes_fast)),
];

/// For checks of the lanes in use.
fn on_lanes(machine: &Machine<'_>, probe: Probe) -> Found {
    if machine.lanes.pairs.is_empty() {
        return warn("no pair, so no request lane to check", "see pairs");
    }
    probe(machine)
}

/// The whole report, group by group.
pub fn examine(machine: &Machine<'_>) -> Vec<Check> {
    let unreadable = |error: SourceError| Finding {
        status: Status::Warn,
        why: error.to_string(),
        fix: "make it readable for this user, or run this as root".to_owned(),
    };
    let check = |(group, name, enough, probe): (Group, _, _, Probe)| {
        let finding = probe(machine).unwrap_or_else(unreadable);
        Check { group, name, enough, finding }
    };
    CHECKS.into_iter().map(check).collect()
}
