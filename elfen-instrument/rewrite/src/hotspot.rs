//! Which instructions of a compiled Java method may be moved.
//!
//! HotSpot reads and changes parts of the code of a method while it runs. These parts stay:
//!
//! | part | why it stays |
//! | --- | --- |
//! | first bytes after the entry | HotSpot writes a jump there when the method is retired |
//! | calls | their targets change, and HotSpot inspects the code before a return address |
//! | immediates | objects and classes that move, inline caches, colours of a garbage collector |
//! | nops | after calls they carry data |
//! | heap accesses, divisions | a fault and its address detect null and zero |
//! | probes below the stack pointer | a fault detects the end of the stack |
//! | constants near the code | no check needs them moved |
//!
//! What remains is arithmetic between registers, accesses to the frame, branches within the method,
//! and reads of the thread's own structure by `%r15`. Every safepoint poll of a loop has such a
//! read: the load of the page's address. The poll itself may fault and stays.

use iced_x86::{
    FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, Register,
    UsedMemory,
};

use crate::code::Function;
use crate::flow::target;

/// A method that HotSpot has compiled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HotSpot {
    /// Where callers that know the class enter the method.
    pub entry: u64,
}

/// Longer than the jump that HotSpot writes at the entry.
const ENTRY_BYTES: u64 = 16;
const FRAME_BYTES: u64 = 4096;

impl HotSpot {
    /// Whether HotSpot neither reads nor changes an instruction.
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

    /// `%r15` points to the structure of the running thread, which exists as long as the thread.
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

/// A jump out of the method goes to a stub of the virtual machine.
fn stays_in_method(function: &Function, instruction: &Instruction) -> bool {
    match instruction.flow_control() {
        FlowControl::Next => true,
        FlowControl::UnconditionalBranch | FlowControl::ConditionalBranch => {
            target(instruction).is_some_and(|to| function.range().contains(&to))
        }
        _ => false,
    }
}

/// Whether all memory accesses go to the frame or to the thread's structure.
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

    /// The first site of code that follows the 16 bytes of the entry, here `nop`s.
    fn first_site(bytes: &[u8], permitted: &Permitted<'_>) -> Option<(u64, Tactic)> {
        let code = [&[0x90; 16], bytes, &[0xc3]].concat();
        let function = Function::decode(&code, 0x1000, None).unwrap();
        let site = function.sites(permitted).next()?;
        Some((site.at, site.tactic))
    }

    /// Goal: only instructions that HotSpot leaves alone are moved. Method: one instruction at a
    /// time; each, except the last two, is a site in other code.
    #[test]
    fn instructions_that_hotspot_reads_or_changes_stay() {
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
            assert_eq!(first_site(bytes, &PERMITTED), None, "{bytes:x?}");
            assert!(first_site(bytes, &other).is_some(), "{bytes:x?}: the rule is what refuses it");
        }
        // mov 0x10(%rax),%r10 in eight bytes: a null pointer would fault here.
        let heap = [0x4c, 0x8b, 0x94, 0x20, 0x10, 0, 0, 0];
        assert_eq!(first_site(&heap, &PERMITTED), None);
        // mov 0x348(%r15,%rax),%r10: the address depends on %rax.
        let indexed = [0x4d, 0x8b, 0x94, 0x07, 0x48, 3, 0, 0];
        assert_eq!(first_site(&indexed, &PERMITTED), None);
    }

    #[test]
    fn accesses_to_the_threads_own_structure_may_be_moved() {
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
            assert_eq!(first_site(bytes, &PERMITTED), Some((0x1010, Tactic::One)), "{bytes:x?}");
        }
        // In other code, %r15 has no special meaning.
        let other = Permitted { hotspot: None, ..PERMITTED };
        assert_eq!(first_site(moves[0], &other), None);
    }

    #[test]
    fn the_entry_stays() {
        let entry = |entry| Permitted { hotspot: Some(HotSpot { entry }), ..PERMITTED };
        let lea = [0x4f, 0x8d, 0x4c, 0x18, 0x10];
        assert!(first_site(&lea, &entry(0x1000)).is_some());
        assert_eq!(first_site(&lea, &entry(0x1001)), None, "a byte of it could be the jump's");
    }

    /// Goal: the kind of site that every loop of a compiled method has is found. Method: the code
    /// that C2 emits for `while (x != 0) x = x * y;`, as printed by -XX:+PrintAssembly.
    #[test]
    fn the_load_of_a_safepoint_poll_is_a_site_of_its_loop() {
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
