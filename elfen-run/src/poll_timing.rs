//! When a guard polls its request lane.
//!
//! A poll costs the batch one timer interrupt, which in a virtual machine can take tens of
//! microseconds. On a lane that has idled for long the guard therefore allows timer slack, so that
//! the poll can share the interrupt of the kernel's tick. The slack is at most a sixty-fourth of
//! the idle time, so the possible overlap stays small compared with the borrowed time.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use elfen_rt::clock::nanos;
use elfen_rt::signal::service::ServiceSlot;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How often guards poll, as the user requested.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PollTiming {
    /// On a lane that is in use.
    pub interval: Duration,
    /// How much later a poll may come on a lane that idles.
    pub slack: Duration,
}

/// The poll timing in reports.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, JsonSchema)]
pub struct PollReport {
    /// How long guards slept between two polls.
    pub poll_interval_ns: u64,
    /// By how much the kernel could delay a poll on an idle lane.
    pub timer_slack_ns: u64,
}

impl From<PollTiming> for PollReport {
    fn from(timing: PollTiming) -> Self {
        let PollTiming { interval, slack } = timing;
        Self { poll_interval_ns: nanos(interval), timer_slack_ns: nanos(slack) }
    }
}

const SLACK_OF_IDLE: u64 = 64;
/// Less slack saves few interrupts, and does not reduce the overlap of a service that never idles
/// for long.
const SLACK_LEAST_NS: u64 = 500_000;
/// A lane that is busy for less than this between two polls runs housekeeping. A request that is
/// this short ends before any poll anyway.
const HOUSEKEEPING_NS: u64 = 50_000;

/// What a guard knows about a request lane at a poll.
#[derive(Clone, Copy, Debug)]
pub(super) struct Activity {
    /// The lane's total busy time so far; `None` without a task map.
    pub(super) busy_ns: Option<u64>,
    /// Finished requests so far; 0 on a lane without a service.
    pub(super) finished: u64,
}

impl Activity {
    pub(super) fn of(busy_ns: Option<u64>, service: Option<&ServiceSlot>) -> Self {
        let finished = service.map_or(0, |slot| slot.finished_requests.load(Relaxed));
        Self { busy_ns, finished }
    }
}

/// Since when a request lane idles.
#[derive(Debug)]
pub(super) struct IdleTime {
    since_ns: u64,
    before: Activity,
}

impl IdleTime {
    pub(super) fn from(now_ns: u64, activity: Activity) -> Self {
        Self { since_ns: now_ns, before: activity }
    }

    /// How much later than usual the next poll may come. The slack is a power of two, so it changes
    /// only a few times while the lane goes on idling.
    pub(super) fn slack(&mut self, busy: bool, activity: Activity, now_ns: u64) -> Duration {
        let before = std::mem::replace(&mut self.before, activity);
        let busy_ns =
            activity.busy_ns.zip(before.busy_ns).map(|(now, then)| now.saturating_sub(then));
        // Where busy time is counted, the task that this poll found does not matter: CPU time tells
        // a request from housekeeping. A check that rings would always find housekeeping threads.
        let served = activity.finished != before.finished;
        if busy_ns.map_or(busy || served, |ns| ns > HOUSEKEEPING_NS) {
            self.since_ns = now_ns;
        }
        let allowed_ns = now_ns.saturating_sub(self.since_ns) / SLACK_OF_IDLE;
        match allowed_ns.checked_ilog2() {
            Some(power) if allowed_ns >= SLACK_LEAST_NS => Duration::from_nanos(1 << power),
            _ => Duration::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const IDLE: bool = false;
    const BUSY: bool = true;

    fn tasks(busy_ns: u64) -> Activity {
        Activity { busy_ns: Some(busy_ns), finished: 0 }
    }

    #[test]
    fn slack_is_a_small_part_of_the_idle_time() {
        let mut idling = IdleTime::from(0, tasks(0));
        let mut slack_ns = Vec::new();
        for now_ns in (0..1_000 * MS).step_by(500_000) {
            let slack = idling.slack(IDLE, tasks(0), now_ns);
            assert!(
                slack.as_nanos() <= u128::from(now_ns / SLACK_OF_IDLE),
                "{slack:?} after {now_ns}"
            );
            slack_ns.push(slack);
        }
        slack_ns.dedup();
        assert!(slack_ns.len() < 8, "it changes rarely: {slack_ns:?}");
        assert!(slack_ns.last() > Some(&Duration::from_millis(7)));
    }

    #[test]
    fn a_request_resets_the_slack_whether_a_poll_sees_it_or_not() {
        let fresh = Duration::ZERO;
        for seen in [IDLE, BUSY] {
            let mut idling = IdleTime::from(0, tasks(0));
            assert!(idling.slack(seen, tasks(20_000), 100 * MS) > fresh, "only housekeeping");
            assert_eq!(idling.slack(seen, tasks(130_000), 202 * MS), fresh);
            assert!(idling.slack(seen, tasks(130_000), 302 * MS) > fresh);
        }

        let served = |finished| Activity { busy_ns: None, finished };
        let mut idling = IdleTime::from(0, served(3));
        assert_eq!(idling.slack(BUSY, served(3), 50 * MS), fresh, "busy time is not counted");
        assert!(idling.slack(IDLE, served(3), 150 * MS) > fresh);
        assert_eq!(idling.slack(IDLE, served(4), 151 * MS), fresh);
    }
}
