//! What the bursts of one process have shown.
//!
//! Bursts begin at random points of CPU time, and have the same number of events. So code is seen
//! as often as it runs, if the program executes about as many branches per time everywhere. The
//! time of a burst does not tell: most of it goes to cold caches.

use std::collections::HashMap;

use elfen_stream::counts::EdgeKind;
use elfen_stream::{BlockId, Cache, Exit, Indirect, Translated};

use super::stacks::Stacks;
use super::unwind::{CallSite, Unwinder};
use super::walk::{Burst, Lost, Step, Ways};
use crate::engine::objects::{Objects, Places};
use crate::profile::{BlockCount, Edge, EdgeCount, Profile};

/// How often a step was seen, and in how many bursts.
#[derive(Clone, Copy, Default, Debug)]
struct Times {
    count: u64,
    bursts: u64,
}

/// How often each step was gone in one burst. Most steps have a number.
#[derive(Debug, Default)]
struct Seen {
    numbered: Vec<u32>,
    touched: Vec<usize>,
    others: HashMap<Step, u32>,
}

/// Steps of a block that have a number.
const NUMBERED: usize = 4;

impl Seen {
    fn add(&mut self, step: Step) {
        let (block, kind) = match step {
            Step::Block(block) => (block, 0),
            Step::Falls(block) => (block, 1),
            Step::Direct(block) => (block, 2),
            Step::Returned(block) => (block, 3),
            Step::ReturnedTo(_) => return,
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

    /// All steps, which are forgotten.
    fn take(&mut self, mut each: impl FnMut(Step, u32)) {
        for number in self.touched.drain(..) {
            let times = std::mem::take(&mut self.numbered[number]);
            let Ok(block) = BlockId::try_from(number / NUMBERED) else { continue };
            let step = match number % NUMBERED {
                0 => Step::Block(block),
                1 => Step::Falls(block),
                2 => Step::Direct(block),
                _ => Step::Returned(block),
            };
            each(step, times);
        }
        for (step, times) in self.others.drain() {
            each(step, times);
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Tally {
    steps: HashMap<Step, Times>,
    ways: Ways,
    stacks: Stacks,
    unwinder: Unwinder,
    calls: Vec<CallSite>,
    /// Addresses where bursts could not begin or go on.
    unknown: Vec<u64>,
    /// In the last burst.
    seen: Seen,
    pub(super) bursts: u64,
    /// Bursts that nothing could be made of.
    pub(super) lost: u64,
}

impl Tally {
    /// Notes that no code is translated at an address.
    pub(super) fn note_unknown(&mut self, at: u64) {
        self.unknown.push(at);
    }

    /// Notes that the program has loaded or unloaded libraries.
    pub(super) fn note_change(&mut self) {
        self.unwinder.forget_foreign();
    }

    pub(super) fn take_unknown(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.unknown)
    }

    /// Adds a burst that may have had `given` events.
    pub(super) fn add(&mut self, cache: &Cache, objects: &mut Objects, burst: &Burst, given: u32) {
        let (seen, stacks) = (&mut self.seen, &mut self.stacks);
        self.calls.clear();
        let depth = self.unwinder.callers(objects, &burst.stack, &mut self.calls);
        stacks.begin(&self.calls, depth);
        let walked = self.ways.walk(cache, burst, |step| {
            seen.add(step);
            stacks.step(cache, step);
        });
        stacks.end(walked.is_ok());
        if let Err(Lost) = walked {
            seen.take(|_, _| {});
            self.lost += 1;
            return;
        }
        if burst.events.len() < usize::try_from(given).unwrap_or(0) {
            self.unknown.push(burst.left_at);
        }
        self.bursts += 1;
        let steps = &mut self.steps;
        seen.take(|step, times| {
            let known = steps.entry(step).or_default();
            known.count += u64::from(times);
            known.bursts += 1;
        });
    }

    /// Adds what was seen to a profile.
    pub(super) fn add_to(&self, profile: &mut Profile, cache: &Cache, objects: &Objects) {
        let places = Places::new(profile, objects);
        let blocks = cache.blocks();
        let block = |id: BlockId| blocks.get(usize::try_from(id).ok()?);
        self.stacks.add_to(profile, &places, blocks);
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
        profile.bursts += self.bursts;
        profile.programs += 1;
    }
}

fn edge_of<'a>(
    step: Step,
    block: impl Fn(BlockId) -> Option<&'a Translated>,
) -> Option<(&'a Translated, u64, EdgeKind)> {
    Some(match step {
        Step::Block(_) | Step::Part(..) | Step::ReturnedTo(_) => return None,
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
        Step::Returned(id) => {
            let one = block(id)?;
            (one, one.end, EdgeKind::Return)
        }
    })
}
