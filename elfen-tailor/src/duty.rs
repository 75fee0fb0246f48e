//! Records only a part of the time: decides when to detach and attach the eBPF programs. The time
//! between is a gap without lost events, and requests in a gap are left out.
//!
//! Detaching and attaching interrupt all CPUs, because the kernel modifies its own code. Each time
//! costs a Redis about 2 ms of CPU time (`record --duty 10%`, 20,000 GETs per second, November
//! 2026). With a period of one second this would cost more than recording all the time.

use std::time::Duration;

use elfen_rt::clock::nanos;

/// The time from the beginning of one recorded part to the beginning of the next.
const PERIOD: Duration = Duration::from_secs(4);

/// The part of each period that is recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Duty {
    recorded: Duration,
}

impl Duty {
    pub fn percent(percent: u32) -> Self {
        Self { recorded: PERIOD / 100 * percent.min(100) }
    }
}

/// A change that is due.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DutyChange {
    Pause,
    /// Resume recording, which was paused since this time.
    Resume(u64),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DutyCycle {
    duty: Duty,
    /// When this period began; `None` before the first poll.
    began_ns: Option<u64>,
    paused_ns: Option<u64>,
}

impl DutyCycle {
    pub fn new(duty: Duty) -> Self {
        Self { duty, began_ns: None, paused_ns: None }
    }

    /// The change that is due at `now_ns`, if any.
    pub fn change_at(&mut self, now_ns: u64) -> Option<DutyChange> {
        let since_ns = now_ns.saturating_sub(*self.began_ns.get_or_insert(now_ns));
        match self.paused_ns {
            None if since_ns >= nanos(self.duty.recorded) => {
                self.paused_ns = Some(now_ns);
                Some(DutyChange::Pause)
            }
            Some(paused_ns) if since_ns >= nanos(PERIOD) => {
                self.began_ns = Some(now_ns);
                self.paused_ns = None;
                Some(DutyChange::Resume(paused_ns))
            }
            _ => None,
        }
    }

    /// The time until the next change.
    pub fn until_change(&self, now_ns: u64) -> Duration {
        let Some(began_ns) = self.began_ns else { return Duration::ZERO };
        let lasts = if self.paused_ns.is_some() { PERIOD } else { self.duty.recorded };
        Duration::from_nanos((began_ns + nanos(lasts)).saturating_sub(now_ns))
    }

    /// When recording was paused; `None` while it records.
    pub fn paused_ns(&self) -> Option<u64> {
        self.paused_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a tenth of the time is recorded, and polls do not wait too long. Method: poll at each
    /// time at which a change is announced.
    #[test]
    fn a_tenth_of_each_period_is_recorded() {
        let mut cycle = DutyCycle::new(Duty::percent(10));
        let mut at_ns = 77;
        let mut resumed_ns = 77;
        let mut polls = 0;
        let mut paused = Vec::new();
        while paused.len() < 3 {
            match cycle.change_at(at_ns) {
                Some(DutyChange::Pause) => assert_eq!(at_ns - resumed_ns, nanos(PERIOD) / 10),
                Some(DutyChange::Resume(since_ns)) => {
                    resumed_ns = at_ns;
                    paused.push(at_ns - since_ns);
                }
                None => {}
            }
            let poll = Duration::from_millis(if cycle.paused_ns().is_some() { 5_000 } else { 20 });
            at_ns += nanos(poll.min(cycle.until_change(at_ns)));
            polls += 1;
        }
        assert_eq!(paused, [nanos(PERIOD) / 10 * 9; 3]);
        assert!(polls < 90, "polls are rare while recording is paused: {polls}");
    }
}
