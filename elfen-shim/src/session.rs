//! One run of the observer: the words that are looked at, and the threads that look and wait.

use std::sync::Arc;
use std::thread::{self, JoinHandle};

use elfen_host::affinity;
use elfen_host::cpulist::CpuSet;
use elfen_host::run::place::be_ordinary;
use elfen_rt::signal::page::Page;
use elfen_rt::signal::service::ServiceReader;
use elfen_rt::signal::task::TaskMap;
use elfen_rt::signal::thread::ThreadSlot;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::clock::Clock;
use crate::observe::{Period, WORDS_MAX, observe};
use crate::pacing::Pacing;
use crate::rates::Rate;
use crate::reach::{Place, ProcState};
use crate::recorder::{Ended, Feed, Follow, NOTHING, Orders, Recorder, ThreadWord};
use crate::recording::{Kind, Pool, Series, Signal, Source};
use crate::signal_spec::{ServiceWord, Width};
use crate::tally::Tally;

/// Lanes that are followed one by one, at most: each takes two words of eight.
const LANES_MAX: usize = 3;
/// Threads that are looked at where nobody says who runs.
pub const THREADS_MAX: usize = 3;

/// As an observer names itself.
pub const OBSERVER: &str = "elfen-observer";

/// Why a signal cannot be added.
#[derive(Debug, thiserror::Error)]
#[error("at most {WORDS_MAX} words are read at a time, and these are more")]
pub struct TooMany;

/// The words of a run, while they are gathered.
#[derive(Debug)]
pub struct Words {
    pub signals: Vec<Signal>,
    pub process: u32,
    /// Whether its forked children are observed as well.
    pub children: bool,
    words: Vec<&'static AtomicU64>,
    feeds: Vec<Feed>,
    lanes: Vec<Follow>,
    plain: Vec<(usize, ThreadWord, u32)>,
    page: Option<&'static Page<ThreadSlot>>,
    rates: Vec<Rate>,
    pub state: Option<ProcState>,
    tag_feed: Option<usize>,
    /// Lanes, or threads, that observers before this one have; `None` if it has all there are.
    first: Option<usize>,
}

impl Words {
    pub fn of(process: u32, page: Option<&'static Page<ThreadSlot>>) -> Self {
        Self {
            signals: Vec::new(),
            process,
            children: false,
            words: Vec::new(),
            feeds: Vec::new(),
            lanes: Vec::new(),
            plain: Vec::new(),
            page,
            rates: Vec::new(),
            state: None,
            tag_feed: None,
            first: None,
        }
    }

    /// Those of one observer among several, which has its lanes behind `first` others; without a
    /// task map, its threads.
    pub fn as_part(self, first: usize) -> Self {
        Self { first: Some(first), ..self }
    }

    fn word(&mut self, word: &'static AtomicU64) -> Result<usize, TooMany> {
        if let Some(index) = self.words.iter().position(|known| std::ptr::eq(*known, word))
            && !std::ptr::eq(word, &raw const NOTHING)
        {
            return Ok(index);
        }
        if self.words.len() == WORDS_MAX {
            return Err(TooMany);
        }
        self.words.push(word);
        Ok(self.words.len() - 1)
    }

    fn feed(&mut self, name: String, source: Source, feed: Feed, names: Vec<(u64, String)>) {
        let signed = feed.width.signed && feed.kind == Kind::Values;
        self.signals.push(Signal { name, source, kind: feed.kind, signed, names });
        self.feeds.push(feed);
    }

    /// Whether these lanes are few enough to be followed.
    pub fn follows(map: &'static TaskMap, on: &CpuSet) -> bool {
        on.len() <= LANES_MAX && on.iter().all(|cpu| map.slot(cpu).is_some())
    }

    /// Who runs on these lanes, if they can be followed.
    pub fn add_tasks(
        &mut self,
        map: &'static TaskMap,
        on: &CpuSet,
        shown: bool,
    ) -> Result<(), TooMany> {
        let is_one = on.len() == 1 && self.first.is_none();
        for cpu in on.iter() {
            let Some(slot) = map.slot(cpu) else { continue };
            let word = self.word(&slot.task)?;
            self.lanes.push(Follow::new(slot, word, Vec::new()));
            if shown {
                let name = if is_one { "task".to_owned() } else { format!("task@{cpu}") };
                let feed = Feed {
                    kind: Kind::Tags,
                    word,
                    offset: 0,
                    width: Width::U64,
                    lane: None,
                    ready: None,
                };
                self.feed(name, Source::TaskMap, feed, Vec::new());
            }
        }
        Ok(())
    }

    /// Words of the threads' own, by the lane that they run on or, without a task map, of the first
    /// threads that have any.
    pub fn add_of_thread(
        &mut self,
        part: ThreadWord,
        signals: &[(&str, Kind, u64, Width, Source)],
    ) -> Result<(), TooMany> {
        let lanes = self.lanes.len();
        let count = if lanes > 0 { lanes } else { THREADS_MAX };
        for number in 0..count {
            let word = self.word(&NOTHING)?;
            let lane = (lanes > 0).then_some(number);
            let index = self.first.unwrap_or(0) + number;
            match lane {
                Some(lane) => self.lanes[lane].thread_words.push((word, part)),
                None => self.plain.push((word, part, u32::try_from(index).unwrap_or(0))),
            }
            for (name, kind, offset, width, source) in signals {
                let name = if index == 0 { (*name).to_owned() } else { format!("{name}#{index}") };
                let feed =
                    Feed { kind: *kind, word, offset: *offset, width: *width, lane, ready: None };
                self.tag_feed = match kind {
                    Kind::Tags => self.tag_feed.or(Some(self.feeds.len())),
                    Kind::Values => self.tag_feed,
                };
                self.feed(name, *source, feed, Vec::new());
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
            let word_index = self.word(at)?;
            let suffix = if reader.lanes() == 1 { String::new() } else { format!("#{lane}") };
            let name = format!("service:{name}.{}{suffix}", word.name());
            let (kind, width) = (Kind::Values, Width::U64);
            let feed = Feed { kind, word: word_index, offset: 0, width, lane: None, ready: None };
            self.feed(name, Source::ServicePage, feed, Vec::new());
        }
        Ok(())
    }

    pub fn add_place(&mut self, name: String, place: &Place) -> Result<(), TooMany> {
        let word = self.word(place.word)?;
        let Place { offset, width, ready, .. } = *place;
        let feed = Feed { kind: Kind::Values, word, offset, width, lane: None, ready };
        self.feed(name, place.source, feed, Vec::new());
        Ok(())
    }

    pub fn add_state(&mut self, state: ProcState) -> Result<(), TooMany> {
        let word = self.word(state.word)?;
        let feed =
            Feed { kind: Kind::Tags, word, offset: 0, width: Width::U64, lane: None, ready: None };
        self.feed("state".to_owned(), Source::Proc, feed, ProcState::names());
        self.state = Some(state);
        Ok(())
    }

    /// A word for a rate alone: of the first lane's thread, or of the first thread.
    pub fn word_of_thread(&mut self, part: ThreadWord) -> Result<usize, TooMany> {
        let word = self.word(&NOTHING)?;
        match self.lanes.first_mut() {
            Some(lane) => lane.thread_words.push((word, part)),
            None => self.plain.push((word, part, 0)),
        }
        Ok(word)
    }

    /// The word of a number that is watched as well.
    pub fn word_of_place(&mut self, place: &Place) -> Result<usize, TooMany> {
        self.word(place.word)
    }

    pub fn add_rate(&mut self, rate: Rate) {
        self.rates.push(rate);
    }

    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.signals.iter().position(|signal| signal.name == name)
    }

    /// How many words are read so far.
    pub fn count(&self) -> usize {
        self.words.len()
    }

    pub fn is_empty(&self) -> bool {
        self.feeds.is_empty()
    }
}

/// How a run is to go.
#[derive(Debug)]
pub struct How {
    pub from: u32,
    pub clock: Clock,
    pub period_ticks: u64,
    /// If the period follows the distance of the lanes; `period_ticks` is the first then.
    pub pacing: Option<Pacing>,
    pub fetch_ticks: u64,
    pub for_ticks: Option<u64>,
    pub memory: usize,
    pub keeps_last: bool,
    /// Each sample, and not runs of equal ones.
    pub keeps_samples: bool,
    pub until: Option<crate::recorder::Until>,
    pub costing: Option<crate::cost::Costing>,
    pub fold: Option<crate::fold::Fold>,
    pub live: Option<Arc<crate::live::Live>>,
}

/// What a sample may take by itself: a line of each word from wherever it is, and whatever is done
/// with it.
const WORD_NS: u64 = 1_000;
/// The same of one for which the kernel is asked.
const FETCH_GAP_NS: u64 = 10_000;

/// For how long an observer of a long period does not heed its orders.
const PATIENCE_NS: u64 = 1_000_000;

/// What two samples may be apart, however short the period is, before nobody is taken to have
/// looked.
fn gap_least_ns(words: usize, fetches: bool) -> u64 {
    match fetches {
        true => FETCH_GAP_NS,
        false => WORD_NS * (1 + words as u64),
    }
}

/// An observer at work. Both kinds know whether they read the clock once or twice a sample.
#[derive(Debug)]
pub enum Observer {
    Once(JoinHandle<Recorder<false>>),
    Twice(JoinHandle<Recorder<true>>),
}

/// What an observer leaves.
#[derive(Debug)]
pub struct Seen {
    pub pool: Pool,
    pub samples: u64,
    pub ended: Ended,
    pub missed_switches: Option<u64>,
    pub seen_switches: u64,
    pub period_ticks: (u64, u64),
    pub rates: Vec<Rate>,
    /// The signal that rates are kept apart by.
    pub tag_signal: Option<usize>,
    pub cost_ratios: Option<Vec<f64>>,
    pub failed_reads: u64,
    /// What was added up before the pool's own runs.
    pub tally: Option<Tally>,
}

impl Observer {
    /// Starts the loop in a thread of its own, on its lane.
    pub fn start(
        words: Words,
        how: How,
        reader: crate::reach::Reader,
        orders: Arc<Orders>,
    ) -> std::io::Result<Self> {
        if words.rates.is_empty() {
            start_one(words, how, reader, orders).map(Self::Once)
        } else {
            start_one(words, how, reader, orders).map(Self::Twice)
        }
    }

    pub fn is_done(&self) -> bool {
        match self {
            Self::Once(thread) => thread.is_finished(),
            Self::Twice(thread) => thread.is_finished(),
        }
    }

    pub fn join(self) -> Seen {
        match self {
            Self::Once(thread) => seen(joined(thread)),
            Self::Twice(thread) => seen(joined(thread)),
        }
    }
}

fn joined<T>(thread: JoinHandle<T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn seen<const BOTH: bool>(mut recorder: Recorder<BOTH>) -> Seen {
    recorder.close();
    Seen {
        samples: recorder.samples,
        ended: recorder.ended,
        missed_switches: recorder.missed_switches(),
        seen_switches: recorder.seen_switches(),
        period_ticks: (recorder.period_ticks(50), recorder.period_ticks(99)),
        cost_ratios: recorder.costing.take().map(|costing| costing.ratios),
        failed_reads: recorder.reader.failed,
        tag_signal: recorder.tag_feed,
        tally: recorder.fold.take().map(|fold| fold.tally),
        rates: recorder.rates,
        pool: recorder.pool,
    }
}

fn start_one<const BOTH: bool>(
    mut words: Words,
    how: How,
    reader: crate::reach::Reader,
    orders: Arc<Orders>,
) -> std::io::Result<JoinHandle<Recorder<BOTH>>> {
    let pool = Pool::new(how.memory, words.feeds.len(), how.keeps_last);
    let thread = thread::Builder::new().name(OBSERVER.to_owned());
    thread.spawn(move || {
        let mut recorder: Recorder<BOTH> = Recorder::new(pool, words.page, orders);
        let placed = be_ordinary().and_then(|()| affinity::pin(how.from));
        let start = crate::clock::before();
        words.lanes.iter_mut().for_each(Follow::begin);
        let step = how.clock.unit();
        let series = words.feeds.iter().enumerate().map(|(index, feed)| {
            let index = u8::try_from(index).unwrap_or(u8::MAX);
            let series = Series::new(index, feed.kind, step, start);
            if how.keeps_samples { series.singly() } else { series }
        });
        recorder.series = series.collect();
        let fetches = words.state.is_some() || !reader.is_empty();
        recorder.gap_least_ticks = how.clock.ticks(gap_least_ns(words.words.len(), fetches));
        // What is waited for then is the kernel.
        recorder.pacing = how.pacing.filter(|_| !fetches);
        recorder.pacing.iter_mut().for_each(Pacing::measure_own);
        let period = recorder.pace(Period(how.period_ticks));
        recorder.patience_ticks = how.clock.ticks(PATIENCE_NS);
        recorder.deadline = how.for_ticks.map_or(u64::MAX, |ticks| start.saturating_add(ticks));
        (recorder.cpu, recorder.process) = (how.from, words.process);
        recorder.children = words.children;
        (recorder.feeds, recorder.lanes, recorder.plain) = (words.feeds, words.lanes, words.plain);
        (recorder.rates, recorder.tag_feed) = (words.rates, words.tag_feed);
        (recorder.state, recorder.reader) = (words.state, reader);
        (recorder.until, recorder.costing, recorder.live) = (how.until, how.costing, how.live);
        (recorder.fetch_ticks, recorder.fold) = (how.fetch_ticks, how.fold);
        if placed.is_err() {
            recorder.ended = Ended::Moved;
            recorder.orders.stop.store(true, Relaxed);
            return recorder;
        }
        dispatch(&words.words, period, &mut recorder);
        recorder.lanes.iter_mut().for_each(Follow::end);
        recorder
    })
}

/// The loop is made for each number of words.
fn dispatch<const BOTH: bool>(
    words: &[&'static AtomicU64],
    period: Period,
    recorder: &mut Recorder<BOTH>,
) {
    macro_rules! of {
        ($($count:literal)*) => {
            match words.len() {
                $($count => {
                    let mut all = [&NOTHING; $count];
                    all.copy_from_slice(words);
                    observe::<$count, _>(period, all, recorder);
                })*
                _ => unreachable!("`Words::word` gives out no more than these"),
            }
        };
    }
    of!(1 2 3 4 5 6 7 8)
}
