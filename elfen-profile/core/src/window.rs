//! Instructions per cycle in windows of a fixed number of cycles (section 6).

use crate::sample::to_float;

/// The paper's window.
pub const WINDOW_CYCLES: u64 = 30;

/// Counts instructions that retire, by window.
#[derive(Clone, Debug, Default)]
pub struct Windows {
    current: u64,
    count: u64,
    /// Windows by how many instructions retired in them.
    by_count: Vec<u64>,
    empty: u64,
}

/// How much the instructions per cycle differ between windows.
#[derive(Clone, Copy, PartialEq, Debug, serde::Serialize)]
pub struct WindowedIpc {
    pub mean: f64,
    /// Of windows in which an instruction retired.
    pub min: f64,
    pub max: f64,
    /// Standard deviation, weighted by how many instructions retired, as a share of the mean.
    pub deviation: f64,
    /// The share of windows in which no instruction retired.
    pub empty: f64,
}

impl Windows {
    /// Notes a cycle in which an instruction retired; cycles do not decrease.
    pub fn note(&mut self, cycle: u64) {
        let window = cycle / WINDOW_CYCLES;
        if window != self.current {
            self.end();
            self.empty += window - self.current - 1;
            self.current = window;
        }
        self.count += 1;
    }

    fn end(&mut self) {
        let count = usize::try_from(std::mem::take(&mut self.count)).unwrap_or(0);
        if count == 0 {
            self.empty += 1;
            return;
        }
        if count >= self.by_count.len() {
            self.by_count.resize(count + 1, 0);
        }
        self.by_count[count] += 1;
    }

    /// `None` if no instruction retired.
    pub fn finish(mut self) -> Option<WindowedIpc> {
        self.end();
        let cycles = to_float(WINDOW_CYCLES);
        let windows = || {
            let counted = (0_u64..).zip(&self.by_count).filter(|&(_, &windows)| windows > 0);
            counted.map(|(count, &windows)| (to_float(count) / cycles, to_float(count * windows)))
        };
        let weight: f64 = windows().map(|(_, weight)| weight).sum();
        let mean = windows().map(|(ipc, weight)| ipc * weight).sum::<f64>() / weight;
        let variance =
            windows().map(|(ipc, weight)| (ipc - mean).powi(2) * weight).sum::<f64>() / weight;
        let all = self.empty + self.by_count.iter().sum::<u64>();
        Some(WindowedIpc {
            mean,
            min: windows().next()?.0,
            max: windows().last()?.0,
            deviation: variance.sqrt() / mean,
            empty: to_float(self.empty) / to_float(all),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_weighted_by_their_instructions() {
        let mut windows = Windows::default();
        // 30 in the first window, none in the second, 90 in the third.
        for _ in 0..30 {
            windows.note(29);
        }
        for _ in 0..90 {
            windows.note(60);
        }
        let found = windows.finish().unwrap();
        assert_eq!((found.min, found.max, found.mean), (1.0, 3.0, 2.5));
        // The variance is (30 * 1.5^2 + 90 * 0.5^2) / 120 = 0.75.
        assert!((found.deviation - 0.75_f64.sqrt() / 2.5).abs() < 1e-9);
        assert!((found.empty - 1.0 / 3.0).abs() < 1e-9);
        assert_eq!(Windows::default().finish(), None);
    }
}
