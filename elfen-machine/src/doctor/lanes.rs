//! Whether there are lanes to lend: pairs, and the SMT that makes them.

use super::finding::{Enough, Finding, Machine, Mechanism};
use crate::lanes::{limits, remedy};
use crate::pair::Pair;
use crate::source::SourceError;

pub(super) const MECHANISMS: &[Mechanism] = &[
    Mechanism { name: "pairs", enough: Enough::Yes, examine: pairs },
    Mechanism { name: "smt", enough: Enough::No, examine: smt },
];

/// More pairs are listed by `elfen lanes`.
const PAIRS_SHOWN: usize = 8;

fn pairs(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let pairs = &machine.lanes.pairs;
    let shown: Vec<String> = pairs.iter().take(PAIRS_SHOWN).map(Pair::to_string).collect();
    let more = match pairs.len() - shown.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let origin = if machine.by_hand { "given by hand" } else { "found in the topology" };
    let list = format!("{}{more}, {origin}", shown.join(" "));
    let doubts = &machine.lanes.warnings;
    Ok(if pairs.is_empty() {
        Finding::no(clauses("none", &limits(machine.topology)), remedy(machine.topology))
    } else if doubts.is_empty() {
        Finding::yes(clauses(&list, &limits(machine.topology)))
    } else {
        let fix = "use the pairs that `elfen lanes` finds, or make sure that these share a core";
        Finding::warn(clauses(&list, doubts), fix)
    })
}

fn clauses(first: &str, more: &[String]) -> String {
    let mut clauses = vec![first];
    clauses.extend(more.iter().map(String::as_str));
    clauses.join("; ")
}

fn smt(machine: &Machine<'_>) -> Result<Finding, SourceError> {
    let topology = machine.topology;
    if topology.shows_siblings() {
        let lanes = topology.cores.iter().map(|core| core.lanes.len()).max().unwrap_or(0);
        return Ok(Finding::yes(format!("cores have up to {lanes} lanes online")));
    }
    let fix = match topology.smt_control.as_deref() {
        Some("off") => crate::lanes::SWITCH_SMT_ON,
        Some("forceoff") => "boot without `nosmt=force`",
        Some("on") => "bring the siblings online",
        _ if topology.hypervisor => {
            "use a virtual machine that shows siblings (in QEMU, `-smp` with `threads=2`) and \
             whose vCPUs are pinned to them"
        }
        _ => "switch SMT on in the firmware, or use a CPU that has it",
    };
    let why = limits(topology).into_iter().next().unwrap_or_else(|| "no siblings online".into());
    Ok(Finding::no(why, fix))
}
