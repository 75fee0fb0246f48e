//! Measures what observation costs the observed program (`--measure-cost`).
//!
//! The observer alternates between observed and unobserved phases and compares how fast a counter
//! of the program progresses in them.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use elfen_console::duration::number;

use crate::recording::Cost;

/// Alternates observed and unobserved phases, and compares the progress in them.
#[derive(Debug)]
pub struct CostMeter {
    pub progress: &'static AtomicU64,
    pub phase_ticks: u64,
    /// The number of observed phases of this cycle so far.
    phase: u32,
    /// When the current phase began; 0 if none has begun.
    phase_since: u64,
    /// `progress` at that time.
    phase_count: u64,
    /// Progress and ticks in the observed phases of this cycle.
    observed: (u64, u64),
    /// For each cycle: progress per tick in the unobserved phase, divided by that in the observed
    /// phases.
    pub ratios: Vec<f64>,
}

/// The number of phases per cycle. The last one is unobserved.
const PHASES: u32 = 10;

impl CostMeter {
    pub fn new(progress: &'static AtomicU64, phase_ticks: u64) -> Self {
        Self {
            progress,
            phase_ticks,
            phase: 0,
            phase_since: 0,
            phase_count: 0,
            observed: (0, 0),
            ratios: Vec::with_capacity(1 << 16),
        }
    }

    /// Discards the current phase, which was interrupted.
    pub(crate) fn restart_phase(&mut self) {
        self.phase_since = 0;
    }

    /// Checks whether the current phase is over. The unobserved phase of a cycle passes inside this
    /// call, so that no samples are taken.
    pub(crate) fn advance(&mut self, now: u64) {
        if self.phase_since == 0 {
            self.phase_since = now;
            self.phase_count = self.progress.load(Relaxed);
        }
        if now - self.phase_since < self.phase_ticks {
            return;
        }
        let count = self.progress.load(Relaxed);
        self.observed.0 += count.saturating_sub(self.phase_count);
        self.observed.1 += now - self.phase_since;
        self.phase += 1;
        self.phase_since = now;
        self.phase_count = count;
        if self.phase < PHASES - 1 {
            return;
        }
        let end = now + self.phase_ticks;
        while crate::clock::before() < end {
            std::hint::spin_loop();
        }
        let (after, count_after) = (crate::clock::before(), self.progress.load(Relaxed));
        let unobserved = (count_after.saturating_sub(count), after - now);
        if unobserved.0 > 0 && self.observed.0 > 0 && self.ratios.len() < self.ratios.capacity() {
            let speed = |(count, ticks): (u64, u64)| number(count) / number(ticks);
            self.ratios.push(speed(unobserved) / speed(self.observed));
        }
        self.phase = 0;
        self.observed = (0, 0);
        self.phase_since = after;
        self.phase_count = count_after;
    }
}

/// The cost in percent: how much faster the program progressed while unobserved. This is the median
/// of all cycles, with its 95 % confidence interval. `None` if there are too few cycles.
pub fn cost_of(ratios: &[f64]) -> Option<Cost> {
    const LEAST: usize = 8;
    let mut sorted = ratios.to_vec();
    sorted.sort_by(f64::total_cmp);
    if sorted.len() < LEAST {
        return None;
    }
    let percent = |index: usize| (sorted[index.min(sorted.len() - 1)] - 1.0) * 100.0;
    let half = number(sorted.len() as u64) / 2.0;
    let apart = 0.98 * number(sorted.len() as u64).sqrt();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at least 0")]
    let rank = |at: f64| at.max(0.0) as usize;
    Some(Cost {
        median: percent(sorted.len() / 2),
        low: percent(rank((half - apart).floor())),
        high: percent(rank((half + apart).ceil())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_medians_with_an_interval() {
        assert_eq!(cost_of(&[1.0; 7]), None);
        let ratios: Vec<f64> = (0..=100).map(|n| 1.0 + f64::from(n) / 1000.0).collect();
        let cost = cost_of(&ratios).unwrap();
        assert!((cost.median - 5.0).abs() < 1e-9, "{cost:?}");
        assert!(cost.low > 3.9 && cost.low < 4.2 && cost.high > 5.9 && cost.high < 6.2, "{cost:?}");
    }
}
