//! Whether the double-time error finds the rates that are wrong.
//!
//! A signal handler interrupts the observer for 1 to 30 us at a time. The observed thread publishes
//! the clock itself. So the true rate is 1, and each rate shows whether it is wrong.
//!
//! Two kinds of errors are outside of the filter's task, so these rates are left out:
//!
//! - Rates over a pause of the observed thread. The thread records its own pauses.
//! - Rates with a value that took longer than a round trip of a line to arrive. A store may be
//!   delayed for microseconds while its thread continues. The value is a time, which shows the
//!   delay.
//!
//! An interruption of the observer makes a value newer than its sample, but never older.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use elfen_console::duration;
use elfen_shim::observe::{Period, Sample, Sink, observe};
use elfen_shim::random::Random;
use elfen_shim::{clock, filter};
use nix::sys::signal::{
    SaFlags, SigAction, SigEvent, SigHandler, SigSet, SigevNotify, Signal, sigaction,
};
use nix::sys::timer::{Expiration, Timer, TimerSetTimeFlags};
use nix::time::ClockId;

use super::stage::{Lanes, Stage, line};
use crate::bench::{
    BenchError, BenchReport, Column, Values, cases, joined, label, number, pin, rounded, share,
};

const PERIODS: [(&str, u64); 4] = [("max", 0), ("1200", 1_200), ("2600", 2_600), ("26000", 26_000)];
/// Each case measures until this many wrong rates were found, which is enough to judge the filter.
const ENOUGH: u64 = 1_000;
const LIMIT: Duration = Duration::from_secs(60);
const ROUND_SAMPLES: usize = 1 << 20;
const ROUND_NS: u64 = 300_000_000;
const SIGNAL: Signal = Signal::SIGUSR2;
const SIGNAL_EVERY: Duration = Duration::from_micros(100);
/// A longer time between two writes is a pause of the observed thread. With a higher limit than the
/// error of a wrong rate, shorter pauses would be taken for errors of the observer.
const PAUSE_TICKS: u64 = WRONG.0;
/// A pause may affect samples that began up to this long after it.
const AGE_TICKS: u64 = 1_000;
/// A rate is wrong if its error exceeds both limits: ticks, and percent of its time. A rate is
/// right unless its error exceeds both limits of `RIGHT`.
const WRONG: (u64, u64) = (300, 5);
const RIGHT: (u64, u64) = (130, 1);

const DTE: &[Column] = &[
    label("period", "period, ticks"),
    // Percent of all rates that were left out.
    share("left_out_percent", "discarded", 1, ("left_out", "rates")),
    number("wrong", "wrong rates", "", 0),
    share("removed_percent", "wrong discarded", 1, ("removed", "wrong")).higher(),
    share("kept_percent", "right kept", 1, ("kept", "right")).higher(),
    // Percent of the right rates that the paper's rule keeps: one hundredth, and no floor.
    share("kept_by_paper_percent", "right kept by the paper's rule", 1, ("kept_by_paper", "right"))
        .higher(),
    number("highest_before", "highest rate before", "", 1),
    number("highest_after", "after", "", 1),
];

pub(super) fn measure(stage: &mut Stage<'_>) -> Result<BenchReport, BenchError> {
    handle_signals().map_err(std::io::Error::from)?;
    let (lanes, periods) = (stage.lanes, cases("period", PERIODS.map(|(name, _)| name)));
    let table = stage.measure(("dte", DTE), &periods, 1, |case, _, values| {
        // The oldest value that is still accepted is as old as a round trip.
        let (round_trip, word) = (lanes.distance()?, line());
        let (stop, pauses) = (&AtomicBool::new(false), &Pauses::default());
        thread::scope(|scope| {
            let observed = scope.spawn(move || publish_clock(lanes, word, stop, pauses));
            thread::sleep(Duration::from_millis(5));
            let period = PERIODS[case].1;
            let tally =
                joined(scope.spawn(move || at_period(lanes, word, (period, round_trip), pauses)));
            stop.store(true, Relaxed);
            let tally = joined(observed).and(tally)?;
            values.label("period_ticks", period);
            tally.count_in(values);
            Ok(())
        })
    })?;
    Ok(table.into())
}

type Pauses = Mutex<Vec<(u64, u64)>>;

fn publish_clock(
    lanes: Lanes,
    word: &AtomicU64,
    stop: &AtomicBool,
    pauses: &Pauses,
) -> Result<(), BenchError> {
    pin(lanes.on)?;
    let mut last = clock::before();
    while !stop.load(Relaxed) {
        let now = clock::before();
        // Pairs with `written_after`: a reader of this store also sees the pauses that were
        // recorded before.
        word.store(now, Release);
        if now - last > PAUSE_TICKS {
            pauses.lock().unwrap_or_else(PoisonError::into_inner).push((last, now));
        }
        last = now;
    }
    Ok(())
}

fn at_period(
    lanes: Lanes,
    word: &AtomicU64,
    (period, round_trip): (u64, u64),
    pauses: &Pauses,
) -> Result<Tally, BenchError> {
    pin(lanes.from)?;
    let _timer = start_timer().map_err(std::io::Error::from)?;
    let mut tally = Tally { round_trip, ..Tally::default() };
    let start = Instant::now();
    while tally.wrong < ENOUGH && start.elapsed() < LIMIT {
        let until = clock::before() + lanes.clock.ticks(ROUND_NS);
        let mut kept = Keep { samples: Vec::with_capacity(ROUND_SAMPLES), until };
        observe::<1, _>(Period(period), [word], &mut kept);
        let last = kept.samples.last().map_or(0, |(_, end, _)| *end);
        written_after(word, last);
        let pauses = std::mem::take(&mut *pauses.lock().unwrap_or_else(PoisonError::into_inner));
        tally.add(&kept.samples, &pauses, filter::floor_ticks(&lanes.clock, Some(round_trip)));
    }
    Ok(tally)
}

/// Waits until the observed thread has written twice more. A pause is recorded before the second
/// write after it. Other tasks may occupy the thread's lane for many milliseconds.
fn written_after(word: &AtomicU64, end: u64) {
    let start = Instant::now();
    let mut seen = end;
    for _write in 0..2 {
        while word.load(Acquire) <= seen && start.elapsed() < LIMIT {
            thread::sleep(Duration::from_micros(100));
        }
        seen = word.load(Acquire);
    }
}

/// A sample: its start, its end, and the value that was read.
type Point = (u64, u64, u64);

struct Keep {
    samples: Vec<Point>,
    until: u64,
}

impl<'a> Sink<'a, 1> for Keep {
    const BOTH_ENDS: bool = true;

    fn fetch(&mut self, _: u64) {}

    fn add_sample(&mut self, sample: &Sample<1>, _: &mut [&'a AtomicU64; 1]) {
        if self.samples.len() < ROUND_SAMPLES {
            self.samples.push((sample.start, sample.end, sample.words[0]));
        }
    }

    fn keep_going(&mut self, now: u64, _: &mut [&'a AtomicU64; 1]) -> bool {
        now < self.until && self.samples.len() < ROUND_SAMPLES
    }

    fn check_interval_ticks(&self) -> u64 {
        u64::MAX
    }
}

#[derive(Debug, Default)]
struct Tally {
    round_trip: u64,
    left_out: u64,
    rates: u64,
    wrong: u64,
    removed: u64,
    right: u64,
    kept: u64,
    kept_by_paper: u64,
    highest_before: f64,
    highest_after: f64,
}

impl Tally {
    /// Counts the rates between consecutive samples. Samples and pauses must be sorted by time.
    fn add(&mut self, samples: &[Point], pauses: &[(u64, u64)], floor_ticks: u64) {
        let mut pauses = pauses.iter().peekable();
        self.rates += samples.len().saturating_sub(1) as u64;
        for pair in samples.windows(2) {
            let ((start, end, count), (next_start, next_end, next_count)) = (pair[0], pair[1]);
            let from = start.saturating_sub(AGE_TICKS);
            while pauses.next_if(|(_, resumed)| *resumed < from).is_some() {}
            let is_old = |start: u64, count: u64| start.saturating_sub(count) > self.round_trip;
            if pauses.peek().is_some_and(|(stopped, _)| *stopped <= next_end)
                || is_old(start, count)
                || is_old(next_start, next_count)
            {
                self.left_out += 1;
                continue;
            }
            let (starts, ends) = (next_start - start, next_end - end);
            let counted = next_count.saturating_sub(count);
            let off = counted.abs_diff(starts);
            let beyond = |(ticks, percent): (u64, u64)| off > ticks.max(starts * percent / 100);
            let kept = filter::keep(starts, ends, floor_ticks);
            let rate = duration::number(counted) / duration::number(starts.max(1));
            self.highest_before = self.highest_before.max(rate);
            if kept {
                self.highest_after = self.highest_after.max(rate);
            }
            // A line may be late in one sample and on time in the other, so the sum of both delays
            // is tolerated.
            if beyond(WRONG) && off > 2 * self.round_trip {
                self.wrong += 1;
                self.removed += u64::from(!kept);
            } else if !beyond(RIGHT) {
                self.right += 1;
                self.kept += u64::from(kept);
                self.kept_by_paper += u64::from(filter::keep_by_paper(starts, ends));
            }
        }
    }

    fn count_in(&self, values: &mut Values) {
        values.count("left_out", self.left_out);
        values.count("rates", self.rates);
        values.count("wrong", self.wrong);
        values.count("removed", self.removed);
        values.count("right", self.right);
        values.count("kept", self.kept);
        values.count("kept_by_paper", self.kept_by_paper);
        values.label("highest_before", rounded(self.highest_before));
        values.label("highest_after", rounded(self.highest_after));
    }
}

static RANDOM: AtomicU64 = AtomicU64::new(88_172_645_463_325_252);

/// Spins for 1 to 30 us.
extern "C" fn hold(_: libc::c_int) {
    let mut random = Random::of(RANDOM.load(Relaxed));
    // In ticks at 2.6 GHz: from 1 to 30 us.
    let end = clock::before() + 2_600 + random.below(75_400);
    RANDOM.store(random.draw(), Relaxed);
    while clock::before() < end {
        std::hint::spin_loop();
    }
}

fn handle_signals() -> nix::Result<()> {
    let handler = SigHandler::Handler(hold);
    let action = SigAction::new(handler, SaFlags::empty(), SigSet::empty());
    // SAFETY: `hold` reads the clock and accesses one atomic of its own, which any thread may do at
    // any time.
    unsafe { sigaction(SIGNAL, &action) }.map(|_| ())
}

/// Sends a signal to the calling thread at each interval, until the timer is dropped.
fn start_timer() -> nix::Result<Timer> {
    let thread_id = nix::unistd::gettid().as_raw();
    let notify = SigevNotify::SigevThreadId { signal: SIGNAL, thread_id, si_value: 0 };
    let mut timer = Timer::new(ClockId::CLOCK_MONOTONIC, SigEvent::new(notify))?;
    timer.set(Expiration::Interval(SIGNAL_EVERY.into()), TimerSetTimeFlags::empty())?;
    Ok(timer)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: each rate is classified correctly. Method: a right rate, one with the observer
    /// interrupted inside a sample, one over a pause of the observed thread, and a late one.
    #[test]
    fn rates_are_judged_by_the_clock_that_they_count() {
        let samples = [
            (10_000, 10_100, 10_050),
            (20_000, 20_100, 20_050),
            (30_000, 60_100, 60_050), // interrupted inside the sample
            (70_000, 70_100, 70_050),
            (80_000, 80_100, 79_950),
            (90_000, 90_100, 81_000), // the observed thread paused
            (100_000, 100_100, 99_950),
            (110_000, 110_100, 106_000), // the store was delayed
        ];
        let mut tally = Tally { round_trip: 300, ..Tally::default() };
        tally.add(&samples, &[(81_000, 91_000)], 26);
        assert_eq!((tally.wrong, tally.removed), (2, 2));
        assert_eq!((tally.right, tally.kept), (2, 2));
        assert_eq!((tally.left_out, tally.rates), (3, 7));
        assert_eq!((tally.highest_before, tally.highest_after), (4.0, 1.0));
    }
}
