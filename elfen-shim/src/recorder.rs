//! The sink of one observer: turns samples into runs, gaps and rates.
//!
//! A [`Recorder`] runs inside the sampling loop, so all memory is allocated before the first
//! sample. It also follows the threads of the observed lanes. After each switch, it makes the loop
//! read the words of the thread that runs now.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed};

use elfen_rt::signal::page::Page;
use elfen_rt::signal::task::Running;
use elfen_rt::signal::thread::{ThreadSlot, of_thread_word};

use crate::followed_lane::{FollowedLane, UNKNOWN_TASK};
use crate::histogram::IntervalHistogram;
use crate::observe::{Period, Sample, Sink, WORDS_MAX, observe};
use crate::pacing::BlockStats;
use crate::rates::RatePoint;
use crate::recording::{Full, Pool, Series, State};
use crate::session::{
    EndReason, ObserverConfig, ObserverControl, ObserverResult, Words, ZERO_WORD,
};

/// Records the samples of one observer. With `BOTH`, each sample has two clock readings, which
/// rates need.
#[derive(Debug)]
pub struct Recorder<const BOTH: bool> {
    /// The words to read, and the lanes to follow.
    words: Words,
    config: ObserverConfig,
    control: Arc<ObserverControl>,
    pool: Pool,
    series: Vec<Series>,
    /// The lower bound of `gap_ticks`, for short periods.
    min_gap_ticks: u64,
    /// If two samples are farther apart than this, a gap is recorded between them.
    gap_ticks: u64,
    deadline: u64,
    ended: EndReason,
    samples: u64,
    claims: u64,
    next_fetch: u64,
    last: Option<(u64, u64)>,
    last_words: [u64; WORDS_MAX],
    full: bool,
    until_reached: bool,
    /// Whether words were replaced by those of another thread since the last sample. The difference
    /// of two threads' counters is not a rate.
    rebound: bool,
    intervals: IntervalHistogram,
}

/// How long a sample may take per word: a transfer of the word's line from any CPU, and the
/// processing of the value.
const WORD_NS: u64 = 1_000;
/// How long a sample with a system call may take.
const FETCH_GAP_NS: u64 = 10_000;

/// How often an observer with a long period checks whether to stop.
const CHECK_INTERVAL_NS: u64 = 1_000_000;

impl<const BOTH: bool> Recorder<BOTH> {
    /// Prepares a recording that begins now.
    pub fn new(
        mut words: Words,
        config: ObserverConfig,
        pool: Pool,
        control: Arc<ObserverControl>,
    ) -> Self {
        let start_ticks = crate::clock::before();
        words.lanes.iter_mut().for_each(FollowedLane::begin_counting);
        let unit = config.clock.unit();
        let series = words.feeds.iter().zip(0..).map(|(feed, index)| {
            let series = Series::new(index, feed.kind, unit, start_ticks);
            if config.keeps_samples { series.singly() } else { series }
        });
        // The time between two samples up to which no gap is recorded.
        let fetches = words.state.is_some() || !words.reader.is_empty();
        let gap_ns = if fetches { FETCH_GAP_NS } else { WORD_NS * (1 + words.count() as u64) };
        let for_ticks = config.for_ticks.unwrap_or(u64::MAX);
        let mut recorder = Self {
            pool,
            series: series.collect(),
            min_gap_ticks: config.clock.ticks(gap_ns),
            gap_ticks: u64::MAX,
            deadline: start_ticks.saturating_add(for_ticks),
            words,
            config,
            control,
            ended: EndReason::Stopped,
            samples: 0,
            claims: 0,
            next_fetch: 0,
            last: None,
            last_words: [0; WORDS_MAX],
            full: false,
            until_reached: false,
            rebound: false,
            intervals: IntervalHistogram::new(),
        };
        if fetches {
            // The duration of such a sample is that of the system call, and does not show the
            // transfer time.
            recorder.config.pacing = None;
        }
        recorder
    }

    /// Samples on the calling thread's CPU, `config.from`, until the run ends.
    pub fn run(mut self) -> ObserverResult {
        if let Some(pacing) = &mut self.config.pacing {
            pacing.measure_clock_cost();
        }
        let period = self.set_period(Period(self.config.period_ticks));
        self.observe_words(period);
        self.words.lanes.iter_mut().for_each(FollowedLane::end_counting);
        self.finish()
    }

    /// Runs the loop that was compiled for this number of words.
    fn observe_words(&mut self, period: Period) {
        macro_rules! of {
            ($($count:literal)*) => {
                match self.words.words.len() {
                    $($count => {
                        let mut all = [&ZERO_WORD; $count];
                        all.copy_from_slice(&self.words.words);
                        observe::<$count, _>(period, all, self);
                    })*
                    _ => unreachable!("`Words::add_word` gives out no more than these"),
                }
            };
        }
        of!(1 2 3 4 5 6 7 8)
    }

    /// Ends the recording of an observer that could not be pinned to its CPU, before its first
    /// sample.
    pub fn end_unplaced(mut self) -> ObserverResult {
        self.ended = EndReason::Moved;
        self.control.stop.store(true, Relaxed);
        self.finish()
    }

    fn finish(mut self) -> ObserverResult {
        self.close();
        ObserverResult {
            samples: self.samples,
            ended: self.ended,
            missed_switches: self.missed_switches(),
            seen_switches: self.words.lanes.iter().map(|lane| lane.seen_switches).sum(),
            period_ticks: (self.intervals.quantile(50), self.intervals.quantile(99)),
            cost_ratios: self.config.cost_meter.map(|cost_meter| cost_meter.ratios),
            failed_reads: self.words.reader.failed,
            tag_signal: self.words.tag_feed,
            tally: self.config.fold.map(|fold| fold.tally),
            rates: self.words.rates,
            pool: self.pool,
        }
    }

    /// Sets the mean time between two samples. Waits are at most one and a half periods. So a state
    /// that lasted two periods was sampled, or a gap is recorded.
    fn set_period(&mut self, period: Period) -> Period {
        self.gap_ticks = period.0.saturating_mul(2).max(self.min_gap_ticks);
        period
    }

    /// Ends the open run of each signal.
    fn close(&mut self) {
        // One tick after the last sample, so that runs which began with it are kept. One of them
        // may have ended the recording.
        let at = self.last.map_or_else(crate::clock::before, |(start, _)| start + 1);
        let pool = &mut self.pool;
        // A full pool has no room for the last runs either.
        let _lost = self.series.iter_mut().try_for_each(|series| series.end(at, pool));
    }

    /// Switches of these lanes that no sample saw. `None` if no lane is followed.
    fn missed_switches(&self) -> Option<u64> {
        let lanes = &self.words.lanes;
        (!lanes.is_empty()).then(|| lanes.iter().map(FollowedLane::missed).sum())
    }

    /// Follows a lane to the task that it runs now.
    #[cold]
    fn follow_switch<const N: usize>(
        &mut self,
        lane: usize,
        sample: &Sample<N>,
        words: &mut [&'static AtomicU64; N],
    ) {
        let follow = &mut self.words.lanes[lane];
        let task = sample.words[follow.task_word];
        follow.count_switches(sample.start);
        follow.seen_switches += u64::from(follow.task != UNKNOWN_TASK);
        follow.task = task;
        follow.runs = false;
        follow.bound = false;
        self.bind_lane(lane, words);
    }

    /// Checks whether the lane's task is observed, and binds the words of its slot.
    fn bind_lane<const N: usize>(&mut self, lane: usize, words: &mut [&'static AtomicU64; N]) {
        let follow = &mut self.words.lanes[lane];
        let Running::Task(task) = Running::from_word(follow.task) else { return };
        let is_own = task.process == self.words.process;
        if is_own || self.words.children {
            let slot = self.words.page.and_then(|page| slot_of(page, self.claims, follow.task));
            follow.runs = is_own || slot.is_some();
            follow.bind(slot, words);
            self.rebound |= follow.bound;
        }
    }

    /// Binds the words of slots that threads claimed since the last call.
    fn bind_new_slots<const N: usize>(&mut self, words: &mut [&'static AtomicU64; N]) {
        let Some(page) = self.words.page else { return };
        let claims = page.slot(0).map_or(0, |slot| slot.claims.load(Relaxed));
        if claims == self.claims {
            return;
        }
        self.claims = claims;
        for lane in 0..self.words.lanes.len() {
            if !self.words.lanes[lane].bound {
                self.bind_lane(lane, words);
            }
        }
        for (word, part, index) in &self.words.fixed_threads {
            let slot = page.slot(*index);
            let ours = |slot: &&ThreadSlot| {
                of_thread_word(slot.thread.load(Relaxed)).0 == self.words.process
            };
            if let Some(slot) = slot.filter(ours) {
                words[*word] = part.of(slot);
                self.rebound = true;
            }
        }
    }

    #[inline(always)]
    fn record_states<const N: usize>(&mut self, sample: &Sample<N>) -> Result<(), Full> {
        let live = self.config.live.as_deref();
        for (index, (feed, series)) in self.words.feeds.iter_mut().zip(&mut self.series).enumerate()
        {
            let state = match feed.lane.map(|lane| &self.words.lanes[lane]) {
                // The word in this sample may be older than the program's own data, so this sample
                // does not count. The next sample's word is newer. Acquire: pairs with the system
                // call by which the preload library sets `ready`.
                _ if feed.ready.is_some() => {
                    feed.ready = feed.ready.filter(|ready| ready.load(Acquire) == 0);
                    State::NotRunning
                }
                Some(lane) if !lane.runs => State::NotRunning,
                // Until this thread's slot is found, the words belong to another thread.
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

    /// Adds up the runs of the pool and clears it. Meanwhile, no samples are taken.
    #[cold]
    fn fold_pool(&mut self) {
        self.close();
        if let Some(fold) = &mut self.config.fold {
            fold.add(&self.pool);
        }
        self.pool.clear();
        self.series.iter_mut().for_each(Series::restart_chunk);
        self.last = None;
        // Progress during this time is unobserved, and must not count for an observed phase.
        if let Some(cost_meter) = &mut self.config.cost_meter {
            cost_meter.restart_phase();
        }
    }

    /// Records that no sample was taken between `last` and `sample`.
    #[cold]
    fn record_gap<const N: usize>(&mut self, last: u64, sample: &Sample<N>) -> Result<(), Full> {
        let lanes = &self.words.lanes;
        let ran_throughout =
            |lane: &FollowedLane| lane.ran_throughout(last, sample.words[lane.task_word]);
        for (index, (feed, series)) in self.words.feeds.iter().zip(&mut self.series).enumerate() {
            if let Some(live) = &self.config.live {
                live.set_state(index, last, State::Gap);
            }
            let proven = match feed.lane {
                // The thread's own words are unknown in the gap. If the lane did not switch, the
                // thread is proven not to have run.
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
        let tag = self.words.tag_feed.map_or(State::Value(0), |feed| self.series[feed].state());
        let State::Value(tag) = tag else { return };
        if !self.words.lanes.is_empty() && !self.words.lanes.iter().any(|lane| lane.runs) {
            // A counter does not change while its thread is off the CPU, which is not a rate of 0.
            return;
        }
        let (words, before) = (&sample.words, &self.last_words);
        for rate in &mut self.words.rates {
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
        if now < self.next_fetch || self.config.fetch_ticks == u64::MAX {
            return;
        }
        if let Some(state) = &self.words.state {
            state.fetch();
        }
        if !self.words.reader.is_empty() {
            self.words.reader.fetch();
        }
        self.next_fetch = now + self.config.fetch_ticks;
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
        for lane in 0..self.words.lanes.len() {
            let task = sample.words[self.words.lanes[lane].task_word];
            if task != self.words.lanes[lane].task {
                self.follow_switch(lane, sample, words);
                switched = true;
            }
        }
        // After a switch, the words of this sample still belong to the previous thread.
        if !switched || !self.words.lanes.iter().any(|lane| lane.runs) {
            self.full |= self.record_states(sample).is_err();
        }
        if BOTH && !self.words.rates.is_empty() {
            if let Some(last) = self.last.filter(|_| steady && !switched) {
                self.add_rates(sample, last);
            }
            for (last, word) in self.last_words.iter_mut().zip(&sample.words) {
                *last = *word;
            }
        }
        if let Some(until) = self.config.until
            && let State::Value(value) = self.series[until.feed].state()
        {
            self.until_reached |= until.is_passed_by(value);
        }
        self.last = Some((sample.start, sample.end));
    }

    #[inline(always)]
    fn next_period(&mut self, now: Period, found: &BlockStats) -> Period {
        match self.config.pacing.as_mut().and_then(|pacing| pacing.add_block(found)) {
            Some(ticks) => self.set_period(Period(ticks)),
            None => now,
        }
    }

    fn check_interval_ticks(&self) -> u64 {
        self.config.clock.ticks(CHECK_INTERVAL_NS)
    }

    fn keep_going(&mut self, now: u64, words: &mut [&'static AtomicU64; N]) -> bool {
        self.bind_new_slots(words);
        if let Some((last, _)) = self.last {
            // Reads the switch counts again. Otherwise, switches that no sample saw would make the
            // next gap look unproven.
            self.words.lanes.iter_mut().for_each(|lane| lane.count_switches(last));
        }
        if let Some(live) = &self.config.live {
            live.until.store(now, Relaxed);
            live.samples.store(self.samples, Relaxed);
        }
        if let Some(cost_meter) = &mut self.config.cost_meter {
            cost_meter.advance(now);
        }
        if self.config.fold.is_some() && self.pool.is_nearly_full() {
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
        } else if u32::try_from(cpu) != Ok(self.config.from) {
            EndReason::Moved
        } else {
            EndReason::Stopped
        };
        if self.ended != EndReason::Stopped {
            // This also ends the other observers of the run.
            self.control.stop.store(true, Relaxed);
        }
        !self.control.stop.load(Relaxed)
    }
}

#[cfg(test)]
mod tests;
