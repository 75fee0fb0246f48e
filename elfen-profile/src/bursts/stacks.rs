//! Call stacks: which blocks ran under which callers.
//!
//! The callers where a burst begins come from its copy of the stack. From there on calls and
//! returns of its way tell them.

use elfen_stream::{BlockId, Cache, Exit, Indirect, Translated};
use rustc_hash::FxHashMap;

use super::unwind::{CallSite, Depth};
use super::walk::Step;
use crate::engine::objects::Places;
use crate::profile::{
    Caller, FIRST_CALLER, NO_CALLER, Profile, StackCount, StackEnd, UNKNOWN_CALLER,
};

/// More stacks than a program has, unless it recurses without end.
const CALLERS_MAX: usize = 1 << 20;
/// A return leaves fewer frames than this at once.
const LEFT_MAX: usize = 1000;

#[derive(Clone, Copy, Debug)]
struct Node {
    caller: u32,
    call: CallSite,
}

/// How many times a block ran under some callers, and in how many bursts.
#[derive(Clone, Copy, Default, Debug)]
struct Times {
    count: u64,
    bursts: u64,
}

#[derive(Debug)]
pub(super) struct Stacks {
    /// From number [`FIRST_CALLER`] on, each behind its caller.
    nodes: Vec<Node>,
    numbers: FxHashMap<(u32, CallSite), u32>,
    times: FxHashMap<(u32, BlockId), Times>,
    /// In the current burst.
    seen: FxHashMap<(u32, BlockId), u32>,
    at: u32,
}

impl Default for Stacks {
    fn default() -> Self {
        Self {
            nodes: Vec::new(),
            numbers: FxHashMap::default(),
            times: FxHashMap::default(),
            seen: FxHashMap::default(),
            at: UNKNOWN_CALLER,
        }
    }
}

impl Stacks {
    /// Begins a burst under some calls, from the innermost.
    pub(super) fn begin(&mut self, calls: &[CallSite], depth: Depth) {
        self.at = match depth {
            Depth::Whole => NO_CALLER,
            Depth::Cut => UNKNOWN_CALLER,
        };
        for &call in calls.iter().rev() {
            self.push(call);
        }
    }

    pub(super) fn step(&mut self, cache: &Cache, step: Step) {
        let block = |id: BlockId| cache.blocks().get(usize::try_from(id).ok()?);
        match step {
            Step::Block(id) | Step::Part(id, _) => {
                *self.seen.entry((self.at, id)).or_default() += 1;
            }
            Step::Falls(_) => {}
            Step::Direct(id) => {
                if let Some(one) = block(id)
                    && let Exit::Call { .. } = one.exit
                {
                    self.push(call_of(one));
                }
            }
            Step::Computed(id, target) => match block(id).map(|one| (one, one.exit)) {
                Some((one, Exit::Indirect(Indirect::Call))) => self.push(call_of(one)),
                Some((_, Exit::Indirect(Indirect::Return { .. }))) => self.pop(target),
                _ => {}
            },
            Step::Returned(call) => {
                if let Some(call) = block(call) {
                    self.pop(call.end);
                }
            }
            Step::ReturnedTo(target) => self.pop(target),
        }
    }

    /// Ends the burst. What it has seen is only kept if its way was found.
    pub(super) fn end(&mut self, is_found: bool) {
        for (key, times) in self.seen.drain() {
            if is_found {
                let known = self.times.entry(key).or_default();
                known.count += u64::from(times);
                known.bursts += 1;
            }
        }
    }

    fn push(&mut self, call: CallSite) {
        let key = (self.at, call);
        if let Some(&known) = self.numbers.get(&key) {
            self.at = known;
        } else if self.nodes.len() < CALLERS_MAX
            && let Ok(number) = u32::try_from(self.nodes.len())
        {
            let number = FIRST_CALLER + number;
            self.nodes.push(Node { caller: self.at, call });
            self.numbers.insert(key, number);
            self.at = number;
        }
    }

    /// Returns to an address: out of several functions, if one has jumped.
    fn pop(&mut self, returns_to: u64) {
        let mut at = self.at;
        for _ in 0..LEFT_MAX {
            let Some(node) = node(&self.nodes, at) else { break };
            at = node.caller;
            if node.call.returns_to == returns_to {
                self.at = at;
                return;
            }
        }
        self.at = UNKNOWN_CALLER;
    }

    /// Adds all stacks to a profile.
    pub(super) fn add_to(&self, profile: &mut Profile, places: &Places<'_>, blocks: &[Translated]) {
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

fn call_of(block: &Translated) -> CallSite {
    CallSite { returns_to: block.end, image: block.object }
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
        stacks.begin(&[call(0x20), call(0x10)], Depth::Whole);
        let inner = stacks.at;
        stacks.push(call(0x30));
        stacks.pop(0x30);
        assert_eq!(stacks.at, inner);
        // longjmp(3), or a return that the burst did not see.
        stacks.push(call(0x30));
        stacks.pop(0x10);
        assert_eq!(stacks.at, NO_CALLER);
        stacks.pop(0x50);
        assert_eq!(stacks.at, UNKNOWN_CALLER);
    }

    #[test]
    fn the_same_callers_have_one_number() {
        let mut stacks = Stacks::default();
        stacks.begin(&[call(0x20), call(0x10)], Depth::Whole);
        let first = stacks.at;
        stacks.begin(&[call(0x10)], Depth::Whole);
        stacks.push(call(0x20));
        assert_eq!((stacks.at, stacks.nodes.len()), (first, 2));
        stacks.begin(&[call(0x20), call(0x10)], Depth::Cut);
        assert_ne!(stacks.at, first);
    }

    /// Goal: what a burst has seen is lost if its way was not found.
    #[test]
    fn bursts_that_were_not_found_are_not_counted() {
        let mut stacks = Stacks::default();
        for is_found in [true, false, true] {
            stacks.begin(&[call(0x10)], Depth::Whole);
            let key = (stacks.at, 7);
            stacks.seen.insert(key, 3);
            stacks.end(is_found);
        }
        let times = stacks.times.values().next().unwrap();
        assert_eq!((times.count, times.bursts), (6, 2));
    }
}
