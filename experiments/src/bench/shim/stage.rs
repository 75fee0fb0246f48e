//! What the parts of this benchmark share: the lanes and how far apart they are, a word on a line
//! of its own, the observer.
//!
//! The host may move a virtual CPU at any moment, and a line then takes six times as long as
//! before. So the distance is measured before and after whatever is measured, and what was
//! disturbed is measured again.

use std::fs;
use std::hint::{black_box, spin_loop};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use elfen_console::programs::find_program;
use elfen_rt::signal::page::Page;
use elfen_rt::signal::thread::ThreadSlot;
use elfen_shim::clock::{self, Clock};
use elfen_shim::observers::Observers;
use elfen_shim::pacing::Pacing;
use elfen_shim::reach::NumberLocation;
use elfen_shim::recording::Source;
use elfen_shim::round_trip;
use elfen_shim::session::ObserverControl;
use elfen_shim::session::{ObserverConfig, Words};
use elfen_shim::signal_spec::Width;

use crate::bench::{
    BenchError, Case, Column, Hear, Row, Samples, Table, Values, add_round, joined, pin,
    play_round, row,
};

/// Where to measure.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lanes {
    /// The lane that is observed,
    pub(super) on: u32,
    /// and the observer's.
    pub(super) from: u32,
    pub(super) clock: Clock,
}

impl Lanes {
    /// Ticks for a line there and back; `None` if the other lane was not to be had.
    pub(super) fn round_trip(self) -> Result<Option<u64>, BenchError> {
        on_lane(self.from, || Ok(round_trip::measure_ticks(self.on)))
    }

    pub(super) fn distance(self) -> Result<u64, BenchError> {
        self.round_trip()?.ok_or_else(no_round_trip)
    }

    /// An `elfen shim` on these lanes.
    pub(super) fn shim(self) -> Result<Command, BenchError> {
        let mut command = Command::new(find_program("elfen")?);
        let [on, from] = [self.on, self.from].map(|lane| lane.to_string());
        command.args(["shim", "--cpu", &on, "--observer-cpu", &from]);
        Ok(command)
    }

    /// A period, as `elfen shim` takes it.
    pub(super) fn period(self, ticks: u64) -> String {
        match ticks {
            0 => "max".to_owned(),
            ticks => format!("{}ns", self.clock.ns(ticks)),
        }
    }

    /// An observer with this much memory.
    pub(super) fn how(self, period_ticks: u64, memory: usize) -> ObserverConfig {
        ObserverConfig {
            from: self.from,
            clock: self.clock,
            period_ticks,
            memory,
            ..ObserverConfig::default()
        }
    }
}

pub(super) fn no_round_trip() -> BenchError {
    let why = "the other lane was not to be had: others use it";
    BenchError::failed(why, "leave both lanes to it, and try again")
}

/// A program that was observed did not do what it should.
pub(super) fn program_failed(why: impl std::fmt::Display) -> BenchError {
    BenchError::failed(format!("a program: {why}"), "see that it runs by itself")
}

/// The seconds that a program wrote to this file, once `run` has run it.
pub(super) fn seconds_told(
    file: &Path,
    run: impl FnOnce() -> Result<Output, BenchError>,
) -> Result<f64, BenchError> {
    let _none_yet = fs::remove_file(file);
    let output = run()?;
    let text = fs::read_to_string(file).unwrap_or_default();
    let seconds = text.trim().parse().ok().filter(|&seconds: &f64| seconds > 0.0);
    let said = String::from_utf8_lossy(&output.stderr);
    seconds.ok_or_else(|| program_failed(format_args!("it did not run: {}", said.trim())))
}

/// In a thread of its own: this one stays where it may be, as its children have to.
pub(super) fn on_lane<T: Send>(
    lane: u32,
    what: impl FnOnce() -> Result<T, BenchError> + Send,
) -> Result<T, BenchError> {
    thread::scope(|scope| {
        joined(scope.spawn(move || {
            pin(lane)?;
            what()
        }))
    })
}

/// A word on a line of its own.
#[repr(align(128))]
#[derive(Debug, Default)]
struct Line(AtomicU64);

/// One that lives as long as this process: the observer's words do.
pub(super) fn line() -> &'static AtomicU64 {
    &Box::leak(Box::<Line>::default()).0
}

/// The observer of `elfen shim`, on one word.
pub(super) fn observe(
    lanes: Lanes,
    word: &'static AtomicU64,
    (period_ticks, pacing): (u64, Option<Pacing>),
    for_ticks: Option<u64>,
    orders: Arc<ObserverControl>,
) -> std::io::Result<Observers> {
    let page: Option<&'static Page<ThreadSlot>> = None;
    let mut words = Words::of(std::process::id(), page);
    let (width, source) = (Width::U64, Source::Mapped);
    let place = NumberLocation { word, offset: 0, width, source, ready: None };
    words.add_number("word".to_owned(), &place).map_err(std::io::Error::other)?;
    let memory = if for_ticks.is_some() { 64 << 20 } else { 1 << 20 };
    let keeps_last = for_ticks.is_none();
    let how = ObserverConfig { pacing, for_ticks, keeps_last, ..lanes.how(period_ticks, memory) };
    Observers::start([(words, how)], &orders)
}

/// One load at a time and nothing besides, in a thread of its own until it is told to stop: what
/// any observer costs the writer of the word.
///
/// It shares no code with `elfen shim`, so that the two can be compared. What a program pays more
/// next to that is Shim's, and what it pays here is the processor's, which takes the line from the
/// writer's cache for the load, and gives it back for the next store.
pub(super) struct Bare {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Seen, BenchError>>,
}

/// What it did.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub(super) loads: u64,
    /// Loads that found another value than the one before.
    pub(super) new_values: u64,
}

impl Bare {
    pub(super) fn start(lanes: Lanes, word: &'static AtomicU64, period_ticks: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let told = stop.clone();
        let thread = thread::spawn(move || {
            pin(lanes.from)?;
            Ok(look(word, period_ticks, &told))
        });
        Self { stop, thread }
    }

    pub(super) fn join(self) -> Result<Seen, BenchError> {
        self.stop.store(true, Relaxed);
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// As far apart as Shim's samples are, and as irregular.
fn look(word: &AtomicU64, period_ticks: u64, stop: &AtomicBool) -> Seen {
    /// Between two looks at whether to go on.
    const LOADS: u32 = 64;
    let mut next = clock::now();
    let mut random = next | 1;
    let (mut seen, mut last) = (Seen { loads: 0, new_values: 0 }, 0);
    while !stop.load(Relaxed) {
        for _ in 0..LOADS {
            let mut now = clock::now();
            while now < next {
                spin_loop();
                now = clock::now();
            }
            clock::fence();
            let value = black_box(word.load(Relaxed));
            seen.new_values += u64::from(value != last);
            last = value;
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            next = now + period_ticks / 2 + (random >> 32) * period_ticks / (1 << 32);
        }
        seen.loads += u64::from(LOADS);
    }
    seen
}

/// Lanes further apart than this are far.
const NEAR_TICKS: u64 = 400;
/// Far lanes are waited for, so often and so long each time.
const WAITS: u32 = 10;
const WAIT: Duration = Duration::from_secs(1);
/// What was measured while the lanes went apart is measured again, so often.
const REPEATS: u32 = 2;

/// Measures what it is told, once the lanes are near each other, and keeps an account of how far
/// apart they were.
pub(super) struct Stage<'a> {
    pub(super) lanes: Lanes,
    hear: Hear<'a>,
    trips: Vec<Trips>,
    /// Lanes that were waited for in vain are far apart for good.
    gave_up: bool,
}

/// How far apart the lanes were in one part: ticks for a line there and back.
struct Trips {
    part: String,
    shortest: u64,
    longest: u64,
    /// If the other lane was not to be had, or far away whenever it was measured.
    disturbed: bool,
    repeated: u32,
}

impl<'a> Stage<'a> {
    pub(super) fn new(lanes: Lanes, hear: Hear<'a>) -> Self {
        Self { lanes, hear, trips: Vec::new(), gave_up: false }
    }

    pub(super) fn begin(&mut self, part: String) {
        (self.hear)(&part);
        let (shortest, longest) = (u64::MAX, 0);
        self.trips.push(Trips { part, shortest, longest, disturbed: false, repeated: 0 });
    }

    /// The rows of all parts, and the longest distance that anything was measured at.
    pub(super) fn end(self) -> (Vec<Row>, Option<u64>) {
        let longest = self.trips.iter().map(|trips| trips.longest).max();
        let row = |Trips { part, shortest, longest, disturbed, repeated }: Trips| {
            row![
                "part" => part,
                "shortest" => shortest,
                "longest" => longest,
                "disturbed" => disturbed,
                "repeated" => repeated,
            ]
        };
        (self.trips.into_iter().map(row).collect(), longest)
    }

    /// What `once` measures, with the lanes near each other before it and after it if that is to be
    /// had.
    pub(super) fn undisturbed<T>(
        &mut self,
        mut once: impl FnMut(Hear<'_>) -> Result<T, BenchError>,
    ) -> Result<T, BenchError> {
        let mut repeats = 0;
        loop {
            let before = self.wait_until_near()?;
            let found = once(self.hear)?;
            let after = self.lanes.round_trip()?;
            let went_apart = after.is_none_or(|after| after > NEAR_TICKS);
            if before <= NEAR_TICKS && went_apart && repeats < REPEATS {
                repeats += 1;
                continue;
            }
            if let Some(trips) = self.trips.last_mut() {
                trips.shortest = trips.shortest.min(before);
                trips.longest = trips.longest.max(before).max(after.unwrap_or(0));
                trips.disturbed |= went_apart || before > NEAR_TICKS;
                trips.repeated += repeats;
            }
            return Ok(found);
        }
    }

    /// The same of each round of a table.
    pub(super) fn measure(
        &mut self,
        (key, columns): (&'static str, &'static [Column]),
        cases: &[Case],
        runs: usize,
        mut run: impl FnMut(usize, usize, &mut Values) -> Result<(), BenchError>,
    ) -> Result<Table, BenchError> {
        let mut all = vec![Samples::default(); cases.len()];
        for round in 0..runs {
            let values =
                self.undisturbed(|hear| play_round(cases, (round, runs), hear, &mut run))?;
            add_round(&mut all, values);
        }
        Ok(Table::of((key, columns), cases, &all))
    }

    /// The round trip of a line, once it is short, or when that was waited for in vain.
    fn wait_until_near(&mut self) -> Result<u64, BenchError> {
        let mut least = None;
        for wait in 0..WAITS {
            if wait > 0 {
                thread::sleep(WAIT);
            }
            let now = self.lanes.round_trip()?;
            least = [least, now].into_iter().flatten().min();
            if now.is_some_and(|ticks| ticks <= NEAR_TICKS || self.gave_up) {
                break;
            }
        }
        self.gave_up = least.is_none_or(|least| least > NEAR_TICKS);
        least.ok_or_else(no_round_trip)
    }
}
