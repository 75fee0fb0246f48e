//! The progress line of a measurement.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use crate::live::experiment::Progress;
use crate::live::plan::scenario_name;

/// One line on the stderr of a terminal, overwritten at each step. Without a terminal nothing is
/// printed.
#[derive(Debug)]
pub(crate) struct Meter {
    shown: bool,
    all: usize,
    missing: usize,
    begin: Instant,
}

impl Meter {
    pub(crate) fn new() -> Self {
        let shown = io::stderr().is_terminal();
        Self { shown, all: 0, missing: 0, begin: Instant::now() }
    }

    pub(crate) fn show_progress(&mut self, progress: &Progress<'_>) {
        match progress {
            Progress::Preparing(what) => self.show(what),
            Progress::Begin { missing, all } => {
                self.all = *all;
                self.missing = *missing;
                self.begin = Instant::now();
            }
            Progress::Made { run, left } => {
                let made = self.all - left;
                let (scenario, load) = (scenario_name(run.scenario), run.load * 100.0);
                let p99 = run.p99_ms;
                let rest = self.time_left(self.missing - left, *left);
                self.show(&format!(
                    "{made}/{}: {scenario} at {load:.0} %: p99 {p99:.2} ms; {rest}",
                    self.all
                ));
            }
        }
    }

    /// Shows that `done` of `all` steps of equal length are done.
    pub(crate) fn step(&mut self, done: usize, all: usize) {
        let rest = self.time_left(done, all - done);
        self.show(&format!("{done}/{all}; {rest}"));
    }

    fn time_left(&self, made: usize, left: usize) -> String {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let each = self.begin.elapsed() / count(made).max(1);
        show_time(each.saturating_mul(count(left))) + " left"
    }

    pub(crate) fn show(&self, text: &str) {
        if self.shown {
            // A closed stderr has no reader, so a failure is ignored.
            write!(io::stderr(), "\r\x1b[K{text}").ok();
        }
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.show("");
    }
}

fn show_time(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..=99 => format!("{seconds} s"),
        100..=5999 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        _ => format!("{} h {:02} min", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remaining_times_are_short() {
        let shown = [7, 99, 100, 4000, 7260].map(|s| show_time(Duration::from_secs(s)));
        assert_eq!(shown, ["7 s", "99 s", "1 min 40 s", "66 min 40 s", "2 h 01 min"]);
    }
}
