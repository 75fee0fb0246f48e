//! Which queue each request of a service stood in: that of the thread that served it, or, where
//! threads share a CPU, that of the CPU.
//!
//! Threads on one CPU wait for each other there, and how long is no property of a request: whoever
//! was kept from the CPU together with others then has them before him. So the queues are those
//! under which the least is left that a request waited for others in its own turn.

use std::collections::{BTreeMap, BTreeSet};

use crate::explained::Explained;
use crate::segment::{Kind, Segment, total};

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

/// What no turn in a queue explains: waiting for threads that serve others while it is one's own
/// turn, and answers that came before it was.
fn left_ns(explained: &[Explained], queues: &[u32], threads: &BTreeSet<u32>) -> u64 {
    let mut free: BTreeMap<u32, u64> = BTreeMap::new();
    let left = explained.iter().zip(queues).map(|(one, queue)| {
        let free_ns = free.entry(*queue).or_default();
        let begins_ns = one.arrived_ns.max(*free_ns);
        let waits = |segment: &&Segment| match segment.kind {
            Kind::Preempted(who) => threads.contains(&who.thread) && who.thread != segment.thread,
            _ => false,
        };
        let waited = one.segments.iter().filter(waits);
        let waited_ns = total(waited.map(|segment| segment.within(begins_ns, one.ended_ns)));
        let early_ns = free_ns.saturating_sub(one.ended_ns);
        *free_ns = one.ended_ns.max(*free_ns);
        waited_ns.saturating_add(early_ns)
    });
    total(left)
}
