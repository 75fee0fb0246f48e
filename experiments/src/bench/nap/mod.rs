//! `elfen lab bench nap`: how long a lane takes to fall asleep and to wake, with every nap of this
//! machine. This is the thesis's Figure 5.7.
//!
//! A thread on the request lane sets a flag, which asks a second thread on the batch lane to sleep.
//! It waits until the second thread sleeps, and wakes it. What wakes the second thread depends on
//! the nap:
//!
//! - A futex is woken by FUTEX_WAKE.
//! - A device nap ends when the request lane goes idle, and only then.
//! - Other naps wait on a cache line, and a store to that line ends them.
//!
//! The moment at which a lane falls asleep cannot be read anywhere. On two lanes of one core, the
//! first thread's own instructions run faster then (`released`). Otherwise, the task map contains
//! when the kernel switched away from the thread (`switched`). A nap outside of the kernel counts
//! from its call (`entered`).

mod released;
mod sleeper;

use std::hint::spin_loop;
use std::sync::atomic::Ordering::*;
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::Duration;

use elfen_console::duration::number;
use elfen_kernel::{device, task_map};
use elfen_machine::lane_args::LaneArgs;
use elfen_rt::clock::monotonic_ns;
use elfen_rt::nap::device::Device;
use elfen_rt::nap::{Nap, NapKind};
use elfen_rt::signal::task::{TaskMap, TaskSlot};

use super::{
    BenchError, BenchReport, Case, Column, Progress, Samples, Values, case, joined, label, lanes,
    measure, metric, pin, play, row, runs, value_of,
};
use released::Probe;
use sleeper::{ANSWER_NS, Shared, WakeUp, Way, ticks};

const EXAMPLES: &str = "\
Examples:
  elfen lab bench nap                    every nap, on the first pair of lanes
  elfen lab bench nap --lanes 2:6 --runs 5    on this pair, 100 times
  elfen lab bench nap --json | jq '.naps[] | select(.available) | .nap'

Column `seen by` names the end of the measured time to sleep. `released`: the sibling has the core \
to itself. `switched`: the kernel has switched to another task. `entered`: the thread is about to \
wait. Only `released` includes the time that the CPU itself takes.

Column `overtaken` counts device naps whose time to wake is unknown: another task ran on the \
request lane before the woken thread could read since when that lane had been idle.";

/// Measure how long a lane takes to fall asleep and to wake
///
/// The experiment of the thesis's Figure 5.7, in cycles of the time stamp counter, with a futex for
/// reference. Naps that cannot run here are listed with the reason.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct BenchNapArgs {
    #[command(flatten)]
    lanes: LaneArgs,

    /// Number of rounds; each round has 20 naps of each kind
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = runs())]
    runs: usize,
}

pub(crate) fn run(args: &BenchNapArgs, progress: Progress<'_>) -> Result<BenchReport, BenchError> {
    let (request, batch) = lanes(&args.lanes)?;
    let naps = Naps::open(Lanes { request, batch })?;
    let run = |case, _, values: &mut Values| naps.run(case, values);
    let mut table = measure(("naps", NAPS), &naps.cases(), args.runs, progress, run)?;
    for (row, (_, way)) in table.rows.iter_mut().zip(&naps.ways) {
        let seen_by = way.as_ref().ok().and_then(|way| naps.seen_by(way));
        let [slept, woke] =
            ["sleep_cycles", "wake_cycles"].map(|key| !value_of(row, key).is_null());
        row.push(("sleep_seen_by", seen_by.filter(|_| slept).map(SleepSeenBy::name).into()));
        let why = match way {
            Ok(_) => lacks(seen_by, slept, woke),
            Err(why) => why.clone(),
        };
        row.push(("why", why.into()));
    }
    let about = row![
        "request_cpu" => request,
        "batch_cpu" => batch,
        "tsc_mhz" => (naps.ticks_per_ns * 1000.0).round(),
        // The nap that `auto` chooses on this machine.
        "auto" => Nap::auto().kind().name(),
    ];
    Ok(BenchReport::from(table).about(about))
}

/// The name of a nap, and the median nanoseconds that it takes to sleep and to wake.
pub(crate) type NapTimes = (&'static str, Option<f64>, Option<f64>);

/// Measures the times of all naps, for the model of a machine.
pub(crate) fn times(lanes: Lanes, naps: usize) -> Result<Vec<NapTimes>, BenchError> {
    let all = Naps::open(lanes)?;
    let run = |case, _, values: &mut Values| all.run(case, values);
    let played = play(&all.cases(), naps.div_ceil(NAPS_A_ROUND), &mut |_| {}, run)?;
    let ns = |samples: &Samples, key| samples.stats(key).map(|s| s.median / all.ticks_per_ns);
    let times = |(way, samples): (&(&'static str, _), &Samples)| {
        (way.0, ns(samples, "sleep_cycles"), ns(samples, "wake_cycles"))
    };
    Ok(all.ways.iter().zip(&played).map(times).collect())
}

/// The lanes to measure on. They must differ.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lanes {
    /// The lane of the measuring thread.
    pub(crate) request: u32,
    /// The lane of the thread that sleeps.
    pub(crate) batch: u32,
}

/// How the benchmark detected that the lane slept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SleepSeenBy {
    /// The sibling had the core to itself.
    Released,
    /// The kernel had switched from the thread to another task.
    Switched,
    /// The thread was about to wait. The time that the CPU takes from there on is missing.
    Entered,
}

impl SleepSeenBy {
    fn name(self) -> &'static str {
        match self {
            Self::Released => "released",
            Self::Switched => "switched",
            Self::Entered => "entered",
        }
    }
}

const NAPS_A_ROUND: usize = 20;

/// The shortest pause between two steps. Each pause is up to twice as long, and differs from round
/// to round.
const SETTLE_NS: u64 = 20_000;

/// A thread that is still on its lane after this time is not sleeping.
const SWITCH_LIMIT_NS: u64 = 5_000_000;

/// Every nap of this machine, and a futex.
struct Naps {
    lanes: Lanes,
    /// The name of each nap, and the nap or the reason why it cannot run here.
    ways: Vec<(&'static str, Result<Way, String>)>,
    /// Present if the two lanes share a core.
    probe: Option<Probe>,
    /// Present if the task map is needed and can be read.
    map: Option<TaskMap>,
    ticks_per_ns: f64,
}

const NAPS: &[Column] = &[
    label("nap", "nap"),
    metric("sleep_cycles", "sleep", "cycles", 0).lower(),
    label("sleep_seen_by", "seen by"),
    metric("wake_cycles", "wake", "cycles", 0).lower(),
    super::number("overtaken", "overtaken", "", 0),
    label("why", "not measured"),
];

impl Naps {
    fn open(lanes: Lanes) -> Result<Self, BenchError> {
        pin(lanes.request)?;
        let ticks_per_ns = calibrate_clock();
        let probe = with_sleeper(lanes, &Way::Futex, |bench| bench.calibrate_probe())?;
        // Usually only root may open the task map. Without it, fewer naps can be observed.
        let map = if probe.is_none() { task_map::open().ok() } else { None };
        let nap = |kind: NapKind| (kind.name(), open(kind, lanes).map(Way::Nap));
        let mut ways: Vec<_> = NapKind::ALL.into_iter().map(nap).collect();
        ways.push(("futex", Ok(Way::Futex)));
        Ok(Self { lanes, ways, probe, map: map.map(|(map, _)| map), ticks_per_ns })
    }

    fn cases(&self) -> Vec<Case> {
        let labels = |(name, way): &(&'static str, Result<Way, String>)| {
            case(row!["nap" => name, "available" => way.is_ok()])
        };
        self.ways.iter().map(labels).collect()
    }

    fn run(&self, case: usize, values: &mut Values) -> Result<(), BenchError> {
        let Ok(way) = &self.ways[case].1 else { return Ok(()) };
        let seen_by = self.seen_by(way);
        with_sleeper(self.lanes, way, |bench| {
            // The sleeping thread is new, so its first nap does not count.
            bench.round(self, seen_by)?;
            for _ in 0..NAPS_A_ROUND {
                let Round { sleep, wake_up } = bench.round(self, seen_by)?;
                values.extend("sleep_cycles", sleep);
                if let WakeUp::After(cycles) = wake_up {
                    values.add("wake_cycles", cycles);
                }
                let overtaken = matches!(wake_up, WakeUp::Overtaken);
                values.count("overtaken", overtaken.into());
            }
            Ok(())
        })
    }

    /// The slot of the batch lane in the task map.
    fn batch_slot(&self) -> Option<&TaskSlot> {
        self.map.as_ref()?.slot(self.lanes.batch)
    }

    fn seen_by(&self, way: &Way) -> Option<SleepSeenBy> {
        match way {
            _ if self.probe.is_some() => Some(SleepSeenBy::Released),
            Way::Futex => self.batch_slot().map(|_| SleepSeenBy::Switched),
            // The thread stays on its lane, inside the kernel, so the task map shows it as running.
            Way::Nap(Nap::Device(_)) => None,
            Way::Nap(_) => Some(SleepSeenBy::Entered),
        }
    }
}

/// What could not be measured although the nap can run.
fn lacks(seen_by: Option<SleepSeenBy>, slept: bool, woke: bool) -> String {
    let mut lacks = Vec::new();
    match seen_by {
        None => lacks.push("the time to sleep cannot be measured, because the lanes share no core"),
        Some(_) if !slept => lacks.push("no sleep was detected"),
        Some(_) => {}
    }
    if !woke {
        lacks.push("no nap was ended by an idle request lane");
    }
    lacks.join("; ")
}

/// Opens the nap of this kind, or returns why it cannot be used between these lanes.
pub(crate) fn open(kind: NapKind, lanes: Lanes) -> Result<Nap, String> {
    match kind {
        NapKind::Device => Ok(Nap::Device(open_device(lanes)?)),
        _ => Nap::open(kind).map_err(|missing| missing.to_string()),
    }
}

/// Opens the device, and lets it time the request lane's switches.
fn open_device(lanes: Lanes) -> Result<Device, String> {
    let device = device::open().map_err(|missing| format!("{missing}; {}", missing.fix()))?;
    match device.module().watch(lanes.request, true) {
        Ok(()) => Ok(device),
        Err(error) => Err(format!("the module does not watch CPU {}: {error}", lanes.request)),
    }
}

/// Measures the ticks of the time stamp counter per nanosecond.
fn calibrate_clock() -> f64 {
    let (start_ns, start) = (monotonic_ns(), ticks());
    while monotonic_ns() - start_ns < 20_000_000 {
        spin_loop();
    }
    let (end, end_ns) = (ticks(), monotonic_ns());
    number(end - start) / number(end_ns - start_ns)
}

/// Runs `measure` next to a thread that sleeps when asked, and ends that thread.
fn with_sleeper<T>(
    lanes: Lanes,
    way: &Way,
    measure: impl FnOnce(&mut Bench<'_, '_>) -> Result<T, BenchError>,
) -> Result<T, BenchError> {
    let shared = Shared::new()?;
    thread::scope(|scope| {
        let mut bench = Bench::start(scope, &shared, way, lanes);
        let result = measure(&mut bench);
        shared.stop();
        let slept = joined(bench.sleeper);
        // If the thread failed, its error explains why it did not answer.
        slept.and(result)
    })
}

/// The times of one nap.
#[derive(Clone, Copy, Debug)]
struct Round {
    /// `None` if the sleep was not detected, or the time to wake is unknown.
    sleep: Option<f64>,
    wake_up: WakeUp,
}

/// The measuring thread's state, and the handle of the thread that sleeps.
struct Bench<'scope, 'env> {
    shared: &'env Shared,
    way: &'env Way,
    lanes: Lanes,
    sleeper: ScopedJoinHandle<'scope, Result<(), BenchError>>,
    round: u64,
}

impl<'scope, 'env> Bench<'scope, 'env> {
    fn start(
        scope: &'scope Scope<'scope, 'env>,
        shared: &'env Shared,
        way: &'env Way,
        lanes: Lanes,
    ) -> Self {
        let sleeper = scope.spawn(move || {
            pin(lanes.batch)?;
            shared.sleep_when_asked(way, lanes.request);
            Ok(())
        });
        Self { shared, way, lanes, sleeper, round: 0 }
    }

    /// Compares the sibling's pace while the batch lane works with its pace while the batch lane
    /// sleeps.
    fn calibrate_probe(&mut self) -> Result<Option<Probe>, BenchError> {
        self.ask();
        self.wake();
        self.await_done()?; // it runs where it should
        let working = released::paces();
        self.ask();
        thread::sleep(Duration::from_millis(2));
        let asleep = released::paces();
        self.wake();
        self.await_done()?;
        Ok(Probe::between(working, asleep))
    }

    fn round(&mut self, naps: &Naps, seen_by: Option<SleepSeenBy>) -> Result<Round, BenchError> {
        self.settle();
        let asked = self.ask();
        let slept = match seen_by {
            Some(SleepSeenBy::Released) => naps.probe.as_ref().and_then(Probe::released_at),
            Some(SleepSeenBy::Switched) => self.switched_at(naps.batch_slot()),
            Some(SleepSeenBy::Entered) => Some(self.await_entered()?),
            None => None,
        };
        self.await_entered()?;
        self.settle();
        let woken = self.wake();
        self.await_done()?;
        let wake_up = self.shared.wake_up(self.way, woken, naps.ticks_per_ns);
        let sleep = slept.map(|at| number(at.saturating_sub(asked)));
        // If the nap ended for another reason, when it began to sleep does not count either.
        Ok(Round { sleep: sleep.filter(|_| matches!(wake_up, WakeUp::After(_))), wake_up })
    }

    /// Asks the second thread to sleep. Returns when.
    fn ask(&mut self) -> u64 {
        self.round += 1;
        self.shared.hold(self.way);
        let asked = ticks();
        self.shared.asked.store(self.round, Release);
        asked
    }

    /// Wakes the second thread. Returns when the wake-up began.
    fn wake(&self) -> u64 {
        let began = ticks();
        match self.way {
            Way::Nap(Nap::Device(device)) => self.shared.leave_lane(device, self.lanes.request),
            way => self.shared.release(way),
        }
        began
    }

    /// Returns when the task map showed another task on the lane. `None` if the thread was not on
    /// the lane before, or stays on it.
    fn switched_at(&self, batch_slot: Option<&TaskSlot>) -> Option<u64> {
        let (slot, sleeper) = (batch_slot?, self.shared.sleeper.load(Relaxed));
        let end_ns = monotonic_ns() + SWITCH_LIMIT_NS;
        while slot.task.load(Relaxed) == sleeper {
            if monotonic_ns() > end_ns {
                return None;
            }
        }
        let seen = ticks();
        (self.shared.entered.load(Acquire) == self.round).then_some(seen)
    }

    fn await_entered(&self) -> Result<u64, BenchError> {
        self.await_round(|shared| shared.entered.load(Acquire))?;
        Ok(self.shared.entered_at.load(Relaxed))
    }

    fn await_done(&self) -> Result<(), BenchError> {
        self.await_round(|shared| shared.done.load(Acquire))
    }

    fn await_round(&self, reached: impl Fn(&Shared) -> u64) -> Result<(), BenchError> {
        let start_ns = monotonic_ns();
        while reached(self.shared) != self.round {
            // The second thread may have ended because it could not be pinned.
            if monotonic_ns() - start_ns > ANSWER_NS || self.sleeper.is_finished() {
                let batch = self.lanes.batch;
                return Err(BenchError::failed(
                    format!("the thread on CPU {batch} did not answer within ten seconds"),
                    "end the program that occupies this CPU, and try again",
                ));
            }
            spin_loop();
        }
        Ok(())
    }

    fn settle(&self) {
        // The odd multiplier spreads the rounds over the second half of the pause.
        let part_ns = self.round.wrapping_mul(7919) % SETTLE_NS;
        let end_ns = monotonic_ns() + SETTLE_NS + part_ns;
        while monotonic_ns() < end_ns {
            spin_loop();
        }
    }
}
