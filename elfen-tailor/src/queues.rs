//! Which queue each request of a service stood in: that of the thread that served it, or, where
//! threads share a CPU, that of the CPU.
//!
//! Threads on one CPU wait for each other there, and how long is no property of a request: whoever
//! was kept from the CPU together with others then has them before him. So the queues are those
//! under which the least is left that no turn explains.

use std::collections::{BTreeMap, BTreeSet};

use crate::explained::Explained;
use crate::segment::{Kind, total};

/// By request.
pub(crate) fn of(explained: &[Explained]) -> Vec<u32> {
    let by_thread: Vec<u32> = explained.iter().map(|one| one.server).collect();
    let threads: BTreeSet<u32> = by_thread.iter().copied().collect();
    if threads.len() < 2 {
        return by_thread;
    }
    let by_cpu: Vec<u32> = explained.iter().map(cpu).collect();
    let left = |queues: &[u32]| left_ns(explained, queues, &threads);
    if left(&by_cpu) < left(&by_thread) { by_cpu } else { by_thread }
}

/// Where it was worked for.
fn cpu(one: &Explained) -> u32 {
    let worked = one.segments.iter().filter(|segment| segment.kind == Kind::Work);
    worked.max_by_key(|segment| segment.ns()).and_then(|segment| segment.cpu).unwrap_or(0)
}

/// What turns don't explain: waiting for threads that serve others in one's own turn, and what a
/// request did before it.
fn left_ns(explained: &[Explained], queues: &[u32], threads: &BTreeSet<u32>) -> u64 {
    let mut by_end: Vec<usize> = (0..explained.len()).collect();
    by_end.sort_by_key(|&at| explained[at].ended_ns);
    let mut free: BTreeMap<u32, u64> = BTreeMap::new();
    let left = by_end.into_iter().map(|at| {
        let one = &explained[at];
        let free_ns = free.insert(queues[at], one.ended_ns).unwrap_or(0);
        let begins_ns = one.arrived_ns.max(free_ns).min(one.ended_ns);
        total(one.segments.iter().map(|segment| match segment.kind {
            Kind::Preempted(who) | Kind::Lock(who)
                if threads.contains(&who.thread) && who.thread != segment.thread =>
            {
                segment.within(begins_ns, one.ended_ns)
            }
            kind if is_own(kind) => segment.within(one.arrived_ns, begins_ns),
            _ => 0,
        }))
    });
    total(left)
}

/// What a request does or waits for itself, whoever has the CPU.
fn is_own(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::Work
            | Kind::Io(..)
            | Kind::Fault
            | Kind::Lock(_)
            | Kind::LockOfUnknown
            | Kind::Sleep(_)
            | Kind::Stall(_)
    )
}
