//! Whose turn it was at a server, from the first arrival to the last answer.
//!
//! A turn ends where the server has worked for a request and goes over to another, and where it is
//! done with one. It belongs to that request as far back as the server worked for it; what kept the
//! server before that, since the turn before, kept it from whoever has waited longest, and is his.
//! So turns cover all of the time in which anybody waits, one after the other, in whichever order a
//! service works off what has come; and a pause is in one of them, however many come meanwhile.

use std::collections::BTreeMap;

/// A request, as far as a server sees it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Job {
    pub(crate) server: u32,
    pub(crate) arrived_ns: u64,
    /// From when to when the server worked for it.
    pub(crate) worked: Vec<(u64, u64)>,
    /// The server was done with it.
    pub(crate) served_ns: u64,
    /// Its answer was on its way.
    pub(crate) ended_ns: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Turn {
    pub(crate) job: usize,
    pub(crate) from_ns: u64,
    pub(crate) to_ns: u64,
}

/// Where a turn ends; of those that end at once, in the order of the fields.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct End {
    at_ns: u64,
    is_last: bool,
    job: usize,
    /// The work that it ends, if any, began then.
    began_ns: Option<u64>,
}

/// For each server its turns, in order. The last turn of a job ends when it is served.
pub(crate) fn of(jobs: &[Job]) -> Vec<Vec<Turn>> {
    let mut servers: BTreeMap<u32, Vec<End>> = BTreeMap::new();
    for (job, one) in jobs.iter().enumerate() {
        let ends = servers.entry(one.server).or_default();
        let served_ns = one.served_ns.max(one.arrived_ns);
        let mut last = End { at_ns: served_ns, is_last: true, job, began_ns: None };
        for &(from_ns, to_ns) in &one.worked {
            match to_ns {
                to_ns if to_ns <= one.arrived_ns || served_ns <= from_ns => {}
                to_ns if to_ns < served_ns => {
                    ends.push(End { at_ns: to_ns, is_last: false, job, began_ns: Some(from_ns) })
                }
                _ => last.began_ns = Some(last.began_ns.unwrap_or(from_ns).min(from_ns)),
            }
        }
        ends.push(last);
    }
    servers.into_values().map(|ends| of_server(jobs, ends)).collect()
}

fn of_server(jobs: &[Job], mut ends: Vec<End>) -> Vec<Turn> {
    ends.sort_unstable();
    // Whoever is worked for twice in a row had one turn.
    ends.dedup_by(|next, end| {
        let goes_on = next.job == end.job && !end.is_last;
        if goes_on {
            *end = End { began_ns: end.began_ns.or(next.began_ns), ..*next };
        }
        goes_on
    });
    // From each end on, the first to come of those who are not served before it.
    let mut first = Vec::with_capacity(ends.len());
    let mut longest = None::<usize>;
    for end in ends.iter().rev() {
        longest = match longest {
            Some(other) if jobs[other].arrived_ns <= jobs[end.job].arrived_ns => Some(other),
            _ => Some(end.job),
        };
        first.push(longest.unwrap_or(end.job));
    }
    let (mut turns, mut free_ns) = (Vec::with_capacity(ends.len()), 0);
    for (end, longest) in ends.iter().zip(first.into_iter().rev()) {
        let begins_ns = free_ns.max(jobs[longest].arrived_ns);
        let own_ns = begins_ns.max(jobs[end.job].arrived_ns).max(end.began_ns.unwrap_or(0));
        let own_ns = if longest == end.job { begins_ns } else { own_ns.min(end.at_ns) };
        if begins_ns < own_ns {
            turns.push(Turn { job: longest, from_ns: begins_ns, to_ns: own_ns });
        }
        turns.push(Turn { job: end.job, from_ns: own_ns, to_ns: end.at_ns });
        free_ns = end.at_ns;
    }
    turns
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    fn job(arrived_ns: u64, worked: &[(u64, u64)], served_ns: u64) -> Job {
        let worked = worked.to_vec();
        Job { server: 1, arrived_ns, worked, served_ns, ended_ns: served_ns }
    }

    fn told(jobs: &[Job]) -> Vec<(usize, u64, u64)> {
        let all = of(jobs).into_iter().flatten();
        all.map(|turn| (turn.job, turn.from_ns, turn.to_ns)).collect()
    }

    /// Goal: a pause is in one turn, of whoever was there first, though others come and are served
    /// before him. Method: a pause until 1,000, of three, of whom the last to come is first; and
    /// where nothing is known of who was worked for, until he came.
    #[test]
    fn what_kept_the_server_is_the_longest_waiting_ones() {
        let jobs = [job(100, &[], 1_030), job(200, &[], 1_020), job(300, &[(1_000, 1_010)], 1_010)];
        let expected = [(0, 100, 1_000), (2, 1_000, 1_010), (1, 1_010, 1_020), (0, 1_020, 1_030)];
        assert_eq!(told(&jobs), expected);
        let jobs = jobs.map(|job| Job { worked: Vec::new(), ..job });
        assert_eq!(told(&jobs)[..2], [(0, 100, 300), (2, 300, 1_010)]);
    }

    /// A service that reads what has come, works for each, and then answers all, the last first.
    #[test]
    fn whoever_is_worked_for_has_the_turn() {
        let jobs = [job(10, &[(10, 30), (35, 40)], 100), job(20, &[(45, 60)], 90)];
        assert_eq!(told(&jobs), [(0, 10, 40), (0, 40, 45), (1, 45, 90), (0, 90, 100)]);
        // And one that goes back to the first.
        let jobs = [job(10, &[(10, 30), (60, 80)], 80), job(20, &[(30, 60)], 90)];
        assert_eq!(told(&jobs), [(0, 10, 30), (1, 30, 60), (0, 60, 80), (1, 80, 90)]);
    }

    #[test]
    fn nobody_has_a_turn_while_nobody_waits() {
        assert_eq!(told(&[job(10, &[], 20), job(50, &[], 60)]), [(0, 10, 20), (1, 50, 60)]);
    }

    /// Jobs of two servers, in no order at all.
    pub(crate) fn any_jobs() -> impl Strategy<Value = Vec<Job>> {
        let worked = prop::collection::vec((0..99_u64, 0..20_u64), 0..4);
        let job = (0..2_u32, 0..60_u64, 0..40_u64, 0..9_u64, worked);
        let job = job.prop_map(|(server, arrived_ns, takes_ns, after_ns, worked)| {
            let worked = worked.into_iter().map(|(from_ns, ns)| (from_ns, from_ns + ns)).collect();
            let served_ns = arrived_ns + takes_ns;
            Job { server, arrived_ns, worked, served_ns, ended_ns: served_ns + after_ns }
        });
        prop::collection::vec(job, 0..20)
    }

    proptest! {
        /// Goal: turns follow each other, are within the time of whom they belong to, and leave
        /// nothing out in which anybody waits. Method: any jobs.
        #[test]
        fn turns_cover_the_time_in_which_somebody_waits(jobs in any_jobs()) {
            for turns in of(&jobs) {
                let mut free_ns = 0;
                for turn in &turns {
                    let own = &jobs[turn.job];
                    prop_assert!(free_ns <= turn.from_ns && turn.from_ns <= turn.to_ns);
                    prop_assert!(own.arrived_ns <= turn.from_ns && turn.to_ns <= own.served_ns);
                    let waits = |job: &Job| {
                        job.server == own.server
                            && job.arrived_ns < turn.from_ns
                            && job.served_ns > free_ns
                    };
                    prop_assert!(free_ns == turn.from_ns || !jobs.iter().any(waits));
                    free_ns = turn.to_ns;
                }
                for (at, job) in jobs.iter().enumerate() {
                    let last = turns.iter().rfind(|turn| turn.job == at);
                    prop_assert!(last.is_none_or(|last| last.to_ns == job.served_ns));
                }
            }
        }
    }
}
