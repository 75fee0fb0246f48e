//! The same requests once more, without a cause: each thread that serves, or each CPU that several
//! of them share, is a FIFO queue.
//!
//! The first answer ends the turn of whoever came first, the second that of the second, and so on,
//! whichever requests they were for. A turn begins when its request has come and the one before it
//! has ended. So who queued behind a pause is faster by it too, and in what order a service works
//! off what has come together behind it is no part of anybody's turn. Whether a service is such a
//! queue is not known: the requests are replayed unchanged first, and how far that is from what was
//! measured is told. One that is asked for many things at once, and ends the last before the first,
//! is far from it.

use std::collections::BTreeMap;

use crate::segment::total;

/// A request, as far as a queue sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Job {
    pub server: u32,
    pub arrived_ns: u64,
    pub ended_ns: u64,
    /// By cause, how much of its time it had; sorted, and each cause once.
    pub by_cause: Vec<(usize, u64)>,
}

/// A job's turn at its server.
#[derive(Clone, Debug)]
struct Turn {
    job: usize,
    arrived_ns: u64,
    service_ns: u64,
    /// By cause, its part of the service time.
    parts: Vec<(usize, u64)>,
}

#[derive(Debug)]
pub struct Replay {
    /// For each server, in the order of arrival.
    servers: Vec<Vec<Turn>>,
    jobs: usize,
}

impl Replay {
    /// `part` says how much of a job a cause had from one time to another.
    pub fn of(jobs: &[Job], part: impl Fn(usize, u64, u64) -> Vec<(usize, u64)>) -> Self {
        let mut servers: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (at, job) in jobs.iter().enumerate() {
            servers.entry(job.server).or_default().push(at);
        }
        let turns = |mut at: Vec<usize>| -> Vec<Turn> {
            let mut ended = at.clone();
            ended.sort_by_key(|&at| (jobs[at].ended_ns, jobs[at].arrived_ns));
            at.sort_by_key(|&at| (jobs[at].arrived_ns, jobs[at].ended_ns));
            let mut free_ns = 0;
            let turn = |(job, answered): (usize, usize)| {
                let (Job { arrived_ns, .. }, Job { ended_ns, .. }) = (&jobs[job], &jobs[answered]);
                let begins_ns = (*arrived_ns).max(free_ns);
                free_ns = *ended_ns;
                // What kept the server before the answered one came, kept whoever waited then.
                let came_ns = jobs[answered].arrived_ns.max(begins_ns).min(*ended_ns);
                let mut parts: BTreeMap<usize, u64> = BTreeMap::new();
                let waited = (job, begins_ns, came_ns.min(jobs[job].ended_ns));
                for (of, from_ns, to_ns) in [waited, (answered, came_ns, *ended_ns)] {
                    if from_ns < to_ns {
                        for (cause, ns) in part(of, from_ns, to_ns) {
                            *parts.entry(cause).or_default() += ns;
                        }
                    }
                }
                Turn {
                    job,
                    arrived_ns: *arrived_ns,
                    service_ns: ended_ns.saturating_sub(begins_ns),
                    parts: parts.into_iter().collect(),
                }
            };
            at.into_iter().zip(ended).map(turn).collect()
        };
        Self { servers: servers.into_values().map(turns).collect(), jobs: jobs.len() }
    }

    /// Each job's latency, if of its parts so much were missing.
    pub fn without(&self, missing: impl Fn(usize, u64) -> u64) -> Vec<u64> {
        let mut latencies = vec![0; self.jobs];
        for turns in &self.servers {
            let mut free_ns = 0;
            for turn in turns {
                let less = total(turn.parts.iter().map(|&(cause, ns)| missing(cause, ns)));
                let begins_ns = turn.arrived_ns.max(free_ns);
                free_ns = begins_ns.saturating_add(turn.service_ns.saturating_sub(less));
                latencies[turn.job] = free_ns - turn.arrived_ns;
            }
        }
        latencies
    }

    /// Each job's service time, if so much were missing.
    pub fn served(&self, missing: impl Fn(usize, u64) -> u64) -> Vec<u64> {
        let mut served = vec![0; self.jobs];
        for turn in self.servers.iter().flatten() {
            let less = total(turn.parts.iter().map(|&(cause, ns)| missing(cause, ns)));
            served[turn.job] = turn.service_ns.saturating_sub(less);
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

    /// Goal: who queued behind a pause is faster without it. Method: three requests of 1 ms, the
    /// first paused for 10 ms, the others come meanwhile; a fourth long after.
    #[test]
    fn a_pause_is_charged_for_those_who_queue_behind_it() {
        const MS: u64 = 1_000_000;
        let job = |arrived: u64, ended: u64| Job {
            server: 7,
            arrived_ns: arrived * MS,
            ended_ns: ended * MS,
            by_cause: Vec::new(),
        };
        let jobs = [job(100, 111), job(102, 112), job(103, 113), job(200, 201)];
        let part = |at: usize, _, _| if at == 0 { vec![(3, 10 * MS)] } else { Vec::new() };
        let replay = Replay::of(&jobs, part);
        assert_eq!(replay.without(|_, _| 0), [11, 10, 10, 1].map(|ms| ms * MS), "unchanged");
        let all = replay.without(|cause, ns| if cause == 3 { ns } else { 0 });
        assert_eq!(all, [MS; 4]);
        let other = replay.without(|cause, ns| if cause == 4 { ns } else { 0 });
        assert_eq!(other[0], 11 * MS);
        assert_eq!(replay.served(|_, ns| ns)[0], MS);
    }

    /// A service that works on many requests at once is no FIFO, and its replay shows it.
    #[test]
    fn overtaking_shows() {
        let job =
            |arrived_ns, ended_ns| Job { server: 1, arrived_ns, ended_ns, by_cause: Vec::new() };
        let replay = Replay::of(&[job(10, 100), job(20, 30)], |_, _, _| Vec::new());
        assert_eq!(replay.without(|_, _| 0), [20, 80]);
    }

    /// Goal: in which order those that came together were served, is no part of a turn, and what
    /// kept them all is missing once. Method: a pause until 1,000, after which the last to come is
    /// served first; each knows of the part that it was there for.
    #[test]
    fn an_order_of_its_own() {
        let job =
            |arrived_ns, ended_ns| Job { server: 1, arrived_ns, ended_ns, by_cause: Vec::new() };
        let jobs = [job(100, 1_030), job(200, 1_020), job(300, 1_010)];
        let paused = |_, from_ns: u64, to_ns: u64| vec![(0, to_ns.min(1_000) - from_ns.min(1_000))];
        let replay = Replay::of(&jobs, paused);
        assert_eq!(replay.without(|_, _| 0), [910, 820, 730], "unchanged, but for the order");
        assert_eq!(replay.without(|_, ns| ns), [10, 10, 10]);
    }

    #[test]
    fn quantiles_are_of_the_nearest_rank() {
        let all: Vec<u64> = (1..=1000).collect();
        assert_eq!([500_000, 990_000, 999_000].map(|p| quantile(&all, p)), [500, 990, 999]);
        assert_eq!((quantile(&[], 990_000), quantile(&[5], 1)), (0, 5));
    }
}
