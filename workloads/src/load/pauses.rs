//! When a thread that never sleeps was kept from running: by another thread, or by a hypervisor that
//! tells the kernel what time it takes.
//!
//! Such a thread looks at the clock again and again. A gap between two looks may be its own work;
//! it is a pause as far as the thread's CPU clock stood still meanwhile.

use nix::errno::Errno;
use nix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

/// Shorter ones are interrupts, and belong to every machine.
const SHORTEST: Duration = Duration::from_micros(50);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pause {
    pub(crate) from: Instant,
    pub(crate) to: Instant,
}

/// Of the thread that calls `look`.
#[derive(Debug)]
pub(crate) struct Pauses {
    last: Instant,
    begin: Instant,
    cpu_at_begin: Duration,
    /// How long the thread has not run since it began.
    off_cpu: Duration,
    found: Vec<Pause>,
}

impl Pauses {
    pub(crate) fn begin() -> Result<Self, Errno> {
        let begin = Instant::now();
        let cpu_at_begin = cpu_time()?;
        Ok(Self { last: begin, begin, cpu_at_begin, off_cpu: Duration::ZERO, found: Vec::new() })
    }

    /// To be called all the time.
    pub(crate) fn look(&mut self) -> Result<(), Errno> {
        let now = Instant::now();
        let from = std::mem::replace(&mut self.last, now);
        if now - from > SHORTEST {
            let on_cpu = cpu_time()?.saturating_sub(self.cpu_at_begin);
            let off_cpu = (now - self.begin).saturating_sub(on_cpu);
            if off_cpu.saturating_sub(self.off_cpu) > SHORTEST {
                self.found.push(Pause { from, to: now });
            }
            self.off_cpu = off_cpu;
        }
        Ok(())
    }

    pub(crate) fn found(self) -> Vec<Pause> {
        self.found
    }
}

/// What this thread has run so far.
fn cpu_time() -> Result<Duration, Errno> {
    Ok(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a thread that is kept from running has a pause, and one that works does not. Method:
    /// it sleeps, as if another thread had its CPU; then it computes, and what others did to it
    /// meanwhile is no more than the time that its own clock lacks.
    #[test]
    fn work_is_no_pause() {
        let mut pauses = Pauses::begin().expect("Linux has this clock");
        let before_sleep = Instant::now();
        std::thread::sleep(Duration::from_millis(20));
        let after_sleep = Instant::now();
        let cpu = cpu_time().expect("as before");
        pauses.look().expect("as before");
        let asleep = pauses.found.len();
        assert_eq!(asleep, 1);
        let pause = pauses.found[0];
        assert!(pause.from <= before_sleep && after_sleep <= pause.to);
        while cpu_time().expect("as before") - cpu < Duration::from_millis(20) {}
        pauses.look().expect("as before");
        let worked = cpu_time().expect("as before") - cpu;
        let lacking = after_sleep.elapsed().saturating_sub(worked);
        assert!(pauses.found.len() == asleep || lacking > SHORTEST / 2, "lacking {lacking:?}");
    }
}
