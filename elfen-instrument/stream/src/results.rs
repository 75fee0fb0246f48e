//! Results of instructions: what they leave in their destination registers, and code that appends
//! them.
//!
//! Behind each instruction with a result, a copy with results appends the whole register to the
//! words of the thread, as addresses are appended. An instruction has one result at most: that of
//! its first operand, or `%rax` for multiplications and divisions.

use iced_x86::{Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, Register};

use elfen_rewrite::Code;

use crate::addresses::push_note;

/// The result of an instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// Where the instruction is, as a distance from the start of its block.
    pub offset: u16,
    /// The width of the result: 1, 2, 4 or 8 bytes.
    pub bytes: u8,
    /// Bits of the register below the result: 8 for `%ah` and its like.
    pub shift: u8,
    register: Register,
}

impl Outcome {
    /// `None` if the instruction has no result in a general register.
    pub(crate) fn of(
        factory: &mut InstructionInfoFactory,
        instruction: &Instruction,
        start: u64,
    ) -> Option<Self> {
        let offset = u16::try_from(instruction.ip().checked_sub(start)?).ok()?;
        let register = match instruction.mnemonic() {
            Mnemonic::Mul | Mnemonic::Div | Mnemonic::Idiv => first_of_pair(instruction)?,
            Mnemonic::Imul if instruction.op_count() == 1 => first_of_pair(instruction)?,
            _ => {
                let access = factory.info(instruction).op0_access();
                let writes = matches!(
                    access,
                    OpAccess::Write
                        | OpAccess::CondWrite
                        | OpAccess::ReadWrite
                        | OpAccess::ReadCondWrite
                );
                let is_register = instruction.op0_kind() == OpKind::Register;
                Some(instruction.op0_register()).filter(|_| writes && is_register)?
            }
        };
        let whole = register.full_register();
        let bytes = u8::try_from(register.size()).ok()?;
        let is_high = matches!(register, Register::AH | Register::BH | Register::CH | Register::DH);
        let shift = if is_high { 8 } else { 0 };
        let found = Self { offset, bytes, shift, register: whole };
        (register.is_gpr() && whole != Register::RSP).then_some(found)
    }

    /// The result, from the whole register.
    pub fn value(&self, register: u64) -> u64 {
        let bits = u32::from(self.bytes) * 8;
        let mask = u64::MAX >> (64 - bits.clamp(1, 64));
        register >> self.shift & mask
    }

    /// Appends the register.
    pub(crate) fn push_note(&self, code: &mut Code) -> Option<()> {
        let number = u8::try_from(self.register.number()).ok()?;
        push_note(code, |code| {
            // mov %register,%rdx
            let prefix = 0x48 | (number >> 3) << 2;
            code.push(&[prefix, 0x89, 0xc2 | (number & 7) << 3]);
            Some(())
        })
    }
}

/// The register with the lower half of a product, or with a quotient.
fn first_of_pair(instruction: &Instruction) -> Option<Register> {
    let size = match instruction.op0_kind() {
        OpKind::Register => instruction.op0_register().size(),
        OpKind::Memory => instruction.memory_size().size(),
        _ => return None,
    };
    Some(match size {
        1 => Register::AL,
        2 => Register::AX,
        4 => Register::EAX,
        _ => Register::RAX,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions};

    fn outcome(bytes: &[u8]) -> Option<(u8, u8, Register)> {
        let one = Decoder::with_ip(64, bytes, 0x1000, DecoderOptions::NONE).decode();
        assert_eq!(one.len(), bytes.len());
        let found = Outcome::of(&mut InstructionInfoFactory::new(), &one, 0x1000)?;
        Some((found.bytes, found.shift, found.register))
    }

    #[test]
    fn results_are_those_of_the_destination() {
        use Register::{R9, RAX, RCX, RDX};
        // add %ecx,%eax; mov (%rax),%r9; lea 8(%rax),%rcx; movzbl %cl,%edx; sete %dl; mov $1,%ah
        assert_eq!(outcome(&[0x01, 0xc8]), Some((4, 0, RAX)));
        assert_eq!(outcome(&[0x4c, 0x8b, 0x08]), Some((8, 0, R9)));
        assert_eq!(outcome(&[0x48, 0x8d, 0x48, 8]), Some((8, 0, RCX)));
        assert_eq!(outcome(&[0x0f, 0xb6, 0xd1]), Some((4, 0, RDX)));
        assert_eq!(outcome(&[0x0f, 0x94, 0xc2]), Some((1, 0, RDX)));
        assert_eq!(outcome(&[0xb4, 1]), Some((1, 8, RAX)));
        // div %rcx; imul %ecx; imul %ecx,%edx; pop %rdx; cmove %ecx,%eax
        assert_eq!(outcome(&[0x48, 0xf7, 0xf1]), Some((8, 0, RAX)));
        assert_eq!(outcome(&[0xf7, 0xe9]), Some((4, 0, RAX)));
        assert_eq!(outcome(&[0x0f, 0xaf, 0xd1]), Some((4, 0, RDX)));
        assert_eq!(outcome(&[0x5a]), Some((8, 0, RDX)));
        assert_eq!(outcome(&[0x0f, 0x44, 0xc1]), Some((4, 0, RAX)));
        // cmp %ecx,%eax; mov %ecx,(%rax); push %rax; sub $8,%rsp; paddd %xmm1,%xmm0; nop
        for none in [
            &[0x39, 0xc8][..],
            &[0x89, 0x08],
            &[0x50],
            &[0x48, 0x83, 0xec, 8],
            &[0x66, 0x0f, 0xfe, 0xc1],
            &[0x90],
        ] {
            assert_eq!(outcome(none), None, "{none:x?}");
        }
    }

    #[test]
    fn values_have_the_width_of_the_result() {
        let register = 0x1122_3344_5566_7788;
        let value = |bytes, shift| {
            Outcome { offset: 0, bytes, shift, register: Register::RAX }.value(register)
        };
        assert_eq!(
            [value(8, 0), value(4, 0), value(1, 0), value(1, 8)],
            [register, 0x5566_7788, 0x88, 0x77]
        );
    }
}
