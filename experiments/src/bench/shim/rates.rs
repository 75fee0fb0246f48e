//! How often a word is read, with its runs recorded, and how often it is seen to change.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use elfen_console::duration::number;
use elfen_machine::affinity;
use elfen_shim::clock;
use elfen_shim::recorder::ObserverControl;
use serde::Serialize;

use super::bare::Bare;
use super::stage::{Error, Lanes, line, observe};

const RUN_NS: u64 = 100_000_000;
/// The best counts: one that nobody interrupted.
const RUNS: u32 = 5;

#[derive(Debug, Serialize)]
pub(crate) struct Rate {
    pub(crate) word: String,
    pub(crate) ticks_a_sample: f64,
    /// `None` of a word that nobody writes.
    pub(crate) ticks_a_new_value: Option<f64>,
    pub(crate) bytes_a_run: Option<f64>,
}

/// A word that nobody writes, one that is written as often as it goes, and one with some work
/// between two writes.
pub(super) fn measure(lanes: Lanes) -> Result<Vec<Rate>, Error> {
    let quiet = best(lanes, line(), "nobody writes")?;
    let mut rates = vec![Rate { ticks_a_new_value: None, bytes_a_run: None, ..quiet }];
    for work in [12, 64] {
        let word = line();
        let stop = AtomicBool::new(false);
        let rate = thread::scope(|scope| {
            let writer = scope.spawn(|| write(lanes, word, work, &stop));
            // It has to be on its lane.
            thread::sleep(Duration::from_millis(5));
            let (rate, bare) = (best(lanes, word, ""), bare(lanes, word));
            stop.store(true, Relaxed);
            let ticks = writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            let name = format!("written every {ticks:.0} ticks");
            let of_bare = Rate { word: format!("{name}: one bare load"), ..bare? };
            rate.map(|rate| [Rate { word: name, ..rate }, of_bare])
        });
        rates.extend(rate?);
    }
    Ok(rates)
}

/// As often as a few lines of our own see it change, which no observer betters.
fn bare(lanes: Lanes, word: &'static AtomicU64) -> Result<Rate, Error> {
    let mut best: Option<Rate> = None;
    for _ in 0..RUNS {
        let (start, load) = (clock::before(), Bare::start(lanes, word, 0));
        thread::sleep(Duration::from_nanos(RUN_NS));
        let (ticks, seen) = (clock::before() - start, load.join()?);
        let of = |count: u64| number(ticks) / number(count.max(1));
        let rate = Rate {
            word: String::new(),
            ticks_a_sample: of(seen.loads),
            ticks_a_new_value: Some(of(seen.new_values)),
            bytes_a_run: None,
        };
        if best.as_ref().is_none_or(|best| best.ticks_a_new_value > rate.ticks_a_new_value) {
            best = Some(rate);
        }
    }
    Ok(best.expect("there was more than one run"))
}

fn best(lanes: Lanes, word: &'static AtomicU64, name: &str) -> Result<Rate, Error> {
    let mut best: Option<Rate> = None;
    for _ in 0..RUNS {
        let ticks = lanes.clock.ticks(RUN_NS);
        let seen =
            observe(lanes, word, (0, None), Some(ticks), Arc::new(ObserverControl::default()))?
                .join();
        let chunks = seen.pool.chunks();
        let (runs, bytes) = chunks.iter().fold((0, 0), |(runs, bytes), (head, _)| {
            (runs + u64::from(head.runs), bytes + u64::from(head.bytes))
        });
        let of = |count: u64| number(ticks) / number(count.max(1));
        let rate = Rate {
            word: name.to_owned(),
            ticks_a_sample: of(seen.samples),
            ticks_a_new_value: Some(of(runs)),
            bytes_a_run: Some(number(bytes) / number(runs.max(1))),
        };
        if best.as_ref().is_none_or(|best| best.ticks_a_sample > rate.ticks_a_sample) {
            best = Some(rate);
        }
    }
    Ok(best.expect("there was more than one run"))
}

/// Writes until it is stopped, with so much work in between; gives the ticks from write to write.
fn write(lanes: Lanes, word: &AtomicU64, work: u64, stop: &AtomicBool) -> Result<f64, Error> {
    affinity::pin(lanes.on)?;
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
