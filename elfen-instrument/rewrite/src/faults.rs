//! Whether an instruction may raise a fault, and so be looked at where it stands.

use iced_x86::{Instruction, InstructionInfoFactory, Mnemonic, OpAccess, Register, UsedMemory};

/// Which of the instructions may raise a fault.
pub(crate) fn faults(code: &[Instruction]) -> Vec<bool> {
    let mut factory = InstructionInfoFactory::new();
    code.iter().map(|one| may_fault(&mut factory, one, |_| false)).collect()
}

/// Whether an instruction may raise a fault: it divides, or goes to memory other than the stack,
/// its object's own, or its thread's.
pub(crate) fn may_fault(
    factory: &mut InstructionInfoFactory,
    instruction: &Instruction,
    or_sure: impl Fn(&UsedMemory) -> bool,
) -> bool {
    let divides = matches!(instruction.mnemonic(), Mnemonic::Div | Mnemonic::Idiv);
    let memory = factory.info(instruction).used_memory();
    divides || memory.iter().any(|memory| !is_sure(instruction, memory) && !or_sure(memory))
}

fn is_sure(instruction: &Instruction, memory: &UsedMemory) -> bool {
    let alone = memory.index() == Register::None;
    let is_thread = matches!(memory.segment(), Register::FS | Register::GS);
    match memory.base() {
        _ if memory.access() == OpAccess::NoMemAccess => true,
        Register::RSP => alone && !is_thread,
        // An address of the object's own: it has no base, and the displacement is the address.
        _ if instruction.is_ip_rel_memory_operand() => alone && !is_thread,
        Register::None => alone && is_thread,
        _ => false,
    }
}
