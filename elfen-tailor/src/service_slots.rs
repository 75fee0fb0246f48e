//! Computes service slots: the times in which a server served each request.
//!
//! A slot ends when the server changes from one request to another, and when it is done with a
//! request. From the beginning of the server's work for a request, the slot belongs to that
//! request. If something kept the server busy before that work, that time is a slot of the request
//! that has waited longest.
//!
//! So slots follow each other, and cover all time in which any request waits, in whatever order the
//! service handles its requests. A pause lies in one slot, even if many requests arrive during it.

use std::collections::BTreeMap;

/// A request from the point of view of its server.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Job {
    pub(crate) server: u32,
    pub(crate) arrived_ns: u64,
    /// The spans in which the server worked for the request.
    pub(crate) worked: Vec<(u64, u64)>,
    /// When the server was done with the request.
    pub(crate) served_ns: u64,
    /// When the answer had left.
    pub(crate) ended_ns: u64,
}

/// A time in which a server served the job with this index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ServiceSlot {
    pub(crate) job: usize,
    pub(crate) from_ns: u64,
    pub(crate) to_ns: u64,
}

/// The end of a slot. Ends at the same time are ordered by the fields that follow.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct SlotEnd {
    at_ns: u64,
    is_last: bool,
    job: usize,
    /// When the work that ends here began; `None` if no work is known.
    began_ns: Option<u64>,
}

/// The slots of each server, in the order of time. The last slot of a job ends when the job is
/// served.
pub(crate) fn assign(jobs: &[Job]) -> Vec<Vec<ServiceSlot>> {
    let mut servers: BTreeMap<u32, Vec<SlotEnd>> = BTreeMap::new();
    for (job, one) in jobs.iter().enumerate() {
        let ends = servers.entry(one.server).or_default();
        let served_ns = one.served_ns.max(one.arrived_ns);
        let mut last = SlotEnd { at_ns: served_ns, is_last: true, job, began_ns: None };
        for &(from_ns, to_ns) in &one.worked {
            match to_ns {
                to_ns if to_ns <= one.arrived_ns || served_ns <= from_ns => {}
                to_ns if to_ns < served_ns => ends.push(SlotEnd {
                    at_ns: to_ns,
                    is_last: false,
                    job,
                    began_ns: Some(from_ns),
                }),
                _ => last.began_ns = Some(last.began_ns.unwrap_or(from_ns).min(from_ns)),
            }
        }
        ends.push(last);
    }
    servers.into_values().map(|ends| slots_of_server(jobs, ends)).collect()
}

fn slots_of_server(jobs: &[Job], mut ends: Vec<SlotEnd>) -> Vec<ServiceSlot> {
    ends.sort_unstable();
    // Join consecutive work for the same request into one slot.
    ends.dedup_by(|next, end| {
        let goes_on = next.job == end.job && !end.is_last;
        if goes_on {
            *end = SlotEnd { began_ns: end.began_ns.or(next.began_ns), ..*next };
        }
        goes_on
    });
    // For each slot end: of the jobs that end here or later, the job that arrived first.
    let mut first = Vec::with_capacity(ends.len());
    let mut longest = None::<usize>;
    for end in ends.iter().rev() {
        longest = match longest {
            Some(other) if jobs[other].arrived_ns <= jobs[end.job].arrived_ns => Some(other),
            _ => Some(end.job),
        };
        first.push(longest.unwrap_or(end.job));
    }
    let mut slots = Vec::with_capacity(ends.len());
    let mut free_ns = 0;
    for (end, longest) in ends.iter().zip(first.into_iter().rev()) {
        let begins_ns = free_ns.max(jobs[longest].arrived_ns);
        let own_ns = begins_ns.max(jobs[end.job].arrived_ns).max(end.began_ns.unwrap_or(0));
        let own_ns = if longest == end.job { begins_ns } else { own_ns.min(end.at_ns) };
        if begins_ns < own_ns {
            slots.push(ServiceSlot { job: longest, from_ns: begins_ns, to_ns: own_ns });
        }
        slots.push(ServiceSlot { job: end.job, from_ns: own_ns, to_ns: end.at_ns });
        free_ns = end.at_ns;
    }
    slots
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    fn job(arrived_ns: u64, worked: &[(u64, u64)], served_ns: u64) -> Job {
        let worked = worked.to_vec();
        Job { server: 1, arrived_ns, worked, served_ns, ended_ns: served_ns }
    }

    fn assigned(jobs: &[Job]) -> Vec<(usize, u64, u64)> {
        let all = assign(jobs).into_iter().flatten();
        all.map(|slot| (slot.job, slot.from_ns, slot.to_ns)).collect()
    }

    /// Goal: a pause lies in one slot, that of the request that arrived first, even if later
    /// requests are served before it. Method: three requests wait during a pause until 1,000. The
    /// last request to arrive is served first. The same again without any known work.
    #[test]
    fn time_before_work_is_the_longest_waiting_requests() {
        let jobs = [job(100, &[], 1_030), job(200, &[], 1_020), job(300, &[(1_000, 1_010)], 1_010)];
        let expected = [(0, 100, 1_000), (2, 1_000, 1_010), (1, 1_010, 1_020), (0, 1_020, 1_030)];
        assert_eq!(assigned(&jobs), expected);
        let jobs = jobs.map(|job| Job { worked: Vec::new(), ..job });
        assert_eq!(assigned(&jobs)[..2], [(0, 100, 300), (2, 300, 1_010)]);
    }

    /// The service reads all requests, works for each, and then answers them in reverse order.
    #[test]
    fn the_request_that_is_worked_for_has_the_slot() {
        let jobs = [job(10, &[(10, 30), (35, 40)], 100), job(20, &[(45, 60)], 90)];
        assert_eq!(assigned(&jobs), [(0, 10, 40), (0, 40, 45), (1, 45, 90), (0, 90, 100)]);
        // The service returns to the first request.
        let jobs = [job(10, &[(10, 30), (60, 80)], 80), job(20, &[(30, 60)], 90)];
        assert_eq!(assigned(&jobs), [(0, 10, 30), (1, 30, 60), (0, 60, 80), (1, 80, 90)]);
    }

    #[test]
    fn an_idle_server_has_no_slot() {
        assert_eq!(assigned(&[job(10, &[], 20), job(50, &[], 60)]), [(0, 10, 20), (1, 50, 60)]);
    }

    /// Random jobs of two servers, in any order.
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
        /// Goal: slots follow each other, lie within the time of their requests, and cover all time
        /// in which a request waits. Method: random jobs.
        #[test]
        fn slots_cover_the_time_in_which_a_request_waits(jobs in any_jobs()) {
            for slots in assign(&jobs) {
                let mut free_ns = 0;
                for slot in &slots {
                    let own = &jobs[slot.job];
                    prop_assert!(free_ns <= slot.from_ns && slot.from_ns <= slot.to_ns);
                    prop_assert!(own.arrived_ns <= slot.from_ns && slot.to_ns <= own.served_ns);
                    let waits = |job: &Job| {
                        job.server == own.server
                            && job.arrived_ns < slot.from_ns
                            && job.served_ns > free_ns
                    };
                    prop_assert!(free_ns == slot.from_ns || !jobs.iter().any(waits));
                    free_ns = slot.to_ns;
                }
                for (at, job) in jobs.iter().enumerate() {
                    let last = slots.iter().rfind(|slot| slot.job == at);
                    prop_assert!(last.is_none_or(|last| last.to_ns == job.served_ns));
                }
            }
        }
    }
}
