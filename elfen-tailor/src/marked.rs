//! Reconstructs the requests of a service that reports them itself, by marks.
//!
//! A mark says which thread works for which request. So a wait for another request differs from
//! other waits, for any structure of sockets, threads and queues.

use std::collections::BTreeMap;

use elfen_rt::signal::mark::{Mark, Step};

use crate::request::{Owner, Request, Requests};
use crate::trace::Trace;

/// The request that currently runs on a lane.
#[derive(Debug)]
struct Open {
    request: u64,
    arrived_ns: u64,
    begun_ns: u64,
    thread: u32,
    stages: Vec<(u64, u16)>,
}

impl Requests {
    /// The requests of all lanes that both began and ended during the recording.
    pub(crate) fn of_marks(trace: &Trace) -> Self {
        let mut found = Self::default();
        for marks in trace.marks.values() {
            // Before this time, not all events that explain a request were recorded.
            let first = marks.partition_point(|mark| mark.at_ns < trace.head.began_ns);
            found.lane(&marks[first..]);
        }
        found.all.sort_by_key(|request| (request.arrived_ns, request.connection));
        // A thread may serve several lanes, so its list is sorted again.
        for owners in found.owners.values_mut() {
            owners.sort_by_key(|owner| owner.from_ns);
        }
        found
    }

    fn lane(&mut self, marks: &[Mark]) {
        let mut open: Option<Open> = None;
        for mark in marks {
            match (mark.step, &mut open) {
                (Step::Begin { arrived_ns }, _) => {
                    let Mark { at_ns, thread, request, .. } = *mark;
                    // A service may take the time of the arrival after the time of the first mark.
                    let arrived_ns = arrived_ns.min(at_ns);
                    let stages = Vec::new();
                    open = Some(Open { request, arrived_ns, begun_ns: at_ns, thread, stages });
                    self.owns(thread, at_ns, Some((arrived_ns, request)));
                }
                (Step::Stage(stage), Some(open)) if open.request == mark.request => {
                    open.stages.push((mark.at_ns, stage));
                }
                (Step::End { class }, Some(begun)) if begun.request == mark.request => {
                    self.end(begun, mark, class);
                    self.owns(mark.thread, mark.at_ns, None);
                    open = None;
                }
                // The mark of the request's beginning was not recorded, or is lost.
                (Step::Stage(_) | Step::End { .. }, _) => {}
            }
        }
    }

    fn owns(&mut self, thread: u32, from_ns: u64, of: Option<(u64, u64)>) {
        let owners = self.owners.entry(thread).or_default();
        owners.push(Owner { from_ns, of, read: of.is_some() });
    }

    fn end(&mut self, open: &Open, mark: &Mark, class: u64) {
        let Open { request, arrived_ns, begun_ns, thread, ref stages } = *open;
        self.all.push(Request {
            connection: request,
            arrived_ns,
            read_ns: begun_ns,
            reader: thread,
            sent_ns: mark.at_ns,
            sender: mark.thread,
            ended_ns: mark.at_ns,
            class,
            stages: stages_ns(begun_ns, stages, mark.at_ns),
        });
    }
}

/// How long each stage took. If a request enters a stage several times, its times are added.
fn stages_ns(begun_ns: u64, stages: &[(u64, u16)], ended_ns: u64) -> Vec<(u16, u64)> {
    let mut sums: BTreeMap<u16, u64> = BTreeMap::new();
    let begins = [(begun_ns, 0)].into_iter().chain(stages.iter().copied());
    let ends = stages.iter().map(|(at_ns, _)| *at_ns).chain([ended_ns]);
    for ((from_ns, stage), to_ns) in begins.zip(ends) {
        let ns = to_ns.saturating_sub(from_ns);
        let sum = sums.entry(stage).or_default();
        *sum = sum.saturating_add(ns);
    }
    sums.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const fn mark(at_ns: u64, request: u64, step: Step) -> Mark {
        Mark { at_ns, thread: 7, request, step }
    }

    fn requests(marks: &[Mark]) -> Requests {
        Requests::of_marks(&Trace { marks: [(0, marks.to_vec())].into(), ..Trace::default() })
    }

    #[test]
    fn requests_are_read_from_their_marks() {
        let marks = [
            mark(90, 4, Step::End { class: 1 }), // began before the recording
            mark(100, 5, Step::Begin { arrived_ns: 60 }),
            mark(120, 5, Step::Stage(2)),
            mark(125, 6, Step::Stage(9)), // its request does not run
            mark(130, 5, Step::Stage(0)),
            mark(150, 5, Step::End { class: 3 }),
            mark(160, 6, Step::Begin { arrived_ns: 999 }), // an arrival after the beginning
            mark(170, 6, Step::End { class: 0 }),
            mark(180, 7, Step::Begin { arrived_ns: 175 }), // a request without an end
        ];
        let found = requests(&marks);
        let [first, second] = &found.all[..] else { panic!("{:?}", found.all) };
        assert_eq!((first.arrived_ns, first.read_ns, first.ended_ns), (60, 100, 150));
        assert_eq!((first.class, &first.stages[..]), (3, &[(0, 40), (2, 10)][..]));
        assert_eq!((second.arrived_ns, second.latency_ns()), (160, 10));
        assert_eq!(found.owner_at(7, 110).unwrap().of, Some((60, 5)));
        assert_eq!(found.owner_at(7, 155).unwrap().of, None);
    }

    proptest! {
        /// Goal: invalid marks never give a request that ends before its arrival. Method: random
        /// marks with few different numbers and times.
        #[test]
        fn any_marks_are_requests_or_nothing(
            marks in proptest::collection::vec((0..9_u64, 0..3_u64, 0..3_u8, 0..9_u64), 0..60)
        ) {
            let mut marks: Vec<Mark> = marks
                .into_iter()
                .map(|(at_ns, request, kind, value)| {
                    let at_ns = if at_ns == 8 { u64::MAX } else { at_ns };
                    mark(at_ns, request, match kind {
                        0 => Step::Begin { arrived_ns: value },
                        1 => Step::Stage(u16::try_from(value).unwrap()),
                        _ => Step::End { class: value },
                    })
                })
                .collect();
            marks.sort_by_key(|mark| mark.at_ns);
            for request in requests(&marks).all {
                prop_assert!(request.arrived_ns <= request.read_ns);
                prop_assert!(request.read_ns <= request.ended_ns);
                let stages: u64 = request.stages.iter().map(|(_, ns)| ns).sum();
                prop_assert_eq!(stages, request.ended_ns - request.read_ns);
            }
        }
    }
}
