//! Which functions say that they run, so that no two of them say the same.

use core::sync::atomic::Ordering::Relaxed;

use elfen_entries::lower_half;
use elfen_rt::tag;

use super::object::Stretch;

/// Objects that can be told apart; functions of further ones say nothing.
const OBJECTS: usize = 64;

/// An object whose functions say that they run.
#[derive(Clone, Copy)]
struct Speaker<'a> {
    entries: &'a [u64],
    text: Stretch,
}

/// All that was patched so far.
pub(super) struct Said<'a> {
    speakers: [Option<Speaker<'a>>; OBJECTS],
    entries: u64,
    ambiguous: u64,
    counting: u64,
    returns: u64,
}

impl Default for Said<'_> {
    fn default() -> Self {
        Self { speakers: [None; OBJECTS], entries: 0, ambiguous: 0, counting: 0, returns: 0 }
    }
}

impl<'a> Said<'a> {
    /// Whether a function may say that it runs; counts those that may not, and those that count.
    pub(super) fn may(&mut self, address: u64, counts: bool) -> bool {
        let is_full = self.speakers.iter().all(Option::is_some);
        let mut speakers = self.speakers.iter().flatten();
        let is_ambiguous = is_full || speakers.any(|speaker| speaker.says(address));
        let counted = if is_ambiguous { &mut self.ambiguous } else { &mut self.entries };
        *counted = counted.saturating_add(1);
        self.counting = self.counting.saturating_add(u64::from(counts && !is_ambiguous));
        !is_ambiguous
    }

    pub(super) fn add(&mut self, entries: &'a [u64], text: Stretch, returns: bool) {
        if let Some(free) = self.speakers.iter_mut().find(|speaker| speaker.is_none()) {
            *free = Some(Speaker { entries, text });
        }
        self.returns = self.returns.saturating_add(returns.into());
    }

    /// Tells the front.
    pub(super) fn publish(&self) {
        let Some(first) = tag::page().and_then(|page| page.slot(0)) else { return };
        // Relaxed: words that mean something one by one.
        first.entries.store(self.entries, Relaxed);
        first.ambiguous.store(self.ambiguous, Relaxed);
        first.counting.store(self.counting, Relaxed);
        first.returns.store(self.returns, Relaxed);
    }
}

impl Speaker<'_> {
    fn says(&self, address: u64) -> bool {
        let half = lower_half(address);
        // Most objects are nowhere near, also by the lower half.
        let offset = half.wrapping_sub(lower_half(self.text.address));
        (offset as usize) < self.text.len
            && self.entries.iter().any(|&entry| lower_half(entry) == half)
    }
}
