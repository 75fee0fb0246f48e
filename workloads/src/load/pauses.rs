//! When a thread that never sleeps was kept from running: by another thread, by the kernel, or by a
//! hypervisor.
//!
//! Such a thread looks at the clock again and again. A gap between two looks may be its own work,
//! and that must never pass for a pause: a generator that is too slow would excuse itself. So where
//! the thread had something to do, it paused only as long as its CPU clock stood still. That clock
//! does not stand still for interrupts, nor for a hypervisor that keeps quiet about what it takes: on
//! a VM a timer's interrupt can take a millisecond, and 15 ms can be gone at once. Where the thread
//! only asked whether there was something to do there was nothing to be slow at, and the whole gap is
//! a pause whatever the clock says, unless the thread gave its CPU away itself.

use nix::errno::Errno;
use nix::sys::resource::{UsageWho, getrusage};
use nix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

/// Shorter ones disturb nothing that is measured to 20 us.
const SHORTEST: Duration = Duration::from_micros(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pause {
    pub(crate) from: Instant,
    pub(crate) to: Instant,
}

/// What a thread did between two looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Did {
    /// It asked whether there was something to do, and did nothing of it yet.
    Ask,
    Work,
}

/// Of the thread that calls `look`.
#[derive(Debug)]
pub(crate) struct Pauses {
    last: Instant,
    begin: Instant,
    cpu_at_begin: Duration,
    /// How long the thread has not run since it began.
    off_cpu: Duration,
    slept: i64,
    found: Vec<Pause>,
}

impl Pauses {
    pub(crate) fn begin() -> Result<Self, Errno> {
        let begin = Instant::now();
        let cpu_at_begin = cpu_time()?;
        let slept = times_slept()?;
        let off_cpu = Duration::ZERO;
        Ok(Self { last: begin, begin, cpu_at_begin, off_cpu, slept, found: Vec::new() })
    }

    /// To be called all the time, with what was done since the last call.
    pub(crate) fn look(&mut self, did: Did) -> Result<(), Errno> {
        let now = Instant::now();
        let from = std::mem::replace(&mut self.last, now);
        if now - from <= SHORTEST {
            return Ok(());
        }
        let on_cpu = cpu_time()?.saturating_sub(self.cpu_at_begin);
        let off_cpu = (now - self.begin).saturating_sub(on_cpu);
        let taken = off_cpu.saturating_sub(std::mem::replace(&mut self.off_cpu, off_cpu));
        let slept = times_slept()?;
        let sleeps = slept - std::mem::replace(&mut self.slept, slept);
        let paused = match did {
            _ if sleeps != 0 => Duration::ZERO,
            Did::Ask => now - from,
            // Some of what the clock lacks may be from shorter gaps before.
            Did::Work => taken.min(now - from),
        };
        if paused > SHORTEST {
            self.found.push(Pause { from, to: from + paused });
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

/// How often this thread gave its CPU away itself.
fn times_slept() -> Result<i64, Errno> {
    Ok(getrusage(UsageWho::RUSAGE_THREAD)?.voluntary_context_switches())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::Relaxed;

    fn compute(how_long: Duration) -> Duration {
        let before = cpu_time().expect("Linux has this clock");
        loop {
            let computed = cpu_time().expect("as before") - before;
            if computed >= how_long {
                return computed;
            }
        }
    }

    /// Goal: what a thread does itself is no excuse: neither work nor sleep is a pause. Method: it
    /// computes and says so, and paused no more than the time that its own clock lacks; then it
    /// sleeps, and says that it asked.
    #[test]
    fn own_doing_is_no_pause() {
        let begin = Instant::now();
        let mut pauses = Pauses::begin().expect("Linux has this clock");
        let computed = compute(Duration::from_millis(20));
        pauses.look(Did::Work).expect("as before");
        let lacking = begin.elapsed().saturating_sub(computed);
        let paused: Duration = pauses.found.iter().map(|pause| pause.to - pause.from).sum();
        assert!(paused <= lacking, "{paused:?} of {lacking:?}");
        let before = pauses.found.len();
        std::thread::sleep(Duration::from_millis(20));
        pauses.look(Did::Ask).expect("as before");
        assert_eq!(pauses.found.len(), before);
    }

    /// Goal: what keeps a thread from running is a pause. Method: a gap in which it only asked;
    /// then another thread on the same CPU, and work until that took its turn.
    #[test]
    fn what_others_take_is_a_pause() {
        let cpu = *crate::affinity::allowed().expect("Linux says").first().expect("one at least");
        let stop = AtomicBool::new(false);
        let compete = || {
            crate::affinity::pin(cpu).expect("it is allowed");
            while !stop.load(Relaxed) {
                std::hint::spin_loop();
            }
        };
        std::thread::scope(|scope| {
            let suffering = scope.spawn(|| {
                crate::affinity::pin(cpu).expect("it is allowed");
                let mut pauses = Pauses::begin().expect("Linux has this clock");
                let from = Instant::now();
                compute(Duration::from_millis(5));
                pauses.look(Did::Ask).expect("as before");
                let pause = pauses.found[0];
                assert!(pause.from <= from && pause.to > from);

                scope.spawn(compete);
                while pauses.found.len() == 1 {
                    pauses.look(Did::Work).expect("as before");
                }
            });
            let suffered = suffering.join();
            stop.store(true, Relaxed);
            suffered.expect("its assertions hold");
        });
    }
}
