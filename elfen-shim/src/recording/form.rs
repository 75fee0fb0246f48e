//! What recordings are made of: states, runs, signals, and what stands before and behind chunks.

use serde::{Deserialize, Serialize};

use crate::clock::{Clock, Moment};

/// Of the file's form.
pub const VERSION: u32 = 5;
/// The fourth has no packed chunks; the third no short form of runs; the second has times in steps
/// of the clock; the first's runs have the distance from the one before them, and samples as they
/// are.
pub(super) const VERSION_OF_DISTANCES: u32 = 1;
pub(super) const VERSION_OF_SHORT_RUNS: u32 = 4;
pub(super) const VERSION_OF_PACKED_CHUNKS: u32 = 5;
/// How a file begins.
pub const MAGIC: [u8; 8] = *b"ELFNSHIM";
/// Bytes of a chunk of runs, at most.
pub(super) const CHUNK_BYTES: usize = 16 << 10;
/// Bytes of head or tail, at most.
pub(super) const JSON_BYTES: usize = 4 << 20;
/// Runs of a file, at most: as many as one of the greatest length had before chunks were packed.
pub(super) const RUNS_MAX: u64 = 1 << 31;
/// Different tags of one signal; further ones are [`State::Other`].
pub(super) const TAGS_MAX: usize = 4096;

/// What a signal was from some moment on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum State {
    /// Nobody looked.
    Gap,
    /// The thread whose signal it is did not run.
    NotRunning,
    /// A tag beyond those that a recording can tell apart.
    Other,
    Value(u64),
}

/// The same state in some samples in a row. It ends where the next run starts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    pub start_ticks: u64,
    pub state: State,
    /// Of a gap: 1 if the observer has proven that nothing changed in it, else 0.
    pub samples: u64,
}

/// What a signal's values mean.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Names of what is done: few, and each comes back.
    Tags,
    /// Numbers.
    Values,
}

/// Where a signal came from.
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
    /// Whether its numbers can be negative: a value is the number's 64-bit two's complement then.
    #[serde(default)]
    pub signed: bool,
    /// Names of values, where they have any.
    pub names: Vec<(u64, String)>,
}

impl Signal {
    /// The number that a value of this signal is.
    pub fn number(&self, value: u64) -> i128 {
        if self.signed { value.cast_signed().into() } else { value.into() }
    }
}

/// What stands before the chunks.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Head {
    pub program: String,
    pub process: u32,
    /// Whether forked children of it were observed as well.
    #[serde(default)]
    pub children: bool,
    pub machine: String,
    /// Lanes that were observed, and the one that the first observer had.
    pub on: String,
    pub from: u32,
    /// If there were several; earlier recordings had one.
    #[serde(default)]
    pub observers: Vec<Observing>,
    pub clock: Clock,
    /// When its first run began; earlier recordings do not tell.
    #[serde(default)]
    pub began: Option<Moment>,
    /// 0 for as fast as it goes; `None` if it followed the cost.
    pub asked_period_ns: Option<u64>,
    pub line_round_trip_ns: Option<u64>,
    pub signals: Vec<Signal>,
    pub samples: u64,
    pub period_ns: Periods,
    pub steal_ns: u64,
    /// How long the observed was stopped; earlier recordings know of no such thing.
    #[serde(default)]
    pub stopped_ns: u64,
    /// Of that, at the end; earlier recordings do not tell it apart.
    #[serde(default)]
    pub stopped_at_end_ns: u64,
    pub missed_switches: Option<u64>,
    /// Threads that found no slot to say what they do.
    pub refused_threads: u64,
    /// Functions that say by code at their entries that they run; earlier recordings have none.
    #[serde(default)]
    pub entries: u64,
    /// Those among them that another cannot be told from, and that say nothing.
    #[serde(default)]
    pub ambiguous: u64,
    /// Whether each sample is a run of its own.
    #[serde(default)]
    pub keeps_samples: bool,
    /// Gaps that are no longer are taken to change nothing.
    #[serde(default)]
    pub bridge_ns: u64,
    pub rates: Vec<RateFigure>,
    pub dte: Option<Dte>,
    pub cost: Option<Cost>,
    /// Why there is no cost.
    pub cost_unknown: String,
    /// Why the recording ended.
    pub ended: String,
    pub exit_status: Option<i32>,
}

/// One of several observers: its signals follow those of the one before it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Observing {
    pub from: u32,
    pub on: String,
    pub signals: usize,
}

impl Head {
    /// The first signal of each observer: who had a gap had it in all of its signals.
    pub fn firsts(&self) -> Vec<usize> {
        let mut behind = 0;
        let firsts = self.observers.iter().map(|observer| {
            behind += observer.signals;
            behind - observer.signals
        });
        let firsts: Vec<usize> = firsts.collect();
        if firsts.is_empty() { vec![0] } else { firsts }
    }
}

/// What time passed between two samples.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Periods {
    /// See `asked_period_ns` of [`Head`].
    pub asked: Option<u64>,
    pub median: u64,
    pub p99: u64,
}

/// A rate, in the samples of one tag.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RateFigure {
    pub name: String,
    pub tag: String,
    pub median: f64,
    pub p10: f64,
    pub p90: f64,
    pub kept_percent: f64,
}

/// What double-time error left of the rates.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Dte {
    pub tolerance_percent: u64,
    pub floor_ns: f64,
    pub kept: u64,
    pub discarded: u64,
    /// Samples over which a counter of a rate shrank.
    pub shrunk: u64,
}

/// What observing cost the observed.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Cost {
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

/// What stands behind the chunks of a file that is whole.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Tail {
    pub(super) chunks: u64,
}

/// How a chunk begins.
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
/// Of a chunk whose bytes are packed.
pub(super) const PACKED_MARK: u8 = b'P';
pub(super) const TAIL_MARK: u8 = b'T';

/// How many samples a run of so many steps has, by how many those before it had: so a number takes
/// a byte that says how far it is off, however long the run is.
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

/// Nearly all runs of tags are of one that is known, and have as many samples as is foretold, or
/// one more or less: tag and difference are one number, and so a byte for the first tags of a
/// chunk. Its lowest bit tells it from the code of a state.
pub(super) const SHORT: u64 = 1;
/// Differences that have a short form, as [`super::varint::zigzag`] has them: from 0 on.
pub(super) const SHORT_DIFFERENCES: u64 = 3;

/// Codes of states, in the two lowest bits beside the samples.
pub(super) const GAP: u64 = 0;
pub(super) const NOT_RUNNING: u64 = 1;
pub(super) const OTHER: u64 = 2;
pub(super) const VALUE: u64 = 3;
