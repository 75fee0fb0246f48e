//! Whether double-time error finds the rates that are wrong. The observer is interrupted by a
//! signal whose handler takes 1 to 30 us, and the observed publishes the clock itself: so the true
//! rate is 1, and each rate tells by itself whether it is wrong.
//!
//! What the observed did not run is not the filter's to find: it keeps an account of its own
//! pauses, and rates over them are left out. Nor is what it wrote and nobody saw yet: its stores
//! are now and then on their way for microseconds while it goes on, as each value's own time tells;
//! those that were for longer than a line takes there and back are left out as well. What holds the
//! observer up makes a value younger than its sample, and never older.

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
    BenchError, Column, Report, Values, cases, joined, label, number, pin, rounded, share,
};

const PERIODS: [(&str, u64); 4] = [("max", 0), ("1200", 1_200), ("2600", 2_600), ("26000", 26_000)];
/// Enough wrong rates to judge the filter by, or so long.
const ENOUGH: u64 = 1_000;
const LIMIT: Duration = Duration::from_secs(60);
const ROUND_SAMPLES: usize = 1 << 20;
const ROUND_NS: u64 = 300_000_000;
const SIGNAL: Signal = Signal::SIGUSR2;
const SIGNAL_EVERY: Duration = Duration::from_micros(100);
/// The observed stood still if it took so long from one write to the next: as far as a rate may be
/// off, or shorter pauses would pass for errors of the observer.
const PAUSE_TICKS: u64 = WRONG.0;
/// A pause may show in samples that began so long after it.
const AGE_TICKS: u64 = 1_000;
/// A rate over so many ticks and percent of its time is wrong; over fewer it is right.
const WRONG: (u64, u64) = (300, 5);
const RIGHT: (u64, u64) = (130, 1);

const DTE: &[Column] = &[
    label("period", "period, ticks"),
    // Of all rates: over a pause of the observed, or of a store that was on its way.
    share("left_out_percent", "left out", 1, ("left_out", "rates")),
    number("wrong", "wrong rates", "", 0),
    share("removed_percent", "removed", 1, ("removed", "wrong")).higher(),
    share("kept_percent", "right kept", 1, ("kept", "right")).higher(),
    // What the paper's rule, a hundredth and no floor, keeps of them.
    share("kept_by_paper_percent", "by the paper's rule", 1, ("kept_by_paper", "right")).higher(),
    number("highest_before", "highest", "", 1),
    number("highest_after", "then", "", 1),
];

pub(super) fn measure(stage: &mut Stage<'_>) -> Result<Report, BenchError> {
    handle_signals().map_err(std::io::Error::from)?;
    let (lanes, periods) = (stage.lanes, cases("period", PERIODS.map(|(name, _)| name)));
    let table = stage.measure(("dte", DTE), &periods, 1, |case, _, values| {
        // A value that is read may be as old as a round trip, and may be as long on its way.
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
        // Pairs with `written_after`: a reader of this sees the pauses that were noted before.
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

/// Waits until the observed has gone on: the pause that it may have stood in is told of before its
/// second write from then on. Others may have its lane for many milliseconds.
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

/// A sample: both its ends, and what was read.
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
    /// Samples and pauses are in the order of their times.
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
            // A line that is late in one sample and at once there in the other.
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

/// Stays for 1 to 30 us.
extern "C" fn hold(_: libc::c_int) {
    let mut random = Random::of(RANDOM.load(Relaxed));
    // Ticks: at 2.6 GHz, of 1 to 30 us.
    let end = clock::before() + 2_600 + random.below(75_400);
    RANDOM.store(random.draw(), Relaxed);
    while clock::before() < end {
        std::hint::spin_loop();
    }
}

fn handle_signals() -> nix::Result<()> {
    let handler = SigHandler::Handler(hold);
    let action = SigAction::new(handler, SaFlags::empty(), SigSet::empty());
    // SAFETY: `hold` reads the clock and stores to an atomic of its own, which any thread may do at
    // any time.
    unsafe { sigaction(SIGNAL, &action) }.map(|_| ())
}

/// Signals the calling thread until it is dropped.
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

    /// Goal: each rate is put where it belongs. Method: a rate that is right, one over which the
    /// observer was held inside of a sample, one over a pause of the observed, and one of a value
    /// that is seen late.
    #[test]
    fn rates_are_judged_by_the_clock_that_they_count() {
        let samples = [
            (10_000, 10_100, 10_050),
            (20_000, 20_100, 20_050),
            (30_000, 60_100, 60_050), // held between its ends
            (70_000, 70_100, 70_050),
            (80_000, 80_100, 79_950),
            (90_000, 90_100, 81_000), // the observed stood still
            (100_000, 100_100, 99_950),
            (110_000, 110_100, 106_000), // its stores were on their way
        ];
        let mut tally = Tally { round_trip: 300, ..Tally::default() };
        tally.add(&samples, &[(81_000, 91_000)], 26);
        assert_eq!((tally.wrong, tally.removed), (2, 2));
        assert_eq!((tally.right, tally.kept), (2, 2));
        assert_eq!((tally.left_out, tally.rates), (3, 7));
        assert_eq!((tally.highest_before, tally.highest_after), (4.0, 1.0));
    }
}
