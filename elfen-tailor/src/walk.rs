//! Explains one request: walks from its answer back to its arrival, and divides its time into
//! segments without a gap or an overlap.
//!
//! From the answer back to the read, the walk follows wake-ups. If a thread slept because another
//! thread worked for it, the walk continues in that thread. Before the read, the walk explains why
//! the thread that will read the request did not read it yet.

use elfen_rt::signal::event::Stall;

use crate::calls::{WaitTarget, waits_for};
use crate::request::{Request, Requests};
use crate::runtime::{Activity, Role};
use crate::segment::{Segment, SegmentKind, saturating_sum};
use crate::timeline::{Sleep, State, Timeline, Waker};
use crate::trace::{MARKS_ALONE, Trace};

/// If a CPU idles for longer although a thread could run on it, the thread counts as throttled.
const THROTTLED_NS: u64 = 1_000_000;
/// The most wake-ups that are followed at one moment. Threads may wake each other in a circle.
const HOPS_MAX: u32 = 16;
/// Shorter page faults count as work, because they do not explain a tail.
const LEAST_FAULT_NS: u64 = 2_000;
/// Less stolen time cannot be distinguished from rounding.
const LEAST_STOLEN_NS: u64 = 10_000;

#[derive(Debug)]
pub struct Walk<'a> {
    trace: &'a Trace,
    timeline: &'a Timeline,
    requests: &'a Requests,
}

impl<'a> Walk<'a> {
    pub fn new(trace: &'a Trace, timeline: &'a Timeline, requests: &'a Requests) -> Self {
        Self { trace, timeline, requests }
    }

    /// The segments of a request, from its arrival to its end. Returns `None` if they do not sum up
    /// to its latency, which happens only in damaged traces.
    pub fn explain(&self, request: &Request) -> Option<Vec<Segment>> {
        let mut back = Vec::new();
        if self.trace.head.detail == MARKS_ALONE {
            return Some(segments_of_marks(request));
        }
        // Usually the bytes leave before the call that writes them returns.
        let written_ns = request.sent_ns.max(request.read_ns).min(request.ended_ns);
        push(&mut back, written_ns, request.ended_ns, SegmentKind::TcpOut, request.sender, None);
        self.walk_back(request, request.sender, request.read_ns, written_ns, &mut back);
        self.walk_back(request, request.reader, request.arrived_ns, request.read_ns, &mut back);
        self.apply_stalls(&mut back);
        self.apply_runtime(&mut back);
        back.reverse();
        if self.is_marked() {
            for segment in back.iter_mut().filter(|segment| segment.kind == SegmentKind::Queue) {
                let owner = self.requests.owner_at(segment.thread, segment.to_ns);
                segment.behind = owner.and_then(|owner| owner.of).map(|(_, request)| request);
            }
        }
        back.dedup_by(|next, before| {
            let of = |one: &Segment| (one.kind, one.thread, one.cpu, one.behind);
            let goes_on = of(next) == of(before);
            if goes_on {
                before.to_ns = next.to_ns;
            }
            goes_on
        });
        let covered = saturating_sum(back.iter().map(Segment::ns));
        (covered == request.latency_ns()).then_some(back)
    }

    /// Applies stalls that the kernel reports, which are more exact than the system call.
    fn apply_stalls(&self, back: &mut Vec<Segment>) {
        let stalls = &self.timeline.stalls;
        if stalls.is_empty() {
            return;
        }
        for segment in back.clone() {
            for one in stalls.of(segment.thread, segment.from_ns, segment.to_ns) {
                // A wait for memory stays a wait for memory, even if it includes waits for locks.
                let waits = |other: &Segment| {
                    other.thread == segment.thread
                        && match other.kind {
                            SegmentKind::Work
                            | SegmentKind::Busy
                            | SegmentKind::Wait(_)
                            | SegmentKind::Io(..) => true,
                            SegmentKind::Stall(Stall::Contention(_)) => {
                                !matches!(one.what, Stall::Contention(_))
                            }
                            _ => false,
                        }
                };
                let (from_ns, to_ns) =
                    (one.from_ns.max(segment.from_ns), one.to_ns.min(segment.to_ns));
                replace_span(back, from_ns, to_ns, SegmentKind::Stall(one.what), waits);
            }
        }
        self.apply_faults(back);
    }

    /// Marks the rest of page faults. A fault that read from a disk is already an `Io` segment.
    fn apply_faults(&self, back: &mut Vec<Segment>) {
        for piece in std::mem::take(back) {
            let Segment { from_ns, to_ns, kind, thread, cpu, .. } = piece;
            let mut at_ns = to_ns;
            // A thread that slept outside of any system call slept in a page fault.
            if is_on_cpu(&piece) || kind == SegmentKind::Wait(None) {
                let faults = self.timeline.stalls.faults(thread, from_ns, to_ns);
                for &(since_ns, ended_ns) in faults.iter().rev() {
                    let begin_ns = since_ns.max(from_ns);
                    let end_ns = ended_ns.min(at_ns);
                    if ended_ns - since_ns >= LEAST_FAULT_NS && begin_ns < end_ns {
                        push(back, end_ns, at_ns, kind, thread, cpu);
                        push(back, begin_ns, end_ns, SegmentKind::Fault, thread, cpu);
                        at_ns = begin_ns;
                    }
                }
            }
            push(back, from_ns, at_ns, kind, thread, cpu);
        }
    }

    /// Applies pauses that a JVM reports, which are more exact than the states of its threads.
    fn apply_runtime(&self, back: &mut Vec<Segment>) {
        let runtime = &self.timeline.runtime;
        for segment in back.iter_mut() {
            // If a JVM's internal thread holds the lock or the CPU, that thread's job is the cause.
            let (SegmentKind::Preempted(blocker) | SegmentKind::Lock(blocker)) = segment.kind
            else {
                continue;
            };
            match self.role(blocker.thread, segment.from_ns) {
                Some(Role::Compiles) => segment.kind = SegmentKind::Jit,
                Some(Role::Collects) => segment.kind = SegmentKind::Gc,
                Some(Role::Halts) => segment.kind = SegmentKind::Pause([0; 16]),
                None => {}
            }
        }
        if runtime.is_empty() {
            return;
        }
        let (Some(last), Some(first)) = (back.first(), back.last()) else { return };
        let from_ns = first.from_ns;
        let to_ns = last.to_ns;
        for pause in runtime.pauses(from_ns, to_ns) {
            let kind = match pause.what {
                Activity::Gc => SegmentKind::Gc,
                Activity::Safepoint(operation) => SegmentKind::Pause(operation),
                Activity::ClassLoad => SegmentKind::ClassLoad,
            };
            let waits = |segment: &Segment| {
                matches!(
                    segment.kind,
                    SegmentKind::Lock(_)
                        | SegmentKind::LockOfUnknown
                        | SegmentKind::Sleep(_)
                        | SegmentKind::Pause(_)
                )
            };
            replace_span(back, pause.from_ns, pause.to_ns, kind, waits);
        }
        for segment in back.clone() {
            // Either the holder of the lock loads classes, or the thread itself does.
            let thread = match segment.kind {
                SegmentKind::Lock(holder) => holder.thread,
                SegmentKind::Work | SegmentKind::Busy => segment.thread,
                _ => continue,
            };
            for class in runtime.classes(thread, segment.from_ns, segment.to_ns) {
                let is_it = |other: &Segment| {
                    other.kind == segment.kind && segment.within(other.from_ns, other.to_ns) > 0
                };
                replace_span(back, class.from_ns, class.to_ns, SegmentKind::ClassLoad, is_it);
            }
        }
    }

    /// Whether the service reports its requests itself, by marks.
    fn is_marked(&self) -> bool {
        self.trace.head.port == 0
    }

    /// Walks back from `to_ns` to `from_ns`, beginning in `thread`.
    fn walk_back(
        &self,
        request: &Request,
        mut thread: u32,
        from_ns: u64,
        to_ns: u64,
        out: &mut Vec<Segment>,
    ) {
        let mut at_ns = to_ns;
        let mut hops = 0;
        while at_ns > from_ns {
            let Some((stretch, next)) = self.timeline.state_before(thread, at_ns) else {
                push(out, from_ns, at_ns, SegmentKind::Unknown, thread, None);
                return;
            };
            let begin_ns = stretch.from_ns.max(from_ns);
            match stretch.state {
                State::Running { cpu } => {
                    self.push_running(request, thread, cpu, (begin_ns, at_ns), out)
                }
                State::Runnable { preempted } => {
                    self.push_runnable(thread, preempted, (begin_ns, at_ns), out);
                }
                State::Sleeping(sleep) => {
                    // If the sleep ends here, its waker ended it. If the sleep goes on, its waker
                    // does not matter yet.
                    let woken = next.is_none_or(|next| next.from_ns <= at_ns);
                    // A service that reports its arrivals itself handles a request from its arrival
                    // on.
                    let in_service = at_ns > request.read_ns || self.is_marked();
                    let waker = sleep.waker.filter(|_| woken && in_service);
                    let waker =
                        waker.filter(|waker| self.explains_sleep(thread, &sleep, *waker, at_ns));
                    let is_lock = self.waits_for_lock(request, thread, &sleep, stretch.from_ns);
                    if let Some(waker) = waker.filter(|_| !is_lock && hops < HOPS_MAX) {
                        thread = waker.thread;
                        hops += 1;
                        continue;
                    }
                    let kind = self.sleep_kind(&sleep, request, stretch.from_ns, at_ns);
                    push(out, begin_ns, at_ns, kind, thread, None);
                }
            }
            at_ns = begin_ns;
            hops = 0;
        }
    }

    /// Whether the waker's activity explains a sleep. The waker must be a thread of the service,
    /// and not an interrupt that hit the thread by chance.
    fn explains_sleep(&self, thread: u32, sleep: &Sleep, waker: Waker, at_ns: u64) -> bool {
        waker.thread != thread
            && waker.thread != 0
            && !sleep.iowait
            && !sleep.stopped
            && sleep
                .call
                .is_none_or(|call| matches!(waits_for(call), WaitTarget::Lock | WaitTarget::Input))
            && self.trace.processes.contains(&waker.process)
            && !self.is_vm_thread(waker.thread, at_ns)
    }

    /// Whether a sleep on a futex is a wait for a lock. It is, if the sleeping thread both reads
    /// and answers the request, and has read it. Then no other thread works for this request.
    fn waits_for_lock(&self, request: &Request, thread: u32, sleep: &Sleep, since_ns: u64) -> bool {
        let futex = sleep.call.is_some_and(|call| waits_for(call) == WaitTarget::Lock);
        futex
            && thread == request.reader
            && request.reader == request.sender
            && since_ns >= request.read_ns
    }

    /// The job that a thread does for its JVM, if any.
    fn role(&self, thread: u32, at_ns: u64) -> Option<Role> {
        Role::of(&self.trace.name_of(self.trace.identify(thread, at_ns)))
    }

    fn is_vm_thread(&self, thread: u32, at_ns: u64) -> bool {
        self.role(thread, at_ns) == Some(Role::Halts)
    }

    fn sleep_kind(
        &self,
        sleep: &Sleep,
        request: &Request,
        since_ns: u64,
        at_ns: u64,
    ) -> SegmentKind {
        if sleep.stopped {
            return SegmentKind::Stopped;
        }
        if sleep.is_unknown {
            return SegmentKind::Unknown;
        }
        if sleep.iowait {
            return SegmentKind::Io(sleep.call, sleep.function);
        }
        let Some(call) = sleep.call else { return SegmentKind::Wait(None) };
        match waits_for(call) {
            WaitTarget::Storage => SegmentKind::Io(Some(call), sleep.function),
            WaitTarget::Lock => match sleep.waker {
                Some(waker) if self.is_vm_thread(waker.thread, at_ns) => {
                    SegmentKind::Pause([0; 16])
                }
                Some(waker) if self.trace.processes.contains(&waker.process) => {
                    SegmentKind::Lock(self.trace.identify(waker.thread, at_ns))
                }
                _ => SegmentKind::LockOfUnknown,
            },
            WaitTarget::Time => SegmentKind::Sleep(call),
            // A part of the answer has left and more follows, so the client is slow to read it.
            WaitTarget::Input if since_ns > request.sent_ns => SegmentKind::TcpOut,
            WaitTarget::Input | WaitTarget::Other => SegmentKind::Wait(Some(call)),
        }
    }

    fn push_runnable(
        &self,
        thread: u32,
        preempted: bool,
        span: (u64, u64),
        out: &mut Vec<Segment>,
    ) {
        let (from_ns, to_ns) = span;
        let Some(cpu) = self.timeline.next_cpu(thread, to_ns) else {
            return push(out, from_ns, to_ns, SegmentKind::Unknown, thread, None);
        };
        let runs: Vec<_> = self.timeline.runs(cpu, from_ns, to_ns).collect();
        let mut at_ns = to_ns;
        for (begin_ns, end_ns, running, stolen_ns) in runs.into_iter().rev() {
            // Before the first recorded switch, the thread on the CPU is unknown.
            push(out, end_ns, at_ns, SegmentKind::Unknown, thread, Some(cpu));
            let stolen_ns = if running == 0 { 0 } else { above_rounding(stolen_ns) };
            let kind = match running {
                0 if preempted && end_ns - begin_ns >= THROTTLED_NS => SegmentKind::Throttled,
                0 => SegmentKind::Wake,
                other if other == thread => SegmentKind::Wake,
                other => SegmentKind::Preempted(self.trace.identify(other, begin_ns)),
            };
            push(out, begin_ns + stolen_ns, end_ns, kind, thread, Some(cpu));
            push(out, begin_ns, begin_ns + stolen_ns, SegmentKind::Steal, thread, Some(cpu));
            at_ns = begin_ns;
        }
        push(out, from_ns, at_ns, SegmentKind::Unknown, thread, Some(cpu));
    }

    /// Splits a running state by the requests for which the thread worked, and cuts out interrupts
    /// and stolen time.
    fn push_running(
        &self,
        request: &Request,
        thread: u32,
        cpu: u32,
        span: (u64, u64),
        out: &mut Vec<Segment>,
    ) {
        let (from_ns, to_ns) = span;
        let mut pieces: Vec<Segment> = Vec::new();
        let mut at_ns = to_ns;
        while at_ns > from_ns {
            let owner = self.requests.owner_at(thread, at_ns);
            let begin_ns = owner.map_or(from_ns, |owner| owner.from_ns.max(from_ns));
            let own = (request.arrived_ns, request.connection);
            let kind = match owner {
                Some(owner) if owner.of == Some(own) && owner.read => SegmentKind::Work,
                Some(owner) if owner.of.is_some() && owner.of != Some(own) && owner.read => {
                    SegmentKind::Queue
                }
                // A thread without sockets is attributed to the request of the thread that it
                // wakes.
                _ if at_ns > request.read_ns => SegmentKind::Work,
                _ if self.is_marked() && !self.requests.has_owners(thread) => SegmentKind::Work,
                _ => SegmentKind::Busy,
            };
            push(&mut pieces, begin_ns, at_ns, kind, thread, Some(cpu));
            at_ns = begin_ns;
        }
        for one in self.timeline.interrupts(cpu, from_ns, to_ns) {
            let kind = if one.soft {
                SegmentKind::Softirq(one.number)
            } else {
                SegmentKind::Irq(one.number)
            };
            replace_span(&mut pieces, one.from_ns, one.to_ns, kind, is_on_cpu);
        }
        for (begin_ns, _, _, stolen_ns) in self.timeline.runs(cpu, from_ns, to_ns) {
            replace_span(
                &mut pieces,
                begin_ns,
                begin_ns + above_rounding(stolen_ns),
                SegmentKind::Steal,
                is_on_cpu,
            );
        }
        out.append(&mut pieces);
    }
}

fn above_rounding(stolen_ns: u64) -> u64 {
    if stolen_ns >= LEAST_STOLEN_NS { stolen_ns } else { 0 }
}

/// The segments of a request for which only the service's marks are known.
fn segments_of_marks(request: &Request) -> Vec<Segment> {
    let Request { arrived_ns, read_ns, ended_ns, reader, sender, .. } = *request;
    let mut segments = Vec::new();
    push(&mut segments, arrived_ns, read_ns, SegmentKind::Queue, reader, None);
    push(&mut segments, read_ns, ended_ns, SegmentKind::Work, sender, None);
    segments
}

fn push(
    out: &mut Vec<Segment>,
    from_ns: u64,
    to_ns: u64,
    kind: SegmentKind,
    thread: u32,
    cpu: Option<u32>,
) {
    if from_ns < to_ns {
        out.push(Segment { from_ns, to_ns, kind, thread, cpu, behind: None });
    }
}

fn is_on_cpu(segment: &Segment) -> bool {
    matches!(segment.kind, SegmentKind::Work | SegmentKind::Queue | SegmentKind::Busy)
}

/// Replaces a span of some pieces by another kind. Pieces stay in descending order of time.
fn replace_span(
    pieces: &mut Vec<Segment>,
    from_ns: u64,
    to_ns: u64,
    kind: SegmentKind,
    which: impl Fn(&Segment) -> bool,
) {
    let before = std::mem::take(pieces);
    for piece in before {
        if !which(&piece) || piece.within(from_ns, to_ns) == 0 {
            pieces.push(piece);
            continue;
        }
        let begin_ns = from_ns.max(piece.from_ns);
        let end_ns = to_ns.min(piece.to_ns);
        push(pieces, end_ns, piece.to_ns, piece.kind, piece.thread, piece.cpu);
        push(pieces, begin_ns, end_ns, kind, piece.thread, piece.cpu);
        push(pieces, piece.from_ns, begin_ns, piece.kind, piece.thread, piece.cpu);
    }
}
