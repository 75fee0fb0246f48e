//! The table of translated blocks by their address in the program, and the routine that reads it.
//!
//! A computed branch goes there if no code at its own site knows the target. The routine appends
//! site and target to the log of the thread, for the host to count.

use elfen_rewrite::Code;

use crate::assembly::{Gs, INT3, Leaving, Noting, Word, push_restore_flags, push_save_flags};
use crate::layout::{
    EVENTS, EVENTS_LEFT, JUMP, LOG, LOG_AT, LOG_END, LOG_ENTRY_BYTES, SAVED_FLAGS, SAVED_RAX,
    SAVED_RBX, SAVED_RCX, SAVED_RDX,
};

const ENTRIES_BITS: u8 = 19;
const ENTRIES: usize = 1 << ENTRIES_BITS;
const ENTRY_BYTES: usize = 16;
pub(crate) const TABLE_BYTES: u64 = (ENTRIES * ENTRY_BYTES) as u64;
pub(crate) const TABLE_SHIFT: u64 = 64 - ENTRIES_BITS as u64;
/// Fuller, the table would have long runs of used entries.
const USED_MAX: usize = ENTRIES / 2;
/// Odd, so that no bit of an address is lost.
pub(crate) const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

/// The host's copy of the keys.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    at: u64,
    keys: Vec<u64>,
    used: usize,
}

impl Table {
    pub(crate) fn new(at: u64) -> Self {
        Self { at, keys: vec![0; ENTRIES], used: 0 }
    }

    /// The address of the entry for a target, which may be new. `None` if the table is full.
    pub(crate) fn entry(&mut self, target: u64) -> Option<u64> {
        let index = self.index(target)?;
        let key = self.keys.get_mut(index)?;
        if *key == 0 {
            if self.used == USED_MAX {
                return None;
            }
            self.used += 1;
            *key = target;
        }
        self.address(index)
    }

    /// The address of the entry for a target that has one.
    pub(crate) fn find(&self, target: u64) -> Option<u64> {
        let index = self.index(target).filter(|&index| self.keys.get(index) == Some(&target))?;
        self.address(index)
    }

    /// The used entries: their addresses and targets.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (u64, u64)> {
        let used = self.keys.iter().enumerate().filter(|&(_, &key)| key != 0);
        used.filter_map(|(index, &key)| Some((self.address(index)?, key)))
    }

    /// The entry of a target, or the free one that it would get.
    fn index(&self, target: u64) -> Option<usize> {
        let mut index = first(target);
        loop {
            let key = *self.keys.get(index)?;
            if key == 0 || key == target {
                return Some(index);
            }
            index = (index + 1) % ENTRIES;
        }
    }

    fn address(&self, index: usize) -> Option<u64> {
        self.at.checked_add(u64::try_from(index * ENTRY_BYTES).ok()?)
    }
}

fn first(target: u64) -> usize {
    let index = target.wrapping_mul(MULTIPLIER) >> (64 - ENTRIES_BITS);
    usize::try_from(index).unwrap_or(0)
}

/// The routine, and the addresses of its two traps.
#[derive(Clone, Debug)]
pub(crate) struct Routine {
    pub(crate) entry: u64,
    /// The target is not in the table, or the events are full. `%rcx` holds the target and `%rdx`
    /// the site.
    pub(crate) missed: u64,
    /// The log is full, if there is one.
    pub(crate) full: Option<u64>,
    pub(crate) returns: UnexpectedReturn,
    pub(crate) noting: Noting,
}

/// Where a return goes whose return address is not the one that the cache expects. `%rcx` has been
/// saved.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct UnexpectedReturn {
    /// The address is still on the stack.
    pub(crate) on_stack: u64,
    /// The address is in `%rcx`.
    pub(crate) popped: u64,
}

/// The number of no site: a return that the cache did not expect.
pub(crate) const NO_SITE: u32 = u32::MAX;

/// Appends the routine. On entry `%rcx`, which has been saved, holds the target, and `%rdx`, which
/// has been saved too, the site.
pub(crate) fn push_routine(code: &mut Code, table: u64, noting: Noting) -> Option<Routine> {
    let entry = code.end()?;
    code.store(SAVED_RAX, Word::Rax);
    push_save_flags(code);
    // mov %eax,%gs:SAVED_FLAGS
    code.push(&[0x65, 0x89, 0x04, 0x25]);
    code.push(&SAVED_FLAGS.to_le_bytes());
    code.store(SAVED_RBX, Word::Rbx);
    // movabs $MULTIPLIER,%rax; imul %rcx,%rax
    code.push(&[0x48, 0xb8]);
    code.push(&MULTIPLIER.to_le_bytes());
    code.push(&[0x48, 0x0f, 0xaf, 0xc1]);
    // shr $(64 - ENTRIES_BITS - 1),%rax; and $-2,%eax
    code.push(&[0x48, 0xc1, 0xe8, 64 - ENTRIES_BITS - 1, 0x83, 0xe0, 0xfe]);
    // movabs $table,%rbx
    code.push(&[0x48, 0xbb]);
    code.push(&table.to_le_bytes());
    let probe = code.end()?;
    // cmp %rcx,(%rbx,%rax,8); je found
    code.push(&[0x48, 0x39, 0x0c, 0xc3]);
    let found = code.push_forward_jump(&[0x0f, 0x84]);
    // cmpq $0,(%rbx,%rax,8); je missed
    code.push(&[0x48, 0x83, 0x3c, 0xc3, 0]);
    let missed = code.push_forward_jump(&[0x0f, 0x84]);
    // add $2,%eax; and $(2 * ENTRIES - 1),%eax; jmp probe
    code.push(&[0x83, 0xc0, 2, 0x25]);
    code.push(&u32::try_from(2 * ENTRIES - 1).ok()?.to_le_bytes());
    code.push_relative(&[0xe9], probe, &[])?;
    code.end_jump(found)?;
    // mov 8(%rbx,%rax,8),%rax
    code.push(&[0x48, 0x8b, 0x44, 0xc3, 8]);
    code.store(JUMP, Word::Rax);
    let (full, left) = match noting {
        Noting::Counters => (Some(push_log(code)?), None),
        Noting::Events { .. } => (None, Some(push_event(code))),
    };
    push_restore(code);
    code.load(Word::Rcx, SAVED_RCX);
    code.load(Word::Rdx, SAVED_RDX);
    // jmp *%gs:JUMP
    code.push(&[0x65, 0xff, 0x24, 0x25]);
    code.push(&JUMP.to_le_bytes());
    code.end_jump(missed)?;
    if let Some(left) = left {
        code.end_jump(left)?;
    }
    push_restore(code);
    let missed = code.end()?;
    match noting {
        Noting::Counters | Noting::Events { by: Leaving::Trap, .. } => code.push(&[INT3]),
        Noting::Events { leave, by: Leaving::Frame } => {
            code.load(Word::Rdx, SAVED_RDX);
            code.push_relative(&[0xe9], leave, &[])?;
        }
    }
    let on_stack = code.end()?;
    // pop %rcx
    code.push(&[0x59]);
    let popped = code.end()?;
    code.store(SAVED_RDX, Word::Rdx);
    // mov $NO_SITE,%edx; jmp entry
    code.push(&[0xba]);
    code.push(&NO_SITE.to_le_bytes());
    code.push_relative(&[0xe9], entry, &[])?;
    let returns = UnexpectedReturn { on_stack, popped };
    Some(Routine { entry, missed, full, returns, noting })
}

/// Appends site and target to the log. Returns the address of the trap for a full one.
fn push_log(code: &mut Code) -> Option<u64> {
    code.load(Word::Rbx, LOG_AT);
    // mov %rdx,%gs:(%rbx); mov %rcx,%gs:8(%rbx)
    code.push(&[0x65, 0x48, 0x89, 0x13, 0x65, 0x48, 0x89, 0x4b, 8]);
    // add $LOG_ENTRY_BYTES,%rbx
    code.push(&[0x48, 0x83, 0xc3, u8::try_from(LOG_ENTRY_BYTES).ok()?]);
    code.store(LOG_AT, Word::Rbx);
    // cmp $LOG_END,%rbx; jne out
    code.push(&[0x48, 0x81, 0xfb]);
    code.push(&LOG_END.to_le_bytes());
    let out = code.push_forward_jump(&[0x0f, 0x85]);
    let full = code.end()?;
    code.push(&[INT3]);
    code.end_jump(out)?;
    Some(full)
}

/// Appends the target to the events. The last event takes the jump that is returned.
fn push_event(code: &mut Code) -> usize {
    code.load(Word::Rbx, EVENTS_LEFT);
    // mov %rcx,%gs:EVENTS(,%rbx,8); dec %rbx
    code.push(&[0x65, 0x48, 0x89, 0x0c, 0xdd]);
    code.push(&EVENTS.to_le_bytes());
    code.push(&[0x48, 0xff, 0xcb]);
    // The flags stay those of `dec`.
    code.store(EVENTS_LEFT, Word::Rbx);
    code.push_forward_jump(&[0x0f, 0x84])
}

fn push_restore(code: &mut Code) {
    code.load(Word::Rbx, SAVED_RBX);
    // mov %gs:SAVED_FLAGS,%eax
    code.push(&[0x65, 0x8b, 0x04, 0x25]);
    code.push(&SAVED_FLAGS.to_le_bytes());
    push_restore_flags(code);
    code.load(Word::Rax, SAVED_RAX);
}

const _: () = assert!(LOG < LOG_END);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_found_again_and_a_full_table_refuses() {
        let mut table = Table::new(0x1000);
        let first = table.entry(0x55_0000_1234).unwrap();
        assert_eq!(table.entry(0x55_0000_1234), Some(first));
        assert_ne!(table.entry(0x55_0000_1235), Some(first));
        for target in 1.. {
            if table.entry(target * 16).is_none() {
                break;
            }
        }
        assert_eq!(table.used, USED_MAX);
        assert_eq!(table.entry(0x55_0000_1234), Some(first), "known targets stay");
    }
}
