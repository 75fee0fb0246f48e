//! How often a word is read while its runs are recorded, and how often it is seen to change.
//! Baseline: a few lines of our own that load it. No observer can be faster.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use elfen_console::duration::number;
use elfen_shim::clock;
use elfen_shim::session::ObserverControl;

use super::stage::{Bare, Lanes, Stage, line, observe};
use crate::bench::{
    BenchError, BenchReport, Column, Part, Values, cases, joined, label, metric, pin,
};

const RUN_NS: u64 = 100_000_000;
/// The best of these runs counts, because nothing interrupted it.
const RUNS: usize = 5;
const BEST: &[Part] = &[Part::Min];

/// Each case: its name, the steps of work between two writes, and whether a bare load observes the
/// word. One word is never written, one is written as often as possible, and one has more work
/// between two writes.
const CASES: [(&str, Option<u64>, bool); 5] = [
    ("not written", None, false),
    ("written all the time", Some(12), false),
    ("written all the time, single load", Some(12), true),
    ("written, with work between", Some(64), false),
    ("written, with work between, single load", Some(64), true),
];

const RATES: &[Column] = &[
    label("word", "observed word"),
    metric("ticks_a_write", "per write", "ticks", 0).show(BEST),
    metric("ticks_a_sample", "per sample", "ticks", 1).lower().show(BEST),
    metric("ticks_a_new_value", "per new value", "ticks", 1).lower().show(BEST),
    metric("bytes_a_run", "per run", "bytes", 1).lower().show(BEST),
];

pub(super) fn measure(stage: &mut Stage<'_>) -> Result<BenchReport, BenchError> {
    let (lanes, words) = (stage.lanes, cases("word", CASES.map(|(word, ..)| word)));
    let table = stage.measure(("rates", RATES), &words, RUNS, |case, _, values| {
        let ((_, work, by_load), word) = (CASES[case], line());
        let stop = &AtomicBool::new(false);
        thread::scope(|scope| {
            let writer = work.map(|work| scope.spawn(move || write(lanes, word, work, stop)));
            // Wait until the writer is on its lane.
            thread::sleep(Duration::from_millis(5));
            let seen = match by_load {
                true => load(lanes, word, values),
                false => record(lanes, word, values),
            };
            stop.store(true, Relaxed);
            if let Some(writer) = writer {
                values.add("ticks_a_write", joined(writer)?);
            }
            seen
        })
    })?;
    Ok(table.into())
}

fn load(lanes: Lanes, word: &'static AtomicU64, values: &mut Values) -> Result<(), BenchError> {
    let (start, load) = (clock::before(), Bare::start(lanes, word, 0));
    thread::sleep(Duration::from_nanos(RUN_NS));
    let (ticks, seen) = (clock::before() - start, load.join()?);
    values.add("ticks_a_sample", number(ticks) / number(seen.loads.max(1)));
    values.add("ticks_a_new_value", number(ticks) / number(seen.new_values.max(1)));
    Ok(())
}

fn record(lanes: Lanes, word: &'static AtomicU64, values: &mut Values) -> Result<(), BenchError> {
    let ticks = lanes.clock.ticks(RUN_NS);
    let orders = Arc::new(ObserverControl::default());
    let seen = observe(lanes, word, (0, None), Some(ticks), orders)?.join();
    let chunks = seen.pool.chunks();
    let runs: u64 = chunks.iter().map(|(head, _)| u64::from(head.runs)).sum();
    let bytes: u64 = chunks.iter().map(|(head, _)| u64::from(head.bytes)).sum();
    values.add("ticks_a_sample", number(ticks) / number(seen.samples.max(1)));
    // A word that never changed is a single run.
    if runs > 1 {
        values.add("ticks_a_new_value", number(ticks) / number(runs));
        values.add("bytes_a_run", number(bytes) / number(runs));
    }
    Ok(())
}

/// Writes until `stop` is set, with `work` steps between two writes. Returns the ticks from write
/// to write.
fn write(lanes: Lanes, word: &AtomicU64, work: u64, stop: &AtomicBool) -> Result<f64, BenchError> {
    pin(lanes.on)?;
    let (start, mut writes) = (clock::before(), 0_u64);
    while !stop.load(Relaxed) {
        for _ in 0..64 {
            writes += 1;
            word.store(writes, Relaxed);
            (0..work).for_each(|step| _ = black_box(step));
        }
    }
    Ok(number(clock::before() - start) / number(writes))
}
