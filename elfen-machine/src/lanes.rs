//! The pairs of this machine, and why it has no more.
//!
//! By default, each core with two or more lanes that this process may use gives one pair. Its
//! lowest CPU is the request lane, the others are batch lanes. Pairs that the user gives are
//! rejected if they cannot work. Where the machine may hide its cores, as many virtual machines do,
//! a doubtful pair only gets a warning.

use super::cpulist::{CpuSet, ListError};
use super::pair::{Pair, PairError, parse};
use super::topology::{Core, CoreKind, Topology};

pub const SWITCH_SMT_ON: &str =
    "switch SMT on (as root: `echo on > /sys/devices/system/cpu/smt/control`)";

/// The pairs to use, and warnings for the user.
#[derive(Debug)]
pub struct Lanes {
    pub pairs: Vec<Pair>,
    /// Doubts about pairs given by the user, one sentence each.
    pub warnings: Vec<String>,
}

/// Why lanes given by the user cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LaneError {
    #[error(transparent)]
    Pairs(#[from] PairError),
    #[error("CPU {cpu} is above the last CPU of this machine, {last}")]
    AboveLast { cpu: String, last: u32 },
    #[error("this machine has no CPU {cpu}")]
    Absent { cpu: u32 },
    #[error("CPU {cpu} is offline")]
    Offline { cpu: u32 },
    #[error("CPU {cpu} is outside the cpuset of this process's cgroup, {cpuset}")]
    OutsideCpuset { cpu: u32, cpuset: CpuSet },
    #[error("CPU {cpu} is outside the affinity mask of this process, {affinity}")]
    OutsideAffinity { cpu: u32, affinity: CpuSet },
}

/// The pairs of the machine's own topology.
pub fn default_pairs(topology: &Topology) -> Vec<Pair> {
    let usable = &topology.usable;
    let pair = |core: &Core| {
        let mut lanes = core.lanes.and(usable);
        let request = lanes.pop_first()?;
        (!lanes.is_empty()).then_some(Pair { request, batch: lanes })
    };
    topology.cores.iter().filter_map(pair).collect()
}

/// A pair that this process may use: the machine's first pair, or else its first two CPUs. `None`
/// if it may use only one CPU.
pub fn first_pair(topology: &Topology) -> Option<Pair> {
    default_pairs(topology).into_iter().next().or_else(|| {
        let mut usable = topology.usable.clone();
        let request = usable.pop_first()?;
        let batch = usable.pop_first()?;
        Some(Pair { request, batch: [batch].into_iter().collect() })
    })
}

/// The online CPUs that are in no default pair, grouped by the reason.
pub fn unpaired(topology: &Topology) -> Vec<(&'static str, CpuSet)> {
    let usable = &topology.usable;
    let mut groups: Vec<(&str, CpuSet)> = Vec::new();
    let mut add = |reason, cpu| match groups.iter_mut().find(|(known, _)| *known == reason) {
        Some((_, cpus)) => {
            cpus.insert(cpu);
        }
        None => groups.push((reason, [cpu].into_iter().collect())),
    };
    for core in &topology.cores {
        let alone = core.lanes.and(usable).len() < 2;
        for cpu in core.lanes.iter().filter(|&cpu| alone || !usable.contains(cpu)) {
            add(reason(topology, core, cpu), cpu);
        }
    }
    groups
}

/// Why this lane of a core is in no pair.
fn reason(topology: &Topology, core: &Core, cpu: u32) -> &'static str {
    let in_cpuset = &topology.in_cpuset;
    if !in_cpuset.contains(cpu) {
        "outside the cpuset of this process's cgroup"
    } else if !topology.usable.contains(cpu) {
        "outside the affinity mask of this process"
    } else if core.lanes.len() > 1 && !core.lanes.is_subset(in_cpuset) {
        "the siblings are outside the cpuset"
    } else if core.lanes.len() > 1 {
        "the siblings are outside the affinity mask"
    } else if core.kind == Some(CoreKind::Efficient) {
        "E cores have one lane"
    } else if topology.offline.is_empty() {
        "no sibling"
    } else {
        "no sibling online"
    }
}

/// Parses pairs given by the user, and compares them with the machine.
pub fn by_hand(list: &str, topology: &Topology) -> Result<Lanes, LaneError> {
    let pairs = parse(list).map_err(|error| match (error, topology.present.last()) {
        // A number that is too high for any machine is also above this machine's last CPU. The
        // message about this machine is more useful.
        (PairError::List(ListError::TooHigh(cpu)), Some(last)) => {
            LaneError::AboveLast { cpu, last }
        }
        (error, _) => LaneError::Pairs(error),
    })?;
    for cpu in pairs.iter().flat_map(Pair::lanes) {
        check_usable(cpu, topology)?;
    }
    let warnings = pairs.iter().filter_map(|pair| sibling_warning(pair, topology)).collect();
    Ok(Lanes { pairs, warnings })
}

fn check_usable(cpu: u32, topology: &Topology) -> Result<(), LaneError> {
    if let Some(last) = topology.present.last().filter(|&last| cpu > last) {
        Err(LaneError::AboveLast { cpu: cpu.to_string(), last })
    } else if !topology.present.contains(cpu) {
        Err(LaneError::Absent { cpu })
    } else if !topology.online.contains(cpu) {
        Err(LaneError::Offline { cpu })
    } else if !topology.in_cpuset.contains(cpu) {
        Err(LaneError::OutsideCpuset { cpu, cpuset: topology.in_cpuset.clone() })
    } else if !topology.usable.contains(cpu) {
        Err(LaneError::OutsideAffinity { cpu, affinity: topology.affinity.clone() })
    } else {
        Ok(())
    }
}

/// A warning for a pair whose lanes do not share a core, as far as sysfs shows.
fn sibling_warning(pair: &Pair, topology: &Topology) -> Option<String> {
    let siblings = &topology.core_of(pair.request)?.lanes;
    if pair.batch.is_subset(siblings) {
        return None;
    }
    let doubt = match topology.smt_control.as_deref() {
        _ if topology.shows_siblings() => {
            let core = match siblings.len() {
                1 => "its core has one lane".to_owned(),
                _ => format!("its core has the lanes {siblings}"),
            };
            let strangers = pair.batch.without(siblings);
            format!("CPU {} shares no core with {strangers}: {core}", pair.request)
        }
        Some("off" | "forceoff") => "SMT is off, so no two online CPUs share a core".to_owned(),
        _ => "no SMT siblings are visible, so nothing confirms that these share a core".to_owned(),
    };
    Some(format!("{pair}: {doubt}"))
}

/// The reasons why this machine does not have more pairs, one clause each.
pub fn limits(topology: &Topology) -> Vec<String> {
    let mut limits = Vec::from_iter(smt_limit(topology));
    let offline = &topology.offline;
    if !offline.is_empty() {
        limits.push(format!("offline: {offline}"));
    }
    let in_cpuset = &topology.in_cpuset;
    if *in_cpuset != topology.online {
        limits.push(format!("the cgroup's cpuset leaves {in_cpuset}"));
    }
    let usable = &topology.usable;
    if usable != in_cpuset {
        limits.push(format!("the affinity mask (taskset) leaves {usable}"));
    }
    limits
}

fn smt_limit(topology: &Topology) -> Option<String> {
    let control = topology.smt_control.as_deref().unwrap_or_default();
    // Some architectures can enable a part of a core's lanes: then `control` is a number.
    if topology.shows_siblings() {
        let fewer = !topology.offline.is_empty() && control.parse::<u32>().is_ok();
        return fewer.then(|| format!("smt/control allows {control} lanes a core"));
    }
    let limit = match control {
        "off" => "SMT is off",
        "forceoff" => "SMT is off until the next boot",
        _ if !topology.shows_cores() => "sysfs shows no cores",
        _ if topology.hypervisor => {
            "a virtual machine without SMT siblings, or one that hides them"
        }
        "on" => "no core has two lanes online",
        _ => "no SMT: the CPU lacks it, or the firmware has it off",
    };
    Some(limit.to_owned())
}

/// What the user can do on a machine without pairs.
pub fn remedy(topology: &Topology) -> String {
    let machine = match topology.smt_control.as_deref() {
        _ if topology.shows_siblings() && topology.in_cpuset != topology.online => {
            Some("let the cgroup of this process use both lanes of a core")
        }
        _ if topology.shows_siblings() => Some("let this process use both lanes of a core"),
        Some("off") => Some(SWITCH_SMT_ON),
        Some("forceoff") => Some("boot without `nosmt=force`"),
        Some("on") => Some("bring the siblings online"),
        _ => None,
    };
    let by_hand = |pair| format!("name CPUs that you know to share a core, as in --lanes {pair}");
    match (machine, first_pair(topology)) {
        (Some(machine), Some(pair)) => format!("{machine}, or {}", by_hand(pair)),
        (None, Some(pair)) => by_hand(pair),
        (Some(machine), None) => machine.to_owned(),
        (None, None) if topology.online.len() > 1 => "let this process use more CPUs".to_owned(),
        (None, None) => "use a machine with two CPUs or more".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Source;
    use proptest::prelude::*;

    const CPUS: u32 = 12;

    fn few() -> impl Strategy<Value = CpuSet> {
        prop::collection::btree_set(0..CPUS, 0..5).prop_map(CpuSet::from_iter)
    }

    fn most() -> impl Strategy<Value = CpuSet> {
        few().prop_map(|few| CpuSet::from_iter(0..CPUS).without(&few))
    }

    /// Machines with well-formed files that may contradict each other.
    fn machine() -> impl Strategy<Value = Topology> {
        let siblings = prop::collection::vec(few(), CPUS as usize);
        (most(), few(), most(), prop::option::of(most()), siblings).prop_map(
            |(online, isolated, affinity, cpuset, siblings)| {
                let cpu = "/sys/devices/system/cpu";
                let mut files = format!("{cpu}/online: {online}\naffinity: {affinity}\n");
                files += &format!("{cpu}/isolated: {isolated}\n");
                if let Some(cpuset) = cpuset {
                    files += &format!(
                        "/proc/self/cgroup: 0::/\n/sys/fs/cgroup/cpuset.cpus.effective: {cpuset}\n"
                    );
                }
                for (n, siblings) in siblings.iter().enumerate() {
                    files += &format!("{cpu}/cpu{n}/topology/core_cpus_list: {siblings}\n");
                }
                let source = Source::parse_recording(&files).expect("well formed");
                Topology::read(&source).expect("there is a list of online CPUs")
            },
        )
    }

    proptest! {
        /// Goal: each CPU has one role, even if files of sysfs contradict each other. Method:
        /// machines with contradictions. Every online CPU is in one pair, or in one group without
        /// pairs. Pairs consist of usable CPUs, the lowest first.
        #[test]
        fn every_online_cpu_has_one_role(topology in machine()) {
            let pairs = default_pairs(&topology);
            let mut placed = CpuSet::default();
            for pair in &pairs {
                prop_assert!(pair.batch.iter().all(|batch| batch > pair.request), "{pair}");
                prop_assert!(pair.lanes().all(|cpu| topology.usable.contains(cpu)), "{pair}");
            }
            let without = unpaired(&topology);
            let without = without.iter().flat_map(|(_, cpus)| cpus.iter());
            for cpu in pairs.iter().flat_map(Pair::lanes).chain(without) {
                prop_assert!(placed.insert(cpu), "{cpu} twice");
            }
            prop_assert_eq!(placed, topology.online.clone());
        }

        /// Goal: the machine's own pairs are accepted from the user without a warning. Method: pass
        /// the default pairs as the user's text.
        #[test]
        fn own_pairs_are_accepted_by_hand(topology in machine()) {
            let pairs = default_pairs(&topology);
            let list = pairs.iter().map(Pair::to_string).collect::<Vec<_>>().join(",");
            prop_assume!(!pairs.is_empty());
            let lanes = by_hand(&list, &topology).expect("usable CPUs, each once");
            prop_assert_eq!(lanes.pairs, pairs);
            prop_assert_eq!(lanes.warnings, Vec::<String>::new());
        }
    }
}
