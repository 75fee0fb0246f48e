//! Trampolines with many rounds of a loop after one check.
//!
//! A loop with rounds of one nanosecond would run its check a thousand times per microsecond. So
//! its trampoline holds the check once, and then many copies of the loop:
//!
//! ```text
//! check;  round 1;  round 2;  ...  round N;  back into the program, after the site
//! ```
//!
//! Each copied instruction does what the original does. A branch goes to the next copy of its
//! target further on, or, if there is none, to the target in the program. So a thread moves only
//! forward, and leaves after at most N rounds. It then runs one round in the program, where samples
//! of its position are meaningful, and reaches the check again.
//!
//! An instruction that cannot be copied is replaced by a jump to the original. If every round
//! contains such an instruction, the loop gets no rounds.

use iced_x86::{BlockEncoder, BlockEncoderOptions, Code, FlowControl, Instruction};
use iced_x86::{InstructionBlock, OpKind};

use crate::code::Function;
use crate::flow::target;
use crate::loops::{self, Loop};
use crate::patch_site::{PatchSite, Permitted, can_move};
use crate::trampoline::{Hooks, Patch};

/// Copies get temporary addresses from here on, where no program has code.
const COPIES: u64 = 1 << 62;
/// Rounds of longer loops take long enough for a check each.
const ROUND_BYTES: u64 = 512;

impl Function {
    /// Like [`Function::trampoline`], with rounds of the innermost loop around the site after the
    /// check: at most `rounds`, and as many as fit into `most_bytes`. `None` if fewer than two fit,
    /// or if the loop cannot be copied.
    pub fn trampoline_of_rounds(
        &self,
        site: &PatchSite,
        rounds: usize,
        most_bytes: usize,
        permitted: &Permitted<'_>,
        at: u64,
        hooks: &Hooks,
    ) -> Option<Patch> {
        let mut rounds = rounds;
        while rounds > 1 {
            let code = self.rounds(site, rounds, permitted)?;
            let patch = self.code_with_check(site, at, hooks, |out| {
                let block = InstructionBlock::new(&code, out.end()?);
                let encoded = BlockEncoder::encode(64, block, BlockEncoderOptions::NONE).ok()?;
                out.push(&encoded.code_buffer);
                Some(())
            })?;
            if patch.bytes.len() <= most_bytes {
                return Some(patch);
            }
            rounds = (rounds * most_bytes / patch.bytes.len()).min(rounds - 1);
        }
        None
    }

    /// The instructions of `count` rounds, and the jump after them.
    fn rounds(
        &self,
        site: &PatchSite,
        count: usize,
        permitted: &Permitted<'_>,
    ) -> Option<Vec<Instruction>> {
        let around = self.loops_around(site.at).pop()?;
        let inside = around.indices(self)?;
        let first = site.moved.start;
        let is_short = around.back - around.start <= ROUND_BYTES;
        let is_compiled = permitted.hotspot.is_some();
        let every = |index: usize| loops::is_on_every_round(self, &around, index);
        if !is_short || is_compiled || !every(first) || !self.has_invertible_back_jump(&around) {
            return None;
        }
        let can_copy: Vec<bool> =
            inside.clone().map(|index| self.can_be_copied(index, permitted)).collect();
        let stays = |&index: &usize| !can_copy[index - inside.start];
        if inside.clone().filter(stays).any(every) {
            return None;
        }
        let round = || (first..inside.end).chain(inside.start..first);
        let order: Vec<usize> =
            (0..count).flat_map(|_| round()).chain(site.moved.clone()).collect();
        let copies = Copies { function: self, around: &around, order: &order };
        let mut code: Vec<Instruction> = (0..order.len())
            .filter_map(|at| {
                let stays = stays(&order[at]);
                let mut instruction =
                    if stays { copies.jump_to_original(at) } else { copies.copy(at) }?;
                instruction.set_ip(copy_at(at));
                Some(instruction)
            })
            .collect();
        let mut back = jump(site.at.checked_add(u64::try_from(site.bytes).ok()?)?)?;
        back.set_ip(copy_at(order.len()));
        code.push(back);
        Some(code)
    }

    /// Whether the last backward jump is unconditional or has a condition that can be inverted.
    /// `loop` and its relatives have no inverse.
    fn has_invertible_back_jump(&self, around: &Loop) -> bool {
        let back = self.index(around.back).map(|index| self.code[index]);
        back.is_some_and(|back| back.is_jcc_short_or_near() || back.is_jmp_short_or_near())
    }

    fn can_be_copied(&self, index: usize, permitted: &Permitted<'_>) -> bool {
        let instruction = &self.code[index];
        let is_computed = instruction.flow_control() == FlowControl::IndirectBranch;
        let cannot_fault = permitted.memory || !self.faults[index];
        self.reached[index] && can_move(instruction) && !is_computed && cannot_fault
    }
}

/// The instructions of all rounds, in the order of their copies.
struct Copies<'a> {
    function: &'a Function,
    around: &'a Loop,
    order: &'a [usize],
}

impl Copies<'_> {
    fn instruction(&self, at: usize) -> Instruction {
        self.function.code[self.order[at]]
    }

    /// The jump that replaces an instruction which stays in the program.
    fn jump_to_original(&self, at: usize) -> Option<Instruction> {
        jump(self.instruction(at).ip())
    }

    /// The copy of an instruction; `None` if it only jumps to the copy that follows.
    fn copy(&self, at: usize) -> Option<Instruction> {
        let mut instruction = self.instruction(at);
        let Some(to) = target(&instruction) else { return Some(instruction) };
        let begins_next = instruction.ip() == self.around.back && at + 1 < self.order.len();
        if begins_next {
            if instruction.flow_control() != FlowControl::ConditionalBranch {
                return None;
            }
            // The next round follows directly. So the copy branches where the loop is left.
            instruction.negate_condition_code();
            instruction.set_near_branch64(self.copy_ahead(at, instruction.next_ip()));
        } else {
            instruction.set_near_branch64(self.copy_ahead(at, to));
        }
        debug_assert_eq!(instruction.op0_kind(), OpKind::NearBranch64);
        Some(instruction)
    }

    /// The next copy of an address of the program, or the address itself.
    fn copy_ahead(&self, at: usize, address: u64) -> u64 {
        let is_back = address == self.around.back;
        let passes = is_back && self.has_unconditional_back_jump();
        // The copy of an unconditional backward jump is left out. Its position is the start of the
        // next round.
        let address = if passes { self.around.start } else { address };
        let ip = |index: usize| self.function.code[index].ip();
        let next = (at + 1..self.order.len()).find(|&next| ip(self.order[next]) == address);
        next.map_or(address, copy_at)
    }

    fn has_unconditional_back_jump(&self) -> bool {
        let back = self.function.index(self.around.back).map(|index| self.function.code[index]);
        back.is_some_and(|back| back.flow_control() == FlowControl::UnconditionalBranch)
    }
}

fn copy_at(at: usize) -> u64 {
    COPIES + at as u64
}

fn jump(to: u64) -> Option<Instruction> {
    Instruction::with_branch(Code::Jmp_rel32_64, to).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hotspot::HotSpot;
    use crate::trampoline::Words;
    use iced_x86::{Decoder, DecoderOptions, Mnemonic};

    const AT: u64 = 0x2000;
    const HOOKS: Hooks =
        Hooks { words: Words::Fixed { words: [0x3000, 0x3008], count: None }, ring: 0x2800 };
    const ALL: Permitted<'static> =
        Permitted { several: true, memory: true, flags: true, named: &[], hotspot: None };

    fn patch(bytes: &[u8], at: u64, rounds: usize, permitted: &Permitted<'_>) -> Option<Patch> {
        let function = Function::decode(bytes, 0x1000, None).unwrap();
        let site = function.sites(permitted).find(|site| site.at == at).unwrap();
        function.trampoline_of_rounds(&site, rounds, 4096, permitted, AT, &HOOKS)
    }

    /// The code after the check, which takes 28 bytes, up to the jump back into the program.
    fn rounds(patch: &Patch) -> Vec<Instruction> {
        let all = Decoder::with_ip(64, &patch.bytes, patch.at, DecoderOptions::NONE);
        let behind = all.into_iter().skip_while(|one| one.ip() < AT + 28);
        behind.take_while(|one| one.mnemonic() != Mnemonic::Lea).collect()
    }

    fn mnemonics_of(patch: &Patch) -> Vec<(Mnemonic, u64)> {
        rounds(patch).iter().map(|one| (one.mnemonic(), target(one).unwrap_or(0))).collect()
    }

    /// A: mov $1,%eax; dec %ecx; jnz A; ret
    const PLAIN: [u8; 10] = [0xb8, 1, 0, 0, 0, 0xff, 0xc9, 0x75, 0xf7, 0xc3];

    #[test]
    fn rounds_follow_each_other_and_exit_where_the_loop_exits() {
        use Mnemonic::{Dec, Je, Jmp, Mov};
        let found = mnemonics_of(&patch(&PLAIN, 0x1000, 2, &ALL).unwrap());
        let round = [(Mov, 0), (Dec, 0), (Je, 0x1009)];
        // The last round is one in the program.
        assert_eq!(found, [&round[..], &round, &[(Mov, 0), (Jmp, 0x1005)]].concat());
    }

    /// Goal: a thread in the rounds of any loop moves forward. Method: a loop with two backward
    /// jumps and a branch over an instruction.
    #[test]
    fn a_thread_in_rounds_only_moves_forward() {
        // A: mov $1,%eax; test %edi,%edi; jz A; dec %edi; jp B; mov $2,%edx; B: dec %ecx; jmp A
        let bytes = [
            &[0xb8, 1, 0, 0, 0, 0x85, 0xff, 0x74, 0xf7, 0xff, 0xcf, 0x7a, 5][..],
            &[0xba, 2, 0, 0, 0, 0xff, 0xc9, 0xeb, 0xea, 0xc3],
        ];
        let patch = patch(&bytes.concat(), 0x1000, 5, &ALL).unwrap();
        let rounds = rounds(&patch);
        let inside = AT..AT + patch.bytes.len() as u64;
        let mut forward = 0;
        for one in &rounds {
            let Some(to) = target(one) else { continue };
            if inside.contains(&to) {
                assert!(to > one.ip(), "{one:x?}");
                assert!(rounds.iter().any(|other| other.ip() == to), "{one:x?}");
                forward += 1;
            } else {
                assert!((0x1000..0x1017).contains(&to), "{one:x?}");
            }
        }
        // Two branches in each round. The last backward jump goes to the moved instruction, which
        // is there once more.
        assert_eq!(forward, 10);
        let of = |mnemonic| rounds.iter().filter(|one| one.mnemonic() == mnemonic).count();
        assert_eq!((of(Mnemonic::Test), of(Mnemonic::Jmp)), (5, 1), "no jump back is left");
    }

    #[test]
    fn instructions_that_stay_are_jumped_to() {
        // A: mov $1,%eax; dec %ecx; jp B; call; B: jnz A; ret. Not every round makes the call.
        let bytes = [0xb8, 1, 0, 0, 0, 0xff, 0xc9, 0x7a, 5, 0xe8, 0, 1, 0, 0, 0x75, 0xf0, 0xc3];
        let found = mnemonics_of(&patch(&bytes, 0x1000, 2, &ALL).unwrap());
        let calls = found.iter().filter(|one| **one == (Mnemonic::Jmp, 0x1009)).count();
        assert_eq!(calls, 2, "{found:x?}");
        assert!(found.iter().all(|(mnemonic, _)| *mnemonic != Mnemonic::Call));
        // Every round makes the call.
        let always = [0xb8, 1, 0, 0, 0, 0xe8, 0, 1, 0, 0, 0xff, 0xc9, 0x75, 0xf2, 0xc3];
        assert_eq!(patch(&always, 0x1000, 2, &ALL), None);
    }

    #[test]
    fn a_back_jump_without_an_inverse_has_no_rounds() {
        // A: mov $1,%eax; loop A, or loope, or loopne, or jrcxz; ret
        for back in [0xe2, 0xe1, 0xe0, 0xe3] {
            let bytes = [0xb8, 1, 0, 0, 0, back, 0xf9, 0xc3];
            assert_eq!(patch(&bytes, 0x1000, 2, &ALL), None, "{back:x}");
        }
    }

    #[test]
    fn faulting_instructions_are_copied_only_without_fault_handlers() {
        // A: mov $1,%eax; add (%rdi),%ecx; jnz A; ret
        let bytes = [0xb8, 1, 0, 0, 0, 0x03, 0x0f, 0x75, 0xf7, 0xc3];
        assert!(patch(&bytes, 0x1000, 2, &ALL).is_some());
        assert_eq!(patch(&bytes, 0x1000, 2, &Permitted { memory: false, ..ALL }), None);
    }

    #[test]
    fn compiled_java_code_has_no_rounds() {
        let function = Function::decode(&PLAIN, 0x1000, None).unwrap();
        let site = function.sites(&ALL).next().unwrap();
        let hotspot = Permitted { hotspot: Some(HotSpot { entry: 0 }), ..ALL };
        let of = |permitted| {
            function.trampoline_of_rounds(&site, 2, 4096, permitted, AT, &HOOKS).is_some()
        };
        assert!(of(&ALL) && !of(&hotspot));
    }

    /// Goal: rounds fill the room that there is. Method: less and less room.
    #[test]
    fn rounds_fill_the_room() {
        let function = Function::decode(&PLAIN, 0x1000, None).unwrap();
        let site = function.sites(&ALL).next().unwrap();
        let length = |most| {
            let patch = function.trampoline_of_rounds(&site, 64, most, &ALL, AT, &HOOKS);
            patch.map(|patch| patch.bytes.len())
        };
        let all = length(4096).unwrap();
        let fewer = length(all - 1).unwrap();
        assert!(fewer < all && fewer > all / 2, "{fewer} of {all}");
        assert_eq!(length(80), None, "not even two");
        assert!(patch(&PLAIN, 0x1000, 1, &ALL).is_none(), "one round is the plain trampoline");
    }

    /// A site of several instructions is part of each round, and the last one ends in the program.
    #[test]
    fn several_instructions_are_moved_together() {
        use Mnemonic::{Add, Dec, Je, Jmp, Jne};
        // A: add %esi,%edi; add %esi,%edx; dec %ecx; jnz A; ret
        let bytes = [0x01, 0xf7, 0x01, 0xf2, 0xff, 0xc9, 0x75, 0xf8, 0xc3];
        let found = mnemonics_of(&patch(&bytes, 0x1000, 2, &ALL).unwrap());
        let round = [(Add, 0), (Add, 0), (Dec, 0), (Je, 0x1008)];
        let last = [(Add, 0), (Add, 0), (Dec, 0), (Jmp, 0x1006)];
        assert_eq!(found, [&round[..], &round, &last].concat());
        // From the end of the loop: the backward jump is the last moved instruction, and stays.
        let found = mnemonics_of(&patch(&bytes, 0x1002, 2, &ALL).unwrap());
        assert_eq!(found.last(), Some(&(Jmp, 0x1008)), "{found:x?}");
        assert_eq!(found[found.len() - 2], (Jne, 0x1000), "{found:x?}");
    }
}
