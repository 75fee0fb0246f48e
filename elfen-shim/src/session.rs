//! The observers of a run: the words that they read, how they run, and what they return.
//!
//! [`Words`] collects the words and signals before the run. `cmd/gather.rs` chooses them, and
//! `observers.rs` runs the threads.

use std::sync::Arc;

use elfen_machine::cpulist::CpuSet;
use elfen_rt::signal::page::Page;
use elfen_rt::signal::service::ServiceReader;
use elfen_rt::signal::task::TaskMap;
use elfen_rt::signal::thread::ThreadSlot;
use std::sync::atomic::{AtomicBool, AtomicU64};

use crate::clock::Clock;
use crate::followed_lane::{FollowedLane, ThreadWord};
use crate::observe::WORDS_MAX;
use crate::pacing::Pacing;
use crate::rates::Rate;
use crate::reach::{NumberLocation, ProcState, VmReader};
use crate::recording::{Kind, Pool, Signal, Source};
use crate::signal_spec::{ServiceWord, Width};
use crate::tally::Tally;

/// A word that is always 0. The loop reads it in place of a thread's word while the thread is
/// unknown.
pub static ZERO_WORD: AtomicU64 = AtomicU64::new(0);

/// The location of a signal's value in the words of a sample.
#[derive(Clone, Copy, Debug)]
pub struct Feed {
    pub kind: Kind,
    pub word: usize,
    pub offset: u64,
    pub width: Width,
    /// The index of the lane, for a signal of the thread that runs there.
    pub lane: Option<usize>,
    /// A word that is 0 until the page of this value contains the program's own data.
    pub ready: Option<&'static AtomicU64>,
}

impl Feed {
    /// A feed of a whole word as an unsigned number.
    pub(crate) fn of_word(kind: Kind, word: usize) -> Self {
        Self { kind, word, offset: 0, width: Width::U64, lane: None, ready: None }
    }
}

/// Shared by the command and all observers of a run. Each of them may end the run.
#[derive(Debug, Default)]
pub struct ObserverControl {
    pub stop: AtomicBool,
}

/// Why an observer ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EndReason {
    /// The command or another observer set `stop`.
    Stopped,
    /// The time of `-d` is over.
    Deadline,
    /// The pool is full.
    Full,
    /// The observer no longer runs on its own CPU.
    Moved,
    /// The signal of `--until` exceeded its limit.
    Until,
    /// The observed pages are no longer shared.
    Unshared,
}

/// Ends a run when a signal exceeds a value (`--until`).
#[derive(Clone, Copy, Debug)]
pub struct Until {
    pub feed: usize,
    /// The limit, in the representation of recorded values: two's complement if `signed`.
    pub above: u64,
    pub signed: bool,
}

impl Until {
    #[inline(always)]
    pub(crate) fn is_passed_by(&self, value: u64) -> bool {
        if self.signed {
            value.cast_signed() > self.above.cast_signed()
        } else {
            value > self.above
        }
    }
}

/// The maximum number of lanes that one observer can follow. Each takes at least two of its eight
/// words.
const LANES_MAX: usize = 3;
/// The number of threads that one observer samples without a task map.
pub const THREADS_MAX: usize = 3;

/// The error for a signal that does not fit into the words of one sample.
#[derive(Debug, thiserror::Error)]
#[error("at most {WORDS_MAX} words are read at a time, and these signals need more")]
pub struct TooMany;

/// The words that an observer reads, and the signals that they contain.
#[derive(Debug, Default)]
pub struct Words {
    pub signals: Vec<Signal>,
    pub process: u32,
    /// Whether forked children are observed too. Their threads have slots on the same page.
    pub children: bool,
    pub(crate) words: Vec<&'static AtomicU64>,
    pub(crate) feeds: Vec<Feed>,
    pub(crate) lanes: Vec<FollowedLane>,
    /// Without a task map: the index of the word, its content, and the thread's slot on `page`.
    /// Threads claim slots in order.
    pub(crate) fixed_threads: Vec<(usize, ThreadWord, u32)>,
    pub(crate) page: Option<&'static Page<ThreadSlot>>,
    pub(crate) rates: Vec<Rate>,
    pub state: Option<ProcState>,
    /// Words of another process's memory, which need system calls.
    pub reader: VmReader,
    /// The index of the first feed of tags. Rates have a distribution for each of its values.
    pub(crate) tag_feed: Option<usize>,
    /// How many lanes (without a task map: threads) the previous observers have. `None` if there is
    /// only one observer.
    first: Option<usize>,
}

impl Words {
    pub fn of(process: u32, page: Option<&'static Page<ThreadSlot>>) -> Self {
        Self { process, page, ..Self::default() }
    }

    /// Marks these words as those of one of several observers. The lanes (without a task map: the
    /// threads) before number `first` belong to other observers.
    pub fn for_part(self, first: usize) -> Self {
        Self { first: Some(first), ..self }
    }

    /// Adds a word, unless it is already there, and returns its index.
    fn add_word(&mut self, word: &'static AtomicU64) -> Result<usize, TooMany> {
        if let Some(index) = self.words.iter().position(|known| std::ptr::eq(*known, word))
            && !std::ptr::eq(word, &raw const ZERO_WORD)
        {
            return Ok(index);
        }
        if self.words.len() == WORDS_MAX {
            return Err(TooMany);
        }
        self.words.push(word);
        Ok(self.words.len() - 1)
    }

    fn feed(&mut self, name: String, source: Source, feed: Feed) {
        let signed = feed.width.signed && feed.kind == Kind::Values;
        self.signals.push(Signal { signed, ..Signal::new(&name, source, feed.kind) });
        self.feeds.push(feed);
    }

    /// Returns whether one observer can follow all of these lanes.
    pub fn follows(map: &'static TaskMap, on: &CpuSet) -> bool {
        on.len() <= LANES_MAX && on.iter().all(|cpu| map.slot(cpu).is_some())
    }

    /// Follows these lanes. Records their tasks as signals if `shown`.
    pub fn add_tasks(
        &mut self,
        map: &'static TaskMap,
        on: &CpuSet,
        shown: bool,
    ) -> Result<(), TooMany> {
        let is_one = on.len() == 1 && self.first.is_none();
        for cpu in on.iter() {
            let Some(slot) = map.slot(cpu) else { continue };
            let word = self.add_word(&slot.task)?;
            self.lanes.push(FollowedLane::new(slot, word, Vec::new()));
            if shown {
                let name = if is_one { "task".to_owned() } else { format!("task@{cpu}") };
                self.feed(name, Source::TaskMap, Feed::of_word(Kind::Tags, word));
            }
        }
        Ok(())
    }

    /// Adds a word of the threads that run on the followed lanes, with the signals in it. Without a
    /// task map, adds words of the first threads that claimed slots.
    pub fn add_thread_word(
        &mut self,
        part: ThreadWord,
        signals: &[(&str, Kind, u64, Width, Source)],
    ) -> Result<(), TooMany> {
        let lanes = self.lanes.len();
        let count = if lanes > 0 { lanes } else { THREADS_MAX };
        for number in 0..count {
            let word = self.add_word(&ZERO_WORD)?;
            let lane = (lanes > 0).then_some(number);
            let index = self.first.unwrap_or(0) + number;
            match lane {
                Some(lane) => self.lanes[lane].thread_words.push((word, part)),
                None => self.fixed_threads.push((word, part, u32::try_from(index).unwrap_or(0))),
            }
            for (name, kind, offset, width, source) in signals {
                let name = if index == 0 { (*name).to_owned() } else { format!("{name}#{index}") };
                let (offset, width) = (*offset, *width);
                let feed = Feed { offset, width, lane, ..Feed::of_word(*kind, word) };
                self.tag_feed = match kind {
                    Kind::Tags => self.tag_feed.or(Some(self.feeds.len())),
                    Kind::Values => self.tag_feed,
                };
                self.feed(name, *source, feed);
            }
        }
        Ok(())
    }

    pub fn add_service(
        &mut self,
        name: &str,
        word: ServiceWord,
        reader: ServiceReader,
    ) -> Result<(), TooMany> {
        let reader: &'static ServiceReader = Box::leak(Box::new(reader));
        for lane in 0..reader.lanes() {
            let Some(slot) = reader.slot(lane) else { continue };
            let at = match word {
                ServiceWord::QueueLen => &slot.queue_len,
                ServiceWord::RunningRequest => &slot.running_request,
                ServiceWord::FinishedRequests => &slot.finished_requests,
            };
            let feed = Feed::of_word(Kind::Values, self.add_word(at)?);
            let suffix = if reader.lanes() == 1 { String::new() } else { format!("#{lane}") };
            let name = format!("service:{name}.{}{suffix}", word.name());
            self.feed(name, Source::ServicePage, feed);
        }
        Ok(())
    }

    pub fn add_number(&mut self, name: String, place: &NumberLocation) -> Result<(), TooMany> {
        let NumberLocation { offset, width, ready, .. } = *place;
        let feed = Feed::of_word(Kind::Values, self.add_word(place.word)?);
        self.feed(name, place.source, Feed { offset, width, ready, ..feed });
        Ok(())
    }

    pub fn add_state(&mut self, state: ProcState) -> Result<(), TooMany> {
        let feed = Feed::of_word(Kind::Tags, self.add_word(state.word)?);
        self.feed("state".to_owned(), Source::Proc, feed);
        self.signals.last_mut().expect("it was just added").names = ProcState::names();
        self.state = Some(state);
        Ok(())
    }

    /// Adds a word that only a rate uses. It belongs to the thread on the first lane, or without a
    /// task map to the first thread.
    pub fn add_rate_word_of_thread(&mut self, part: ThreadWord) -> Result<usize, TooMany> {
        let word = self.add_word(&ZERO_WORD)?;
        match self.lanes.first_mut() {
            Some(lane) => lane.thread_words.push((word, part)),
            None => self.fixed_threads.push((word, part, 0)),
        }
        Ok(word)
    }

    /// Adds the word of a number that only a rate uses.
    pub fn add_rate_word(&mut self, place: &NumberLocation) -> Result<usize, TooMany> {
        self.add_word(place.word)
    }

    /// The number of words.
    pub fn count(&self) -> usize {
        self.words.len()
    }

    pub fn is_empty(&self) -> bool {
        self.feeds.is_empty()
    }
}

/// The configuration of an observer.
#[derive(Debug, Default)]
pub struct ObserverConfig {
    /// The observer's CPU.
    pub from: u32,
    pub clock: Clock,
    /// The period. With `pacing`, this is the initial period.
    pub period_ticks: u64,
    /// Adapts the period, for `--period auto`.
    pub pacing: Option<Pacing>,
    pub fetch_ticks: u64,
    pub for_ticks: Option<u64>,
    pub memory: usize,
    pub keeps_last: bool,
    /// Whether each sample becomes a separate run, even if it equals the previous sample.
    pub keeps_samples: bool,
    pub until: Option<Until>,
    pub cost_meter: Option<crate::cost::CostMeter>,
    /// Adds up the runs of a nearly full pool, which is then cleared.
    pub fold: Option<crate::fold::Fold>,
    /// Totals for `--live`.
    pub live: Option<Arc<crate::live::LiveTotals>>,
}

/// The result of one observer, or of several that were merged.
#[derive(Debug)]
pub struct ObserverResult {
    pub pool: Pool,
    pub samples: u64,
    pub ended: EndReason,
    pub missed_switches: Option<u64>,
    pub seen_switches: u64,
    /// Median and 99th percentile of the time between samples.
    pub period_ticks: (u64, u64),
    pub rates: Vec<Rate>,
    /// The index of the signal whose tags separate the distributions of rates.
    pub tag_signal: Option<usize>,
    /// See [`CostMeter::ratios`](crate::cost::CostMeter::ratios).
    pub cost_ratios: Option<Vec<f64>>,
    pub failed_reads: u64,
    /// The sum of the runs before those in `pool` (`--keep histogram`).
    pub tally: Option<Tally>,
}

impl ObserverResult {
    /// Merges the result of another observer of the same run. Only the first observer has rates.
    #[must_use]
    pub fn merge(self, other: Self) -> Self {
        let both = |one: Option<u64>, other: Option<u64>| match (one, other) {
            (Some(one), Some(other)) => Some(one + other),
            (one, other) => one.or(other),
        };
        Self {
            pool: self.pool.with_observer(other.pool),
            samples: self.samples + other.samples,
            // One observer ends for its own reason, and then stops the others.
            ended: if self.ended == EndReason::Stopped { other.ended } else { self.ended },
            missed_switches: both(self.missed_switches, other.missed_switches),
            seen_switches: self.seen_switches + other.seen_switches,
            // The times of the slower observer.
            period_ticks: self.period_ticks.max(other.period_ticks),
            rates: self.rates,
            tag_signal: self.tag_signal,
            cost_ratios: self.cost_ratios,
            failed_reads: self.failed_reads + other.failed_reads,
            tally: match (self.tally, other.tally) {
                (Some(one), Some(other)) => Some(one.with_observer(other)),
                (one, other) => one.or(other),
            },
        }
    }
}
