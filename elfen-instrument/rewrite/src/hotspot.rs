//! What may be moved of a Java method that HotSpot has compiled.
//!
//! Its code belongs to its virtual machine, which reads and changes parts of it while it runs:
//!
//! | what | why it stays |
//! | --- | --- |
//! | the first bytes behind the entry | a jump is written there as the method goes out of use |
//! | calls | their targets change, and what stands before a return address is looked at |
//! | immediates | objects and classes that move, caches of calls, colours of a collector |
//! | nops | behind calls they carry data |
//! | accesses to the heap, divisions | a null or a zero is found by the fault, and where that was |
//! | probes below the stack pointer | the end of the stack is found by the fault |
//! | constants near the code | nothing needs them moved |
//!
//! What is left is arithmetic between registers, the frame, branches within the method, and what a
//! thread reads of its own structure by `%r15`: of each safepoint poll of a loop, the load of the
//! page's address. The poll itself, which may fault, stays.

use iced_x86::{
    FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, Register,
    UsedMemory,
};

use crate::code::Function;
use crate::flow::target;

/// A method that HotSpot has compiled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HotSpot {
    /// Where callers of its class enter the method.
    pub entry: u64,
}

/// Longer than the jump at the entry.
const ENTRY_BYTES: u64 = 16;
const FRAME_BYTES: u64 = 4096;

impl HotSpot {
    /// Whether the machine neither changes nor looks at an instruction.
    pub(crate) fn may_move(self, function: &Function, instruction: &Instruction) -> bool {
        let at = instruction.ip();
        let is_entry = at < self.entry.saturating_add(ENTRY_BYTES);
        let is_nop = instruction.mnemonic() == Mnemonic::Nop;
        !is_entry
            && !is_nop
            && !instruction.op_kinds().any(is_immediate)
            && stays_in_method(function, instruction)
            && uses_own_memory(instruction)
    }

    /// The thread that runs the method is at `%r15`, and is there as long as it runs.
    pub(crate) fn cannot_fault(self, memory: &UsedMemory) -> bool {
        let is_flat = !matches!(memory.segment(), Register::FS | Register::GS);
        is_flat && memory.base() == Register::R15 && memory.index() == Register::None
    }
}

fn is_immediate(kind: OpKind) -> bool {
    matches!(
        kind,
        OpKind::Immediate8
            | OpKind::Immediate8_2nd
            | OpKind::Immediate16
            | OpKind::Immediate32
            | OpKind::Immediate64
            | OpKind::Immediate8to16
            | OpKind::Immediate8to32
            | OpKind::Immediate8to64
            | OpKind::Immediate32to64
    )
}

/// Jumps out of a method go to stubs of the machine's.
fn stays_in_method(function: &Function, instruction: &Instruction) -> bool {
    match instruction.flow_control() {
        FlowControl::Next => true,
        FlowControl::UnconditionalBranch | FlowControl::ConditionalBranch => {
            target(instruction).is_some_and(|to| function.range().contains(&to))
        }
        _ => false,
    }
}

/// To no memory but the frame, and the thread's structure.
fn uses_own_memory(instruction: &Instruction) -> bool {
    let is_own = |memory: &UsedMemory| match memory.base() {
        _ if memory.access() == OpAccess::NoMemAccess => true,
        Register::RSP => memory.displacement() < FRAME_BYTES,
        base => base == Register::R15,
    };
    InstructionInfoFactory::new().info(instruction).used_memory().iter().all(is_own)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Permitted, Tactic};

    const PERMITTED: Permitted<'static> = Permitted {
        several: false,
        memory: false,
        flags: true,
        named: &[],
        hotspot: Some(HotSpot { entry: 0x1000 }),
    };

    /// The first place of code that stands behind the bytes of the entry: 16 times `nop`.
    fn found(bytes: &[u8], permitted: &Permitted<'_>) -> Option<(u64, Tactic)> {
        let code = [&[0x90; 16], bytes, &[0xc3]].concat();
        let function = Function::decode(&code, 0x1000, None).unwrap();
        let site = function.sites(permitted).next()?;
        Some((site.at, site.tactic))
    }

    /// Goal: of compiled methods only what the machine leaves alone is moved. Method: one
    /// instruction each, which is a place of other code but for the last.
    #[test]
    fn what_the_machine_reads_or_changes_stays() {
        let stays: [&[u8]; 10] = [
            // mov $1,%eax; movabs $1,%r10; nopl 1(%rax,%rax); cmp $1,%r11d of four bytes
            &[0xb8, 1, 0, 0, 0],
            &[0x49, 0xba, 1, 0, 0, 0, 0, 0, 0, 0],
            &[0x0f, 0x1f, 0x84, 0, 1, 0, 0, 0],
            &[0x41, 0x81, 0xfb, 1, 0, 0, 0],
            // cmpl $1,0x20(%r15); mov 0x10(%rip),%rax; mov %eax,-0x14000(%rsp); push 8(%rsp) ...
            &[0x41, 0x81, 0x7f, 0x20, 1, 0, 0, 0],
            &[0x48, 0x8b, 0x05, 0x10, 0, 0, 0],
            &[0x89, 0x84, 0x24, 0, 0xc0, 0xfe, 0xff],
            &[0xff, 0xb4, 0x24, 8, 0, 0, 0],
            // jmp out; mov %fs:0x28,%rax
            &[0xe9, 0, 1, 0, 0],
            &[0x64, 0x48, 0x8b, 0x04, 0x25, 0x28, 0, 0, 0],
        ];
        let other = Permitted { hotspot: None, memory: true, ..PERMITTED };
        for bytes in stays {
            assert_eq!(found(bytes, &PERMITTED), None, "{bytes:x?}");
            assert!(found(bytes, &other).is_some(), "{bytes:x?}: the rule is what refuses it");
        }
        // mov 0x10(%rax),%r10, of eight bytes: a null would fault here.
        let heap = [0x4c, 0x8b, 0x94, 0x20, 0x10, 0, 0, 0];
        assert_eq!(found(&heap, &PERMITTED), None);
        // mov 0x348(%r15,%rax),%r10: nobody knows where that is.
        let indexed = [0x4d, 0x8b, 0x94, 0x07, 0x48, 3, 0, 0];
        assert_eq!(found(&indexed, &PERMITTED), None);
    }

    #[test]
    fn what_is_the_threads_own_may_be_moved() {
        let moves: [&[u8]; 5] = [
            // mov 0x348(%r15),%r10; cmp 0x340(%r15),%rsp; lea 0x10(%r8,%r11),%r9;
            // mov %r10,0x20(%rsp); vaddsd %xmm8,%xmm9,%xmm10
            &[0x4d, 0x8b, 0x97, 0x48, 3, 0, 0],
            &[0x49, 0x3b, 0xa7, 0x40, 3, 0, 0],
            &[0x4f, 0x8d, 0x4c, 0x18, 0x10],
            &[0x4c, 0x89, 0x54, 0x24, 0x20],
            &[0xc4, 0x41, 0x33, 0x58, 0xd0],
        ];
        for bytes in moves {
            assert_eq!(found(bytes, &PERMITTED), Some((0x1010, Tactic::One)), "{bytes:x?}");
        }
        // Of other code %r15 says nothing.
        let other = Permitted { hotspot: None, ..PERMITTED };
        assert_eq!(found(moves[0], &other), None);
    }

    #[test]
    fn the_entry_stays() {
        let entry = |entry| Permitted { hotspot: Some(HotSpot { entry }), ..PERMITTED };
        let lea = [0x4f, 0x8d, 0x4c, 0x18, 0x10];
        assert!(found(&lea, &entry(0x1000)).is_some());
        assert_eq!(found(&lea, &entry(0x1001)), None, "a byte of it could be the jump's");
    }

    /// Goal: the one place of a loop that any loop of a compiled method has. Method: what C2 makes
    /// of `while (x != 0) x = x * y;`, as -XX:+PrintAssembly would show it.
    #[test]
    fn the_load_of_a_poll_is_a_place_of_its_loop() {
        let code = [
            &[0x90; 16][..],
            // A: mov 0x348(%r15),%r10; imul %rdx,%rax; test %eax,(%r10); test %rax,%rax; jne A; ret
            &[0x4d, 0x8b, 0x97, 0x48, 3, 0, 0, 0x48, 0x0f, 0xaf, 0xc2, 0x41, 0x85, 0x02],
            &[0x48, 0x85, 0xc0, 0x75, 0xed, 0xc3],
        ];
        let function = Function::decode(&code.concat(), 0x1000, Some(0x1017)).unwrap();
        let around = function.loops_around(0x1017);
        let [one] = around[..] else { panic!("{around:x?}") };
        let site = function.site_in_loop(&one, &PERMITTED).unwrap();
        assert_eq!((site.at, site.bytes, site.tactic), (0x1010, 7, Tactic::One));
    }
}
