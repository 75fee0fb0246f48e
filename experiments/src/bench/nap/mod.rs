//! How long a lane takes to fall asleep and to wake, by every nap of this machine: the thesis's
//! Figure 5.7.
//!
//! A thread on the request lane asks a second one, on the batch lane, to sleep, knows it asleep,
//! and wakes it. Being asked is a flag. Waking is a store to the line that the second thread waits
//! on; for a futex, FUTEX_WAKE; for the device, the request lane going idle, which alone wakes it.
//!
//! When a lane sleeps can be read nowhere. On two lanes of one core the first thread feels it: its
//! own instructions run faster (`released`). Elsewhere, the task map says when the kernel takes the
//! lane from the thread (`switched`), and a nap outside the kernel begins when called (`entered`).

mod released;
mod sleeper;

use std::hint::spin_loop;
use std::io;
use std::sync::atomic::Ordering::*;
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::Duration;

use elfen_console::duration::number;
use elfen_kernel::{device, task_map};
use elfen_machine::affinity;
use elfen_rt::clock::monotonic_ns;
use elfen_rt::memory::MemoryError;
use elfen_rt::nap::device::Device;
use elfen_rt::nap::{Kind, Nap};
use elfen_rt::signal::task::TaskSlot;
use serde::Serialize;

use super::distribution::Distribution;
use released::Probe;
use sleeper::{ANSWER_NS, Shared, Way, ticks};

/// Where to measure. The two differ.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lanes {
    /// The measuring thread is here,
    pub(crate) request: u32,
    /// and the one that sleeps here.
    pub(crate) batch: u32,
}

/// How it was known that the lane slept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum SleepSeenBy {
    /// The sibling had the core to itself.
    Released,
    /// The kernel had switched the lane away from the thread.
    Switched,
    /// The thread was about to wait; what the CPU takes from there on is missing.
    Entered,
}

/// One nap, measured or not.
#[derive(Debug)]
pub(crate) struct Measured {
    pub(crate) nap: &'static str,
    pub(crate) available: bool,
    /// Why it cannot run here, or what could not be measured of it.
    pub(crate) why: String,
    pub(crate) sleep_seen_by: Option<SleepSeenBy>,
    pub(crate) sleep_cycles: Option<Distribution>,
    pub(crate) wake_cycles: Option<Distribution>,
}

#[derive(Debug)]
pub(crate) struct Figures {
    pub(crate) naps: Vec<Measured>,
    pub(crate) tsc_mhz: f64,
    /// The nap that `auto` takes here.
    pub(crate) auto: &'static str,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("cannot run on CPU {cpu}: {error}")]
    Pin { cpu: u32, error: io::Error },
    #[error("cannot share a line of memory: {0}")]
    Memory(MemoryError),
    #[error("the thread on CPU {0} did not answer within ten seconds")]
    Stuck(u32),
}

/// Between two steps: at least this, and a part of as much again that differs from round to round.
const SETTLE_NS: u64 = 20_000;

/// A thread that is still on its lane after this does not sleep.
const SWITCH_LIMIT_NS: u64 = 5_000_000;

pub(crate) fn measure(lanes: Lanes, count: usize) -> Result<Figures, Error> {
    pin(lanes.request)?;
    let ticks_per_ns = calibrate_clock();
    let probe = with_sleeper(lanes, &Way::Futex, |bench| bench.calibrate_probe())?;
    // Only root may, as a rule; without it, less can be seen.
    let map = if probe.is_none() { task_map::open().ok() } else { None };
    let batch_slot = map.as_ref().and_then(|(map, _)| map.slot(lanes.batch));
    let series = Series { lanes, count, probe, batch_slot, ticks_per_ns };
    let mut naps = Vec::new();
    for kind in Kind::ALL {
        naps.push(match open(kind, lanes) {
            Ok(nap) => series.measure(kind.name(), &Way::Nap(nap))?,
            Err(why) => unavailable(kind.name(), why),
        });
    }
    naps.push(series.measure("futex", &Way::Futex)?);
    let auto = Nap::auto().kind().name();
    Ok(Figures { naps, tsc_mhz: ticks_per_ns * 1000.0, auto })
}

fn pin(cpu: u32) -> Result<(), Error> {
    affinity::pin(cpu).map_err(|error| Error::Pin { cpu, error })
}

/// The nap of this kind, or why there is none between these lanes.
pub(crate) fn open(kind: Kind, lanes: Lanes) -> Result<Nap, String> {
    match kind {
        Kind::Device => Ok(Nap::Device(open_device(lanes)?)),
        _ => Nap::open(kind).map_err(|missing| missing.to_string()),
    }
}

/// The device, with the request lane's switches timed.
fn open_device(lanes: Lanes) -> Result<Device, String> {
    let device = device::open().map_err(|missing| format!("{missing}; {}", missing.fix()))?;
    match device.module().watch(lanes.request, true) {
        Ok(()) => Ok(device),
        Err(error) => Err(format!("the module does not watch CPU {}: {error}", lanes.request)),
    }
}

fn unavailable(nap: &'static str, why: String) -> Measured {
    let (sleep_seen_by, sleep_cycles, wake_cycles) = (None, None, None);
    Measured { nap, available: false, why, sleep_seen_by, sleep_cycles, wake_cycles }
}

/// Ticks of the time stamp counter a nanosecond.
fn calibrate_clock() -> f64 {
    let (start_ns, start) = (monotonic_ns(), ticks());
    while monotonic_ns() - start_ns < 20_000_000 {
        spin_loop();
    }
    let (end, end_ns) = (ticks(), monotonic_ns());
    number(end - start) / number(end_ns - start_ns)
}

/// What is the same for all naps of one run.
struct Series<'a> {
    lanes: Lanes,
    count: usize,
    /// There is one if the two lanes share a core.
    probe: Option<Probe>,
    /// The batch lane in the task map, if that can be read.
    batch_slot: Option<&'a TaskSlot>,
    ticks_per_ns: f64,
}

impl Series<'_> {
    fn measure(&self, nap: &'static str, way: &Way) -> Result<Measured, Error> {
        let seen_by = self.seen_by(way);
        let rounds = with_sleeper(self.lanes, way, |bench| {
            let round = |_| bench.round(self, seen_by);
            (0..self.count).map(round).collect::<Result<Vec<_>, _>>()
        })?;
        let sleep = Distribution::of(rounds.iter().filter_map(|round| round.sleep).collect());
        let wake = Distribution::of(rounds.iter().filter_map(|round| round.wake).collect());
        let mut lacks = Vec::new();
        match seen_by {
            None => lacks.push("when it slept could not be seen: the lanes share no core"),
            Some(_) if sleep.is_none() => lacks.push("it was never seen to sleep"),
            Some(_) => {}
        }
        if wake.is_none() {
            lacks.push("no nap ended because the request lane idled");
        }
        let why = lacks.join("; ");
        Ok(Measured {
            nap,
            available: true,
            why,
            sleep_seen_by: seen_by.filter(|_| sleep.is_some()),
            sleep_cycles: sleep,
            wake_cycles: wake,
        })
    }

    fn seen_by(&self, way: &Way) -> Option<SleepSeenBy> {
        match way {
            _ if self.probe.is_some() => Some(SleepSeenBy::Released),
            Way::Futex => self.batch_slot.map(|_| SleepSeenBy::Switched),
            // The thread stays on its lane, inside the kernel: from outside it looks busy.
            Way::Nap(Nap::Device(_)) => None,
            Way::Nap(_) => Some(SleepSeenBy::Entered),
        }
    }
}

/// Runs `measure` beside a thread that sleeps as asked, and ends that.
fn with_sleeper<T>(
    lanes: Lanes,
    way: &Way,
    measure: impl FnOnce(&mut Bench<'_, '_>) -> Result<T, Error>,
) -> Result<T, Error> {
    let shared = Shared::new().map_err(Error::Memory)?;
    thread::scope(|scope| {
        let mut bench = Bench::start(scope, &shared, way, lanes);
        let result = measure(&mut bench);
        shared.stop();
        let slept = bench.sleeper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        // Why it did not answer, then.
        slept.and(result)
    })
}

/// What one nap took, in cycles; `None` if it ended otherwise than asked, or was not seen.
#[derive(Clone, Copy, Debug)]
struct Round {
    sleep: Option<f64>,
    wake: Option<f64>,
}

/// The measuring thread, and the one that sleeps.
struct Bench<'scope, 'env> {
    shared: &'env Shared,
    way: &'env Way,
    lanes: Lanes,
    sleeper: ScopedJoinHandle<'scope, Result<(), Error>>,
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

    /// The sibling's pace while the batch lane works, against its pace while that sleeps.
    fn calibrate_probe(&mut self) -> Result<Option<Probe>, Error> {
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

    fn round(&mut self, series: &Series<'_>, seen_by: Option<SleepSeenBy>) -> Result<Round, Error> {
        self.settle();
        let asked = self.ask();
        let slept = match seen_by {
            Some(SleepSeenBy::Released) => series.probe.as_ref().and_then(Probe::released_at),
            Some(SleepSeenBy::Switched) => self.switched_at(series.batch_slot),
            Some(SleepSeenBy::Entered) => Some(self.await_entered()?),
            None => None,
        };
        self.await_entered()?;
        self.settle();
        let woken = self.wake();
        self.await_done()?;
        let wake = self.shared.woken_after(self.way, woken, series.ticks_per_ns);
        let sleep = slept.map(|at| number(at.saturating_sub(asked)));
        // A nap that nothing woke was none of the lane's doing.
        Ok(Round { sleep: sleep.filter(|_| wake.is_some()), wake })
    }

    /// Asks the second thread to sleep; says when.
    fn ask(&mut self) -> u64 {
        self.round += 1;
        self.shared.hold(self.way);
        let asked = ticks();
        self.shared.asked.store(self.round, Release);
        asked
    }

    /// Wakes the second thread; says when that began.
    fn wake(&self) -> u64 {
        let began = ticks();
        match self.way {
            Way::Nap(Nap::Device(device)) => self.shared.leave_lane(device, self.lanes.request),
            way => self.shared.release(way),
        }
        began
    }

    /// When the lane was seen to run something else; `None` if it did not run the thread before, or
    /// goes on to.
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

    fn await_entered(&self) -> Result<u64, Error> {
        self.await_round(|shared| shared.entered.load(Acquire))?;
        Ok(self.shared.entered_at.load(Relaxed))
    }

    fn await_done(&self) -> Result<(), Error> {
        self.await_round(|shared| shared.done.load(Acquire))
    }

    fn await_round(&self, reached: impl Fn(&Shared) -> u64) -> Result<(), Error> {
        let start_ns = monotonic_ns();
        while reached(self.shared) != self.round {
            // A second thread that could not be pinned has ended.
            if monotonic_ns() - start_ns > ANSWER_NS || self.sleeper.is_finished() {
                return Err(Error::Stuck(self.lanes.batch));
            }
            spin_loop();
        }
        Ok(())
    }

    fn settle(&self) {
        // The odd multiplier spreads the rounds over the second half.
        let part_ns = self.round.wrapping_mul(7919) % SETTLE_NS;
        let end_ns = monotonic_ns() + SETTLE_NS + part_ns;
        while monotonic_ns() < end_ns {
            spin_loop();
        }
    }
}
