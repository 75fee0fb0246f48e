//! Events of all threads of one address space: for what counters cannot tell.

use std::collections::HashMap;

use elfen_stream::{Cache, layout};

use crate::engine::objects::Objects;
use crate::engine::tally::{OnWay, Tally};
use crate::engine::unwind::StackCopy;
use crate::engine::walk::Burst;
use crate::profile::What;

/// Events of a thread until it stops.
pub(super) const EVENTS: u64 = layout::EVENTS_MAX.unsigned_abs() as u64 - 1;
/// A thread that goes on no further behind the place that it left at has only executed the
/// instruction there.
const INSTRUCTION_BYTES_MAX: u64 = 15;
/// Bytes of a stack that are read, at most and if there are fewer.
const STACK_BYTES: [usize; 3] = [1 << 18, 1 << 13, 1 << 10];

/// Where a thread has entered the cache, or has left it.
#[derive(Clone, Copy, Debug)]
struct Passage {
    at: u64,
    is_inside: bool,
    on: OnWay,
}

#[derive(Debug)]
pub(super) struct Trace {
    what: What,
    pub(super) tally: Tally,
    /// By the contexts of the threads.
    passages: HashMap<u32, Passage>,
}

impl Trace {
    pub(super) fn new(what: What) -> Self {
        Self { what, tally: Tally::exact(what), passages: HashMap::new() }
    }

    /// For a process that was forked.
    pub(super) fn for_child(&self) -> Self {
        Self::new(self.what)
    }

    /// A thread enters the cache.
    pub(super) fn enter(
        &mut self,
        context: u32,
        registers: &libc::user_regs_struct,
        objects: &mut Objects,
    ) {
        let at = registers.rip;
        let left = self.passages.get(&context);
        let goes_on = |left: &&Passage| (left.at..=left.at + INSTRUCTION_BYTES_MAX).contains(&at);
        let on = match left.filter(goes_on) {
            Some(left) => left.on,
            // A handler of a signal, or a new thread.
            None => self.tally.begin(objects, &stack(registers, objects)),
        };
        self.passages.insert(context, Passage { at, is_inside: true, on });
    }

    /// A thread has left the cache at an address of the program, after some events.
    pub(super) fn leave(&mut self, context: u32, at: u64, events: Vec<u64>, cache: &Cache) {
        self.end(context, events, cache, |burst| burst.left_at = at);
    }

    /// A thread was killed inside the cache.
    pub(super) fn kill(&mut self, context: u32, events: Vec<u64>, cache: &Cache) {
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

fn stack(registers: &libc::user_regs_struct, objects: &Objects) -> StackCopy {
    let one = registers;
    let from = one.rsp.saturating_sub(layout::STACK_BELOW.unsigned_abs().into());
    let read = |bytes: &usize| objects.memory().read_vec(from, *bytes).ok();
    StackCopy {
        registers: vec![
            one.r8, one.r9, one.r10, one.r11, one.r12, one.r13, one.r14, one.r15, one.rdi, one.rsi,
            one.rbp, one.rbx, one.rdx, one.rax, one.rcx, one.rsp, one.rip,
        ],
        bytes: STACK_BYTES.iter().find_map(read).unwrap_or_default(),
    }
}
