//! What runs after what in a function.

use core::ops::Range;

use iced_x86::{FlowControl, Instruction, OpKind};

/// Why a function is left alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DecodeError {
    #[error("it has no bytes, or more than a mebibyte")]
    Length,
    #[error("its bytes at {0:#x} are no instruction")]
    NoInstruction(u64),
    #[error("it goes to {0:#x}, which is inside of an instruction")]
    TargetInside(u64),
    #[error("it was interrupted at {0:#x}, which is not where an instruction begins")]
    SampleInside(u64),
    #[error("it has transactions")]
    Transactions,
}

/// What runs after an instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Next {
    /// The one behind it.
    pub(crate) falls: bool,
    /// The one that it goes to, by its number.
    pub(crate) goes_to: Option<usize>,
    /// Something outside of the function, as it goes there itself: not a call, not a return.
    pub(crate) leaves: bool,
    /// Nobody knows: it computes where it goes.
    pub(crate) is_unknown: bool,
}

impl Next {
    /// The numbers of what follows instruction `index`.
    pub(crate) fn indices(&self, index: usize, count: usize) -> impl Iterator<Item = usize> {
        let behind = (self.falls && index + 1 < count).then_some(index + 1);
        behind.into_iter().chain(self.goes_to)
    }
}

/// Where a direct branch goes to.
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
        let goes_to = match inside.contains(&target) {
            false => None,
            true => Some(
                code.binary_search_by_key(&target, Instruction::ip)
                    .map_err(|_| DecodeError::TargetInside(target))?,
            ),
        };
        Ok(Next { falls, goes_to, leaves, is_unknown: false })
    };
    match instruction.flow_control() {
        FlowControl::Next | FlowControl::IndirectCall => Ok(falls),
        FlowControl::Call => {
            // A call into this very function must meet an instruction as well. A system call has
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

/// Whether a direct jump goes elsewhere than into the function.
pub(crate) fn jumps_out(code: &[Instruction], inside: &Range<u64>) -> bool {
    let is_jump = |one: &&Instruction| {
        matches!(
            one.flow_control(),
            FlowControl::UnconditionalBranch | FlowControl::ConditionalBranch
        )
    };
    code.iter().filter(is_jump).filter_map(target).any(|to| !inside.contains(&to))
}

/// The addresses that direct branches, calls and address computations name, in order.
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

/// What is reached from the first instruction, and from the one that was interrupted.
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
