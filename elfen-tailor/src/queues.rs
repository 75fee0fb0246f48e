//! Which queue each request of a service stood in: that of the thread that served it, or, where
//! threads share a CPU, that of the CPU; and whether it is one.
//!
//! Threads on one CPU wait for each other there, and how long is no property of a request: whoever
//! was kept from the CPU together with others then has them before him. So the queues are those
//! under which the least is left aside of all turns: what is done for a request while others have
//! their turn, and waiting for threads that serve others in one's own. Replayed, it would be as it
//! was whatever else has changed, so where much is left aside no change is believed.

use std::collections::BTreeSet;

use crate::explained::Explained;
use crate::segment::{Kind, Segment, total};
use crate::service_slots::{self, Job, Turn};

pub(crate) struct Queues {
    pub(crate) jobs: Vec<Job>,
    pub(crate) turns: Vec<Vec<Turn>>,
    /// By request.
    pub(crate) own: Vec<Own>,
}

/// What a request did or waited for itself, whoever had the CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Own {
    pub(crate) all_ns: u64,
    /// Of that, what no turn of its own explains.
    pub(crate) aside_ns: u64,
}

impl Queues {
    pub(crate) fn of(explained: &[Explained]) -> Self {
        let by_thread: Vec<u32> = explained.iter().map(|one| one.server).collect();
        let threads: BTreeSet<u32> = by_thread.iter().copied().collect();
        let on_thread = |segment: &Segment, thread| segment.thread == thread;
        let threaded = Self::under(explained, &by_thread, on_thread, |segment, _| {
            is_kept_by(segment, &threads)
        });
        if threads.len() < 2 {
            return threaded;
        }
        let by_cpu: Vec<u32> = explained.iter().map(cpu).collect();
        let on_cpu = |segment: &Segment, cpu| segment.cpu == Some(cpu);
        // Who shares a CPU has it in one's own turn for what is no request: to look for the next.
        let shared = Self::under(explained, &by_cpu, on_cpu, |segment, cpu| {
            let shares = matches!(segment.kind, Kind::Preempted(_)) && segment.cpu == Some(cpu);
            is_kept_by(segment, &threads) && !shares
        });
        if shared.aside_ns() < threaded.aside_ns() { shared } else { threaded }
    }

    fn aside_ns(&self) -> u64 {
        total(self.own.iter().map(|own| own.aside_ns))
    }

    fn under(
        explained: &[Explained],
        servers: &[u32],
        is_at: impl Fn(&Segment, u32) -> bool,
        is_kept: impl Fn(&Segment, u32) -> bool,
    ) -> Self {
        let job = |(one, &server): (&Explained, &u32)| Job {
            server,
            arrived_ns: one.arrived_ns,
            worked: worked(one, |segment| is_at(segment, server)),
            served_ns: served_ns(one),
            ended_ns: one.ended_ns,
        };
        let jobs: Vec<Job> = explained.iter().zip(servers).map(job).collect();
        let turns = service_slots::of(&jobs);
        let mut spans: Vec<Vec<(u64, u64)>> = vec![Vec::new(); jobs.len()];
        for turn in turns.iter().flatten() {
            spans[turn.job].push((turn.from_ns, turn.to_ns));
        }
        let own = explained
            .iter()
            .zip(&spans)
            .zip(servers)
            .map(|((one, spans), &server)| own(one, spans, |segment| is_kept(segment, server)));
        Self { own: own.collect(), jobs, turns }
    }
}

/// From when to when it was worked for at its server, which comes to that by way of a call that
/// tells it of a request and one that reads it.
fn worked(one: &Explained, is_there: impl Fn(&Segment) -> bool) -> Vec<(u64, u64)> {
    let mut on_its_way = None::<&Segment>;
    let mut worked = Vec::new();
    for segment in &one.segments {
        if segment.kind == Kind::Work && is_there(segment) {
            let way = on_its_way.filter(|way| way.thread == segment.thread);
            worked.push((way.map_or(segment.from_ns, |way| way.from_ns), segment.to_ns));
        }
        on_its_way = Some(segment).filter(|segment| segment.kind == Kind::Busy);
    }
    worked
}

/// Where it was worked for.
fn cpu(one: &Explained) -> u32 {
    let worked = one.segments.iter().filter(|segment| segment.kind == Kind::Work);
    worked.max_by_key(|segment| segment.ns()).and_then(|segment| segment.cpu).unwrap_or(0)
}

/// The server is done with a request whose answer TCP holds.
fn served_ns(one: &Explained) -> u64 {
    let last = one.segments.iter().rposition(|segment| segment.kind != Kind::TcpOut);
    last.map_or(one.arrived_ns, |last| one.segments[last].to_ns)
}

/// What a request did itself, in its turns and aside of them.
fn own(one: &Explained, turns: &[(u64, u64)], is_kept: impl Fn(&Segment) -> bool) -> Own {
    let mut own = Own::default();
    // Before a thread has worked for a request, what it waits for is the matter of those that it
    // works for meanwhile.
    let mut begun: Vec<u32> = Vec::new();
    for segment in &one.segments {
        let ns = segment.ns();
        let first = turns.partition_point(|(_, to_ns)| *to_ns <= segment.from_ns);
        let during = turns[first..].iter().take_while(|(from_ns, _)| *from_ns < segment.to_ns);
        let in_turn_ns =
            total(during.map(|&(from_ns, to_ns)| segment.within(from_ns, to_ns))).min(ns);
        let (all_ns, aside_ns) = match segment.kind {
            Kind::Work => {
                if !begun.contains(&segment.thread) {
                    begun.push(segment.thread);
                }
                (ns, ns - in_turn_ns)
            }
            _ if is_kept(segment) => (in_turn_ns, in_turn_ns),
            kind if waits(kind) && begun.contains(&segment.thread) => (ns, ns - in_turn_ns),
            _ => continue,
        };
        own.all_ns = own.all_ns.saturating_add(all_ns);
        own.aside_ns = own.aside_ns.saturating_add(aside_ns);
    }
    own
}

/// By a thread that serves others.
fn is_kept_by(segment: &Segment, threads: &BTreeSet<u32>) -> bool {
    match segment.kind {
        Kind::Preempted(who) | Kind::Lock(who) => {
            threads.contains(&who.thread) && who.thread != segment.thread
        }
        _ => false,
    }
}

/// For something that a request asked for.
fn waits(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::Io(..)
            | Kind::Fault
            | Kind::Lock(_)
            | Kind::LockOfUnknown
            | Kind::Sleep(_)
            | Kind::Wait(_)
            | Kind::Stall(_)
    )
}
