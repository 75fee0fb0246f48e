//! The machine code of a check: the trampoline, and the jump to it.

use iced_x86::{BlockEncoder, BlockEncoderOptions, InstructionBlock};

use crate::code::{Function, JUMP_BYTES};
use crate::patch_site::PatchSite;

/// Fills the rest of replaced instructions; no thread should get there.
const INT3: u8 = 0xcc;
/// Bytes below the stack pointer that a leaf function may use.
const RED_ZONE: u8 = 128;

/// What a check tests and where it goes. All of it lies within 2 GiB.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hooks {
    pub words: Words,
    /// The doorbell routine. On entry the red zone is skipped, and `%rax`, which has been saved,
    /// holds the return address. With [`Words::PerCpu`], `%rcx` has been saved too and holds the
    /// address of the CPU's block. The routine preserves all other registers.
    pub ring: u64,
}

/// The words of 8 bytes that a check tests. While both are 0, the check does nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Words {
    /// The same words for every thread.
    Fixed {
        words: [u64; 2],
        /// A word that counts the runs of the check.
        count: Option<u64>,
    },
    /// The words of the CPU that the thread runs on.
    PerCpu(CpuWords),
}

/// One block of [`BLOCK_BYTES`] for each CPU. A block begins with distances of 4 bytes from the
/// block to its words: a check uses two of them, the doorbell routine a third. In a block of zeros
/// the distances point to the block itself, and so to words that are 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CpuWords {
    pub blocks: u64,
    /// Where the kernel stores the CPU number of a thread, as a distance from the thread pointer.
    /// It is the first word of `struct rseq`, which always holds a valid CPU number.
    pub cpu_at: i32,
    /// Offset in the block of a word that counts the runs of the check. Each CPU has its own word,
    /// so that cores do not pass a shared cache line back and forth.
    pub count_at: i32,
}

pub const BLOCK_BYTES: u64 = 1 << BLOCK_SHIFT;
const BLOCK_SHIFT: u8 = 12;

/// Bytes to write, and their address.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Patch {
    pub at: u64,
    pub bytes: Vec<u8>,
}

/// Code that grows at a known address.
#[derive(Debug)]
pub struct Code {
    at: u64,
    bytes: Vec<u8>,
}

impl Code {
    pub fn at(at: u64) -> Self {
        Self { at, bytes: Vec::with_capacity(128) }
    }

    pub fn patch(self) -> Patch {
        Patch { at: self.at, bytes: self.bytes }
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    pub fn length(&self) -> usize {
        self.bytes.len()
    }

    /// Removes what was appended after the code had this length.
    pub fn truncate(&mut self, length: usize) {
        self.bytes.truncate(length);
    }

    /// The address after the code.
    pub fn end(&self) -> Option<u64> {
        self.at.checked_add(u64::try_from(self.bytes.len()).ok()?)
    }

    /// Appends an opcode, the distance from the end of the instruction to `to`, and the bytes in
    /// `rest`.
    pub fn push_relative(&mut self, opcode: &[u8], to: u64, rest: &[u8]) -> Option<()> {
        self.push(opcode);
        let end = self.end()?.checked_add(4 + u64::try_from(rest.len()).ok()?)?;
        let distance = to.cast_signed().checked_sub(end.cast_signed())?;
        self.push(&i32::try_from(distance).ok()?.to_le_bytes());
        self.push(rest);
        Some(())
    }

    /// Appends a jump whose distance is filled in later by [`Code::end_jump`].
    pub fn push_forward_jump(&mut self, opcode: &[u8]) -> usize {
        self.push(opcode);
        self.push(&[0; 4]);
        self.bytes.len()
    }

    pub fn end_jump(&mut self, open: usize) -> Option<()> {
        let distance = i32::try_from(self.bytes.len() - open).ok()?;
        self.bytes.get_mut(open - 4..open)?.copy_from_slice(&distance.to_le_bytes());
        Some(())
    }

    /// Appends the tests. Returns the two jumps to close where the code rings.
    fn push_check(&mut self, words: &Words) -> Option<[usize; 2]> {
        match words {
            Words::Fixed { words, count } => self.push_fixed(words, *count),
            Words::PerCpu(cpu_words) => self.push_cpu_words(cpu_words),
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
            *open = self.push_forward_jump(&[0x0f, 0x85]);
        }
        Some(open)
    }

    /// Leaves the address of the CPU's block in `%rcx`. A thread that migrates in between runs this
    /// check still for its previous CPU.
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
        let task = self.push_forward_jump(&[0x0f, 0x85]);
        // movslq 4(%rcx),%rax; cmpq $0,(%rcx,%rax); jne
        self.push(&[0x48, 0x63, 0x41, 4, 0x48, 0x83, 0x3c, 0x01, 0]);
        let probe = self.push_forward_jump(&[0x0f, 0x85]);
        Some([task, probe])
    }

    /// Loads the address after the jump into `%rax`, and jumps to the routine.
    fn push_ring(&mut self, ring: u64) -> Option<()> {
        // lea back(%rip),%rax, over the jump of 5 bytes; jmp ring; back:
        self.push(&[0x48, 0x8d, 0x05, 5, 0, 0, 0]);
        self.push_relative(&[0xe9], ring, &[])
    }

    /// Skips the red zone by `lea -128(%rsp),%rsp`, which does not change the flags.
    fn push_below_red_zone(&mut self) {
        self.push(&[0x48, 0x8d, 0x64, 0x24, RED_ZONE.wrapping_neg()]);
    }

    /// The reverse, by `lea 128(%rsp),%rsp`, whose offset takes four bytes.
    fn push_above_red_zone(&mut self) {
        self.push(&[0x48, 0x8d, 0xa4, 0x24, RED_ZONE, 0, 0, 0]);
    }
}

const PUSH_RAX: u8 = 0x50;
const PUSH_RCX: u8 = 0x51;
const POP_RAX: u8 = 0x58;
const POP_RCX: u8 = 0x59;
/// `lahf; seto %al`, and the reverse `add $0x7f,%al; sahf`. They cover all flags that a comparison
/// writes.
const SAVE_FLAGS: [u8; 4] = [0x9f, 0x0f, 0x90, 0xc0];
const RESTORE_FLAGS: [u8; 3] = [0x04, 0x7f, 0x9e];

impl Function {
    /// The trampoline of a site of this function, for address `at`. `None` if anything that it
    /// refers to is more than 2 GiB away.
    pub fn trampoline(&self, site: &PatchSite, at: u64, hooks: &Hooks) -> Option<Patch> {
        self.code_with_check(site, at, hooks, |code| {
            for instruction in self.code.get(site.moved.clone())?.chunks(1) {
                // Encoded one at a time. In a block, a branch to its start would stay in the block,
                // and such a small loop would never reach its check again.
                let block = InstructionBlock::new(instruction, code.end()?);
                let encoded = BlockEncoder::encode(64, block, BlockEncoderOptions::NONE).ok()?;
                code.push(&encoded.code_buffer);
            }
            let end = site.at.checked_add(u64::try_from(site.bytes).ok()?)?;
            code.push_relative(&[0xe9], end, &[])
        })
    }

    /// The check of a site, and the code after it that `push_moved` appends.
    pub(crate) fn code_with_check(
        &self,
        site: &PatchSite,
        at: u64,
        hooks: &Hooks,
        push_moved: impl FnOnce(&mut Code) -> Option<()>,
    ) -> Option<Patch> {
        let mut code = Code::at(at);
        // A check that uses registers skips the red zone for its tests too, not only to ring.
        let has_registers = matches!(hooks.words, Words::PerCpu(_));
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
        open.into_iter().try_for_each(|open| code.end_jump(open))?;
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
    /// The jump from a site to its trampoline, padded with traps.
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

    /// The expected bytes are what GNU as makes of the listing in `lib.rs`.
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

    /// The expected bytes come from GNU as.
    #[test]
    fn the_bytes_of_a_per_cpu_check() {
        let (function, site) = first(&[0xb8, 1, 0, 0, 0, 0xc3]);
        let hooks = Hooks { words: Words::PerCpu(CPU_WORDS), ..HOOKS };
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
    fn a_moved_loop_runs_its_check_each_round() {
        // A: pause; dec %eax; jnz A; ret
        let (function, site) = first(&[0xf3, 0x90, 0xff, 0xc8, 0x75, 0xfa, 0xc3]);
        assert_eq!((site.at, site.bytes), (0x1000, 6));
        let patch = function.trampoline(&site, 0x2000, &HOOKS).unwrap();
        // jnz rel32 from 0x2026 to the site, where the jump is.
        let jnz = [0x0f, 0x85, 0xda, 0xef, 0xff, 0xff];
        assert!(patch.bytes.windows(6).any(|bytes| bytes == jnz), "{:x?}", patch.bytes);
    }

    #[test]
    fn leftover_bytes_of_long_instructions_trap() {
        let (_, site) = first(&[0xc7, 0x07, 1, 0, 0, 0, 0xc3]);
        assert_eq!(site.jump(0x1005).unwrap().bytes, [0xe9, 0, 0, 0, 0, INT3]);
    }

    #[test]
    fn targets_out_of_reach_are_rejected() {
        let (function, site) = first(&[0xb8, 1, 0, 0, 0, 0xc3]);
        let far = 1 << 32;
        assert_eq!(function.trampoline(&site, far, &HOOKS), None);
        for hooks in [
            fixed([far, 0x3008], None),
            fixed([0x3000, far], None),
            fixed(WORDS, Some(far)),
            Hooks { ring: far, ..HOOKS },
            Hooks { words: Words::PerCpu(CpuWords { blocks: far, ..CPU_WORDS }), ..HOOKS },
        ] {
            assert_eq!(function.trampoline(&site, 0x2000, &hooks), None);
        }
        assert_eq!(site.jump(far), None);
        // The moved instruction refers to an address that is too far away.
        let (function, site) = first(&[0x48, 0x8b, 0x05, 0, 0, 0, 0x80, 0xc3]);
        let near = Hooks { ring: 0x7000_0000, ..fixed([0x7000_0000; 2], None) };
        assert_eq!(function.trampoline(&site, 0x7000_0000, &near), None);
    }
}
