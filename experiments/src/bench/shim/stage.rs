//! What the parts of this benchmark share: the lanes and their distance, a word on a cache line of
//! its own, and the observer.
//!
//! The host may move a virtual CPU at any moment. A cache line then takes six times as long as
//! before. So the distance is measured before and after each measurement, and a disturbed
//! measurement is repeated.

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
    BenchError, Case, Column, Progress, Row, Samples, Table, Values, add_round, joined, pin,
    play_round, row,
};

/// The lanes to measure on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lanes {
    /// The lane that is observed.
    pub(super) on: u32,
    /// The lane of the observer.
    pub(super) from: u32,
    pub(super) clock: Clock,
}

impl Lanes {
    /// Measures the ticks of a round trip of a line. `None` if the other lane was busy with other
    /// tasks.
    pub(super) fn round_trip(self) -> Result<Option<u64>, BenchError> {
        on_lane(self.from, || Ok(round_trip::measure_ticks(self.on)))
    }

    pub(super) fn distance(self) -> Result<u64, BenchError> {
        self.round_trip()?.ok_or_else(no_round_trip)
    }

    /// Returns an `elfen shim` command for these lanes.
    pub(super) fn shim(self) -> Result<Command, BenchError> {
        let mut command = Command::new(find_program("elfen")?);
        let [on, from] = [self.on, self.from].map(|lane| lane.to_string());
        command.args(["shim", "--cpu", &on, "--observer-cpu", &from]);
        Ok(command)
    }

    /// Formats a period for `elfen shim --period`.
    pub(super) fn period(self, ticks: u64) -> String {
        match ticks {
            0 => "max".to_owned(),
            ticks => format!("{}ns", self.clock.ns(ticks)),
        }
    }

    /// Configures an observer with this much memory.
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
    let why = "the other lane was busy with other programs";
    BenchError::failed(why, "keep other programs off both lanes, and try again")
}

/// Reports that an observed program did not do what it should.
pub(super) fn program_failed(why: impl std::fmt::Display) -> BenchError {
    BenchError::failed(
        format!("the observed program: {why}"),
        "check that it runs without `elfen shim`",
    )
}

/// Returns the seconds that a program wrote to this file when `run` ran it.
pub(super) fn seconds_written(
    file: &Path,
    run: impl FnOnce() -> Result<Output, BenchError>,
) -> Result<f64, BenchError> {
    let _none_yet = fs::remove_file(file);
    let output = run()?;
    let text = fs::read_to_string(file).unwrap_or_default();
    let seconds = text.trim().parse().ok().filter(|&seconds: &f64| seconds > 0.0);
    let message = String::from_utf8_lossy(&output.stderr);
    seconds.ok_or_else(|| program_failed(format_args!("it did not run: {}", message.trim())))
}

/// Runs `what` on a lane in a new thread. The calling thread keeps its affinity, which its children
/// inherit.
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

/// A word on a cache line of its own.
#[repr(align(128))]
#[derive(Debug, Default)]
struct Line(AtomicU64);

/// Returns a word that lives as long as this process, as the observer requires.
pub(super) fn line() -> &'static AtomicU64 {
    &Box::leak(Box::<Line>::default()).0
}

/// Starts the observer of `elfen shim` on one word.
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

/// A thread that only does one load at a time. This is what any observer costs the writer of the
/// word.
///
/// It shares no code with `elfen shim`, so the two can be compared. The cost of the load comes from
/// the processor, which moves the line from the writer's cache and back for the next store. Any
/// further cost comes from Shim.
pub(super) struct Bare {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Seen, BenchError>>,
}

/// What the thread counted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub(super) loads: u64,
    /// Loads that returned a different value than the previous load.
    pub(super) new_values: u64,
}

impl Bare {
    pub(super) fn start(lanes: Lanes, word: &'static AtomicU64, period_ticks: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = thread::spawn(move || {
            pin(lanes.from)?;
            Ok(look(word, period_ticks, &stopped))
        });
        Self { stop, thread }
    }

    pub(super) fn join(self) -> Result<Seen, BenchError> {
        self.stop.store(true, Relaxed);
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// Loads the word at irregular times, with the same average distance as Shim's samples.
fn look(word: &AtomicU64, period_ticks: u64, stop: &AtomicBool) -> Seen {
    /// The number of loads between two checks of `stop`.
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

/// The lanes are near if a round trip takes at most this long.
const NEAR_TICKS: u64 = 400;
/// How often and how long each time the benchmark waits for the lanes to be near.
const WAITS: u32 = 10;
const WAIT: Duration = Duration::from_secs(1);
/// How often a measurement is repeated during which the lanes moved apart.
const REPEATS: u32 = 2;

/// Waits until the lanes are near, measures, and records the distance of the lanes.
pub(super) struct Stage<'a> {
    pub(super) lanes: Lanes,
    progress: Progress<'a>,
    trips: Vec<Trips>,
    /// Set if waiting did not help. The lanes then count as far apart permanently.
    gave_up: bool,
}

/// The distance of the lanes during one part: ticks for a round trip of a line.
struct Trips {
    part: String,
    shortest: u64,
    longest: u64,
    /// Set if the lanes were far apart, or the other lane was busy, when the distance was measured.
    disturbed: bool,
    repeated: u32,
}

impl<'a> Stage<'a> {
    pub(super) fn new(lanes: Lanes, progress: Progress<'a>) -> Self {
        Self { lanes, progress, trips: Vec::new(), gave_up: false }
    }

    pub(super) fn begin(&mut self, part: String) {
        (self.progress)(&part);
        let (shortest, longest) = (u64::MAX, 0);
        self.trips.push(Trips { part, shortest, longest, disturbed: false, repeated: 0 });
    }

    /// Returns the rows of all parts, and the longest distance during any measurement.
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

    /// Calls `once`, if possible with the lanes near each other before and after it. Repeats the
    /// call if they moved apart.
    pub(super) fn undisturbed<T>(
        &mut self,
        mut once: impl FnMut(Progress<'_>) -> Result<T, BenchError>,
    ) -> Result<T, BenchError> {
        let mut repeats = 0;
        loop {
            let before = self.wait_until_near()?;
            let found = once(self.progress)?;
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

    /// Measures a table. Each round is protected like `undisturbed`.
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
                self.undisturbed(|progress| play_round(cases, (round, runs), progress, &mut run))?;
            add_round(&mut all, values);
        }
        Ok(Table::of((key, columns), cases, &all))
    }

    /// Waits until the round trip of a line is short, or until waiting is given up. Returns the
    /// shortest round trip.
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
