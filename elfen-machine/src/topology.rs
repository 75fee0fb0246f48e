//! Reads the machine's cores and their lanes from sysfs.
//!
//! This module only reads facts; `lanes` decides which of them make a pair. It reads sysfs directly
//! and not through a library, so that recordings of other machines are read in the same way.

use std::fs;
use std::path::Path;

use super::cgroup::path_in;
use super::cpulist::CpuSet;
use super::source::{Source, SourceError};

const CPU: &str = "/sys/devices/system/cpu";
const NODE: &str = "/sys/devices/system/node";

#[derive(Debug, thiserror::Error)]
pub enum TopologyError {
    #[error("there is no {CPU}/online")]
    NoSysfs,
    #[error(transparent)]
    Source(#[from] SourceError),
}

/// The kind of a core on a hybrid machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CoreKind {
    Performance,
    Efficient,
}

/// The lanes that share one core's resources.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Core {
    /// Online lanes, whether or not this process may use them.
    pub lanes: CpuSet,
    /// The kernel's number, unique only within package and die. `None` if sysfs has no topology.
    pub core: Option<u32>,
    pub die: Option<u32>,
    pub package: Option<u32>,
    /// The NUMA node; 0 on a kernel without NUMA, `None` if no node lists the core.
    pub node: Option<u32>,
    pub kind: Option<CoreKind>,
}

#[derive(Debug)]
pub struct Topology {
    pub present: CpuSet,
    pub online: CpuSet,
    /// Present CPUs that are offline.
    pub offline: CpuSet,
    /// The affinity mask of this process.
    pub affinity: CpuSet,
    /// The cpuset of this process's cgroup; `None` if no cpuset controller is visible.
    pub cpuset: Option<CpuSet>,
    /// Online CPUs that the cgroup of this process may use.
    pub in_cpuset: CpuSet,
    /// Online CPUs that this process may pin a thread to.
    pub usable: CpuSet,
    pub isolated: CpuSet,
    pub nohz_full: CpuSet,
    /// `smt/control`: on, off, forceoff, notsupported, notimplemented, or a number of lanes per
    /// core.
    pub smt_control: Option<String>,
    /// `smt/active`: whether any core has several lanes online.
    pub smt_active: Option<bool>,
    /// Whether the CPU reports a hypervisor. Only x86 has a flag for it.
    pub hypervisor: bool,
    /// Sorted by their lowest CPU.
    pub cores: Vec<Core>,
}

impl Topology {
    pub fn read(source: &Source) -> Result<Self, TopologyError> {
        let cpu_list = |file: &str| source.cpus(&format!("{CPU}/{file}"));
        let online = cpu_list("online")?.ok_or(TopologyError::NoSysfs)?;
        let present = cpu_list("present")?.unwrap_or_else(|| online.clone());
        let isolated = cpu_list("isolated")?.unwrap_or_default();
        let smt_active = source.text(&format!("{CPU}/smt/active"))?;
        let affinity = source.affinity()?;
        let cpuset = cpuset_of_this_process(source)?;
        let in_cpuset = cpuset.as_ref().map_or_else(|| online.clone(), |cpus| cpus.and(&online));
        Ok(Self {
            offline: present.without(&online),
            present,
            usable: usable(&in_cpuset, &affinity, &isolated),
            affinity,
            cpuset,
            in_cpuset,
            isolated,
            nohz_full: cpu_list("nohz_full")?.unwrap_or_default(),
            smt_control: source.text(&format!("{CPU}/smt/control"))?,
            smt_active: smt_active.map(|active| active == "1"),
            hypervisor: source.cpu_flag("hypervisor")?,
            cores: cores(source, &online)?,
            online,
        })
    }

    /// Whether any core has several online lanes, as far as sysfs shows.
    pub fn shows_siblings(&self) -> bool {
        self.cores.iter().any(|core| core.lanes.len() > 1)
    }

    /// Whether sysfs has any information about cores.
    pub fn shows_cores(&self) -> bool {
        self.cores.iter().any(|core| core.core.is_some())
    }

    /// Whether SMT is on: a core has several lanes, or the kernel reports SMT as active.
    pub fn smt(&self) -> bool {
        self.smt_active == Some(true) || self.shows_siblings()
    }

    /// The core that an online CPU belongs to.
    pub fn core_of(&self, cpu: u32) -> Option<&Core> {
        self.cores.iter().find(|core| core.lanes.contains(cpu))
    }
}

/// `isolcpus` removes CPUs from the affinity mask of process 1, and all other processes inherit
/// that mask. So if a mask lacks only the isolated CPUs, no process has restricted it: the isolated
/// CPUs are usable.
fn usable(in_cpuset: &CpuSet, affinity: &CpuSet, isolated: &CpuSet) -> CpuSet {
    let allowed = in_cpuset.and(affinity);
    let untouched = allowed == in_cpuset.without(isolated);
    if untouched { in_cpuset.clone() } else { allowed }
}

fn cores(source: &Source, online: &CpuSet) -> Result<Vec<Core>, SourceError> {
    let nodes = nodes(source, online)?;
    let kinds = kinds(source)?;
    let mut seen = CpuSet::default();
    let mut cores = Vec::new();
    for cpu in online.iter() {
        if seen.contains(cpu) {
            continue;
        }
        // If files contradict each other, a CPU belongs to the first core that lists it.
        let lanes: CpuSet = siblings(source, cpu)?
            .iter()
            .filter(|&lane| online.contains(lane) && seen.insert(lane))
            .collect();
        cores.push(Core {
            core: number(source, cpu, "core_id")?,
            die: number(source, cpu, "die_id")?,
            package: number(source, cpu, "physical_package_id")?,
            node: nodes.iter().find(|(_, cpus)| cpus.contains(cpu)).map(|&(node, _)| node),
            kind: kinds.iter().find(|(_, cpus)| cpus.contains(cpu)).map(|&(kind, _)| kind),
            lanes,
        });
    }
    Ok(cores)
}

/// The CPU and its siblings: `core_cpus_list` since Linux 5.3, `thread_siblings_list` before.
fn siblings(source: &Source, cpu: u32) -> Result<CpuSet, SourceError> {
    let topology = format!("{CPU}/cpu{cpu}/topology");
    let mut siblings = match source.cpus(&format!("{topology}/core_cpus_list"))? {
        Some(siblings) => siblings,
        None => source.cpus(&format!("{topology}/thread_siblings_list"))?.unwrap_or_default(),
    };
    siblings.insert(cpu);
    Ok(siblings)
}

/// A number in a CPU's topology folder. Kernels write -1 for an unknown number.
fn number(source: &Source, cpu: u32, file: &str) -> Result<Option<u32>, SourceError> {
    let text = source.text(&format!("{CPU}/cpu{cpu}/topology/{file}"))?;
    Ok(text.and_then(|text| text.parse().ok()))
}

/// The CPUs of each NUMA node. A kernel without NUMA counts as one node with all CPUs.
fn nodes(source: &Source, online: &CpuSet) -> Result<Vec<(u32, CpuSet)>, SourceError> {
    let Some(nodes) = source.cpus(&format!("{NODE}/online"))? else {
        return Ok(vec![(0, online.clone())]);
    };
    let cpus = |node: u32| {
        let list = source.cpus(&format!("{NODE}/node{node}/cpulist"))?;
        Ok((node, list.unwrap_or_default()))
    };
    nodes.iter().map(cpus).collect()
}

/// The nodes of these CPUs, online or not; empty if sysfs has no nodes.
pub fn nodes_of(cpus: &CpuSet) -> CpuSet {
    let online = fs::read_to_string(format!("{NODE}/online")).unwrap_or_default();
    let all: CpuSet = online.trim().parse().unwrap_or_default();
    let has = |node: u32, cpu: u32| Path::new(&format!("{NODE}/node{node}/cpu{cpu}")).exists();
    all.iter().filter(|&node| cpus.iter().any(|cpu| has(node, cpu))).collect()
}

fn kinds(source: &Source) -> Result<Vec<(CoreKind, CpuSet)>, SourceError> {
    let folders = [
        (CoreKind::Performance, "cpu_core"),
        (CoreKind::Efficient, "cpu_atom"),
        (CoreKind::Efficient, "cpu_lowpower"),
    ];
    let mut kinds = Vec::new();
    for (kind, folder) in folders {
        if let Some(cpus) = source.cpus(&format!("/sys/devices/{folder}/cpus"))? {
            kinds.push((kind, cpus));
        }
    }
    Ok(kinds)
}

/// The hierarchies that may have cpusets, as controller, mount point and file: version 1; version
/// 2; version 2 on a machine that mounts both.
const CPUSETS: [(&str, &str, &str); 3] = [
    ("cpuset", "/sys/fs/cgroup/cpuset", "cpuset.effective_cpus"),
    ("", "/sys/fs/cgroup", "cpuset.cpus.effective"),
    ("", "/sys/fs/cgroup/unified", "cpuset.cpus.effective"),
];

/// The cpuset of the calling process's cgroup; `None` if no cpuset controller is visible.
///
/// The affinity mask always lies inside the cgroup's cpuset, so the cpuset adds no limit that
/// sched_getaffinity misses. But it tells why a CPU is missing. The process can undo taskset, but
/// not the limit of its cgroup. The standard mount points suffice: elsewhere, only the explanation
/// is less precise.
fn cpuset_of_this_process(source: &Source) -> Result<Option<CpuSet>, SourceError> {
    let memberships = source.text("/proc/self/cgroup")?.unwrap_or_default();
    for (controller, mount, file) in CPUSETS {
        if let Some(path) = path_in(&memberships, controller)
            && let Some(found) = nearest(source, mount, path, file)?
        {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// Reads the file in the cgroup, or in its nearest ancestor that has the file. A cgroup without the
/// controller has its parent's CPUs. In a container, the path may also name directories that exist
/// only on the host.
fn nearest(
    source: &Source,
    mount: &str,
    path: &str,
    file: &str,
) -> Result<Option<CpuSet>, SourceError> {
    let mut path = path.trim_end_matches('/');
    loop {
        let found = match source.cpus(&format!("{mount}{path}/{file}")) {
            // A hardened container hides its cgroup, so only the affinity mask is known.
            Err(SourceError::Unreadable { .. }) => return Ok(None),
            found => found?,
        };
        if found.is_some() || path.is_empty() {
            return Ok(found);
        }
        path = path.rfind('/').map_or("", |slash| &path[..slash]);
    }
}
