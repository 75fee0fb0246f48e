//! The machine code of a check: what is jumped to, and the jump.

use iced_x86::{BlockEncoder, BlockEncoderOptions, InstructionBlock};

use crate::code::{Function, JUMP_BYTES};
use crate::patch_site::PatchSite;

/// What is left of instructions that were jumped over: nobody should come here.
const INT3: u8 = 0xcc;
/// Nobody's memory behind the stack pointer, but a function's own that calls nothing.
const RED_ZONE: u8 = 128;

/// What a check tests and where it goes. All of it lies within 2 GiB.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hooks {
    pub words: Words,
    /// The routine that rings. It is entered with the red zone left alone and `%rax`, which has
    /// been saved, holding the address to go back to; behind words of a CPU, `%rcx` has been
    /// saved as well and holds the address of that CPU's block. It goes back with every other
    /// register as it was.
    pub ring: u64,
}

/// Words of 8 bytes that a check tests: as long as both are 0, it does nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Words {
    /// The same for every thread.
    Fixed {
        words: [u64; 2],
        /// A word that counts how often the check ran.
        count: Option<u64>,
    },
    /// Those of the CPU that the thread is on.
    CpuWords(CpuWords),
}

/// Blocks of [`BLOCK_BYTES`], one for each CPU: each begins with the distances of words from the
/// block, of 4 bytes each: a check reads two, and the routine that rings a third. A block of zeros
/// names itself, and so words that are 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CpuWords {
    pub blocks: u64,
    /// Where the kernel writes the number of a thread's CPU, from the thread pointer on: the
    /// first word of `struct rseq`, which holds a CPU that there is at any time.
    pub cpu_at: i32,
    /// Where in the block a word counts how often the check ran. A word for each CPU, as cores
    /// would pass one of all of them to and fro.
    pub count_at: i32,
}

pub const BLOCK_BYTES: u64 = 1 << BLOCK_SHIFT;
const BLOCK_SHIFT: u8 = 12;

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

    pub(crate) fn here(&self) -> Option<u64> {
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
    fn push_check(&mut self, words: &Words) -> Option<[usize; 2]> {
        match words {
            Words::Fixed { words, count } => self.push_fixed(words, *count),
            Words::CpuWords(cpu_words) => self.push_cpu_words(cpu_words),
        }
    }

    fn push_fixed(&mut self, words: &[u64; 2], count: Option<u64>) -> Option<[usize; 2]> {
        if let Some(count) = count {
            // incq count(%rip)
            self.push_relative(&[0x48, 0xff, 0x05], count, &[])?;
        }
        let mut open = [0; 2];
        for (&word, open) in words.iter().zip(&mut open) {
            // cmpq $0, word(%rip); jne
            self.push_relative(&[0x48, 0x83, 0x3d], word, &[0])?;
            *open = self.push_open(&[0x0f, 0x85]);
        }
        Some(open)
    }

    /// Leaves the address of the CPU's block in `%rcx`. Where a thread goes to another CPU in
    /// between, this check is the last for the CPU that it left.
    fn push_cpu_words(&mut self, cpu_words: &CpuWords) -> Option<[usize; 2]> {
        let CpuWords { blocks, cpu_at, count_at } = *cpu_words;
        // mov %fs:cpu_at,%eax; shl $BLOCK_SHIFT,%eax; lea blocks(%rip),%rcx; add %rax,%rcx
        self.push(&[0x64, 0x8b, 0x04, 0x25]);
        self.push(&cpu_at.to_le_bytes());
        self.push(&[0xc1, 0xe0, BLOCK_SHIFT]);
        self.push_relative(&[0x48, 0x8d, 0x0d], blocks, &[])?;
        self.push(&[0x48, 0x01, 0xc1]);
        // incq count_at(%rcx)
        self.push(&[0x48, 0xff, 0x81]);
        self.push(&count_at.to_le_bytes());
        // movslq (%rcx),%rax; cmpq $0,(%rcx,%rax); jne
        self.push(&[0x48, 0x63, 0x01, 0x48, 0x83, 0x3c, 0x01, 0]);
        let task = self.push_open(&[0x0f, 0x85]);
        // movslq 4(%rcx),%rax; cmpq $0,(%rcx,%rax); jne
        self.push(&[0x48, 0x63, 0x41, 4, 0x48, 0x83, 0x3c, 0x01, 0]);
        let probe = self.push_open(&[0x0f, 0x85]);
        Some([task, probe])
    }

    /// The address behind the jump in `%rax`, and off to the routine.
    fn push_ring(&mut self, ring: u64) -> Option<()> {
        // lea back(%rip),%rax, over the jump of 5 bytes; jmp ring; back:
        self.push(&[0x48, 0x8d, 0x05, 5, 0, 0, 0]);
        self.push_relative(&[0xe9], ring, &[])
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

const PUSH_RAX: u8 = 0x50;
const PUSH_RCX: u8 = 0x51;
const POP_RAX: u8 = 0x58;
const POP_RCX: u8 = 0x59;
/// `lahf; seto %al` and its counterpart `add $0x7f,%al; sahf`: all that a comparison writes.
const SAVE_FLAGS: [u8; 4] = [0x9f, 0x0f, 0x90, 0xc0];
const RESTORE_FLAGS: [u8; 3] = [0x04, 0x7f, 0x9e];

impl Function {
    /// The trampoline of a place of this function, as it stands at `at`. `None` if something that
    /// it names is more than 2 GiB away.
    pub fn trampoline(&self, site: &PatchSite, at: u64, hooks: &Hooks) -> Option<Patch> {
        self.behind_a_check(site, at, hooks, |code| {
            for instruction in self.code.get(site.moved.clone())?.chunks(1) {
                // One at a time: of a block, a branch to its beginning would stay inside of it, and
                // a loop that small would never come by its check again.
                let block = InstructionBlock::new(instruction, code.here()?);
                let encoded = BlockEncoder::encode(64, block, BlockEncoderOptions::NONE).ok()?;
                code.push(&encoded.code_buffer);
            }
            let end = site.at.checked_add(u64::try_from(site.bytes).ok()?)?;
            code.push_relative(&[0xe9], end, &[])
        })
    }

    /// The check of a place, and what runs behind it until it is back in the program.
    pub(crate) fn behind_a_check(
        &self,
        site: &PatchSite,
        at: u64,
        hooks: &Hooks,
        push_moved: impl FnOnce(&mut Code) -> Option<()>,
    ) -> Option<Patch> {
        let mut code = Code::at(at);
        // Registers that the check itself takes. Its stack is that of the whole check then.
        let has_registers = matches!(hooks.words, Words::CpuWords(_));
        let has_stack = site.saves_flags || has_registers;
        if has_stack {
            code.push_below_red_zone();
        }
        if site.saves_flags {
            code.push(&[PUSH_RAX]);
            code.push(&SAVE_FLAGS);
        }
        if has_registers {
            code.push(&[PUSH_RAX, PUSH_RCX]);
        }
        let open = code.push_check(&hooks.words)?;
        let done = code.bytes.len();
        if has_registers {
            code.push(&[POP_RCX, POP_RAX]);
        }
        if site.saves_flags {
            code.push(&RESTORE_FLAGS);
            code.push(&[POP_RAX]);
        }
        if has_stack {
            code.push_above_red_zone();
        }
        push_moved(&mut code)?;
        open.into_iter().try_for_each(|open| code.close(open))?;
        if !has_stack {
            code.push_below_red_zone();
        }
        if !has_registers {
            code.push(&[PUSH_RAX]);
        }
        code.push_ring(hooks.ring)?;
        if !has_registers {
            code.push(&[POP_RAX]);
        }
        if !has_stack {
            code.push_above_red_zone();
        }
        let back = at.checked_add(u64::try_from(done).ok()?)?;
        code.push_relative(&[0xe9], back, &[])?;
        Some(code.patch())
    }
}

impl PatchSite {
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
    use crate::patch_site::Permitted;

    const WORDS: [u64; 2] = [0x3000, 0x3008];
    const HOOKS: Hooks = fixed(WORDS, None);
    const CPU_WORDS: CpuWords = CpuWords { blocks: 0x4000, cpu_at: 0x920, count_at: 8 };

    const fn fixed(words: [u64; 2], count: Option<u64>) -> Hooks {
        Hooks { words: Words::Fixed { words, count }, ring: 0x2800 }
    }

    fn first(bytes: &[u8]) -> (Function, PatchSite) {
        let function = Function::decode(bytes, 0x1000, None).unwrap();
        let all = Permitted { several: true, memory: true, flags: true, ..Permitted::default() };
        let site = function.sites(&all).next().unwrap();
        (function, site)
    }

    /// Against what GNU as makes of the listing in `lib.rs`.
    #[test]
    fn the_bytes_are_those_of_the_listing() {
        let (function, site) = first(&[0xb8, 1, 0, 0, 0, 0xc3]);
        let patch = function.trampoline(&site, 0x2000, &HOOKS).unwrap();
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
        let jump = site.jump(0x2000).unwrap();
        assert_eq!((jump.at, &jump.bytes[..]), (0x1000, &[0xe9, 0xfb, 0x0f, 0, 0][..]));
    }

    /// As above.
    #[test]
    fn the_bytes_of_a_check_of_its_cpu() {
        let (function, site) = first(&[0xb8, 1, 0, 0, 0, 0xc3]);
        let hooks = Hooks { words: Words::CpuWords(CPU_WORDS), ..HOOKS };
        let patch = function.trampoline(&site, 0x2000, &hooks).unwrap();
        let parts: [&[u8]; 17] = [
            &[0x48, 0x8d, 0x64, 0x24, 0x80, 0x50, 0x51],
            &[0x64, 0x8b, 0x04, 0x25, 0x20, 0x09, 0, 0],
            &[0xc1, 0xe0, 0x0c],
            &[0x48, 0x8d, 0x0d, 0xe7, 0x1f, 0, 0],
            &[0x48, 0x01, 0xc1],
            &[0x48, 0xff, 0x81, 8, 0, 0, 0],
            &[0x48, 0x63, 0x01, 0x48, 0x83, 0x3c, 0x01, 0],
            &[0x0f, 0x85, 0x23, 0, 0, 0],
            &[0x48, 0x63, 0x41, 4, 0x48, 0x83, 0x3c, 0x01, 0],
            &[0x0f, 0x85, 0x14, 0, 0, 0],
            &[0x59, 0x58],
            &[0x48, 0x8d, 0xa4, 0x24, 0x80, 0, 0, 0],
            &[0xb8, 1, 0, 0, 0],
            &[0xe9, 0xb1, 0xef, 0xff, 0xff],
            &[0x48, 0x8d, 0x05, 5, 0, 0, 0],
            &[0xe9, 0xa0, 0x07, 0, 0],
            &[0xe9, 0xdb, 0xff, 0xff, 0xff],
        ];
        for (at, part) in parts.iter().enumerate() {
            let from: usize = parts[..at].iter().map(|part| part.len()).sum();
            assert_eq!(&patch.bytes[from..from + part.len()], *part, "{at} of {:x?}", patch.bytes);
        }
        assert_eq!(patch.bytes.len(), parts.concat().len());
    }

    #[test]
    fn a_loop_that_is_moved_comes_by_its_check_again() {
        // A: pause; dec %eax; jnz A; ret
        let (function, site) = first(&[0xf3, 0x90, 0xff, 0xc8, 0x75, 0xfa, 0xc3]);
        assert_eq!((site.at, site.bytes), (0x1000, 6));
        let patch = function.trampoline(&site, 0x2000, &HOOKS).unwrap();
        // jnz rel32 from 0x2026 to the place, where the jump stands.
        let jnz = [0x0f, 0x85, 0xda, 0xef, 0xff, 0xff];
        assert!(patch.bytes.windows(6).any(|bytes| bytes == jnz), "{:x?}", patch.bytes);
    }

    #[test]
    fn what_is_left_of_long_instructions_traps() {
        let (_, site) = first(&[0xc7, 0x07, 1, 0, 0, 0, 0xc3]);
        assert_eq!(site.jump(0x1005).unwrap().bytes, [0xe9, 0, 0, 0, 0, INT3]);
    }

    #[test]
    fn what_is_out_of_reach_is_refused() {
        let (function, site) = first(&[0xb8, 1, 0, 0, 0, 0xc3]);
        let far = 1 << 32;
        assert_eq!(function.trampoline(&site, far, &HOOKS), None);
        for hooks in [
            fixed([far, 0x3008], None),
            fixed([0x3000, far], None),
            fixed(WORDS, Some(far)),
            Hooks { ring: far, ..HOOKS },
            Hooks { words: Words::CpuWords(CpuWords { blocks: far, ..CPU_WORDS }), ..HOOKS },
        ] {
            assert_eq!(function.trampoline(&site, 0x2000, &hooks), None);
        }
        assert_eq!(site.jump(far), None);
        // What is moved names something as well.
        let (function, site) = first(&[0x48, 0x8b, 0x05, 0, 0, 0, 0x80, 0xc3]);
        let near = Hooks { ring: 0x7000_0000, ..fixed([0x7000_0000; 2], None) };
        assert_eq!(function.trampoline(&site, 0x7000_0000, &near), None);
    }
}
