//! What was asked for and cannot be had yet: said once, and gone from the list when it is had.

use super::log::{Level, say};

#[derive(Debug, Default)]
pub(super) struct Waiting {
    before: Vec<String>,
    now: Vec<String>,
}

impl Waiting {
    /// A new look at all of it.
    pub(super) fn begin(&mut self) {
        self.before = std::mem::take(&mut self.now);
    }

    pub(super) fn add(&mut self, what: &str, why: &str) {
        let line = format!("{what} waits: {why}");
        if !self.before.contains(&line) && !self.now.contains(&line) {
            say(Level::Warning, &line);
        }
        if !self.now.contains(&line) {
            self.now.push(line);
        }
    }

    pub(super) fn lines(&self) -> &[String] {
        &self.now
    }
}
