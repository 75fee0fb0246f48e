//! What being observed costs: the same work with and without an observer, by turns.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use elfen_console::duration::number;
use elfen_shim::clock;
use elfen_shim::record::Orders;
use serde::Serialize;

use super::stage::{Error, Lanes, at, line, observe};

/// What a batch of work takes, unobserved.
const BATCH_NS: u64 = 4_000_000;
/// As fast as it goes, and what the paper has its figures for.
const PERIODS_TICKS: [u64; 3] = [0, 1_200, 2_600];

#[derive(Debug, Serialize)]
pub(crate) struct Cost {
    pub(crate) program: String,
    /// Where it writes the word that is observed.
    pub(crate) stores: String,
    /// Who looks.
    pub(crate) by: &'static str,
    /// Of looks; 0 for as fast as it goes.
    pub(crate) period_ticks: Option<u64>,
    /// In the median of the pairs, and the quartiles.
    pub(crate) slowdown_percent: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
    pub(crate) pairs: usize,
}

struct Program {
    name: &'static str,
    stores: &'static str,
    /// Does so many rounds, and writes the word in each.
    work: fn(&AtomicU64, u64),
}

const PROGRAMS: [Program; 5] = [
    Program { name: "arithmetic", stores: "each 16 steps", work: arithmetic },
    Program { name: "dense stores", stores: "each 16 stores", work: stores },
    Program { name: "locked instructions", stores: "behind each", work: locked },
    Program { name: "calls", stores: "entries and returns", work: calls },
    Program { name: "nothing but writes", stores: "each", work: writes },
];

/// On the observed lane.
pub(super) fn measure(lanes: Lanes, pairs: usize) -> Result<Vec<Cost>, Error> {
    let mut costs = Vec::new();
    for program in &PROGRAMS {
        let word = line();
        let rounds = rounds_of(lanes, program, word);
        for period_ticks in PERIODS_TICKS {
            let mut ratios = Vec::with_capacity(pairs);
            for pair in 0..pairs {
                let alone = || ticks_of(program, word, rounds);
                let observed = || -> Result<u64, Error> {
                    let orders = Arc::new(Orders::default());
                    let observer = observe(lanes, word, period_ticks, None, orders.clone())?;
                    // It has memory to write first.
                    thread::sleep(Duration::from_millis(2));
                    let ticks = ticks_of(program, word, rounds);
                    orders.stop.store(true, Relaxed);
                    observer.join();
                    Ok(ticks)
                };
                // Whatever changes with time is on either side as often.
                let (alone, observed) = match pair % 2 {
                    0 => (alone(), observed()?),
                    _ => {
                        let observed = observed()?;
                        (alone(), observed)
                    }
                };
                ratios.push((number(observed) / number(alone.max(1)) - 1.0) * 100.0);
            }
            ratios.sort_by(f64::total_cmp);
            costs.push(Cost {
                program: program.name.to_owned(),
                stores: program.stores.to_owned(),
                by: "elfen shim",
                period_ticks: Some(period_ticks),
                slowdown_percent: at(&ratios, 50),
                low: at(&ratios, 25),
                high: at(&ratios, 75),
                pairs: ratios.len(),
            });
        }
    }
    Ok(costs)
}

/// Rounds that take about as long as a batch should.
fn rounds_of(lanes: Lanes, program: &Program, word: &AtomicU64) -> u64 {
    const TRY: u64 = 10_000;
    let least = (0..10).map(|_| ticks_of(program, word, TRY)).min().unwrap_or(1);
    (lanes.clock.ticks(BATCH_NS) * TRY / least.max(1)).max(1)
}

fn ticks_of(program: &Program, word: &AtomicU64, rounds: u64) -> u64 {
    let start = clock::before();
    (program.work)(word, rounds);
    clock::before() - start
}

fn arithmetic(word: &AtomicU64, rounds: u64) {
    let mut value = rounds | 1;
    for round in 0..rounds {
        for _ in 0..16 {
            value = black_box(value.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        }
        word.store(round, Relaxed);
    }
}

fn stores(word: &AtomicU64, rounds: u64) {
    let mut buffer = [0_u64; 512];
    for round in 0..rounds {
        let at = usize::try_from(round % 32).unwrap_or(0) * 16;
        for cell in &mut buffer[at..at + 16] {
            *cell = black_box(round);
        }
        word.store(round, Relaxed);
    }
    black_box(buffer);
}

fn locked(word: &AtomicU64, rounds: u64) {
    let own = AtomicU64::new(0);
    for round in 0..rounds {
        black_box(&own).fetch_add(1, Relaxed);
        word.store(round, Relaxed);
    }
}

/// As a program does that says its functions at entries and returns.
fn calls(word: &AtomicU64, rounds: u64) {
    #[inline(never)]
    fn fib(word: &AtomicU64, n: u64) -> u64 {
        word.store(n + 1, Relaxed);
        let sum = if n < 2 { n } else { fib(word, n - 1) + fib(word, n - 2) };
        word.store(black_box(n), Relaxed);
        sum
    }
    // 25 calls a round.
    (0..rounds).for_each(|_| _ = black_box(fib(word, 6)));
}

fn writes(word: &AtomicU64, rounds: u64) {
    (0..rounds).for_each(|round| word.store(round, Relaxed));
}
