//! Samples of instructions, as the paper's hardware takes them.
//!
//! A counter with a random value counts instructions that are fetched, or opportunities to fetch
//! one. The instruction at which it reaches zero is followed through the pipeline, and so is one or
//! more of the instructions after it.

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::pipeline::{AbortReason, Fetched, NEVER, Times};

/// What is known of one execution of an instruction. A source leaves out what it does not know: no
/// field stands for its absence by zero.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize)]
pub struct InstructionSample {
    /// The thread, process or address space.
    pub context: Option<u32>,
    pub pc: u64,
    /// Its number in the trace.
    pub instruction: Option<u32>,
    /// Of its memory, or the target of a computed branch.
    pub address: Option<u64>,
    pub events: SampleEvents,
    pub outcome: Option<Outcome>,
    /// Directions of the conditional branches before it, the last one in the lowest bit.
    pub history: Option<u64>,
    pub latencies: SampleLatencies,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Retired,
    /// Its fetch was completed. Whether it retired is not known.
    Fetched,
    Aborted(Option<AbortReason>),
}

#[derive(Clone, PartialEq, Eq, Default, Debug, serde::Serialize)]
pub struct SampleEvents {
    pub icache_miss: Option<bool>,
    pub itlb_miss: Option<bool>,
    /// Absent if it does not use memory, or its address is not known.
    pub dcache_miss: Option<bool>,
    pub dtlb_miss: Option<bool>,
    /// Absent if it is not a branch.
    pub taken: Option<bool>,
    pub mispredicted: Option<bool>,
    /// It was ready, and waited for a unit or an issue slot.
    pub conflict: Option<bool>,
    pub trap: Option<bool>,
}

/// The latencies of the paper's Table 1, and further ones that processors measure, in cycles.
/// Absent if the stage was not reached.
#[derive(Clone, PartialEq, Eq, Default, Debug, serde::Serialize)]
pub struct SampleLatencies {
    pub fetch_to_map: Option<u32>,
    pub map_to_ready: Option<u32>,
    pub ready_to_issue: Option<u32>,
    pub issue_to_retire_ready: Option<u32>,
    pub retire_ready_to_retire: Option<u32>,
    /// Of instructions that read memory.
    pub load_issue_to_completion: Option<u32>,
    /// From fetch until it was aborted.
    pub fetch_to_abort: Option<u32>,
    /// From the beginning of a fetch until its bytes are there.
    pub fetch: Option<u32>,
    pub map_to_issue: Option<u32>,
    pub map_to_retire: Option<u32>,
    /// Of a load, from its miss until the data cache has the line.
    pub dcache_refill: Option<u32>,
    /// Of its address, or of a fetch's.
    pub translation: Option<u32>,
    /// From the last retirement before its own.
    pub between_retirements: Option<u32>,
}

impl SampleLatencies {
    fn sum(parts: &[Option<u32>]) -> Option<u64> {
        parts.iter().try_fold(0, |sum, part| Some(sum + u64::from((*part)?)))
    }

    /// Cycles from fetch to each of the stages map, ready, issue, retire-ready and retire.
    pub fn since_fetch(&self) -> [Option<u64>; 5] {
        let parts = [
            self.fetch_to_map,
            self.map_to_ready,
            self.ready_to_issue,
            self.issue_to_retire_ready,
            self.retire_ready_to_retire,
        ];
        let mut sums = [None; 5];
        for (count, sum) in (1..).zip(&mut sums) {
            *sum = Self::sum(&parts[..count]);
        }
        sums
    }

    /// How long the instruction was in progress: until it was ready to retire, or aborted.
    pub fn in_progress(&self) -> Option<u64> {
        self.fetch_to_abort.map(u64::from).or(self.since_fetch()[3])
    }
}

/// Two instructions that may have been in flight together.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize)]
pub struct SamplePair {
    pub first: InstructionSample,
    pub second: InstructionSample,
    /// Instructions from the fetch of the first to that of the second, and cycles.
    pub distance: u32,
    pub fetch_latency: u64,
}

/// What the counter counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Counting {
    Instructions,
    /// Each place for an instruction in each cycle, with or without one.
    Opportunities,
}

/// How samples are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sampling {
    /// Mean distance between samples, or between groups of them.
    pub every: u64,
    pub counting: Counting,
    /// Instructions of a group; 1 for single samples.
    pub ways: u32,
    /// The largest distance between the first instruction of a group and another one.
    pub window: u32,
    pub seed: u64,
    /// Instructions that the core fetches per cycle.
    pub fetch_width: u32,
}

impl Sampling {
    /// The mean distance between pairs: a group has one for each instruction but the first.
    pub fn every_pair(&self) -> f64 {
        to_float(self.every) / f64::from(self.ways.saturating_sub(1).max(1))
    }
}

/// Counts of traces are below 2^53.
#[expect(clippy::cast_precision_loss, reason = "a trace is shorter than 2^53 instructions")]
pub(crate) fn to_float(number: u64) -> f64 {
    number as f64
}

/// A group whose first instruction was chosen.
#[derive(Debug)]
struct Group {
    first: Fetched,
    /// Numbers of the others, the next one at the end.
    others: Vec<u64>,
}

/// Which instruction has which kinds of fields.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub is_branch: bool,
    pub reads_memory: bool,
    pub has_addresses: bool,
}

/// Chooses instructions.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    random: Xoshiro256PlusPlus,
    /// Number of the next instruction, or of the next opportunity.
    next: u64,
    groups: Vec<Group>,
    /// The first number for which there is something to do.
    next_other: u64,
    last_cycle: u64,
    pub samples: Vec<InstructionSample>,
    pub pairs: Vec<SamplePair>,
    /// Chosen opportunities without an instruction on the predicted way, in cycles in which others
    /// were fetched, and in cycles without fetch.
    pub empty_beside: u64,
    pub empty_cycles: u64,
}

impl Sampler {
    pub fn new(sampling: Sampling) -> Self {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(sampling.seed);
        let next = Self::interval(&mut random, sampling.every) - 1;
        Self {
            sampling,
            random,
            next,
            groups: Vec::new(),
            next_other: u64::MAX,
            last_cycle: 0,
            samples: Vec::new(),
            pairs: Vec::new(),
            empty_beside: 0,
            empty_cycles: 0,
        }
    }

    /// A random interval with a mean.
    fn interval(random: &mut impl rand::Rng, mean: u64) -> u64 {
        random.random_range(1..=mean.max(1) * 2 - 1)
    }

    /// Looks at the next instruction in the order of fetch.
    pub fn see(&mut self, fetched: &Fetched, kind: impl Fn(&Fetched) -> Kind) {
        if fetched.number == self.next_other {
            self.take_others(fetched, &kind);
        }
        if self.is_chosen(fetched) {
            self.samples.push(sample(fetched, kind(fetched)));
            if self.sampling.ways > 1 {
                self.begin_group(fetched);
            }
        }
    }

    fn is_chosen(&mut self, fetched: &Fetched) -> bool {
        if self.sampling.counting == Counting::Instructions {
            if fetched.number != self.next {
                return false;
            }
            self.next += Self::interval(&mut self.random, self.sampling.every);
            return true;
        }
        let width = u64::from(self.sampling.fetch_width.max(1));
        let own = fetched.times.fetch * width + u64::from(fetched.slot);
        while self.next < own {
            if self.next / width == self.last_cycle {
                self.empty_beside += 1;
            } else {
                self.empty_cycles += 1;
            }
            self.next += Self::interval(&mut self.random, self.sampling.every);
        }
        self.last_cycle = fetched.times.fetch;
        if self.next > own {
            return false;
        }
        self.next += Self::interval(&mut self.random, self.sampling.every);
        true
    }

    fn begin_group(&mut self, first: &Fetched) {
        let window = u64::from(self.sampling.window.max(1));
        let others = u64::from(self.sampling.ways - 1).min(window);
        let mut found: Vec<u64> = Vec::new();
        while (found.len() as u64) < others {
            let number = first.number + self.random.random_range(1..=window);
            if !found.contains(&number) {
                found.push(number);
            }
        }
        found.sort_unstable_by(|one, other| other.cmp(one));
        self.groups.push(Group { first: *first, others: found });
        self.find_next();
    }

    fn find_next(&mut self) {
        let next = self.groups.iter().filter_map(|group| group.others.last());
        self.next_other = next.min().copied().unwrap_or(u64::MAX);
    }

    fn take_others(&mut self, second: &Fetched, kind: &impl Fn(&Fetched) -> Kind) {
        for group in &mut self.groups {
            if group.others.last() != Some(&second.number) {
                continue;
            }
            group.others.pop();
            let first = &group.first;
            self.pairs.push(SamplePair {
                first: sample(first, kind(first)),
                second: sample(second, kind(second)),
                distance: u32::try_from(second.number - first.number).unwrap_or(u32::MAX),
                fetch_latency: second.times.fetch - first.times.fetch,
            });
        }
        self.groups.retain(|group| !group.others.is_empty());
        self.find_next();
    }
}

/// What the hardware would record of an instruction.
pub fn sample(fetched: &Fetched, kind: Kind) -> InstructionSample {
    let Times { fetch, map, ready, issue, completion, retire_ready, retire } = fetched.times;
    let between = |from: u64, to: u64| {
        if to == NEVER { None } else { u32::try_from(to - from).ok() }
    };
    let events = fetched.events;
    let of = |is: bool, event: bool| is.then_some(event);
    let has_address = kind.has_addresses && fetched.abort.is_none();
    InstructionSample {
        context: None,
        pc: fetched.pc,
        instruction: Some(fetched.instruction),
        address: fetched.address,
        events: SampleEvents {
            icache_miss: Some(events.icache_miss),
            itlb_miss: Some(events.itlb_miss),
            dcache_miss: of(has_address, events.dcache_miss),
            dtlb_miss: of(has_address, events.dtlb_miss),
            taken: of(kind.is_branch, events.taken),
            // On a wrong path, what is right is not known.
            mispredicted: of(kind.is_branch && fetched.abort.is_none(), events.mispredicted),
            conflict: of(ready != NEVER, events.conflict),
            trap: Some(events.trap),
        },
        outcome: Some(match fetched.abort {
            None => Outcome::Retired,
            Some((reason, _)) => Outcome::Aborted(Some(reason)),
        }),
        history: Some(fetched.history.0),
        latencies: SampleLatencies {
            fetch_to_map: between(fetch, map),
            map_to_ready: between(map, ready),
            ready_to_issue: between(ready, issue),
            issue_to_retire_ready: between(issue, retire_ready),
            retire_ready_to_retire: between(retire_ready, retire),
            load_issue_to_completion: of(kind.reads_memory, between(issue, completion).is_some())
                .and_then(|_| between(issue, completion)),
            fetch_to_abort: fetched.abort.and_then(|(_, at)| between(fetch, at)),
            ..SampleLatencies::default()
        },
    }
}
