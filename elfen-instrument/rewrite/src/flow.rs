//! Control flow within a function: what can run after each instruction.

use core::ops::Range;

use iced_x86::{FlowControl, Instruction, OpKind};

/// Why a function was rejected.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DecodeError {
    #[error("it is empty, or longer than a mebibyte")]
    Length,
    #[error("the bytes at {0:#x} are not an instruction")]
    NoInstruction(u64),
    #[error("it branches to {0:#x}, which is inside an instruction")]
    TargetInside(u64),
    #[error("a thread was interrupted at {0:#x}, where no instruction begins")]
    SampleInside(u64),
    #[error("it uses hardware transactions")]
    Transactions,
}

/// What can run after an instruction. Several of these can hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Next {
    /// The instruction after it.
    pub(crate) falls: bool,
    /// The instruction that it branches to, by its index.
    pub(crate) goes_to: Option<usize>,
    /// Code outside of the function, by a jump or past its end. Calls and returns do not count.
    pub(crate) leaves: bool,
    /// Code at an unknown address, because the instruction computes its target.
    pub(crate) is_unknown: bool,
}

impl Next {
    /// The indices of the instructions that can follow instruction `index`.
    pub(crate) fn indices(&self, index: usize, count: usize) -> impl Iterator<Item = usize> {
        let behind = (self.falls && index + 1 < count).then_some(index + 1);
        behind.into_iter().chain(self.goes_to)
    }
}

/// The target of a direct branch.
pub(crate) fn target(instruction: &Instruction) -> Option<u64> {
    let is_near = instruction.op_count() > 0 && instruction.op0_kind() == OpKind::NearBranch64;
    is_near.then(|| instruction.near_branch_target())
}

pub(crate) fn next(code: &[Instruction], inside: Range<u64>) -> Result<Vec<Next>, DecodeError> {
    code.iter()
        .enumerate()
        .map(|(index, instruction)| next_of(code, index, instruction, &inside))
        .collect()
}

fn next_of(
    code: &[Instruction],
    index: usize,
    instruction: &Instruction,
    inside: &Range<u64>,
) -> Result<Next, DecodeError> {
    let last = index + 1 == code.len();
    let falls = Next { falls: true, leaves: last, ..Next::default() };
    let goes = |falls: bool| -> Result<Next, DecodeError> {
        let target = target(instruction).ok_or(DecodeError::NoInstruction(instruction.ip()))?;
        let leaves = !inside.contains(&target) || falls && last;
        let goes_to = if inside.contains(&target) {
            let found = code.binary_search_by_key(&target, Instruction::ip);
            Some(found.map_err(|_| DecodeError::TargetInside(target))?)
        } else {
            None
        };
        Ok(Next { falls, goes_to, leaves, is_unknown: false })
    };
    match instruction.flow_control() {
        FlowControl::Next | FlowControl::IndirectCall => Ok(falls),
        FlowControl::Call => {
            // The target of a call into this function must be an instruction too. A system call has
            // no target.
            target(instruction).map_or(Ok(falls), |_| goes(false).map(|_| falls))
        }
        FlowControl::UnconditionalBranch => goes(false),
        FlowControl::ConditionalBranch => goes(true),
        FlowControl::IndirectBranch => Ok(Next { is_unknown: true, ..Next::default() }),
        FlowControl::Return | FlowControl::Interrupt | FlowControl::Exception => {
            Ok(Next::default())
        }
        FlowControl::XbeginXabortXend => Err(DecodeError::Transactions),
    }
}

/// Whether a direct jump leaves the function.
pub(crate) fn jumps_out(code: &[Instruction], inside: &Range<u64>) -> bool {
    let is_jump = |one: &&Instruction| {
        matches!(
            one.flow_control(),
            FlowControl::UnconditionalBranch | FlowControl::ConditionalBranch
        )
    };
    code.iter().filter(is_jump).filter_map(target).any(|to| !inside.contains(&to))
}

/// The addresses that direct branches, calls and address computations refer to, in order.
pub(crate) fn targets(code: &[Instruction]) -> Vec<u64> {
    let named = code.iter().flat_map(|instruction| {
        let computed = instruction.is_ip_rel_memory_operand();
        let computed = computed.then(|| instruction.ip_rel_memory_address());
        [target(instruction), computed].into_iter().flatten()
    });
    let mut targets: Vec<u64> = named.collect();
    targets.sort_unstable();
    targets.dedup();
    targets
}

/// Which instructions can be reached from the first one and from the sampled one.
pub(crate) fn reached(next: &[Next], sampled: Option<usize>) -> Vec<bool> {
    let mut reached = vec![false; next.len()];
    let mut open: Vec<usize> = core::iter::once(0).chain(sampled).collect();
    while let Some(index) = open.pop() {
        if !std::mem::replace(&mut reached[index], true) {
            open.extend(next[index].indices(index, next.len()));
        }
    }
    reached
}
