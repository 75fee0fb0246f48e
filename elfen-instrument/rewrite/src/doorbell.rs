//! The routine behind every check of a process: it answers a drill, and rings the guard's bell.
//!
//! It runs in the middle of somebody else's code, so all registers are as they were when it goes
//! back, and the stack holds 48 bytes more meanwhile. It makes one system call at most, and only
//! for the thread that finds the bell: a futex wake for a guard that sleeps (1), and a yield for
//! one that has the lane (2), from whom the scheduler has taken it. One that looks by itself, or
//! is dead, has left the bell at 0. A thread that filters its system calls (seccomp) makes none: a
//! filter could end its process. That it does has been noted by the time its code runs again: by
//! the kernel for each CPU, or by the process, before it asked for the filter. It answers no drill
//! either: in strict mode the time-stamp counter may not be read.

use crate::trampoline::{Code, Patch};

/// The words that the routine reads and writes, each of 8 bytes; `filters` may lie anywhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Doorbell {
    /// Not 0 while the request lane is busy.
    pub task: u64,
    pub doorbell: u64,
    /// Not 0 while the thread that has the batch lane filters its system calls.
    pub filters: u64,
    pub probe: u64,
    pub answer_tsc: u64,
    pub answer_place: u64,
}

impl Doorbell {
    /// The routine as it stands at `at`. `None` if a word is more than 2 GiB away.
    pub fn routine(&self, at: u64) -> Option<Patch> {
        let mut code = Code::at(at);
        // push %rcx; push %rdx; push %r11; push %rax, which is where to go back to
        code.push(&[0x51, 0x52, 0x41, 0x53, 0x50]);
        // movabs $filters, %rcx; cmpq $0, (%rcx); jne
        code.push(&[0x48, 0xb9]);
        code.push(&self.filters.to_le_bytes());
        code.push(&[0x48, 0x83, 0x39, 0]);
        let filters = code.push_open(&[0x0f, 0x85]);
        // cmpq $0, drill; je
        code.push_relative(&[0x48, 0x83, 0x3d], self.probe, &[0])?;
        let no_probe = code.push_open(&[0x0f, 0x84]);
        // rdtsc; shl $32, %rdx; or %rdx, %rax; mov %rax, answer_tsc
        code.push(&[0x0f, 0x31, 0x48, 0xc1, 0xe2, 0x20, 0x48, 0x09, 0xd0]);
        code.push_relative(&[0x48, 0x89, 0x05], self.answer_tsc, &[])?;
        // mov (%rsp), %rax; mov %rax, answer_place; movq $0, drill
        code.push(&[0x48, 0x8b, 0x04, 0x24]);
        code.push_relative(&[0x48, 0x89, 0x05], self.answer_place, &[])?;
        code.push_relative(&[0x48, 0xc7, 0x05], self.probe, &[0; 4])?;
        code.close(no_probe)?;
        // cmpq $0, task; je; cmpq $0, bell; je
        code.push_relative(&[0x48, 0x83, 0x3d], self.task, &[0])?;
        let idle = code.push_open(&[0x0f, 0x84]);
        code.push_relative(&[0x48, 0x83, 0x3d], self.doorbell, &[0])?;
        let awake = code.push_open(&[0x0f, 0x84]);
        // xor %ecx, %ecx; xchg %rcx, bell; test %rcx, %rcx; je: one thread alone rings
        code.push(&[0x31, 0xc9]);
        code.push_relative(&[0x48, 0x87, 0x0d], self.doorbell, &[])?;
        code.push(&[0x48, 0x85, 0xc9]);
        let rung = code.push_open(&[0x0f, 0x84]);
        // push %rdi; push %rsi; lea bell, %rdi; mov $FUTEX_WAKE, %esi; mov $1, %edx
        code.push(&[0x57, 0x56]);
        code.push_relative(&[0x48, 0x8d, 0x3d], self.doorbell, &[])?;
        code.push(&[0xbe, 1, 0, 0, 0, 0xba, 1, 0, 0, 0]);
        call(&mut code)?;
        // pop %rsi; pop %rdi
        code.push(&[0x5e, 0x5f]);
        [idle, awake, filters, rung].into_iter().try_for_each(|open| code.close(open))?;
        // pop %rax; pop %r11; pop %rdx; pop %rcx; jmp *%rax
        code.push(&[0x58, 0x41, 0x5b, 0x5a, 0x59, 0xff, 0xe0]);
        Some(code.patch())
    }
}

/// The routine behind checks that look at the lane which their thread is on: the same, with the
/// words of that lane. Where they are as seen from the word of drills.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LaneDoorbell {
    pub doorbell: i8,
    pub answer_tsc: i8,
    pub answer_place: i8,
    /// The process's own word, anywhere; `None`: the block says where the CPU's word is.
    pub filters: Option<u64>,
}

impl LaneDoorbell {
    /// The routine as it stands at `at`; it finds the CPU's block in `%rcx`.
    pub fn routine(&self, at: u64) -> Option<Patch> {
        let offset = |byte: i8| byte.to_le_bytes()[0];
        let mut code = Code::at(at);
        // push %rdx; push %rsi; push %rdi; push %r11; push %rax, which is where to go back to
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
        let filters = code.push_open(&[0x0f, 0x85]);
        // movslq (%rcx),%rsi; add %rcx,%rsi: task; movslq 4(%rcx),%rdi; add %rcx,%rdi: drill
        code.push(&[0x48, 0x63, 0x31, 0x48, 0x01, 0xce]);
        code.push(&[0x48, 0x63, 0x79, 4, 0x48, 0x01, 0xcf]);
        // cmpq $0, drill; je
        code.push(&[0x48, 0x83, 0x3f, 0]);
        let no_probe = code.push_open(&[0x0f, 0x84]);
        // rdtsc; shl $32, %rdx; or %rdx, %rax; mov %rax, answer_tsc
        code.push(&[0x0f, 0x31, 0x48, 0xc1, 0xe2, 0x20, 0x48, 0x09, 0xd0]);
        code.push(&[0x48, 0x89, 0x47, offset(self.answer_tsc)]);
        // mov (%rsp), %rax; mov %rax, answer_place; movq $0, drill
        code.push(&[0x48, 0x8b, 0x04, 0x24]);
        code.push(&[0x48, 0x89, 0x47, offset(self.answer_place)]);
        code.push(&[0x48, 0xc7, 0x07, 0, 0, 0, 0]);
        code.close(no_probe)?;
        // cmpq $0, task; je; lea bell, %rdi; cmpq $0, bell; je
        code.push(&[0x48, 0x83, 0x3e, 0]);
        let idle = code.push_open(&[0x0f, 0x84]);
        code.push(&[0x48, 0x8d, 0x7f, offset(self.doorbell)]);
        code.push(&[0x48, 0x83, 0x3f, 0]);
        let awake = code.push_open(&[0x0f, 0x84]);
        // xor %ecx, %ecx; xchg %rcx, bell; test %rcx, %rcx; je: one thread alone rings
        code.push(&[0x31, 0xc9, 0x48, 0x87, 0x0f, 0x48, 0x85, 0xc9]);
        let rung = code.push_open(&[0x0f, 0x84]);
        // mov $FUTEX_WAKE, %esi; mov $1, %edx
        code.push(&[0xbe, 1, 0, 0, 0, 0xba, 1, 0, 0, 0]);
        call(&mut code)?;
        [idle, awake, filters, rung].into_iter().try_for_each(|open| code.close(open))?;
        // pop %rax; pop %r11; pop %rdi; pop %rsi; pop %rdx; jmp *%rax
        code.push(&[0x58, 0x41, 0x5b, 0x5f, 0x5e, 0x5a, 0xff, 0xe0]);
        Some(code.patch())
    }
}

/// The system call that the bell in `%rcx` asks for. Arguments are those of a wake; a yield has
/// none.
fn call(code: &mut Code) -> Option<()> {
    // mov $SYS_futex, %eax; cmp $1, %rcx; je; mov $SYS_sched_yield, %eax; syscall
    code.push(&[0xb8, 202, 0, 0, 0, 0x48, 0x83, 0xf9, 1]);
    let sleeps = code.push_open(&[0x0f, 0x84]);
    code.push(&[0xb8, 24, 0, 0, 0]);
    code.close(sleeps)?;
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
    fn what_is_pushed_is_popped_on_every_way_through() {
        ends_as_it_began(&decoded(DOORBELL.routine(0x2000)));
        ends_as_it_began(&decoded(LANE.routine(0x2000)));
        ends_as_it_began(&decoded(LANE_OWN.routine(0x2000)));
    }

    fn ends_as_it_began(code: &[Instruction]) {
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
        assert_eq!(ends, 11, "two of drills, times five of the bell, and one that filters");
    }

    /// Goal: a guard that sleeps is woken, and to one that has the lane it is given back. Method:
    /// the number that is in `%eax` where the kernel is called, for either bell.
    #[test]
    fn the_bell_says_what_is_called() {
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
    fn every_word_is_the_one_that_is_meant() {
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
    fn every_word_of_a_lane_is_the_one_that_is_meant() {
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
        // The two bases are the block and what it says.
        let sums: Vec<[Register; 2]> = code
            .iter()
            .filter(|one| one.mnemonic() == Mnemonic::Add)
            .map(|one| [one.op0_register(), one.op1_register()])
            .collect();
        assert_eq!(sums, [[RSI, RCX], [RDI, RCX]]);
    }

    /// Goal: a thread that filters makes no call, and does not read the time-stamp counter. Method:
    /// one jump is taken where the word is not 0; it comes before both, and skips them.
    #[test]
    fn who_filters_makes_no_call() {
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
    fn words_out_of_reach_are_refused() {
        assert_eq!(DOORBELL.routine(1 << 32), None);
        assert_eq!(Doorbell { doorbell: 1 << 33, ..DOORBELL }.routine(0x2000), None);
    }
}
