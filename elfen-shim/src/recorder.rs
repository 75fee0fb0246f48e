//! The sink of one observer: turns samples into runs, gaps and rates.
//!
//! A [`Recorder`] runs inside of the sampling loop, so all memory is allocated before the first
//! sample. It also follows the threads of the observed lanes: after each switch it has the loop
//! read the words of the thread that runs now.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Acquire, Ordering::Relaxed};

use elfen_rt::signal::page::Page;
use elfen_rt::signal::task::Running;
use elfen_rt::signal::thread::{ThreadSlot, of_thread_word};

use crate::cost::CostMeter;
use crate::fold::Fold;
use crate::histogram::IntervalHistogram;
use crate::live::LiveTotals;
use crate::observe::{Period, Sample, Sink};
use crate::pacing::{BlockStats, Pacing};
use crate::rates::{Rate, RatePoint};
use crate::reach::{ProcState, VmReader};
use crate::recording::{Full, Kind, Pool, Series, State};
use crate::signal_spec::Width;
use followed_lane::UNKNOWN_TASK;

pub use followed_lane::{FollowedLane, ThreadWord};

/// A word that is always 0. The loop reads it in place of a thread's word while no thread is known.
pub static ZERO_WORD: AtomicU64 = AtomicU64::new(0);

/// Where the value of a signal is in the words of a sample.
#[derive(Clone, Copy, Debug)]
pub struct Feed {
    pub kind: Kind,
    pub word: usize,
    pub offset: u64,
    pub width: Width,
    /// Index of the lane, for a signal of the thread that runs there.
    pub lane: Option<usize>,
    /// A word that is 0 until the page of this value holds the program's own data.
    pub ready: Option<&'static AtomicU64>,
}

/// Shared by the command and all observers of a run: each of them may end the run.
#[derive(Debug, Default)]
pub struct ObserverControl {
    pub stop: AtomicBool,
}

/// Why an observer ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EndReason {
    /// The command or another observer set `stop`.
    Stopped,
    /// The time of `--for` is over.
    Deadline,
    /// The pool is full.
    Full,
    /// The observer no longer runs on its own CPU.
    Moved,
    /// The signal of `--until` exceeded its limit.
    Until,
    /// The observed pages are not shared any more.
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
    fn is_passed_by(&self, value: u64) -> bool {
        if self.signed {
            value.cast_signed() > self.above.cast_signed()
        } else {
            value > self.above
        }
    }
}

/// Records the samples of one observer. `BOTH`: each sample has two clock readings, as rates need.
#[derive(Debug)]
pub struct Recorder<const BOTH: bool> {
    pub pool: Pool,
    pub series: Vec<Series>,
    pub feeds: Vec<Feed>,
    pub lanes: Vec<FollowedLane>,
    /// Without a task map: index of the word, what it holds, and the slot of the thread on `page`.
    /// Threads claim slots in order.
    pub fixed_threads: Vec<(usize, ThreadWord, u32)>,
    pub page: Option<&'static Page<ThreadSlot>>,
    pub process: u32,
    /// Whether to record forked children too. They have slots of the same page.
    pub children: bool,
    pub rates: Vec<Rate>,
    /// Index of the first feed of kind tags. Rates have a distribution for each of its values.
    pub tag_feed: Option<usize>,
    pub reader: VmReader,
    pub state: Option<ProcState>,
    pub fetch_ticks: u64,
    /// Lower bound of `gap_ticks`, however short the period is.
    pub min_gap_ticks: u64,
    /// Two samples that are farther apart than this have a gap between them.
    pub gap_ticks: u64,
    /// Adapts the period, for `--period auto`.
    pub pacing: Option<Pacing>,
    pub deadline: u64,
    /// How long the loop may wait for the next sample without checking `control`.
    pub check_interval_ticks: u64,
    pub cpu: u32,
    pub control: Arc<ObserverControl>,
    pub until: Option<Until>,
    pub cost_meter: Option<CostMeter>,
    /// Adds up the runs of a nearly full pool, which is then cleared.
    pub fold: Option<Fold>,
    /// Totals for `--live`.
    pub live: Option<Arc<LiveTotals>>,
    pub ended: EndReason,
    pub samples: u64,
    claims: u64,
    next_fetch: u64,
    last: Option<(u64, u64)>,
    last_words: Vec<u64>,
    full: bool,
    until_reached: bool,
    /// Since the last sample, words were replaced by those of another thread: the difference of two
    /// threads' counters is not a rate.
    rebound: bool,
    intervals: IntervalHistogram,
}

impl<const BOTH: bool> Recorder<BOTH> {
    pub fn new(
        pool: Pool,
        page: Option<&'static Page<ThreadSlot>>,
        control: Arc<ObserverControl>,
    ) -> Self {
        Self {
            pool,
            series: Vec::new(),
            feeds: Vec::new(),
            lanes: Vec::new(),
            fixed_threads: Vec::new(),
            page,
            process: 0,
            children: false,
            rates: Vec::new(),
            tag_feed: None,
            reader: VmReader::default(),
            state: None,
            fetch_ticks: u64::MAX,
            min_gap_ticks: u64::MAX,
            gap_ticks: u64::MAX,
            pacing: None,
            deadline: u64::MAX,
            check_interval_ticks: u64::MAX,
            cpu: 0,
            control,
            until: None,
            cost_meter: None,
            fold: None,
            live: None,
            ended: EndReason::Stopped,
            samples: 0,
            claims: 0,
            next_fetch: 0,
            last: None,
            last_words: vec![0; crate::observe::WORDS_MAX],
            full: false,
            until_reached: false,
            rebound: false,
            intervals: IntervalHistogram::new(),
        }
    }

    /// Sets the mean time between two samples. No wait exceeds one and a half periods, so whatever
    /// lasted for two periods was sampled, or a gap is recorded.
    pub fn set_period(&mut self, period: Period) -> Period {
        self.gap_ticks = period.0.saturating_mul(2).max(self.min_gap_ticks);
        period
    }

    /// Ends the open run of each signal.
    pub fn close(&mut self) {
        // One tick after the last sample, so that runs which began with it are kept: one of them
        // may have ended the recording.
        let at = self.last.map_or_else(crate::clock::before, |(start, _)| start + 1);
        let pool = &mut self.pool;
        // A full pool has no room for the last runs either.
        let _lost = self.series.iter_mut().try_for_each(|series| series.end(at, pool));
    }

    /// Switches of these lanes that no sample saw; `None` if no lane is followed.
    pub fn missed_switches(&self) -> Option<u64> {
        (!self.lanes.is_empty()).then(|| self.lanes.iter().map(FollowedLane::missed).sum())
    }

    /// Switches of these lanes that samples saw.
    pub fn seen_switches(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.seen_switches).sum()
    }

    /// Ticks between samples: the smallest value that `percent` of all do not exceed.
    pub fn period_ticks(&self, percent: u64) -> u64 {
        self.intervals.quantile(percent)
    }

    /// Follows a lane to the task that it runs now.
    #[cold]
    fn follow_switch<const N: usize>(
        &mut self,
        lane: usize,
        sample: &Sample<N>,
        words: &mut [&'static AtomicU64; N],
    ) {
        let follow = &mut self.lanes[lane];
        let task = sample.words[follow.task_word];
        follow.count_switches(sample.start);
        follow.seen_switches += u64::from(follow.task != UNKNOWN_TASK);
        follow.task = task;
        follow.runs = false;
        follow.bound = false;
        self.bind_lane(lane, words);
    }

    /// Finds out whether the lane's task is to be observed, and binds the words of its slot.
    fn bind_lane<const N: usize>(&mut self, lane: usize, words: &mut [&'static AtomicU64; N]) {
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

    /// Binds the words of slots that threads claimed since the last call.
    fn bind_new_slots<const N: usize>(&mut self, words: &mut [&'static AtomicU64; N]) {
        let Some(page) = self.page else { return };
        let claims = page.slot(0).map_or(0, |slot| slot.claims.load(Relaxed));
        if claims == self.claims {
            return;
        }
        self.claims = claims;
        for lane in 0..self.lanes.len() {
            if !self.lanes[lane].bound {
                self.bind_lane(lane, words);
            }
        }
        for (word, part, index) in &self.fixed_threads {
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
    fn record_states<const N: usize>(&mut self, sample: &Sample<N>) -> Result<(), Full> {
        let live = self.live.as_deref();
        for (index, (feed, series)) in self.feeds.iter_mut().zip(&mut self.series).enumerate() {
            let state = match feed.lane.map(|lane| &self.lanes[lane]) {
                // The word in this sample may be older than the program's own data; the next
                // sample's word is not. Acquire: pairs with the system call by which the preload
                // library sets `ready`.
                _ if feed.ready.is_some() => {
                    feed.ready = feed.ready.filter(|ready| ready.load(Acquire) == 0);
                    State::NotRunning
                }
                Some(lane) if !lane.runs => State::NotRunning,
                // Until the slot of this thread is found, the words are those of another thread.
                Some(lane) if !lane.bound => State::Value(0),
                Some(_) | None => State::Value(feed.width.of(sample.words[feed.word], feed.offset)),
            };
            if let Some(live) = live.filter(|_| series.state() != state) {
                live.set_state(index, sample.start, state);
            }
            series.see(sample.start, state, &mut self.pool)?;
        }
        Ok(())
    }

    /// Adds up the runs of the pool and clears it. No samples are taken meanwhile.
    #[cold]
    fn fold_pool(&mut self) {
        self.close();
        if let Some(fold) = &mut self.fold {
            fold.add(&self.pool);
        }
        self.pool.clear();
        self.series.iter_mut().for_each(Series::restart_chunk);
        self.last = None;
        // Progress during the fold is unobserved, and must not count for an observed phase.
        if let Some(cost_meter) = &mut self.cost_meter {
            cost_meter.restart_phase();
        }
    }

    /// Records that no sample was taken between `last` and `sample`.
    #[cold]
    fn record_gap<const N: usize>(&mut self, last: u64, sample: &Sample<N>) -> Result<(), Full> {
        let lanes = &self.lanes;
        let ran_throughout =
            |lane: &FollowedLane| lane.ran_throughout(last, sample.words[lane.task_word]);
        for (index, (feed, series)) in self.feeds.iter().zip(&mut self.series).enumerate() {
            if let Some(live) = &self.live {
                live.set_state(index, last, State::Gap);
            }
            let proven = match feed.lane {
                // Nothing is known of a thread's own words in the gap. That it did not run is
                // proven if the lane did not switch.
                Some(lane) => series.state() == State::NotRunning && ran_throughout(&lanes[lane]),
                None => {
                    lanes.iter().any(|lane| lane.task_word == feed.word && ran_throughout(lane))
                }
            };
            series.gap(last, proven, &mut self.pool)?;
        }
        Ok(())
    }

    fn add_rates<const N: usize>(&mut self, sample: &Sample<N>, last: (u64, u64)) {
        let tag = self.tag_feed.map_or(State::Value(0), |feed| self.series[feed].state());
        let State::Value(tag) = tag else { return };
        if !self.lanes.is_empty() && !self.lanes.iter().any(|lane| lane.runs) {
            // A counter stands still while its thread does not run: that is not a rate of 0.
            return;
        }
        let (words, before) = (&sample.words, &self.last_words);
        for rate in &mut self.rates {
            let point = |start: u64, end: u64, words: &[u64]| RatePoint {
                start,
                end,
                counter: words[rate.counter],
                divisor: rate.divisor.map_or(0, |index| words[index]),
            };
            let now = point(sample.start, sample.end, words);
            let last = point(last.0, last.1, before);
            rate.add(tag, &last, &now);
        }
    }
}

/// Finds the slot of a task among the claimed slots.
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
    fn add_sample(&mut self, sample: &Sample<N>, words: &mut [&'static AtomicU64; N]) {
        self.samples += 1;
        let mut steady = !std::mem::take(&mut self.rebound);
        if let Some((last, _)) = self.last {
            let step = sample.start - last;
            self.intervals.add(step);
            if step > self.gap_ticks {
                steady = false;
                self.full |= self.record_gap(last, sample).is_err();
            }
        } else {
            steady = false;
        }
        let mut switched = false;
        for lane in 0..self.lanes.len() {
            let task = sample.words[self.lanes[lane].task_word];
            if task != self.lanes[lane].task {
                self.follow_switch(lane, sample, words);
                switched = true;
            }
        }
        // After a switch, the words of this sample were still those of the thread before.
        if !switched || !self.lanes.iter().any(|lane| lane.runs) {
            self.full |= self.record_states(sample).is_err();
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
            self.until_reached |= until.is_passed_by(value);
        }
        self.last = Some((sample.start, sample.end));
    }

    #[inline(always)]
    fn next_period(&mut self, now: Period, found: &BlockStats) -> Period {
        match self.pacing.as_mut().and_then(|pacing| pacing.add_block(found)) {
            Some(ticks) => self.set_period(Period(ticks)),
            None => now,
        }
    }

    fn check_interval_ticks(&self) -> u64 {
        self.check_interval_ticks
    }

    fn keep_going(&mut self, now: u64, words: &mut [&'static AtomicU64; N]) -> bool {
        self.bind_new_slots(words);
        if let Some((last, _)) = self.last {
            // Reads the switch counts again, so that switches which no sample saw do not make the
            // next gap look unproven.
            self.lanes.iter_mut().for_each(|lane| lane.count_switches(last));
        }
        if let Some(live) = &self.live {
            live.until.store(now, Relaxed);
            live.samples.store(self.samples, Relaxed);
        }
        if let Some(cost_meter) = &mut self.cost_meter {
            cost_meter.advance(now);
        }
        if self.fold.is_some() && self.pool.is_nearly_full() {
            self.fold_pool();
        }
        // SAFETY: sched_getcpu takes no arguments.
        let cpu = unsafe { libc::sched_getcpu() };
        self.ended = if self.full {
            EndReason::Full
        } else if self.until_reached {
            EndReason::Until
        } else if now >= self.deadline {
            EndReason::Deadline
        } else if u32::try_from(cpu) != Ok(self.cpu) {
            EndReason::Moved
        } else {
            EndReason::Stopped
        };
        if self.ended != EndReason::Stopped {
            // Ends the other observers of this run too.
            self.control.stop.store(true, Relaxed);
        }
        !self.control.stop.load(Relaxed)
    }
}

mod followed_lane;
#[cfg(test)]
mod tests;
