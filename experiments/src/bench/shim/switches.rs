//! Whether the observer of a lane's tasks sees all that the scheduler does: two threads hand the
//! lane to each other some ten thousand times, and the scheduler's own trace says when.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::*};
use std::thread;
use std::time::Duration;

use elfen_kernel::task_map;
use elfen_machine::affinity;
use elfen_machine::cpulist::CpuSet;
use elfen_rt::signal::page::Page;
use elfen_rt::signal::task::{Running, TaskMap};
use elfen_rt::signal::thread::ThreadSlot;
use elfen_shim::clock;
use elfen_shim::reach::VmReader;
use elfen_shim::recorder::ObserverControl;
use elfen_shim::recording::{Head, Recording, State};
use elfen_shim::session::{Observer, ObserverConfig, ObserverResult, Words};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::SplitMix64;
use serde::Serialize;

use super::stage::{Error, Lanes, on_lane, percent};
use crate::bench::trace::buffer::Buffer;
use crate::bench::trace::{Event, Kind};

const PERIOD_NS: u64 = 1_000;
const SWITCHES: u32 = 20_000;
/// Lengths are drawn log-uniformly.
const SHORTEST_NS: f64 = 2e3;
const LONGEST_NS: f64 = 1e6;
/// Before and behind it, in which the lane idles.
const MARGIN: Duration = Duration::from_millis(5);
/// The trace says its times to a microsecond.
const TRACE_NS: u64 = 1_000;
/// Between a recording's end and when counting ends, and between its beginning and when that does.
const MOMENT_NS: u64 = 20_000;
const ROOM_KB: u64 = 16 << 10;
const MEMORY: usize = 16 << 20;
/// If somebody else's switch falls on the very moment at which counting begins or ends.
const TRIES: u32 = 5;

/// What the scheduler did, and what of it was seen.
#[derive(Debug, Serialize)]
pub(crate) struct Switches {
    pub(crate) period_ns: u64,
    /// By the scheduler's own trace.
    pub(crate) switches: u64,
    pub(crate) seen: u64,
    /// As the summary of `elfen shim` says it.
    pub(crate) missed: u64,
    /// Of two periods or more, while there was no gap.
    pub(crate) stretches: u64,
    pub(crate) stretches_seen_percent: f64,
    /// How long those were that were not seen.
    pub(crate) unseen_ns: Vec<u64>,
}

/// Why a machine does not allow it, if it does not.
pub(super) fn measure(lanes: Lanes) -> Result<Result<Switches, String>, Error> {
    let map = match task_map::open() {
        Ok((map, _)) => &*Box::leak(Box::new(map)),
        Err(error) => return Ok(Err(format!("who runs: {error}"))),
    };
    for _ in 0..TRIES {
        let buffer = match Buffer::start(&[lanes.on], ROOM_KB) {
            Ok(buffer) => buffer,
            Err(error) => return Ok(Err(format!("who runs: the scheduler's trace: {error}"))),
        };
        let run = on_lane(lanes.from, || observed(lanes, map))?;
        let trace = buffer.read().map_err(|error| Error::Program(error.to_string()))?;
        if let Some(found) = compare(&run, &trace) {
            return Ok(Ok(found));
        }
    }
    Ok(Err("who runs: others switched whenever counting began or ended".to_owned()))
}

/// A recording, and what of its switches was counted.
struct Run {
    recording: Recording,
    seen: u64,
    missed: u64,
    /// The same two moments by the clock of samples and by that of the trace.
    moments: [(u64, u64); 2],
}

fn observed(lanes: Lanes, map: &'static TaskMap) -> Result<Run, Error> {
    let baton = Baton::default();
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
        let how = how(lanes);
        let observer = Observer::start(words, how, VmReader::default(), orders.clone())?;
        thread::sleep(MARGIN);
        baton.begin.store(true, Release);
        for player in players {
            player.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
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

fn how(lanes: Lanes) -> ObserverConfig {
    ObserverConfig {
        from: lanes.from,
        clock: lanes.clock,
        period_ticks: lanes.clock.ticks(PERIOD_NS),
        pacing: None,
        fetch_ticks: u64::MAX,
        for_ticks: None,
        memory: MEMORY,
        keeps_last: false,
        keeps_samples: false,
        until: None,
        cost_meter: None,
        fold: None,
        live: None,
    }
}

/// What two threads on one lane hand to each other: the lane.
#[derive(Default)]
struct Baton {
    /// The turn that goes on; even turns are the first thread's.
    turn: AtomicU32,
    begin: AtomicBool,
}

impl Baton {
    /// Every second turn, each of a length of its own.
    fn play(&self, lanes: Lanes, own: u32) -> Result<(), Error> {
        affinity::pin(lanes.on)?;
        let mut random = SplitMix64::seed_from_u64(u64::from(own));
        while !self.begin.load(Acquire) {
            // Neither runs while counting begins.
            thread::sleep(MARGIN / 5);
        }
        for turn in (own..SWITCHES).step_by(2) {
            loop {
                let now = self.turn.load(Acquire);
                if now == turn {
                    break;
                }
                wait(&self.turn, now);
            }
            let (low, high) = (SHORTEST_NS.ln(), LONGEST_NS.ln());
            let length = (low + random.random::<f64>() * (high - low)).exp();
            let length = Duration::from_secs_f64(length / 1e9);
            let end = clock::before() + lanes.clock.ticks(length.subsec_nanos().into());
            while clock::before() < end {
                std::hint::spin_loop();
            }
            self.turn.store(turn + 1, Release);
            wake(&self.turn);
        }
        Ok(())
    }
}

/// Until the word is another; it may return before.
fn wait(word: &AtomicU32, value: u32) {
    let (word, operation) = (std::ptr::from_ref(word), libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG);
    let forever: *const libc::timespec = std::ptr::null();
    // SAFETY: the word lives as long as `word` is borrowed; the kernel only reads it.
    unsafe { libc::syscall(libc::SYS_futex, word, operation, value, forever) };
}

fn wake(word: &AtomicU32) {
    let (word, operation) = (std::ptr::from_ref(word), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG);
    // SAFETY: the kernel takes the word's address alone.
    unsafe { libc::syscall(libc::SYS_futex, word, operation, 1) };
}

/// `None` if a switch falls on the moment at which counting began or ended.
fn compare(run: &Run, trace: &[Event]) -> Option<Switches> {
    let switches: Vec<(u64, u32)> = trace
        .iter()
        .filter_map(|event| match event.kind {
            Kind::Switch { next, .. } => Some((event.at_ns, u32::try_from(next).unwrap_or(0))),
            Kind::Fork { .. } | Kind::Exec | Kind::Exit => None,
        })
        .collect();
    let states = states(run);
    // Counting begins behind where the recording does, and ends behind its last sample.
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
    Some(Switches {
        period_ns: PERIOD_NS,
        switches: counted.len() as u64,
        seen: run.seen,
        missed: run.missed,
        stretches,
        stretches_seen_percent: percent(stretches - unseen_ns.len() as u64, stretches),
        unseen_ns,
    })
}

/// What a recording says of a time: which thread ran, or `None` in a gap.
struct Stay {
    from: u64,
    to: u64,
    task: Option<u32>,
}

/// By the clock of the trace.
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
