//! The way of a thread through the program during one burst, from the events that it has left.
//!
//! Events tell which counted edges were taken. Between two of them the way is certain: an edge that
//! has no number is taken if its turn comes, and each cycle has one with a number.

use elfen_stream::{BlockId, Cache, Counted, Exit, Indirect};

use super::unwind::StackCopy;

/// A burst, as its thread has left it.
#[derive(Debug, Default)]
pub(crate) struct Burst {
    /// Where it began and where it ended, in the program.
    pub(crate) began_at: u64,
    /// No code was translated there, so it has not begun.
    pub(crate) is_missed: bool,
    pub(crate) left_at: u64,
    /// Where it ended is not known, because its thread was killed.
    pub(crate) is_cut: bool,
    /// In their order: the complement of the number of a counter, or an address.
    pub(crate) events: Vec<u64>,
    /// The results of the instructions, if they were noted.
    pub(crate) results: Vec<u64>,
    /// The addresses that they have used, if these were noted, and the process that has them.
    pub(crate) addresses: Vec<u64>,
    pub(crate) process: u32,
    /// Distinguishes the threads of a process.
    pub(crate) thread: u32,
    /// From beginning to end, by the time stamp counter.
    pub(crate) ticks: u64,
    pub(crate) stack: StackCopy,
    /// The stack pointer where it began.
    pub(crate) stack_at: u64,
}

/// One piece of the way.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Step {
    /// A block ran.
    Block(BlockId),
    /// A block ran from an instruction inside on.
    Part(BlockId, u64),
    /// A block went on at its end.
    Falls(BlockId),
    /// A block went to the target of its branch.
    Direct(BlockId),
    Computed(BlockId, u64),
    /// The first block has returned from the call of the second.
    Returned(BlockId, BlockId),
    /// A block has returned to an address, from a call of which no block is known.
    ReturnedTo(BlockId, u64),
}

/// The events do not fit the code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Lost;

/// More blocks than there can be between two events.
const BLOCKS_MAX: u32 = 100_000;
const UNKNOWN: BlockId = BlockId::MAX;

/// A block, and what follows it, as far as a burst has been there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Node {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// Its last instruction.
    pub(crate) last: u64,
    pub(crate) exit: Exit,
    pub(crate) object: u32,
    pub(crate) instructions: u32,
    falls_to: BlockId,
    branches_to: BlockId,
    /// Where its computed branch went to at last.
    computed_to: (u64, BlockId),
}

/// The blocks of a cache and how they follow each other.
#[derive(Debug, Default)]
pub(crate) struct Ways {
    nodes: Vec<Node>,
    /// [`Cache::removals`] when they were found.
    removals: u64,
}

impl Ways {
    fn node(&self, id: BlockId) -> Result<&Node, Lost> {
        self.nodes.get(usize::try_from(id).map_err(|_| Lost)?).ok_or(Lost)
    }

    fn extend(&mut self, cache: &Cache) {
        if self.removals != cache.removals() {
            self.nodes.clear();
            self.removals = cache.removals();
        }
        let known = self.nodes.len();
        self.nodes.extend(cache.blocks().iter().skip(known).map(|one| Node {
            start: one.start,
            end: one.end,
            last: one.start + one.offsets.last().map_or(0, |&offset| offset.into()),
            exit: one.exit,
            object: one.object,
            instructions: one.instructions,
            falls_to: UNKNOWN,
            branches_to: UNKNOWN,
            computed_to: (0, UNKNOWN),
        }));
    }

    /// The block at the end of another one.
    fn after(&mut self, cache: &Cache, id: BlockId) -> Option<BlockId> {
        let node = self.nodes.get_mut(usize::try_from(id).ok()?)?;
        if node.falls_to == UNKNOWN {
            node.falls_to = cache.block_with(node.end).unwrap_or(UNKNOWN);
        }
        (node.falls_to != UNKNOWN).then_some(node.falls_to)
    }

    /// The block that the branch of another one leads to.
    fn target(&mut self, cache: &Cache, id: BlockId, to: u64) -> Option<BlockId> {
        let node = self.nodes.get_mut(usize::try_from(id).ok()?)?;
        if node.branches_to == UNKNOWN {
            node.branches_to = cache.block_with(to).unwrap_or(UNKNOWN);
        }
        (node.branches_to != UNKNOWN).then_some(node.branches_to)
    }

    /// The block that the computed branch of another one leads to.
    fn computed(&mut self, cache: &Cache, id: BlockId, to: u64) -> Option<BlockId> {
        let node = self.nodes.get_mut(usize::try_from(id).ok()?)?;
        if node.computed_to.0 != to || node.computed_to.1 == UNKNOWN {
            node.computed_to = (to, cache.block_with(to).unwrap_or(UNKNOWN));
        }
        (node.computed_to.1 != UNKNOWN).then_some(node.computed_to.1)
    }

    /// Goes the way of a burst. Calls `visit` with each step, the block that it is in, and the
    /// address that it leads to.
    pub(crate) fn walk(
        &mut self,
        cache: &Cache,
        burst: &Burst,
        mut visit: impl FnMut(Step, &Node, u64),
    ) -> Result<(), Lost> {
        self.extend(cache);
        let mut events = burst.events.iter().copied().peekable();
        let (mut at, mut next) = (burst.began_at, cache.block_with(burst.began_at));
        let mut left = BLOCKS_MAX;
        loop {
            if events.peek().is_none() && (burst.is_cut || at == burst.left_at) {
                return Ok(());
            }
            let id = next.ok_or(Lost)?;
            let node = *self.node(id)?;
            let Node { start, end, last, exit, .. } = node;
            visit(if at == start { Step::Block(id) } else { Step::Part(id, at) }, &node, at);
            if events.peek().is_none() && (at..=last).contains(&burst.left_at) {
                // It left inside: by a fault, or in front of a system call, which goes on behind.
                if burst.left_at == last && exit == Exit::Syscall {
                    visit(Step::Falls(id), &node, end);
                }
                return Ok(());
            }
            left = left.checked_sub(1).ok_or(Lost)?;
            let direct = match exit {
                Exit::Branch { to } => Some((to, true)),
                // Without a number if they go forward.
                Exit::Jump { to } | Exit::Call { to } => Some((to, to <= last)),
                _ => None,
            };
            (at, next) = match (direct, exit) {
                (Some((to, has_number)), _) => {
                    let is_taken = match events.peek().and_then(|&event| counted(cache, event)) {
                        _ if !has_number => true,
                        Some(Counted::Direct { block }) => {
                            block == id || self.node(block)?.last == last
                        }
                        _ => false,
                    };
                    if is_taken && has_number {
                        events.next();
                        left = BLOCKS_MAX;
                    }
                    match (is_taken, exit) {
                        (true, _) => {
                            visit(Step::Direct(id), &node, to);
                            (to, self.target(cache, id, to))
                        }
                        (false, Exit::Branch { .. }) => {
                            visit(Step::Falls(id), &node, end);
                            (end, self.after(cache, id))
                        }
                        (false, _) => return Err(Lost),
                    }
                }
                (None, Exit::Indirect(kind)) => {
                    left = BLOCKS_MAX;
                    let event = events.next();
                    let (target, call) = match event.map(|event| (event, counted(cache, event))) {
                        // It left the cache where it went to.
                        None => (burst.left_at, cache.call_before(burst.left_at)),
                        Some((_, Some(Counted::Computed { target, .. }))) => (target, None),
                        Some((_, Some(Counted::Returned { block }))) => {
                            at = self.node(block)?.end;
                            visit(Step::Returned(id, block), &node, at);
                            next = self.after(cache, block);
                            continue;
                        }
                        Some((_, Some(Counted::Direct { .. }))) => return Err(Lost),
                        Some((address, None)) => (address, cache.call_before(address)),
                    };
                    match (kind, call) {
                        (Indirect::Return { pops: 0 }, Some(call)) => {
                            visit(Step::Returned(id, call), &node, target);
                        }
                        (Indirect::Return { pops: 0 }, None) => {
                            visit(Step::ReturnedTo(id, target), &node, target);
                        }
                        _ => visit(Step::Computed(id, target), &node, target),
                    }
                    (target, self.computed(cache, id, target))
                }
                (None, _) => {
                    visit(Step::Falls(id), &node, end);
                    (end, self.after(cache, id))
                }
            };
        }
    }
}

fn counted(cache: &Cache, event: u64) -> Option<Counted> {
    // The complement of a number is negative; an address is not.
    let number = usize::try_from(!event).ok().filter(|_| event.cast_signed() < 0)?;
    cache.counters().get(number).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use elfen_stream::{Cluster, CodeMemory, Source};

    /// A loop of `dec %edi; jne`, a call of it, and a system call.
    const CODE: &[u8] = &[
        0xff, 0xcf, 0x75, 0xfc, 0xc3, // 0x1000: dec %edi; jne 0x1000; ret
        0x90, 0x90, 0x90, // padding
        0xe8, 0xf3, 0xff, 0xff, 0xff, // 0x1008: call 0x1000
        0x89, 0xc7, 0x0f, 0x05, 0xc3, // 0x100d: mov %eax,%edi; syscall; ret
    ];
    const START: u64 = 0x1000;

    struct Code;

    impl Source for Code {
        fn code(&mut self, at: u64) -> Option<(u32, &[u8])> {
            Some((0, CODE.get(usize::try_from(at.checked_sub(START)?).ok()?..)?))
        }
    }

    struct Unwritten;

    impl CodeMemory for Unwritten {
        fn write(&mut self, _: u64, _: &[u8]) {}
    }

    fn cache() -> Cache {
        let mut cache = Cache::for_bursts(0x10_0000, 20);
        let cluster = Cluster { hot: 0x200_0000..0x210_0000, cold: 0x210_0000..0x220_0000 };
        cache.add_cluster(cluster, 0x10_0000, &mut Unwritten).unwrap();
        cache.translate(0x1008, &mut Code, &mut Unwritten).unwrap();
        cache.publish(&mut Unwritten).unwrap();
        cache
    }

    /// The event of a counter.
    fn event(cache: &Cache, of: impl Fn(&Counted) -> bool) -> u64 {
        !(cache.counters().iter().position(of).unwrap() as u64)
    }

    fn steps(cache: &Cache, burst: &Burst) -> Result<Vec<Step>, Lost> {
        let mut steps = Vec::new();
        Ways::default().walk(cache, burst, |step, _, _| steps.push(step))?;
        Ok(steps)
    }

    #[test]
    fn the_way_of_a_loop_a_return_and_a_system_call_is_found() {
        let cache = cache();
        let [call, body, after] = [0x1008, 0x1000, 0x100d].map(|at| cache.block_at(at).unwrap());
        let back = event(&cache, |one| matches!(one, Counted::Direct { block } if *block == body));
        let entry = event(&cache, |one| matches!(one, Counted::Direct { block } if *block == call));
        let returned = event(&cache, |one| matches!(one, Counted::Returned { .. }));
        let ret = cache.block_at(0x1004).unwrap();
        let burst = Burst {
            began_at: 0x1008,
            left_at: 0x100f,
            events: vec![entry, back, back, returned],
            ..Burst::default()
        };
        let expected = [
            Step::Block(call),
            Step::Direct(call),
            Step::Block(body),
            Step::Direct(body),
            Step::Block(body),
            Step::Direct(body),
            Step::Block(body),
            Step::Falls(body),
            Step::Block(ret),
            Step::Returned(ret, call),
            Step::Block(after),
            Step::Falls(after),
        ];
        assert_eq!(steps(&cache, &burst), Ok(expected.to_vec()));
        // In the middle of a block, and to the last event.
        let part =
            Burst { began_at: 0x1002, left_at: START, events: vec![back], ..Burst::default() };
        assert_eq!(steps(&cache, &part), Ok(vec![Step::Part(body, 0x1002), Step::Direct(body)]));
        // A fault at the second instruction.
        let fault = Burst { began_at: START, left_at: 0x1002, ..Burst::default() };
        assert_eq!(steps(&cache, &fault), Ok(vec![Step::Block(body)]));
    }

    #[test]
    fn events_that_do_not_fit_are_refused() {
        let cache = cache();
        let returned = event(&cache, |one| matches!(one, Counted::Returned { .. }));
        for (began_at, events) in [
            (0x1008, vec![returned]),
            (0x5000, Vec::new()),
            (0x1004, vec![0x7777]),
            (0x1004, vec![u64::MAX - 999]),
        ] {
            let burst = Burst { began_at, left_at: 0x9999, events, ..Burst::default() };
            assert_eq!(steps(&cache, &burst), Err(Lost), "{began_at:#x}");
        }
    }
}
