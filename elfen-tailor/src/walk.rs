//! Explains one request: from its answer back to its arrival, as segments that cover its time
//! without a gap or an overlap.
//!
//! From the answer back to where it was read, the walk follows who woke whom: a thread that slept
//! because another worked for it is explained by that other. Before it was read, the thread that
//! was to read it tells why it did not yet.

use elfen_rt::signal::event::Stall;

use crate::calls::{For, waits_for};
use crate::request::{Request, Requests};
use crate::runtime::{Role, What};
use crate::segment::{Kind, Segment, total};
use crate::timeline::{Sleep, State, Timeline, Waker};
use crate::trace::{MARKS_ALONE, Tale};

/// Idle for longer with a thread that could run there, a CPU is kept from it.
const THROTTLED_NS: u64 = 1_000_000;
/// Wake-ups that are followed at one moment: a circle of threads that wake each other ends.
const MOST_HOPS: u32 = 16;
/// Shorter page faults are work like any other: they explain no tail.
const LEAST_FAULT_NS: u64 = 2_000;
/// Less stolen time than this can't be told from rounding.
const LEAST_STOLEN_NS: u64 = 10_000;

#[derive(Debug)]
pub struct Walk<'a> {
    tale: &'a Tale,
    timeline: &'a Timeline,
    requests: &'a Requests,
}

impl<'a> Walk<'a> {
    pub fn new(tale: &'a Tale, timeline: &'a Timeline, requests: &'a Requests) -> Self {
        Self { tale, timeline, requests }
    }

    /// A request's segments, from its arrival to its end; `None` if they do not sum up to its
    /// latency, as in a trace that was damaged.
    pub fn explain(&self, request: &Request) -> Option<Vec<Segment>> {
        let mut back = Vec::new();
        if self.tale.head.detail == MARKS_ALONE {
            return Some(as_told(request));
        }
        // Usually the bytes leave before the call that writes them returns.
        let written_ns = request.sent_ns.max(request.read_ns).min(request.ended_ns);
        push(&mut back, written_ns, request.ended_ns, Kind::TcpOut, request.sender, None);
        self.back(request, request.sender, request.read_ns, written_ns, &mut back);
        self.back(request, request.reader, request.arrived_ns, request.read_ns, &mut back);
        self.by_stalls(&mut back);
        self.by_runtime(&mut back);
        back.reverse();
        if self.is_marked() {
            for segment in back.iter_mut().filter(|segment| segment.kind == Kind::Queue) {
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
        let covered = total(back.iter().map(Segment::ns));
        (covered == request.latency_ns()).then_some(back)
    }

    /// What the kernel says that a thread waited for is surer than the call that it was in.
    fn by_stalls(&self, back: &mut Vec<Segment>) {
        let stalls = &self.timeline.stalls;
        if stalls.is_empty() {
            return;
        }
        for segment in back.clone() {
            for one in stalls.of(segment.thread, segment.from_ns, segment.to_ns) {
                // What is memory's stays so, though it waits for locks meanwhile.
                let waits = |other: &Segment| {
                    other.thread == segment.thread
                        && match other.kind {
                            Kind::Work | Kind::Busy | Kind::Wait(_) | Kind::Io(..) => true,
                            Kind::Stall(Stall::Contention(_)) => {
                                !matches!(one.what, Stall::Contention(_))
                            }
                            _ => false,
                        }
                };
                let (from_ns, to_ns) =
                    (one.from_ns.max(segment.from_ns), one.to_ns.min(segment.to_ns));
                cut(back, from_ns, to_ns, Kind::Stall(one.what), waits);
            }
        }
        self.by_faults(back);
    }

    /// What is left of the time in which a thread's memory was seen to; a disk's has its own name.
    fn by_faults(&self, back: &mut Vec<Segment>) {
        for piece in std::mem::take(back) {
            let Segment { from_ns, to_ns, kind, thread, cpu, .. } = piece;
            let mut at_ns = to_ns;
            // Whoever slept outside of a call was in one of these.
            if ran(&piece) || kind == Kind::Wait(None) {
                let faults = self.timeline.stalls.faults(thread, from_ns, to_ns);
                for &(since_ns, ended_ns) in faults.iter().rev() {
                    let (begin_ns, end_ns) = (since_ns.max(from_ns), ended_ns.min(at_ns));
                    if ended_ns - since_ns >= LEAST_FAULT_NS && begin_ns < end_ns {
                        push(back, end_ns, at_ns, kind, thread, cpu);
                        push(back, begin_ns, end_ns, Kind::Fault, thread, cpu);
                        at_ns = begin_ns;
                    }
                }
            }
            push(back, from_ns, at_ns, kind, thread, cpu);
        }
    }

    /// What a JVM says of a time is surer than what its threads look like from outside.
    fn by_runtime(&self, back: &mut Vec<Segment>) {
        let runtime = &self.timeline.runtime;
        for segment in back.iter_mut() {
            // A lock of theirs is one that they hold while they do it.
            let (Kind::Preempted(who) | Kind::Lock(who)) = segment.kind else { continue };
            match self.role(who.thread, segment.from_ns) {
                Some(Role::Compiles) => segment.kind = Kind::Jit,
                Some(Role::Collects) => segment.kind = Kind::Gc,
                Some(Role::Halts) => segment.kind = Kind::Pause([0; 16]),
                None => {}
            }
        }
        if runtime.is_empty() {
            return;
        }
        let (Some(last), Some(first)) = (back.first(), back.last()) else { return };
        let (from_ns, to_ns) = (first.from_ns, last.to_ns);
        for pause in runtime.pauses(from_ns, to_ns) {
            let kind = match pause.what {
                What::Gc => Kind::Gc,
                What::Safepoint(operation) => Kind::Pause(operation),
                What::ClassLoad => Kind::ClassLoad,
            };
            let waits = |segment: &Segment| {
                matches!(
                    segment.kind,
                    Kind::Lock(_) | Kind::LockOfUnknown | Kind::Sleep(_) | Kind::Pause(_)
                )
            };
            cut(back, pause.from_ns, pause.to_ns, kind, waits);
        }
        for segment in back.clone() {
            // Who holds the lock loads classes, or the thread itself does.
            let thread = match segment.kind {
                Kind::Lock(holder) => holder.thread,
                Kind::Work | Kind::Busy => segment.thread,
                _ => continue,
            };
            for class in runtime.classes(thread, segment.from_ns, segment.to_ns) {
                let is_it = |other: &Segment| {
                    other.kind == segment.kind && segment.within(other.from_ns, other.to_ns) > 0
                };
                cut(back, class.from_ns, class.to_ns, Kind::ClassLoad, is_it);
            }
        }
    }

    /// The service says itself what its requests are.
    fn is_marked(&self) -> bool {
        self.tale.head.port == 0
    }

    /// Goes back from one time to another, beginning in `thread`.
    fn back(
        &self,
        of: &Request,
        mut thread: u32,
        from_ns: u64,
        to_ns: u64,
        out: &mut Vec<Segment>,
    ) {
        let (mut at_ns, mut hops) = (to_ns, 0);
        while at_ns > from_ns {
            let Some((stretch, next)) = self.timeline.before(thread, at_ns) else {
                push(out, from_ns, at_ns, Kind::Unknown, thread, None);
                return;
            };
            let begin_ns = stretch.from_ns.max(from_ns);
            match stretch.state {
                State::Running { cpu } => self.running(of, thread, cpu, (begin_ns, at_ns), out),
                State::Runnable { preempted } => {
                    self.runnable(thread, preempted, (begin_ns, at_ns), out);
                }
                State::Sleeping(sleep) => {
                    // Somebody who slept until now was woken then; one that sleeps on was not.
                    let woken = next.is_none_or(|next| next.from_ns <= at_ns);
                    // What a service says has arrived is in its hands.
                    let in_hands = at_ns > of.read_ns || self.is_marked();
                    let waker = sleep.waker.filter(|_| woken && in_hands);
                    let waker =
                        waker.filter(|waker| self.is_followed(thread, &sleep, *waker, at_ns));
                    let holds = self.waits_for_lock(of, thread, &sleep, stretch.from_ns);
                    if let Some(waker) = waker.filter(|_| !holds && hops < MOST_HOPS) {
                        (thread, hops) = (waker.thread, hops + 1);
                        continue;
                    }
                    let kind = self.slept(&sleep, of, stretch.from_ns, at_ns);
                    push(out, begin_ns, at_ns, kind, thread, None);
                }
            }
            (at_ns, hops) = (begin_ns, 0);
        }
    }

    /// Whether a waker's time explains a sleep: it is the service's own, and no interrupt that
    /// happened to find it.
    fn is_followed(&self, thread: u32, sleep: &Sleep, waker: Waker, at_ns: u64) -> bool {
        waker.thread != thread
            && waker.thread != 0
            && !sleep.iowait
            && !sleep.stopped
            && sleep.call.is_none_or(|call| matches!(waits_for(call), For::Lock | For::Input))
            && self.tale.processes.contains(&waker.process)
            && !self.is_pause(waker.thread, at_ns)
    }

    /// Who has read a request and then sleeps on a futex waits for a lock: what it waits for has
    /// not come from the request.
    fn waits_for_lock(&self, of: &Request, thread: u32, sleep: &Sleep, since_ns: u64) -> bool {
        let futex = sleep.call.is_some_and(|call| waits_for(call) == For::Lock);
        futex && thread == of.reader && of.reader == of.sender && since_ns >= of.read_ns
    }

    /// What a thread does for its JVM.
    fn role(&self, thread: u32, at_ns: u64) -> Option<Role> {
        Role::of(&self.tale.name_of(self.tale.who(thread, at_ns)))
    }

    fn is_pause(&self, thread: u32, at_ns: u64) -> bool {
        self.role(thread, at_ns) == Some(Role::Halts)
    }

    fn slept(&self, sleep: &Sleep, of: &Request, since_ns: u64, at_ns: u64) -> Kind {
        if sleep.stopped {
            return Kind::Stopped;
        }
        if sleep.unseen {
            return Kind::Unknown;
        }
        if sleep.iowait {
            return Kind::Io(sleep.call, sleep.within);
        }
        let Some(call) = sleep.call else { return Kind::Wait(None) };
        match waits_for(call) {
            For::Storage => Kind::Io(Some(call), sleep.within),
            For::Lock => match sleep.waker {
                Some(waker) if self.is_pause(waker.thread, at_ns) => Kind::Pause([0; 16]),
                Some(waker) if self.tale.processes.contains(&waker.process) => {
                    Kind::Lock(self.tale.who(waker.thread, at_ns))
                }
                _ => Kind::LockOfUnknown,
            },
            For::Time => Kind::Sleep(call),
            // Bytes of the answer have left, and more are to follow: the client takes its time.
            For::Input if since_ns > of.sent_ns => Kind::TcpOut,
            For::Input | For::Other => Kind::Wait(Some(call)),
        }
    }

    fn runnable(&self, thread: u32, preempted: bool, span: (u64, u64), out: &mut Vec<Segment>) {
        let (from_ns, to_ns) = span;
        let Some(cpu) = self.timeline.next_cpu(thread, to_ns) else {
            return push(out, from_ns, to_ns, Kind::Unknown, thread, None);
        };
        let runs: Vec<_> = self.timeline.runs(cpu, from_ns, to_ns).collect();
        let mut at_ns = to_ns;
        for (begin_ns, end_ns, runs_there, stolen_ns) in runs.into_iter().rev() {
            // Before the first switch that was seen nobody knows who ran.
            push(out, end_ns, at_ns, Kind::Unknown, thread, Some(cpu));
            let stolen_ns = if runs_there == 0 { 0 } else { counted(stolen_ns) };
            let kind = match runs_there {
                0 if preempted && end_ns - begin_ns >= THROTTLED_NS => Kind::Throttled,
                0 => Kind::Wake,
                other if other == thread => Kind::Wake,
                other => Kind::Preempted(self.tale.who(other, begin_ns)),
            };
            push(out, begin_ns + stolen_ns, end_ns, kind, thread, Some(cpu));
            push(out, begin_ns, begin_ns + stolen_ns, Kind::Steal, thread, Some(cpu));
            at_ns = begin_ns;
        }
        push(out, from_ns, at_ns, Kind::Unknown, thread, Some(cpu));
    }

    /// A running stretch: whom the thread worked for, less interrupts and what was stolen.
    fn running(
        &self,
        of: &Request,
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
            let own = (of.arrived_ns, of.connection);
            let kind = match owner {
                Some(owner) if owner.of == Some(own) && owner.read => Kind::Work,
                Some(owner) if owner.of.is_some() && owner.of != Some(own) && owner.read => {
                    Kind::Queue
                }
                // A thread that touches no socket works for the one that it wakes.
                _ if at_ns > of.read_ns => Kind::Work,
                _ if self.is_marked() && !self.requests.has_owners(thread) => Kind::Work,
                _ => Kind::Busy,
            };
            push(&mut pieces, begin_ns, at_ns, kind, thread, Some(cpu));
            at_ns = begin_ns;
        }
        for one in self.timeline.interrupts(cpu, from_ns, to_ns) {
            let kind = if one.soft { Kind::Softirq(one.number) } else { Kind::Irq(one.number) };
            cut(&mut pieces, one.from_ns, one.to_ns, kind, ran);
        }
        for (begin_ns, _, _, stolen_ns) in self.timeline.runs(cpu, from_ns, to_ns) {
            cut(&mut pieces, begin_ns, begin_ns + counted(stolen_ns), Kind::Steal, ran);
        }
        out.append(&mut pieces);
    }
}

fn counted(stolen_ns: u64) -> u64 {
    if stolen_ns >= LEAST_STOLEN_NS { stolen_ns } else { 0 }
}

/// A request of which nothing is known but what the service says of it.
fn as_told(request: &Request) -> Vec<Segment> {
    let Request { arrived_ns, read_ns, ended_ns, reader, sender, .. } = *request;
    let mut told = Vec::new();
    push(&mut told, arrived_ns, read_ns, Kind::Queue, reader, None);
    push(&mut told, read_ns, ended_ns, Kind::Work, sender, None);
    told
}

fn push(
    out: &mut Vec<Segment>,
    from_ns: u64,
    to_ns: u64,
    kind: Kind,
    thread: u32,
    cpu: Option<u32>,
) {
    if from_ns < to_ns {
        out.push(Segment { from_ns, to_ns, kind, thread, cpu, behind: None });
    }
}

fn ran(segment: &Segment) -> bool {
    matches!(segment.kind, Kind::Work | Kind::Queue | Kind::Busy)
}

/// Makes a span of some pieces something else. Pieces go back in time, and stay so.
fn cut(
    pieces: &mut Vec<Segment>,
    from_ns: u64,
    to_ns: u64,
    kind: Kind,
    which: impl Fn(&Segment) -> bool,
) {
    let before = std::mem::take(pieces);
    for piece in before {
        if !which(&piece) || piece.within(from_ns, to_ns) == 0 {
            pieces.push(piece);
            continue;
        }
        let (begin_ns, end_ns) = (from_ns.max(piece.from_ns), to_ns.min(piece.to_ns));
        push(pieces, end_ns, piece.to_ns, piece.kind, piece.thread, piece.cpu);
        push(pieces, begin_ns, end_ns, kind, piece.thread, piece.cpu);
        push(pieces, piece.from_ns, begin_ns, piece.kind, piece.thread, piece.cpu);
    }
}
