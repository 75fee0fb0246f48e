//! Builds a made-up trace, event by event.

use elfen_rt::signal::event::{Event, EventKind, Switch};
use elfen_rt::signal::mark::{Mark, Step};
use elfen_tailor::account::Account;
use elfen_tailor::segment::cause_name;
use elfen_tailor::trace::{Header, Note, ThreadName, Trace};

pub(crate) const MS: u64 = 1_000_000;
pub(crate) const SERVICE: u32 = 10;
pub(crate) const WORKER: u32 = 11;
pub(crate) const HOG: u32 = 99;
pub(crate) const EPOLL: u16 = 281;
pub(crate) const FUTEX: u16 = 202;
pub(crate) const FSYNC: u16 = 74;

pub(crate) struct TraceBuilder {
    pub(crate) trace: Trace,
}

impl TraceBuilder {
    pub(crate) fn new() -> Self {
        let head = Header { cpus: 2, port: 80, began_ns: 1, ..Header::default() };
        let mut trace = Trace::new(head);
        let named =
            |(thread, name): (u32, &str)| ThreadName { thread, at_ns: 1, name: name.to_owned() };
        let names = [(SERVICE, "service"), (WORKER, "worker"), (HOG, "hog"), (12, "VM Thread")];
        trace.add_note(Note::Names(names.map(named).into()));
        trace.add_note(Note::Processes(vec![SERVICE]));
        Self { trace }
    }

    pub(crate) fn event(
        &mut self,
        cpu: usize,
        at_ns: u64,
        thread: u32,
        kind: EventKind,
    ) -> &mut Self {
        self.trace.events[cpu].push(Event { at_ns, thread, kind });
        self
    }

    /// Switches from `previous`, which sleeps in a call or is preempted, to `next`.
    pub(crate) fn switch(
        &mut self,
        at: u64,
        previous: u32,
        call: Option<u16>,
        next: u32,
    ) -> &mut Self {
        self.switch_on(0, at, previous, call, next, u8::from(call.is_some()))
    }

    pub(crate) fn switch_on(
        &mut self,
        cpu: usize,
        at_ns: u64,
        previous: u32,
        call: Option<u16>,
        thread: u32,
        state: u8,
    ) -> &mut Self {
        let process = SERVICE;
        let (preempted, iowait, stolen_ns) = (state == 0, false, 0);
        let switch = Switch { previous, process, preempted, iowait, state, call, stolen_ns };
        self.event(cpu, at_ns, thread, EventKind::Switch(switch))
    }

    pub(crate) fn wake(
        &mut self,
        at: u64,
        thread: u32,
        waker: u32,
        waker_process: u32,
    ) -> &mut Self {
        let kind = EventKind::Waking { waker, waker_process, process: SERVICE };
        self.event(0, at, thread, kind)
    }

    pub(crate) fn ready(&mut self, at: u64, connection: u64) -> &mut Self {
        self.event(0, at, 0, EventKind::Ready { connection, bytes: 5 })
    }

    pub(crate) fn read(&mut self, at: u64, connection: u64) -> &mut Self {
        let kind = EventKind::Received { connection, bytes: 5, peek: false };
        self.event(0, at, SERVICE, kind)
    }

    pub(crate) fn answer(&mut self, at: u64, connection: u64) -> &mut Self {
        self.event(0, at, SERVICE, EventKind::Transmitted { connection, end: 1 });
        self.event(0, at + 1, SERVICE, EventKind::Sent { connection, end: 1 })
    }

    /// A service that reports its requests itself, by marks.
    pub(crate) fn of_marks() -> Self {
        let mut builder = Self::new();
        builder.trace.head.port = 0;
        builder
    }

    /// A thread reports a step of a request on lane 0.
    pub(crate) fn mark(&mut self, at_ns: u64, thread: u32, request: u64, step: Step) -> &mut Self {
        let mark = Mark { at_ns, thread, request, step };
        self.trace.marks.entry(0).or_default().push(mark);
        self
    }

    /// The causes of the last request, in the order of time.
    pub(crate) fn last(&self) -> Vec<(String, u64)> {
        let account = Account::of(&self.trace);
        let last = account.explained.last().expect("a complete request");
        let covered: u64 = last.segments.iter().map(|segment| segment.ns()).sum();
        assert_eq!(covered, last.latency_ns());
        last.segments.iter().map(|s| (cause_name(s.kind, &self.trace), s.ns())).collect()
    }
}
