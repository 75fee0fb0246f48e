//! Replays the queue of a run on an emulated core, with and without what the core added.
//!
//! Each request has its due time, its own work, and the time that the emulated core added. So the
//! same requests can be served once more, at the same times and with the same work, in the order of
//! their arrival. The only difference between both replays is what the batch cost.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use simulator::time::{nanoseconds, real};

use crate::record::Served;

/// Returns the p99 of these requests, divided by their p99 without what was added. `None` without
/// requests.
pub(crate) fn p99_ratio(served: &[Served], workers: usize) -> Option<f64> {
    let with = p99_ns(served, workers, |request| request.work_us + request.added_us)?;
    let without = p99_ns(served, workers, |request| request.work_us)?;
    (without > 0).then(|| real(with) / real(without))
}

/// Serves the requests in the order of their arrival, each by the worker that is free first.
fn p99_ns(served: &[Served], workers: usize, takes_us: impl Fn(&Served) -> f64) -> Option<u64> {
    let ns = |us: f64| nanoseconds(us.max(0.0) * 1e3);
    let mut free_at: BinaryHeap<Reverse<u64>> = (0..workers.max(1)).map(|_| Reverse(0)).collect();
    // Requests of the warm-up are not recorded, so the queue is empty at the beginning.
    let mut latencies: Vec<u64> = served
        .iter()
        .map(|request| {
            let due = ns(request.due_us);
            let Reverse(free) = free_at.pop().unwrap_or(Reverse(0));
            let ended = free.max(due).saturating_add(ns(takes_us(request)));
            free_at.push(Reverse(ended));
            ended - due
        })
        .collect();
    let rank = (latencies.len() * 990).div_ceil(1000);
    let at = rank.checked_sub(1)?;
    Some(*latencies.select_nth_unstable(at).1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: what was added to a request also delays the requests behind it. Method: three requests
    /// of 1 ms, the second of which takes 1 ms longer. By hand, the third ends after 2.5 ms instead
    /// of 1.5 ms, because it is due 0.5 ms before the second is done.
    #[test]
    fn a_queue_passes_on_what_was_added() {
        let served = |added_us| {
            [(0.0, 1000.0, 0.0), (5000.0, 1000.0, added_us), (5500.0, 1000.0, 0.0)]
                .map(Served::from)
        };
        let all = |request: &Served| request.work_us + request.added_us;
        assert_eq!(p99_ns(&served(1000.0), 1, all), Some(2_500_000));
        assert_eq!(p99_ns(&served(1000.0), 1, |request| request.work_us), Some(1_500_000));
        let ratio = p99_ratio(&served(1000.0), 1).unwrap();
        assert!((ratio - 2.5 / 1.5).abs() < 1e-12, "{ratio}");
        assert_eq!(p99_ratio(&served(0.0), 1), Some(1.0));
        assert_eq!(p99_ratio(&[], 1), None);
    }

    #[test]
    fn a_second_worker_takes_the_next_request() {
        let served = [(0.0, 1000.0, 0.0), (0.0, 1000.0, 0.0)].map(Served::from);
        let work = |request: &Served| request.work_us;
        assert_eq!(p99_ns(&served, 1, work), Some(2_000_000));
        assert_eq!(p99_ns(&served, 2, work), Some(1_000_000));
    }
}
