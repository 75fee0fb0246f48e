//! Evaluates the scheduler's trace of a batch next to requests.

use std::collections::{HashMap, HashSet};

use crate::bench::trace::{Event, Kind};

/// The tasks to find in a trace.
#[derive(Clone, Debug)]
pub(super) struct Cast {
    pub(super) request_cpu: u32,
    pub(super) batch_cpu: u32,
    /// The thread that plays requests.
    pub(super) request: i32,
    /// The pid of every `elfen run`. A descendant belongs to the batch from when it starts a
    /// program. Guards and supervisors never start one.
    pub(super) fronts: Vec<i32>,
    /// The first part of each batch's life, which is not counted because the batch is learned.
    pub(super) learn_ns: u64,
}

/// The result, counted while a batch lived and had been learned.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Seen {
    /// How long the request lane was busy with the request.
    pub(super) busy_ns: u64,
    /// How long a batch task was on the batch lane during that time.
    pub(super) overlapped_ns: u64,
    pub(super) turns: u64,
    /// For each turn that began while the batch was on its lane: the time until the batch left the
    /// lane. It is the whole turn if the turn ended first.
    pub(super) reactions_ns: Vec<u64>,
    /// Whether the request thread is in the trace.
    pub(super) any_request: bool,
}

/// The state while events are processed in their order.
struct Watch<'a> {
    cast: &'a Cast,
    family: Family<'a>,
    seen: Seen,
    last_ns: u64,
    request_is_on: bool,
    batch_is_on: bool,
    /// Whether a turn is running.
    in_turn: bool,
    /// The start of the turn, if the batch has been on its lane since then.
    waits_since_ns: Option<u64>,
}

pub(super) fn seen(events: &[Event], cast: &Cast) -> Seen {
    let mut watch = Watch {
        cast,
        family: Family::of(&cast.fronts),
        seen: Seen::default(),
        last_ns: 0,
        request_is_on: false,
        batch_is_on: false,
        in_turn: false,
        waits_since_ns: None,
    };
    for event in events {
        watch.pass(event.at_ns);
        match event.kind {
            Kind::Switch { next, preempted } if event.cpu == cast.request_cpu => {
                watch.on_request_lane(event, next, preempted);
            }
            Kind::Switch { next, .. } if event.cpu == cast.batch_cpu => {
                watch.batch_is_on = watch.family.has(next);
                if !watch.batch_is_on {
                    watch.react(event.at_ns);
                }
            }
            Kind::Switch { .. } => (),
            Kind::Fork { child } => watch.family.forks(event.task, child),
            Kind::Exec => watch.on_exec(event),
            Kind::Exit => watch.family.exits(event.task),
        }
    }
    watch.seen
}

impl Watch<'_> {
    /// Returns from when on the current batch counts as learned.
    fn learned_ns(&self) -> Option<u64> {
        self.family.began_ns.map(|began_ns| began_ns.saturating_add(self.cast.learn_ns))
    }

    /// Adds the time since the last event.
    fn pass(&mut self, now_ns: u64) {
        let from_ns = std::mem::replace(&mut self.last_ns, now_ns);
        let Some(learned_ns) = self.learned_ns().filter(|_| self.request_is_on) else { return };
        let ns = now_ns.saturating_sub(from_ns.max(learned_ns));
        self.seen.busy_ns += ns;
        self.seen.overlapped_ns += if self.batch_is_on { ns } else { 0 };
    }

    fn on_request_lane(&mut self, event: &Event, next: i32, preempted: bool) {
        let request = self.cast.request;
        if event.task == request && next != request && !preempted {
            self.react(event.at_ns);
            self.in_turn = false;
        }
        self.request_is_on = next == request;
        self.seen.any_request |= self.request_is_on;
        if self.request_is_on && !self.in_turn {
            self.in_turn = true;
            if self.learned_ns().is_some_and(|learned_ns| event.at_ns >= learned_ns) {
                self.seen.turns += 1;
                self.waits_since_ns = self.batch_is_on.then_some(event.at_ns);
            }
        }
    }

    /// A task that becomes a batch task is already on a CPU.
    fn on_exec(&mut self, event: &Event) {
        self.family.execs(event.task, event.at_ns);
        if event.cpu == self.cast.batch_cpu {
            self.batch_is_on = self.family.has(event.task);
        }
    }

    /// Ends a reaction: the batch has left its lane, or the turn has ended.
    fn react(&mut self, now_ns: u64) {
        let waited_ns = self.waits_since_ns.take().map(|from_ns| now_ns.saturating_sub(from_ns));
        self.seen.reactions_ns.extend(waited_ns);
    }
}

/// The descendants of `elfen run` processes, and which of them belong to the batch.
struct Family<'a> {
    fronts: &'a [i32],
    /// Whether a descendant belongs to the batch. If an id is reused, it belongs to the new child.
    members: HashMap<i32, bool>,
    living: HashSet<i32>,
    /// The start of the current batch.
    began_ns: Option<u64>,
}

impl<'a> Family<'a> {
    fn of(fronts: &'a [i32]) -> Self {
        Self { fronts, members: HashMap::new(), living: HashSet::new(), began_ns: None }
    }

    fn has(&self, task: i32) -> bool {
        self.members.get(&task) == Some(&true)
    }

    fn forks(&mut self, parent: i32, child: i32) {
        let inherited = match self.members.get(&parent) {
            Some(&batch) => Some(batch),
            None => self.fronts.contains(&parent).then_some(false),
        };
        match inherited {
            Some(batch) => self.members.insert(child, batch),
            None => self.members.remove(&child),
        };
        if inherited == Some(true) {
            self.living.insert(child);
        }
    }

    fn execs(&mut self, task: i32, now_ns: u64) {
        let Some(batch) = self.members.get_mut(&task) else { return };
        *batch = true;
        self.living.insert(task);
        self.began_ns.get_or_insert(now_ns);
    }

    /// Until it leaves its CPU, an exiting task still belongs to the batch.
    fn exits(&mut self, task: i32) {
        self.living.remove(&task);
        if self.living.is_empty() {
            self.began_ns = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRONT: i32 = 10;
    const GUARD: i32 = 12;
    const BATCH: i32 = 13;
    const REQUEST: i32 = 20;

    fn cast(learn_ns: u64) -> Cast {
        Cast { request_cpu: 0, batch_cpu: 1, request: REQUEST, fronts: vec![FRONT], learn_ns }
    }

    fn event(at_ns: u64, cpu: u32, task: i32, kind: Kind) -> Event {
        Event { at_ns, cpu, task, kind }
    }

    fn fork(at_ns: u64, parent: i32, child: i32) -> Event {
        event(at_ns, 7, parent, Kind::Fork { child })
    }

    fn switch(at_ns: u64, cpu: u32, task: i32, next: i32) -> Event {
        event(at_ns, cpu, task, Kind::Switch { next, preempted: false })
    }

    /// An `elfen run` with a supervisor (11), a guard, and a batch. The batch starts at 100 and
    /// gets the lane at 110.
    fn start() -> Vec<Event> {
        vec![
            fork(10, 1, FRONT),
            event(20, 7, FRONT, Kind::Exec),
            fork(30, FRONT, 11),
            fork(40, 11, GUARD),
            fork(50, 11, BATCH),
            event(100, 1, BATCH, Kind::Exec),
            switch(110, 1, 0, BATCH),
        ]
    }

    fn after_start(more: &[Event], learn_ns: u64) -> Seen {
        seen(&[start(), more.to_vec()].concat(), &cast(learn_ns))
    }

    /// Goal: a child of the batch overlaps; a guard, an unrelated task and idle time do not.
    /// Method: a turn next to each of them.
    #[test]
    fn the_batchs_own_tasks_overlap() {
        let more = [
            switch(200, 0, 0, REQUEST),
            switch(230, 1, BATCH, GUARD),
            switch(240, 1, GUARD, 99),
            switch(250, 1, 99, 0),
            fork(260, BATCH, 14),
            switch(270, 1, 0, 14),
            switch(300, 0, REQUEST, 0),
        ];
        let seen = after_start(&more, 0);
        assert_eq!((seen.busy_ns, seen.overlapped_ns), (100, 30 + 30));
        assert_eq!((seen.turns, seen.reactions_ns), (1, vec![30]));
    }

    /// Goal: overlap is not counted while the batch is learned. Method: turns before, across and
    /// after the end of the learning time.
    #[test]
    fn learning_is_not_counted() {
        let turn = |from, to| [switch(from, 0, 0, REQUEST), switch(to, 0, REQUEST, 0)];
        let seen = after_start(&[turn(200, 300), turn(550, 650), turn(700, 800)].concat(), 500);
        assert_eq!((seen.busy_ns, seen.overlapped_ns), (150, 150));
        assert_eq!((seen.turns, seen.reactions_ns), (1, vec![100]), "a whole turn");
    }

    /// Goal: time without a batch is not counted, and the next run is learned again. Its ids may be
    /// the same as in the last run. Method: an exit, a turn, and another run.
    #[test]
    fn batches_end_and_begin_again() {
        let turn = |from, to| [switch(from, 0, 0, REQUEST), switch(to, 0, REQUEST, 0)].to_vec();
        let end = vec![event(300, 1, BATCH, Kind::Exit), switch(310, 1, BATCH, 0)];
        let again = vec![
            fork(500, FRONT, 11),
            fork(510, 11, BATCH),
            switch(520, 1, 0, BATCH),
            event(600, 1, BATCH, Kind::Exec),
        ];
        let mut more = [turn(250, 320), end, turn(400, 450), again, turn(610, 650)].concat();
        more.sort_by_key(|event| event.at_ns);
        let seen = after_start(&more, 0);
        assert_eq!(seen.busy_ns, 50 + 40, "until its exit, and from the next exec");
        assert_eq!(seen.overlapped_ns, 50 + 40);
    }

    /// Goal: a request that is preempted for a moment is still one turn. Method: a preemption in
    /// the middle of a turn; the batch leaves its lane later.
    #[test]
    fn a_preempted_turn_goes_on() {
        let more = [
            switch(200, 0, 0, REQUEST),
            event(210, 0, REQUEST, Kind::Switch { next: 5, preempted: true }),
            switch(220, 0, 5, REQUEST),
            switch(250, 1, BATCH, GUARD),
            switch(300, 0, REQUEST, 0),
        ];
        let seen = after_start(&more, 0);
        assert_eq!((seen.turns, seen.reactions_ns), (1, vec![50]));
        assert_eq!((seen.busy_ns, seen.overlapped_ns), (90, 40));
    }

    /// Goal: a trace with ids of another pid namespace is detected. Method: a trace without the
    /// request.
    #[test]
    fn a_trace_of_strangers_is_known() {
        assert!(!seen(&start(), &cast(0)).any_request);
    }
}
