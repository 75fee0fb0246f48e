//! The progress line of a measurement.

use indicatif::{ProgressBar, ProgressStyle};

use crate::live::experiment::Progress;
use crate::live::plan::scenario_name;

/// One line on stderr, overwritten at each step and removed at the end. If stderr is not a
/// terminal, nothing is printed.
#[derive(Debug)]
pub(crate) struct Meter(ProgressBar);

const STEPS: &str = "{pos}/{len}{msg}; {eta} left";

impl Meter {
    pub(crate) fn new() -> Self {
        // The line is not redrawn by a thread, because this thread would run during the
        // measurement.
        Self(ProgressBar::new_spinner())
    }

    pub(crate) fn show(&self, text: &str) {
        self.0.set_style(style("{msg}"));
        self.0.set_message(text.to_owned());
    }

    pub(crate) fn show_progress(&self, progress: &Progress<'_>) {
        match progress {
            Progress::Preparing(what) => self.show(what),
            Progress::Begin { missing, all } => {
                self.0.set_message("");
                self.step(all - missing, *all);
                self.0.reset_eta();
            }
            Progress::Made { run, left } => {
                let (scenario, load) = (scenario_name(run.scenario), run.load * 100.0);
                self.0
                    .set_message(format!(": {scenario} at {load:.0} %: p99 {:.2} ms", run.p99_ms));
                let all = self.0.length().unwrap_or(0);
                self.0.set_position(all.saturating_sub(*left as u64));
            }
            Progress::Again { steal } => {
                let percent = steal * 100.0;
                self.0.set_message(format!(
                    ": again, as other machines took {percent:.1} % of the CPU time"
                ));
                self.0.tick();
            }
        }
    }

    /// Shows that `done` of `all` steps are complete. All steps have equal lengths.
    pub(crate) fn step(&self, done: usize, all: usize) {
        self.0.set_style(style(STEPS));
        self.0.set_length(all as u64);
        self.0.set_position(done as u64);
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_spinner())
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
