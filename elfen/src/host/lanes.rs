//! Which lanes make a pair on this machine, and what limits them.
//!
//! By default each core with two or more lanes that this process may use gives one pair: its lowest CPU is the request
//! lane, the others are its batch lanes. Lanes given by hand are refused where they cannot work, and only warned about
//! where the machine may be hiding the truth: in many virtual machines siblings share a core and sysfs denies it.

use std::fmt;

use super::cpulist::CpuSet;
use super::pair::{Pair, PairError, parse};
use super::topology::{Core, CoreKind, Topology};

/// The pairs to use, and what a user should know about them.
#[derive(Debug)]
pub(crate) struct Lanes {
    pub(crate) pairs: Vec<Pair>,
    /// What is doubtful about lanes given by hand; one sentence each.
    pub(crate) warnings: Vec<String>,
}

/// Why lanes given by hand cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum LaneError {
    #[error(transparent)]
    Pairs(#[from] PairError),
    #[error("CPU {cpu} is above the last CPU of this machine, {last}")]
    AboveLast { cpu: u32, last: u32 },
    #[error("this machine has no CPU {cpu}")]
    Absent { cpu: u32 },
    #[error("CPU {cpu} is offline")]
    Offline { cpu: u32 },
    #[error("CPU {cpu} is outside the cpuset of this process's cgroup, {cpuset}")]
    OutsideCpuset { cpu: u32, cpuset: CpuSet },
    #[error("CPU {cpu} is outside the affinity mask of this process, {affinity}")]
    OutsideAffinity { cpu: u32, affinity: CpuSet },
}

/// Why cores give no pair.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Unpaired {
    EfficientCores,
    OneLane,
    OneLaneOnline,
    OutsideCpuset,
    OutsideAffinity,
    SiblingsOutsideCpuset,
    SiblingsOutsideAffinity,
}

impl fmt::Display for Unpaired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::EfficientCores => "E cores, one lane each",
            Self::OneLane => "one lane a core",
            Self::OneLaneOnline => "one lane a core is online",
            Self::OutsideCpuset => "outside the cpuset of this process's cgroup",
            Self::OutsideAffinity => "outside the affinity mask of this process",
            Self::SiblingsOutsideCpuset => "the siblings are outside the cpuset",
            Self::SiblingsOutsideAffinity => "the siblings are outside the affinity mask",
        })
    }
}

/// The pairs of the machine's own topology.
pub(crate) fn default_pairs(topology: &Topology) -> Vec<Pair> {
    let usable = topology.usable();
    let pair = |core: &Core| {
        let mut lanes = core.lanes.and(&usable);
        let request = lanes.pop_first()?;
        (!lanes.is_empty()).then_some(Pair { request, batch: lanes })
    };
    topology.cores.iter().filter_map(pair).collect()
}

/// The online CPUs that `default_pairs` leaves out, by reason.
pub(crate) fn unpaired(topology: &Topology) -> Vec<(Unpaired, CpuSet)> {
    let usable = topology.usable();
    let mut groups: Vec<(Unpaired, CpuSet)> = Vec::new();
    let mut add = |reason, cpu| match groups.iter_mut().find(|(known, _)| *known == reason) {
        Some((_, cpus)) => {
            cpus.insert(cpu);
        }
        None => groups.push((reason, [cpu].into_iter().collect())),
    };
    for core in &topology.cores {
        let alone = core.lanes.and(&usable).len() < 2;
        for cpu in core.lanes.iter().filter(|&cpu| alone || !usable.contains(cpu)) {
            add(reason(topology, core, usable.contains(cpu)), cpu);
        }
    }
    groups
}

fn reason(topology: &Topology, core: &Core, usable: bool) -> Unpaired {
    let in_cpuset = |cpu| topology.cpuset.as_ref().is_none_or(|cpuset| cpuset.contains(cpu));
    let cpuset_limits = core.lanes.iter().any(|cpu| !in_cpuset(cpu));
    match (core.lanes.len(), usable, cpuset_limits) {
        (_, false, true) => Unpaired::OutsideCpuset,
        (_, false, false) => Unpaired::OutsideAffinity,
        (1, ..) if core.kind == Some(CoreKind::Efficient) => Unpaired::EfficientCores,
        (1, ..) if topology.offline().is_empty() => Unpaired::OneLane,
        (1, ..) => Unpaired::OneLaneOnline,
        (_, true, true) => Unpaired::SiblingsOutsideCpuset,
        (_, true, false) => Unpaired::SiblingsOutsideAffinity,
    }
}

/// Reads lanes given by hand and holds them against the machine.
pub(crate) fn by_hand(list: &str, topology: &Topology) -> Result<Lanes, LaneError> {
    let pairs = parse(list)?;
    for cpu in pairs.iter().flat_map(Pair::lanes) {
        check_usable(cpu, topology)?;
    }
    let warnings = pairs.iter().filter_map(|pair| sibling_warning(pair, topology)).collect();
    Ok(Lanes { pairs, warnings })
}

fn check_usable(cpu: u32, topology: &Topology) -> Result<(), LaneError> {
    let last = topology.present.last().unwrap_or(0);
    let cpuset = topology.cpuset.as_ref().filter(|cpuset| !cpuset.contains(cpu));
    if cpu > last {
        Err(LaneError::AboveLast { cpu, last })
    } else if !topology.present.contains(cpu) {
        Err(LaneError::Absent { cpu })
    } else if !topology.online.contains(cpu) {
        Err(LaneError::Offline { cpu })
    } else if let Some(cpuset) = cpuset {
        Err(LaneError::OutsideCpuset { cpu, cpuset: cpuset.clone() })
    } else if !topology.affinity.contains(cpu) {
        Err(LaneError::OutsideAffinity { cpu, affinity: topology.affinity.clone() })
    } else {
        Ok(())
    }
}

/// What is to be said of a pair whose lanes don't share a core, as far as sysfs knows.
fn sibling_warning(pair: &Pair, topology: &Topology) -> Option<String> {
    let siblings = topology.core_of(pair.request).map(|core| &core.lanes)?;
    if pair.batch.is_subset(siblings) {
        return None;
    }
    let strangers = pair.batch.without(siblings);
    if !topology.smt() {
        return Some(format!(
            "{pair}: this machine shows no SMT siblings, so whether these lanes share a core is your word alone"
        ));
    }
    let request = pair.request;
    let others = siblings.iter().filter(|&cpu| cpu != request).collect::<CpuSet>();
    let known =
        if others.is_empty() { "it has none".to_owned() } else { format!("those are {others}") };
    Some(format!("{pair}: {strangers} and {request} are no siblings of one core; {known}"))
}

/// What keeps this machine from giving more pairs; one clause each.
pub(crate) fn limits(topology: &Topology) -> Vec<String> {
    let mut limits = Vec::new();
    limits.extend(smt_limit(topology));
    let offline = topology.offline();
    if !offline.is_empty() {
        limits.push(format!("CPUs {offline} are offline"));
    }
    if let Some(cpuset) = &topology.cpuset
        && !topology.online.is_subset(cpuset)
    {
        limits.push(format!("the cgroup's cpuset allows CPUs {}", cpuset.and(&topology.online)));
    }
    let within =
        topology.cpuset.as_ref().map_or(topology.online.clone(), |c| c.and(&topology.online));
    if !within.is_subset(&topology.affinity) {
        limits.push(format!("the affinity mask (taskset) allows CPUs {}", topology.affinity));
    }
    limits
}

fn smt_limit(topology: &Topology) -> Option<String> {
    if topology.smt() {
        return None;
    }
    Some(match topology.smt_control.as_deref() {
        Some("off") => {
            "SMT is off (as root: `echo on > /sys/devices/system/cpu/smt/control`)".to_owned()
        }
        Some("forceoff") => "SMT is off until a boot without `nosmt=force`".to_owned(),
        _ if topology.hypervisor => {
            "no SMT siblings visible: this is a virtual machine, which may hide them".to_owned()
        }
        Some("on") => "no core has two lanes online".to_owned(),
        _ => "no SMT: the CPU lacks it, or the firmware has it off".to_owned(),
    })
}
