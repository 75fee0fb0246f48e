//! What the productions of rule sets collect while a thread goes its way.

use elfen_stream::{BlockId, Cache, Exit, Indirect, Translated};
use rustc_hash::FxHashMap;

use super::objects::Places;
use super::regions::Regions;
use super::streams::{Finder, References, Used};
use super::walk::{Node, Step};
use crate::profile::{Profile, ProfiledRule, RuleCount, RuleMember};
use crate::rules::{Engine, Executed, Handler, Kind, RuleSet};

/// What a handler was called for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Member {
    /// The instruction at the end of a block led to an address.
    Pair(BlockId, u64),
    /// An address that the end of a block led to.
    Callee(BlockId, u64),
    /// The instruction at an address in a block.
    At(BlockId, u64),
}

#[derive(Clone, Copy, Default, Debug)]
struct Seen {
    count: u64,
    /// Episodes of the engine that it was seen in.
    episodes: u64,
    last_episode: Option<u64>,
}

#[derive(Debug, Default)]
pub(crate) struct RuleTally {
    engines: Vec<Engine<'static>>,
    /// The engines that ask for each kind of instruction.
    by_kind: [Vec<usize>; Kind::ALL.len()],
    /// Since the last end, by the numbers of the engine and of its production.
    seen: FxHashMap<(u32, u32, Member), Seen>,
    counts: FxHashMap<(u32, u32, Member), RuleCount>,
    /// By the same numbers, what handlers for streams were called for.
    streams: FxHashMap<(u32, u32), RuleStreams>,
    /// An episode is what belongs together, not a burst or a shadow.
    counts_episodes: bool,
}

#[derive(Debug, Default)]
struct RuleStreams {
    finder: Finder,
    last_episode: Option<u64>,
}

impl RuleTally {
    pub(crate) fn new(sets: &'static [RuleSet]) -> Self {
        let engines: Vec<Engine<'_>> = sets.iter().map(Engine::new).collect();
        let by_kind = Kind::ALL.map(|kind| {
            let asking = engines.iter().enumerate().filter(|(_, one)| one.kinds().contains(kind));
            asking.map(|(number, _)| number).collect()
        });
        Self { engines, by_kind, ..Self::default() }
    }

    /// For a whole program instead of bursts or shadows.
    pub(crate) fn count_episodes(&mut self) {
        self.counts_episodes = true;
    }

    /// What was seen so far does not go on in what follows.
    pub(crate) fn cut_streams(&mut self) {
        self.streams.values_mut().for_each(|one| one.finder.cut());
    }

    /// Applies all productions to the instructions of a step, which have used this memory.
    pub(crate) fn step(
        &mut self,
        cache: &Cache,
        step: Step,
        block: &Node,
        to: u64,
        used: &[Used],
        regions: &mut Regions,
    ) {
        if self.engines.is_empty() {
            return;
        }
        let (kind, id) = match (step, block.exit) {
            (Step::Block(id), _) => {
                return self.accesses(cache, id, block.start, used, regions);
            }
            (Step::Part(id, from), _) => return self.accesses(cache, id, from, used, regions),
            (Step::Falls(id), Exit::Branch { .. }) => (Kind::CondBranch, id),
            (Step::Falls(id), Exit::Syscall) => (Kind::Syscall, id),
            (Step::Direct(id), Exit::Branch { .. }) => (Kind::CondBranch, id),
            (Step::Direct(id), Exit::Jump { .. }) => (Kind::Jump, id),
            (Step::Direct(id), Exit::Call { .. }) => (Kind::Call, id),
            (Step::Computed(id, _), Exit::Indirect(Indirect::Jump)) => (Kind::IndirectJump, id),
            (Step::Computed(id, _), Exit::Indirect(Indirect::Call)) => (Kind::IndirectCall, id),
            (Step::Computed(id, _) | Step::Returned(id, _) | Step::ReturnedTo(id, _), _) => {
                (Kind::Return, id)
            }
            (Step::Falls(_) | Step::Direct(_), _) => return,
        };
        self.execute(Executed { kind, pc: block.last, target: to }, id, &[], regions);
    }

    /// The accesses to memory in a block, from an address on.
    fn accesses(
        &mut self,
        cache: &Cache,
        id: BlockId,
        from: u64,
        mut used: &[Used],
        regions: &mut Regions,
    ) {
        if self.by_kind[Kind::Memory.index()].is_empty() {
            return;
        }
        let found = usize::try_from(id).ok().and_then(|id| cache.blocks().get(id));
        let Some(one) = found else { return };
        for (number, &offset) in one.offsets.iter().enumerate() {
            let pc = one.start + u64::from(offset);
            if one.memory_mask & 1 << number == 0 || pc < from {
                continue;
            }
            let next = one.offsets.get(number + 1);
            let target = next.map_or(one.end, |&next| one.start + u64::from(next));
            let count = used.iter().take_while(|one| one.offset == offset).count();
            let (own, rest) = used.split_at(count);
            used = rest;
            self.execute(Executed { kind: Kind::Memory, pc, target }, id, own, regions);
        }
    }

    fn execute(&mut self, one: Executed, id: BlockId, used: &[Used], regions: &mut Regions) {
        let Self { engines, by_kind, seen, streams, counts_episodes, .. } = self;
        for &number in &by_kind[one.kind.index()] {
            let Some(engine) = engines.get_mut(number) else { continue };
            engine.execute(one, |production, handler, episode| {
                let (Ok(number), Ok(production)) =
                    (u32::try_from(number), u32::try_from(production))
                else {
                    return;
                };
                let member = match (handler, one.kind) {
                    (Handler::DataStream, _) => {
                        let known = streams.entry((number, production)).or_default();
                        known.add(used, regions, episode, *counts_episodes);
                        return;
                    }
                    (Handler::CallPair, _) => Member::Pair(id, one.target),
                    (Handler::HotMethod, Kind::Call | Kind::IndirectCall) => {
                        Member::Callee(id, one.target)
                    }
                    (Handler::HotMethod, _) => Member::At(id, one.pc),
                };
                let seen = seen.entry((number, production, member)).or_default();
                seen.count += 1;
                seen.episodes += u64::from(seen.last_episode != Some(episode));
                seen.last_episode = Some(episode);
            });
        }
    }

    /// Ends some bursts, or a part of a program. What they have seen is only kept if their way was
    /// found. What belongs together is a burst or a shadow; by everything, it is an episode.
    pub(crate) fn end(&mut self, is_found: bool, bursts: u64) {
        let (counts, engines) = (&mut self.counts, &self.engines);
        let is_sampled = |engine: u32, production: u32| {
            let engine = usize::try_from(engine).ok().and_then(|number| engines.get(number));
            let production = usize::try_from(production).ok();
            engine
                .zip(production)
                .and_then(|(engine, number)| engine.rules().productions.get(number))
                .is_some_and(|one| one.is_sampled())
        };
        for (key, seen) in self.seen.drain().filter(|_| is_found) {
            let known = counts.entry(key).or_default();
            known.count += seen.count;
            known.bursts += match bursts {
                0 if is_sampled(key.0, key.1) => seen.episodes,
                bursts => bursts,
            };
        }
        for (key, one) in &mut self.streams {
            if bursts > 0 || is_sampled(key.0, key.1) {
                one.finder.end_unit();
            }
        }
    }

    /// Adds what was collected to a profile.
    pub(crate) fn add_to(
        &mut self,
        profile: &mut Profile,
        places: &Places<'_>,
        blocks: &[Translated],
        references: &References,
    ) {
        // The numbers in the profile of the first production of each engine.
        let mut firsts = Vec::new();
        let mut next = 0_usize;
        for engine in &self.engines {
            firsts.push(next);
            for (production, &matched) in engine.rules().productions.iter().zip(engine.matched()) {
                if next == profile.rules.len() {
                    profile.rules.push(ProfiledRule {
                        name: production.name.clone(),
                        text: production.text.clone(),
                        handler: production.handler,
                        matched: 0,
                        references: 0,
                    });
                }
                profile.rules[next].matched += matched;
                next += 1;
            }
        }
        let number = |engine: u32, production: u32| {
            let first = usize::try_from(engine).ok().and_then(|engine| firsts.get(engine));
            first.and_then(|&first| u32::try_from(first).ok()).map(|first| first + production)
        };
        for (&(engine, production), one) in &mut self.streams {
            let Some(rule) = number(engine, production) else { continue };
            if let Some(profiled) = profile.rules.get_mut(rule as usize) {
                let sum = profiled.references.saturating_add(one.finder.references());
                profiled.references = sum;
            }
            one.finder.add_to(Some(rule), profile, places, references);
        }
        for (&(engine, production, member), count) in &self.counts {
            let Some(rule) = number(engine, production) else { continue };
            let (Member::Pair(id, _) | Member::Callee(id, _) | Member::At(id, _)) = member;
            let one = usize::try_from(id).ok().and_then(|id| blocks.get(id));
            let Some(one) = one else { continue };
            let last = one.start + one.offsets.last().map_or(0, |&offset| u64::from(offset));
            let to = |target| places.target(one, target);
            let found = match member {
                Member::Pair(_, target) => {
                    places.of(one, last).zip(to(target)).map(|(from, to)| (Some(from), Some(to)))
                }
                Member::Callee(_, target) => to(target).map(|to| (None, Some(to))),
                Member::At(_, at) => places.of(one, at).map(|from| (Some(from), None)),
            };
            let Some((from, to)) = found else { continue };
            let known = profile.rule_counts.entry(RuleMember { rule, from, to });
            let known = known.or_default();
            known.count = known.count.saturating_add(count.count);
            known.bursts = known.bursts.saturating_add(count.bursts);
        }
    }
}

impl RuleStreams {
    /// A handler was called for an instruction that has used some memory.
    fn add(&mut self, used: &[Used], regions: &mut Regions, episode: u64, counts_episodes: bool) {
        if self.last_episode.replace(episode).is_some_and(|last| last != episode) {
            match counts_episodes {
                true => self.finder.end_unit(),
                false => self.finder.cut(),
            }
        }
        used.iter().for_each(|one| self.finder.add(one, regions));
    }
}
