//! Counts by file and offset.

use std::collections::BTreeMap;

use elfen_core_model::estimate::SiteEstimate;
use elfen_stream::counts::EdgeKind;
use serde::{Deserialize, Serialize};

use crate::rules::{Handler, RuleSet};

/// A place in a file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Place {
    /// Index of the file in [`Profile::files`].
    pub file: u32,
    /// Offset in that file.
    pub offset: u64,
}

/// How the counts of a profile came about.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// Everything was counted.
    #[default]
    Everything,
    /// Estimated from bursts.
    Bursts,
    /// Estimated from forked copies, of which each was counted.
    Shadows,
    /// Instructions that the processor has sampled.
    Samples,
}

/// What is recorded besides blocks and edges.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct What {
    /// Which calls lead to a block.
    pub stacks: bool,
    /// Which blocks run one after the other.
    pub paths: bool,
    /// Productions that choose instructions, and collect what these do.
    pub rules: &'static [RuleSet],
    /// What instructions leave in their destination registers.
    pub values: bool,
    /// Sequences of memory accesses that repeat.
    pub streams: bool,
    /// References after which such a sequence is cut; 0 for no limit.
    pub stream_burst: u64,
}

impl What {
    /// Whether the addresses of memory accesses are needed.
    pub fn needs_addresses(&self) -> bool {
        self.streams || self.rules.iter().any(RuleSet::needs_addresses)
    }
}

/// A run of instructions, and how often it ran.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct BlockCount {
    pub bytes: u32,
    pub instructions: u32,
    pub count: u64,
    /// Bursts in which it ran, from which the count is estimated; 0 for an exact count.
    pub bursts: u64,
}

/// How often an edge was taken.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct EdgeCount {
    pub count: u64,
    /// As in [`BlockCount`].
    pub bursts: u64,
}

/// An edge: from a branch, or from the last instruction in front of a place that is branched to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Edge {
    pub from: Place,
    pub to: Place,
    pub kind: EdgeKind,
}

/// A call that had not returned, and the calls around it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Caller {
    /// The number of the call that the caller comes from.
    pub caller: u32,
    /// A byte of the call instruction.
    pub call: Place,
}

/// Number of a caller: a thread begins there, or what has called is not known. All other callers
/// are numbered from [`FIRST_CALLER`] on.
pub const NO_CALLER: u32 = 0;
pub const UNKNOWN_CALLER: u32 = 1;
pub const FIRST_CALLER: u32 = 2;

/// A block under its callers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct StackEnd {
    pub caller: u32,
    pub block: Place,
}

/// Instructions that a block executed under its callers.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct StackCount {
    pub instructions: u64,
    /// As in [`BlockCount`].
    pub bursts: u64,
}

/// A block of a path, and the one before it. Blocks are numbered from [`FIRST_PATH_BLOCK`] on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PathBlock {
    /// [`NO_PATH_BLOCK`] for the first block of a path.
    pub before: u32,
    pub block: Place,
}

pub const NO_PATH_BLOCK: u32 = 0;
pub const FIRST_PATH_BLOCK: u32 = 1;

/// How often a path was taken, and the instructions that were executed on it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PathCount {
    pub count: u64,
    pub instructions: u64,
    /// As in [`BlockCount`].
    pub bursts: u64,
}

/// A production that was applied to each executed instruction.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ProfiledRule {
    pub name: String,
    /// Its pattern and condition.
    pub text: String,
    /// `None` if it only changes counters.
    pub handler: Option<Handler>,
    /// Instructions that it has matched.
    pub matched: u64,
    /// Memory accesses that streams were looked for in.
    #[serde(default)]
    pub references: u64,
}

/// What the handler of a production was called for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RuleMember {
    /// Index in [`Profile::rules`].
    pub rule: u32,
    /// The instruction; absent if only what it calls matters.
    pub from: Option<Place>,
    /// What was called, for a call.
    pub to: Option<Place>,
}

/// How often it was called for that.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct RuleCount {
    pub count: u64,
    /// Bursts in which it was: of the program, or if everything was counted, of the productions. 0
    /// for an exact count.
    pub bursts: u64,
}

/// What an instruction has left in its destination register.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct ValueCount {
    /// The width of the register.
    pub bytes: u8,
    /// Times that it ran.
    pub count: u64,
    /// As in [`BlockCount`].
    pub bursts: u64,
    /// The most frequent values, and how often they were seen; the most frequent one first.
    pub top: Vec<(u64, u64)>,
}

/// What an event of the processor counts between two samples.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SampleUnit {
    #[default]
    Instructions,
    /// Parts of instructions, as the processor executes them.
    Operations,
    Fetches,
    Loads,
    Cycles,
}

impl SampleUnit {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Instructions => "instructions",
            Self::Operations => "operations",
            Self::Fetches => "fetches",
            Self::Loads => "loads",
            Self::Cycles => "cycles",
        }
    }

    /// Whether samples are taken of executions, each with the same chance.
    pub(crate) const fn counts_executions(self) -> bool {
        matches!(self, Self::Instructions | Self::Operations)
    }
}

/// An event whose samples a profile holds.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct SampledEvent {
    /// The device of the kernel, as in `ibs_op`.
    pub device: String,
    /// What the processor's maker calls it: IBS, PEBS or SPE.
    pub source: String,
    pub unit: SampleUnit,
    /// The mean interval between two samples that was asked for.
    pub interval: u64,
    /// Samples, also those of other code than files.
    pub samples: u64,
    /// What the event itself has counted; 0 if it does not count.
    pub counted: u64,
    /// Samples that were lost, at least.
    pub lost: u64,
}

impl SampledEvent {
    /// The mean interval that was. New intervals begin when a sample is read, not where it was
    /// taken, and samples may be lost.
    #[expect(clippy::cast_precision_loss, reason = "a mean has few digits")]
    pub(crate) fn mean_interval(&self) -> f64 {
        match (self.counted, self.samples) {
            (0, _) | (_, 0) => self.interval as f64,
            (counted, samples) => counted as f64 / samples as f64,
        }
    }
}

/// An instruction, and the event that has sampled it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SampledPlace {
    pub place: Place,
    /// Index in [`Profile::sampled_events`].
    pub event: u32,
}

/// An instruction, and the memory that it has used.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DataReference {
    pub at: Place,
    /// Index in [`Profile::regions`].
    pub region: u32,
    /// Distance from what addresses in that region are counted from.
    pub distance: i64,
}

/// A sequence of references that repeats. Of all its rotations, the first one in order.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DataStream {
    /// Index in [`Profile::rules`] of the rule that has collected it.
    pub rule: Option<u32>,
    pub references: Vec<DataReference>,
}

/// How often a stream occurred.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct StreamCount {
    pub times: u64,
    /// As in [`RuleCount`].
    pub bursts: u64,
    /// The reference that it began with when it was found.
    pub first: u32,
}

/// More references than a stream has.
pub const STREAM_REFERENCES_MAX: usize = 100;

/// A file with code that ran.
#[derive(Clone, PartialEq, Eq, Hash, Default, Debug, Serialize, Deserialize)]
pub struct ProfiledFile {
    /// As the kernel reported it.
    pub path: String,
    /// Its build id in hexadecimal digits; empty if it has none.
    pub build_id: String,
}

/// What ran, and how often.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Profile {
    /// The command line.
    pub program: Vec<String>,
    pub by: Source,
    /// Bursts that the counts come from.
    pub bursts: u64,
    /// User time of the program while it was watched, and the estimated part of it that the bursts
    /// cost; 0 if everything was counted.
    pub ran_ns: u64,
    pub cost_ns: u64,
    pub files: Vec<ProfiledFile>,
    /// Blocks by their start. Blocks may overlap.
    pub blocks: BTreeMap<Place, BlockCount>,
    pub edges: BTreeMap<Edge, EdgeCount>,
    /// Calls from number [`FIRST_CALLER`] on, each behind its caller.
    pub callers: Vec<Caller>,
    /// Blocks by their callers, if these were recorded.
    pub stacks: BTreeMap<StackEnd, StackCount>,
    /// Blocks of paths from number [`FIRST_PATH_BLOCK`] on, each behind the one before it.
    pub path_blocks: Vec<PathBlock>,
    /// Paths by their last blocks, if paths were recorded.
    pub paths: BTreeMap<u32, PathCount>,
    /// Productions, and what their handlers have collected.
    pub rules: Vec<ProfiledRule>,
    pub rule_counts: BTreeMap<RuleMember, RuleCount>,
    /// Results of instructions, if these were recorded.
    pub values: BTreeMap<Place, ValueCount>,
    /// Events of the processor, and what their samples say of each instruction.
    pub sampled_events: Vec<SampledEvent>,
    pub samples: BTreeMap<SampledPlace, SiteEstimate>,
    /// Names of the regions of memory that streams refer to.
    pub regions: Vec<String>,
    /// Hot data streams, if these were recorded, and all references that they were looked for in.
    pub streams: BTreeMap<DataStream, StreamCount>,
    pub references: u64,
    /// Instructions that ran; 0 if they were sampled.
    pub instructions: u64,
    /// Address spaces that were counted: processes, and programs that these executed.
    pub programs: u64,
    /// What was not counted, and why.
    pub left: Vec<String>,
    /// System calls of shadows, by [`crate::shadows::KINDS`].
    pub calls: [u64; 5],
    /// Page faults of the program while shadows were made of it.
    pub faults: u64,
}

impl Profile {
    /// The index of a file, which may be new.
    pub fn file(&mut self, path: &str) -> u32 {
        let found = self.files.iter().position(|file| file.path == path).unwrap_or_else(|| {
            let file = ProfiledFile { path: path.to_owned(), build_id: String::new() };
            self.files.push(file);
            self.files.len() - 1
        });
        u32::try_from(found).unwrap_or(u32::MAX)
    }

    /// The index of a region of memory, which may be new.
    pub(crate) fn region(&mut self, name: &str) -> u32 {
        let found = self.regions.iter().position(|region| region == name).unwrap_or_else(|| {
            self.regions.push(name.to_owned());
            self.regions.len() - 1
        });
        u32::try_from(found).unwrap_or(u32::MAX)
    }

    /// A call by its number; `None` for [`NO_CALLER`] and [`UNKNOWN_CALLER`].
    pub fn caller(&self, number: u32) -> Option<&Caller> {
        self.callers.get(usize::try_from(number.checked_sub(FIRST_CALLER)?).ok()?)
    }

    /// A block of a path by its number; `None` for [`NO_PATH_BLOCK`].
    pub fn path_block(&self, number: u32) -> Option<&PathBlock> {
        self.path_blocks.get(usize::try_from(number.checked_sub(FIRST_PATH_BLOCK)?).ok()?)
    }

    /// The index of the file that most instructions ran in.
    pub(crate) fn hottest_file(&self) -> Option<usize> {
        let mut executed = vec![0_u64; self.files.len()];
        for (start, block) in &self.blocks {
            let file = usize::try_from(start.file).ok().and_then(|file| executed.get_mut(file));
            if let Some(sum) = file {
                *sum = sum.saturating_add(block.count.saturating_mul(block.instructions.into()));
            }
        }
        (0..executed.len()).max_by_key(|&file| executed[file])
    }

    /// Notes that a process was not counted further.
    pub(crate) fn note_left(&mut self, process: i32, why: &str) {
        self.left.push(format!("process {process}: {why}"));
    }

    pub(crate) fn add_block(&mut self, start: Place, block: BlockCount) {
        let known = self.blocks.entry(start).or_default();
        let count = known.count.saturating_add(block.count);
        *known = BlockCount { count, bursts: known.bursts + block.bursts, ..block };
    }

    /// Adds the values of an instruction. Its block may be part of several others.
    pub(crate) fn add_values(&mut self, place: Place, values: ValueCount) {
        let known = self.values.entry(place).or_default();
        known.bytes = values.bytes;
        known.count = known.count.saturating_add(values.count);
        known.bursts = known.bursts.max(values.bursts);
        for (value, count) in values.top {
            match known.top.iter_mut().find(|(other, _)| *other == value) {
                Some((_, sum)) => *sum = sum.saturating_add(count),
                None => known.top.push((value, count)),
            }
        }
        known.top.sort_by(|a, b| (b.1, a.0).cmp(&(a.1, b.0)));
    }

    pub(crate) fn add_edge(&mut self, edge: Edge, EdgeCount { count, bursts }: EdgeCount) {
        let known = self.edges.entry(edge).or_default();
        known.count = known.count.saturating_add(count);
        known.bursts += bursts;
    }

    pub(crate) fn add_stream(&mut self, stream: DataStream, count: StreamCount) {
        let known =
            self.streams.entry(stream).or_insert(StreamCount { times: 0, bursts: 0, ..count });
        known.times = known.times.saturating_add(count.times);
        known.bursts = known.bursts.saturating_add(count.bursts);
    }
}
