//! What is written over NOPs, in machine code: the check, and a word that says who runs.
//!
//! ```text
//!     mov   %fs:WORD, %r11            what the thread tests            64 4c 8b 1c 25 WORD
//!     cmpq  $0, (%r11)                                                 49 83 3b 00
//!     jne   SLOW                                                       0f 85 rel32
//!     mov   %fs:CPU, %r11d            the CPU that it runs on          64 44 8b 1c 25 CPU
//!     cmp   %fs:CHOSEN_ON, %r11d      the CPU that WORD was chosen for 64 44 3b 1c 25 CHOSEN_ON
//!     jne   SLOW                                                       0f 85 rel32
//! ```
//!
//! `%r11` is free where a function starts, and the flags mean nothing there. The second half is for
//! runs with more than one batch lane: with one, a thread has nowhere to go.
//!
//! For `elfen shim` a function says that it is entered, before any check, and in the place of the
//! `ret` that all functions of a file share ([`RETURN`]) that it returns; some call besides what
//! publishes the thread's counters, which changes `%r11` and the flags alone. Where one returns,
//! `%r10` and `%r11` hold nothing:
//!
//! ```text
//!     mov   %fs:WORDS, %r11           the thread's words               64 4c 8b 1c 25 WORDS
//!     movl  $FUNCTION, (%r11)         the lower half of its address    41 c7 03 FUNCTION
//!     incq  64(%r11)                  its calls                        49 ff 43 40
//!     call  *COUNT(%rip)              what the thread has executed     ff 15 rel32
//!
//!     mov   %fs:WORDS, %r11                                            64 4c 8b 1c 25 WORDS
//!     mov   (%rsp), %r10d             an address in its caller         44 8b 14 24
//!     mov   %r10d, (%r11)                                              45 89 13
//!     ret                                                              c3
//! ```

/// Bytes of the check for one pair, and of the whole.
const PAIR_CHECK_BYTES: usize = 19;
pub const CHECK_BYTES: usize = 43;
pub const JUMP_BYTES: usize = 5;
/// Of saying that a function is entered.
const TAG_BYTES: usize = 20;
/// Of a call through a pointer.
const CALL_BYTES: usize = 6;
/// The longest that is written: all of these.
const CODE_BYTES: usize = TAG_BYTES + CALL_BYTES + CHECK_BYTES;

/// What `libelfen_return.a` has where functions return: `ret`, and room that says whose it is.
pub const RETURN: [u8; 32] = *b"\xc3elfen return thunk, version 1\xcc\xcc";

/// Where the words of a check lie, as distances from the thread pointer: the same in
/// every thread of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Check {
    /// The pointer to the word that is tested.
    pub word: i32,
    /// The CPU that the thread runs on, and the one that `word` was chosen for.
    /// `None`: the thread can't move.
    pub moved: Option<[i32; 2]>,
}

/// Some bytes of machine code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Code {
    bytes: [u8; CODE_BYTES],
    len: usize,
}

impl Code {
    const EMPTY: Self = Self { bytes: [0; CODE_BYTES], len: 0 };

    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&[])
    }

    fn push(&mut self, bytes: &[u8]) -> Option<()> {
        let end = self.len.checked_add(bytes.len())?;
        self.bytes.get_mut(self.len..end)?.copy_from_slice(bytes);
        self.len = end;
        Some(())
    }

    /// An instruction that ends in a 32-bit distance from its own end to
    /// `to`; the code starts at `at`.
    fn push_relative(&mut self, opcode: &[u8], at: u64, to: u64) -> Option<()> {
        self.push(opcode)?;
        let end = at.checked_add(self.len as u64)?.checked_add(4)?;
        self.push(&distance(end, to)?.to_le_bytes())
    }
}

impl Check {
    /// How many bytes [`Check::code`] takes.
    pub fn size(&self) -> usize {
        if self.moved.is_some() { CHECK_BYTES } else { PAIR_CHECK_BYTES }
    }

    /// Appends the check to code that stands at `at`, going to `slow` if there is a reason to.
    fn push(&self, code: &mut Code, at: u64, slow: u64) -> Option<()> {
        code.push(&[0x64, 0x4c, 0x8b, 0x1c, 0x25])?;
        code.push(&self.word.to_le_bytes())?;
        code.push(&[0x49, 0x83, 0x3b, 0x00])?;
        code.push_relative(&[0x0f, 0x85], at, slow)?;
        if let Some([cpu, chosen_on]) = self.moved {
            code.push(&[0x64, 0x44, 0x8b, 0x1c, 0x25])?;
            code.push(&cpu.to_le_bytes())?;
            code.push(&[0x64, 0x44, 0x3b, 0x1c, 0x25])?;
            code.push(&chosen_on.to_le_bytes())?;
            code.push_relative(&[0x0f, 0x85], at, slow)?;
        }
        Some(())
    }
}

/// How functions say that they are entered and that they return.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tag {
    /// Where a thread's pointer to its words lies, as a distance from the thread pointer.
    pub words: i32,
}

impl Tag {
    fn push_words(&self, code: &mut Code) -> Option<()> {
        code.push(&[0x64, 0x4c, 0x8b, 0x1c, 0x25])?;
        code.push(&self.words.to_le_bytes())
    }

    fn push_entry(&self, code: &mut Code, function: u64) -> Option<()> {
        self.push_words(code)?;
        code.push(&[0x41, 0xc7, 0x03])?;
        code.push(&lower_half(function).to_le_bytes())?;
        code.push(&[0x49, 0xff, 0x43, 0x40])
    }

    /// In the place of [`RETURN`].
    pub fn exit(&self) -> Option<Code> {
        let mut code = Code::EMPTY;
        self.push_words(&mut code)?;
        code.push(&[0x44, 0x8b, 0x14, 0x24, 0x45, 0x89, 0x13, 0xc3])?;
        Some(code)
    }
}

/// What a function does at its entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    pub tag: Option<Tag>,
    /// Where the address of what publishes the thread's counters stands.
    pub count: Option<u64>,
    pub check: Option<Check>,
}

impl Entry {
    /// How many bytes [`Entry::code`] takes.
    pub fn size(&self) -> usize {
        self.tag.map_or(0, |_| TAG_BYTES)
            + self.count.map_or(0, |_| CALL_BYTES)
            + self.check.map_or(0, |check| check.size())
    }

    /// The code as it stands at `at` for the function at `function`; the check, which is last, goes
    /// to `slow` if there is a reason to. `None` if that is more than 2 GiB away.
    pub fn code(&self, at: u64, function: u64, slow: u64) -> Option<Code> {
        let mut code = Code::EMPTY;
        if let Some(tag) = &self.tag {
            tag.push_entry(&mut code, function)?;
        }
        if let Some(pointer) = self.count {
            code.push_relative(&CALL_THROUGH, at, pointer)?;
        }
        if let Some(check) = &self.check {
            check.push(&mut code, at, slow)?;
        }
        Some(code)
    }
}

/// By which functions are told apart.
#[expect(clippy::cast_possible_truncation, reason = "the lower half of an address")]
pub fn lower_half(address: u64) -> u32 {
    address as u32
}

/// `jmp to`.
pub fn jump(at: u64, to: u64) -> Option<Code> {
    let mut code = Code::EMPTY;
    code.push_relative(&[0xe9], at, to)?;
    Some(code)
}

/// `call *pointer(%rip)`.
pub fn call_through(at: u64, pointer: u64) -> Option<Code> {
    let mut code = Code::EMPTY;
    code.push_relative(&CALL_THROUGH, at, pointer)?;
    Some(code)
}

const CALL_THROUGH: [u8; 2] = [0xff, 0x15];

fn distance(from: u64, to: u64) -> Option<i32> {
    i32::try_from(to.cast_signed().checked_sub(from.cast_signed())?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Entry = Entry { tag: None, count: None, check: None };
    const PAIR: Entry = Entry { check: Some(Check { word: -40, moved: None }), ..NONE };
    const WHOLE: Entry =
        Entry { check: Some(Check { word: -40, moved: Some([0x1234, -24]) }), ..NONE };
    const TAG: Tag = Tag { words: -72 };

    /// Against what GNU as makes of the listing above.
    #[test]
    fn the_bytes_are_those_of_the_listing() {
        let word = [0x64, 0x4c, 0x8b, 0x1c, 0x25, 0xd8, 0xff, 0xff, 0xff, 0x49, 0x83, 0x3b, 0x00];
        let cpu = [0x64, 0x44, 0x8b, 0x1c, 0x25, 0x34, 0x12, 0x00, 0x00];
        let chosen_on = [0x64, 0x44, 0x3b, 0x1c, 0x25, 0xe8, 0xff, 0xff, 0xff];
        let code = PAIR.code(0x1000, 0x1000, 0x2000).unwrap();
        assert_eq!(code.bytes(), [&word[..], &[0x0f, 0x85, 0xed, 0x0f, 0, 0]].concat());
        assert_eq!(code.bytes().len(), PAIR.size());
        let code = WHOLE.code(0x1000, 0x1000, 0x0f00).unwrap();
        let parts = [
            &word[..],
            &[0x0f, 0x85, 0xed, 0xfe, 0xff, 0xff],
            &cpu,
            &chosen_on,
            &[0x0f, 0x85, 0xd5, 0xfe, 0xff, 0xff],
        ];
        assert_eq!(code.bytes(), parts.concat());
        assert_eq!(code.bytes().len(), WHOLE.size());
    }

    /// Against what GNU as makes of the second listing; beside the check of one pair there is room.
    #[test]
    fn functions_say_that_they_run_before_they_are_checked() {
        let words = [0x64, 0x4c, 0x8b, 0x1c, 0x25, 0xb8, 0xff, 0xff, 0xff];
        let entry = [&words[..], &[0x41, 0xc7, 0x03, 0x34, 0x12, 0x55, 0x55, 0x49, 0xff, 0x43, 64]];
        let only = Entry { tag: Some(TAG), ..NONE };
        let code = only.code(0x1000, 0x7777_5555_1234, 0).unwrap();
        assert_eq!((code.bytes(), only.size()), (&entry.concat()[..], TAG_BYTES));
        let both = Entry { tag: Some(TAG), ..PAIR };
        let code = both.code(0x1000, 0x7777_5555_1234, 0x2000).unwrap();
        let check = PAIR.code(0x1000 + TAG_BYTES as u64, 0, 0x2000).unwrap();
        assert_eq!(code.bytes(), [&entry.concat()[..], check.bytes()].concat());
        assert!(code.bytes().len() == both.size() && both.size() <= CHECK_BYTES);
        let whole = Entry { tag: Some(TAG), ..WHOLE };
        assert_eq!(whole.code(0x1000, 0, 0x2000).unwrap().bytes().len(), whole.size());
        let exit = [&words[..], &[0x44, 0x8b, 0x14, 0x24, 0x45, 0x89, 0x13, 0xc3]].concat();
        assert_eq!(TAG.exit().unwrap().bytes(), exit);
        assert!(exit.len() <= RETURN.len());
    }

    /// Goal: what publishes counters is called behind the stores and before the check.
    #[test]
    fn counters_are_published_between() {
        let all = Entry { tag: Some(TAG), count: Some(0x1000), ..WHOLE };
        let code = all.code(0x1100, 0x7777, 0x2000).unwrap();
        assert_eq!(code.bytes().len(), all.size());
        let said = Entry { tag: Some(TAG), ..NONE }.code(0x1100, 0x7777, 0).unwrap();
        assert_eq!(code.bytes()[..TAG_BYTES], *said.bytes());
        // From 0x111a, where the call ends.
        let call = &code.bytes()[TAG_BYTES..][..CALL_BYTES];
        assert_eq!(call, [0xff, 0x15, 0xe6, 0xfe, 0xff, 0xff]);
        let check = WHOLE.code(0x1100 + (TAG_BYTES + CALL_BYTES) as u64, 0, 0x2000).unwrap();
        assert_eq!(code.bytes()[TAG_BYTES + CALL_BYTES..], *check.bytes());
        assert_eq!(all.code(1 << 33, 0, 0x2000), None, "its pointer is too far away");
    }

    #[test]
    fn jumps_count_from_their_end() {
        assert_eq!(jump(0x1000, 0x1005).unwrap().bytes(), [0xe9, 0, 0, 0, 0]);
        assert_eq!(jump(0x1000, 0x1000).unwrap().bytes(), [0xe9, 0xfb, 0xff, 0xff, 0xff]);
        assert_eq!(call_through(0x1000, 0x1016).unwrap().bytes(), [0xff, 0x15, 0x10, 0, 0, 0]);
    }

    #[test]
    fn what_is_out_of_reach_is_refused() {
        let far = 1 << 31;
        assert_eq!(jump(0, far + 5), None);
        assert!(jump(0, far + 4).is_some());
        assert_eq!(WHOLE.code(0x7fff_0000_0000, 0, 0x5555_0000_0000), None);
        assert_eq!(jump(u64::MAX - 2, 0), None);
    }
}
