//! Measures how a service and programs that share a core slow each other down, for the model.
//!
//! The service runs alone, next to each batch program, and next to each nap of the machine. A
//! slowdown is the work per second alone, divided by the work per second next to the other program.
//! It is measured for the service and for the batch program.
//!
//! The service is one worker that searches without a pause. So its lane is always busy, and no load
//! generator interferes.

use std::panic;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use elfen_machine::affinity;
use elfen_machine::pair::Pair;
use elfen_rt::memory::{Memory, MemoryError};
use elfen_rt::nap::Nap;
use elfen_rt::signal::page::Page;
use elfen_rt::signal::task::TaskSlot;

use super::batches::BatchOutput;
use super::os::{ChildSetup, Rank};
use super::process::{Process, Rig};
use super::service::Corpus;
use super::summary::{Figure, figure};
use super::{LiveError, Machine, sleep_until, usage};

/// The time limit for an iteration of `elfen-batch` to end.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);

/// The pair and the programs that are measured.
#[derive(Clone, Debug)]
pub struct Order {
    pub pair: Pair,
    pub batches: Vec<String>,
    pub documents: u64,
    pub index: Option<std::path::PathBuf>,
    /// How long a batch program runs alone.
    pub duration: Duration,
    pub runs: u32,
}

/// How much longer two neighbours on a core take than alone: the service, and a program or a nap on
/// the batch lane. A value of 1 means that they do not slow each other.
#[derive(Clone, Debug, PartialEq)]
pub struct Slowdown {
    pub name: String,
    pub of_request: Figure,
    /// `None` for a nap.
    pub of_batch: Option<Figure>,
}

/// What the batch lane does next to the service.
#[derive(Clone, Copy)]
enum Neighbour<'a> {
    Batch(&'a str),
    Nap(&'a Nap),
}

struct Bench {
    corpus: Corpus,
    duration: Duration,
    /// The CPUs of the request lane and the batch lane.
    lanes: [u32; 2],
    rig: Rig,
}

/// Measures the service next to each batch program and next to each of `naps`. Returns the
/// slowdowns for the programs, then those for the naps.
///
/// Runs are interleaved. `progress` gets the number of finished steps and the number of all steps.
pub fn measure(
    order: Order,
    naps: &[Nap],
    progress: &mut dyn FnMut(usize, usize),
) -> Result<[Vec<Slowdown>; 2], LiveError> {
    let rig = Rig::new(Machine { pairs: vec![order.pair.clone()], ..Machine::default() })?;
    let corpus = Corpus::open(&rig, order.index.as_deref(), order.documents)?;
    let lanes = rig.machine.batch_lanes().next().ok_or_else(|| {
        let why = "the pair has no batch lane".to_owned();
        LiveError::Refused { why, fix: "name a pair, as in --lanes 0:1" }
    })?;
    let bench = Bench { corpus, duration: order.duration, lanes: lanes.into(), rig };
    let batches = order.batches.iter().map(|name| Neighbour::Batch(name));
    let neighbours: Vec<Neighbour<'_>> = batches.chain(naps.iter().map(Neighbour::Nap)).collect();
    let steps = usize::try_from(order.runs).unwrap_or(usize::MAX).saturating_mul(neighbours.len());
    let mut ratios: Vec<[Vec<f64>; 2]> = vec![Default::default(); neighbours.len()];
    for step in 0..steps {
        let at = step % neighbours.len();
        let (of_request, of_batch) = bench.measure_next_to(neighbours[at])?;
        ratios[at][0].push(of_request);
        ratios[at][1].extend(of_batch);
        progress(step + 1, steps);
    }
    let slowdown = |(neighbour, [of_request, of_batch]): (&Neighbour<'_>, &[Vec<f64>; 2])| {
        let name = match neighbour {
            Neighbour::Batch(name) => name,
            Neighbour::Nap(nap) => nap.kind().name(),
        };
        Slowdown {
            name: name.to_owned(),
            of_request: figure(of_request),
            of_batch: (!of_batch.is_empty()).then(|| figure(of_batch)),
        }
    };
    let mut of_batches: Vec<Slowdown> = neighbours.iter().zip(&ratios).map(slowdown).collect();
    let of_naps = of_batches.split_off(order.batches.len());
    Ok([of_batches, of_naps])
}

impl Bench {
    /// Returns the slowdowns of the service and of its neighbour. Each is relative to a run alone
    /// just before.
    fn measure_next_to(&self, neighbour: Neighbour<'_>) -> Result<(f64, Option<f64>), LiveError> {
        let alone = self.search()?;
        match neighbour {
            Neighbour::Batch(name) => {
                let batch = self.batch(name)?;
                sleep_until(Instant::now() + self.duration, || Ok(()))?;
                let batch_alone = end(batch)?;
                // A search ends when its queries are done, so the batch has to run until then.
                let batch = self.batch(name)?;
                let found = self.search()?;
                Ok((alone / found, Some(batch_alone / end(batch)?)))
            }
            Neighbour::Nap(nap) => Ok((alone / self.search_next_to_nap(nap)?, None)),
        }
    }

    /// Searches while a thread on the other lane naps again and again.
    fn search_next_to_nap(&self, nap: &Nap) -> Result<f64, LiveError> {
        let [lane, sibling] = self.lanes;
        let stop = AtomicBool::new(false);
        let (found, napped) = thread::scope(|scope| {
            let napping = scope.spawn(|| nap_until(&stop, nap, lane, sibling));
            let found = self.search();
            // Relaxed is enough: the flag is only polled, and the join orders everything else.
            stop.store(true, Relaxed);
            let napped = napping.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
            (found, napped)
        });
        napped.and(found)
    }

    /// Returns the service's work per second.
    fn search(&self) -> Result<f64, LiveError> {
        self.corpus.search(&self.rig, self.lanes[0], Rank::Normal)
    }

    fn batch(&self, program: &str) -> Result<Process, LiveError> {
        let mut command = Command::new(&self.rig.programs.batch);
        command.args([program, "--json", "--duration", "600s"]);
        let setup = ChildSetup::on(self.lanes[1], Rank::Normal);
        let mut batch = self.rig.start("elfen-batch", command, &setup)?;
        let handles = |batch: &Process| usage::has_handler(batch.id(), libc::SIGTERM).then_some(());
        batch.wait_for(STOP_TIMEOUT, handles)?;
        Ok(batch)
    }
}

/// The longest nap, as of a guard: after this time, a guard tests whether its run is still alive.
const NAP_BOUND_NS: u64 = 20_000_000;

/// Naps on the batch lane, like a guard while a request runs.
fn nap_until(stop: &AtomicBool, nap: &Nap, lane: u32, sibling: u32) -> Result<(), LiveError> {
    affinity::pin(sibling).map_err(LiveError::io(format!("napping on CPU {sibling}")))?;
    let page = busy_lane().map_err(|error| {
        LiveError::io("a page for naps")(std::io::Error::other(error.to_string()))
    })?;
    let never_blocked = AtomicU32::new(0);
    while !stop.load(Relaxed) {
        page.slot(0).map(|slot| nap.nap(lane, slot, &never_blocked, NAP_BOUND_NS));
    }
    Ok(())
}

/// Returns a task map with one request lane that is always busy. The nap device does not use this
/// map: it has its own.
fn busy_lane() -> Result<Page<TaskSlot>, MemoryError> {
    let memory = Memory::create_segment(libc::IPC_PRIVATE, Page::<TaskSlot>::bytes(1), 0o600)?;
    memory.remove_name()?;
    let page: Page<TaskSlot> =
        Page::format(memory, 1, 0, &[0; 32]).map_err(|_| MemoryError::Size)?;
    if let Some(slot) = page.slot(0) {
        slot.task.store(1 << 32 | 1, Relaxed);
    }
    Ok(page)
}

fn end(mut batch: Process) -> Result<f64, LiveError> {
    let worked: BatchOutput = batch.finish_json(Some(libc::SIGTERM), STOP_TIMEOUT)?;
    Some(worked.per_second).filter(|rate| *rate > 0.0).ok_or_else(|| LiveError::Garbled {
        name: "elfen-batch".to_owned(),
        why: "it did no work".to_owned(),
    })
}
