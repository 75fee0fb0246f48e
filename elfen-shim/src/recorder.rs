//! The sink of a run: samples become runs, gaps and rates, in memory that is there already.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Acquire, Ordering::Relaxed};

use elfen_rt::signal::page::Page;
use elfen_rt::signal::task::Running;
use elfen_rt::signal::thread::{ThreadSlot, of_thread_word};

use crate::cost::Costing;
use crate::fold::Fold;
use crate::live::Live;
use crate::observe::{Period, Sample, Sink};
use crate::pacing::{Pacing, Stretch};
use crate::rates::{Point, Rate};
use crate::reach::{ProcState, Reader};
use crate::recording::{Full, Kind, Pool, Series, State};
use crate::signal_spec::Width;
use steps::Steps;

pub use followed_lane::{Follow, ThreadWord};

/// A word that is never written: what is looked at while there is nothing to look at.
pub static NOTHING: AtomicU64 = AtomicU64::new(0);

/// A signal's number in the words of a sample.
#[derive(Clone, Copy, Debug)]
pub struct Feed {
    pub kind: Kind,
    pub word: usize,
    pub offset: u64,
    pub width: Width,
    /// Index of the lane whose running thread it is of.
    pub lane: Option<usize>,
    /// A word that is 0 until this one has the program's own value.
    pub ready: Option<&'static AtomicU64>,
}

/// Why a recording ends, as both sides of it may say.
#[derive(Debug, Default)]
pub struct Orders {
    pub stop: AtomicBool,
    /// The process that has replaced itself by another program must be looked at anew.
    pub look_again: AtomicBool,
}

/// Why a recording has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ended {
    Told,
    Time,
    Full,
    Moved,
    Until,
    /// The pages that it observed are not shared any more.
    Unshared,
}

/// What ends a run by itself: a signal above a value.
#[derive(Clone, Copy, Debug)]
pub struct Until {
    pub feed: usize,
    /// A value of the signal, as it is recorded.
    pub above: u64,
    pub signed: bool,
}

impl Until {
    #[inline(always)]
    fn is_passed_by(&self, value: u64) -> bool {
        match self.signed {
            true => value.cast_signed() > self.above.cast_signed(),
            false => value > self.above,
        }
    }
}

/// See the head of this file.
#[derive(Debug)]
pub struct Recorder<const BOTH: bool> {
    pub pool: Pool,
    pub series: Vec<Series>,
    pub feeds: Vec<Feed>,
    pub lanes: Vec<Follow>,
    /// Slots of threads that are looked at without a task map, in the order of their claims.
    pub plain: Vec<(usize, ThreadWord, u32)>,
    pub page: Option<&'static Page<ThreadSlot>>,
    pub process: u32,
    /// Its forked children as well: they have slots of the same page.
    pub children: bool,
    pub rates: Vec<Rate>,
    /// The first signal that names what is done, for rates.
    pub tag_feed: Option<usize>,
    pub reader: Reader,
    pub state: Option<ProcState>,
    pub fetch_ticks: u64,
    /// The longest step between two samples that is no gap, if the period is short, and now.
    pub gap_least_ticks: u64,
    pub gap_ticks: u64,
    /// Of a period that follows the distance.
    pub pacing: Option<Pacing>,
    pub deadline: u64,
    /// For how long it may wait for a sample without heeding its orders.
    pub patience_ticks: u64,
    pub cpu: u32,
    pub orders: Arc<Orders>,
    pub until: Option<Until>,
    pub costing: Option<Costing>,
    /// Adds up what the pool holds before it is full.
    pub fold: Option<Fold>,
    /// For somebody who looks on.
    pub live: Option<Arc<Live>>,
    pub ended: Ended,
    pub samples: u64,
    claims: u64,
    next_fetch: u64,
    last: Option<(u64, u64)>,
    last_words: Vec<u64>,
    full: bool,
    was_above: bool,
    /// Words are another thread's since the last sample: no rate goes from one to the other.
    rebound: bool,
    steps: Steps,
}

impl<const BOTH: bool> Recorder<BOTH> {
    pub fn new(pool: Pool, page: Option<&'static Page<ThreadSlot>>, orders: Arc<Orders>) -> Self {
        Self {
            pool,
            series: Vec::new(),
            feeds: Vec::new(),
            lanes: Vec::new(),
            plain: Vec::new(),
            page,
            process: 0,
            children: false,
            rates: Vec::new(),
            tag_feed: None,
            reader: Reader::default(),
            state: None,
            fetch_ticks: u64::MAX,
            gap_least_ticks: u64::MAX,
            gap_ticks: u64::MAX,
            pacing: None,
            deadline: u64::MAX,
            patience_ticks: u64::MAX,
            cpu: 0,
            orders,
            until: None,
            costing: None,
            fold: None,
            live: None,
            ended: Ended::Told,
            samples: 0,
            claims: 0,
            next_fetch: 0,
            last: None,
            last_words: vec![0; crate::observe::WORDS_MAX],
            full: false,
            was_above: false,
            rebound: false,
            steps: Steps::new(),
        }
    }

    /// What two samples are apart in the mean, from now on. No wait is longer than one and a half
    /// of it: what was there for two was looked at, or there was a gap.
    pub fn pace(&mut self, period: Period) -> Period {
        self.gap_ticks = period.0.saturating_mul(2).max(self.gap_least_ticks);
        period
    }

    /// The end of the recording: what is open is closed.
    pub fn close(&mut self) {
        // Behind the last sample, so that its runs are kept: one may have ended the recording.
        let at = self.last.map_or_else(crate::clock::before, |(start, _)| start + 1);
        let pool = &mut self.pool;
        // A pool that is full has no room for the last runs either.
        let _lost = self.series.iter_mut().try_for_each(|series| series.end(at, pool));
    }

    pub fn missed_switches(&self) -> Option<u64> {
        (!self.lanes.is_empty()).then(|| self.lanes.iter().map(Follow::missed).sum())
    }

    /// Switches of these lanes that samples saw.
    pub fn seen_switches(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.seen_switches).sum()
    }

    /// Ticks between samples: the smallest value that `percent` of all do not exceed.
    pub fn period_ticks(&self, percent: u64) -> u64 {
        self.steps.quantile(percent)
    }

    /// Follows the thread that a lane runs now.
    #[cold]
    fn switched<const N: usize>(
        &mut self,
        lane: usize,
        sample: &Sample<N>,
        words: &mut [&'static AtomicU64; N],
    ) {
        let follow = &mut self.lanes[lane];
        let task = sample.words[follow.task_word];
        follow.count_switches(sample.start);
        follow.seen_switches += u64::from(follow.task != u64::MAX - 1);
        follow.task = task;
        (follow.runs, follow.bound) = (false, false);
        self.find(lane, words);
    }

    /// Whether the thread that a lane runs is of those that are observed, and what it says.
    fn find<const N: usize>(&mut self, lane: usize, words: &mut [&'static AtomicU64; N]) {
        let follow = &mut self.lanes[lane];
        let Running::Task(task) = Running::from_word(follow.task) else { return };
        let is_own = task.process == self.process;
        if is_own || self.children {
            let slot = self.page.and_then(|page| slot_of(page, self.claims, follow.task));
            follow.runs = is_own || slot.is_some();
            follow.bind(slot, words);
            self.rebound |= follow.bound;
        }
    }

    /// What was claimed since the last look.
    fn bind_new<const N: usize>(&mut self, words: &mut [&'static AtomicU64; N]) {
        let Some(page) = self.page else { return };
        let claims = page.slot(0).map_or(0, |slot| slot.claims.load(Relaxed));
        if claims == self.claims {
            return;
        }
        self.claims = claims;
        for lane in 0..self.lanes.len() {
            if !self.lanes[lane].bound {
                self.find(lane, words);
            }
        }
        for (word, part, index) in &self.plain {
            let slot = page.slot(*index);
            let ours =
                |slot: &&ThreadSlot| of_thread_word(slot.thread.load(Relaxed)).0 == self.process;
            if let Some(slot) = slot.filter(ours) {
                words[*word] = part.of(slot);
                self.rebound = true;
            }
        }
    }

    #[inline(always)]
    fn see<const N: usize>(&mut self, sample: &Sample<N>) -> Result<(), Full> {
        let live = self.live.as_deref();
        for (index, (feed, series)) in self.feeds.iter_mut().zip(&mut self.series).enumerate() {
            let state = match feed.lane.map(|lane| &self.lanes[lane]) {
                // This sample's word may be older than the page's own value; the next one's is not.
                // Acquire: pairs with the system call by which the preload library says so.
                _ if feed.ready.is_some() => {
                    feed.ready = feed.ready.filter(|ready| ready.load(Acquire) == 0);
                    State::NotRunning
                }
                Some(lane) if !lane.runs => State::NotRunning,
                // What is read of it is another thread's until its slot is found.
                Some(lane) if !lane.bound => State::Value(0),
                Some(_) | None => State::Value(feed.width.of(sample.words[feed.word], feed.offset)),
            };
            if let Some(live) = live.filter(|_| series.state() != state) {
                live.change(index, sample.start, state);
            }
            series.see(sample.start, state, &mut self.pool)?;
        }
        Ok(())
    }

    /// Adds up and begins anew; nobody looks meanwhile.
    #[cold]
    fn fold_up(&mut self) {
        self.close();
        if let Some(fold) = &mut self.fold {
            fold.add(&self.pool);
        }
        self.pool.clear();
        self.series.iter_mut().for_each(Series::begin_anew);
        self.last = None;
        // What progresses meanwhile is unobserved, and in no stretch.
        self.costing.iter_mut().for_each(Costing::begin_anew);
    }

    /// There was no look between the sample at `last` and this one.
    #[cold]
    fn gap<const N: usize>(&mut self, last: u64, sample: &Sample<N>) -> Result<(), Full> {
        let lanes = &self.lanes;
        let stayed = |lane: &Follow| lane.stayed(last, sample.words[lane.task_word]);
        for (index, (feed, series)) in self.feeds.iter().zip(&mut self.series).enumerate() {
            if let Some(live) = &self.live {
                live.change(index, last, State::Gap);
            }
            let proven = match feed.lane {
                // What its thread did meanwhile is not known, but that it did not run is.
                Some(lane) => series.state() == State::NotRunning && stayed(&lanes[lane]),
                None => lanes.iter().any(|lane| lane.task_word == feed.word && stayed(lane)),
            };
            series.gap(last, proven, &mut self.pool)?;
        }
        Ok(())
    }

    fn add_rates<const N: usize>(&mut self, sample: &Sample<N>, last: (u64, u64)) {
        let tag = self.tag_feed.map_or(State::Value(0), |feed| self.series[feed].state());
        let State::Value(tag) = tag else { return };
        if !self.lanes.is_empty() && !self.lanes.iter().any(|lane| lane.runs) {
            // What stands still while its thread does is no rate of it.
            return;
        }
        let (words, before) = (&sample.words, &self.last_words);
        for rate in &mut self.rates {
            let value = |words: &[u64], index: Option<usize>| index.map_or(0, |at| words[at]);
            let (counter, against) = (words[rate.counter], value(words, rate.against));
            let (start, end) = (sample.start, sample.end);
            let now = Point { start, end, counter, against };
            let (counter, against) = (before[rate.counter], value(before, rate.against));
            let last = Point { start: last.0, end: last.1, counter, against };
            rate.add(tag, &last, &now);
        }
    }
}

/// The slot that a task has; there are no more than were claimed.
fn slot_of(page: &'static Page<ThreadSlot>, claims: u64, task: u64) -> Option<&'static ThreadSlot> {
    let claimed = usize::try_from(claims).unwrap_or(usize::MAX).max(1);
    page.slots().take(claimed).find(|slot| slot.thread.load(Relaxed) == task)
}

impl<const N: usize, const BOTH: bool> Sink<'static, N> for Recorder<BOTH> {
    const BOTH_ENDS: bool = BOTH;

    #[inline(always)]
    fn fetch(&mut self, now: u64) {
        if now < self.next_fetch || self.fetch_ticks == u64::MAX {
            return;
        }
        if let Some(state) = &self.state {
            state.fetch();
        }
        if !self.reader.is_empty() {
            self.reader.fetch();
        }
        self.next_fetch = now + self.fetch_ticks;
    }

    #[inline(always)]
    fn take(&mut self, sample: &Sample<N>, words: &mut [&'static AtomicU64; N]) {
        self.samples += 1;
        let mut steady = !std::mem::take(&mut self.rebound);
        if let Some((last, _)) = self.last {
            let step = sample.start - last;
            self.steps.add(step);
            if step > self.gap_ticks {
                steady = false;
                self.full |= self.gap(last, sample).is_err();
            }
        } else {
            steady = false;
        }
        let mut switched = false;
        for lane in 0..self.lanes.len() {
            let task = sample.words[self.lanes[lane].task_word];
            if task != self.lanes[lane].task {
                self.switched(lane, sample, words);
                switched = true;
            }
        }
        // The thread's words in this sample were still those of the one before it.
        if !switched || !self.lanes.iter().any(|lane| lane.runs) {
            self.full |= self.see(sample).is_err();
        }
        if BOTH && !self.rates.is_empty() {
            if let Some(last) = self.last.filter(|_| steady && !switched) {
                self.add_rates(sample, last);
            }
            for (last, word) in self.last_words.iter_mut().zip(&sample.words) {
                *last = *word;
            }
        }
        if let Some(until) = self.until
            && let State::Value(value) = self.series[until.feed].state()
        {
            self.was_above |= until.is_passed_by(value);
        }
        self.last = Some((sample.start, sample.end));
    }

    #[inline(always)]
    fn period(&mut self, now: Period, found: &Stretch) -> Period {
        match self.pacing.as_mut().and_then(|pacing| pacing.add(found)) {
            Some(ticks) => self.pace(Period(ticks)),
            None => now,
        }
    }

    fn patience(&self) -> u64 {
        self.patience_ticks
    }

    fn goes_on(&mut self, now: u64, words: &mut [&'static AtomicU64; N]) -> bool {
        self.bind_new(words);
        if let Some((last, _)) = self.last {
            // Switches that came and went unseen are behind it from here on.
            self.lanes.iter_mut().for_each(|lane| lane.count_switches(last));
        }
        if let Some(live) = &self.live {
            live.until.store(now, Relaxed);
            live.samples.store(self.samples, Relaxed);
        }
        if let Some(costing) = &mut self.costing {
            costing.turn(now);
        }
        if self.fold.is_some() && self.pool.is_nearly_full() {
            self.fold_up();
        }
        // SAFETY: takes nothing; the C library answers from memory.
        let cpu = unsafe { libc::sched_getcpu() };
        self.ended = if self.full {
            Ended::Full
        } else if self.was_above {
            Ended::Until
        } else if now >= self.deadline {
            Ended::Time
        } else if u32::try_from(cpu) != Ok(self.cpu) {
            Ended::Moved
        } else {
            Ended::Told
        };
        if self.ended != Ended::Told {
            // For the other observers of this run.
            self.orders.stop.store(true, Relaxed);
        }
        !self.orders.stop.load(Relaxed)
    }
}

mod followed_lane;
mod steps;
#[cfg(test)]
mod tests;
