//! Checks whether the guarantees of a fence hold, by the kernel's files, and repairs them if
//! possible.

use serde::{Deserialize, Serialize};

use super::rank::{self, Outranked};
use crate::cgroup::{CgroupPath, Error, Group, Hierarchies};
use crate::cpulist::CpuSet;
use crate::process::threads_of;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Guarantee {
    /// Guards rank above the processes of the fence.
    Rank,
    /// The fence runs only on its batch lanes, with memory of their nodes.
    Place,
    /// No thread of the fence has a real-time or deadline class, which ranks above guards
    /// everywhere.
    Class,
    /// Only root can move a process out of the fence.
    Owner,
}

impl Guarantee {
    pub const ALL: [Self; 4] = [Self::Rank, Self::Place, Self::Class, Self::Owner];

    pub fn name(self) -> &'static str {
        match self {
            Self::Rank => "rank",
            Self::Place => "place",
            Self::Class => "class",
            Self::Owner => "owner",
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Broken {
    #[serde(rename = "guarantee")]
    pub guarantee: Guarantee,
    pub why: String,
}

/// The facts that the guarantees of a fence are compared with.
#[derive(Debug)]
pub struct Terms<'a> {
    pub hierarchies: &'a Hierarchies,
    /// The cgroup of the guards.
    pub home: &'a CgroupPath,
    /// The fence's batch lanes that are online.
    pub lanes: &'a CpuSet,
    /// The memory nodes of all lanes of the fence, online or not; empty if the kernel has none.
    pub nodes: &'a CpuSet,
}

/// The broken guarantees, each with one reason. An error means that the cgroup cannot be read, so
/// the state of its guarantees is unknown.
pub fn check(group: &Group, terms: &Terms<'_>) -> Result<Vec<Broken>, Error> {
    group.require_domain()?;
    let mut broken = Vec::new();
    let mut note = |guarantee, why: Option<String>| {
        broken.extend(why.map(|why| Broken { guarantee, why }));
    };
    note(Guarantee::Rank, outranked(group, terms)?.map(|why| why.to_string()));
    note(Guarantee::Place, misplaced(group, terms)?);
    note(Guarantee::Class, realtime_thread(group)?);
    let writable = group.writable_by_others()?;
    let why =
        |file: std::path::PathBuf| format!("users other than root may write {}", file.display());
    note(Guarantee::Owner, writable.map(why));
    Ok(broken)
}

fn outranked(group: &Group, terms: &Terms<'_>) -> Result<Option<Outranked>, Error> {
    let rank = |path: &CgroupPath| Group::new(terms.hierarchies, path.clone()).rank();
    rank::outranked(terms.home, &group.path, rank)
}

fn misplaced(group: &Group, terms: &Terms<'_>) -> Result<Option<String>, Error> {
    // Without an online lane the fence is frozen, so it does not matter where the kernel moved its
    // threads.
    if terms.lanes.is_empty() {
        return Ok(None);
    }
    let cpus = group.effective_cpus()?;
    if cpus.is_empty() || !cpus.is_subset(terms.lanes) {
        let lanes = terms.lanes;
        return Ok(Some(format!("it may run on CPUs {cpus}, and its batch lanes are {lanes}")));
    }
    let memory = group.effective_memory()?;
    if !memory.is_subset(&nodes(group, terms, &memory)?) {
        let nodes = terms.nodes;
        let why = format!("it may have memory of nodes {memory}, and its lanes are of {nodes}");
        return Ok(Some(why));
    }
    if !group.is_member()? {
        return Ok(Some("its cpuset is a partition of its own (cpuset.cpus.partition)".to_owned()));
    }
    let half = group.partly_inside()?;
    // A move changes one hierarchy after the other, so check again whether the process is between
    // them.
    let half = half.into_iter().find(|&process| is_partly_inside(group, process));
    Ok(half.map(|process| format!("process {process} is in it in only one of the hierarchies")))
}

/// The memory nodes that the fence should have: those of its lanes that its parent has, too. If its
/// parent has none of them, the current nodes are correct.
fn nodes(group: &Group, terms: &Terms<'_>, now: &CpuSet) -> Result<CpuSet, Error> {
    let wanted = terms.nodes.and(&group.parent().effective_memory()?);
    Ok(if wanted.is_empty() { now.clone() } else { wanted })
}

/// Whether the fence has fewer CPUs or nodes than its lanes, because a lane came back online. No
/// guarantee is broken then, but the same repair applies.
pub fn lacks_lanes(group: &Group, terms: &Terms<'_>) -> Result<bool, Error> {
    let wanted = terms.lanes.and(&group.parent().effective_cpus()?);
    let now = group.effective_cpus()?;
    let memory = group.effective_memory()?;
    let lacks = |now: &CpuSet, wanted: &CpuSet| now != wanted && now.is_subset(wanted);
    Ok(lacks(&now, &wanted) || lacks(&memory, &nodes(group, terms, &memory)?))
}

fn is_partly_inside(group: &Group, process: u32) -> bool {
    group.partly_inside().is_ok_and(|half| half.contains(&process))
}

/// A thread in the fence with a real-time class, as text. A thread that has ended has no class.
fn realtime_thread(group: &Group) -> Result<Option<String>, Error> {
    for process in group.processes()? {
        for thread in threads_of(process) {
            // SAFETY: sched_getscheduler takes a number.
            let class = unsafe { libc::syscall(libc::SYS_sched_getscheduler, thread) };
            let class = i32::try_from(class).unwrap_or(-1) & !libc::SCHED_RESET_ON_FORK;
            let name = match class {
                libc::SCHED_FIFO => "SCHED_FIFO",
                libc::SCHED_RR => "SCHED_RR",
                libc::SCHED_DEADLINE => "SCHED_DEADLINE",
                _ => continue,
            };
            return Ok(Some(format!("thread {thread} of process {process} is of class {name}")));
        }
    }
    Ok(None)
}

/// Repairs what the files of a cgroup can: writes the values again that other programs have
/// changed. It cannot change the owner of files, or the class of threads.
pub fn repair(group: &Group, broken: &Broken, terms: &Terms<'_>) -> Result<(), Error> {
    match broken.guarantee {
        Guarantee::Rank => match outranked(group, terms)? {
            Some(Outranked::NotIdle { child, .. }) if child == group.path => group.set_idle(true),
            _ => Ok(()),
        },
        Guarantee::Place => {
            if !group.is_member()? {
                group.set_member()?;
            }
            for process in group.partly_inside()? {
                if is_partly_inside(group, process) {
                    // The process may have ended meanwhile. If not, the next check finds it again.
                    let _taken_in = group.add_process(process);
                }
            }
            let cpus = group.effective_cpus()?;
            let memory = group.effective_memory()?;
            let nodes = nodes(group, terms, &memory)?;
            if memory != nodes {
                group.keep_memory_to(&nodes)?;
            }
            if !cpus.is_empty() && cpus.is_subset(terms.lanes) && !lacks_lanes(group, terms)? {
                return Ok(());
            }
            group.keep_to(terms.lanes)
        }
        Guarantee::Class | Guarantee::Owner => Ok(()),
    }
}
