//! What the core model has to know of an instruction of x86-64.

use elfen_core_model::instruction::{
    ACCESSES_MAX, Access, Branch, Class, Instruction, RegisterSet,
};
use elfen_stream::Accesses;
use iced_x86::{
    Code, FlowControl, Instruction as Decoded, InstructionInfoFactory, Mnemonic, OpAccess, OpKind,
    Register,
};

// Numbers of registers in the model. General registers come first, by their own numbers.
const FLAGS: u8 = 16;
const VECTORS: u8 = 17;
/// All registers of x87 and MMX count as one.
const X87: u8 = 49;
const MASKS: u8 = 50;

/// The instruction as the model sees it.
pub(crate) fn classify(
    factory: &mut InstructionInfoFactory,
    decoded: &Decoded,
    accesses: &Accesses,
) -> Instruction {
    let class = class_of(decoded, accesses);
    let mut one = Instruction::new(class);
    one.length = u8::try_from(decoded.len()).unwrap_or(u8::MAX);
    one.has_unknown_addresses = accesses.has_others;
    for (slot, access) in one.accesses.iter_mut().zip(accesses.known.iter().take(ACCESSES_MAX)) {
        let (reads, writes, bytes) = (access.reads, access.writes, access.bytes);
        *slot = Some(Access { reads, writes, bytes });
    }
    for used in factory.info(decoded).used_registers() {
        let Some(number) = number_of(used.register()) else { continue };
        use OpAccess::{CondRead, CondWrite, Read, ReadCondWrite, ReadWrite, Write};
        let access = used.access();
        // The rest of the register stays if only a part of it is written.
        let keeps = used.register().is_gpr() && used.register().size() < 4;
        let writes = matches!(access, Write | ReadWrite | CondWrite | ReadCondWrite);
        let reads = matches!(access, Read | ReadWrite | CondRead | CondWrite | ReadCondWrite);
        if reads || writes && keeps {
            one.sources = one.sources.with(number);
        }
        if writes {
            one.destinations = one.destinations.with(number);
        }
    }
    if is_zeroing(decoded) {
        one.sources = RegisterSet::default();
    }
    if elfen_rewrite::flags_read(decoded) != 0 {
        one.sources = one.sources.with(FLAGS);
    }
    if decoded.rflags_modified() & elfen_rewrite::ARITHMETIC_FLAGS != 0 {
        one.destinations = one.destinations.with(FLAGS);
    }
    one.early = early(decoded, one.destinations);
    one
}

/// Registers that an instruction with memory advances: the stack pointer, or those of strings.
fn early(decoded: &Decoded, destinations: RegisterSet) -> RegisterSet {
    let registers: &[Register] = match decoded.mnemonic() {
        // Loads the stack pointer itself.
        Mnemonic::Pop if decoded.op0_register() == Register::RSP => &[],
        _ if decoded.is_stack_instruction() => &[Register::RSP],
        _ if decoded.is_string_instruction() => &[Register::RSI, Register::RDI],
        _ => &[],
    };
    registers
        .iter()
        .filter_map(|&register| number_of(register))
        .filter(|&number| destinations.contains(number))
        .fold(RegisterSet::default(), RegisterSet::with)
}

fn number_of(register: Register) -> Option<u8> {
    let number = u8::try_from(register.full_register().number()).ok()?;
    if register.is_gpr() {
        return Some(number);
    }
    if register.is_vector_register() {
        return Some(VECTORS + number);
    }
    if register.is_k() {
        return Some(MASKS + number);
    }
    (register.is_st() || register.is_mm()).then_some(X87)
}

/// Whether the result is zero whatever the operands hold.
fn is_zeroing(decoded: &Decoded) -> bool {
    use Mnemonic::{Pxor, Sub, Vpxor, Vpxord, Vpxorq, Vxorpd, Vxorps, Xor, Xorpd, Xorps};
    let register = |operand: u32| {
        let is = operand < decoded.op_count() && decoded.op_kind(operand) == OpKind::Register;
        is.then(|| decoded.op_register(operand))
    };
    let [one, other] = match decoded.mnemonic() {
        Xor | Sub | Pxor | Xorps | Xorpd => [0, 1],
        Vpxor | Vpxord | Vpxorq | Vxorps | Vxorpd => [1, 2],
        _ => return false,
    };
    register(one).is_some() && register(one) == register(other)
}

fn class_of(decoded: &Decoded, accesses: &Accesses) -> Class {
    // The decoder takes it for a call.
    if decoded.code() == Code::Syscall {
        return Class::SystemCall;
    }
    if let Some(branch) = branch_of(decoded) {
        return Class::Branch(branch);
    }
    use Mnemonic::{
        Cpuid, Div, Endbr64, Idiv, Imul, Lfence, Mfence, Mul, Mulx, Nop, Pause, Serialize, Sfence,
    };
    match decoded.mnemonic() {
        Nop | Endbr64 | Pause => return Class::Other,
        Mul | Imul | Mulx => return Class::Multiply,
        Div | Idiv => return Class::Divide,
        Mfence | Sfence | Lfence | Cpuid | Serialize => return Class::Fence,
        Mnemonic::Xchg if !accesses.known.is_empty() => return Class::Fence,
        _ if decoded.has_lock_prefix() => return Class::Fence,
        _ => {}
    }
    let name = format!("{:?}", decoded.mnemonic()).to_lowercase();
    if name.starts_with("prefetch") {
        return Class::Other;
    }
    let reads = accesses.known.iter().any(|one| one.reads);
    let writes = accesses.known.iter().any(|one| one.writes);
    let uses = |is: fn(Register) -> bool| {
        (0..decoded.op_count()).any(|operand| {
            decoded.op_kind(operand) == OpKind::Register && is(decoded.op_register(operand))
        })
    };
    let is_x87 = uses(Register::is_st) || name.starts_with('f') && !name.starts_with("fx");
    let is_vector = uses(Register::is_vector_register) || uses(Register::is_mm);
    if is_x87 || is_vector || uses(Register::is_k) {
        return vector_class(&name, is_x87, reads, writes);
    }
    let moves = name.starts_with("mov") && !decoded.is_string_instruction()
        || matches!(decoded.mnemonic(), Mnemonic::Push | Mnemonic::Pop | Mnemonic::Leave);
    match (moves, reads, writes) {
        (true, true, false) => Class::Load,
        (true, false, true) => Class::Store,
        _ => Class::Integer,
    }
}

/// Instructions on vectors, masks and x87, by their names.
fn vector_class(name: &str, is_x87: bool, reads: bool, writes: bool) -> Class {
    let plain = if is_x87 { &name[1..] } else { name.strip_prefix('v').unwrap_or(name) };
    let begins = |parts: &[&str]| parts.iter().any(|part| plain.starts_with(part));
    let is_move = if is_x87 {
        begins(&["ld", "st", "ild", "ist"])
    } else {
        begins(&["mov", "lddqu", "broadcast", "pbroadcast", "kmov", "maskmov", "pmaskmov"])
    };
    match (is_move, reads, writes) {
        (true, true, false) => return Class::Load,
        (true, false, true) => return Class::Store,
        _ => {}
    }
    let is_float = is_x87 || ["ss", "sd", "ps", "pd"].iter().any(|end| plain.ends_with(end));
    let is_shuffle =
        begins(&["mov", "and", "or", "xor", "shuf", "unpck", "blend", "perm", "extract", "insert"]);
    if begins(&["fmadd", "fmsub", "fnmadd", "fnmsub"]) {
        return Class::FloatMultiply;
    }
    if !is_float || is_shuffle && !is_x87 {
        // Conversions between integers and floating point end otherwise.
        return if begins(&["cvt"]) { Class::FloatAdd } else { Class::Vector };
    }
    if begins(&["mul", "imul", "dp"]) {
        Class::FloatMultiply
    } else if begins(&[
        "div", "idiv", "sqrt", "rsqrt", "prem", "sin", "cos", "ptan", "patan", "yl2x",
    ]) {
        Class::FloatDivide
    } else {
        Class::FloatAdd
    }
}

fn branch_of(decoded: &Decoded) -> Option<Branch> {
    Some(match decoded.flow_control() {
        FlowControl::ConditionalBranch => Branch::Conditional,
        FlowControl::UnconditionalBranch => Branch::Jump,
        FlowControl::Call => Branch::Call,
        FlowControl::Return => Branch::Return,
        FlowControl::IndirectBranch => Branch::ComputedJump,
        FlowControl::IndirectCall => Branch::ComputedCall,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions};

    fn classified(bytes: &[u8]) -> Instruction {
        let decoded = Decoder::with_ip(64, bytes, 0x1000, DecoderOptions::NONE).decode();
        assert_eq!(decoded.len(), bytes.len(), "{bytes:x?}");
        let mut factory = InstructionInfoFactory::new();
        let accesses = Accesses::of(&mut factory, &decoded);
        classify(&mut factory, &decoded, &accesses)
    }

    #[test]
    fn classes_are_those_of_the_units() {
        for (bytes, class) in [
            // mov (%rax),%ecx; mov %ecx,(%rax); movzbl (%rax),%ecx; add (%rax),%ecx
            (&[0x8b, 0x08][..], Class::Load),
            (&[0x89, 0x08], Class::Store),
            (&[0x0f, 0xb6, 0x08], Class::Load),
            (&[0x03, 0x08], Class::Integer),
            // push %rax; pop %rax; leave; movsb; lea (%rax),%rcx; nop
            (&[0x50], Class::Store),
            (&[0x58], Class::Load),
            (&[0xc9], Class::Load),
            (&[0xa4], Class::Integer),
            (&[0x48, 0x8d, 0x08], Class::Integer),
            (&[0x0f, 0x1f, 0x00], Class::Other),
            // imul %ecx,%eax; div %ecx; mfence; lock incl (%rax); xchg %ecx,(%rax)
            (&[0x0f, 0xaf, 0xc1], Class::Multiply),
            (&[0xf7, 0xf1], Class::Divide),
            (&[0x0f, 0xae, 0xf0], Class::Fence),
            (&[0xf0, 0xff, 0x00], Class::Fence),
            (&[0x87, 0x08], Class::Fence),
            // addsd; mulps; divss; sqrtsd; vfmadd213sd; cvtsi2sd; ucomisd
            (&[0xf2, 0x0f, 0x58, 0xc1], Class::FloatAdd),
            (&[0x0f, 0x59, 0xc1], Class::FloatMultiply),
            (&[0xf3, 0x0f, 0x5e, 0xc1], Class::FloatDivide),
            (&[0xf2, 0x0f, 0x51, 0xc1], Class::FloatDivide),
            (&[0xc4, 0xe2, 0xf1, 0xa9, 0xc2], Class::FloatMultiply),
            (&[0xf2, 0x48, 0x0f, 0x2a, 0xc0], Class::FloatAdd),
            (&[0x66, 0x0f, 0x2e, 0xc1], Class::FloatAdd),
            // paddd; movdqu (%rax),%xmm0; movdqu %xmm0,(%rax); movaps %xmm1,%xmm0; xorps
            (&[0x66, 0x0f, 0xfe, 0xc1], Class::Vector),
            (&[0xf3, 0x0f, 0x6f, 0x00], Class::Load),
            (&[0xf3, 0x0f, 0x7f, 0x00], Class::Store),
            (&[0x0f, 0x28, 0xc1], Class::Vector),
            (&[0x0f, 0x57, 0xc1], Class::Vector),
            // fldl (%rax); fmul %st(1),%st; fstpl (%rax)
            (&[0xdd, 0x00], Class::Load),
            (&[0xd8, 0xc9], Class::FloatMultiply),
            (&[0xdd, 0x18], Class::Store),
            // je; jmp; call; ret; jmp *%rax; call *(%rax); syscall
            (&[0x74, 0], Class::Branch(Branch::Conditional)),
            (&[0xeb, 0], Class::Branch(Branch::Jump)),
            (&[0xe8, 0, 0, 0, 0], Class::Branch(Branch::Call)),
            (&[0xc3], Class::Branch(Branch::Return)),
            (&[0xff, 0xe0], Class::Branch(Branch::ComputedJump)),
            (&[0xff, 0x10], Class::Branch(Branch::ComputedCall)),
            (&[0x0f, 0x05], Class::SystemCall),
        ] {
            assert_eq!(classified(bytes).class, class, "{bytes:x?}");
        }
    }

    #[test]
    fn registers_are_those_that_are_waited_for() {
        let registers = |set: RegisterSet| set.iter().collect::<Vec<u8>>();
        // add %rcx,%rax: flags are written.
        let add = classified(&[0x48, 0x01, 0xc8]);
        assert_eq!(
            (registers(add.sources), registers(add.destinations)),
            (vec![0, 1], vec![0, 16])
        );
        // xor %eax,%eax has no sources; mov %cl,%al keeps the rest of the register.
        assert!(registers(classified(&[0x31, 0xc0]).sources).is_empty());
        let part = classified(&[0x88, 0xc8]);
        assert_eq!((registers(part.sources), registers(part.destinations)), (vec![0, 1], vec![0]));
        // mov %ecx,%eax writes all of it.
        assert_eq!(registers(classified(&[0x89, 0xc8]).sources), [1]);
        // pop %rbx: the stack pointer does not wait for memory. pop %rsp does.
        let pop = classified(&[0x5b]);
        assert_eq!((registers(pop.early), registers(pop.destinations)), (vec![4], vec![3, 4]));
        assert!(registers(classified(&[0x5c]).early).is_empty());
        // je reads flags; addsd %xmm1,%xmm0; a load by index.
        assert_eq!(registers(classified(&[0x74, 0]).sources), [16]);
        let float = classified(&[0xf2, 0x0f, 0x58, 0xc1]);
        assert_eq!(
            (registers(float.sources), registers(float.destinations)),
            (vec![17, 18], vec![17])
        );
        assert_eq!(registers(classified(&[0x8b, 0x04, 0x8b]).sources), [1, 3]);
    }
}
