//! Events of all threads of one address space: for what counters cannot tell.

use std::collections::HashMap;

use elfen_stream::{Cache, layout};

use crate::engine::objects::Objects;
use crate::engine::tally::{OnWay, Tally};
use crate::engine::unwind::{Depth, StackCopy};
use crate::engine::walk::Burst;
use crate::profile::{NO_CALLER, UNKNOWN_CALLER, What};

/// Events of a thread until it stops.
pub(crate) const EVENTS: u64 = layout::EVENTS_MAX.unsigned_abs() as u64 - 1;
/// A thread that goes on no further behind the place that it left at has only executed the
/// instruction there.
const INSTRUCTION_BYTES_MAX: u64 = 15;
/// Bytes of a stack that are read: for most, and for deep ones.
const STACK_BYTES: [usize; 2] = [1 << 13, 1 << 18];

/// Where a thread has entered the cache, or has left it.
#[derive(Clone, Copy, Debug)]
struct Passage {
    at: u64,
    is_inside: bool,
    on: OnWay,
}

#[derive(Debug)]
pub(crate) struct Trace {
    what: What,
    pub(crate) tally: Tally,
    /// By the contexts of the threads.
    passages: HashMap<u32, Passage>,
}

impl Trace {
    pub(crate) fn new(what: What) -> Self {
        Self { what, tally: Tally::of_pieces(what), passages: HashMap::new() }
    }

    /// For a process that was forked.
    pub(crate) fn for_child(&self) -> Self {
        Self::new(self.what)
    }

    /// A program begins: its first thread has no callers.
    pub(crate) fn begin(&mut self, context: u32, at: u64) {
        let on = OnWay { caller: self.what.stacks.then_some(NO_CALLER), ..OnWay::default() };
        self.passages.insert(context, Passage { at, is_inside: false, on });
    }

    /// A thread enters the cache.
    pub(crate) fn enter(
        &mut self,
        context: u32,
        registers: &libc::user_regs_struct,
        objects: &mut Objects,
    ) {
        let at = registers.rip;
        let left = self.passages.get(&context);
        let goes_on = |left: &&Passage| (left.at..=left.at + INSTRUCTION_BYTES_MAX).contains(&at);
        let on = match left.filter(goes_on).map(|left| left.on) {
            // Its jumps, as longjmp(3) and exceptions, do not tell which functions they leave.
            Some(on) if on.caller.is_some_and(|caller| caller != NO_CALLER) => {
                let found = self.callers(registers, objects);
                OnWay { caller: found.or(on.caller), ..on }
            }
            Some(on) => on,
            // A handler of a signal, or a new thread.
            None if self.what.stacks => {
                let caller = self.callers(registers, objects).unwrap_or(UNKNOWN_CALLER);
                OnWay { caller: Some(caller), ..OnWay::default() }
            }
            None => OnWay::default(),
        };
        self.passages.insert(context, Passage { at, is_inside: true, on });
    }

    /// The callers of a stopped thread, if all of them are found.
    fn callers(
        &mut self,
        registers: &libc::user_regs_struct,
        objects: &mut Objects,
    ) -> Option<u32> {
        for bytes in STACK_BYTES {
            let copy = StackCopy::of(registers, objects.memory(), bytes)?;
            let (caller, depth) = self.tally.callers(objects, &copy);
            if depth == Depth::Whole {
                return Some(caller);
            }
            if copy.bytes.len() < bytes {
                break;
            }
        }
        None
    }

    /// A thread has left the cache at an address of the program, after some events.
    pub(crate) fn leave(&mut self, context: u32, at: u64, events: Vec<u64>, cache: &Cache) {
        self.end(context, events, cache, |burst| burst.left_at = at);
    }

    /// A thread was killed inside the cache.
    pub(crate) fn kill(&mut self, context: u32, events: Vec<u64>, cache: &Cache) {
        self.end(context, events, cache, |burst| burst.is_cut = true);
        self.passages.remove(&context);
    }

    fn end(&mut self, context: u32, events: Vec<u64>, cache: &Cache, end: impl FnOnce(&mut Burst)) {
        let Some(passage) = self.passages.get_mut(&context).filter(|one| one.is_inside) else {
            return;
        };
        let mut burst = Burst { began_at: passage.at, events, ..Burst::default() };
        end(&mut burst);
        passage.at = burst.left_at;
        passage.is_inside = false;
        if self.tally.add(cache, &burst, &mut passage.on).is_err() {
            self.tally.lost += 1;
        }
    }
}
