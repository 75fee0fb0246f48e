//! The requests and pauses of a turn again, in simulated time: whether the simulator, by which
//! policies are judged before anything runs, says what the proxy does.
//!
//! It knows the policies, queues and stops, and nothing of networks and processes. What each
//! request takes besides its own work and those before it is measured without stops: the
//! very same requests were asked then, in a turn of their own, and what the machine does to some of
//! them is in it.

use std::time::Duration;

use elfen_console::duration::number;
use elfen_hedge::policy::Policy;
use elfen_hedge::policy::simulate::{Plan, Request, simulate};
use elfen_rt::clock::nanos;

use super::load::Asked;

/// As the proxy has them, unless it is told otherwise.
const EXTRA_PER_MILLION: u64 = 50_000;
const LOOK_EVERY: Duration = Duration::from_micros(500);

/// In the order in which they were sent.
fn sent(asked: &[Asked]) -> Vec<(u64, Asked)> {
    let ns = |us: f64| nanos(Duration::from_secs_f64(us.max(0.0) / 1e6));
    let mut sent: Vec<(u64, Asked)> =
        asked.iter().map(|asked| (nanos(asked.due) + ns(asked.late_us), *asked)).collect();
    sent.sort_by_key(|(sent_ns, _)| *sent_ns);
    sent
}

/// Requests without stops: each with what its answer took besides so much work, and
/// that of those before it, for one server.
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

/// How long each of these requests would have taken, of which so many microseconds were work, if
/// the first server was stopped then; they were asked without stops.
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
    let told = sent.iter().zip(outcome.latencies_ns);
    told.filter_map(|((_, asked), ns)| Some(number(ns?) / 1e3 + asked.late_us)).collect()
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

    /// Goal: without a policy a stop is waited for, with one it is not; what lies around the work
    /// is added, to each request its own. Method: a request each 10 ms, of which one meets a stop
    /// of 8 ms, and another took 3 ms longer without stops.
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

    /// Goal: a request that waited for another has no more around its work. Method: two at once.
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
