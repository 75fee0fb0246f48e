//! Effects of instructions that limit where a check fits: on the arithmetic flags, which a check
//! overwrites, and faults, whose address a handler may read.

use iced_x86::{
    FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, Register,
    RflagsBits, UsedMemory,
};

use crate::flow::Next;

/// The flags that a comparison writes, as bits of [`RflagsBits`].
pub const ARITHMETIC_FLAGS: u32 = RflagsBits::OF
    | RflagsBits::SF
    | RflagsBits::ZF
    | RflagsBits::AF
    | RflagsBits::CF
    | RflagsBits::PF;

/// For each instruction, whether some flag that is set before it is read, by it or by later code,
/// before that flag is written again.
///
/// By the calling convention, flags are dead after a call or a return. They count as live where the
/// function is left by a jump, or branches to a computed address.
pub(crate) fn live_flags(code: &[Instruction], next: &[Next]) -> Vec<bool> {
    let mut before = vec![0u32; code.len()];
    let mut changed = true;
    while changed {
        changed = false;
        for (index, instruction) in code.iter().enumerate().rev() {
            let after = after(&before, &next[index], index);
            let now = flags_read(instruction) | (after & !flags_written(instruction));
            changed |= std::mem::replace(&mut before[index], now) != now;
        }
    }
    before.into_iter().map(|flags| flags != 0).collect()
}

fn after(before: &[u32], next: &Next, index: usize) -> u32 {
    let unknown = if next.is_unknown || next.leaves { ARITHMETIC_FLAGS } else { 0 };
    next.indices(index, before.len()).fold(unknown, |flags, next| flags | before[next])
}

/// The arithmetic flags that an instruction reads.
pub fn flags_read(instruction: &Instruction) -> u32 {
    instruction.rflags_read() & ARITHMETIC_FLAGS
}

/// The arithmetic flags that an instruction certainly writes. A call writes all, by the calling
/// convention.
pub fn flags_written(instruction: &Instruction) -> u32 {
    match instruction.flow_control() {
        FlowControl::Call | FlowControl::IndirectCall => ARITHMETIC_FLAGS,
        _ if may_leave_flags(instruction) => 0,
        _ => instruction.rflags_modified() & ARITHMETIC_FLAGS,
    }
}

/// A shift by a count of 0, or a repeated comparison of length 0, leaves the flags unchanged.
fn may_leave_flags(instruction: &Instruction) -> bool {
    use Mnemonic::{Rcl, Rcr, Rol, Ror, Sal, Sar, Shl, Shld, Shr, Shrd};
    let is_shift = matches!(
        instruction.mnemonic(),
        Rcl | Rcr | Rol | Ror | Sal | Sar | Shl | Shld | Shr | Shrd
    );
    let count = instruction.op_count().saturating_sub(1);
    let by_register = is_shift
        && instruction.op_kind(count) == OpKind::Register
        && instruction.op_register(count) == Register::CL;
    let by_zero = is_shift
        && instruction.op_kind(count) == OpKind::Immediate8
        && instruction.immediate8() & 0x3f == 0;
    let repeats = instruction.has_rep_prefix() || instruction.has_repne_prefix();
    by_register || by_zero || repeats
}

/// For each instruction, whether it may raise a fault.
pub(crate) fn faults(code: &[Instruction]) -> Vec<bool> {
    let mut factory = InstructionInfoFactory::new();
    code.iter().map(|one| may_fault(&mut factory, one, |_| false)).collect()
}

/// Whether an instruction may raise a fault: it divides, or accesses memory other than the stack,
/// its object's own data, or thread-local data. `is_known_safe` can exempt further accesses.
pub(crate) fn may_fault(
    factory: &mut InstructionInfoFactory,
    instruction: &Instruction,
    is_known_safe: impl Fn(&UsedMemory) -> bool,
) -> bool {
    let divides = matches!(instruction.mnemonic(), Mnemonic::Div | Mnemonic::Idiv);
    let memory = factory.info(instruction).used_memory();
    divides
        || memory
            .iter()
            .any(|memory| !is_safe_access(instruction, memory) && !is_known_safe(memory))
}

fn is_safe_access(instruction: &Instruction, memory: &UsedMemory) -> bool {
    let has_no_index = memory.index() == Register::None;
    let is_thread = matches!(memory.segment(), Register::FS | Register::GS);
    match memory.base() {
        _ if memory.access() == OpAccess::NoMemAccess => true,
        Register::RSP => has_no_index && !is_thread,
        // Relative to the instruction pointer, and so within the object. The displacement is the
        // address.
        _ if instruction.is_ip_rel_memory_operand() => has_no_index && !is_thread,
        Register::None => has_no_index && is_thread,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use crate::code::Function;

    fn live(bytes: &[u8]) -> Vec<bool> {
        Function::decode(bytes, 0x1000, None).unwrap().flags_live
    }

    #[test]
    fn flags_are_live_from_write_to_read() {
        // cmp %esi,%edi; mov %edi,%eax; jl +2; mov %esi,%eax; ret
        let bytes = [0x39, 0xf7, 0x89, 0xf8, 0x7c, 0x02, 0x89, 0xf0, 0xc3];
        assert_eq!(live(&bytes), [false, true, true, false, false]);
    }

    #[test]
    fn a_carry_is_live_around_a_loop() {
        // adc (%rsi),%rax; lea 8(%rsi),%rsi; dec %ecx; jnz back; ret. `dec` leaves the carry
        // unchanged.
        let bytes = [0x48, 0x13, 0x06, 0x48, 0x8d, 0x76, 0x08, 0xff, 0xc9, 0x75, 0xf5, 0xc3];
        assert_eq!(live(&bytes), [true, true, true, true, false]);
    }

    #[test]
    fn a_shift_by_zero_leaves_the_flags() {
        // cmp %esi,%edi; shl %cl,%eax; jl +0; ret
        assert_eq!(live(&[0x39, 0xf7, 0xd3, 0xe0, 0x7c, 0, 0xc3]), [false, true, true, false]);
        // A shift by 3, which writes the flags.
        let by_three = [0x39, 0xf7, 0xc1, 0xe0, 0x03, 0x7c, 0, 0xc3];
        assert_eq!(live(&by_three), [false, false, true, false]);
        // repe cmpsb; je +0; ret. A length of 0 leaves the flags.
        assert_eq!(live(&[0xf3, 0xa6, 0x74, 0, 0xc3]), [true, true, false]);
    }

    #[test]
    fn flags_are_dead_after_calls_and_live_after_jumps_out() {
        // call +0x100; ret
        assert_eq!(live(&[0xe8, 0, 1, 0, 0, 0xc3]), [false, false]);
        // jmp +0x100
        assert_eq!(live(&[0xe9, 0, 1, 0, 0]), [true]);
        // jmp *%rax
        assert_eq!(live(&[0xff, 0xe0]), [true]);
        // pushfq; ret: the start of Go's asyncPreempt.
        assert_eq!(live(&[0x9c, 0xc3]), [true, false]);
    }
}
