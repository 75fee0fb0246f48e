//! What the task map costs and how late it is: (a) from a context switch to a reader on another
//! CPU, (b) what the program adds to a switch, (c) one sample.
//!
//! (b) alternates batches of switches with the program detached, attached, and attached with the
//! CPU watched; each batch is held against the detached batch beside it, because a shared machine
//! drifts more than the program costs.

use std::hint::black_box;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use elfen_console::duration::number;
use elfen_kernel::task_map::{self, Loaded};
use elfen_machine::affinity;
use elfen_rt::clock::monotonic_ns;
use elfen_rt::signal::task::{TaskMap, TaskSlot};

use super::distribution::Distribution;

const DELAYS: usize = 20_000;
/// Between two wake-ups of the request lane: long enough to go idle, so that both kinds of switches
/// are seen.
const WAKE_EVERY: Duration = Duration::from_micros(50);
const ROUNDS: usize = 500;
const TURNS_A_ROUND: u32 = 250;
/// A turn hands a byte there and back.
const SWITCHES_A_TURN: u32 = 2;
const SAMPLE_BATCHES: usize = 1_000;
const SAMPLES_A_BATCH: u32 = 10_000;

/// Where to measure. The two differ.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cpus {
    /// Switches happen here,
    pub(crate) request: u32,
    /// and are seen from here.
    pub(crate) reader: u32,
}

#[derive(Debug)]
pub(crate) struct Costs {
    pub(crate) delay: Distribution,
    /// A switch without the program, and what the program adds to it on a watched CPU and on any
    /// other.
    pub(crate) switch: Distribution,
    pub(crate) added_watched: Distribution,
    pub(crate) added_unwatched: Distribution,
    /// A sample, and the loop around it without one.
    pub(crate) sample: Distribution,
    pub(crate) empty_loop: Distribution,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Map(#[from] task_map::Error),
    #[error("cannot run on CPU {cpu}: {error}")]
    Pin { cpu: u32, error: io::Error },
    #[error("handing a byte between two threads: {0}")]
    Pipe(#[from] io::Error),
    #[error("the task map has no CPU {0}")]
    NoCpu(u32),
    #[error("no switch of CPU {0} was seen")]
    NoSwitches(u32),
}

pub(crate) fn measure(cpus: Cpus) -> Result<Costs, Error> {
    let loaded = Loaded::load()?;
    let map = loaded.map()?;
    let delay = delays(&map, cpus)?;
    let (sample, empty_loop) = samples(slot(&map, cpus.request)?);
    drop(map);
    let added = added(&loaded, cpus.request)?;
    let some = |values| Distribution::of(values).ok_or(Error::NoSwitches(cpus.request));
    Ok(Costs {
        delay: some(delay)?,
        switch: some(added.detached)?,
        added_watched: some(added.watched)?,
        added_unwatched: some(added.unwatched)?,
        sample: some(sample)?,
        empty_loop: some(empty_loop)?,
    })
}

fn slot(map: &TaskMap, cpu: u32) -> Result<&TaskSlot, Error> {
    map.slot(cpu).ok_or(Error::NoCpu(cpu))
}

fn pin(cpu: u32) -> Result<(), Error> {
    affinity::pin(cpu).map_err(|error| Error::Pin { cpu, error })
}

/// A thread on the request lane that sleeps and wakes, and this one, which watches it from the
/// reader's CPU.
fn delays(map: &TaskMap, cpus: Cpus) -> Result<Vec<f64>, Error> {
    let request = slot(map, cpus.request)?;
    let stop = AtomicBool::new(false);
    let renew = || map.renew(cpus.request);
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            pin(cpus.request)?;
            while !stop.load(Relaxed) {
                renew();
                std::thread::sleep(WAKE_EVERY);
            }
            Ok(())
        });
        let seen = pin(cpus.reader).map(|()| watch_switches(request, || sleeper.is_finished()));
        stop.store(true, Relaxed);
        let slept = sleeper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        slept.and(seen)
    })
}

/// How long after each switch its task was seen. Switches that were missed are left out, not
/// guessed.
fn watch_switches(slot: &TaskSlot, gave_up: impl Fn() -> bool) -> Vec<f64> {
    let mut delays = Vec::with_capacity(DELAYS);
    let mut last_task = slot.task.load(Relaxed);
    let mut last_count = slot.switches.load(Relaxed);
    while delays.len() < DELAYS && !gave_up() {
        let task = slot.task.load(Relaxed);
        if task == last_task {
            continue;
        }
        let seen_ns = monotonic_ns();
        let Some(switch) = slot.snapshot() else { continue };
        if let (Some(at_ns), true) = (switch.at_ns, switch.count == last_count + 1) {
            delays.push(number(seen_ns.saturating_sub(at_ns)));
        }
        (last_task, last_count) = (task, switch.count);
    }
    delays
}

/// Nanoseconds a sample, batch by batch, and of the same loop without it.
fn samples(slot: &TaskSlot) -> (Vec<f64>, Vec<f64>) {
    let mut with = Vec::with_capacity(SAMPLE_BATCHES);
    let mut without = Vec::with_capacity(SAMPLE_BATCHES);
    for _ in 0..SAMPLE_BATCHES {
        with.push(ns_a_call(|| slot.is_busy()));
        without.push(ns_a_call(|| true));
    }
    (with, without)
}

fn ns_a_call(call: impl Fn() -> bool) -> f64 {
    let start = monotonic_ns();
    for _ in 0..SAMPLES_A_BATCH {
        black_box(call());
    }
    number(monotonic_ns() - start) / f64::from(SAMPLES_A_BATCH)
}

struct Added {
    detached: Vec<f64>,
    unwatched: Vec<f64>,
    watched: Vec<f64>,
}

/// First without a lease, then with one: a lease does not end before its time.
fn added(loaded: &Loaded, cpu: u32) -> Result<Added, Error> {
    let mut turns = PingPong::start(cpu)?;
    let mut detached = vec![turns.ns_a_switch()?];
    let mut measure = |watched: bool| -> Result<Vec<f64>, Error> {
        let mut added = Vec::with_capacity(ROUNDS);
        for _ in 0..ROUNDS {
            let before = turns.ns_a_switch()?;
            let map = loaded.map()?;
            if watched && !map.renew(cpu) {
                return Err(Error::NoCpu(cpu));
            }
            let attached = turns.ns_a_switch()?;
            drop(map);
            let beside = f64::midpoint(before, turns.ns_a_switch()?);
            detached.push(beside);
            added.push(attached - beside);
        }
        Ok(added)
    };
    let (unwatched, watched) = (measure(false)?, measure(true)?);
    Ok(Added { detached, unwatched, watched })
}

/// Two threads on one CPU that hand each other a byte: every hand-over is a context switch.
struct PingPong {
    ping: PipeWriter,
    pong: PipeReader,
}

impl PingPong {
    /// Pins the caller and a partner to `cpu`. The partner ends with its pipe.
    fn start(cpu: u32) -> Result<Self, Error> {
        pin(cpu)?;
        let (mut from_us, ping) = io::pipe()?;
        let (pong, mut to_us) = io::pipe()?;
        // Inherits our affinity.
        std::thread::spawn(move || {
            let mut byte = [0];
            while from_us.read_exact(&mut byte).and_then(|()| to_us.write_all(&byte)).is_ok() {}
        });
        Ok(Self { ping, pong })
    }

    fn ns_a_switch(&mut self) -> io::Result<f64> {
        let mut byte = [0];
        let start = monotonic_ns();
        for _ in 0..TURNS_A_ROUND {
            self.ping.write_all(&byte)?;
            self.pong.read_exact(&mut byte)?;
        }
        let switches = f64::from(TURNS_A_ROUND * SWITCHES_A_TURN);
        Ok(number(monotonic_ns() - start) / switches)
    }
}
