//! The machine code that is written over NOPs: checks, and function tags.
//!
//! ```text
//!     mov   %fs:WORD, %r11            the word that the thread tests   64 4c 8b 1c 25 WORD
//!     cmpq  $0, (%r11)                                                 49 83 3b 00
//!     jne   SLOW                                                       0f 85 rel32
//!     mov   %fs:CPU, %r11d            the CPU that it runs on          64 44 8b 1c 25 CPU
//!     cmp   %fs:CHOSEN_ON, %r11d      the CPU that WORD was chosen for 64 44 3b 1c 25 CHOSEN_ON
//!     jne   SLOW                                                       0f 85 rel32
//! ```
//!
//! At a function's start, `%r11` is free and the flags are dead. The second half is needed only in
//! runs with several batch lanes, where a thread can migrate to another lane.
//!
//! For `elfen shim`, each function tags its thread, before any check: it stores its own address on
//! entry. The `ret` that all functions of a file share ([`RETURN`]) stores the return address. Some
//! functions also call a routine that publishes the thread's counters, and that changes only `%r11`
//! and the flags. At a return, `%r10` and `%r11` are free:
//!
//! ```text
//!     mov   %fs:WORDS, %r11           the thread's words               64 4c 8b 1c 25 WORDS
//!     movl  $FUNCTION, (%r11)         the lower half of its address    41 c7 03 FUNCTION
//!     incq  64(%r11)                  its calls                        49 ff 43 40
//!     call  *COUNT(%rip)              publishes the thread's counters  ff 15 rel32
//!
//!     mov   %fs:WORDS, %r11                                            64 4c 8b 1c 25 WORDS
//!     mov   (%rsp), %r10d             an address in its caller         44 8b 14 24
//!     mov   %r10d, (%r11)                                              45 89 13
//!     ret                                                              c3
//! ```

/// Length of the check for a run with one pair, and of the whole check.
const PAIR_CHECK_BYTES: usize = 19;
pub const CHECK_BYTES: usize = 43;
pub const JUMP_BYTES: usize = 5;
/// Length of the code that tags a function entry.
const TAG_BYTES: usize = 20;
/// Length of a call through a pointer.
const CALL_BYTES: usize = 6;
/// The longest code: tag, call and check.
const CODE_BYTES: usize = TAG_BYTES + CALL_BYTES + CHECK_BYTES;

/// What `libelfen_return.a` provides for functions to return by: `ret`, and bytes to overwrite that
/// identify the library.
pub const RETURN: [u8; 32] = *b"\xc3elfen return thunk, version 1\xcc\xcc";

/// The words of a check, as distances from the thread pointer. They are the same in every thread of
/// a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Check {
    /// The pointer to the word that is tested.
    pub word: i32,
    /// The CPU that the thread runs on, and the CPU that `word` was chosen for. `None` if the
    /// thread cannot migrate.
    pub moved: Option<[i32; 2]>,
}

/// A short sequence of machine code.
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

    /// Appends an instruction that ends in the 32-bit distance from its own end to `to`. `at` is
    /// the address of this code.
    fn push_relative(&mut self, opcode: &[u8], at: u64, to: u64) -> Option<()> {
        self.push(opcode)?;
        let end = at.checked_add(self.len as u64)?.checked_add(4)?;
        self.push(&distance(end, to)?.to_le_bytes())
    }
}

impl Check {
    /// The length of the check.
    pub fn size(&self) -> usize {
        if self.moved.is_some() { CHECK_BYTES } else { PAIR_CHECK_BYTES }
    }

    /// Appends the check to code at address `at`. It jumps to `slow` if a test fails.
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

/// The code by which functions tag their thread on entry and on return.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tag {
    /// Distance from the thread pointer to the pointer to the thread's words.
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

    /// The code that replaces [`RETURN`].
    pub fn return_code(&self) -> Option<Code> {
        let mut code = Code::EMPTY;
        self.push_words(&mut code)?;
        code.push(&[0x44, 0x8b, 0x14, 0x24, 0x45, 0x89, 0x13, 0xc3])?;
        Some(code)
    }
}

/// The code at a function's entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    pub tag: Option<Tag>,
    /// Address of the pointer to the routine that publishes the thread's counters.
    pub count: Option<u64>,
    pub check: Option<Check>,
}

impl Entry {
    /// The length of [`Entry::code`].
    pub fn size(&self) -> usize {
        self.tag.map_or(0, |_| TAG_BYTES)
            + self.count.map_or(0, |_| CALL_BYTES)
            + self.check.map_or(0, |check| check.size())
    }

    /// The code for address `at`, in the function at `function`. The check comes last and jumps to
    /// `slow` if a test fails. `None` if `slow` or `count` is more than 2 GiB away.
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

/// Identifies a function in a tag.
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

    /// The expected bytes are what GNU as makes of the first listing above.
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

    /// The expected bytes are what GNU as makes of the second listing. A tag and the check for one
    /// pair fit into the room of a whole check.
    #[test]
    fn functions_are_tagged_before_they_are_checked() {
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
        assert_eq!(TAG.return_code().unwrap().bytes(), exit);
        assert!(exit.len() <= RETURN.len());
    }

    /// Goal: the call that publishes counters comes after the stores of the tag and before the
    /// check.
    #[test]
    fn counters_are_published_between_tag_and_check() {
        let all = Entry { tag: Some(TAG), count: Some(0x1000), ..WHOLE };
        let code = all.code(0x1100, 0x7777, 0x2000).unwrap();
        assert_eq!(code.bytes().len(), all.size());
        let tagged = Entry { tag: Some(TAG), ..NONE }.code(0x1100, 0x7777, 0).unwrap();
        assert_eq!(code.bytes()[..TAG_BYTES], *tagged.bytes());
        // Counts from 0x111a, where the call ends.
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
    fn targets_out_of_reach_are_rejected() {
        let far = 1 << 31;
        assert_eq!(jump(0, far + 5), None);
        assert!(jump(0, far + 4).is_some());
        assert_eq!(WHOLE.code(0x7fff_0000_0000, 0, 0x5555_0000_0000), None);
        assert_eq!(jump(u64::MAX - 2, 0), None);
    }
}
