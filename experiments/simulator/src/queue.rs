//! The queues of a simulation. A core with a queue of its own needs no event list. If several cores
//! share a queue, their order matters, so they are simulated event by event.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::model::Model;
use super::outcome::Outcome;
use super::pair::{Control, Pair};
use super::source::Source;
use super::trace::Served;
use super::windows::Windows;

/// Simulates core `core` of `model` with a queue of its own.
///
/// One worker serves the requests in the order of arrival. A request starts when it arrives or, if
/// that is later, when the previous request ends. Each request is simulated to its end before the
/// following request starts, so a core takes constant memory.
pub(super) fn run_own(
    model: &Model,
    core: u64,
    mut source: Source,
    sink: &mut impl FnMut(&Served),
) -> Outcome {
    let mut outcome = Outcome::default();
    let mut windows = model.watch.map(Windows::new);
    let mut pair = Pair::new(model.batch, model.control);
    let mut free_ns = 0;
    let mut next = source.next();
    while let Some((arrived_ns, demand_ns)) = next {
        next = source.next();
        let started_ns = arrived_ns.max(free_ns);
        if free_ns < started_ns {
            pair.idle(free_ns, started_ns);
        }
        if let Some(policy) = windows.as_mut().and_then(|windows| windows.policy_at(started_ns)) {
            pair.control = Control::Policy(policy);
        }
        let overlapped_ns = pair.tally.overlapped_ns;
        pair.begin(outcome.requests + 1, started_ns, demand_ns);
        let waiting = |now_ns| next.is_some_and(|(arrives_ns, _)| arrives_ns <= now_ns);
        let ended_ns = pair.finish(waiting).expect("a request has begun");
        outcome.record(arrived_ns, started_ns, ended_ns);
        if let Some(windows) = &mut windows {
            windows.finished(ended_ns, ended_ns - arrived_ns, &mut outcome);
        }
        let overlapped_ns = pair.tally.overlapped_ns - overlapped_ns;
        sink(&Served { core, arrived_ns, started_ns, ended_ns, demand_ns, overlapped_ns });
        free_ns = ended_ns;
    }
    let end_ns = source.end_ns().max(free_ns);
    pair.idle(free_ns, end_ns);
    if let Some(windows) = &mut windows {
        windows.judge(&mut outcome);
    }
    outcome.close_core(&pair.tally, end_ns);
    outcome
}

#[derive(Clone, Copy, Debug)]
struct Request {
    arrived_ns: u64,
    demand_ns: u64,
}

#[derive(Debug)]
struct Core {
    /// The state at the core's last event.
    pair: Pair,
    /// The state at the end of the running request.
    ended: Pair,
    end_ns: u64,
    /// The number of the current plan. An entry of `ends` with another number is void.
    plan: u64,
    request: Request,
    started_ns: u64,
    overlapped_ns: u64,
    idle_since_ns: u64,
    /// Whether the core is in `queue_dependent`.
    listed: bool,
}

struct Cores<'a, S> {
    model: &'a Model,
    first_core: u64,
    control: Control,
    cores: Vec<Core>,
    idle: VecDeque<usize>,
    /// The time of each planned end, its core, and the number of its plan.
    ends: BinaryHeap<Reverse<(u64, usize, u64)>>,
    queue: VecDeque<Request>,
    next: Option<Request>,
    /// Cores whose next poll may depend on the queue.
    queue_dependent: Vec<usize>,
    started: u64,
    windows: Option<Windows>,
    outcome: Outcome,
    sink: &'a mut S,
}

/// Simulates one machine whose cores share a queue and are numbered from `first_core`.
///
/// Events are arrivals and ends of requests. The end of a request is computed when it starts, but
/// the queue may fill or drain before a poll that depends on it. So each core keeps its state as of
/// its last event, and its end is computed again from there. The core that has idled for the
/// longest time takes the next request. Workers that sleep in a first-in, first-out order do the
/// same.
pub(super) fn run_shared(
    model: &Model,
    first_core: u64,
    mut source: Source,
    sink: &mut impl FnMut(&Served),
) -> Outcome {
    let mut machine = Cores::new(model, first_core, sink);
    machine.next = request(&mut source);
    loop {
        let arrives_ns = machine.next.map(|next| next.arrived_ns);
        let ends_ns = machine.next_end();
        match (arrives_ns, ends_ns) {
            (None, None) => break,
            (Some(arrives_ns), ends_ns) if ends_ns.is_none_or(|ends_ns| arrives_ns < ends_ns) => {
                let arrived = machine.next.take().expect("it was looked at");
                machine.next = request(&mut source);
                machine.arrive(arrived);
            }
            _ => machine.end(),
        }
    }
    machine.close(source.end_ns())
}

fn request(source: &mut Source) -> Option<Request> {
    source.next().map(|(arrived_ns, demand_ns)| Request { arrived_ns, demand_ns })
}

impl<'a, S: FnMut(&Served)> Cores<'a, S> {
    fn new(model: &'a Model, first_core: u64, sink: &'a mut S) -> Self {
        let pair = Pair::new(model.batch, model.control);
        let core = || Core {
            pair: pair.clone(),
            ended: pair.clone(),
            end_ns: 0,
            plan: 0,
            request: Request { arrived_ns: 0, demand_ns: 0 },
            started_ns: 0,
            overlapped_ns: 0,
            idle_since_ns: 0,
            listed: false,
        };
        let count = model.cores_per_machine();
        Self {
            model,
            first_core,
            control: model.control,
            cores: (0..count).map(|_| core()).collect(),
            idle: (0..count).collect(),
            ends: BinaryHeap::new(),
            queue: VecDeque::new(),
            next: None,
            queue_dependent: Vec::new(),
            started: 0,
            windows: model.watch.map(Windows::new),
            outcome: Outcome::default(),
            sink,
        }
    }

    /// Returns the time of the next end of a request, and removes void entries before it.
    fn next_end(&mut self) -> Option<u64> {
        while let Some(&Reverse((end_ns, core, plan))) = self.ends.peek() {
            if self.cores[core].plan == plan {
                return Some(end_ns);
            }
            self.ends.pop();
        }
        None
    }

    fn arrive(&mut self, request: Request) {
        match self.idle.pop_front() {
            None => {
                self.queue.push_back(request);
                if self.queue.len() == 1 {
                    self.queue_changed(request.arrived_ns);
                }
            }
            Some(core) => {
                let idle_ns = self.cores[core].idle_since_ns;
                self.cores[core].pair.idle(idle_ns, request.arrived_ns);
                self.start(core, request, request.arrived_ns);
            }
        }
    }

    fn start(&mut self, core: usize, request: Request, now_ns: u64) {
        if let Some(policy) = self.windows.as_mut().and_then(|windows| windows.policy_at(now_ns)) {
            self.control = Control::Policy(policy);
        }
        self.started += 1;
        let at = &mut self.cores[core];
        at.pair.control = self.control;
        (at.request, at.started_ns) = (request, now_ns);
        at.overlapped_ns = at.pair.tally.overlapped_ns;
        at.pair.begin(self.started, now_ns, request.demand_ns);
        self.plan(core);
    }

    /// Computes the end of the running request from the state of the pair.
    fn plan(&mut self, core: usize) {
        let waits = !self.queue.is_empty();
        let at = &mut self.cores[core];
        at.ended = at.pair.clone();
        at.end_ns = at.ended.finish(|_| waits).expect("a request has begun");
        at.plan += 1;
        self.ends.push(Reverse((at.end_ns, core, at.plan)));
        if at.pair.depends_on_queue() && !at.listed {
            at.listed = true;
            self.queue_dependent.push(core);
        }
    }

    fn end(&mut self) {
        let Some(Reverse((now_ns, core, _))) = self.ends.pop() else { return };
        let at = &mut self.cores[core];
        at.pair = at.ended.clone();
        at.plan += 1;
        at.idle_since_ns = now_ns;
        let (Request { arrived_ns, demand_ns }, started_ns) = (at.request, at.started_ns);
        let overlapped_ns = at.pair.tally.overlapped_ns - at.overlapped_ns;
        self.outcome.record(arrived_ns, started_ns, now_ns);
        if let Some(windows) = &mut self.windows {
            windows.finished(now_ns, now_ns - arrived_ns, &mut self.outcome);
        }
        (self.sink)(&Served {
            core: self.first_core + core as u64,
            arrived_ns,
            started_ns,
            ended_ns: now_ns,
            demand_ns,
            overlapped_ns,
        });
        match self.queue.pop_front() {
            None => self.idle.push_back(core),
            Some(request) => {
                self.start(core, request, now_ns);
                if self.queue.is_empty() {
                    self.queue_changed(now_ns);
                }
            }
        }
    }

    /// Handles a queue that became empty or non-empty. Polls next to requests without a budget may
    /// now decide differently, so the ends of these requests are computed again.
    fn queue_changed(&mut self, now_ns: u64) {
        let waited = self.queue.is_empty();
        for core in std::mem::take(&mut self.queue_dependent) {
            let at = &mut self.cores[core];
            at.listed = false;
            let running = at.started_ns <= now_ns && now_ns < at.end_ns;
            let mut pair = at.pair.clone();
            if !running || pair.advance(now_ns, |_| waited).is_some() || !pair.depends_on_queue() {
                continue;
            }
            pair.queue_changed(now_ns);
            at.pair = pair;
            self.plan(core);
        }
    }

    fn close(mut self, end_ns: u64) -> Outcome {
        let last_ns = self.cores.iter().map(|core| core.idle_since_ns).max().unwrap_or(0);
        let end_ns = end_ns.max(last_ns);
        for core in &mut self.cores {
            core.pair.idle(core.idle_since_ns, end_ns);
            self.outcome.close_core(&core.pair.tally, end_ns);
        }
        if let Some(windows) = &mut self.windows {
            windows.judge(&mut self.outcome);
        }
        debug_assert_eq!(self.model.cores_per_machine(), self.idle.len());
        self.outcome
    }
}
