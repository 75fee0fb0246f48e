//! Basic blocks of the program's code.

use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic,
    OpKind, Register,
};

use elfen_rewrite::{ARITHMETIC_FLAGS, flags_read, flags_written};
use iced_x86::RflagsBits;

use crate::addresses::{Accesses, NotedAddress};
use crate::results::Outcome;

/// Longer blocks are split.
pub const INSTRUCTIONS_MAX: usize = 64;
const INSTRUCTION_BYTES_MAX: usize = 15;
/// How far ahead of a branch the use of the flags is looked for.
const LOOK_AHEAD: usize = 8;

/// The code of a program.
pub trait Source {
    /// The bytes from an address on, and the number of the object that they belong to. `None` if
    /// there is no code, or if it belongs to no file.
    fn code(&mut self, at: u64) -> Option<(u32, &[u8])>;
}

/// How a block ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exit {
    /// It goes on at its end.
    Falls,
    Jump {
        to: u64,
    },
    /// Goes to `to`, or on at the end.
    Branch {
        to: u64,
    },
    Call {
        to: u64,
    },
    Indirect(Indirect),
    /// A system call, after which it goes on at its end.
    Syscall,
    /// The instruction at its end cannot be moved.
    Native,
}

/// A branch to a computed address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Indirect {
    Jump,
    Call,
    /// Removes this many more bytes from the stack.
    Return {
        pops: u16,
    },
}

/// A run of instructions that is entered at its start only.
#[derive(Clone, Debug)]
pub struct Block {
    pub start: u64,
    pub end: u64,
    /// The object that it belongs to.
    pub object: u32,
    pub exit: Exit,
    pub(crate) code: Vec<Instruction>,
    pub(crate) bytes: Vec<u8>,
}

impl Block {
    /// Decodes the block at an address. `None` without code; a block without instructions
    /// if the first one cannot be moved.
    pub fn decode(source: &mut impl Source, start: u64) -> Option<Self> {
        let (object, bytes) = source.code(start)?;
        let bytes = &bytes[..bytes.len().min(INSTRUCTIONS_MAX * INSTRUCTION_BYTES_MAX)];
        let mut decoder = Decoder::with_ip(64, bytes, start, DecoderOptions::NONE);
        let mut code = Vec::with_capacity(8);
        let mut exit = Exit::Falls;
        let mut end = start;
        while code.len() < INSTRUCTIONS_MAX {
            let instruction = decoder.decode();
            let found = exit_of(&instruction);
            if found != Some(Exit::Native) {
                code.push(instruction);
                end = instruction.next_ip();
            }
            if let Some(found) = found {
                exit = found;
                break;
            }
        }
        let length = usize::try_from(end - start).ok()?;
        Some(Self { start, end, object, exit, code, bytes: bytes.get(..length)?.to_vec() })
    }

    pub fn instructions(&self) -> usize {
        self.code.len()
    }

    /// The memory that each instruction uses.
    pub fn accesses(&self) -> Vec<Accesses> {
        let mut factory = InstructionInfoFactory::new();
        self.code.iter().map(|one| Accesses::of(&mut factory, one)).collect()
    }

    /// The addresses that its copy appends, in their order.
    pub fn noted_addresses(&self) -> Vec<NotedAddress> {
        let noted = self.code.iter().zip(self.accesses()).flat_map(|(one, accesses)| {
            let offset = u16::try_from(one.ip() - self.start).ok();
            let known = accesses.known.into_iter();
            known.filter_map(move |access| {
                Some(NotedAddress { offset: offset?, is_thread_local: access.is_thread_local })
            })
        });
        noted.collect()
    }

    /// The results of its instructions, but for that of a branch or a system call at its end.
    pub fn results(&self) -> Vec<Outcome> {
        let mut factory = InstructionInfoFactory::new();
        let body = match self.exit {
            Exit::Falls | Exit::Native => &self.code[..],
            _ => self.code.split_last().map_or(&[][..], |(_, body)| body),
        };
        body.iter().filter_map(|one| Outcome::of(&mut factory, one, self.start)).collect()
    }

    /// The instructions, with their addresses in the program.
    pub fn code(&self) -> &[Instruction] {
        &self.code
    }

    /// The instruction that ends the block; only a block that falls may have none.
    pub(crate) fn last(&self) -> Option<&Instruction> {
        self.code.last()
    }

    /// Which instructions read or write memory, one bit each. Branches are left out.
    pub(crate) fn memory_mask(&self) -> u64 {
        let bits = self.code.iter().enumerate().map(|(number, one)| {
            u64::from(accesses_memory(one)).checked_shl(u32::try_from(number).unwrap_or(u32::MAX))
        });
        bits.flatten().fold(0, |all, bit| all | bit)
    }

    pub(crate) fn bytes_of(&self, instruction: &Instruction) -> Option<&[u8]> {
        let from = usize::try_from(instruction.ip().checked_sub(self.start)?).ok()?;
        self.bytes.get(from..from.checked_add(instruction.len())?)
    }
}

/// How an instruction ends a block; `None` if it does not.
fn exit_of(instruction: &Instruction) -> Option<Exit> {
    use Code::{Call_rel32_64, Call_rm64, Jmp_rel8_64, Jmp_rel32_64, Jmp_rm64, Retnq, Retnq_imm16};
    if instruction.is_invalid() || uses_gs(instruction) {
        return Some(Exit::Native);
    }
    let to = instruction.near_branch_target();
    Some(match instruction.code() {
        Code::Syscall => Exit::Syscall,
        Call_rel32_64 => Exit::Call { to },
        Jmp_rel8_64 | Jmp_rel32_64 => Exit::Jump { to },
        Call_rm64 => Exit::Indirect(Indirect::Call),
        Jmp_rm64 => Exit::Indirect(Indirect::Jump),
        Retnq => Exit::Indirect(Indirect::Return { pops: 0 }),
        Retnq_imm16 => Exit::Indirect(Indirect::Return { pops: instruction.immediate16() }),
        _ => match instruction.flow_control() {
            FlowControl::Next => return None,
            FlowControl::ConditionalBranch if is_near(instruction) => Exit::Branch { to },
            // Faults like the original, at an address that the host translates back.
            FlowControl::Exception => return None,
            // Interrupts, far branches and transactions.
            _ => Exit::Native,
        },
    })
}

fn is_near(instruction: &Instruction) -> bool {
    instruction.op0_kind() == OpKind::NearBranch64
}

/// Whether an instruction uses `%gs`, which holds the thread's words, or changes a segment.
fn uses_gs(instruction: &Instruction) -> bool {
    use Mnemonic::{Rdgsbase, Swapgs, Wrgsbase};
    let is_segment = |operand: u32| {
        instruction.op_kind(operand) == OpKind::Register
            && matches!(instruction.op_register(operand), Register::GS | Register::SS)
    };
    instruction.segment_prefix() == Register::GS
        || (0..instruction.op_count()).any(is_segment)
        || matches!(instruction.mnemonic(), Rdgsbase | Wrgsbase | Swapgs)
}

/// Whether an instruction that does not branch reads or writes memory.
fn accesses_memory(instruction: &Instruction) -> bool {
    let is_memory = |operand: u32| {
        !matches!(
            instruction.op_kind(operand),
            OpKind::Register
                | OpKind::NearBranch16
                | OpKind::NearBranch32
                | OpKind::NearBranch64
                | OpKind::FarBranch16
                | OpKind::FarBranch32
                | OpKind::Immediate8
                | OpKind::Immediate8_2nd
                | OpKind::Immediate16
                | OpKind::Immediate32
                | OpKind::Immediate64
                | OpKind::Immediate8to16
                | OpKind::Immediate8to32
                | OpKind::Immediate8to64
                | OpKind::Immediate32to64
        )
    };
    instruction.flow_control() == FlowControl::Next
        && !matches!(instruction.mnemonic(), Mnemonic::Lea | Mnemonic::Nop)
        && (instruction.is_stack_instruction() || (0..instruction.op_count()).any(is_memory))
}

/// The flags that `inc` changes.
pub(crate) const BY_INC: u32 = ARITHMETIC_FLAGS & !RflagsBits::CF;
/// The flags that `cmp` changes.
pub(crate) const BY_CMP: u32 = ARITHMETIC_FLAGS;

/// Whether the code at an address certainly overwrites some flags before it reads them.
pub(crate) fn flags_are_dead(source: &mut impl Source, at: u64, flags: u32) -> bool {
    let Some((_, bytes)) = source.code(at) else { return false };
    let mut open = flags;
    for instruction in Decoder::with_ip(64, bytes, at, DecoderOptions::NONE).iter().take(LOOK_AHEAD)
    {
        if instruction.is_invalid() || flags_read(&instruction) & open != 0 {
            return false;
        }
        // A call or a system call writes the flags by convention only.
        if instruction.flow_control() != FlowControl::Next {
            return false;
        }
        open &= !flags_written(&instruction);
        if open == 0 {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Bytes(&'static [u8]);

    impl Source for Bytes {
        fn code(&mut self, at: u64) -> Option<(u32, &[u8])> {
            Some((0, self.0.get(usize::try_from(at.checked_sub(0x1000)?).ok()?..)?))
        }
    }

    fn decode(bytes: &'static [u8]) -> Block {
        Block::decode(&mut Bytes(bytes), 0x1000).unwrap()
    }

    #[test]
    fn a_block_ends_at_a_branch_and_in_front_of_what_cannot_move() {
        // nop; je +1
        let block = decode(&[0x90, 0x74, 1, 0xc3]);
        assert_eq!((block.instructions(), block.exit), (2, Exit::Branch { to: 0x1004 }));
        // nop; int3. nop; mov %gs:0,%eax. nop; mov %eax,%ss. nop; then no instruction.
        for native in [
            &[0x90, 0xcc][..],
            &[0x90, 0x65, 0x8b, 0x04, 0x25, 0, 0, 0, 0],
            &[0x90, 0x8e, 0xd0],
            &[0x90, 0x06],
        ] {
            let bytes: &'static [u8] = Box::leak(native.into());
            let block = decode(bytes);
            assert_eq!((block.instructions(), block.exit, block.end), (1, Exit::Native, 0x1001));
        }
        assert_eq!(decode(&[0x0f, 0x05]).exit, Exit::Syscall);
        let long: &'static [u8] = Box::leak(vec![0x90; 100].into());
        let block = decode(long);
        assert_eq!((block.instructions(), block.exit), (INSTRUCTIONS_MAX, Exit::Falls));
    }

    #[test]
    fn accesses_to_memory_are_found() {
        // mov (%rdi),%eax; lea (%rdi),%rax; push %rax; nopl (%rax); rep stosb; add $1,%eax; ret
        let code: &[u8] = &[
            0x8b, 0x07, 0x48, 0x8d, 0x07, 0x50, 0x0f, 0x1f, 0x00, 0xf3, 0xaa, 0x83, 0xc0, 1, 0xc3,
        ];
        let block = decode(Box::leak(code.into()));
        assert_eq!((block.instructions(), block.memory_mask()), (7, 0b001_0101));
    }

    #[test]
    fn flags_are_dead_only_if_certainly_overwritten() {
        let dead = |bytes: &'static [u8]| flags_are_dead(&mut Bytes(bytes), 0x1000, BY_INC);
        // mov %esi,%eax; cmp %esi,%edi
        assert!(dead(&[0x89, 0xf0, 0x39, 0xf7]));
        // The carry is not changed: adc writes all others.
        assert!(dead(&[0x48, 0x13, 0x06]));
        // je; a return; a call; `inc`, which leaves the carry, and a shift by %cl.
        assert!(!dead(&[0x74, 0, 0x39, 0xf7]));
        assert!(!dead(&[0xc3, 0x39, 0xf7]));
        assert!(!dead(&[0xe8, 0, 0, 0, 0, 0x39, 0xf7]));
        assert!(dead(&[0xff, 0xc0, 0xc3]));
        assert!(!dead(&[0xd3, 0xe0, 0xc3]));
    }
}
