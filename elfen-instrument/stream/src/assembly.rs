//! Small pieces of machine code. None changes a flag, unless its name says so.

use elfen_rewrite::Code;

use crate::layout::{COUNTER_BYTES, COUNTERS, EVENTS, EVENTS_LEFT, SAVED_RCX, SAVED_RDX};

/// A trap: no thread gets past it without the host.
pub(crate) const INT3: u8 = 0xcc;

/// The registers that are moved to and from the words of a thread, by their numbers.
#[derive(Clone, Copy)]
pub(crate) enum Word {
    Rax = 0,
    Rcx = 1,
    Rdx = 2,
    Rbx = 3,
}

/// Moves between registers and the words of a thread. None changes a flag.
pub(crate) trait Gs {
    fn store(&mut self, at: i32, register: Word);
    fn load(&mut self, register: Word, at: i32);
}

impl Gs for Code {
    fn store(&mut self, at: i32, register: Word) {
        push_gs(self, 0x89, register, at);
    }

    fn load(&mut self, register: Word, at: i32) {
        push_gs(self, 0x8b, register, at);
    }
}

fn push_gs(code: &mut Code, opcode: u8, register: Word, at: i32) {
    code.push(&[0x65, 0x48, opcode, 0x04 | (register as u8) << 3, 0x25]);
    code.push(&at.to_le_bytes());
}

/// `lahf; seto %al`, which moves all flags that a comparison writes to `%ax`.
pub(crate) fn push_save_flags(code: &mut Code) {
    code.push(&[0x9f, 0x0f, 0x90, 0xc0]);
}

/// `add $0x7f,%al; sahf`, the reverse.
pub(crate) fn push_restore_flags(code: &mut Code) {
    code.push(&[0x04, 0x7f, 0x9e]);
}

/// Where the `%gs` of a thread has a counter.
fn counter_at(counter: u32) -> Option<i32> {
    i32::try_from(counter).ok()?.checked_mul(COUNTER_BYTES)?.checked_add(COUNTERS)
}

/// Adds 1 to a counter.
pub(crate) fn push_count(code: &mut Code, counter: u32, flags_are_dead: bool) -> Option<()> {
    if flags_are_dead {
        // incq %gs:counter
        code.push(&[0x65, 0x48, 0xff, 0x04, 0x25]);
        code.push(&counter_at(counter)?.to_le_bytes());
    } else {
        code.store(SAVED_RCX, Word::Rcx);
        push_count_by_rcx(code, counter)?;
        code.load(Word::Rcx, SAVED_RCX);
    }
    Some(())
}

/// The same without a change of flags; `%rcx` has been saved.
pub(crate) fn push_count_by_rcx(code: &mut Code, counter: u32) -> Option<()> {
    let at = counter_at(counter)?;
    code.load(Word::Rcx, at);
    // lea 1(%rcx),%rcx
    code.push(&[0x48, 0x8d, 0x49, 1]);
    code.store(at, Word::Rcx);
    Some(())
}

/// How a thread leaves the cache when its events are full.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Leaving {
    /// By a trap.
    Trap,
    /// By a frame of a signal, to the program.
    Frame,
}

/// How edges are noted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Noting {
    /// Each has a counter.
    Counters,
    /// Each appends its number to the events. The last one goes to the routine `leave`; `by` says
    /// what that is.
    Events { leave: u64, by: Leaving },
}

impl Noting {
    /// Notes that an edge to `to` was taken.
    pub(crate) fn push(
        self,
        code: &mut Code,
        number: u32,
        flags_are_dead: bool,
        to: u64,
    ) -> Option<()> {
        match self {
            Self::Counters => push_count(code, number, flags_are_dead),
            Self::Events { .. } => {
                code.store(SAVED_RCX, Word::Rcx);
                self.push_by_rcx(code, number, to, false)?;
                code.load(Word::Rcx, SAVED_RCX);
                Some(())
            }
        }
    }

    /// The same without a change of flags; `%rcx` has been saved, and perhaps `%rdx` too.
    pub(crate) fn push_by_rcx(
        self,
        code: &mut Code,
        number: u32,
        to: u64,
        is_rdx_saved: bool,
    ) -> Option<()> {
        let Self::Events { leave, .. } = self else { return push_count_by_rcx(code, number) };
        code.load(Word::Rcx, EVENTS_LEFT);
        // movq $!number,%gs:EVENTS(,%rcx,8); lea -1(%rcx),%rcx
        code.push(&[0x65, 0x48, 0xc7, 0x04, 0xcd]);
        code.push(&EVENTS.to_le_bytes());
        code.push(&(!i32::try_from(number).ok()?).to_le_bytes());
        code.push(&[0x48, 0x8d, 0x49, 0xff]);
        code.store(EVENTS_LEFT, Word::Rcx);
        // jrcxz last; jmp over; last:
        let length = LEAVE_BYTES + if is_rdx_saved { GS_BYTES } else { 0 };
        code.push(&[0xe3, 2, 0xeb, length]);
        if is_rdx_saved {
            code.load(Word::Rdx, SAVED_RDX);
        }
        push_leave(code, to, leave)
    }
}

/// Bytes of a move from or to a word, and of [`push_leave`].
const GS_BYTES: u8 = 9;
pub(crate) const LEAVE_BYTES: u8 = 10 + 5;

/// Leaves a burst at an address of the program; `%rcx` has been saved.
pub(crate) fn push_leave(code: &mut Code, to: u64, leave: u64) -> Option<()> {
    // movabs $to,%rcx; jmp leave
    code.push(&[0x48, 0xb9]);
    code.push(&to.to_le_bytes());
    code.push_relative(&[0xe9], leave, &[])
}

/// Appends `jmp rel32` to an address that is filled in later. Returns the address of its distance,
/// which lies in one aligned word: other threads may execute the jump while it is patched.
pub(crate) fn push_link(code: &mut Code) -> Option<u64> {
    const NOPS: [&[u8]; 4] = [&[], &[0x90], &[0x66, 0x90], &[0x0f, 0x1f, 0x00]];
    let distance_at = code.end()?.checked_add(1)?;
    let padding = usize::try_from(distance_at.wrapping_neg() % 4).ok()?;
    code.push(NOPS[padding]);
    let distance_at = code.end()?.checked_add(1)?;
    code.push_forward_jump(&[0xe9]);
    Some(distance_at)
}
