//! Measures how programs that share a core slow each other down, for the model.
//!
//! Each program runs alone on its lane, and next to each other program. Its slowdown is the ratio
//! of its work in both. The service also runs next to each nap of the machine. It is one worker
//! that searches without a pause: then a lane is always busy, and no load generator interferes.

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
use serde::Serialize;

use super::batches::BatchOutput;
use super::os::{ChildSetup, Rank};
use super::process::Process;
use super::service::Corpus;
use super::summary::{Figure, figure};
use super::{LiveError, Machine, Rig, sleep_until, usage};

/// Time for an iteration of `elfen-batch` to end.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);

/// The pair and the programs to measure.
#[derive(Clone, Debug)]
pub struct Order {
    pub pair: Pair,
    pub batches: Vec<String>,
    pub documents: u64,
    pub index: Option<std::path::PathBuf>,
    /// How long two programs run next to each other.
    pub duration: Duration,
    pub runs: u32,
}

/// The measured slowdowns.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    pub slowdowns: Vec<Slowdown>,
    pub naps: Vec<NapSlowdown>,
}

/// How much longer a search takes next to a lane that naps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NapSlowdown {
    pub nap: &'static str,
    pub of_request: Figure,
}

/// How much longer two programs take while both run; 1 is no slowdown.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Slowdown {
    /// On the request lane: `search`, or a batch program.
    pub first: String,
    /// On the batch lane.
    pub second: String,
    pub of_first: Figure,
    pub of_second: Figure,
}

/// The name of the service in a [`Slowdown`].
pub const SERVICE: &str = "search";

struct Bench {
    corpus: Corpus,
    order: Order,
    /// The CPUs of request lane and batch lane.
    lanes: [u32; 2],
    rig: Rig,
}

/// Measures all pairs of programs, and the service next to each of `naps`. Runs are interleaved.
/// `progress` gets the number of finished steps and of all steps.
pub fn measure(
    order: Order,
    naps: &[Nap],
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Measured, LiveError> {
    let rig = Rig::new(Machine { pairs: vec![order.pair.clone()], ..Machine::default() })?;
    let corpus = Corpus::open(&rig, order.index.as_deref(), order.documents)?;
    let lane = rig.machine.batch_lanes().next().map_or(order.pair.request, |(_, batch)| batch);
    let bench = Bench { corpus, lanes: [order.pair.request, lane], order, rig };
    let pairs = pairs(&bench.order.batches);
    let runs = bench.order.runs;
    let per_run = pairs.len() + naps.len();
    let steps = usize::try_from(runs).unwrap_or(usize::MAX).saturating_mul(per_run);
    let mut ratios: Vec<(Vec<f64>, Vec<f64>)> = vec![Default::default(); pairs.len()];
    let mut nap_ratios: Vec<Vec<f64>> = vec![Vec::new(); naps.len()];
    let mut done = 0;
    for _ in 0..runs {
        for ((first, second), (of_first, of_second)) in pairs.iter().zip(&mut ratios) {
            let (one, other) = bench.measure_pair(first, second)?;
            of_first.push(one);
            of_second.push(other);
            done += 1;
            progress(done, steps);
        }
        for (nap, ratios) in naps.iter().zip(&mut nap_ratios) {
            ratios.push(bench.measure_next_to_nap(nap)?);
            done += 1;
            progress(done, steps);
        }
    }
    let slowdown = |((first, second), (of_first, of_second)): ((String, String), (Vec<f64>, _))| {
        let of_second: Vec<f64> = of_second;
        Slowdown { first, second, of_first: figure(&of_first), of_second: figure(&of_second) }
    };
    let nap_slowdown = |(nap, ratios): (&Nap, Vec<f64>)| NapSlowdown {
        nap: nap.kind().name(),
        of_request: figure(&ratios),
    };
    Ok(Measured {
        slowdowns: pairs.into_iter().zip(ratios).map(slowdown).collect(),
        naps: naps.iter().zip(nap_ratios).map(nap_slowdown).collect(),
    })
}

/// The service with each batch program, and every two batch programs.
fn pairs(batches: &[String]) -> Vec<(String, String)> {
    let firsts = std::iter::once(SERVICE.to_owned()).chain(batches.iter().cloned());
    let mut pairs = Vec::new();
    for (at, first) in firsts.enumerate() {
        // A pair of batch programs is measured once: lanes of a core are alike.
        let rest = batches.iter().skip(at.saturating_sub(1));
        pairs.extend(rest.map(|second| (first.clone(), second.clone())));
    }
    pairs
}

impl Bench {
    /// The slowdowns of two programs, relative to each alone just before.
    fn measure_pair(&self, first: &str, second: &str) -> Result<(f64, f64), LiveError> {
        let [lane, sibling] = self.lanes;
        let first_alone = self.measure_alone(first, lane)?;
        let second_alone = self.measure_alone(second, sibling)?;
        if first == SERVICE {
            return self.measure_next_to_service(second, first_alone, second_alone);
        }
        let one = self.batch(first, lane)?;
        let other = self.batch(second, sibling)?;
        self.wait()?;
        let (one, other) = (end(one)?, end(other)?);
        Ok((first_alone / one, second_alone / other))
    }

    /// A search runs until its queries are done, so the batch is ended after it.
    fn measure_next_to_service(
        &self,
        second: &str,
        first_alone: f64,
        second_alone: f64,
    ) -> Result<(f64, f64), LiveError> {
        let [lane, sibling] = self.lanes;
        let batch = self.batch(second, sibling)?;
        let found = self.search(lane)?;
        let done = end(batch)?;
        Ok((first_alone / found, second_alone / done))
    }

    /// The slowdown of a search while a thread naps on the other lane, again and again.
    fn measure_next_to_nap(&self, nap: &Nap) -> Result<f64, LiveError> {
        let [lane, sibling] = self.lanes;
        let alone = self.search(lane)?;
        let stop = AtomicBool::new(false);
        let (found, napped) = thread::scope(|scope| {
            let napping = scope.spawn(|| nap_until(&stop, nap, lane, sibling));
            let found = self.search(lane);
            // Relaxed: a flag that is polled; the join orders everything else.
            stop.store(true, Relaxed);
            let napped = napping.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
            (found, napped)
        });
        napped?;
        Ok(alone / found?)
    }

    /// The work per second of a program alone.
    fn measure_alone(&self, program: &str, cpu: u32) -> Result<f64, LiveError> {
        if program == SERVICE {
            return self.search(cpu);
        }
        let batch = self.batch(program, cpu)?;
        self.wait()?;
        end(batch)
    }

    fn wait(&self) -> Result<(), LiveError> {
        sleep_until(Instant::now() + self.order.duration, || Ok(()))
    }

    fn search(&self, cpu: u32) -> Result<f64, LiveError> {
        self.corpus.search(&self.rig, cpu, Rank::Normal)
    }

    fn batch(&self, program: &str, cpu: u32) -> Result<Process, LiveError> {
        let mut command = Command::new(&self.rig.programs.batch);
        command.args([program, "--json", "--duration", "600s"]);
        let setup = ChildSetup::on(cpu, Rank::Normal);
        let mut batch = self.rig.start("elfen-batch", command, &setup)?;
        let handles = |batch: &Process| usage::has_handler(batch.id(), libc::SIGTERM).then_some(());
        batch.wait_for(STOP_TIMEOUT, handles)?;
        Ok(batch)
    }
}

/// The bound of a nap: a guard naps this long before it checks that its run is alive.
const NAP_BOUND_NS: u64 = 20_000_000;

/// Naps on the batch lane like a guard while a request runs.
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

/// A task map with one request lane that is always busy. (The nap device has its own.)
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
        why: "it did nothing".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pair_is_measured_once() {
        let batches = ["loop", "spin"].map(str::to_owned);
        let pairs = pairs(&batches);
        let pairs: Vec<(&str, &str)> =
            pairs.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        let expected = [
            ("search", "loop"),
            ("search", "spin"),
            ("loop", "loop"),
            ("loop", "spin"),
            ("spin", "spin"),
        ];
        assert_eq!(pairs, expected);
    }
}
