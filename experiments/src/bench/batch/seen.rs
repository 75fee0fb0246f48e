//! What the scheduler's trace shows of a batch next to requests.

use std::collections::{HashMap, HashSet};

use crate::bench::trace::{Event, Kind};

/// The tasks to look for in a trace.
#[derive(Clone, Debug)]
pub(super) struct Cast {
    pub(super) request_cpu: u32,
    pub(super) batch_cpu: u32,
    /// The thread that plays requests.
    pub(super) request: i32,
    /// Every `elfen run`, by the process that was started. What they start is the batch from when
    /// it runs a program of its own: guards and keepers never do.
    pub(super) fronts: Vec<i32>,
    /// From its beginning on, a batch is learned about for so long.
    pub(super) learn_ns: u64,
}

/// While a batch lived and was learned.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Seen {
    /// Of the request lane.
    pub(super) busy_ns: u64,
    /// How much of that a batch task was on the batch lane.
    pub(super) overlapped_ns: u64,
    pub(super) turns: u64,
    /// From the beginning of a turn to the batch off its lane; all of a turn that ended first. Of
    /// turns that began while a batch task was on its lane.
    pub(super) reactions_ns: Vec<u64>,
    /// Whether the request thread is in the trace at all.
    pub(super) any_request: bool,
}

/// Events are taken in their order.
struct Watch<'a> {
    cast: &'a Cast,
    family: Family<'a>,
    seen: Seen,
    last_ns: u64,
    request_is_on: bool,
    batch_is_on: bool,
    /// A turn goes on.
    in_turn: bool,
    /// The batch is on its lane, and has been since the turn began, which was then.
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
    /// When the batch that lives is learned.
    fn learned_ns(&self) -> Option<u64> {
        self.family.began_ns.map(|began_ns| began_ns.saturating_add(self.cast.learn_ns))
    }

    /// Counts the time since the last event.
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

    /// A task that becomes the batch is on a CPU already.
    fn on_exec(&mut self, event: &Event) {
        self.family.execs(event.task, event.at_ns);
        if event.cpu == self.cast.batch_cpu {
            self.batch_is_on = self.family.has(event.task);
        }
    }

    /// The batch is off its lane, or the request is.
    fn react(&mut self, now_ns: u64) {
        let waited_ns = self.waits_since_ns.take().map(|from_ns| now_ns.saturating_sub(from_ns));
        self.seen.reactions_ns.extend(waited_ns);
    }
}

/// The tasks that descend from an `elfen run`, and those of them that are its batch.
struct Family<'a> {
    fronts: &'a [i32],
    /// Whether a descendant belongs to the batch. An id that is used again is that of a new child.
    members: HashMap<i32, bool>,
    living: HashSet<i32>,
    /// The batch that lives.
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

    /// It is still the batch's while it ends.
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

    /// A front, its keeper 11, a guard, and a batch that begins at 100 and has the lane at 110.
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

    /// Goal: a guard, a stranger and idle time are no overlap, and a child of the batch is. Method:
    /// a turn next to each of them.
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

    /// Goal: what a batch overlaps while it is learned is told apart. Method: a turn before the
    /// time, one over it, and one after it.
    #[test]
    fn learning_is_not_counted() {
        let turn = |from, to| [switch(from, 0, 0, REQUEST), switch(to, 0, REQUEST, 0)];
        let seen = after_start(&[turn(200, 300), turn(550, 650), turn(700, 800)].concat(), 500);
        assert_eq!((seen.busy_ns, seen.overlapped_ns), (150, 150));
        assert_eq!((seen.turns, seen.reactions_ns), (1, vec![100]), "a whole turn");
    }

    /// Goal: time without a batch is not counted, and the next run is learned again; its ids may be
    /// those of the last. Method: an exit, a turn, and another run.
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

    /// Goal: a request that is put off its lane for a moment is one turn. Method: a preemption in
    /// the middle of a turn, with the batch off its lane later.
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

    /// Goal: ids of another pid namespace are noticed. Method: a trace without the request.
    #[test]
    fn a_trace_of_strangers_is_known() {
        assert!(!seen(&start(), &cast(0)).any_request);
    }
}
