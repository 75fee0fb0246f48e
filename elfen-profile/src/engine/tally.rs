//! What the bursts of one process have shown.
//!
//! Bursts begin at random points of CPU time, and have the same number of events. So code is seen
//! as often as it runs, if the program executes about as many branches per time everywhere. The
//! time of a burst does not tell: most of it goes to cold caches.

use elfen_stream::counts::EdgeKind;
use elfen_stream::{BlockId, Cache, Exit, Indirect, Translated};
use rustc_hash::FxHashMap;

use super::callers::{Stacks, Times};
use super::objects::{Objects, Places};
use super::paths::{OnPath, Paths};
use super::rule_tally::RuleTally;
use super::shares::Shares;
use super::streams::{Finder, References};
use super::unwind::{CallSite, Depth, StackCopy, Unwinder};
use super::values::Values;
use super::walk::{Burst, Lost, Step, Ways};
use crate::profile::{BlockCount, Edge, EdgeCount, Profile, What};

/// How often each step was gone in one burst. Most steps have a number.
#[derive(Debug, Default)]
struct Seen {
    numbered: Vec<u64>,
    touched: Vec<usize>,
    others: FxHashMap<Step, u64>,
}

/// Steps of a block that have a number.
const NUMBERED: usize = 4;

impl Seen {
    fn add(&mut self, step: Step) {
        let (block, kind) = match step {
            Step::Block(block) => (block, 0),
            Step::Falls(block) => (block, 1),
            Step::Direct(block) => (block, 2),
            Step::Returned(_, block) => (block, 3),
            Step::ReturnedTo(..) => return,
            Step::Part(..) | Step::Computed(..) => {
                *self.others.entry(step).or_default() += 1;
                return;
            }
        };
        let Ok(number) = usize::try_from(block).map(|block| block * NUMBERED + kind) else {
            return;
        };
        if number >= self.numbered.len() {
            self.numbered.resize(number + NUMBERED, 0);
        }
        if self.numbered[number] == 0 {
            self.touched.push(number);
        }
        self.numbered[number] += 1;
    }

    /// How often blocks ran.
    fn blocks(&self) -> impl Iterator<Item = (BlockId, u64)> + Clone {
        self.touched.iter().filter_map(|&number| {
            let id = BlockId::try_from(number / NUMBERED).ok();
            id.filter(|_| number % NUMBERED == 0).map(|id| (id, self.numbered[number]))
        })
    }

    /// All steps, which are forgotten.
    fn take(&mut self, mut each: impl FnMut(Step, u64)) {
        for number in self.touched.drain(..) {
            let times = std::mem::take(&mut self.numbered[number]);
            let Ok(block) = BlockId::try_from(number / NUMBERED) else { continue };
            let step = match number % NUMBERED {
                0 => Step::Block(block),
                1 => Step::Falls(block),
                2 => Step::Direct(block),
                // Which block has returned does not matter for the edge.
                _ => Step::Returned(block, block),
            };
            each(step, times);
        }
        for (step, times) in self.others.drain() {
            each(step, times);
        }
    }
}

/// Where a thread is: under which callers, and on which path.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct OnWay {
    /// `None` if stacks are not recorded, or this one could not be copied.
    pub(crate) caller: Option<u32>,
    pub(crate) path: OnPath,
}

#[derive(Debug, Default)]
pub(crate) struct Tally {
    what: What,
    /// What belongs together comes in several pieces: all of a program, or a shadow.
    has_pieces: bool,
    steps: FxHashMap<Step, Times>,
    ways: Ways,
    stacks: Stacks,
    unwinder: Unwinder,
    paths: Paths,
    rules: RuleTally,
    values: Values,
    /// Of paths, or of blocks without paths, if their error is wanted.
    shares: Option<Shares>,
    references: References,
    streams: Finder,
    /// The thread whose references were added last.
    thread: Option<u32>,
    calls: Vec<CallSite>,
    /// Addresses where bursts could not begin or go on.
    unknown: Vec<u64>,
    /// In the last burst.
    seen: Seen,
    pub(crate) bursts: u64,
    /// Bursts that nothing could be made of.
    pub(crate) lost: u64,
    /// Instructions of all ways, with the whole block for a part of it.
    pub(crate) instructions: u64,
}

impl Tally {
    /// `has_errors` says whether the errors of shares are wanted.
    pub(crate) fn new(what: What, has_errors: bool) -> Self {
        let shares = has_errors.then(Shares::default);
        Self { what, shares, rules: RuleTally::new(what.rules), ..Self::default() }
    }

    /// For a whole program, or for shadows, instead of bursts.
    pub(crate) fn of_pieces(what: What, has_errors: bool) -> Self {
        Self { has_pieces: true, ..Self::new(what, has_errors) }
    }

    /// For a program that is counted as a whole.
    pub(crate) fn of_everything(what: What) -> Self {
        let mut tally = Self::of_pieces(what, false);
        tally.rules.count_episodes();
        tally
    }

    pub(crate) fn needs_addresses(&self) -> bool {
        self.what.needs_addresses()
    }

    /// All pieces of a shadow have been added.
    pub(crate) fn end_shadow(&mut self, cache: &Cache) {
        self.add_shares(cache);
        self.end(true, 1);
        self.bursts += 1;
    }

    /// Adds what the last burst or shadow has seen.
    fn add_shares(&mut self, cache: &Cache) {
        let Some(shares) = &mut self.shares else { return };
        if self.what.paths {
            shares.add(self.paths.seen());
            return;
        }
        let blocks = cache.blocks();
        shares.add(self.seen.blocks().filter_map(|(id, times)| {
            let block = blocks.get(usize::try_from(id).ok()?)?;
            Some((id, times * u64::from(block.instructions)))
        }));
    }

    /// Notes that no code is translated at an address.
    pub(crate) fn note_unknown(&mut self, at: u64) {
        self.unknown.push(at);
    }

    /// Notes that the program has loaded or unloaded libraries.
    pub(crate) fn note_change(&mut self) {
        self.unwinder.forget_foreign();
    }

    pub(crate) fn take_unknown(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.unknown)
    }

    /// Adds a burst that may have had `given` events.
    pub(crate) fn add_burst(
        &mut self,
        cache: &Cache,
        objects: &mut Objects,
        burst: &Burst,
        given: u32,
    ) {
        let mut on = self.begin(objects, &burst.stack);
        if self.add(cache, burst, &mut on).is_err() {
            self.lost += 1;
            return;
        }
        if burst.events.len() < usize::try_from(given).unwrap_or(0) {
            self.unknown.push(burst.left_at);
        }
        self.bursts += 1;
    }

    /// Where a thread is that comes from elsewhere, by its stack.
    pub(crate) fn begin(&mut self, objects: &mut Objects, stack: &StackCopy) -> OnWay {
        let mut on = OnWay::default();
        if self.what.stacks && !stack.bytes.is_empty() {
            on.caller = Some(self.callers(objects, stack).0);
        }
        on
    }

    /// The callers of a stack, and whether all of them were found.
    pub(crate) fn callers(&mut self, objects: &mut Objects, stack: &StackCopy) -> (u32, Depth) {
        self.calls.clear();
        let depth = self.unwinder.callers(objects, stack, &mut self.calls);
        (self.stacks.number(&self.calls, depth), depth)
    }

    /// Goes the way of a burst.
    pub(crate) fn add(&mut self, cache: &Cache, burst: &Burst, on: &mut OnWay) -> Result<(), Lost> {
        if self.what.needs_addresses() {
            self.begin_references(burst);
        }
        let Self { what, seen, stacks, paths, values, rules, instructions, .. } = self;
        let Self { references, streams, .. } = self;
        let mut results = &burst.results[..];
        let mut addresses = &burst.addresses[..];
        let needs_addresses = what.needs_addresses();
        let walked = self.ways.walk(cache, burst, |step, block, to| {
            seen.add(step);
            if let Step::Block(_) | Step::Part(..) = step {
                *instructions += u64::from(block.instructions);
            }
            if let Some(caller) = &mut on.caller {
                stacks.step(step, block, to, caller);
            }
            if what.paths {
                paths.step(step, block, &mut on.path);
            }
            match step {
                Step::Block(id) | Step::Part(id, _)
                    if needs_addresses && let Some(one) = cache.block(id) =>
                {
                    let (used, regions) = references.take(id, one, to, &mut addresses);
                    if what.streams {
                        for one in used {
                            streams.add(one, regions);
                            if what.stream_burst > 0 {
                                streams.cut_at(what.stream_burst);
                            }
                        }
                    }
                    rules.step(cache, step, block, to, used, regions);
                }
                _ => rules.step(cache, step, block, to, &[], &mut references.regions),
            }
            if what.values
                && let Step::Block(id) = step
                && let Some(translated) = cache.block(id)
            {
                values.step(id, &translated.results, &mut results);
            }
        });
        if walked.is_err() {
            *on = OnWay::default();
            self.thread = None;
        }
        // What was found of a piece has run, so it can wait for the end.
        if !self.has_pieces {
            if walked.is_ok() {
                self.add_shares(cache);
            }
            self.end(walked.is_ok(), 1);
        }
        walked
    }

    /// References of another thread do not go on from those before, nor do those of another burst.
    fn begin_references(&mut self, burst: &Burst) {
        self.references.regions.begin(burst.process);
        let is_another = self.thread.replace(burst.thread) != Some(burst.thread);
        if is_another || !self.has_pieces {
            self.streams.cut();
            self.rules.cut_streams();
        }
    }

    /// Adds what was seen since the last call to the sums, if its way was found.
    fn end(&mut self, is_found: bool, bursts: u64) {
        self.stacks.end(is_found, bursts);
        self.paths.end(is_found, bursts);
        self.rules.end(is_found, bursts);
        self.values.end(bursts);
        if self.what.streams && bursts > 0 {
            self.streams.end_unit();
        }
        let steps = &mut self.steps;
        self.seen.take(|step, times| {
            if is_found {
                let known = steps.entry(step).or_default();
                known.count += times;
                known.bursts += bursts;
            }
        });
    }

    /// Adds what was seen to a profile.
    pub(crate) fn add_to(&mut self, profile: &mut Profile, cache: &Cache, objects: &Objects) {
        self.end(true, 0);
        let places = Places::new(profile, objects);
        let blocks = cache.blocks();
        let block = |id: BlockId| blocks.get(usize::try_from(id).ok()?);
        self.stacks.add_to(profile, &places, blocks);
        self.paths.add_to(profile, &places, blocks);
        self.rules.add_to(profile, &places, blocks, &self.references);
        self.values.add_to(profile, &places, blocks);
        if self.what.streams {
            profile.references = profile.references.saturating_add(self.streams.references());
            self.streams.add_to(None, profile, &places, &self.references);
        }
        for (&step, &Times { count, bursts }) in &self.steps {
            let part = match step {
                Step::Block(id) => block(id).map(|one| (one, one.start)),
                Step::Part(id, from) => block(id).map(|one| (one, from)),
                _ => None,
            };
            if let Some((one, from)) = part {
                let Some(start) = places.of(one, from) else { continue };
                let before = |&&offset: &&u16| one.start + u64::from(offset) < from;
                let before = one.offsets.iter().filter(before).count();
                let instructions = one.instructions - u32::try_from(before).unwrap_or(0);
                let bytes = u32::try_from(one.end - from).unwrap_or(0);
                profile.instructions += count * u64::from(instructions);
                profile.add_block(start, BlockCount { bytes, instructions, count, bursts });
                continue;
            }
            let Some((from, to, kind)) = edge_of(step, block) else { continue };
            let last = from.start + from.offsets.last().map_or(0, |&offset| offset.into());
            if let (Some(from), Some(to)) = (places.of(from, last), places.target(from, to)) {
                profile.add_edge(Edge { from, to, kind }, EdgeCount { count, bursts });
            }
        }
        for (left, what) in [(self.stacks.left, "calls"), (self.paths.left, "paths")] {
            if left > 0 {
                profile
                    .left
                    .push(format!("{left} {what}, because there are too many different ones"));
            }
        }
        profile.bursts += self.bursts;
        profile.programs += 1;
    }
}

/// Whether the share of each path, or of each block without paths, is known with this relative
/// error in all processes.
pub(crate) fn are_known<'a>(tallies: impl Iterator<Item = &'a Tally>, error: f64) -> bool {
    let mut errors = tallies.map(|tally| tally.shares.as_ref().and_then(Shares::error)).peekable();
    errors.peek().is_some() && errors.all(|one| one.is_some_and(|one| one <= error))
}

fn edge_of<'a>(
    step: Step,
    block: impl Fn(BlockId) -> Option<&'a Translated>,
) -> Option<(&'a Translated, u64, EdgeKind)> {
    Some(match step {
        Step::Block(_) | Step::Part(..) | Step::ReturnedTo(..) => return None,
        Step::Falls(id) => {
            let one = block(id)?;
            (one, one.end, EdgeKind::Falls)
        }
        Step::Direct(id) => {
            let one = block(id)?;
            match one.exit {
                Exit::Jump { to } => (one, to, EdgeKind::Jump),
                Exit::Branch { to } => (one, to, EdgeKind::Taken),
                Exit::Call { to } => (one, to, EdgeKind::Call),
                _ => return None,
            }
        }
        Step::Computed(id, target) => {
            let one = block(id)?;
            let kind = match one.exit {
                Exit::Indirect(Indirect::Jump) => EdgeKind::ComputedJump,
                Exit::Indirect(Indirect::Call) => EdgeKind::ComputedCall,
                _ => EdgeKind::ReturnFar,
            };
            (one, target, kind)
        }
        Step::Returned(_, id) => {
            let one = block(id)?;
            (one, one.end, EdgeKind::Return)
        }
    })
}
