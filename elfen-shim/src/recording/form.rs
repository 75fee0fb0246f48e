//! The parts of a recording: states, runs, signals, and the head, chunks and tail of a file.

use serde::{Deserialize, Serialize};

use crate::clock::{Clock, Moment};

/// Version of the file format. Earlier versions differ from the version after them:
///
/// - version 4 has no packed chunks;
/// - version 3 has no short form of runs;
/// - version 2 has times in steps of the clock;
/// - version 1 has the distance of each run from the run before it, and the plain number of
///   samples.
pub const VERSION: u32 = 5;
pub(super) const VERSION_OF_DISTANCES: u32 = 1;
pub(super) const VERSION_OF_SHORT_RUNS: u32 = 4;
pub(super) const VERSION_OF_PACKED_CHUNKS: u32 = 5;
/// The first bytes of a file.
pub const MAGIC: [u8; 8] = *b"ELFNSHIM";
/// Bytes of a chunk's runs, at most.
pub(super) const CHUNK_BYTES: usize = 16 << 10;
/// Bytes of a head or tail, at most.
pub(super) const JSON_BYTES: usize = 4 << 20;
/// Runs of a file, at most: as many as the largest file held before chunks were packed. It bounds
/// the memory that packed chunks can make the reader use.
pub(super) const RUNS_MAX: u64 = 1 << 31;
/// Tags of a chunk, at most. Further ones are [`State::Other`].
pub(super) const TAGS_MAX: usize = 4096;

/// The state of a signal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum State {
    /// No samples were taken.
    Gap,
    /// The thread of this signal did not run.
    NotRunning,
    /// A tag beyond the number that a chunk can hold.
    Other,
    Value(u64),
}

/// Consecutive samples of one state. A run ends where the next one starts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    pub start_ticks: u64,
    pub state: State,
    /// For a gap: 1 if the observer has proven that nothing changed in it, else 0.
    pub samples: u64,
}

/// What the values of a signal mean.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Values with names: tags, functions or tasks. There are few, and each recurs.
    Tags,
    /// Numbers.
    Values,
}

/// How a signal was read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    TaskMap,
    ServicePage,
    Mapped,
    SharedAtStart,
    Shared,
    Read,
    Entries,
    #[serde(rename = "entries+returns")]
    EntriesAndReturns,
    SourceTags,
    Proc,
}

/// One signal of a recording.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Signal {
    pub name: String,
    pub source: Source,
    pub kind: Kind,
    /// Whether its numbers can be negative. Values are then 64-bit two's complement.
    #[serde(default)]
    pub signed: bool,
    /// Names of values that have names.
    pub names: Vec<(u64, String)>,
}

impl Signal {
    /// Interprets a value as a signed or unsigned number.
    pub fn number(&self, value: u64) -> i128 {
        if self.signed { value.cast_signed().into() } else { value.into() }
    }
}

/// The head of a recording, which precedes its chunks.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Head {
    pub program: String,
    pub process: u32,
    /// Whether its forked children were observed too.
    #[serde(default)]
    pub children: bool,
    pub machine: String,
    /// The observed lanes.
    pub on: String,
    /// The CPU of the first observer.
    pub from: u32,
    /// All observers, if there were several. Earlier recordings had one.
    #[serde(default)]
    pub observers: Vec<ObserverHead>,
    pub clock: Clock,
    /// When the first run began; missing in earlier recordings.
    #[serde(default)]
    pub began: Option<Moment>,
    /// 0 for `--period max`; `None` for `--period auto`.
    pub asked_period_ns: Option<u64>,
    pub line_round_trip_ns: Option<u64>,
    pub signals: Vec<Signal>,
    pub samples: u64,
    pub period_ns: Periods,
    pub steal_ns: u64,
    /// How long the process was stopped to share its pages; missing in earlier recordings.
    #[serde(default)]
    pub stopped_ns: u64,
    /// The part of `stopped_ns` at the end of the run; missing in earlier recordings.
    #[serde(default)]
    pub stopped_at_end_ns: u64,
    pub missed_switches: Option<u64>,
    /// Threads that found no free slot on the page of threads.
    pub refused_threads: u64,
    /// Functions that report by code at their entries that they run; missing in earlier recordings.
    #[serde(default)]
    pub entries: u64,
    /// Functions that do not report because their address has the lower half of another's.
    #[serde(default)]
    pub ambiguous: u64,
    /// Whether each sample is a run of its own (`--keep samples`).
    #[serde(default)]
    pub keeps_samples: bool,
    /// Gaps of at most this length count as without a change (`--bridge`).
    #[serde(default)]
    pub bridge_ns: u64,
    pub rates: Vec<RateFigure>,
    pub dte: Option<Dte>,
    pub cost: Option<Cost>,
    /// Why `cost` is missing although it was requested.
    pub cost_unknown: String,
    /// Why the recording ended early, or what else is wrong with it; empty otherwise.
    pub ended: String,
    pub exit_status: Option<i32>,
}

/// One of several observers. Its signals follow those of the observer before it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ObserverHead {
    pub from: u32,
    pub on: String,
    pub signals: usize,
}

impl Head {
    /// The first signal of each observer. All signals of an observer have the same gaps.
    pub fn firsts(&self) -> Vec<usize> {
        let mut next = 0;
        let firsts = self.observers.iter().map(|observer| {
            next += observer.signals;
            next - observer.signals
        });
        let firsts: Vec<usize> = firsts.collect();
        if firsts.is_empty() { vec![0] } else { firsts }
    }
}

/// The time between two samples.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Periods {
    /// See `asked_period_ns` of [`Head`].
    pub asked: Option<u64>,
    pub median: u64,
    pub p99: u64,
}

/// The distribution of a rate under one tag.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RateFigure {
    pub name: String,
    pub tag: String,
    pub median: f64,
    pub p10: f64,
    pub p90: f64,
    pub kept_percent: f64,
}

/// The result of filtering rates by double-time error.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Dte {
    pub tolerance_percent: u64,
    pub floor_ns: f64,
    pub kept: u64,
    pub discarded: u64,
    /// Samples over which a counter of a rate shrank.
    pub shrunk: u64,
}

/// What observation cost the observed program, in percent: the median, and its 95 % interval.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Cost {
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

/// The tail of a file, which follows its chunks. A truncated file has none.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Tail {
    pub(super) chunks: u64,
}

/// The head of a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChunkHead {
    /// Index of the signal.
    pub series: u8,
    pub first_ticks: u64,
    pub runs: u32,
    pub bytes: u32,
}

/// Bytes of a chunk's head in a file: mark, signal, first tick, runs, bytes, checksum.
pub(super) const CHUNK_HEAD_BYTES: usize = 1 + 1 + 8 + 4 + 4 + 4;
pub(super) const CHUNK_MARK: u8 = b'R';
/// The mark of a chunk whose bytes are packed.
pub(super) const PACKED_MARK: u8 = b'P';
pub(super) const TAIL_MARK: u8 = b'T';

/// Samples per unit of time, from earlier runs. It predicts the number of samples of a run from the
/// run's length. Only the difference is written, which takes one byte however long the run is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Pace(pub(super) u64);

impl Pace {
    const SHIFT: u32 = 24;

    pub(super) fn of(samples: u64, steps: u64) -> Self {
        let ratio = (u128::from(samples) << Self::SHIFT) / u128::from(steps.max(1));
        Self(u64::try_from(ratio).unwrap_or(u64::MAX))
    }

    #[inline(always)]
    pub(super) fn samples(self, steps: u64) -> u64 {
        steps.saturating_mul(self.0) >> Self::SHIFT
    }
}

/// The lowest bit of a run in short form. Nearly all runs of tags have a tag that the chunk has
/// defined, and the predicted number of samples or one more or less. The short form has tag and
/// difference in one number: one byte for the first tags of a chunk.
pub(super) const SHORT: u64 = 1;
/// Differences that the short form can express, as encoded by [`super::varint::zigzag`].
pub(super) const SHORT_DIFFERENCES: u64 = 3;

/// Codes of states: the two lowest bits of the number that also has the samples.
pub(super) const GAP: u64 = 0;
pub(super) const NOT_RUNNING: u64 = 1;
pub(super) const OTHER: u64 = 2;
pub(super) const VALUE: u64 = 3;
