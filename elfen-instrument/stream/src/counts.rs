//! The counts of all edges and blocks, from the counted edges.
//!
//! Not counted is where a block goes on at its end, and jumps and calls to higher addresses. So
//! each cycle of the program has a counted edge, and in the order of addresses the count of each
//! block follows from those before it: it is the sum of the edges that lead to it.

use std::collections::HashMap;

use crate::block::{Exit, Indirect};
use crate::cache::{BlockId, Cache, Counted, Translated};

/// What a host has counted, by counters and by itself.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// Values of the counters, summed over threads.
    pub counters: Vec<u64>,
    /// Computed branches that no counter counts.
    pub computed: HashMap<ComputedBranch, u64>,
    /// Returns that no counter counts, by the address that they went to.
    pub returned: HashMap<u64, u64>,
    /// How often threads came to a block from outside the cache.
    pub entries: HashMap<BlockId, u64>,
    /// How often threads left a block in front of the instruction at an address, or at its end.
    pub left: HashMap<BlockId, HashMap<u64, u64>>,
}

/// A computed branch that has run.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ComputedBranch {
    pub from: BlockId,
    pub to: u64,
    /// The block at that address at that time.
    pub block: Option<BlockId>,
}

/// The kinds of edges.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum EdgeKind {
    /// On to the next instruction: of a conditional branch, or of a system call.
    Falls,
    Jump,
    Taken,
    Call,
    ComputedJump,
    ComputedCall,
    /// From a call to the instruction after it, to which it has returned.
    Return,
    /// A return that removes arguments, from itself.
    ReturnFar,
}

/// An edge that ran at least once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Edge {
    pub from: BlockId,
    pub to: u64,
    /// The block that it led to, if it may be in another object.
    pub block: Option<BlockId>,
    pub kind: EdgeKind,
    pub count: u64,
}

/// Exact counts of a run.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// How often each block began.
    pub blocks: Vec<u64>,
    /// How often each block ran to its end.
    pub ends: Vec<u64>,
    pub edges: Vec<Edge>,
    pub instructions: u64,
}

/// Derives all counts of a cache.
pub fn derive(cache: &Cache, observed: &Observed) -> Counts {
    let blocks = cache.blocks();
    let by_start = by_start(blocks);
    let target = |from: &Translated, to: u64| {
        let found = by_start.get(&to)?;
        let same = found
            .iter()
            .rev()
            .find(|&&id| block(blocks, id).is_some_and(|one| one.object == from.object));
        same.or(found.last()).copied()
    };
    let mut counts =
        Counts { blocks: vec![0; blocks.len()], ends: vec![0; blocks.len()], ..Counts::default() };
    let mut direct: HashMap<BlockId, u64> = HashMap::new();
    let mut computed = observed.computed.clone();
    let mut returned: HashMap<BlockId, u64> = HashMap::new();
    for (counted, &count) in cache.counters().iter().zip(&observed.counters) {
        match *counted {
            Counted::Direct { block } => *direct.entry(block).or_default() += count,
            Counted::Returned { block } => *returned.entry(block).or_default() += count,
            Counted::Computed { block: from, target: to } => {
                let block = cache.block_at(to);
                *computed.entry(ComputedBranch { from, to, block }).or_default() += count;
            }
        }
    }
    computed.retain(|_, count| *count > 0);
    // Everything that was counted comes first; what follows from it, in the order of addresses.
    let add = |counts: &mut Counts, id: Option<BlockId>, count: u64| {
        if let Some(begun) = id.and_then(|id| counts.blocks.get_mut(usize::try_from(id).ok()?)) {
            *begun += count;
        }
    };
    for (&id, &count) in &observed.entries {
        add(&mut counts, Some(id), count);
    }
    let calls = calls_by_end(blocks);
    for (&to, &count) in &observed.returned {
        match calls.get(&to) {
            Some(&call) => *returned.entry(call).or_default() += count,
            None => {
                add(&mut counts, by_start.get(&to).and_then(|found| found.last().copied()), count)
            }
        }
    }
    for (&from, &count) in returned.iter().filter(|&(_, &count)| count > 0) {
        let Some(one) = block(blocks, from) else { continue };
        add(&mut counts, target(one, one.end), count);
        counts.edges.push(Edge { from, to: one.end, block: None, kind: EdgeKind::Return, count });
    }
    for (&ComputedBranch { from, to, block: led_to }, &count) in &computed {
        let Some(one) = block(blocks, from) else { continue };
        add(&mut counts, led_to.or_else(|| target(one, to)), count);
        let kind = match one.exit {
            Exit::Indirect(Indirect::Jump) => EdgeKind::ComputedJump,
            Exit::Indirect(Indirect::Call) => EdgeKind::ComputedCall,
            _ => EdgeKind::ReturnFar,
        };
        counts.edges.push(Edge { from, to, block: led_to, kind, count });
    }
    for (&from, &count) in direct.iter().filter(|&(_, &count)| count > 0) {
        let Some(one) = block(blocks, from) else { continue };
        let (to, kind) = match one.exit {
            Exit::Jump { to } => (to, EdgeKind::Jump),
            Exit::Branch { to } => (to, EdgeKind::Taken),
            Exit::Call { to } => (to, EdgeKind::Call),
            _ => continue,
        };
        add(&mut counts, target(one, to), count);
        counts.edges.push(Edge { from, to, block: None, kind, count });
    }
    let mut order: Vec<usize> = (0..blocks.len()).collect();
    order.sort_by_key(|&index| blocks[index].start);
    for index in order {
        let one = &blocks[index];
        let Ok(from) = BlockId::try_from(index) else { break };
        let left = observed.left.get(&from);
        let leaves: u64 = left.map_or(0, |left| left.values().sum());
        let begun = counts.blocks[index];
        let ends = begun.saturating_sub(leaves);
        counts.ends[index] = ends;
        counts.instructions += u64::from(one.instructions) * begun;
        for (&at, &count) in left.into_iter().flatten() {
            let done = one.offsets.iter().filter(|&&offset| one.start + u64::from(offset) < at);
            let undone = one.offsets.len() - done.count();
            counts.instructions = counts.instructions.saturating_sub(undone as u64 * count);
        }
        let counted = direct.get(&from).copied().unwrap_or(0);
        let is_counted = cache.is_counted(from);
        let (to, kind, count) = match one.exit {
            Exit::Falls | Exit::Native | Exit::Syscall => (one.end, EdgeKind::Falls, ends),
            Exit::Branch { .. } => (one.end, EdgeKind::Falls, ends.saturating_sub(counted)),
            Exit::Jump { to } if !is_counted => (to, EdgeKind::Jump, ends),
            Exit::Call { to } if !is_counted => (to, EdgeKind::Call, ends),
            Exit::Jump { .. } | Exit::Call { .. } | Exit::Indirect(_) => continue,
        };
        if count > 0 {
            add(&mut counts, target(one, to), count);
            counts.edges.push(Edge { from, to, block: None, kind, count });
        }
    }
    counts
}

fn block(blocks: &[Translated], id: BlockId) -> Option<&Translated> {
    blocks.get(usize::try_from(id).ok()?)
}

fn by_start(blocks: &[Translated]) -> HashMap<u64, Vec<BlockId>> {
    let mut found: HashMap<u64, Vec<BlockId>> = HashMap::new();
    for (id, one) in (0..).zip(blocks) {
        found.entry(one.start).or_default().push(id);
    }
    found
}

/// The last block with a call by where the call returns to.
fn calls_by_end(blocks: &[Translated]) -> HashMap<u64, BlockId> {
    let is_call =
        |one: &Translated| matches!(one.exit, Exit::Call { .. } | Exit::Indirect(Indirect::Call));
    let calls = (0..).zip(blocks).filter(|(_, one)| is_call(one));
    calls.map(|(id, one)| (one.end, id)).collect()
}
