//! When a guard looks at its request lane.
//!
//! A look takes from the batch what a timer's interrupt costs, which in a virtual machine can be
//! tens of microseconds. A lane that has idled for long is therefore looked at a little later, if
//! that lets the look share the interrupt of the kernel's own tick: later by at most a sixty-fourth
//! of how long it has idled, so that what a batch may overlap stays small beside what it borrowed.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use elfen_rt::clock::nanos;
use elfen_rt::signal::service::ServiceSlot;
use serde::{Deserialize, Serialize};

/// How often guards look, as the user asked for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Looks {
    /// On a lane that is in use.
    pub every: Duration,
    /// How much later at most on one that idles.
    pub slack: Duration,
}

/// As reports have it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Looked {
    pub look_every_ns: u64,
    pub look_slack_ns: u64,
}

impl From<Looks> for Looked {
    fn from(looks: Looks) -> Self {
        let Looks { every, slack } = looks;
        Self { look_every_ns: nanos(every), look_slack_ns: nanos(slack) }
    }
}

const SLACK_OF_IDLE: u64 = 64;
/// Less slack saves few interrupts, and is no less overlap for the requests of a service
/// that is never idle for long.
const SLACK_LEAST_NS: u64 = 500_000;
/// A lane that is busy for less between two looks keeps house: requests that short
/// are over before any look.
const HOUSEKEEPING_NS: u64 = 50_000;

/// What a guard knows of a request lane at a look.
#[derive(Clone, Copy, Debug)]
pub(super) struct Activity {
    /// Until now, in all; without a task map, nothing.
    pub(super) busy_ns: Option<u64>,
    /// Requests so far; of a lane without a service, none.
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
pub(super) struct Idling {
    since_ns: u64,
    before: Activity,
}

impl Idling {
    pub(super) fn from(now_ns: u64, activity: Activity) -> Self {
        Self { since_ns: now_ns, before: activity }
    }

    /// How much later than usual the next look may come. Doubles as the lane goes on idling, so
    /// that it changes a few times only.
    pub(super) fn slack(&mut self, busy: bool, activity: Activity, now_ns: u64) -> Duration {
        let before = std::mem::replace(&mut self.before, activity);
        let busy_ns =
            activity.busy_ns.zip(before.busy_ns).map(|(now, then)| now.saturating_sub(then));
        // Where busy time is counted, it does not matter who is met: a request is known by what
        // it used, and whoever keeps house would be met at every visit by a check that rings.
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
    fn never_more_than_a_small_part_of_the_time_that_a_lane_has_idled() {
        let mut idling = Idling::from(0, tasks(0));
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
        assert!(slack_ns.len() < 8, "it changes seldom: {slack_ns:?}");
        assert!(slack_ns.last() > Some(&Duration::from_millis(7)));
    }

    #[test]
    fn begins_again_with_a_request_whether_a_look_meets_it_or_not() {
        let fresh = Duration::ZERO;
        for met in [IDLE, BUSY] {
            let mut idling = Idling::from(0, tasks(0));
            assert!(idling.slack(met, tasks(20_000), 100 * MS) > fresh, "somebody kept house");
            assert_eq!(idling.slack(met, tasks(130_000), 202 * MS), fresh);
            assert!(idling.slack(met, tasks(130_000), 302 * MS) > fresh);
        }

        let served = |finished| Activity { busy_ns: None, finished };
        let mut idling = Idling::from(0, served(3));
        assert_eq!(idling.slack(BUSY, served(3), 50 * MS), fresh, "nobody counts what it uses");
        assert!(idling.slack(IDLE, served(3), 150 * MS) > fresh);
        assert_eq!(idling.slack(IDLE, served(4), 151 * MS), fresh);
    }
}
