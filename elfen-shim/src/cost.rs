//! What being observed costs: stretches in which nobody looks, between those in which somebody
//! does.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// The cost of observing: stretches in which nobody looks, and what progressed in them.
#[derive(Debug)]
pub struct Costing {
    pub progress: &'static AtomicU64,
    pub stretch_ticks: u64,
    phase: u32,
    phase_since: u64,
    phase_count: u64,
    observed: (u64, u64),
    /// Progress for a tick, unobserved by observed, a cycle each.
    pub ratios: Vec<f64>,
}

/// One stretch in so many is left unobserved.
const STRETCHES: u32 = 10;

impl Costing {
    pub fn new(progress: &'static AtomicU64, stretch_ticks: u64) -> Self {
        let ratios = Vec::with_capacity(1 << 16);
        let (phase, phase_since, phase_count, observed) = (0, 0, 0, (0, 0));
        Self { progress, stretch_ticks, phase, phase_since, phase_count, observed, ratios }
    }

    /// The stretch that goes on is none.
    pub(crate) fn begin_anew(&mut self) {
        self.phase_since = 0;
    }

    /// At the end of a stretch: perhaps leaves the next one unobserved, by waiting for its end.
    pub(crate) fn turn(&mut self, now: u64) {
        if self.phase_since == 0 {
            (self.phase_since, self.phase_count) = (now, self.progress.load(Relaxed));
        }
        if now - self.phase_since < self.stretch_ticks {
            return;
        }
        let count = self.progress.load(Relaxed);
        self.observed.0 += count.saturating_sub(self.phase_count);
        self.observed.1 += now - self.phase_since;
        self.phase += 1;
        (self.phase_since, self.phase_count) = (now, count);
        if self.phase < STRETCHES - 1 {
            return;
        }
        let end = now + self.stretch_ticks;
        while crate::clock::before() < end {
            std::hint::spin_loop();
        }
        let (after, unobserved) = (crate::clock::before(), self.progress.load(Relaxed));
        let alone = (unobserved.saturating_sub(count), after - now);
        if alone.0 > 0 && self.observed.0 > 0 && self.ratios.len() < self.ratios.capacity() {
            let number = elfen_console::duration::number;
            let pace = |(count, ticks): (u64, u64)| number(count) / number(ticks);
            self.ratios.push(pace(alone) / pace(self.observed));
        }
        (self.phase, self.observed) = (0, (0, 0));
        (self.phase_since, self.phase_count) = (after, unobserved);
    }
}
