//! Call stacks: which blocks ran under which callers.
//!
//! The callers where a burst begins come from its copy of the stack. From there on calls and
//! returns of its way tell them.

use elfen_stream::{BlockId, Exit, Indirect, Translated};
use rustc_hash::FxHashMap;

use super::objects::Places;
use super::unwind::{CallSite, Depth};
use super::walk::{Node as Block, Step};
use crate::profile::{
    Caller, FIRST_CALLER, NO_CALLER, Profile, StackCount, StackEnd, UNKNOWN_CALLER,
};

/// Programs that recurse in several ways have more.
const CALLERS_MAX: usize = 1 << 20;
/// A return leaves fewer frames than this at once.
const LEFT_MAX: usize = 1000;

#[derive(Clone, Copy, Debug)]
struct Node {
    caller: u32,
    call: CallSite,
}

/// How often something was seen, and in how many bursts.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Times {
    pub(super) count: u64,
    pub(super) bursts: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Stacks {
    /// From number [`FIRST_CALLER`] on, each behind its caller.
    nodes: Vec<Node>,
    numbers: FxHashMap<(u32, CallSite), u32>,
    times: FxHashMap<(u32, BlockId), Times>,
    /// In the current burst, and where in that list a block under a caller is.
    seen: Vec<Seen>,
    seen_at: FxHashMap<(u32, BlockId), u32>,
    /// For each block its last caller, and where in the list that is.
    last: Vec<(u32, u32)>,
    /// Calls that were one more than fit.
    pub(crate) left: u64,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    caller: u32,
    block: BlockId,
    times: u64,
}

impl Stacks {
    /// The number of the innermost of some calls.
    pub(crate) fn number(&mut self, calls: &[CallSite], depth: Depth) -> u32 {
        let outermost = match depth {
            Depth::Whole => NO_CALLER,
            Depth::Cut => UNKNOWN_CALLER,
        };
        calls.iter().rev().fold(outermost, |caller, &call| self.push(caller, call))
    }

    /// Follows a thread that is under some calls.
    pub(crate) fn step(&mut self, step: Step, block: &Block, to: u64, at: &mut u32) {
        let call = || CallSite { returns_to: block.end, image: block.object };
        match (step, block.exit) {
            (Step::Block(id) | Step::Part(id, _), _) => self.count(*at, id),
            (Step::Direct(_), Exit::Call { .. })
            | (Step::Computed(..), Exit::Indirect(Indirect::Call)) => *at = self.push(*at, call()),
            (Step::Computed(..), Exit::Indirect(Indirect::Return { .. }))
            | (Step::Returned(..) | Step::ReturnedTo(..), _) => *at = self.pop(*at, to),
            (Step::Falls(_) | Step::Direct(_) | Step::Computed(..), _) => {}
        }
    }

    fn count(&mut self, caller: u32, block: BlockId) {
        let Ok(number) = usize::try_from(block) else { return };
        if number >= self.last.len() {
            self.last.resize(number + 1, (UNKNOWN_CALLER, u32::MAX));
        }
        let last = &mut self.last[number];
        let known = usize::try_from(last.1).ok().filter(|_| last.0 == caller);
        if let Some(seen) = known.and_then(|known| self.seen.get_mut(known))
            && (seen.caller, seen.block) == (caller, block)
        {
            seen.times += 1;
            return;
        }
        let seen = &mut self.seen;
        let index = *self.seen_at.entry((caller, block)).or_insert_with(|| {
            seen.push(Seen { caller, block, times: 0 });
            u32::try_from(seen.len() - 1).unwrap_or(u32::MAX)
        });
        *last = (caller, index);
        if let Some(seen) = usize::try_from(index).ok().and_then(|index| seen.get_mut(index)) {
            seen.times += 1;
        }
    }

    /// Ends some bursts. What they have seen is only kept if their way was found.
    pub(crate) fn end(&mut self, is_found: bool, bursts: u64) {
        for Seen { caller, block, times } in self.seen.drain(..) {
            if is_found {
                let known = self.times.entry((caller, block)).or_default();
                known.count += times;
                known.bursts += bursts;
            }
        }
        self.seen_at.clear();
    }

    fn push(&mut self, caller: u32, call: CallSite) -> u32 {
        if let Some(&known) = self.numbers.get(&(caller, call)) {
            return known;
        }
        let number = u32::try_from(self.nodes.len()).ok();
        let Some(number) = number.filter(|_| self.nodes.len() < CALLERS_MAX) else {
            self.left += 1;
            return UNKNOWN_CALLER;
        };
        let number = FIRST_CALLER + number;
        self.nodes.push(Node { caller, call });
        self.numbers.insert((caller, call), number);
        number
    }

    /// Returns to an address: out of several functions, if one has jumped.
    fn pop(&self, mut at: u32, returns_to: u64) -> u32 {
        for _ in 0..LEFT_MAX {
            let Some(node) = node(&self.nodes, at) else { break };
            at = node.caller;
            if node.call.returns_to == returns_to {
                return at;
            }
        }
        UNKNOWN_CALLER
    }

    /// Adds all stacks to a profile.
    pub(crate) fn add_to(&self, profile: &mut Profile, places: &Places<'_>, blocks: &[Translated]) {
        let mut known: FxHashMap<Caller, u32> = (FIRST_CALLER..)
            .zip(&profile.callers)
            .map(|(number, caller)| (*caller, number))
            .collect();
        // The numbers of the nodes in the profile.
        let mut numbers: Vec<u32> = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            let caller = numbers_of(&numbers, node.caller);
            let Some(call) = places.in_image(node.call.image, node.call.returns_to - 1) else {
                numbers.push(caller);
                continue;
            };
            let next = Caller { caller, call };
            let number = *known.entry(next).or_insert_with(|| {
                profile.callers.push(next);
                FIRST_CALLER + u32::try_from(profile.callers.len() - 1).unwrap_or(u32::MAX)
            });
            numbers.push(number);
        }
        for (&(caller, id), times) in &self.times {
            let one = usize::try_from(id).ok().and_then(|id| blocks.get(id));
            let Some(one) = one else { continue };
            let Some(block) = places.of(one, one.start) else { continue };
            let end = StackEnd { caller: numbers_of(&numbers, caller), block };
            let known = profile.stacks.entry(end).or_default();
            let instructions = times.count.saturating_mul(one.instructions.into());
            *known = StackCount {
                instructions: known.instructions.saturating_add(instructions),
                bursts: known.bursts + times.bursts,
            };
        }
    }
}

fn numbers_of(numbers: &[u32], node: u32) -> u32 {
    let index = node.checked_sub(FIRST_CALLER).and_then(|index| usize::try_from(index).ok());
    index.and_then(|index| numbers.get(index)).copied().unwrap_or(node)
}

fn node(nodes: &[Node], number: u32) -> Option<&Node> {
    nodes.get(usize::try_from(number.checked_sub(FIRST_CALLER)?).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(returns_to: u64) -> CallSite {
        CallSite { returns_to, image: 0 }
    }

    #[test]
    fn a_return_leaves_the_function_that_was_called() {
        let mut stacks = Stacks::default();
        let inner = stacks.number(&[call(0x20), call(0x10)], Depth::Whole);
        let called = stacks.push(inner, call(0x30));
        assert_eq!(stacks.pop(called, 0x30), inner);
        // longjmp(3), or a return that the burst did not see.
        assert_eq!(stacks.pop(called, 0x10), NO_CALLER);
        assert_eq!(stacks.pop(called, 0x50), UNKNOWN_CALLER);
    }

    #[test]
    fn the_same_callers_have_one_number() {
        let mut stacks = Stacks::default();
        let first = stacks.number(&[call(0x20), call(0x10)], Depth::Whole);
        let outer = stacks.number(&[call(0x10)], Depth::Whole);
        assert_eq!((stacks.push(outer, call(0x20)), stacks.nodes.len()), (first, 2));
        assert_ne!(stacks.number(&[call(0x20), call(0x10)], Depth::Cut), first);
    }

    /// Goal: what a burst has seen is lost if its way was not found.
    #[test]
    fn bursts_that_were_not_found_are_not_counted() {
        let mut stacks = Stacks::default();
        for is_found in [true, false, true] {
            for _ in 0..3 {
                stacks.count(NO_CALLER, 7);
            }
            stacks.end(is_found, 1);
        }
        let times = stacks.times.values().next().unwrap();
        assert_eq!((times.count, times.bursts), (6, 2));
    }
}
