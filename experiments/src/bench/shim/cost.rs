//! What being observed costs: the same work with and without an observer, by turns.
//!
//! Beside Shim's price stands that of one bare load at the same times, from the same pair of runs:
//! below it nobody can look. Both depend on how far apart the lanes are, which may be another at
//! the next pair: near ones and far ones are kept apart, and others left out (`distance.rs`).

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use elfen_console::duration::number;
use elfen_shim::clock;
use elfen_shim::pacing::{AUTO_NS, Pacing};
use elfen_shim::recorder::ObserverControl;
use serde::Serialize;

use super::bare::Bare;
use super::distance::{Distances, NEAR_TICKS, TRIES};
use super::stage::{Error, Lanes, at, line, observe};

/// What a batch of work takes, unobserved.
const BATCH_NS: u64 = 4_000_000;
/// So small a part of a batch goes before it.
const WARM_UP: u64 = 8;
/// As fast as it goes, and what the paper has its figures for.
const PERIODS_TICKS: [u64; 3] = [0, 1_200, 2_600];
/// What observing may cost. Longer periods are tried for programs that pay more at the last one,
/// up to a look each 40 us or so.
pub(crate) const CHEAP_PERCENT: f64 = 2.0;
const LONGEST_TICKS: u64 = 80_000;
/// Who looks, as it is printed.
pub(super) const SHIM: &str = "elfen shim";

#[derive(Debug, Serialize)]
pub(crate) struct Cost {
    pub(crate) program: String,
    /// Where it writes the word that is observed.
    pub(crate) stores: String,
    /// Who looks.
    pub(crate) by: &'static str,
    /// Of looks; 0 for as fast as it goes.
    pub(crate) period_ticks: Option<u64>,
    /// If that is what the default made of the distance, in the median.
    pub(crate) auto: bool,
    /// How far apart the lanes were, in the median of the pairs.
    pub(crate) round_trip_ticks: u64,
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

const PROGRAMS: [Program; 7] = [
    Program { name: "arithmetic", stores: "each 16 steps", work: arithmetic },
    Program { name: "dense stores", stores: "each 64 stores", work: stores::<64> },
    Program { name: "dense stores", stores: "each 16 stores", work: stores::<16> },
    Program { name: "locked instructions", stores: "behind each 4", work: locked::<4> },
    Program { name: "locked instructions", stores: "behind each", work: locked::<1> },
    Program { name: "calls", stores: "entries and returns", work: calls },
    Program { name: "nothing but writes", stores: "each", work: writes },
];

/// How often somebody looks.
#[derive(Clone, Copy)]
enum Every {
    Ticks(u64),
    /// As the default has it: by the distance at each pair of runs, and from there on.
    Auto,
}

/// Who looks, while a batch of work is done.
#[derive(Clone, Copy)]
enum By {
    Nobody,
    Load,
    Shim,
}

/// On the observed lane.
pub(super) fn measure(lanes: Lanes, pairs: usize) -> Result<Vec<Cost>, Error> {
    let mut costs = Vec::new();
    for program in &PROGRAMS {
        let word = line();
        let rounds = rounds_of(lanes, program, word);
        let mut periods = PERIODS_TICKS.to_vec();
        let mut measured = 0;
        let at = |every| at_period(lanes, program, word, rounds, every, pairs);
        while let Some(&period_ticks) = periods.get(measured) {
            let rows = at(Every::Ticks(period_ticks))?;
            measured += 1;
            let is_dear =
                rows.iter().any(|row| is_usual(row) && row.slowdown_percent > CHEAP_PERCENT);
            if is_dear && period_ticks < LONGEST_TICKS && measured == periods.len() {
                periods.push(period_ticks * 2);
            }
            costs.extend(rows);
        }
        costs.extend(at(Every::Auto)?);
    }
    Ok(costs)
}

/// What a user of near lanes pays to whoever uses periods of his own.
fn is_usual(cost: &Cost) -> bool {
    cost.by == SHIM && !cost.auto && cost.round_trip_ticks <= NEAR_TICKS
}

/// From which period on each program pays no more than the bar: as ticks, if any was so long. Where
/// lanes are near.
pub(crate) fn cheap_from(costs: &[Cost]) -> Vec<(String, String, Option<u64>)> {
    let mut found: Vec<(String, String, Option<u64>)> = Vec::new();
    for cost in costs.iter().filter(|cost| is_usual(cost)) {
        let Some(ticks) = cost.period_ticks.filter(|ticks| *ticks > 0) else { continue };
        let names = (&cost.program, &cost.stores);
        let known = found.iter_mut().find(|(program, stores, _)| (program, stores) == names);
        let cheap = (cost.slowdown_percent <= CHEAP_PERCENT).then_some(ticks);
        match known {
            // Periods come in order: one that is dearer than the last undoes that.
            Some((_, _, from)) => *from = cheap.map(|ticks| from.unwrap_or(ticks)),
            None => found.push((cost.program.clone(), cost.stores.clone(), cheap)),
        }
    }
    found
}

/// What one bare load costs a program, and what Shim does: while lanes are near, and far.
fn at_period(
    lanes: Lanes,
    program: &Program,
    word: &'static AtomicU64,
    rounds: u64,
    every: Every,
    pairs: usize,
) -> Result<Vec<Cost>, Error> {
    let mut distances = Distances::begin(lanes)?;
    for pair in 0..pairs * TRIES {
        if distances.most() >= pairs {
            break;
        }
        let pacing = || match every {
            Every::Ticks(_) => None,
            Every::Auto => Some(Pacing::new(lanes.clock.ticks(AUTO_NS), distances.now())),
        };
        let first = match every {
            Every::Ticks(ticks) => ticks,
            Every::Auto => pacing().map_or(0, |pacing| pacing.initial_period()),
        };
        let ticks = |by| beside(by, lanes, (first, pacing()), word, program, rounds);
        // Whatever changes with time is on either side as often.
        let mut turns = [(By::Nobody, 0), (By::Load, 0), (By::Shim, 0)];
        for turn in 0..turns.len() {
            let (by, took) = &mut turns[(pair + turn) % 3];
            *took = ticks(*by)?;
        }
        let [alone, observed @ ..] = turns.map(|(_, ticks)| number(ticks));
        let [load, shim] = observed.map(|took| (took / alone.max(1.0) - 1.0) * 100.0);
        distances.add((first, load, shim))?;
    }
    let mut rows = Vec::new();
    for (round_trip_ticks, mut found) in distances.found() {
        found.sort_by_key(|(first, ..)| *first);
        let median = found[found.len() / 2].0;
        let (period_ticks, auto) = match every {
            Every::Ticks(ticks) => (ticks, false),
            Every::Auto => (median, true),
        };
        let load: Vec<f64> = found.iter().map(|(_, load, _)| *load).collect();
        let shim: Vec<f64> = found.iter().map(|(.., shim)| *shim).collect();
        for (by, mut ratios) in [("one bare load", load), (SHIM, shim)] {
            ratios.sort_by(f64::total_cmp);
            rows.push(Cost {
                program: program.name.to_owned(),
                stores: program.stores.to_owned(),
                by,
                period_ticks: Some(period_ticks),
                auto,
                round_trip_ticks,
                slowdown_percent: at(&ratios, 50),
                low: at(&ratios, 25),
                high: at(&ratios, 75),
                pairs: ratios.len(),
            });
        }
    }
    Ok(rows)
}

/// Ticks of a batch of work, once the observer is at it.
fn beside(
    by: By,
    lanes: Lanes,
    (period_ticks, pacing): (u64, Option<Pacing>),
    word: &'static AtomicU64,
    program: &Program,
    rounds: u64,
) -> Result<u64, Error> {
    let work = || {
        // An observer has memory to write first. Who waited for nobody has slept as long.
        thread::sleep(Duration::from_millis(2));
        // A CPU that slept is slow at first.
        (program.work)(word, rounds / WARM_UP);
        ticks_of(program, word, rounds)
    };
    Ok(match by {
        By::Nobody => work(),
        By::Load => {
            let load = Bare::start(lanes, word, period_ticks);
            let ticks = work();
            load.join()?;
            ticks
        }
        By::Shim => {
            let orders = Arc::new(ObserverControl::default());
            let observer = observe(lanes, word, (period_ticks, pacing), None, orders.clone())?;
            let ticks = work();
            orders.stop.store(true, Relaxed);
            observer.join();
            ticks
        }
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cheap_period_is_one_from_which_on_none_is_dear() {
        let row = |program: &str, by, ticks, slowdown_percent| Cost {
            program: program.to_owned(),
            stores: "each".to_owned(),
            by,
            period_ticks: Some(ticks),
            auto: false,
            round_trip_ticks: 200,
            slowdown_percent,
            low: 0.0,
            high: 0.0,
            pairs: 1,
        };
        let costs = [
            row("a", SHIM, 0, 0.0),
            row("a", SHIM, 1_200, 1.0),
            row("a", SHIM, 2_600, 2.5),
            row("a", "one bare load", 2_600, 0.0),
            row("a", SHIM, 5_200, 2.0),
            row("a", SHIM, 10_400, -1.0),
            row("b", SHIM, 1_200, 3.0),
            Cost { round_trip_ticks: 1_000, ..row("b", SHIM, 2_600, 0.0) },
            Cost { auto: true, ..row("b", SHIM, 5_000, 0.0) },
        ];
        let found = cheap_from(&costs).into_iter().map(|(program, _, from)| (program, from));
        let expected = [("a".to_owned(), Some(5_200)), ("b".to_owned(), None)];
        assert_eq!(found.collect::<Vec<_>>(), expected);
    }
}
