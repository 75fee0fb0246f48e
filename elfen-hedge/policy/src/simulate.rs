//! Two servers that stand still now and then, in simulated time, under the policies of the proxy.
//!
//! Each server is one queue that works for one request after the other, and does nothing while it
//! is paused. What is sent twice is worked for twice: a late answer is not taken back.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::{Counts, Double, Halt, Hedge, Policy, Server};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    pub comes_ns: u64,
    pub work_ns: u64,
    /// What its answer takes beside that, wherever it was worked for: it keeps no server.
    pub around_ns: u64,
    pub may_double: bool,
}

/// What happens, whatever the policy.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Plan {
    /// In the order of their arrival.
    pub requests: Vec<Request>,
    /// Of each server: from when to when, sorted and apart; one may last for ever.
    pub pauses: [Vec<(u64, u64)>; 2],
    pub look_every_ns: u64,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// Of each request; `None` if it has no answer to this day.
    pub latencies_ns: Vec<Option<u64>>,
    /// Answers to each request, late ones too.
    pub answers: Vec<u32>,
    pub counts: Counts,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Event {
    Halts { server: Server, is_so: bool },
    Answer { id: u64, by: Server },
    Comes { at: usize },
    Look,
    Due,
}

#[derive(Debug, Default)]
struct Queue<'a> {
    pauses: &'a [(u64, u64)],
    free_ns: u64,
    /// From when to when it has something to do, the last ones.
    busy: VecDeque<(u64, u64)>,
}

impl Queue<'_> {
    /// When so much work is done that comes now; `None` if it never is.
    fn takes(&mut self, now_ns: u64, work_ns: u64) -> Option<u64> {
        let from_ns = self.free_ns.max(now_ns);
        let (mut at_ns, mut left_ns) = (from_ns, work_ns);
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

    /// Whether it did anything from one time to another.
    fn ran(&mut self, from_ns: u64, to_ns: u64) -> bool {
        while self.busy.front().is_some_and(|(_, end_ns)| *end_ns <= from_ns) {
            self.busy.pop_front();
        }
        let pauses = self.pauses;
        self.busy.iter().take_while(|(begin_ns, _)| *begin_ns < to_ns).any(|&(begin_ns, end_ns)| {
            let (begin_ns, end_ns) = (begin_ns.max(from_ns), end_ns.min(to_ns));
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
    looked_ns: u64,
    /// A look is planned.
    looks: bool,
}

/// Runs a plan under a policy, to its end.
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
        looked_ns: 0,
        looks: false,
    };
    if let Some(first) = plan.requests.first() {
        simulation.at(first.comes_ns, Event::Comes { at: 0 });
    }
    for server in Server::BOTH {
        // Other policies are not told.
        let told = policy == Policy::Hazard;
        for &(from_ns, to_ns) in plan.pauses[server.index()].iter().filter(|_| told) {
            simulation.at(from_ns, Event::Halts { server, is_so: true });
            if to_ns < u64::MAX {
                simulation.at(to_ns, Event::Halts { server, is_so: false });
            }
        }
    }
    while let Some(Reverse((now_ns, event))) = simulation.events.pop() {
        simulation.happens(now_ns, event);
    }
    let Simulation { hedge, latencies_ns, answers, .. } = simulation;
    Outcome { latencies_ns, answers, counts: hedge.counts() }
}

impl Simulation<'_> {
    fn at(&mut self, at_ns: u64, event: Event) {
        self.events.push(Reverse((at_ns, event)));
    }

    fn happens(&mut self, now_ns: u64, event: Event) {
        match event {
            Event::Comes { at } => self.comes(now_ns, at),
            Event::Answer { id, by } => self.answer(now_ns, id, by),
            Event::Due => {
                let doubles = self.hedge.due(now_ns);
                self.send(now_ns, doubles);
            }
            Event::Look => self.look(now_ns),
            Event::Halts { server, is_so } => {
                let doubles = self.hedge.halts(server, Halt::Stop, is_so);
                self.send(now_ns, doubles);
            }
        }
    }

    fn comes(&mut self, now_ns: u64, at: usize) {
        let id = at as u64;
        let to = self.hedge.comes(id, now_ns, self.plan.requests[at].may_double);
        self.serve(now_ns, id, to);
        if let Some(next) = self.plan.requests.get(at + 1) {
            self.at(next.comes_ns.max(now_ns), Event::Comes { at: at + 1 });
        }
        if let Some(delay_ns) = self.hedge.delay_ns() {
            self.at(now_ns.saturating_add(delay_ns), Event::Due);
        }
        if !self.looks {
            (self.looks, self.looked_ns) = (true, now_ns);
            self.hedge.rests();
            self.at(now_ns, Event::Look);
        }
    }

    fn serve(&mut self, now_ns: u64, id: u64, by: Server) {
        let Request { work_ns, around_ns, .. } = self.request(id);
        if let Some(end_ns) = self.queues[by.index()].takes(now_ns, work_ns) {
            self.at(end_ns.saturating_add(around_ns), Event::Answer { id, by });
        }
    }

    fn request(&self, id: u64) -> Request {
        self.plan.requests[Self::place(id)]
    }

    fn place(id: u64) -> usize {
        usize::try_from(id).expect("requests are counted by their places")
    }

    fn send(&mut self, now_ns: u64, doubles: Vec<Double>) {
        for Double { id, to } in doubles {
            self.serve(now_ns, id, to);
        }
    }

    fn answer(&mut self, now_ns: u64, id: u64, by: Server) {
        let (at, came_ns) = (Self::place(id), self.request(id).comes_ns);
        self.answers[at] += 1;
        if self.latencies_ns[at].is_none() {
            self.latencies_ns[at] = Some(now_ns - came_ns);
            self.hedge.answered(id, now_ns, by);
        }
    }

    fn look(&mut self, now_ns: u64) {
        let before_ns = std::mem::replace(&mut self.looked_ns, now_ns);
        let ran = Server::BOTH.map(|server| self.queues[server.index()].ran(before_ns, now_ns));
        let queues = &self.queues;
        let is_free = |server: Server| !queues[server.index()].is_paused(now_ns);
        let doubles = self.hedge.look(now_ns, ran, is_free);
        self.send(now_ns, doubles);
        // Where nothing else will happen, looking on for ever finds nothing.
        let goes_on = !self.hedge.is_idle() && !self.events.is_empty();
        self.looks = goes_on;
        if goes_on {
            self.at(now_ns.saturating_add(self.plan.look_every_ns.max(1)), Event::Look);
        }
    }
}
