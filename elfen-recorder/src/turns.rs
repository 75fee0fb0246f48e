//! Recording for a part of each second: when the programs are taken off, and put back. What was
//! not recorded is a gap of no events, so a request that was there meanwhile is in no account.

use std::time::Duration;

use elfen_rt::clock::nanos;

const SECOND_NS: u64 = 1_000_000_000;

/// How much of each second.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Duty {
    of_second: Duration,
}

impl Duty {
    pub fn percent(percent: u32) -> Self {
        Self { of_second: Duration::from_millis(10) * percent.min(100) }
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
    /// When this second began; `None` before the first look.
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
            None if since_ns >= nanos(self.duty.of_second) => {
                self.paused_ns = Some(now_ns);
                Some(Turn::Pause)
            }
            Some(paused_ns) if since_ns >= SECOND_NS => {
                (self.began_ns, self.paused_ns) = (Some(now_ns), None);
                Some(Turn::Resume(paused_ns))
            }
            _ => None,
        }
    }

    /// How long it is until the next one.
    pub fn left(&self, now_ns: u64) -> Duration {
        let Some(began_ns) = self.began_ns else { return Duration::ZERO };
        let lasts_ns =
            if self.paused_ns.is_some() { SECOND_NS } else { nanos(self.duty.of_second) };
        Duration::from_nanos((began_ns + lasts_ns).saturating_sub(now_ns))
    }

    /// Since when it is paused, if it is.
    pub fn paused_ns(&self) -> Option<u64> {
        self.paused_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a tenth of a second is that, and no look longer. Method: looks as they are asked for.
    #[test]
    fn a_tenth_of_each_second() {
        let (mut turns, mut at_ns) = (Turns::of(Duty::percent(10)), 77);
        let (mut resumed_ns, mut looks, mut paused) = (77, 0, Vec::new());
        while paused.len() < 3 {
            match turns.at(at_ns) {
                Some(Turn::Pause) => assert_eq!(at_ns - resumed_ns, SECOND_NS / 10),
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
        assert_eq!(paused, [SECOND_NS / 10 * 9; 3]);
        assert!(looks < 30, "nothing is looked for while nothing is recorded: {looks}");
    }
}
