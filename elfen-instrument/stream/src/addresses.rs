//! Addresses of memory operands: which ones an instruction has, and code that appends them.
//!
//! In front of each instruction that uses memory, a copy with addresses calculates them with `lea`,
//! and appends them to the thread's addresses. Registers, flags and the stack stay as they are.
//! Addresses are appended downwards. At the start of each block with addresses, a check finds out
//! whether there is room for those of a whole block. If not, a burst ends there. Other threads
//! trap, and go on behind the trap once the host has emptied them.

use iced_x86::{
    Code as Opcode, CodeSize, Encoder, Instruction, InstructionInfoFactory, MemoryOperand,
    Mnemonic, OpAccess, OpKind, Register, UsedMemory,
};

use elfen_rewrite::Code;

use crate::assembly::{Gs, INT3, LEAVE_BYTES, Leaving, Noting, Word, push_leave};
use crate::layout::{ADDRESSES, ADDRESSES_LEFT, ADDRESSES_ROOM, SAVED_RCX, SAVED_RDX};

/// How many addresses of an instruction are appended at most.
pub const ACCESSES_MAX: usize = 2;
const _: () = assert!(ADDRESSES_ROOM == 0x100, "the check is for the bits above");

/// Memory that an instruction uses, at one address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    pub reads: bool,
    pub writes: bool,
    /// 0 if it is not known. Repeated string instructions use this much for each repetition.
    pub bytes: u16,
    /// The base of `%fs` is to be added to the address.
    pub is_thread_local: bool,
    base: Register,
    index: Register,
    scale: u32,
    displacement: i64,
}

/// An address that a block appends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NotedAddress {
    /// Where the instruction is, as a distance from the start of its block.
    pub offset: u16,
    /// The base of `%fs` is to be added to the address.
    pub is_thread_local: bool,
}

/// All memory that an instruction uses.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Accesses {
    /// Up to [`ACCESSES_MAX`], in the order in which their addresses are appended.
    pub known: Vec<Access>,
    /// There is more, at addresses that are not appended: gathers, addresses of 32 bits, and bits
    /// far from their operand.
    pub has_others: bool,
}

impl Accesses {
    pub fn of(factory: &mut InstructionInfoFactory, instruction: &Instruction) -> Self {
        let mut found = Self::default();
        for memory in factory.info(instruction).used_memory() {
            if memory.access() == OpAccess::NoMemAccess {
                continue;
            }
            match Access::of(instruction, memory) {
                Some(access) if found.known.len() < ACCESSES_MAX => found.known.push(access),
                _ => found.has_others = true,
            }
        }
        found
    }
}

impl Access {
    fn of(instruction: &Instruction, memory: &UsedMemory) -> Option<Self> {
        use Mnemonic::{Bt, Btc, Btr, Bts};
        let is_far_bit = matches!(instruction.mnemonic(), Bt | Btc | Btr | Bts)
            && instruction.op1_kind() == OpKind::Register;
        // The address is that after the stack pointer was changed.
        let is_popped = instruction.mnemonic() == Mnemonic::Pop
            && instruction.op0_kind() == OpKind::Memory
            && instruction.memory_base() == Register::RSP;
        let is_whole = |register: Register| register == Register::None || register.is_gpr64();
        let has_segment = memory.segment() == Register::GS;
        let is_known = is_whole(memory.base()) && is_whole(memory.index());
        let is_64_bit = matches!(memory.address_size(), CodeSize::Code64 | CodeSize::Unknown);
        if is_far_bit || is_popped || has_segment || !is_known || !is_64_bit {
            return None;
        }
        if memory.vsib_size() != 0 {
            return None;
        }
        let (reads, writes) = match memory.access() {
            OpAccess::Read | OpAccess::CondRead => (true, false),
            OpAccess::Write | OpAccess::CondWrite => (false, true),
            OpAccess::ReadWrite | OpAccess::ReadCondWrite => (true, true),
            _ => return None,
        };
        Some(Self {
            reads,
            writes,
            bytes: u16::try_from(memory.memory_size().size()).unwrap_or(0),
            is_thread_local: memory.segment() == Register::FS,
            base: memory.base(),
            index: memory.index(),
            scale: memory.scale(),
            displacement: memory.displacement().cast_signed(),
        })
    }

    /// `lea address,%rdx`, or a move if it is constant.
    fn push_load(&self, code: &mut Code) -> Option<()> {
        if (self.base, self.index) == (Register::None, Register::None) {
            // movabs $address,%rdx
            code.push(&[0x48, 0xba]);
            code.push(&self.displacement.to_le_bytes());
            return Some(());
        }
        // What the encoder calls 8 bytes are 4, of an address of 64 bits.
        let bytes = if self.displacement == 0 && self.base != Register::None { 0 } else { 8 };
        let operand = MemoryOperand::new(
            self.base,
            self.index,
            self.scale,
            self.displacement,
            bytes,
            false,
            Register::None,
        );
        let load = Instruction::with2(Opcode::Lea_r64_m, Register::RDX, operand).ok()?;
        let mut encoder = Encoder::new(64);
        encoder.encode(&load, code.end()?).ok()?;
        code.push(&encoder.take_buffer());
        Some(())
    }

    /// Appends the address to those of the thread.
    pub(crate) fn push_note(&self, code: &mut Code) -> Option<()> {
        push_note(code, |code| self.push_load(code))
    }
}

/// Appends what `load` puts into `%rdx`.
pub(crate) fn push_note(code: &mut Code, load: impl FnOnce(&mut Code) -> Option<()>) -> Option<()> {
    code.store(SAVED_RCX, Word::Rcx);
    code.store(SAVED_RDX, Word::Rdx);
    load(code)?;
    code.load(Word::Rcx, ADDRESSES_LEFT);
    // mov %rdx,%gs:ADDRESSES(,%rcx,8); lea -1(%rcx),%rcx
    code.push(&[0x65, 0x48, 0x89, 0x14, 0xcd]);
    code.push(&ADDRESSES.to_le_bytes());
    code.push(&[0x48, 0x8d, 0x49, 0xff]);
    code.store(ADDRESSES_LEFT, Word::Rcx);
    code.load(Word::Rcx, SAVED_RCX);
    code.load(Word::Rdx, SAVED_RDX);
    Some(())
}

/// Checks whether there is room for the addresses of a block that begins at `start`. Returns the
/// address of the trap, if `noting` does not end a burst instead.
pub(crate) fn push_room_check(code: &mut Code, noting: Noting, start: u64) -> Option<Option<u64>> {
    code.store(SAVED_RCX, Word::Rcx);
    // mov %gs:ADDRESSES_LEFT+1,%ecx: zero if fewer than 256 places are left.
    code.push(&[0x65, 0x8b, 0x0c, 0x25]);
    code.push(&(ADDRESSES_LEFT + 1).to_le_bytes());
    // jrcxz full; jmp over; full: ...; over:
    let trap = if let Noting::Events { leave, by: Leaving::Frame } = noting {
        code.push(&[0xe3, 2, 0xeb, LEAVE_BYTES]);
        push_leave(code, start, leave)?;
        None
    } else {
        code.push(&[0xe3, 2, 0xeb, 1]);
        let trap = code.end()?;
        code.push(&[INT3]);
        Some(trap)
    };
    code.load(Word::Rcx, SAVED_RCX);
    Some(trap)
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions};

    fn accesses(bytes: &[u8]) -> Accesses {
        let one = Decoder::with_ip(64, bytes, 0x1000, DecoderOptions::NONE).decode();
        assert_eq!(one.len(), bytes.len());
        Accesses::of(&mut InstructionInfoFactory::new(), &one)
    }

    fn known(bytes: &[u8]) -> Vec<(bool, bool, u16, Register, i64)> {
        let found = accesses(bytes);
        assert!(!found.has_others, "{found:?}");
        for access in &found.known {
            assert!(access.push_note(&mut Code::at(0x1_0000)).is_some(), "{access:?}");
        }
        let fields = |one: &Access| (one.reads, one.writes, one.bytes, one.base, one.displacement);
        found.known.iter().map(fields).collect()
    }

    #[test]
    fn operands_are_found() {
        use Register::{None, RAX, RBP, RDI, RSI, RSP};
        // mov 8(%rax),%ecx; add %ecx,8(%rax); lea 8(%rax),%rcx
        assert_eq!(known(&[0x8b, 0x48, 8]), [(true, false, 4, RAX, 8)]);
        assert_eq!(known(&[0x01, 0x48, 8]), [(true, true, 4, RAX, 8)]);
        assert_eq!(known(&[0x48, 0x8d, 0x48, 8]), []);
        // mov 0x10(%rip),%ecx
        assert_eq!(known(&[0x8b, 0x0d, 0x10, 0, 0, 0]), [(true, false, 4, None, 0x1016)]);
        // push %rax; pop %rax; call +0; ret; leave
        assert_eq!(known(&[0x50]), [(false, true, 8, RSP, -8)]);
        assert_eq!(known(&[0x58]), [(true, false, 8, RSP, 0)]);
        assert_eq!(known(&[0xe8, 0, 0, 0, 0]), [(false, true, 8, RSP, -8)]);
        assert_eq!(known(&[0xc3]), [(true, false, 8, RSP, 0)]);
        assert_eq!(known(&[0xc9]), [(true, false, 8, RBP, 0)]);
        // mov 0x12345678(,%rax,8),%rcx; mov 8(%rbp,%r12,4),%ecx
        let scaled = [0x48, 0x8b, 0x0c, 0xc5, 0x78, 0x56, 0x34, 0x12];
        assert_eq!(known(&scaled), [(true, false, 8, None, 0x1234_5678)]);
        assert_eq!(known(&[0x42, 0x8b, 0x4c, 0xa5, 8]), [(true, false, 4, RBP, 8)]);
        // push 8(%rax); movsb; rep movsb; nopw 0(%rax)
        let pushed = [(true, false, 8, RAX, 8), (false, true, 8, RSP, -8)];
        assert_eq!(known(&[0xff, 0x70, 8]), pushed);
        let mut moved = known(&[0xa4]);
        moved.sort_by_key(|one| one.1);
        assert_eq!(moved, [(true, false, 1, RSI, 0), (false, true, 1, RDI, 0)]);
        assert_eq!(known(&[0xf3, 0xa4]).len(), 2);
        assert_eq!(known(&[0x0f, 0x1f, 0x00]), []);
        // mov %fs:0x28,%rax
        let local = accesses(&[0x64, 0x48, 0x8b, 0x04, 0x25, 0x28, 0, 0, 0]);
        assert!(local.known[0].is_thread_local && local.known[0].displacement == 0x28);
    }

    #[test]
    fn addresses_that_lea_does_not_calculate_are_others() {
        for bytes in [
            // mov (%eax),%ecx; bts %rcx,(%rax); pop 8(%rsp); xlat
            &[0x67, 0x8b, 0x08][..],
            &[0x48, 0x0f, 0xab, 0x08],
            &[0x8f, 0x44, 0x24, 8],
            &[0xd7],
            // vpgatherdd %ymm0,(%rax,%ymm1),%ymm2
            &[0xc4, 0xe2, 0x7d, 0x90, 0x14, 0x08],
        ] {
            let found = accesses(bytes);
            assert!(found.has_others, "{bytes:x?} {found:?}");
        }
    }
}
