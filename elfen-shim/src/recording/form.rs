//! The parts of a recording: states, runs, signals, and the head, chunks and tail of a file.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::clock::{Clock, Moment};

/// Version of the file format.
pub const VERSION: u32 = 1;
/// The first bytes of a file.
pub const MAGIC: [u8; 8] = *b"ELFNSHIM";
/// The maximum number of bytes of a chunk's runs.
pub(super) const CHUNK_BYTES: usize = 16 << 10;
/// The maximum number of bytes of a chunk in a file. Runs that cannot be compressed take a few
/// bytes more than in memory.
pub(super) const CHUNK_BLOCK_BYTES: usize = CHUNK_BYTES + 128;
/// The maximum number of bytes of a head.
pub(super) const HEAD_BYTES: usize = 4 << 20;
/// How many bytes of runs a chunk may have per byte in the file. This bounds the memory that a file
/// can make the reader use.
pub(super) const EXPANSION_MAX: usize = 8;
/// The maximum number of runs of a file.
pub(super) const RUNS_MAX: u64 = 1 << 31;
/// The maximum number of tags of a chunk. Further tags become [`State::Other`].
pub(super) const TAGS_MAX: usize = 4096;

/// The state of a signal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum State {
    /// No samples were taken.
    Gap,
    /// The thread of this signal did not run.
    NotRunning,
    /// A tag beyond the maximum number of tags of a chunk.
    Other,
    Value(u64),
}

/// Consecutive samples with the same state. A run ends where the next one starts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    pub start_ticks: u64,
    pub state: State,
    /// The number of samples. For a gap: 1 if the observer has proven that nothing changed in it,
    /// else 0.
    pub samples: u64,
}

/// The meaning of a signal's values.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Values with names: tags, functions or tasks. There are few different values, and each
    /// recurs.
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
    pub signed: bool,
    /// Pairs of a value and its name.
    pub names: Vec<(u64, String)>,
}

impl Signal {
    /// Creates a signal of unsigned numbers, or of values without names.
    pub fn new(name: &str, source: Source, kind: Kind) -> Self {
        Self { name: name.to_owned(), source, kind, signed: false, names: Vec::new() }
    }

    /// Interprets a value as a signed or unsigned number.
    pub fn number(&self, value: u64) -> i128 {
        if self.signed { value.cast_signed().into() } else { value.into() }
    }

    pub fn state_names(&self) -> StateNames<'_> {
        let names = self.names.iter().map(|(value, name)| (*value, name.as_str())).collect();
        StateNames { signal: self, names }
    }
}

/// The name of the value 0: the thread has set no tag, or reports no function.
pub const NO_NAME: &str = "(none)";

/// How the states of a signal are printed.
#[derive(Debug)]
pub struct StateNames<'a> {
    signal: &'a Signal,
    names: HashMap<u64, &'a str>,
}

impl StateNames<'_> {
    /// The name of a state, or its number.
    pub fn of(&self, state: State) -> String {
        match (state, self.signal.kind) {
            (State::Gap, _) => "(gap)".to_owned(),
            (State::NotRunning, _) => "(not running)".to_owned(),
            (State::Other, _) => "(others)".to_owned(),
            (State::Value(value), Kind::Values) => self.signal.number(value).to_string(),
            (State::Value(value), Kind::Tags) => match self.names.get(&value) {
                Some(name) => (*name).to_owned(),
                None if value == 0 => NO_NAME.to_owned(),
                None => format!("{value:#x}"),
            },
        }
    }
}

/// The head of a recording, which precedes its chunks.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Head {
    pub program: String,
    pub process: u32,
    /// Whether its forked children were observed too.
    pub children: bool,
    pub machine: String,
    /// The observed lanes.
    pub on: String,
    /// The CPU of the first observer.
    pub from: u32,
    /// All observers, if there were several.
    pub observers: Vec<ObserverHead>,
    pub clock: Clock,
    /// When the first run began.
    pub began: Option<Moment>,
    pub line_round_trip_ns: Option<u64>,
    pub signals: Vec<Signal>,
    pub samples: u64,
    pub period_ns: Periods,
    pub steal_ns: u64,
    /// Whether each sample is a separate run (`--keep samples`).
    pub keeps_samples: bool,
    /// Gaps up to this length count as gaps without a change (`--bridge`).
    pub bridge_ns: u64,
    pub rates: Vec<RateFigure>,
    /// Why the recording ended early or is incomplete. Empty if nothing is wrong.
    pub ended: String,
    #[serde(flatten)]
    pub figures: RunFigures,
}

/// Figures of a whole run, which are part of the head and of the summary.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct RunFigures {
    pub missed_switches: Option<u64>,
    pub dte: Option<Dte>,
    pub cost_percent: Option<Cost>,
    /// Why the cost is missing although it was requested.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub cost_unknown: String,
    /// How long the process was stopped to share its pages, in total.
    pub stopped_ns: u64,
    /// The part of `stopped_ns` at the end of the run.
    pub stopped_at_end_ns: u64,
    /// Threads that found no free slot on the page of threads.
    pub refused_threads: u64,
    /// The number of functions that report their entries by code at these entries.
    pub entries: u64,
    /// Functions that do not report, because another function's address has the same lower half.
    pub ambiguous_entries: u64,
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
    /// The requested period: 0 for `--period max`, `None` for `--period auto`.
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
    /// The number of samples between which a counter of a rate decreased.
    pub shrunk: u64,
}

/// How much observation slowed the observed program, in percent: the median, and its 95 % interval.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Cost {
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

/// The head of a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChunkHead {
    /// Index of the signal.
    pub series: u8,
    pub first_ticks: u64,
    pub runs: u32,
    /// Bytes of its runs in memory.
    pub bytes: u32,
}

/// The first byte of a block in a file.
pub(super) const HEAD_MARK: u8 = b'H';
pub(super) const CHUNK_MARK: u8 = b'R';
pub(super) const TAIL_MARK: u8 = b'T';

/// Codes of states, in the two lowest bits of a number. The other bits are the number of samples.
pub(super) const GAP: u64 = 0;
pub(super) const NOT_RUNNING: u64 = 1;
pub(super) const OTHER: u64 = 2;
pub(super) const VALUE: u64 = 3;

/// The maximum number of bytes of an encoded number. Each byte has seven bits of the number.
pub(super) const NUMBER_BYTES: usize = 10;

/// Writes a number to the front of `to`, which has at least [`NUMBER_BYTES`] bytes. Returns its
/// length.
#[inline(always)]
pub(super) fn put(mut value: u64, to: &mut [u8]) -> usize {
    for (at, byte) in to.iter_mut().take(NUMBER_BYTES).enumerate() {
        let low = (value & 0x7f) as u8;
        value >>= 7;
        if value == 0 {
            *byte = low;
            return at + 1;
        }
        *byte = low | 0x80;
    }
    NUMBER_BYTES
}

/// Takes a number from the front. Returns `None` if the bytes end early or the number has more than
/// 64 bits.
pub(super) fn take(from: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..70).step_by(7) {
        let (&byte, rest) = from.split_first()?;
        *from = rest;
        let bits = u64::from(byte & 0x7f);
        if shift == 63 && bits > 1 {
            return None;
        }
        value |= bits << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// Encodes small numbers of either sign as small unsigned numbers.
#[inline(always)]
pub(super) fn zigzag(difference: u64) -> u64 {
    let signed = difference.cast_signed();
    (signed << 1 ^ signed >> 63).cast_unsigned()
}

pub(super) fn unzigzag(value: u64) -> u64 {
    (value >> 1) ^ (value & 1).wrapping_neg()
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #[test]
        fn numbers_come_back(value: u64, cut in 0usize..NUMBER_BYTES) {
            let mut bytes = [0xff; NUMBER_BYTES + 1];
            let count = put(value, &mut bytes);
            let mut from = &bytes[..];
            proptest::prop_assert_eq!(take(&mut from), Some(value));
            proptest::prop_assert_eq!(from.len(), bytes.len() - count);
            let mut short = &bytes[..cut.min(count - 1)];
            proptest::prop_assert_eq!(take(&mut short), None);
            proptest::prop_assert_eq!(unzigzag(zigzag(value)), value);
        }
    }

    #[test]
    fn small_numbers_are_one_byte_and_long_ones_are_refused() {
        let mut bytes = [0; NUMBER_BYTES];
        assert_eq!((put(127, &mut bytes), put(128, &mut bytes)), (1, 2));
        assert_eq!((zigzag(0), zigzag(1), zigzag(u64::MAX)), (0, 2, 1));
        assert_eq!(take(&mut &[0xff; 20][..]), None);
        let too_much = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2];
        assert_eq!(take(&mut &too_much[..]), None);
    }
}
