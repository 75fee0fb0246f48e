//! Replays the requests and pauses of a turn in simulated time. Policies are judged by the
//! simulator before anything runs, so its prediction is compared with the proxy.
//!
//! The simulator knows policies, queues and stops, but no networks or processes. What a request
//! takes besides its own work and the queue is measured in a turn without stops. That turn has the
//! very same requests, so the measurement includes what the machine did to some of them.

use std::time::Duration;

use elfen_console::duration::number;
use elfen_hedge::policy::Policy;
use elfen_hedge::policy::simulate::{Plan, Request, simulate};
use elfen_rt::clock::nanos;

use super::load::Asked;

/// The proxy's defaults: the limit of duplicates, and the interval between two polls.
const EXTRA_PER_MILLION: u64 = 50_000;
const LOOK_EVERY: Duration = Duration::from_micros(500);

/// Returns the requests in the order in which they were sent, with the time of sending in ns.
fn sent(asked: &[Asked]) -> Vec<(u64, Asked)> {
    let ns = |us: f64| nanos(Duration::from_secs_f64(us.max(0.0) / 1e6));
    let mut sent: Vec<(u64, Asked)> =
        asked.iter().map(|asked| (nanos(asked.due) + ns(asked.late_us), *asked)).collect();
    sent.sort_by_key(|(sent_ns, _)| *sent_ns);
    sent
}

/// Builds the simulator's requests from a turn without stops. For each request, it subtracts the
/// work and the queueing at one server from the measured latency. The rest is the time around the
/// work.
fn undisturbed(sent: &[(u64, Asked)], work_ns: u64) -> Vec<Request> {
    let mut free_ns = 0;
    let request = |&(comes_ns, asked): &(u64, Asked)| {
        free_ns = comes_ns.max(free_ns) + work_ns;
        let took_us = (asked.took_us - asked.late_us).max(0.0);
        let took_ns = nanos(Duration::from_secs_f64(took_us / 1e6));
        let around_ns = took_ns.saturating_sub(free_ns - comes_ns);
        Request { comes_ns, work_ns, around_ns, may_double: true }
    };
    sent.iter().map(request).collect()
}

/// Predicts the latency of these requests under `policy`, if the first server had been stopped at
/// the given times. `asked` was measured without stops. Each request contains `work_us` of work.
pub(super) fn latencies_us(
    policy: Policy,
    asked: &[Asked],
    work_us: u32,
    stopped: &[(Duration, Duration)],
) -> Vec<f64> {
    let first = stopped.iter().map(|(from, to)| (nanos(*from), nanos(*to))).collect();
    let sent = sent(asked);
    let plan = Plan {
        requests: undisturbed(&sent, u64::from(work_us) * 1_000),
        pauses: [first, Vec::new()],
        poll_interval_ns: nanos(LOOK_EVERY),
    };
    let outcome = simulate(&plan, policy, EXTRA_PER_MILLION);
    let latencies = sent.iter().zip(outcome.latencies_ns);
    latencies.filter_map(|((_, asked), ns)| Some(number(ns?) / 1e3 + asked.late_us)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORK_US: u32 = 500;

    fn each_10_ms() -> Vec<Asked> {
        let asked =
            |at: u64| Asked { due: Duration::from_millis(at * 10), late_us: 100.0, took_us: 700.0 };
        (0..100).map(asked).collect()
    }

    /// Goal: without a policy a request waits for a stop to end, and with a policy it does not. The
    /// time around the work is added to its own request. Method: one request every 10 ms. One of
    /// them meets a stop of 8 ms, and another one took 3 ms longer without stops.
    #[test]
    fn a_stop_in_simulated_time() {
        let ms = Duration::from_millis;
        let (mut asked, stopped) = (each_10_ms(), [(ms(499), ms(507))]);
        asked[70].took_us = 3_700.0;
        asked.reverse();
        let sorted = |policy| {
            let mut all = latencies_us(policy, &asked, WORK_US, &stopped);
            all.sort_unstable_by(f64::total_cmp);
            all
        };
        let none = sorted(Policy::None);
        assert_eq!((none.len(), none[50], none[98], none[99]), (100, 700.0, 3_700.0, 7_600.0));
        let look = sorted(Policy::Look);
        assert!((700.0..2_500.0).contains(&look[98]) && look[99] == 3_700.0, "{look:?}");
    }

    /// Goal: queueing does not count as time around the work. Method: two requests at once.
    #[test]
    fn queueing_is_not_around_a_request() {
        let due = Duration::from_millis(5);
        let late_us = 50.0;
        let asked = [750.0, 1_250.0].map(|took_us| Asked { due, late_us, took_us });
        let around =
            undisturbed(&sent(&asked), 500_000).iter().map(|r| r.around_ns).collect::<Vec<_>>();
        assert_eq!(around, [200_000; 2]);
        let again = latencies_us(Policy::None, &asked, WORK_US, &[]);
        assert_eq!(again, [750.0, 1_250.0], "as they were");
    }
}
