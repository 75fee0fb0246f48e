//! Assigns each request to a queue: that of the thread that served it, or, if threads share a CPU,
//! that of the CPU. Also measures whether the service behaves like a queue at all.
//!
//! Threads on one CPU wait for each other, and for how long does not depend on the request. If
//! something keeps several threads from the CPU, each of them also waits for the others. So this
//! module tries both assignments and uses the one with less off-slot time. Off-slot time is of two
//! kinds.
//! - Work for a request during a slot of another request.
//! - In a request's own slot, a wait for a thread that serves other requests.
//!
//! A replay cannot predict off-slot time: it stays as recorded, whichever causes are removed. So
//! predictions are not used if much of the time is off-slot.

use std::collections::BTreeSet;

use crate::segment::{ExplainedRequest, Segment, SegmentKind, saturating_sum};
use crate::service_slots::{self, Job, ServiceSlot};

pub(crate) struct Queues {
    pub(crate) jobs: Vec<Job>,
    pub(crate) slots: Vec<Vec<ServiceSlot>>,
    /// The own time of each request.
    pub(crate) own: Vec<OwnTime>,
}

/// The time in which a request itself worked or waited, whichever thread had the CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct OwnTime {
    pub(crate) all_ns: u64,
    /// The part of `all_ns` outside of the request's service slots.
    pub(crate) off_slot_ns: u64,
}

impl Queues {
    pub(crate) fn of(explained: &[ExplainedRequest]) -> Self {
        let by_thread: Vec<u32> = explained.iter().map(|one| one.server).collect();
        let threads: BTreeSet<u32> = by_thread.iter().copied().collect();
        let on_thread = |segment: &Segment, thread| segment.thread == thread;
        let threaded = Self::with_servers(explained, &by_thread, on_thread, |segment, _| {
            is_kept_by(segment, &threads)
        });
        if threads.len() < 2 {
            return threaded;
        }
        let by_cpu: Vec<u32> = explained.iter().map(work_cpu).collect();
        let on_cpu = |segment: &Segment, cpu| segment.cpu == Some(cpu);
        // A thread that shares the CPU may run in this request's slot to poll for its next request.
        // That does not make it a server that keeps this request waiting.
        let shared = Self::with_servers(explained, &by_cpu, on_cpu, |segment, cpu| {
            let shares =
                matches!(segment.kind, SegmentKind::Preempted(_)) && segment.cpu == Some(cpu);
            is_kept_by(segment, &threads) && !shares
        });
        if shared.off_slot_ns() < threaded.off_slot_ns() { shared } else { threaded }
    }

    fn off_slot_ns(&self) -> u64 {
        saturating_sum(self.own.iter().map(|own| own.off_slot_ns))
    }

    fn with_servers(
        explained: &[ExplainedRequest],
        servers: &[u32],
        is_at: impl Fn(&Segment, u32) -> bool,
        is_kept: impl Fn(&Segment, u32) -> bool,
    ) -> Self {
        let job = |(one, &server): (&ExplainedRequest, &u32)| Job {
            server,
            arrived_ns: one.arrived_ns,
            worked: work_spans(one, |segment| is_at(segment, server)),
            served_ns: served_ns(one),
            ended_ns: one.ended_ns,
        };
        let jobs: Vec<Job> = explained.iter().zip(servers).map(job).collect();
        let slots = service_slots::assign(&jobs);
        let mut spans: Vec<Vec<(u64, u64)>> = vec![Vec::new(); jobs.len()];
        for slot in slots.iter().flatten() {
            spans[slot.job].push((slot.from_ns, slot.to_ns));
        }
        let own = explained.iter().zip(&spans).zip(servers).map(|((one, spans), &server)| {
            own_time(one, spans, |segment| is_kept(segment, server))
        });
        Self { own: own.collect(), jobs, slots }
    }
}

/// The spans in which the server worked for a request. They include the system calls just before
/// the work, in which the server learns of the request and reads it.
fn work_spans(one: &ExplainedRequest, is_there: impl Fn(&Segment) -> bool) -> Vec<(u64, u64)> {
    let mut on_its_way = None::<&Segment>;
    let mut worked = Vec::new();
    for segment in &one.segments {
        if segment.kind == SegmentKind::Work && is_there(segment) {
            let way = on_its_way.filter(|way| way.thread == segment.thread);
            worked.push((way.map_or(segment.from_ns, |way| way.from_ns), segment.to_ns));
        }
        on_its_way = Some(segment).filter(|segment| segment.kind == SegmentKind::Busy);
    }
    worked
}

/// The CPU on which most of the request's work ran.
fn work_cpu(one: &ExplainedRequest) -> u32 {
    let worked = one.segments.iter().filter(|segment| segment.kind == SegmentKind::Work);
    worked.max_by_key(|segment| segment.ns()).and_then(|segment| segment.cpu).unwrap_or(0)
}

/// When the server was done with a request. TCP may hold back the answer for longer.
fn served_ns(one: &ExplainedRequest) -> u64 {
    let last = one.segments.iter().rposition(|segment| segment.kind != SegmentKind::TcpOut);
    last.map_or(one.arrived_ns, |last| one.segments[last].to_ns)
}

/// Sums up the request's own time, in total and outside of its slots.
fn own_time(
    one: &ExplainedRequest,
    slots: &[(u64, u64)],
    is_kept: impl Fn(&Segment) -> bool,
) -> OwnTime {
    let mut own = OwnTime::default();
    // Until a thread has worked for this request, its waits belong to the requests for which it
    // works.
    let mut begun: Vec<u32> = Vec::new();
    for segment in &one.segments {
        let ns = segment.ns();
        let first = slots.partition_point(|(_, to_ns)| *to_ns <= segment.from_ns);
        let during = slots[first..].iter().take_while(|(from_ns, _)| *from_ns < segment.to_ns);
        let in_slot_ns =
            saturating_sum(during.map(|&(from_ns, to_ns)| segment.within(from_ns, to_ns))).min(ns);
        let (all_ns, off_slot_ns) = match segment.kind {
            SegmentKind::Work => {
                if !begun.contains(&segment.thread) {
                    begun.push(segment.thread);
                }
                (ns, ns - in_slot_ns)
            }
            _ if is_kept(segment) => (in_slot_ns, in_slot_ns),
            kind if is_need_of_request(kind) && begun.contains(&segment.thread) => {
                (ns, ns - in_slot_ns)
            }
            _ => continue,
        };
        own.all_ns = own.all_ns.saturating_add(all_ns);
        own.off_slot_ns = own.off_slot_ns.saturating_add(off_slot_ns);
    }
    own
}

/// Whether a thread that serves other requests keeps this request waiting.
fn is_kept_by(segment: &Segment, threads: &BTreeSet<u32>) -> bool {
    match segment.kind {
        SegmentKind::Preempted(blocker) | SegmentKind::Lock(blocker) => {
            threads.contains(&blocker.thread) && blocker.thread != segment.thread
        }
        _ => false,
    }
}

/// Whether the segment is a wait for something that the request itself needs.
fn is_need_of_request(kind: SegmentKind) -> bool {
    matches!(
        kind,
        SegmentKind::Io(..)
            | SegmentKind::Fault
            | SegmentKind::Lock(_)
            | SegmentKind::LockOfUnknown
            | SegmentKind::Sleep(_)
            | SegmentKind::Wait(_)
            | SegmentKind::Stall(_)
    )
}
