//! Events of all threads of one address space: for what counters cannot tell.

use std::collections::HashMap;

use elfen_stream::{Cache, layout};

use super::objects::Objects;
use super::tally::{OnWay, Tally};
use super::trace_recorder::{TraceLimits, TraceRecorder};
use super::unwind::{Depth, StackCopy};
use super::walk::Burst;
use crate::profile::{NO_CALLER, UNKNOWN_CALLER, What};

/// Events of a thread until it stops.
pub(crate) const EVENTS: u64 = layout::EVENTS_MAX.unsigned_abs() as u64 - 1;
/// Addresses that there is room for, until a thread stops.
pub(crate) const ADDRESSES: u64 = 0xffff;
const _: () = assert!(ADDRESSES <= layout::ADDRESSES_MAX.unsigned_abs() as u64);
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
    /// The base of `%fs`.
    thread_pointer: u64,
}

#[derive(Debug)]
pub(crate) struct Trace {
    what: What,
    pub(crate) tally: Tally,
    /// By the contexts of the threads.
    passages: HashMap<u32, Passage>,
    /// Records what one thread executes, instead of counting.
    recorder: Option<TraceRecorder>,
    recorded: Option<u32>,
}

impl Trace {
    pub(crate) fn new(what: What) -> Self {
        let (recorder, recorded) = (None, None);
        let passages = HashMap::new();
        Self { what, tally: Tally::of_everything(what), passages, recorder, recorded }
    }

    /// Records what the first thread executes.
    pub(crate) fn recording(limits: TraceLimits) -> Self {
        Self { recorder: Some(TraceRecorder::new(limits)), ..Self::new(What::default()) }
    }

    pub(crate) fn is_recorded(&self) -> bool {
        self.recorder.as_ref().is_some_and(TraceRecorder::is_complete)
    }

    pub(crate) fn take_recorder(&mut self) -> Option<TraceRecorder> {
        self.recorder.take()
    }

    /// For a process that was forked.
    pub(crate) fn for_child(&self) -> Self {
        Self::new(self.what)
    }

    /// A program begins: its first thread has no callers.
    pub(crate) fn begin(&mut self, context: u32, at: u64) {
        let on = OnWay { caller: self.what.stacks.then_some(NO_CALLER), ..OnWay::default() };
        self.passages.insert(context, Passage { at, is_inside: false, on, thread_pointer: 0 });
        self.recorded = Some(context);
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
        let thread_pointer = registers.fs_base;
        self.passages.insert(context, Passage { at, is_inside: true, on, thread_pointer });
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
    pub(crate) fn leave(&mut self, context: u32, at: u64, noted: Noted, code: Code<'_>) {
        self.end(context, noted, code, |burst| burst.left_at = at);
    }

    /// A thread was killed inside the cache.
    pub(crate) fn kill(&mut self, context: u32, noted: Noted, code: Code<'_>) {
        self.end(context, noted, code, |burst| burst.is_cut = true);
        self.passages.remove(&context);
    }

    fn end(&mut self, context: u32, noted: Noted, code: Code<'_>, end: impl FnOnce(&mut Burst)) {
        let Some(passage) = self.passages.get_mut(&context).filter(|one| one.is_inside) else {
            return;
        };
        let Noted { events, addresses } = noted;
        let Code { cache, objects } = code;
        let process = objects.process();
        let mut burst =
            Burst { began_at: passage.at, events, process, thread: context, ..Burst::default() };
        end(&mut burst);
        passage.at = burst.left_at;
        passage.is_inside = false;
        if let Some(recorder) = &mut self.recorder {
            if self.recorded == Some(context) {
                recorder.add(cache, objects, &burst, &addresses, passage.thread_pointer);
            }
            return;
        }
        if self.what.needs_addresses() {
            burst.addresses = addresses;
        } else {
            burst.results = addresses;
        }
        if self.tally.add(cache, &burst, &mut passage.on).is_err() {
            self.tally.lost += 1;
        }
    }
}

/// What a thread has noted in the cache, in its order.
#[derive(Debug, Default)]
pub(crate) struct Noted {
    pub(crate) events: Vec<u64>,
    pub(crate) addresses: Vec<u64>,
}

/// The code that it was in.
#[derive(Clone, Copy)]
pub(crate) struct Code<'a> {
    pub(crate) cache: &'a Cache,
    pub(crate) objects: &'a Objects,
}
