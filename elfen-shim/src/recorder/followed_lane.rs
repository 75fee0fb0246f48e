//! A lane whose running thread is followed, and the words of that thread.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::SeqCst, compiler_fence};

use elfen_rt::signal::task::TaskSlot;
use elfen_rt::signal::thread::ThreadSlot;

/// A lane whose running thread is followed.
#[derive(Debug)]
pub struct Follow {
    pub slot: &'static TaskSlot,
    /// Indices of the words: the lane's task, and then the thread's own, if they are looked at.
    pub task_word: usize,
    pub thread_words: Vec<(usize, ThreadWord)>,
    pub(super) task: u64,
    pub(super) runs: bool,
    pub(super) bound: bool,
    pub(super) seen_switches: u64,
    /// Switches of the lane when the observer began, and when it ended.
    counted: (u64, u64),
    /// Switches that the lane had begun, counted between the sample at this time and the next.
    begun: Option<(u64, u64)>,
}

/// A word of a thread's slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ThreadWord {
    /// Function and tag.
    Place,
    Value,
    Calls,
    Instructions,
    Cycles,
}

impl ThreadWord {
    pub fn of(self, slot: &'static ThreadSlot) -> &'static AtomicU64 {
        let words = &slot.words;
        match self {
            Self::Value => &words.value,
            Self::Calls => &words.calls,
            Self::Instructions => &words.instructions,
            Self::Cycles => &words.cycles,
            Self::Place => {
                let place = std::ptr::from_ref(words).cast::<AtomicU64>();
                // SAFETY: function and tag are the slot's first eight bytes, aligned to 128. Their
                // writer is another process, which stores either half; we load both.
                unsafe { &*place }
            }
        }
    }
}

impl Follow {
    pub fn new(
        slot: &'static TaskSlot,
        task_word: usize,
        thread_words: Vec<(usize, ThreadWord)>,
    ) -> Self {
        let (task, runs, bound, seen_switches) = (u64::MAX - 1, false, false, 0);
        let (counted, begun) = ((0, 0), None);
        Self { slot, task_word, thread_words, task, runs, bound, seen_switches, counted, begun }
    }

    /// Counts what the lane has switched, behind the sample at `at`.
    pub(super) fn count_switches(&mut self, at: u64) {
        // Not before the sample's load of the task: the kernel counts a switch before it stores
        // the task, so the count has the switch to that task.
        compiler_fence(SeqCst);
        let begun = self.slot.switches_begun.load(Relaxed);
        // The same count from an earlier time says more.
        if self.begun.is_none_or(|(known, _)| known != begun) {
            self.begun = Some((begun, at));
        }
    }

    /// Whether the lane ran this task all the time from the sample at `last` on. The count has to
    /// be from before that sample: an observer that was held up between a sample and the count has
    /// counted switches that lie in the gap.
    pub(super) fn stayed(&self, last: u64, task: u64) -> bool {
        // Behind the load of the task: see above.
        compiler_fence(SeqCst);
        let now = self.slot.switches_begun.load(Relaxed);
        task == self.task && self.begun.is_some_and(|(begun, at)| at < last && begun == now)
    }

    /// Before the first look.
    pub fn begin(&mut self) {
        self.counted.0 = self.slot.switches.load(Relaxed);
    }

    /// Behind the last.
    pub fn end(&mut self) {
        self.counted.1 = self.slot.switches.load(Relaxed);
    }

    /// Switches of the lane meanwhile that no sample saw.
    pub(super) fn missed(&self) -> u64 {
        let all = self.counted.1.saturating_sub(self.counted.0);
        all.saturating_sub(self.seen_switches)
    }

    pub(super) fn bind<const N: usize>(
        &mut self,
        slot: Option<&'static ThreadSlot>,
        words: &mut [&'static AtomicU64; N],
    ) {
        let Some(slot) = slot else { return };
        self.bound = true;
        for (word, part) in &self.thread_words {
            words[*word] = part.of(slot);
        }
    }
}
