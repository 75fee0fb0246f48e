//! Whether the observer of a lane's tasks sees all switches. Two threads hand the lane to each
//! other some ten thousand times, and the scheduler's own trace records each switch.

use std::sync::atomic::{AtomicU32, Ordering::*};
use std::sync::{Arc, OnceLock};
use std::thread::{self, Thread};
use std::time::Duration;

use elfen_kernel::task_map;
use elfen_machine::cpulist::CpuSet;
use elfen_rt::signal::page::Page;
use elfen_rt::signal::task::{Running, TaskMap};
use elfen_rt::signal::thread::ThreadSlot;
use elfen_shim::clock;
use elfen_shim::observers::Observers;
use elfen_shim::recording::{Head, Recording, State};
use elfen_shim::session::ObserverControl;
use elfen_shim::session::{ObserverResult, Words};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::SplitMix64;

use super::stage::{Lanes, Stage, on_lane};
use crate::bench::trace::{Buffer, Event, Kind};
use crate::bench::{
    BenchError, BenchReport, Column, Row, Table, joined, number, percent, pin, rounded, row,
};

const PERIOD_NS: u64 = 1_000;
const SWITCHES: u32 = 20_000;
/// The lengths of turns are drawn log-uniformly between these.
const SHORTEST_NS: f64 = 2e3;
const LONGEST_NS: f64 = 1e6;
/// How long the lane idles before and after the turns.
const MARGIN: Duration = Duration::from_millis(5);
/// The resolution of the trace's times.
const TRACE_NS: u64 = 1_000;
/// Counting starts and ends within this time of the recording's start and end.
const MOMENT_NS: u64 = 20_000;
const ROOM_KB: u64 = 16 << 10;
const MEMORY: usize = 16 << 20;
/// The measurement is repeated if a switch falls on the moment at which counting starts or ends.
const TRIES: u32 = 5;

/// What the scheduler did, and how much of it was seen.
const COLUMNS: &[Column] = &[
    number("period_ns", "switches, period", "ns", 0),
    number("switches", "by the scheduler's trace", "", 0),
    number("seen", "seen", "", 0).higher(),
    // The number that the summary of `elfen shim` prints.
    number("missed", "missed", "", 0).lower(),
    // Times without a switch that last two periods or more and contain no gap.
    number("stretches", "times without a switch", "", 0),
    number("stretches_seen_percent", "seen", "%", 2).higher(),
];

pub(super) fn measure(stage: &mut Stage<'_>) -> Result<BenchReport, BenchError> {
    let lanes = stage.lanes;
    let map = match task_map::open() {
        Ok((map, _)) => &*Box::leak(Box::new(map)),
        Err(error) => return Ok(BenchReport::without("switches", error)),
    };
    if let Err(error) = Buffer::start(&[lanes.on], ROOM_KB) {
        return Ok(BenchReport::without(
            "switches",
            format_args!("the scheduler's trace: {error}"),
        ));
    }
    for _ in 0..TRIES {
        let row = stage.undisturbed(|_| {
            let buffer = Buffer::start(&[lanes.on], ROOM_KB)?;
            let run = on_lane(lanes.from, || observed(lanes, map))?;
            Ok(compare(&run, &buffer.read()?))
        })?;
        if let Some(row) = row {
            return Ok(Table { key: "switches", columns: COLUMNS, rows: vec![row] }.into());
        }
    }
    Ok(BenchReport::without("switches", "other tasks switched whenever counting began or ended"))
}

/// A recording, and the switches that were counted.
struct Run {
    recording: Recording,
    seen: u64,
    missed: u64,
    /// The start and the end, each on the clock of samples and on the clock of the trace.
    moments: [(u64, u64); 2],
}

fn observed(lanes: Lanes, map: &'static TaskMap) -> Result<Run, BenchError> {
    let baton = Baton { turn: AtomicU32::new(u32::MAX), players: Default::default() };
    thread::scope(|scope| {
        let baton = &baton;
        let players = [0, 1].map(|own| scope.spawn(move || baton.play(lanes, own)));
        thread::sleep(MARGIN);
        let page: Option<&'static Page<ThreadSlot>> = None;
        let mut words = Words::of(std::process::id(), page);
        let on: CpuSet = [lanes.on].into_iter().collect();
        let first = clock::read_both();
        words.add_tasks(map, &on, true).map_err(std::io::Error::other)?;
        let head = Head { clock: lanes.clock, signals: words.signals.clone(), ..Head::default() };
        let orders = Arc::new(ObserverControl::default());
        let how = lanes.how(lanes.clock.ticks(PERIOD_NS), MEMORY);
        let observer = Observers::start([(words, how)], &orders)?;
        thread::sleep(MARGIN);
        baton.hand_over(0);
        for player in players {
            joined(player)?;
        }
        thread::sleep(MARGIN);
        let last = clock::read_both();
        orders.stop.store(true, Relaxed);
        let ObserverResult { pool, missed_switches, seen_switches: seen, .. } = observer.join();
        let recording = Recording::of(head, &pool).map_err(std::io::Error::other)?;
        let missed = missed_switches.unwrap_or(0);
        Ok(Run { recording, seen, missed, moments: [first, last] })
    })
}

/// Lets two threads on one lane run in turns.
struct Baton {
    /// The number of the current turn. Even turns belong to the first thread.
    turn: AtomicU32,
    players: [OnceLock<Thread>; 2],
}

impl Baton {
    /// Runs every second turn. The length of each turn is random.
    fn play(&self, lanes: Lanes, own: u32) -> Result<(), BenchError> {
        pin(lanes.on)?;
        self.player(own).get_or_init(thread::current);
        let mut random = SplitMix64::seed_from_u64(u64::from(own));
        for turn in (own..SWITCHES).step_by(2) {
            while self.turn.load(Acquire) != turn {
                thread::park();
            }
            let (low, high) = (SHORTEST_NS.ln(), LONGEST_NS.ln());
            let length = (low + random.random::<f64>() * (high - low)).exp();
            let length = Duration::from_secs_f64(length / 1e9);
            let end = clock::before() + lanes.clock.ticks(length.subsec_nanos().into());
            while clock::before() < end {
                std::hint::spin_loop();
            }
            self.hand_over(turn + 1);
        }
        Ok(())
    }

    fn hand_over(&self, turn: u32) {
        self.turn.store(turn, Release);
        if let Some(player) = self.player(turn).get() {
            player.unpark();
        }
    }

    fn player(&self, turn: u32) -> &OnceLock<Thread> {
        if turn.is_multiple_of(2) { &self.players[0] } else { &self.players[1] }
    }
}

/// Returns `None` if a switch falls on the moment at which counting began or ended.
fn compare(run: &Run, trace: &[Event]) -> Option<Row> {
    let switches: Vec<(u64, u32)> = trace
        .iter()
        .filter_map(|event| match event.kind {
            Kind::Switch { next, .. } => Some((event.at_ns, u32::try_from(next).unwrap_or(0))),
            Kind::Fork { .. } | Kind::Exec | Kind::Exit => None,
        })
        .collect();
    let states = states(run);
    // Counting begins after the recording does, and ends after its last sample.
    let (begun, ended) = (states.first()?.from, states.last()?.to);
    let near = |at: u64, moment: u64| at.abs_diff(moment) <= MOMENT_NS;
    if switches.iter().any(|&(at, _)| near(at, begun) || near(at, ended)) {
        return None;
    }
    let counted: Vec<(u64, u32)> =
        switches.into_iter().filter(|&(at, _)| begun < at && at < ended).collect();
    let (mut stretches, mut unseen_ns, mut next) = (0, Vec::new(), 0);
    for pair in counted.windows(2) {
        let ((from, task), (to, _)) = (pair[0], pair[1]);
        if to - from < 2 * PERIOD_NS + 2 * TRACE_NS {
            continue;
        }
        while states.get(next).is_some_and(|state| state.to + TRACE_NS < from) {
            next += 1;
        }
        let during = states[next..].iter().take_while(|state| state.from <= to + TRACE_NS);
        if during.clone().any(|state| state.task.is_none()) {
            continue;
        }
        stretches += 1;
        if !during.clone().any(|state| state.task == Some(task)) {
            unseen_ns.push(to - from);
        }
    }
    let seen_stretches = stretches - unseen_ns.len() as u64;
    Some(row![
        "period_ns" => PERIOD_NS,
        "switches" => counted.len(),
        "seen" => run.seen,
        "missed" => run.missed,
        "stretches" => stretches,
        "stretches_seen_percent" => rounded(percent(seen_stretches, stretches)),
        // The lengths of the stretches that were not seen.
        "unseen_ns" => unseen_ns,
    ])
}

/// A period of the recording: the thread that ran, or `None` in a gap.
struct Stay {
    from: u64,
    to: u64,
    task: Option<u32>,
}

/// Returns the periods of the recording, converted to the clock of the trace.
fn states(run: &Run) -> Vec<Stay> {
    let [(first_ticks, first_ns), (last_ticks, last_ns)] = run.moments;
    let (ticks, ns) = (last_ticks - first_ticks, last_ns - first_ns);
    let at = |at: u64| {
        let since = u128::from(at.saturating_sub(first_ticks)) * u128::from(ns);
        first_ns + u64::try_from(since / u128::from(ticks.max(1))).unwrap_or(u64::MAX)
    };
    let stay = |(run, end): (elfen_shim::recording::Run, u64)| Stay {
        from: at(run.start_ticks),
        to: at(end),
        task: match run.state {
            State::Value(word) => Some(match Running::from_word(word) {
                Running::Task(task) => task.thread,
                Running::Idle | Running::Unknown => 0,
            }),
            State::Gap | State::NotRunning | State::Other => None,
        },
    };
    run.recording.runs_with_ends(0).map(stay).collect()
}
