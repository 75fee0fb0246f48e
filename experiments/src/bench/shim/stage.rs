//! What the parts of this benchmark share: the lanes and how far apart they are, a word on a line
//! of its own, the observer.
//!
//! The host may move a virtual CPU at any moment, and a line then takes six times as long as
//! before. So the distance is measured between any two rounds. A round is one of near lanes or of
//! far ones if they were that before it and after it, and is left out if they were not.

use std::hint::{black_box, spin_loop};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};

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

use crate::bench::{BenchError, Hear, Samples, Scenario, Values, joined, pin, play_round};

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
pub(super) const NEAR_TICKS: u64 = 400;
/// Rounds are begun, at most, for each that is wanted.
const TRIES: usize = 2;
/// Fewer rounds say nothing.
const ROUNDS_LEAST: usize = 5;
/// Between the distances before and after a round, at most.
const SAME: u64 = 2;

/// What was found while lanes were near, and while they were far; each with their distance.
#[derive(Debug)]
struct Distances<T> {
    now: u64,
    found: [Vec<(u64, T)>; 2],
    left_out: usize,
}

impl<T> Distances<T> {
    fn begin(now: u64) -> Self {
        Self { now, found: [const { Vec::new() }; 2], left_out: 0 }
    }

    /// How many there are of the kind of which there are most.
    fn most(&self) -> usize {
        self.found.iter().map(Vec::len).max().unwrap_or(0)
    }

    fn add(&mut self, after: u64, one: T) {
        let before = std::mem::replace(&mut self.now, after);
        let is_far = after > NEAR_TICKS;
        if is_far == (before > NEAR_TICKS) && before.max(after) <= SAME * before.min(after) {
            self.found[usize::from(is_far)].push((before.max(after), one));
        } else {
            self.left_out += 1;
        }
    }

    /// Those of each kind, if there are enough, and their distance in the median.
    fn found(self) -> impl Iterator<Item = (u64, Vec<T>)> {
        let enough = self.found.into_iter().filter(|all| all.len() >= ROUNDS_LEAST);
        enough.map(|mut all| {
            all.sort_by_key(|(ticks, _)| *ticks);
            (all[all.len() / 2].0, all.into_iter().map(|(_, one)| one).collect())
        })
    }
}

/// The samples of each case while lanes were near, and while they were far, with the distance in
/// ticks: until there are `runs` rounds of either, or it was tried twice as often.
pub(super) fn play_apart<S: Scenario>(
    scenario: &mut S,
    lanes: Lanes,
    runs: usize,
    hear: Hear<'_>,
) -> Result<Vec<(u64, Vec<Samples>)>, BenchError> {
    let mut distances = Distances::begin(lanes.distance()?);
    for round in 0..runs * TRIES {
        if distances.most() >= runs {
            break;
        }
        let values: Vec<Values> = play_round(scenario, round, runs, hear)?;
        distances.add(lanes.distance()?, values);
    }
    let cases = scenario.cases().len();
    let by_case = |rounds: Vec<Vec<Values>>| {
        let of = |case: usize| Samples(rounds.iter().map(|round| round[case].clone()).collect());
        (0..cases).map(of).collect()
    };
    Ok(distances.found().map(|(ticks, rounds)| (ticks, by_case(rounds))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_kept_its_distance_counts() {
        let mut distances = Distances::begin(150);
        // Near; as it goes far; far; as it comes back; and as siblings become cores.
        let all = [170, 160, 180, 175, 165, 1_000, 900, 1_100, 160, 60, 170];
        all.iter().zip(0..).for_each(|(&after, pair)| distances.add(after, pair));
        assert_eq!((distances.most(), distances.left_out, distances.now), (5, 4, 170));
        let found: Vec<(u64, Vec<u32>)> = distances.found().collect();
        assert_eq!(found.len(), 1, "two far ones are too few: {found:?}");
        let (ticks, mut pairs) = found[0].clone();
        pairs.sort_unstable();
        assert_eq!((ticks, pairs), (175, vec![0, 1, 2, 3, 4]));
    }
}
