//! Predicts latencies by replaying the recorded requests without a cause. Each server works through
//! its recorded service slots. A slot begins when its request has arrived and the previous slot is
//! over.
//!
//! If several slots could begin, the one that was recorded first is next, because each service has
//! its own order for waiting requests. So requests that queued behind a pause become faster when
//! the pause is removed. Some requests arrived during the pause and would have found the server
//! free: they no longer wait.
//!
//! Two effects stay as they were recorded. A slot after a pause includes no wake-up. A client that
//! sends a request after each answer sends it at the recorded time.
//!
//! A replay without a change gives the recorded latencies for every service. The module `queues`
//! decides whether the service is a queue, so that replays with a change are valid.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::segment::saturating_sum;
use crate::service_slots::{Job, ServiceSlot};

/// How much of some time each cause took, as (cause, nanoseconds).
pub(crate) type Parts = Vec<(usize, u64)>;

/// The content of a service slot. The replay may move it in time.
#[derive(Debug)]
struct SlotWork {
    job: usize,
    ns: u64,
    parts: Parts,
}

#[derive(Debug)]
struct Server {
    /// In the order in which the slots were recorded.
    pieces: Vec<SlotWork>,
    /// Indices into `pieces`, in the order in which the requests arrived.
    by_arrival: Vec<usize>,
}

/// A request with the time after its slots, which overlaps with other requests.
#[derive(Debug)]
struct ReplayedJob {
    arrived_ns: u64,
    after: SlotWork,
}

#[derive(Debug)]
pub(crate) struct Replay {
    servers: Vec<Server>,
    jobs: Vec<ReplayedJob>,
}

impl SlotWork {
    fn without(&self, missing: impl Fn(usize, u64) -> u64) -> u64 {
        let less = saturating_sum(self.parts.iter().map(|&(cause, ns)| missing(cause, ns)));
        self.ns.saturating_sub(less)
    }
}

impl Replay {
    /// `parts` returns, for a job and some spans of its time, how much of each span each cause
    /// took.
    pub(crate) fn of(
        jobs: &[Job],
        slots: &[Vec<ServiceSlot>],
        parts: impl Fn(usize, &[(u64, u64)]) -> Vec<Parts>,
    ) -> Self {
        let mut spans: Vec<Vec<(u64, u64)>> = vec![Vec::new(); jobs.len()];
        for slot in slots.iter().flatten() {
            spans[slot.job].push((slot.from_ns, slot.to_ns));
        }
        let mut parts_of: Vec<std::vec::IntoIter<Parts>> = Vec::with_capacity(jobs.len());
        for (at, (job, mut spans)) in jobs.iter().zip(spans).enumerate() {
            spans.push((job.served_ns, job.ended_ns));
            parts_of.push(parts(at, &spans).into_iter());
        }
        let mut piece = |job: usize, from_ns: u64, to_ns: u64| SlotWork {
            job,
            ns: to_ns.saturating_sub(from_ns),
            parts: parts_of[job].next().unwrap_or_default(),
        };
        let mut server = |slots: &Vec<ServiceSlot>| {
            let pieces = slots.iter().map(|slot| piece(slot.job, slot.from_ns, slot.to_ns));
            let mut by_arrival: Vec<usize> = (0..slots.len()).collect();
            by_arrival.sort_by_key(|&at| jobs[slots[at].job].arrived_ns);
            Server { pieces: pieces.collect(), by_arrival }
        };
        let servers = slots.iter().map(&mut server).collect();
        let jobs = jobs.iter().enumerate().map(|(at, job)| ReplayedJob {
            arrived_ns: job.arrived_ns,
            after: piece(at, job.served_ns, job.ended_ns),
        });
        Self { servers, jobs: jobs.collect() }
    }

    /// The latency of each job, if `missing` is removed from each of its parts.
    pub(crate) fn latencies_without(&self, missing: impl Fn(usize, u64) -> u64) -> Vec<u64> {
        let mut latencies = vec![0; self.jobs.len()];
        for Server { pieces, by_arrival } in &self.servers {
            let arrived_ns = |at: usize| self.jobs[pieces[at].job].arrived_ns;
            let mut now_ns = 0;
            let mut waiting = BinaryHeap::new();
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

    /// The time of each job without any waiting, if `missing` is removed from each of its parts.
    pub(crate) fn service_times_without(&self, missing: impl Fn(usize, u64) -> u64) -> Vec<u64> {
        let mut served = vec![0_u64; self.jobs.len()];
        let slots = self.servers.iter().flat_map(|server| &server.pieces);
        for piece in slots.chain(self.jobs.iter().map(|job| &job.after)) {
            served[piece.job] = served[piece.job].saturating_add(piece.without(&missing));
        }
        served
    }
}

/// The smallest latency that at least `per_million` of a million requests did not exceed.
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

    /// A replay with a pause as the only cause: it took its whole span from each request that was
    /// there.
    fn paused(jobs: &[Job], pause: (u64, u64)) -> Replay {
        let part = move |_: usize, spans: &[(u64, u64)]| {
            let within = |&(from_ns, to_ns): &(u64, u64)| {
                to_ns.clamp(pause.0, pause.1) - from_ns.clamp(pause.0, pause.1)
            };
            spans.iter().map(|span| vec![(3, within(span))]).collect()
        };
        Replay::of(jobs, &service_slots::assign(jobs), part)
    }

    /// Goal: requests that queue behind a pause are faster without it. Method: three requests of 1
    /// ms, and the first is paused for 10 ms while the others arrive. A fourth request arrives long
    /// after that.
    #[test]
    fn a_pause_is_charged_for_the_queue_behind_it() {
        let jobs = [(100, 111), (102, 112), (103, 113), (200, 201)];
        let jobs = jobs.map(|(arrived, served)| job(arrived * MS, served * MS));
        let replay = paused(&jobs, (100 * MS, 110 * MS));
        assert_eq!(
            replay.latencies_without(|_, _| 0),
            [11, 10, 10, 1].map(|ms| ms * MS),
            "unchanged"
        );
        let all = replay.latencies_without(|cause, ns| if cause == 3 { ns } else { 0 });
        assert_eq!(all, [MS; 4]);
        let other = replay.latencies_without(|cause, ns| if cause == 4 { ns } else { 0 });
        assert_eq!(other[0], 11 * MS);
        assert_eq!(replay.service_times_without(|_, ns| ns)[0], MS);
    }

    /// Goal: requests that still arrive together keep their order of service; for other requests
    /// the order does not matter. Method: a pause until 1,000, after which the last request is
    /// served first. The pause is removed as a whole and in part. Then two requests arrive at the
    /// same moment.
    #[test]
    fn the_order_of_service_is_kept() {
        let worked = |one: Job| Job { worked: vec![(one.served_ns - 10, one.served_ns)], ..one };
        let jobs = [job(100, 1_030), job(200, 1_020), job(300, 1_010)].map(worked);
        let replay = paused(&jobs, (0, 1_000));
        assert_eq!(replay.latencies_without(|_, _| 0), [930, 820, 710], "unchanged");
        assert_eq!(replay.latencies_without(|_, ns| ns), [10, 10, 10]);
        let little = replay.latencies_without(|_, ns| ns / 900);
        assert_eq!(little, [929, 819, 709], "a little less is a little faster");
        let jobs = [job(100, 1_030), job(300, 1_020), job(300, 1_010)].map(worked);
        assert_eq!(paused(&jobs, (0, 1_000)).latencies_without(|_, ns| ns), [10, 20, 10]);
    }

    /// Goal: an answer that TCP holds back does not block its server. Method: an answer is held
    /// back for 1,000 while another request is paused and served.
    #[test]
    fn a_held_answer_blocks_no_request() {
        let jobs = [Job { ended_ns: 1_110, ..job(100, 110) }, job(200, 310)];
        let replay = paused(&jobs, (200, 300));
        assert_eq!(replay.latencies_without(|_, _| 0), [1_010, 110]);
        assert_eq!(
            replay.latencies_without(|_, ns| ns),
            [910, 10],
            "the pause lies in what was held, too"
        );
    }

    /// Removes a third of cause 3.
    fn third(cause: usize, ns: u64) -> u64 {
        if cause == 3 { ns / 3 } else { 0 }
    }

    proptest! {
        /// Goal: an unchanged replay gives the recorded latencies. Method: any jobs, in any order.
        #[test]
        fn an_unchanged_replay_is_as_recorded(jobs in any_jobs(), pause in (0..60_u64, 0..60_u64)) {
            let pause = (pause.0, pause.0 + pause.1);
            let latencies: Vec<u64> =
                jobs.iter().map(|job| job.ended_ns - job.arrived_ns).collect();
            prop_assert_eq!(paused(&jobs, pause).latencies_without(|_, _| 0), latencies);
        }

        /// Goal: with service in the order of arrival, removing a cause makes no request slower,
        /// and none faster by more than the whole cause. Method: queues of one server, and pauses.
        /// (In another order a request may become slower. Example: it arrived late in a pause, and
        /// was served before a long request that would have begun without the pause.)
        #[test]
        fn no_request_is_slower_without_a_cause(
            times in prop::collection::vec((0..30_u64, 1..30_u64), 1..20),
            pause in (0..200_u64, 0..200_u64),
        ) {
            let mut came_ns = 0;
            let mut free_ns = 0;
            let mut jobs = Vec::new();
            for (after_ns, takes_ns) in times {
                came_ns += after_ns;
                free_ns = came_ns.max(free_ns) + takes_ns;
                jobs.push(job(came_ns, free_ns));
            }
            let replay = paused(&jobs, (pause.0, pause.0 + pause.1));
            let with = replay.latencies_without(|_, _| 0);
            let without = replay.latencies_without(third);
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
