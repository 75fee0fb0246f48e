//! Simulates two servers that sometimes stand still, with the policies of the proxy.
//!
//! Each server has one queue. It processes one request after the other, and does nothing while it
//! is paused. A request that is sent twice is processed twice, because late answers are not
//! cancelled.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::{Counts, Duplicate, Halt, Hedge, Policy, Server};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    pub comes_ns: u64,
    pub work_ns: u64,
    /// The additional time of its answer at either server, during which the server is free.
    pub around_ns: u64,
    pub may_double: bool,
}

/// The input of a simulation, which does not depend on the policy.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Plan {
    /// Sorted by arrival.
    pub requests: Vec<Request>,
    /// For each server: (from, to) of its pauses, sorted and disjoint. A pause may last forever.
    pub pauses: [Vec<(u64, u64)>; 2],
    pub poll_interval_ns: u64,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// For each request, its latency. `None` if it was never answered.
    pub latencies_ns: Vec<Option<u64>>,
    /// The number of answers to each request, including late ones.
    pub answers: Vec<u32>,
    pub counts: Counts,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Event {
    Halt { server: Server, is_halted: bool },
    Answer { id: u64, by: Server },
    Arrive { at: usize },
    Sample,
    Due,
}

#[derive(Debug, Default)]
struct Queue<'a> {
    pauses: &'a [(u64, u64)],
    free_ns: u64,
    /// The last spans in which the server had work.
    busy: VecDeque<(u64, u64)>,
}

impl Queue<'_> {
    /// When work that arrives now is done. `None` if it is never done.
    fn finish_time(&mut self, now_ns: u64, work_ns: u64) -> Option<u64> {
        let from_ns = self.free_ns.max(now_ns);
        let mut at_ns = from_ns;
        let mut left_ns = work_ns;
        for &(pause_ns, until_ns) in self.pauses.iter().filter(|(_, until)| *until > from_ns) {
            let runs_ns = pause_ns.saturating_sub(at_ns);
            if left_ns <= runs_ns {
                break;
            }
            left_ns -= runs_ns;
            at_ns = until_ns;
        }
        let end_ns = at_ns.saturating_add(left_ns);
        self.free_ns = end_ns;
        self.busy.push_back((from_ns, end_ns));
        (end_ns < u64::MAX).then_some(end_ns)
    }

    fn is_paused(&self, at_ns: u64) -> bool {
        self.pauses.iter().any(|&(from_ns, to_ns)| from_ns <= at_ns && at_ns < to_ns)
    }

    /// Whether the server did any work in a span.
    fn ran(&mut self, from_ns: u64, to_ns: u64) -> bool {
        while self.busy.front().is_some_and(|(_, end_ns)| *end_ns <= from_ns) {
            self.busy.pop_front();
        }
        let pauses = self.pauses;
        self.busy.iter().take_while(|(begin_ns, _)| *begin_ns < to_ns).any(|&(begin_ns, end_ns)| {
            let begin_ns = begin_ns.max(from_ns);
            let end_ns = end_ns.min(to_ns);
            let within =
                |pause: &(u64, u64)| end_ns.min(pause.1).saturating_sub(begin_ns.max(pause.0));
            let paused_ns: u64 = pauses.iter().map(within).sum();
            paused_ns < end_ns - begin_ns
        })
    }
}

struct Simulation<'a> {
    plan: &'a Plan,
    hedge: Hedge,
    queues: [Queue<'a>; 2],
    events: BinaryHeap<Reverse<(u64, Event)>>,
    latencies_ns: Vec<Option<u64>>,
    answers: Vec<u32>,
    sampled_ns: u64,
    /// Whether a sample is scheduled.
    is_sampling: bool,
}

/// Runs a plan under a policy to its end.
pub fn simulate(plan: &Plan, policy: Policy, extra_per_million: u64) -> Outcome {
    let count = plan.requests.len();
    let queue = |server: usize| Queue { pauses: &plan.pauses[server], ..Queue::default() };
    let mut simulation = Simulation {
        plan,
        hedge: Hedge::new(policy, extra_per_million),
        queues: [queue(0), queue(1)],
        events: BinaryHeap::new(),
        latencies_ns: vec![None; count],
        answers: vec![0; count],
        sampled_ns: 0,
        is_sampling: false,
    };
    if let Some(first) = plan.requests.first() {
        simulation.schedule(first.comes_ns, Event::Arrive { at: 0 });
    }
    for server in Server::BOTH {
        // Only this policy receives reports of halts.
        let is_reported = policy == Policy::Hazard;
        for &(from_ns, to_ns) in plan.pauses[server.index()].iter().filter(|_| is_reported) {
            simulation.schedule(from_ns, Event::Halt { server, is_halted: true });
            if to_ns < u64::MAX {
                simulation.schedule(to_ns, Event::Halt { server, is_halted: false });
            }
        }
    }
    while let Some(Reverse((now_ns, event))) = simulation.events.pop() {
        simulation.handle(now_ns, event);
    }
    let Simulation { hedge, latencies_ns, answers, .. } = simulation;
    Outcome { latencies_ns, answers, counts: hedge.counts() }
}

impl Simulation<'_> {
    fn schedule(&mut self, at_ns: u64, event: Event) {
        self.events.push(Reverse((at_ns, event)));
    }

    fn handle(&mut self, now_ns: u64, event: Event) {
        match event {
            Event::Arrive { at } => self.arrive(now_ns, at),
            Event::Answer { id, by } => self.answer(now_ns, id, by),
            Event::Due => {
                let duplicates = self.hedge.take_due(now_ns);
                self.send(now_ns, duplicates);
            }
            Event::Sample => self.sample(now_ns),
            Event::Halt { server, is_halted } => {
                let duplicates = self.hedge.set_halted(server, Halt::Stop, is_halted);
                self.send(now_ns, duplicates);
            }
        }
    }

    fn arrive(&mut self, now_ns: u64, at: usize) {
        let id = at as u64;
        let to = self.hedge.begin(id, now_ns, self.plan.requests[at].may_double);
        self.serve(now_ns, id, to);
        if let Some(next) = self.plan.requests.get(at + 1) {
            self.schedule(next.comes_ns.max(now_ns), Event::Arrive { at: at + 1 });
        }
        if let Some(delay_ns) = self.hedge.delay_ns() {
            self.schedule(now_ns.saturating_add(delay_ns), Event::Due);
        }
        if !self.is_sampling {
            self.is_sampling = true;
            self.sampled_ns = now_ns;
            self.hedge.forget_sample();
            self.schedule(now_ns, Event::Sample);
        }
    }

    fn serve(&mut self, now_ns: u64, id: u64, by: Server) {
        let Request { work_ns, around_ns, .. } = self.request(id);
        if let Some(end_ns) = self.queues[by.index()].finish_time(now_ns, work_ns) {
            self.schedule(end_ns.saturating_add(around_ns), Event::Answer { id, by });
        }
    }

    fn request(&self, id: u64) -> Request {
        self.plan.requests[Self::index(id)]
    }

    fn index(id: u64) -> usize {
        usize::try_from(id).expect("requests are counted by their places")
    }

    fn send(&mut self, now_ns: u64, duplicates: Vec<Duplicate>) {
        for Duplicate { id, to } in duplicates {
            self.serve(now_ns, id, to);
        }
    }

    fn answer(&mut self, now_ns: u64, id: u64, by: Server) {
        let at = Self::index(id);
        let came_ns = self.request(id).comes_ns;
        self.answers[at] += 1;
        if self.latencies_ns[at].is_none() {
            self.latencies_ns[at] = Some(now_ns - came_ns);
            self.hedge.answered(id, now_ns, by);
        }
    }

    fn sample(&mut self, now_ns: u64) {
        let before_ns = std::mem::replace(&mut self.sampled_ns, now_ns);
        let ran = Server::BOTH.map(|server| self.queues[server.index()].ran(before_ns, now_ns));
        let queues = &self.queues;
        let is_free = |server: Server| !queues[server.index()].is_paused(now_ns);
        let duplicates = self.hedge.sample(now_ns, ran, is_free);
        self.send(now_ns, duplicates);
        // Without further events, more samples would change nothing.
        let goes_on = !self.hedge.is_idle() && !self.events.is_empty();
        self.is_sampling = goes_on;
        if goes_on {
            self.schedule(now_ns.saturating_add(self.plan.poll_interval_ns.max(1)), Event::Sample);
        }
    }
}
