//! What the settings request but the daemon cannot do yet. Each entry is logged once.

use super::log::{Level, report};

#[derive(Debug, Default)]
pub(super) struct PendingList {
    before: Vec<String>,
    now: Vec<String>,
}

impl PendingList {
    /// Begins a new round of checks.
    pub(super) fn begin_round(&mut self) {
        self.before = std::mem::take(&mut self.now);
    }

    pub(super) fn add(&mut self, what: &str, why: &str) {
        let line = format!("{what} waits: {why}");
        if !self.before.contains(&line) && !self.now.contains(&line) {
            report(Level::Warning, &line);
        }
        if !self.now.contains(&line) {
            self.now.push(line);
        }
    }

    pub(super) fn lines(&self) -> &[String] {
        &self.now
    }
}
