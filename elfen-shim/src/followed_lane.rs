//! A lane that the recorder follows: the task that runs there, and the words of that thread.
//!
//! It also proves that a lane did not switch during a gap. For this it uses two counts of the
//! kernel. The kernel increments `switches_begun` before it stores the new task, and `switches`
//! after that.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::SeqCst, compiler_fence};

use elfen_rt::signal::task::TaskSlot;
use elfen_rt::signal::thread::ThreadSlot;

/// A lane whose running thread is followed.
#[derive(Debug)]
pub struct FollowedLane {
    pub slot: &'static TaskSlot,
    /// Index of the word with the lane's task.
    pub task_word: usize,
    /// Indices of the words of the running thread, and what each word contains.
    pub thread_words: Vec<(usize, ThreadWord)>,
    pub(crate) task: u64,
    /// Whether the task is one of the observed tasks.
    pub(crate) runs: bool,
    /// Whether `thread_words` are the words of the task's own slot.
    pub(crate) bound: bool,
    pub(crate) seen_switches: u64,
    /// `switches` of the lane when the observer began, and when it ended.
    switches_at_ends: (u64, u64),
    /// A value of `switches_begun`, and the time of the last sample before it was read.
    begun: Option<(u64, u64)>,
}

/// The task of a lane before the first sample. The task map never has this value.
pub(crate) const UNKNOWN_TASK: u64 = u64::MAX - 1;

/// A word of a thread's slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ThreadWord {
    /// Function and tag, in one word.
    FunctionAndTag,
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
            Self::FunctionAndTag => {
                let place = std::ptr::from_ref(words).cast::<AtomicU64>();
                // SAFETY: function and tag are the slot's first eight bytes, which `ThreadSlot`
                // aligns to 128. Another process stores either half; we load both at once.
                unsafe { &*place }
            }
        }
    }
}

impl FollowedLane {
    pub fn new(
        slot: &'static TaskSlot,
        task_word: usize,
        thread_words: Vec<(usize, ThreadWord)>,
    ) -> Self {
        Self {
            slot,
            task_word,
            thread_words,
            task: UNKNOWN_TASK,
            runs: false,
            bound: false,
            seen_switches: 0,
            switches_at_ends: (0, 0),
            begun: None,
        }
    }

    /// Reads how many switches the lane has begun, after the sample at `at`.
    pub(crate) fn count_switches(&mut self, at: u64) {
        // The kernel counts a switch before it stores the task. This count is read after the
        // sample's task, so it includes the switch to that task. Pairs with the kernel's order of
        // stores. x86-64 keeps the order of these loads.
        compiler_fence(SeqCst);
        let begun = self.slot.switches_begun.load(Relaxed);
        // If the count is unchanged, its earlier time proves more.
        if self.begun.is_none_or(|(known, _)| known != begun) {
            self.begun = Some((begun, at));
        }
    }

    /// Returns whether the lane has run this task without a switch since the sample at `last`. The
    /// count must be older than that sample. If the observer was delayed between a sample and the
    /// count, the count may include switches during the gap.
    pub(crate) fn ran_throughout(&self, last: u64, task: u64) -> bool {
        // Keeps this load after the load of the task: see `count_switches`.
        compiler_fence(SeqCst);
        let now = self.slot.switches_begun.load(Relaxed);
        task == self.task && self.begun.is_some_and(|(begun, at)| at < last && begun == now)
    }

    /// Reads the lane's switches before the first sample.
    pub fn begin_counting(&mut self) {
        self.switches_at_ends.0 = self.slot.switches.load(Relaxed);
    }

    /// Reads the lane's switches after the last sample.
    pub fn end_counting(&mut self) {
        self.switches_at_ends.1 = self.slot.switches.load(Relaxed);
    }

    /// Switches between `begin_counting` and `end_counting` that no sample saw.
    pub(crate) fn missed(&self) -> u64 {
        let all = self.switches_at_ends.1.saturating_sub(self.switches_at_ends.0);
        all.saturating_sub(self.seen_switches)
    }

    /// Makes the loop read the words of this thread's slot, if it has one.
    pub(crate) fn bind<const N: usize>(
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
