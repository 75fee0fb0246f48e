//! Recording for a part of the time: when the programs are taken off, and put back. What was not
//! recorded is a gap of no events, so a request that was there meanwhile is in no account.
//!
//! Either takes interrupts of all CPUs, as the kernel changes its own code: of a Redis's CPU some
//! 2 ms (by `record --duty 10%` beside 20,000 GETs a second, November 2026), which once a second
//! would be more than what a tenth of it is recorded for.

use std::time::Duration;

use elfen_rt::clock::nanos;

/// From one recording to the next.
const TURN: Duration = Duration::from_secs(4);

/// How much of each turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Duty {
    of_turn: Duration,
}

impl Duty {
    pub fn percent(percent: u32) -> Self {
        Self { of_turn: TURN / 100 * percent.min(100) }
    }
}

/// What is to be done now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Turn {
    Pause,
    /// It was paused since then.
    Resume(u64),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Turns {
    duty: Duty,
    /// When this turn began; `None` before the first look.
    began_ns: Option<u64>,
    paused_ns: Option<u64>,
}

impl Turns {
    pub fn of(duty: Duty) -> Self {
        Self { duty, began_ns: None, paused_ns: None }
    }

    /// At a look.
    pub fn at(&mut self, now_ns: u64) -> Option<Turn> {
        let since_ns = now_ns.saturating_sub(*self.began_ns.get_or_insert(now_ns));
        match self.paused_ns {
            None if since_ns >= nanos(self.duty.of_turn) => {
                self.paused_ns = Some(now_ns);
                Some(Turn::Pause)
            }
            Some(paused_ns) if since_ns >= nanos(TURN) => {
                (self.began_ns, self.paused_ns) = (Some(now_ns), None);
                Some(Turn::Resume(paused_ns))
            }
            _ => None,
        }
    }

    /// How long it is until the next one.
    pub fn left(&self, now_ns: u64) -> Duration {
        let Some(began_ns) = self.began_ns else { return Duration::ZERO };
        let lasts = if self.paused_ns.is_some() { TURN } else { self.duty.of_turn };
        Duration::from_nanos((began_ns + nanos(lasts)).saturating_sub(now_ns))
    }

    /// Since when it is paused, if it is.
    pub fn paused_ns(&self) -> Option<u64> {
        self.paused_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a tenth of the time is that, and no look longer. Method: looks as they are asked for.
    #[test]
    fn a_tenth_of_each_turn() {
        let (mut turns, mut at_ns) = (Turns::of(Duty::percent(10)), 77);
        let (mut resumed_ns, mut looks, mut paused) = (77, 0, Vec::new());
        while paused.len() < 3 {
            match turns.at(at_ns) {
                Some(Turn::Pause) => assert_eq!(at_ns - resumed_ns, nanos(TURN) / 10),
                Some(Turn::Resume(since_ns)) => {
                    resumed_ns = at_ns;
                    paused.push(at_ns - since_ns);
                }
                None => {}
            }
            let look = Duration::from_millis(if turns.paused_ns().is_some() { 5_000 } else { 20 });
            at_ns += nanos(look.min(turns.left(at_ns)));
            looks += 1;
        }
        assert_eq!(paused, [nanos(TURN) / 10 * 9; 3]);
        assert!(looks < 90, "nothing is looked for while nothing is recorded: {looks}");
    }
}
