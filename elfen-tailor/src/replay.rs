//! The same requests once more, without a cause: each server takes the turns that it took, as soon
//! as whoever they are for has come and the one before is over.
//!
//! Of the turns that could be taken, the one that was taken first is next: in what order a service
//! works off what has come together is its own, and stays. So who queued behind a pause is faster
//! by it too; and who came meanwhile, and would have found the one before him served, waits for
//! nobody. Nothing is faster than it was recorded to be: a turn behind a pause has no wake-up in
//! it, and clients that ask again when they have their answer ask when they did.
//!
//! Unchanged, this is what was recorded, of any service. Whether it is a queue, so that a change
//! says something, is for `queues` to find out.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::segment::total;
use crate::service_slots::{Job, Turn};

/// By cause, how much of some time it had.
pub(crate) type Parts = Vec<(usize, u64)>;

/// A turn, wherever it comes to lie.
#[derive(Debug)]
struct Piece {
    job: usize,
    ns: u64,
    parts: Parts,
}

#[derive(Debug)]
struct Server {
    /// In the order in which they were.
    pieces: Vec<Piece>,
    /// Their numbers, in the order in which they could be.
    by_arrival: Vec<usize>,
}

/// What happens to an answer after its server is done with it happens beside all others.
#[derive(Debug)]
struct Delayed {
    arrived_ns: u64,
    after: Piece,
}

#[derive(Debug)]
pub(crate) struct Replay {
    servers: Vec<Server>,
    jobs: Vec<Delayed>,
}

impl Piece {
    fn without(&self, missing: impl Fn(usize, u64) -> u64) -> u64 {
        let less = total(self.parts.iter().map(|&(cause, ns)| missing(cause, ns)));
        self.ns.saturating_sub(less)
    }
}

impl Replay {
    /// `parts` says how much of a job causes had in each of some spans of its time.
    pub(crate) fn of(
        jobs: &[Job],
        turns: &[Vec<Turn>],
        parts: impl Fn(usize, &[(u64, u64)]) -> Vec<Parts>,
    ) -> Self {
        let mut spans: Vec<Vec<(u64, u64)>> = vec![Vec::new(); jobs.len()];
        for turn in turns.iter().flatten() {
            spans[turn.job].push((turn.from_ns, turn.to_ns));
        }
        let mut parts_of: Vec<std::vec::IntoIter<Parts>> = Vec::with_capacity(jobs.len());
        for (at, (job, mut spans)) in jobs.iter().zip(spans).enumerate() {
            spans.push((job.served_ns, job.ended_ns));
            parts_of.push(parts(at, &spans).into_iter());
        }
        let mut piece = |job: usize, from_ns: u64, to_ns: u64| Piece {
            job,
            ns: to_ns.saturating_sub(from_ns),
            parts: parts_of[job].next().unwrap_or_default(),
        };
        let mut server = |turns: &Vec<Turn>| {
            let pieces = turns.iter().map(|turn| piece(turn.job, turn.from_ns, turn.to_ns));
            let mut by_arrival: Vec<usize> = (0..turns.len()).collect();
            by_arrival.sort_by_key(|&at| jobs[turns[at].job].arrived_ns);
            Server { pieces: pieces.collect(), by_arrival }
        };
        let servers = turns.iter().map(&mut server).collect();
        let jobs = jobs.iter().enumerate().map(|(at, job)| Delayed {
            arrived_ns: job.arrived_ns,
            after: piece(at, job.served_ns, job.ended_ns),
        });
        Self { servers, jobs: jobs.collect() }
    }

    /// Each job's latency, if of its parts so much were missing.
    pub(crate) fn without(&self, missing: impl Fn(usize, u64) -> u64) -> Vec<u64> {
        let mut latencies = vec![0; self.jobs.len()];
        for Server { pieces, by_arrival } in &self.servers {
            let arrived_ns = |at: usize| self.jobs[pieces[at].job].arrived_ns;
            let (mut now_ns, mut waiting) = (0, BinaryHeap::new());
            let mut coming = by_arrival.iter().copied().peekable();
            loop {
                while let Some(at) = coming.next_if(|&at| arrived_ns(at) <= now_ns) {
                    waiting.push(Reverse(at));
                }
                match (waiting.pop(), coming.peek()) {
                    (Some(Reverse(at)), _) => {
                        let piece = &pieces[at];
                        now_ns = now_ns.saturating_add(piece.without(&missing));
                        latencies[piece.job] = now_ns - arrived_ns(at);
                    }
                    (None, Some(&next)) => now_ns = arrived_ns(next),
                    (None, None) => break,
                }
            }
        }
        for (latency, job) in latencies.iter_mut().zip(&self.jobs) {
            *latency = latency.saturating_add(job.after.without(&missing));
        }
        latencies
    }

    /// What each job takes by itself, if so much were missing.
    pub(crate) fn served(&self, missing: impl Fn(usize, u64) -> u64) -> Vec<u64> {
        let mut served = vec![0_u64; self.jobs.len()];
        let turns = self.servers.iter().flat_map(|server| &server.pieces);
        for piece in turns.chain(self.jobs.iter().map(|job| &job.after)) {
            served[piece.job] = served[piece.job].saturating_add(piece.without(&missing));
        }
        served
    }
}

/// The latency that so many of a million requests did not exceed.
pub fn quantile(sorted: &[u64], per_million: u64) -> u64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0 };
    let count = sorted.len() as u64;
    let rank = (u128::from(count) * u128::from(per_million)).div_ceil(1_000_000);
    let at = usize::try_from(rank.saturating_sub(1)).unwrap_or(last);
    sorted[at.min(last)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service_slots::{self, tests::any_jobs};
    use proptest::prelude::*;

    const MS: u64 = 1_000_000;

    fn job(arrived_ns: u64, served_ns: u64) -> Job {
        Job { server: 7, arrived_ns, served_ns, ended_ns: served_ns, ..Job::default() }
    }

    /// One in which a pause had all of some time, whoever was there.
    fn paused(jobs: &[Job], pause: (u64, u64)) -> Replay {
        let part = move |_: usize, spans: &[(u64, u64)]| {
            let within = |&(from_ns, to_ns): &(u64, u64)| {
                to_ns.clamp(pause.0, pause.1) - from_ns.clamp(pause.0, pause.1)
            };
            spans.iter().map(|span| vec![(3, within(span))]).collect()
        };
        Replay::of(jobs, &service_slots::of(jobs), part)
    }

    /// Goal: who queued behind a pause is faster without it. Method: three requests of 1 ms, the
    /// first paused for 10 ms, the others come meanwhile; a fourth long after.
    #[test]
    fn a_pause_is_charged_for_those_who_queue_behind_it() {
        let jobs = [(100, 111), (102, 112), (103, 113), (200, 201)];
        let jobs = jobs.map(|(arrived, served)| job(arrived * MS, served * MS));
        let replay = paused(&jobs, (100 * MS, 110 * MS));
        assert_eq!(replay.without(|_, _| 0), [11, 10, 10, 1].map(|ms| ms * MS), "unchanged");
        let all = replay.without(|cause, ns| if cause == 3 { ns } else { 0 });
        assert_eq!(all, [MS; 4]);
        let other = replay.without(|cause, ns| if cause == 4 { ns } else { 0 });
        assert_eq!(other[0], 11 * MS);
        assert_eq!(replay.served(|_, ns| ns)[0], MS);
    }

    /// Goal: in which order those that came together are served is kept where they still come
    /// together, and matters to nobody where they don't. Method: a pause until 1,000, after which
    /// the last to come is served first, all of it and a little of it; and where two come at once.
    #[test]
    fn an_order_of_its_own() {
        let worked = |one: Job| Job { worked: vec![(one.served_ns - 10, one.served_ns)], ..one };
        let jobs = [job(100, 1_030), job(200, 1_020), job(300, 1_010)].map(worked);
        let replay = paused(&jobs, (0, 1_000));
        assert_eq!(replay.without(|_, _| 0), [930, 820, 710], "unchanged");
        assert_eq!(replay.without(|_, ns| ns), [10, 10, 10]);
        let little = replay.without(|_, ns| ns / 900);
        assert_eq!(little, [929, 819, 709], "a little less is a little faster");
        let jobs = [job(100, 1_030), job(300, 1_020), job(300, 1_010)].map(worked);
        assert_eq!(paused(&jobs, (0, 1_000)).without(|_, ns| ns), [10, 20, 10]);
    }

    /// Goal: what TCP holds back keeps no server. Method: an answer that is held for 1,000 while
    /// another request is paused and served.
    #[test]
    fn an_answer_that_is_held_keeps_nobody() {
        let jobs = [Job { ended_ns: 1_110, ..job(100, 110) }, job(200, 310)];
        let replay = paused(&jobs, (200, 300));
        assert_eq!(replay.without(|_, _| 0), [1_010, 110]);
        assert_eq!(replay.without(|_, ns| ns), [910, 10], "the pause lies in what was held, too");
    }

    /// Whatever is missing: a third of it.
    fn third(cause: usize, ns: u64) -> u64 {
        if cause == 3 { ns / 3 } else { 0 }
    }

    proptest! {
        /// Goal: unchanged, it is what was recorded. Method: any jobs, served in any order.
        #[test]
        fn unchanged_is_as_it_was(jobs in any_jobs(), pause in (0..60_u64, 0..60_u64)) {
            let pause = (pause.0, pause.0 + pause.1);
            let latencies: Vec<u64> =
                jobs.iter().map(|job| job.ended_ns - job.arrived_ns).collect();
            prop_assert_eq!(paused(&jobs, pause).without(|_, _| 0), latencies);
        }

        /// Goal: where whoever comes first is served first, nobody is slower without a cause, and
        /// nobody by more than all of it. Method: queues of one server, and pauses. (In another
        /// order somebody may: he came late into a pause and was served before a long one, which
        /// without the pause had begun.)
        #[test]
        fn nobody_is_slower_without_a_cause(
            times in prop::collection::vec((0..30_u64, 1..30_u64), 1..20),
            pause in (0..200_u64, 0..200_u64),
        ) {
            let (mut came_ns, mut free_ns) = (0, 0);
            let mut jobs = Vec::new();
            for (after_ns, takes_ns) in times {
                came_ns += after_ns;
                free_ns = came_ns.max(free_ns) + takes_ns;
                jobs.push(job(came_ns, free_ns));
            }
            let replay = paused(&jobs, (pause.0, pause.0 + pause.1));
            let (with, without) = (replay.without(|_, _| 0), replay.without(third));
            for (with, without) in with.iter().zip(&without) {
                prop_assert!(without <= with && with - without <= pause.1 / 3 + 1, "{jobs:?}");
            }
        }
    }

    #[test]
    fn quantiles_are_of_the_nearest_rank() {
        let all: Vec<u64> = (1..=1000).collect();
        assert_eq!([500_000, 990_000, 999_000].map(|p| quantile(&all, p)), [500, 990, 999]);
        assert_eq!((quantile(&[], 990_000), quantile(&[5], 1)), (0, 5));
    }
}
