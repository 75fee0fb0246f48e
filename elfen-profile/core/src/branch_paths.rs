//! Which path led to an instruction, from the directions of the branches before it (section 5.3).
//!
//! The control flow that ran is searched backwards from a sample. Three schemes are compared, as in
//! Figure 6: the most frequent block at each merge; all paths that fit the branch history; and
//! those of them that hold the other instruction of a pair. Only a path that is the single one, and
//! the true one, is a success.
//!
//! At a call that has returned, the search goes on in the callee, and leaves it by the same call.
//! Within a function, a path ends where the function begins. Through calls, it goes on in the
//! callers.

use std::collections::{HashMap, HashSet};

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::instruction::Branch;
use crate::sample::to_float;
use crate::trace::{Block, BlockNumber, Trace};

/// Steps of one search, after which it has failed.
const STEPS_MAX: u32 = 5_000;
/// Blocks of one path.
const PATH_MAX: usize = 400;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Inside,
    Call,
    Return,
}

/// An edge to a block, as seen from its end.
#[derive(Clone, Copy, Debug)]
struct Edge {
    from: BlockNumber,
    kind: Kind,
    /// The direction, if it is a conditional branch.
    taken: Option<bool>,
    /// How often the block that it comes from runs.
    count: u64,
}

/// The control flow of a trace, backwards.
#[derive(Debug)]
pub struct PathGraph {
    trace: Trace,
    /// Edges that lead to each block, first from the block that runs most often.
    before: Vec<Vec<Edge>>,
    ends: Vec<u64>,
}

/// The same way through blocks that do not overlap: a recorded block may begin inside of another
/// one, and both would count as different paths.
fn split(trace: &Trace) -> Trace {
    let starts: HashSet<u64> = trace.blocks.iter().map(|block| block.start).collect();
    let mut found = Trace { instructions: trace.instructions.clone(), ..Trace::default() };
    let mut numbers: HashMap<(u64, u64), BlockNumber> = HashMap::new();
    let mut parts: Vec<Vec<BlockNumber>> = Vec::with_capacity(trace.blocks.len());
    for block in &trace.blocks {
        let mut own = Vec::new();
        let (mut start, mut first) = (block.start, block.instructions.start);
        let mut at = block.start;
        for (number, one) in block.instructions.clone().zip(trace.code(block)) {
            at += u64::from(one.length);
            let is_last = number + 1 == block.instructions.end;
            if !is_last && !starts.contains(&at) {
                continue;
            }
            let known = *numbers.entry((start, at)).or_insert_with(|| {
                let target = block.target.filter(|_| is_last);
                let instructions = first..number + 1;
                found.blocks.push(Block { start, place: None, instructions, target });
                BlockNumber::try_from(found.blocks.len() - 1).unwrap_or(BlockNumber::MAX)
            });
            own.push(known);
            (start, first) = (at, number + 1);
        }
        parts.push(own);
    }
    let parts = trace.runs.iter().filter_map(|&run| parts.get(run as usize));
    found.runs = parts.flatten().copied().collect();
    found
}

/// How a path is chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scheme {
    Counts,
    History,
    HistoryAndPair,
}

impl Scheme {
    pub const ALL: [Self; 3] = [Self::Counts, Self::History, Self::HistoryAndPair];
}

/// What is known at a sample.
#[derive(Clone, Copy, Debug)]
struct Query<'a> {
    /// Directions of the branches before it, the last one first.
    history: &'a [bool],
    goes_through_calls: bool,
    /// Another instruction, and how many instructions before it.
    other: Option<(u64, u64)>,
}

/// The paths that were found.
#[derive(Debug, Default)]
struct Found {
    first: Option<Vec<BlockNumber>>,
    is_single: bool,
    steps: u32,
}

impl Found {
    fn add(&mut self, path: &[BlockNumber]) {
        self.is_single = self.first.is_none();
        if self.is_single {
            self.first = Some(path.to_vec());
        }
    }

    /// Nothing that is still to come changes the result.
    fn is_decided(&self) -> bool {
        self.steps > STEPS_MAX || self.first.is_some() && !self.is_single
    }
}

/// Shares of samples whose path was found, by scheme.
#[derive(Clone, Copy, PartialEq, Debug, serde::Serialize)]
pub struct PathAccuracy {
    /// Conditional branches of the path.
    pub length: usize,
    pub within_functions: [f64; 3],
    pub through_calls: [f64; 3],
}

impl PathGraph {
    pub fn new(trace: &Trace) -> Self {
        let trace = split(trace);
        let mut counts = vec![0; trace.blocks.len()];
        for &block in &trace.runs {
            if let Some(count) = counts.get_mut(block as usize) {
                *count += 1;
            }
        }
        let edges: HashSet<(BlockNumber, BlockNumber)> =
            trace.runs.windows(2).map(|pair| (pair[0], pair[1])).collect();
        let ends: Vec<u64> = trace.blocks.iter().map(|block| trace.end(block)).collect();
        let before = vec![Vec::new(); trace.blocks.len()];
        let mut graph = Self { trace, before, ends };
        for (from, to) in edges {
            let count = counts.get(from as usize).copied().unwrap_or(0);
            let edge = graph.edge(from, to, count);
            if let (Some(edge), Some(before)) = (edge, graph.before.get_mut(to as usize)) {
                before.push(edge);
            }
        }
        for before in &mut graph.before {
            before.sort_by_key(|edge| (std::cmp::Reverse(edge.count), edge.from));
        }
        graph
    }

    fn edge(&self, from: BlockNumber, to: BlockNumber, count: u64) -> Option<Edge> {
        let block = self.trace.block(from)?;
        let start = self.trace.block(to)?.start;
        let branch = self.trace.code(block).last()?.class.branch();
        let kind = match branch {
            Some(Branch::Call | Branch::ComputedCall) => Kind::Call,
            Some(Branch::Return) => Kind::Return,
            _ => Kind::Inside,
        };
        let is_target = Some(start) == block.target && start != *self.ends.get(from as usize)?;
        let taken = (branch == Some(Branch::Conditional)).then_some(is_target);
        Some(Edge { from, kind, taken, count })
    }

    /// The true path to the block that ran at a position, and the directions on it.
    fn true_path(&self, run: usize, length: usize, through: bool) -> (Vec<BlockNumber>, usize) {
        let mut path = Vec::new();
        let mut branches = 0;
        let mut inside: Vec<u64> = Vec::new();
        let mut at = run;
        while let Some(&to) = self.trace.runs.get(at) {
            if path.is_empty() {
                path.push(to);
            }
            let from = at.checked_sub(1).and_then(|at| self.trace.runs.get(at));
            let Some(edge) = from.and_then(|&from| self.edge(from, to, 0)) else { break };
            if !self.pass(&edge, to, &mut inside, through) {
                break;
            }
            path.push(edge.from);
            branches += usize::from(edge.taken.is_some());
            if branches == length || path.len() > PATH_MAX {
                break;
            }
            at -= 1;
        }
        (path, branches)
    }

    /// Goes back over an edge: into a callee, or out of one by the call that it has returned to.
    /// `false` if the path cannot go there.
    fn pass(&self, edge: &Edge, to: BlockNumber, inside: &mut Vec<u64>, through: bool) -> bool {
        match edge.kind {
            Kind::Inside => true,
            Kind::Return => {
                inside.push(self.trace.block(to).map_or(0, |block| block.start));
                true
            }
            Kind::Call => match inside.last() {
                Some(&returned) if self.ends.get(edge.from as usize) == Some(&returned) => {
                    inside.pop();
                    true
                }
                Some(_) => false,
                None => through,
            },
        }
    }

    /// The path along the blocks that run most often.
    fn frequent_path(&self, from: BlockNumber, length: usize, through: bool) -> Vec<BlockNumber> {
        let mut path = vec![from];
        let mut at = from;
        let mut inside: Vec<u64> = Vec::new();
        let mut branches = 0;
        while branches < length && path.len() <= PATH_MAX {
            let edges = self.before.get(at as usize).map_or(&[][..], Vec::as_slice);
            let Some(edge) = edges.iter().find(|edge| {
                let leaves = edge.kind == Kind::Call && inside.is_empty() && !through;
                leaves || self.pass(edge, at, &mut inside.clone(), through)
            }) else {
                break;
            };
            if !self.pass(edge, at, &mut inside, through) {
                break;
            }
            branches += usize::from(edge.taken.is_some());
            path.push(edge.from);
            at = edge.from;
        }
        path
    }

    fn search(
        &self,
        path: &mut Vec<BlockNumber>,
        branches: usize,
        inside: &[u64],
        query: &Query<'_>,
        found: &mut Found,
    ) {
        found.steps += 1;
        let Some(&at) = path.last() else { return };
        if found.is_decided() || path.len() > PATH_MAX {
            return;
        }
        if branches == query.history.len() {
            if self.holds_other(path, query) {
                found.add(path);
            }
            return;
        }
        let mut ends_here = false;
        for edge in self.before.get(at as usize).map_or(&[][..], Vec::as_slice) {
            if edge.kind == Kind::Call && inside.is_empty() && !query.goes_through_calls {
                ends_here = true;
                continue;
            }
            if edge.taken.is_some_and(|taken| query.history.get(branches) != Some(&taken)) {
                continue;
            }
            let mut inside = inside.to_vec();
            if !self.pass(edge, at, &mut inside, query.goes_through_calls) {
                continue;
            }
            path.push(edge.from);
            let branches = branches + usize::from(edge.taken.is_some());
            self.search(path, branches, &inside, query, found);
            path.pop();
        }
        if ends_here && self.holds_other(path, query) {
            found.add(path);
        }
    }

    /// Whether a path holds the other instruction. One that is too short may not.
    fn holds_other(&self, path: &[BlockNumber], query: &Query<'_>) -> bool {
        let Some((other, distance)) = query.other else { return true };
        let mut length = 0;
        for &number in path.iter().skip(1) {
            let Some(block) = self.trace.block(number) else { continue };
            let end = self.ends.get(number as usize).copied().unwrap_or(0);
            if (block.start..end).contains(&other) {
                return true;
            }
            length += block.instructions.len() as u64;
        }
        length < distance
    }

    /// Whether a scheme finds the path to the block that ran at a position.
    fn finds(
        &self,
        scheme: Scheme,
        run: usize,
        history: &[bool],
        other: (u64, u64),
        through: bool,
    ) -> bool {
        let Some(&from) = self.trace.runs.get(run) else { return false };
        let (truth, _) = self.true_path(run, history.len(), through);
        if scheme == Scheme::Counts {
            return self.frequent_path(from, history.len(), through) == truth;
        }
        let other = (scheme == Scheme::HistoryAndPair).then_some(other);
        let query = Query { history, goes_through_calls: through, other };
        let mut found = Found::default();
        self.search(&mut vec![from], 0, &[], &query, &mut found);
        let is_done = found.steps <= STEPS_MAX;
        is_done && found.is_single && found.first.as_deref() == Some(&truth)
    }

    /// How often each scheme finds the path to a random instruction. The other instruction of its
    /// pair was executed 1 to `window` instructions before.
    pub fn accuracy(
        &self,
        lengths: &[usize],
        samples: u32,
        window: u64,
        seed: u64,
    ) -> Vec<PathAccuracy> {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
        let runs = self.trace.runs.len();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let mut hits = vec![[[0_u64; 3]; 2]; lengths.len()];
        let mut tried = vec![0_u64; lengths.len()];
        for _ in 0..samples {
            let run = random.random_range(0..runs.max(1));
            let distance = random.random_range(1..=window.max(1));
            let history = self.history(run, longest);
            let Some(other) = self.before_by(run, distance) else { continue };
            for (index, &length) in lengths.iter().enumerate() {
                let Some(history) = history.get(..length) else { continue };
                tried[index] += 1;
                for (through, hits) in [false, true].into_iter().zip(&mut hits[index]) {
                    for (scheme, hits) in Scheme::ALL.into_iter().zip(hits) {
                        let other = (other, distance);
                        *hits += u64::from(self.finds(scheme, run, history, other, through));
                    }
                }
            }
        }
        let share =
            |hits: [u64; 3], tried: u64| hits.map(|hits| to_float(hits) / to_float(tried.max(1)));
        lengths
            .iter()
            .zip(hits.iter().zip(&tried))
            .map(|(&length, (&[within, through], &tried))| PathAccuracy {
                length,
                within_functions: share(within, tried),
                through_calls: share(through, tried),
            })
            .collect()
    }

    /// Directions of the conditional branches before a position, the last one first.
    fn history(&self, run: usize, length: usize) -> Vec<bool> {
        let mut history = Vec::new();
        let mut at = run;
        while history.len() < length && at > 0 {
            let pair = (self.trace.runs.get(at - 1), self.trace.runs.get(at));
            if let (Some(&from), Some(&to)) = pair {
                history.extend(self.edge(from, to, 0).and_then(|edge| edge.taken));
            }
            at -= 1;
        }
        history
    }

    /// The address of the instruction that ran some instructions before a block.
    fn before_by(&self, run: usize, distance: u64) -> Option<u64> {
        let mut left = distance;
        for &number in self.trace.runs.get(..run)?.iter().rev() {
            let block = self.trace.block(number)?;
            let length = block.instructions.len() as u64;
            if left <= length {
                let skipped = usize::try_from(length - left).ok()?;
                let before = self.trace.code(block).iter().take(skipped);
                return Some(block.start + before.map(|one| u64::from(one.length)).sum::<u64>());
            }
            left -= length;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instruction::{Class, Instruction};
    use crate::trace::TraceBuilder;

    fn branch(branch: Branch) -> [Instruction; 1] {
        [Instruction::new(Class::Branch(branch))]
    }

    /// A function with two arms that meet, called from two places:
    /// 0: if (random) goto 2;  1: jmp 3;  2: fall;  3: ret.
    fn diamond(arms: &[(bool, bool)]) -> Trace {
        let mut builder = TraceBuilder::new("diamond");
        let head = builder.block(0x1000, &branch(Branch::Conditional), Some(0x1008));
        let left = builder.block(0x1004, &branch(Branch::Jump), Some(0x100c));
        let right = builder.block(0x1008, &[Instruction::new(Class::Other)], None);
        let end = builder.block(0x100c, &branch(Branch::Return), None);
        let calls =
            [0x2000, 0x2100].map(|at| builder.block(at, &branch(Branch::Call), Some(0x1000)));
        let after =
            [0x2004, 0x2104].map(|at| builder.block(at, &branch(Branch::ComputedJump), None));
        for &(first_call, taken) in arms {
            let call = usize::from(!first_call);
            for block in [calls[call], head, if taken { right } else { left }, end, after[call]] {
                builder.run(block, &[]);
            }
        }
        builder.finish().unwrap()
    }

    /// Goal: a block that begins inside of another one is a part of it.
    #[test]
    fn overlapping_blocks_are_split() {
        let mut builder = TraceBuilder::new("overlap");
        let code = [Instruction::new(Class::Other); 3];
        let whole = builder.block(0x1000, &code, None);
        let end = builder.block(0x1004, &code[1..], None);
        builder.run(whole, &[]);
        builder.run(end, &[]);
        let found = split(&builder.finish().unwrap());
        let blocks: Vec<(u64, u64)> =
            found.blocks.iter().map(|block| (block.start, found.end(block))).collect();
        assert_eq!(blocks, [(0x1000, 0x1004), (0x1004, 0x100c)]);
        assert_eq!(found.runs, [0, 1, 1]);
    }

    #[test]
    fn history_tells_the_arm_and_counts_the_more_frequent_one() {
        let trace = diamond(&[(true, true), (false, true), (true, false), (false, true)]);
        let graph = PathGraph::new(&trace);
        let other = (0, u64::MAX);
        // The return of each round.
        let finds = |scheme, round: usize, history: &[bool], through| {
            graph.finds(scheme, 5 * round + 3, history, other, through)
        };
        for round in 0..4 {
            let taken = round != 2;
            assert_eq!(finds(Scheme::Counts, round, &[taken], false), taken);
            assert!(finds(Scheme::History, round, &[taken], false));
            assert!(!finds(Scheme::History, round, &[!taken], false));
        }
        // Before that, the function begins: the path ends there. Through calls, there are two.
        assert!(finds(Scheme::History, 2, &[false, true], false));
        assert!(!finds(Scheme::History, 2, &[false, true], true));
        // The other instruction of a pair is the call.
        let found = graph.finds(Scheme::HistoryAndPair, 13, &[false, true], (0x2000, 3), true);
        assert!(found);
        // Out of the callee, the path goes by the call that it has returned to.
        let (path, _) = graph.true_path(14, 2, false);
        assert_eq!(path, [6, 3, 1, 0, 4, 7, 3, 2, 0]);
        assert!(finds(Scheme::History, 2, &[false], false));
    }

    /// A function with several diamonds, called from two places in turn at random.
    fn diamonds(count: u64, rounds: u32) -> Trace {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(5);
        let mut builder = TraceBuilder::new("diamonds");
        let start = |number: u64| 0x1000 + number * 0x10;
        let mut parts = Vec::new();
        for number in 0..count {
            let at = start(number);
            let next = Some(start(number + 1));
            let head = builder.block(at, &branch(Branch::Conditional), Some(at + 8));
            let left = builder.block(at + 4, &branch(Branch::Jump), next);
            let right = builder.block(at + 8, &branch(Branch::Jump), next);
            parts.push((head, [left, right]));
        }
        let end = builder.block(start(count), &branch(Branch::Return), None);
        // Each caller has a branch that is never taken, and then calls.
        let mut before = vec![Instruction::new(Class::Other); 20];
        before.extend(branch(Branch::Conditional));
        let callers = [0x2000, 0x2100].map(|at| builder.block(at, &before, Some(0x3000)));
        let calls =
            [0x2054, 0x2154].map(|at| builder.block(at, &branch(Branch::Call), Some(0x1000)));
        let after =
            [0x2058, 0x2158].map(|at| builder.block(at, &branch(Branch::ComputedJump), None));
        for _ in 0..rounds {
            let caller = random.random_range(0..2);
            builder.run(callers[caller], &[]);
            builder.run(calls[caller], &[]);
            for (head, arms) in &parts {
                builder.run(*head, &[]);
                builder.run(arms[usize::from(random.random_range(0..4) == 0)], &[]);
            }
            builder.run(end, &[]);
            builder.run(after[caller], &[]);
        }
        builder.finish().unwrap()
    }

    /// Goal: as in Figure 6, history finds more paths than counts, and pairs find more through
    /// calls, where two callers fit the history.
    #[test]
    fn pairs_beat_history_which_beats_counts() {
        let trace = diamonds(10, 2000);
        let graph = PathGraph::new(&trace);
        let found = graph.accuracy(&[1, 5, 9], 1000, 50, 1);
        for PathAccuracy { length, within_functions, through_calls } in found {
            let [counts, history, pair] = within_functions;
            assert!(counts + 0.05 < history, "{length} {within_functions:?}");
            assert!(history <= pair && pair > 0.8, "{length} {within_functions:?}");
            let [counts, history, pair] = through_calls;
            assert!(history <= within_functions[1], "{length} {through_calls:?}");
            assert!(counts < history && history <= pair, "{length} {through_calls:?}");
            assert!(length == 1 || history + 0.01 < pair, "{length} {through_calls:?}");
        }
    }
}
