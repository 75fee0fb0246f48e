//! Where a jump can be written over instructions, and why that is safe.
//!
//! A jump takes five bytes. All threads that run the replaced code, now or later, must behave as
//! before. So no thread may stand inside these bytes, no branch may enter them, and the moved
//! instructions must do the same at another address. Each [`Tactic`] states what guarantees this.

use core::ops::Range;

use iced_x86::{FlowControl, Instruction, InstructionInfoFactory, Mnemonic};

use crate::code::{Function, JUMP_BYTES};
use crate::effects::may_fault;
use crate::flow::{Next, target};
use crate::hotspot::HotSpot;
use crate::loops::{self, Loop};

/// What makes a site safe, the safest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Tactic {
    /// One instruction as long as the jump, which cannot fault and before which the flags are dead.
    /// No thread can stand inside, and no signal handler can observe the moved instruction's
    /// address.
    One,
    /// Several instructions. No thread stands inside, no branch enters them, and no signal frame
    /// hides a thread's position.
    Several,
    /// One instruction that may fault, in a program that does not inspect the address of a fault.
    Memory,
    /// An instruction before which the flags are live. The check saves and restores them.
    Flags,
}

/// What a program permits, as far as it is known. [`Tactic::One`] is always permitted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Permitted<'a> {
    /// The program has no signal handler, and no branch from elsewhere enters the function's
    /// middle. The writer ensures that no thread stands inside the replaced instructions.
    pub several: bool,
    /// The program handles none of SIGSEGV, SIGBUS and SIGFPE.
    pub memory: bool,
    pub flags: bool,
    /// Addresses to which the rest of the object refers, in order: relocations, tables, landing
    /// pads.
    pub named: &'a [u64],
    /// Set for a function that HotSpot compiled at run time.
    pub hotspot: Option<HotSpot>,
}

/// Instructions that a jump can replace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PatchSite {
    pub at: u64,
    /// How many bytes of code are replaced.
    pub bytes: usize,
    pub tactic: Tactic,
    pub(crate) moved: Range<usize>,
    pub(crate) saves_flags: bool,
}

impl PatchSite {
    /// Whether a thread can stand inside the replaced instructions.
    pub fn is_several(&self) -> bool {
        self.moved.len() > 1
    }
}

impl Function {
    /// The safest site that every round of a loop runs; the first of equally safe ones.
    pub fn site_in_loop(&self, around: &Loop, permitted: &Permitted<'_>) -> Option<PatchSite> {
        let inside = around.indices(self)?;
        let on_every_round = |index: usize| loops::is_on_every_round(self, around, index);
        self.safest(inside, permitted, on_every_round)
    }

    /// The safest site that every call of the function runs.
    pub fn site_at_entry(&self, permitted: &Permitted<'_>) -> Option<PatchSite> {
        let straight = |next: &Next| next.falls && next.goes_to.is_none();
        let before_branch = self.next.iter().take_while(|next| straight(next)).count();
        let entry = 0..(before_branch + 1).min(self.code.len());
        self.safest(entry, permitted, |_| true)
    }

    /// All sites of the function, with any tactic.
    pub fn sites(&self, permitted: &Permitted<'_>) -> impl Iterator<Item = PatchSite> {
        (0..self.code.len()).filter_map(|index| self.site_at(index, permitted))
    }

    fn safest(
        &self,
        range: Range<usize>,
        permitted: &Permitted<'_>,
        fits: impl Fn(usize) -> bool,
    ) -> Option<PatchSite> {
        let mut found: Vec<PatchSite> =
            range.filter_map(|index| self.site_at(index, permitted)).collect();
        // The sort is stable: the first of equally safe sites comes first.
        found.sort_by_key(|site| site.tactic);
        found.into_iter().find(|site| fits(site.moved.start))
    }

    /// The site that begins with instruction `index`, if it is one.
    fn site_at(&self, index: usize, permitted: &Permitted<'_>) -> Option<PatchSite> {
        let moved = self.covered_by_jump(index)?;
        let code = self.code.get(moved.clone())?;
        let (at, end) = (code.first()?.ip(), code.last()?.next_ip());
        let is_certain = moved.clone().all(|index| self.reached[index]);
        let saves_flags = self.flags_live[index];
        let faults = moved.clone().any(|index| self.may_fault(index, permitted));
        let tactic = match (saves_flags, faults, code.len()) {
            (true, ..) => Tactic::Flags,
            (_, true, _) => Tactic::Memory,
            (_, _, 1) => Tactic::One,
            _ => Tactic::Several,
        };
        let is_permitted = (code.len() == 1
            || permitted.several && !self.jumps_anywhere && !self.jumps_out)
            && (!faults || permitted.memory)
            && (!saves_flags || permitted.flags);
        let inside = at + 1..end;
        let is_named = self.refers_into(&inside) || any_inside(permitted.named, &inside);
        let bytes = usize::try_from(end - at).ok()?;
        // A jump to itself would loop inside its trampoline without running the check again.
        let jumps_to_itself = code.len() == 1 && target(&code[0]) == Some(at);
        let stays = |instruction: &Instruction| {
            permitted.hotspot.is_some_and(|hotspot| !hotspot.may_move(self, instruction))
        };
        let is_safe =
            is_certain && is_permitted && !is_named && !jumps_to_itself && !code.iter().any(stays);
        is_safe.then_some(PatchSite { at, bytes, tactic, moved, saves_flags })
    }

    /// Whether instruction `index` may raise a fault.
    fn may_fault(&self, index: usize, permitted: &Permitted<'_>) -> bool {
        let cannot_fault = |hotspot: HotSpot| {
            !may_fault(&mut InstructionInfoFactory::new(), &self.code[index], |memory| {
                hotspot.cannot_fault(memory)
            })
        };
        self.faults[index] && !permitted.hotspot.is_some_and(cannot_fault)
    }

    /// The fewest instructions from `index` on that make room for the jump. Only the last may
    /// branch.
    fn covered_by_jump(&self, index: usize) -> Option<Range<usize>> {
        let mut bytes = 0;
        for end in index..self.code.len() {
            let instruction = &self.code[end];
            if !can_move(instruction) {
                return None;
            }
            bytes += instruction.len();
            if bytes >= JUMP_BYTES {
                return Some(index..end + 1);
            }
            if instruction.flow_control() != FlowControl::Next {
                return None;
            }
        }
        None
    }
}

/// Whether one of the sorted addresses lies in a range.
fn any_inside(addresses: &[u64], inside: &Range<u64>) -> bool {
    let first = addresses.partition_point(|&address| address < inside.start);
    addresses.get(first).is_some_and(|address| inside.contains(address))
}

/// Whether an instruction does the same at another address. A call does not: unwinders would see
/// another return address. System calls and repeated string instructions are restarted at their own
/// address.
pub(crate) fn can_move(instruction: &Instruction) -> bool {
    use FlowControl::{ConditionalBranch, IndirectBranch, Next, UnconditionalBranch};
    let flow = instruction.flow_control();
    let goes_on = matches!(flow, Next | UnconditionalBranch | ConditionalBranch | IndirectBranch);
    let counts = instruction.is_loop() || instruction.is_loopcc() || instruction.is_jcx_short();
    let is_string = instruction.is_string_instruction() || instruction.has_rep_prefix();
    let lands = instruction.mnemonic() == Mnemonic::Endbr64;
    goes_on && !counts && !is_string && !lands && !instruction.is_privileged()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Permitted<'static> =
        Permitted { several: true, memory: true, flags: true, named: &[], hotspot: None };

    fn function(bytes: &[u8]) -> Function {
        Function::decode(bytes, 0x1000, None).unwrap()
    }

    fn first(bytes: &[u8], permitted: &Permitted<'_>) -> Option<(u64, usize, Tactic)> {
        let site = function(bytes).sites(permitted).next()?;
        Some((site.at, site.bytes, site.tactic))
    }

    /// Goal: each tactic accepts what it states and nothing else. Method: the shortest code for
    /// each, with everything permitted, and without the one permission that it needs.
    #[test]
    fn each_tactic_needs_its_permission() {
        // mov $1,%eax; ret
        let one = [0xb8, 1, 0, 0, 0, 0xc3];
        assert_eq!(first(&one, &Permitted::default()), Some((0x1000, 5, Tactic::One)));
        // mov %edi,%eax; lea (%rsi,%rdi),%edx; ret
        let several = [0x89, 0xf8, 0x8d, 0x14, 0x3e, 0xc3];
        assert_eq!(first(&several, &ALL), Some((0x1000, 5, Tactic::Several)));
        assert_eq!(first(&several, &Permitted { several: false, ..ALL }), None);
        // movl $1,(%rdi); ret
        let memory = [0xc7, 0x07, 1, 0, 0, 0, 0xc3];
        assert_eq!(first(&memory, &ALL), Some((0x1000, 6, Tactic::Memory)));
        assert_eq!(first(&memory, &Permitted { memory: false, ..ALL }), None);
        // cmp %eax,%ecx; mov $1,%edx; je; ret
        let flags = [0x39, 0xc1, 0xba, 1, 0, 0, 0, 0x74, 0, 0xc3];
        let alone = Permitted { several: false, ..ALL };
        assert_eq!(first(&flags, &alone), Some((0x1002, 5, Tactic::Flags)));
        assert_eq!(first(&flags, &Permitted { flags: false, ..alone }), None);
    }

    #[test]
    fn accesses_to_own_memory_cannot_fault() {
        let sure: [&[u8]; 6] = [
            // mov 0x1000(%rip),%rax; movl $1,8(%rsp); mov %fs:0x28,%rax; nopw 0(%rax,%rax);
            // lea 8(%rax,%rdi,4); push $0x1000
            &[0x48, 0x8b, 0x05, 0, 0x10, 0, 0, 0xc3],
            &[0xc7, 0x44, 0x24, 8, 1, 0, 0, 0, 0xc3],
            &[0x64, 0x48, 0x8b, 0x04, 0x25, 0x28, 0, 0, 0, 0xc3],
            &[0x66, 0x0f, 0x1f, 0x44, 0, 0, 0xc3],
            &[0x48, 0x8d, 0x44, 0xb8, 8, 0xc3],
            &[0x68, 0, 0x10, 0, 0, 0xc3],
        ];
        for bytes in sure {
            let found = first(bytes, &Permitted::default()).map(|(.., tactic)| tactic);
            assert_eq!(found, Some(Tactic::One), "{bytes:x?}");
        }
        let unsure: [&[u8]; 4] = [
            // mov 0x1000(%rax),%rax; mov 0x10(%rsp,%rdi),%rax; mov
            // %fs:0x10(%rax),%rax; mov 0x1000,%eax
            &[0x48, 0x8b, 0x80, 0, 0x10, 0, 0, 0xc3],
            &[0x48, 0x8b, 0x44, 0x3c, 0x10, 0xc3],
            &[0x64, 0x48, 0x8b, 0x40, 0x10, 0xc3],
            &[0x8b, 0x04, 0x25, 0, 0x10, 0, 0, 0xc3],
        ];
        for bytes in unsure {
            assert_eq!(first(bytes, &Permitted::default()), None, "{bytes:x?}");
        }
        // idiv %ecx, padded by prefixes: a division may fault without a memory access.
        let divides = [0x2e, 0x2e, 0x2e, 0xf7, 0xf9, 0xc3];
        assert_eq!(first(&divides, &Permitted::default()), None);
        assert!(first(&divides, &ALL).is_some());
    }

    #[test]
    fn no_branch_enters_a_site() {
        // A: mov %edi,%eax; B: lea (%rsi,%rdi),%edx; jmp B
        let loops_inside = [0x89, 0xf8, 0x8d, 0x14, 0x3e, 0xeb, 0xfb, 0xc3];
        let starts: Vec<u64> = function(&loops_inside).sites(&ALL).map(|site| site.at).collect();
        assert_eq!(starts, [0x1002], "the place at A would cover B");
        // An address from a table, inside the instruction and right after it.
        let one = [0xb8, 1, 0, 0, 0, 0xc3];
        for (named, found) in [([0x1001], false), ([0x1004], false), ([0x1005], true)] {
            let permitted = Permitted { named: &named, ..ALL };
            assert_eq!(first(&one, &permitted).is_some(), found, "{named:x?}");
        }
        // jmp *%rcx may go to the second of two instructions, but not into the middle of one.
        let anywhere = [0x89, 0xf8, 0x8d, 0x14, 0x3e, 0xb8, 1, 0, 0, 0, 0xff, 0xe1];
        let found: Vec<Tactic> = function(&anywhere).sites(&ALL).map(|site| site.tactic).collect();
        assert_eq!(found, [Tactic::Flags], "flags may be live there, for all that is known");
    }

    #[test]
    fn several_instructions_stay_if_the_function_has_other_parts() {
        // mov %edi,%eax; lea (%rsi,%rdi),%edx; ret, or a jump, or a conditional one, out of it
        let ends: [(&[u8], bool); 3] = [
            (&[0xc3], true),
            (&[0xe9, 0, 1, 0, 0], false),
            (&[0x0f, 0x84, 0, 1, 0, 0, 0xc3], false),
        ];
        for (end, is_place) in ends {
            let bytes = [&[0x89, 0xf8, 0x8d, 0x14, 0x3e], end].concat();
            let found = first(&bytes, &ALL).is_some_and(|(at, ..)| at == 0x1000);
            assert_eq!(found, is_place, "{end:x?}");
        }
    }

    #[test]
    fn some_instructions_stay_where_they_are() {
        let stay: [&[u8]; 6] = [
            // call; call *0(%rip); endbr64 and a nop; rep stosq with prefixes; ud2 ...; int3 ...
            &[0xe8, 0, 1, 0, 0, 0xc3],
            &[0xff, 0x15, 0, 0, 0, 0, 0xc3],
            &[0xf3, 0x0f, 0x1e, 0xfa, 0xc3],
            &[0x2e, 0x2e, 0xf3, 0x48, 0xab, 0xc3],
            &[0x0f, 0x0b, 0xcc, 0xcc, 0xcc, 0xcc],
            &[0x0f, 0x05, 0xc3, 0xcc, 0xcc, 0xcc],
        ];
        for bytes in stay {
            assert_eq!(first(bytes, &ALL), None, "{bytes:x?}");
        }
    }

    #[test]
    fn a_jump_to_itself_is_not_a_site() {
        assert_eq!(first(&[0xe9, 0xfb, 0xff, 0xff, 0xff], &ALL), None);
        assert!(first(&[0xe9, 0xfc, 0xff, 0xff, 0x7f], &ALL).is_some());
    }

    #[test]
    fn unreachable_instructions_are_not_a_site() {
        // jmp over; mov $1,%eax (data, perhaps); over: ret
        let bytes = [0xeb, 5, 0xb8, 1, 0, 0, 0, 0xc3];
        assert_eq!(first(&bytes, &ALL), None);
        // A thread was interrupted there.
        let sampled = Function::decode(&bytes, 0x1000, Some(0x1002)).unwrap();
        assert_eq!(sampled.sites(&ALL).next().map(|site| site.at), Some(0x1002));
    }

    #[test]
    fn the_entry_site_is_before_the_first_branch() {
        // test %edi,%edi; je over; mov $1,%eax; over: ret
        let late = [0x85, 0xff, 0x74, 5, 0xb8, 1, 0, 0, 0, 0xc3];
        assert_eq!(function(&late).site_at_entry(&Permitted::default()), None);
        // endbr64; mov $1,%eax; ret
        let early = [0xf3, 0x0f, 0x1e, 0xfa, 0xb8, 1, 0, 0, 0, 0xc3];
        let site = function(&early).site_at_entry(&Permitted::default()).unwrap();
        assert_eq!(site.at, 0x1004);
    }

    #[test]
    fn the_safest_site_of_a_loop_is_chosen() {
        // A: movl $1,(%rdi); mov $1,%eax; dec %ecx; jnz A; ret
        let bytes = [0xc7, 0x07, 1, 0, 0, 0, 0xb8, 1, 0, 0, 0, 0xff, 0xc9, 0x75, 0xf1, 0xc3];
        let function = function(&bytes);
        let [one] = function.loops_around(0x1006)[..] else { panic!("a loop") };
        let site = function.site_in_loop(&one, &ALL).unwrap();
        assert_eq!((site.at, site.tactic), (0x1006, Tactic::One));
    }
}
