//! Paths: which blocks run one after the other.
//!
//! A path begins where a backward edge or a system call leads to, and ends with the next one. It
//! goes on through calls and returns. So it is what runs once in a loop, and may be in several
//! functions.

use elfen_stream::{BlockId, Exit, Translated};
use rustc_hash::FxHashMap;

use super::objects::Places;
use super::walk::{Node as Block, Step};
use crate::profile::{FIRST_PATH_BLOCK, NO_PATH_BLOCK, PathBlock, PathCount, Profile};

/// A longer path ends here.
const BLOCKS_MAX: u32 = 64;
/// More than the paths of a large program have.
const NODES_MAX: usize = 1 << 22;

/// A block behind others.
#[derive(Clone, Copy, Debug)]
struct Node {
    before: u32,
    block: BlockId,
}

/// Where a thread is on its path.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OnPath {
    /// The path so far; [`NO_PATH_BLOCK`] in front of its first block.
    at: u32,
    blocks: u32,
    instructions: u64,
    /// Its beginning was seen, so it is counted.
    is_whole: bool,
    /// How the next block is reached.
    next: Next,
}

#[derive(Clone, Copy, Default, Debug)]
enum Next {
    /// Without a branch: the block is a part of the one before.
    #[default]
    Falls,
    /// By a branch that was not taken.
    Passes,
    /// By a branch at an address of an object.
    Taken { from: u64, object: u32 },
    /// A system call ended the path.
    Begins,
}

#[derive(Debug, Default)]
pub(crate) struct Paths {
    /// From number [`FIRST_PATH_BLOCK`] on, each behind the one before it.
    nodes: Vec<Node>,
    numbers: FxHashMap<(u32, BlockId), u32>,
    counts: FxHashMap<u32, PathCount>,
    /// For each block the last one before it on a path, and their number.
    last: Vec<(u32, u32)>,
    /// In the current burst: times and instructions, by the number of the path's last block.
    seen: Vec<(u64, u64)>,
    touched: Vec<u32>,
    /// Paths that were one more than fit.
    pub(crate) left: u64,
}

impl Paths {
    pub(crate) fn step(&mut self, step: Step, block: &Block, on: &mut OnPath) {
        let taken = Next::Taken { from: block.last, object: block.object };
        match step {
            Step::Block(id) => self.reach(id, block, on),
            Step::Part(..) => *on = OnPath::default(),
            Step::Falls(_) => {
                on.next = match block.exit {
                    Exit::Branch { .. } => Next::Passes,
                    Exit::Syscall => Next::Begins,
                    _ => Next::Falls,
                };
            }
            Step::Direct(_) | Step::Computed(..) | Step::Returned(..) | Step::ReturnedTo(..) => {
                on.next = taken;
            }
        }
    }

    fn reach(&mut self, id: BlockId, one: &Block, on: &mut OnPath) {
        let ends = match on.next {
            Next::Falls => {
                on.instructions += u64::from(one.instructions);
                return;
            }
            Next::Begins => true,
            Next::Passes => on.blocks >= BLOCKS_MAX,
            Next::Taken { from, object } => {
                on.blocks >= BLOCKS_MAX || object == one.object && one.start <= from
            }
        };
        if ends {
            if on.is_whole && on.at != NO_PATH_BLOCK {
                self.count(on.at, on.instructions);
            }
            *on = OnPath { is_whole: true, ..OnPath::default() };
        }
        on.instructions += u64::from(one.instructions);
        on.blocks += 1;
        if on.is_whole {
            match self.append(on.at, id) {
                Some(at) => on.at = at,
                None => {
                    on.is_whole = false;
                    self.left += 1;
                }
            }
        }
    }

    fn count(&mut self, path: u32, instructions: u64) {
        let Ok(index) = usize::try_from(path) else { return };
        if index >= self.seen.len() {
            self.seen.resize(self.nodes.len() + 1, (0, 0));
        }
        if let Some(seen) = self.seen.get_mut(index) {
            if seen.0 == 0 {
                self.touched.push(path);
            }
            seen.0 += 1;
            seen.1 += instructions;
        }
    }

    fn append(&mut self, before: u32, block: BlockId) -> Option<u32> {
        let index = usize::try_from(block).ok()?;
        if index >= self.last.len() {
            self.last.resize(index + 1, (u32::MAX, NO_PATH_BLOCK));
        }
        let (last_before, last) = self.last[index];
        if last_before == before {
            return Some(last);
        }
        if let Some(&known) = self.numbers.get(&(before, block)) {
            self.last[index] = (before, known);
            return Some(known);
        }
        if self.nodes.len() >= NODES_MAX {
            return None;
        }
        let number = FIRST_PATH_BLOCK + u32::try_from(self.nodes.len()).ok()?;
        self.nodes.push(Node { before, block });
        self.numbers.insert((before, block), number);
        Some(number)
    }

    /// The instructions on each path since the last end.
    pub(crate) fn seen(&self) -> impl Iterator<Item = (u32, u64)> + Clone {
        self.touched.iter().filter_map(|&path| {
            let (_, instructions) = self.seen.get(usize::try_from(path).ok()?)?;
            Some((path, *instructions))
        })
    }

    /// Ends some bursts. What they have seen is only kept if their way was found.
    pub(crate) fn end(&mut self, is_found: bool, bursts: u64) {
        for path in self.touched.drain(..) {
            let seen = usize::try_from(path).ok().and_then(|path| self.seen.get_mut(path));
            let (times, instructions) = seen.map(std::mem::take).unwrap_or_default();
            if is_found {
                let known = self.counts.entry(path).or_default();
                known.count += times;
                known.instructions += instructions;
                known.bursts += bursts;
            }
        }
    }

    /// Adds all paths to a profile.
    pub(crate) fn add_to(&self, profile: &mut Profile, places: &Places<'_>, blocks: &[Translated]) {
        let mut known: FxHashMap<PathBlock, u32> = (FIRST_PATH_BLOCK..)
            .zip(&profile.path_blocks)
            .map(|(number, block)| (*block, number))
            .collect();
        // The numbers of the nodes in the profile; `None` behind a block without a place.
        let mut numbers: Vec<Option<u32>> = Vec::with_capacity(self.nodes.len());
        let number_of = |numbers: &[Option<u32>], node: u32| match node {
            NO_PATH_BLOCK => Some(NO_PATH_BLOCK),
            node => *numbers.get(usize::try_from(node - FIRST_PATH_BLOCK).ok()?)?,
        };
        for node in &self.nodes {
            let one = usize::try_from(node.block).ok().and_then(|id| blocks.get(id));
            let block = one.and_then(|one| places.of(one, one.start));
            let before = number_of(&numbers, node.before);
            numbers.push(before.zip(block).map(|(before, block)| {
                let next = PathBlock { before, block };
                *known.entry(next).or_insert_with(|| {
                    profile.path_blocks.push(next);
                    u32::try_from(profile.path_blocks.len()).unwrap_or(u32::MAX)
                })
            }));
        }
        for (&node, count) in &self.counts {
            let Some(path) = number_of(&numbers, node) else { continue };
            let sum = profile.paths.entry(path).or_default();
            sum.count = sum.count.saturating_add(count.count);
            sum.instructions = sum.instructions.saturating_add(count.instructions);
            sum.bursts += count.bursts;
        }
    }
}
