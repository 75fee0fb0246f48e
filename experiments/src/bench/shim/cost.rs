//! What being observed costs: the same work with and without an observer.
//!
//! The table compares Shim's cost with that of one bare load at the same times, measured in the
//! same rounds. No observer can cost less than the load.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use elfen_console::duration::number;
use elfen_shim::clock;
use elfen_shim::pacing::{AUTO_NS, Pacing};
use elfen_shim::session::ObserverControl;

use super::stage::{Bare, Lanes, Stage, line, observe};
use crate::bench::{
    BenchError, BenchReport, Case, Column, Part, Table, case, label, metric, row, value_of,
    with_baseline,
};

/// How long a batch of work takes without an observer.
const BATCH_NS: u64 = 4_000_000;
/// The warm-up runs one part in this many of a batch.
const WARM_UP: u64 = 8;
/// As fast as possible, and the two periods for which the paper has figures.
const PERIODS_TICKS: [u64; 3] = [0, 1_200, 2_600];
/// The limit for a cheap period. If the longest period costs more, longer ones are tried, up to
/// about one sample each 40 us.
const CHEAP_PERCENT: f64 = 2.0;
const LONGEST_TICKS: u64 = 80_000;
/// The observer's name in the table.
pub(super) const SHIM: &str = "elfen shim";

/// The cost of each observer for a program.
pub(super) const COSTS: &[Column] = &[
    label("program", "observed"),
    // How often the program writes the observed word.
    label("stores", "stores"),
    label("by", "observed by"),
    // The period of the samples. 0 stands for as fast as possible.
    label("period_ticks", "period, ticks"),
    // Whether the default chose the period from the distance.
    label("auto", "auto"),
    metric("slowdown_percent", "slowdown", "%", 1).percent_of("time").lower().show(&[
        Part::Median,
        Part::Interval,
        Part::N,
    ]),
];

struct Program {
    name: &'static str,
    stores: &'static str,
    /// Runs this many rounds, and writes the word in each.
    work: fn(&AtomicU64, u64),
}

const PROGRAMS: [Program; 7] = [
    Program { name: "arithmetic", stores: "each 16 steps", work: arithmetic },
    Program { name: "dense stores", stores: "each 64 stores", work: stores::<64> },
    Program { name: "dense stores", stores: "each 16 stores", work: stores::<16> },
    Program { name: "locked instructions", stores: "behind each 4", work: locked::<4> },
    Program { name: "locked instructions", stores: "behind each", work: locked::<1> },
    Program { name: "calls", stores: "entries and returns", work: calls },
    Program { name: "nothing but writes", stores: "each", work: writes },
];

/// The baseline, without an observer.
const NOTHING: &str = "nothing";

/// Measures each program without an observer, with a bare load, and with Shim's observer, at
/// several periods.
pub(super) fn measure(stage: &mut Stage<'_>, runs: usize) -> Result<BenchReport, BenchError> {
    let (mut report, mut cheap) = (BenchReport::default(), Vec::new());
    for program in &PROGRAMS {
        let word = line();
        let rounds = rounds_of(stage.lanes, program, word);
        let mut slowdowns: Vec<(u64, f64)> = Vec::new();
        let mut periods = PERIODS_TICKS.to_vec();
        while let Some(&period_ticks) = periods.get(slowdowns.len()) {
            let table = at_period(stage, runs, program, (word, rounds), Some(period_ticks))?;
            let slowdown = |row| value_of(row, "slowdown_percent")["median"].as_f64();
            let slowdown = table.rows.last().and_then(slowdown).unwrap_or(0.0);
            slowdowns.push((period_ticks, slowdown));
            let is_last = slowdowns.len() == periods.len();
            if is_last && slowdown > CHEAP_PERCENT && period_ticks < LONGEST_TICKS {
                periods.push(period_ticks * 2);
            }
            report.add(table);
        }
        report.add(at_period(stage, runs, program, (word, rounds), None)?);
        cheap.push(row![
            "program" => program.name,
            "stores" => program.stores,
            "from_ticks" => cheap_from(&slowdowns),
        ]);
    }
    report.add(Table { key: "cheap_from", columns: CHEAP, rows: cheap });
    Ok(report)
}

/// Measures one period. With `None`, Shim's default chooses the period by the distance in each
/// round, and adapts it.
fn at_period(
    stage: &mut Stage<'_>,
    runs: usize,
    program: &Program,
    (word, rounds): (&'static AtomicU64, u64),
    period: Option<u64>,
) -> Result<Table, BenchError> {
    let lanes = stage.lanes;
    let labels = |by| {
        let mut labels = row!["program" => program.name, "stores" => program.stores, "by" => by];
        labels.extend(period.map(|ticks| ("period_ticks", ticks.into())));
        labels.push(("auto", period.is_none().into()));
        case(labels)
    };
    let cases: Vec<Case> = with_baseline([NOTHING, "one bare load", SHIM].map(labels).to_vec());
    let mut table = stage.measure(("costs", COSTS), &cases, runs, |case, _, values| {
        let (period_ticks, pacing) = match period {
            Some(ticks) => (ticks, None),
            None => {
                let pacing = Pacing::new(lanes.clock.ticks(AUTO_NS), lanes.distance()?);
                // The period with which the default starts.
                values.label("period_ticks", pacing.initial_period());
                (pacing.initial_period(), Some(pacing))
            }
        };
        let work = || {
            // An observer first writes to its memory. The case without an observer waits as well.
            thread::sleep(Duration::from_millis(2));
            // A CPU that slept is slow at first.
            (program.work)(word, rounds / WARM_UP);
            ticks_of(program, word, rounds)
        };
        // The ticks of a batch of work, while the observer runs.
        let ticks = match case {
            0 => work(),
            1 => {
                let load = Bare::start(lanes, word, period_ticks);
                let ticks = work();
                load.join()?;
                ticks
            }
            _ => {
                let orders = Arc::new(ObserverControl::default());
                let observer = observe(lanes, word, (period_ticks, pacing), None, orders.clone())?;
                let ticks = work();
                orders.stop.store(true, Relaxed);
                observer.join();
                ticks
            }
        };
        values.add("time", number(ticks));
        Ok(())
    })?;
    // The baseline has no comparison to print.
    table.rows.remove(0);
    Ok(table)
}

const CHEAP: &[Column] = &[
    label("program", "observed"),
    label("stores", "stores"),
    label("from_ticks", "period with at most 2 % slowdown, ticks"),
];

/// Returns the shortest period from which on a program is at most `CHEAP_PERCENT` slower. The
/// periods must be sorted. A period that costs more makes all shorter ones count as expensive.
fn cheap_from(slowdowns: &[(u64, f64)]) -> Option<u64> {
    let dear = slowdowns.iter().rposition(|&(_, slowdown)| slowdown > CHEAP_PERCENT);
    let cheap = &slowdowns[dear.map_or(0, |dear| dear + 1)..];
    cheap.iter().map(|&(ticks, _)| ticks).find(|&ticks| ticks > 0)
}

/// Returns the rounds that take about `BATCH_NS`.
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

fn stores<const STORES: usize>(word: &AtomicU64, rounds: u64) {
    let mut buffer = [[0_u64; STORES]; 8];
    for round in 0..rounds {
        let at = usize::try_from(round % 8).unwrap_or(0);
        for cell in &mut buffer[at] {
            *cell = black_box(round);
        }
        word.store(round, Relaxed);
    }
    black_box(buffer);
}

fn locked<const LOCKS: usize>(word: &AtomicU64, rounds: u64) {
    let own = AtomicU64::new(0);
    for round in 0..rounds {
        for _ in 0..LOCKS {
            black_box(&own).fetch_add(1, Relaxed);
        }
        word.store(round, Relaxed);
    }
}

/// Writes the word as a program does that publishes its functions at entries and returns.
fn calls(word: &AtomicU64, rounds: u64) {
    #[inline(never)]
    fn fib(word: &AtomicU64, n: u64) -> u64 {
        word.store(n + 1, Relaxed);
        let sum = if n < 2 { n } else { fib(word, n - 1) + fib(word, n - 2) };
        word.store(black_box(n), Relaxed);
        sum
    }
    // 25 calls in each round.
    (0..rounds).for_each(|_| _ = black_box(fib(word, 6)));
}

fn writes(word: &AtomicU64, rounds: u64) {
    (0..rounds).for_each(|round| word.store(round, Relaxed));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cheap_period_is_one_from_which_on_none_is_dear() {
        let periods = [0, 1_200, 2_600, 5_200, 10_400];
        let from = |slowdowns: [f64; 5]| {
            cheap_from(&periods.into_iter().zip(slowdowns).collect::<Vec<_>>())
        };
        assert_eq!(from([0.0, 1.0, 2.5, 2.0, -1.0]), Some(5_200));
        assert_eq!(from([0.0, 1.0, 2.0, 2.0, 1.0]), Some(1_200));
        assert_eq!(from([9.0, 5.0, 4.0, 3.0, 2.1]), None);
    }
}
