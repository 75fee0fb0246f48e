//! Small pieces of machine code. None changes a flag, unless its name says so.

use elfen_rewrite::Code;

use crate::layout::{COUNTER_BYTES, COUNTERS, SAVED_RCX};

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
