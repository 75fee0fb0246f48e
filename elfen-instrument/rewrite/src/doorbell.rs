//! The routine that all checks of a process call: it answers a probe, and rings the guard's
//! doorbell.
//!
//! The routine runs in the middle of other code, so it preserves all registers. It uses 48 bytes of
//! stack below the red zone. It makes at most one system call, and only in the thread that takes
//! the doorbell's value:
//!
//! | doorbell | state of the guard | system call |
//! | --- | --- | --- |
//! | 0 | it polls by itself, or is dead | none |
//! | 1 | it sleeps | futex wake |
//! | 2 | it occupies the lane, but was preempted | yield |
//!
//! A thread that filters its system calls (seccomp) makes none, because a filter could kill its
//! process. It also does not answer probes, because strict mode forbids reading the time-stamp
//! counter. Before its code runs again, the filter is recorded: by the kernel for each CPU, or by
//! the process itself before it requests the filter.

use crate::trampoline::{Code, Patch};

/// The words that the routine reads and writes, 8 bytes each. `filters` may lie at any distance.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Doorbell {
    /// Not 0 while the request lane is busy.
    pub task: u64,
    pub doorbell: u64,
    /// Not 0 while the thread on the batch lane filters its system calls.
    pub filters: u64,
    pub probe: u64,
    pub answer_tsc: u64,
    pub answer_place: u64,
}

impl Doorbell {
    /// The routine for address `at`. `None` if a word is more than 2 GiB away.
    pub fn routine(&self, at: u64) -> Option<Patch> {
        let mut code = Code::at(at);
        // push %rcx; push %rdx; push %r11; push %rax, the return address
        code.push(&[0x51, 0x52, 0x41, 0x53, 0x50]);
        // movabs $filters, %rcx; cmpq $0, (%rcx); jne
        code.push(&[0x48, 0xb9]);
        code.push(&self.filters.to_le_bytes());
        code.push(&[0x48, 0x83, 0x39, 0]);
        let filters = code.push_forward_jump(&[0x0f, 0x85]);
        // cmpq $0, probe; je
        code.push_relative(&[0x48, 0x83, 0x3d], self.probe, &[0])?;
        let no_probe = code.push_forward_jump(&[0x0f, 0x84]);
        // rdtsc; shl $32, %rdx; or %rdx, %rax; mov %rax, answer_tsc
        code.push(&[0x0f, 0x31, 0x48, 0xc1, 0xe2, 0x20, 0x48, 0x09, 0xd0]);
        code.push_relative(&[0x48, 0x89, 0x05], self.answer_tsc, &[])?;
        // mov (%rsp), %rax; mov %rax, answer_place; movq $0, probe
        code.push(&[0x48, 0x8b, 0x04, 0x24]);
        code.push_relative(&[0x48, 0x89, 0x05], self.answer_place, &[])?;
        code.push_relative(&[0x48, 0xc7, 0x05], self.probe, &[0; 4])?;
        code.end_jump(no_probe)?;
        // cmpq $0, task; je; cmpq $0, doorbell; je
        code.push_relative(&[0x48, 0x83, 0x3d], self.task, &[0])?;
        let idle = code.push_forward_jump(&[0x0f, 0x84]);
        code.push_relative(&[0x48, 0x83, 0x3d], self.doorbell, &[0])?;
        let awake = code.push_forward_jump(&[0x0f, 0x84]);
        // xor %ecx, %ecx; xchg %rcx, doorbell; test %rcx, %rcx; je: only one thread rings
        code.push(&[0x31, 0xc9]);
        code.push_relative(&[0x48, 0x87, 0x0d], self.doorbell, &[])?;
        code.push(&[0x48, 0x85, 0xc9]);
        let rung = code.push_forward_jump(&[0x0f, 0x84]);
        // push %rdi; push %rsi; lea doorbell, %rdi; mov $FUTEX_WAKE, %esi; mov $1, %edx
        code.push(&[0x57, 0x56]);
        code.push_relative(&[0x48, 0x8d, 0x3d], self.doorbell, &[])?;
        code.push(&[0xbe, 1, 0, 0, 0, 0xba, 1, 0, 0, 0]);
        push_system_call(&mut code)?;
        // pop %rsi; pop %rdi
        code.push(&[0x5e, 0x5f]);
        [idle, awake, filters, rung].into_iter().try_for_each(|open| code.end_jump(open))?;
        // pop %rax; pop %r11; pop %rdx; pop %rcx; jmp *%rax
        code.push(&[0x58, 0x41, 0x5b, 0x5a, 0x59, 0xff, 0xe0]);
        Some(code.patch())
    }
}

/// The routine for checks that look up the lane of their thread. It does the same with the words of
/// that lane. The offsets are relative to the probe word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LaneDoorbell {
    pub doorbell: i8,
    pub answer_tsc: i8,
    pub answer_place: i8,
    /// The process's own word, at any distance. `None` if the block of the CPU holds the distance
    /// to the word of the CPU.
    pub filters: Option<u64>,
}

impl LaneDoorbell {
    /// The routine for address `at`. It expects the address of the CPU's block in `%rcx`.
    pub fn routine(&self, at: u64) -> Option<Patch> {
        let offset = |byte: i8| byte.to_le_bytes()[0];
        let mut code = Code::at(at);
        // push %rdx; push %rsi; push %rdi; push %r11; push %rax, the return address
        code.push(&[0x52, 0x56, 0x57, 0x41, 0x53, 0x50]);
        match self.filters {
            Some(word) => {
                // movabs $filters, %rdx; cmpq $0, (%rdx)
                code.push(&[0x48, 0xba]);
                code.push(&word.to_le_bytes());
                code.push(&[0x48, 0x83, 0x3a, 0]);
            }
            // movslq 8(%rcx),%rdx; cmpq $0, (%rcx,%rdx)
            None => code.push(&[0x48, 0x63, 0x51, 8, 0x48, 0x83, 0x3c, 0x11, 0]),
        }
        let filters = code.push_forward_jump(&[0x0f, 0x85]);
        // movslq (%rcx),%rsi; add %rcx,%rsi: task; movslq 4(%rcx),%rdi; add %rcx,%rdi: probe
        code.push(&[0x48, 0x63, 0x31, 0x48, 0x01, 0xce]);
        code.push(&[0x48, 0x63, 0x79, 4, 0x48, 0x01, 0xcf]);
        // cmpq $0, probe; je
        code.push(&[0x48, 0x83, 0x3f, 0]);
        let no_probe = code.push_forward_jump(&[0x0f, 0x84]);
        // rdtsc; shl $32, %rdx; or %rdx, %rax; mov %rax, answer_tsc
        code.push(&[0x0f, 0x31, 0x48, 0xc1, 0xe2, 0x20, 0x48, 0x09, 0xd0]);
        code.push(&[0x48, 0x89, 0x47, offset(self.answer_tsc)]);
        // mov (%rsp), %rax; mov %rax, answer_place; movq $0, probe
        code.push(&[0x48, 0x8b, 0x04, 0x24]);
        code.push(&[0x48, 0x89, 0x47, offset(self.answer_place)]);
        code.push(&[0x48, 0xc7, 0x07, 0, 0, 0, 0]);
        code.end_jump(no_probe)?;
        // cmpq $0, task; je; lea doorbell, %rdi; cmpq $0, doorbell; je
        code.push(&[0x48, 0x83, 0x3e, 0]);
        let idle = code.push_forward_jump(&[0x0f, 0x84]);
        code.push(&[0x48, 0x8d, 0x7f, offset(self.doorbell)]);
        code.push(&[0x48, 0x83, 0x3f, 0]);
        let awake = code.push_forward_jump(&[0x0f, 0x84]);
        // xor %ecx, %ecx; xchg %rcx, doorbell; test %rcx, %rcx; je: only one thread rings
        code.push(&[0x31, 0xc9, 0x48, 0x87, 0x0f, 0x48, 0x85, 0xc9]);
        let rung = code.push_forward_jump(&[0x0f, 0x84]);
        // mov $FUTEX_WAKE, %esi; mov $1, %edx
        code.push(&[0xbe, 1, 0, 0, 0, 0xba, 1, 0, 0, 0]);
        push_system_call(&mut code)?;
        [idle, awake, filters, rung].into_iter().try_for_each(|open| code.end_jump(open))?;
        // pop %rax; pop %r11; pop %rdi; pop %rsi; pop %rdx; jmp *%rax
        code.push(&[0x58, 0x41, 0x5b, 0x5f, 0x5e, 0x5a, 0xff, 0xe0]);
        Some(code.patch())
    }
}

/// The system call that the doorbell's value in `%rcx` selects. The arguments are those of a futex
/// wake; a yield takes none.
fn push_system_call(code: &mut Code) -> Option<()> {
    // mov $SYS_futex, %eax; cmp $1, %rcx; je; mov $SYS_sched_yield, %eax; syscall
    code.push(&[0xb8, 202, 0, 0, 0, 0x48, 0x83, 0xf9, 1]);
    let sleeps = code.push_forward_jump(&[0x0f, 0x84]);
    code.push(&[0xb8, 24, 0, 0, 0]);
    code.end_jump(sleeps)?;
    code.push(&[0x0f, 0x05]);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};

    const DOORBELL: Doorbell = Doorbell {
        task: 0x3000,
        doorbell: 0x4000,
        filters: 1 << 41,
        probe: 0x4008,
        answer_tsc: 0x4010,
        answer_place: 0x4018,
    };

    const LANE: LaneDoorbell =
        LaneDoorbell { doorbell: -8, answer_tsc: 8, answer_place: 16, filters: None };
    const LANE_OWN: LaneDoorbell = LaneDoorbell { filters: Some(1 << 40), ..LANE };

    fn decoded(routine: Option<Patch>) -> Vec<Instruction> {
        let bytes = routine.unwrap().bytes;
        Decoder::with_ip(64, &bytes, 0x2000, DecoderOptions::NONE).iter().collect()
    }

    #[test]
    fn every_path_pops_what_it_pushed() {
        assert_balanced(&decoded(DOORBELL.routine(0x2000)));
        assert_balanced(&decoded(LANE.routine(0x2000)));
        assert_balanced(&decoded(LANE_OWN.routine(0x2000)));
    }

    fn assert_balanced(code: &[Instruction]) {
        let mut open = vec![(0, Vec::new())];
        let mut ends = 0;
        while let Some((index, mut stack)) = open.pop() {
            let one: &Instruction = &code[index];
            match one.mnemonic() {
                Mnemonic::Push => stack.push(one.op0_register()),
                Mnemonic::Pop => assert_eq!(stack.pop(), Some(one.op0_register()), "{one:?}"),
                Mnemonic::Jmp => {
                    assert!(stack.is_empty());
                    ends += 1;
                    continue;
                }
                Mnemonic::Je | Mnemonic::Jne => {
                    let to = one.near_branch_target();
                    let to = code.iter().position(|other| other.ip() == to).expect("inside");
                    open.push((to, stack.clone()));
                }
                _ => {}
            }
            open.push((index + 1, stack));
        }
        assert_eq!(
            ends, 11,
            "two outcomes of the probe times five of the doorbell, and one for filters"
        );
    }

    /// Goal: a sleeping guard is woken, and a guard that occupies the lane gets it back. Method:
    /// the number in `%eax` at the system call, for each value of the doorbell.
    #[test]
    fn the_doorbell_selects_the_system_call() {
        for code in [decoded(DOORBELL.routine(0x2000)), decoded(LANE.routine(0x2000))] {
            let called = code.iter().position(|one| one.mnemonic() == Mnemonic::Syscall).unwrap();
            let [futex, sleeps, skip, yields] = &code[called - 4..called] else { unreachable!() };
            let puts = |one: &Instruction, number| {
                one.mnemonic() == Mnemonic::Mov
                    && one.op0_register() == Register::EAX
                    && one.immediate(1) == number
            };
            let asks = |one: &Instruction, register, number| {
                one.mnemonic() == Mnemonic::Cmp
                    && one.op0_register() == register
                    && one.immediate(1) == number
            };
            let [wake, give] = [libc::SYS_futex, libc::SYS_sched_yield].map(i64::cast_unsigned);
            assert!(puts(futex, wake) && puts(yields, give));
            assert!(asks(sleeps, Register::RCX, 1), "elfen_rt::signal::lane::ASLEEP");
            assert_eq!(skip.mnemonic(), Mnemonic::Je);
            assert_eq!(skip.near_branch_target(), code[called].ip());
        }
    }

    #[test]
    fn instructions_name_their_words() {
        let named: Vec<(Mnemonic, u64)> = decoded(DOORBELL.routine(0x2000))
            .iter()
            .filter(|one| one.is_ip_rel_memory_operand())
            .map(|one| (one.mnemonic(), one.ip_rel_memory_address()))
            .collect();
        use Mnemonic::{Cmp, Lea, Mov, Xchg};
        let expected = [
            (Cmp, DOORBELL.probe),
            (Mov, DOORBELL.answer_tsc),
            (Mov, DOORBELL.answer_place),
            (Mov, DOORBELL.probe),
            (Cmp, DOORBELL.task),
            (Cmp, DOORBELL.doorbell),
            (Xchg, DOORBELL.doorbell),
            (Lea, DOORBELL.doorbell),
        ];
        assert_eq!(named, expected);
    }

    #[test]
    fn instructions_name_the_words_of_a_lane() {
        let code = decoded(LANE.routine(0x2000));
        let memory = code.iter().filter(|one| one.memory_base() != Register::None);
        let named: Vec<(Mnemonic, Register, i64)> = memory
            .map(|one| {
                let at = one.memory_displacement64().cast_signed();
                (one.mnemonic(), one.memory_base(), at)
            })
            .collect();
        use Mnemonic::{Cmp, Lea, Mov, Movsxd, Xchg};
        use Register::{RCX, RDI, RSI, RSP};
        let expected = [
            (Movsxd, RCX, 8),
            (Cmp, RCX, 0),
            (Movsxd, RCX, 0),
            (Movsxd, RCX, 4),
            (Cmp, RDI, 0),
            (Mov, RDI, 8),
            (Mov, RSP, 0),
            (Mov, RDI, 16),
            (Mov, RDI, 0),
            (Cmp, RSI, 0),
            (Lea, RDI, -8),
            (Cmp, RDI, 0),
            (Xchg, RDI, 0),
        ];
        assert_eq!(named, expected);
        // The two addresses are computed from the block and the distances in it.
        let sums: Vec<[Register; 2]> = code
            .iter()
            .filter(|one| one.mnemonic() == Mnemonic::Add)
            .map(|one| [one.op0_register(), one.op1_register()])
            .collect();
        assert_eq!(sums, [[RSI, RCX], [RDI, RCX]]);
    }

    /// Goal: a filtering thread makes no system call and does not read the time-stamp counter.
    /// Method: a single jump, taken if the word is not 0, precedes and skips both.
    #[test]
    fn a_filtering_thread_makes_no_system_call() {
        let names_word = |one: &Instruction, word: Option<u64>| match word {
            Some(word) => one.op1_kind() == OpKind::Immediate64 && one.immediate(1) == word,
            None => one.mnemonic() == Mnemonic::Movsxd && one.memory_displacement64() == 8,
        };
        for (routine, word) in [
            (DOORBELL.routine(0x2000), Some(DOORBELL.filters)),
            (LANE.routine(0x2000), None),
            (LANE_OWN.routine(0x2000), LANE_OWN.filters),
        ] {
            let code = decoded(routine);
            let is_jump = |one: &Instruction| one.mnemonic() == Mnemonic::Jne;
            assert_eq!(code.iter().filter(|one| is_jump(one)).count(), 1);
            let jump = code.iter().position(is_jump).unwrap();
            assert!(names_word(&code[jump - 2], word), "{:?}", code[jump - 2]);
            let compared = &code[jump - 1];
            assert_eq!((compared.mnemonic(), compared.immediate(1)), (Mnemonic::Cmp, 0));
            let named = code[jump - 2].op0_register();
            assert!([compared.memory_base(), compared.memory_index()].contains(&named));
            let first = code.iter().position(|one| one.mnemonic() == Mnemonic::Rdtsc).unwrap();
            let called = code.iter().position(|one| one.mnemonic() == Mnemonic::Syscall).unwrap();
            assert!(jump < first && code[jump].near_branch_target() > code[called].ip());
        }
    }

    #[test]
    fn words_out_of_reach_are_rejected() {
        assert_eq!(DOORBELL.routine(1 << 32), None);
        assert_eq!(Doorbell { doorbell: 1 << 33, ..DOORBELL }.routine(0x2000), None);
    }
}
