//! The machine code of a check: what is jumped to, and the jump.

use iced_x86::{BlockEncoder, BlockEncoderOptions, InstructionBlock};

use crate::code::{Function, JUMP_BYTES};
use crate::place::Place;

/// What is left of instructions that were jumped over: nobody should come here.
const INT3: u8 = 0xcc;
/// Nobody's memory behind the stack pointer, but a function's own that calls nothing.
const RED_ZONE: u8 = 128;

/// What a check tests and where it goes. All of it lies within 2 GiB.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hooks {
    /// Words of 8 bytes: as long as both are 0, the check does nothing.
    pub words: [u64; 2],
    /// The routine that rings. It is entered with the red zone left alone, `%rax` saved and holding
    /// the address to go back to, which it does with every other register as it was.
    pub ring: u64,
    /// A word that counts how often the check ran, while that is of interest.
    pub count: Option<u64>,
}

/// What is to be written, and where.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Patch {
    pub at: u64,
    pub bytes: Vec<u8>,
}

/// Code that grows at a known address.
pub(crate) struct Code {
    at: u64,
    bytes: Vec<u8>,
}

impl Code {
    pub(crate) fn at(at: u64) -> Self {
        Self { at, bytes: Vec::with_capacity(128) }
    }

    pub(crate) fn patch(self) -> Patch {
        Patch { at: self.at, bytes: self.bytes }
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    fn here(&self) -> Option<u64> {
        self.at.checked_add(u64::try_from(self.bytes.len()).ok()?)
    }

    /// An opcode, the distance to `to` from the end of the instruction, and what follows that.
    pub(crate) fn push_relative(&mut self, opcode: &[u8], to: u64, rest: &[u8]) -> Option<()> {
        self.push(opcode);
        let end = self.here()?.checked_add(4 + u64::try_from(rest.len()).ok()?)?;
        let distance = to.cast_signed().checked_sub(end.cast_signed())?;
        self.push(&i32::try_from(distance).ok()?.to_le_bytes());
        self.push(rest);
        Some(())
    }

    /// Leaves room for the distance of a jump that is known later.
    pub(crate) fn push_open(&mut self, opcode: &[u8]) -> usize {
        self.push(opcode);
        self.push(&[0; 4]);
        self.bytes.len()
    }

    pub(crate) fn close(&mut self, open: usize) -> Option<()> {
        let distance = i32::try_from(self.bytes.len() - open).ok()?;
        self.bytes.get_mut(open - 4..open)?.copy_from_slice(&distance.to_le_bytes());
        Some(())
    }

    /// The check itself: two jumps to be closed where it rings.
    fn push_check(&mut self, hooks: &Hooks) -> Option<[usize; 2]> {
        if let Some(count) = hooks.count {
            // incq count(%rip)
            self.push_relative(&[0x48, 0xff, 0x05], count, &[])?;
        }
        let mut open = [0; 2];
        for (word, open) in hooks.words.into_iter().zip(&mut open) {
            // cmpq $0, word(%rip); jne
            self.push_relative(&[0x48, 0x83, 0x3d], word, &[0])?;
            *open = self.push_open(&[0x0f, 0x85]);
        }
        Some(open)
    }

    /// `%rax` on the stack, the address behind the jump in it, and off to the routine.
    fn push_ring(&mut self, hooks: &Hooks) -> Option<()> {
        self.push(&[0x50]);
        // lea back(%rip),%rax, over the jump of 5 bytes; jmp ring; back: pop %rax
        self.push(&[0x48, 0x8d, 0x05, 5, 0, 0, 0]);
        self.push_relative(&[0xe9], hooks.ring, &[])?;
        self.push(&[0x58]);
        Some(())
    }

    /// Moves the stack pointer below what may lie there, by `lea -128(%rsp),%rsp`: the flags stay.
    fn push_below_red_zone(&mut self) {
        self.push(&[0x48, 0x8d, 0x64, 0x24, RED_ZONE.wrapping_neg()]);
    }

    /// And back, by `lea 128(%rsp),%rsp`, whose offset takes four bytes.
    fn push_above_red_zone(&mut self) {
        self.push(&[0x48, 0x8d, 0xa4, 0x24, RED_ZONE, 0, 0, 0]);
    }
}

/// `lahf; seto %al` and its counterpart `add $0x7f,%al; sahf`: all that a comparison writes.
const SAVE_FLAGS: [u8; 4] = [0x9f, 0x0f, 0x90, 0xc0];
const RESTORE_FLAGS: [u8; 3] = [0x04, 0x7f, 0x9e];

impl Function {
    /// The trampoline of a place of this function, as it stands at `at`. `None` if something that
    /// it names is more than 2 GiB away.
    pub fn trampoline(&self, place: &Place, at: u64, hooks: &Hooks) -> Option<Patch> {
        let mut code = Code::at(at);
        if place.saves_flags {
            code.push_below_red_zone();
            code.push(&[0x50]);
            code.push(&SAVE_FLAGS);
        }
        let open = code.push_check(hooks)?;
        let moved = code.bytes.len();
        if place.saves_flags {
            code.push(&RESTORE_FLAGS);
            code.push(&[0x58]);
            code.push_above_red_zone();
        }
        for instruction in self.code.get(place.moved.clone())?.chunks(1) {
            // One at a time: of a block, a branch to its beginning would stay inside of it, and a
            // loop that small would never come by its check again.
            let block = InstructionBlock::new(instruction, code.here()?);
            let encoded = BlockEncoder::encode(64, block, BlockEncoderOptions::NONE).ok()?;
            code.push(&encoded.code_buffer);
        }
        let end = place.at.checked_add(u64::try_from(place.bytes).ok()?)?;
        code.push_relative(&[0xe9], end, &[])?;
        open.into_iter().try_for_each(|open| code.close(open))?;
        if !place.saves_flags {
            code.push_below_red_zone();
        }
        code.push_ring(hooks)?;
        if !place.saves_flags {
            code.push_above_red_zone();
        }
        let back = at.checked_add(u64::try_from(moved).ok()?)?;
        code.push_relative(&[0xe9], back, &[])?;
        Some(code.patch())
    }
}

impl Place {
    /// What is written over the place: a jump to its trampoline, and traps.
    pub fn jump(&self, to: u64) -> Option<Patch> {
        let mut code = Code::at(self.at);
        code.push_relative(&[0xe9], to, &[])?;
        code.bytes.resize(self.bytes.max(JUMP_BYTES), INT3);
        Some(code.patch())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::Permitted;

    const HOOKS: Hooks = Hooks { words: [0x3000, 0x3008], ring: 0x2800, count: None };

    fn first(bytes: &[u8]) -> (Function, Place) {
        let function = Function::decode(bytes, 0x1000, None).unwrap();
        let all = Permitted { several: true, memory: true, flags: true, named: &[] };
        let place = function.places(&all).next().unwrap();
        (function, place)
    }

    /// Against what GNU as makes of the listing in `lib.rs`.
    #[test]
    fn the_bytes_are_those_of_the_listing() {
        let (function, place) = first(&[0xb8, 1, 0, 0, 0, 0xc3]);
        let patch = function.trampoline(&place, 0x2000, &HOOKS).unwrap();
        let parts: [&[u8]; 11] = [
            &[0x48, 0x83, 0x3d, 0xf8, 0x0f, 0, 0, 0],
            &[0x0f, 0x85, 0x18, 0, 0, 0],
            &[0x48, 0x83, 0x3d, 0xf2, 0x0f, 0, 0, 0],
            &[0x0f, 0x85, 0x0a, 0, 0, 0],
            &[0xb8, 1, 0, 0, 0],
            &[0xe9, 0xdf, 0xef, 0xff, 0xff],
            &[0x48, 0x8d, 0x64, 0x24, 0x80],
            &[0x50, 0x48, 0x8d, 0x05, 5, 0, 0, 0],
            &[0xe9, 0xc8, 0x07, 0, 0],
            &[0x58, 0x48, 0x8d, 0xa4, 0x24, 0x80, 0, 0, 0],
            &[0xe9, 0xd6, 0xff, 0xff, 0xff],
        ];
        assert_eq!(patch.bytes, parts.concat());
        let jump = place.jump(0x2000).unwrap();
        assert_eq!((jump.at, &jump.bytes[..]), (0x1000, &[0xe9, 0xfb, 0x0f, 0, 0][..]));
    }

    #[test]
    fn a_loop_that_is_moved_comes_by_its_check_again() {
        // A: pause; dec %eax; jnz A; ret
        let (function, place) = first(&[0xf3, 0x90, 0xff, 0xc8, 0x75, 0xfa, 0xc3]);
        assert_eq!((place.at, place.bytes), (0x1000, 6));
        let patch = function.trampoline(&place, 0x2000, &HOOKS).unwrap();
        // jnz rel32 from 0x2026 to the place, where the jump stands.
        let jnz = [0x0f, 0x85, 0xda, 0xef, 0xff, 0xff];
        assert!(patch.bytes.windows(6).any(|bytes| bytes == jnz), "{:x?}", patch.bytes);
    }

    #[test]
    fn what_is_left_of_long_instructions_traps() {
        let (_, place) = first(&[0xc7, 0x07, 1, 0, 0, 0, 0xc3]);
        assert_eq!(place.jump(0x1005).unwrap().bytes, [0xe9, 0, 0, 0, 0, INT3]);
    }

    #[test]
    fn what_is_out_of_reach_is_refused() {
        let (function, place) = first(&[0xb8, 1, 0, 0, 0, 0xc3]);
        let far = 1 << 32;
        assert_eq!(function.trampoline(&place, far, &HOOKS), None);
        for hooks in [
            Hooks { words: [far, 0x3008], ..HOOKS },
            Hooks { words: [0x3000, far], ..HOOKS },
            Hooks { ring: far, ..HOOKS },
            Hooks { count: Some(far), ..HOOKS },
        ] {
            assert_eq!(function.trampoline(&place, 0x2000, &hooks), None);
        }
        assert_eq!(place.jump(far), None);
        // What is moved names something as well.
        let (function, place) = first(&[0x48, 0x8b, 0x05, 0, 0, 0, 0x80, 0xc3]);
        let near = Hooks { words: [0x7000_0000; 2], ring: 0x7000_0000, count: None };
        assert_eq!(function.trampoline(&place, 0x7000_0000, &near), None);
    }
}
