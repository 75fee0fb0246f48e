//! What being observed costs: the same work with an observer and without.
//!
//! Next to Shim's price stands that of one bare load at the same times, from the same rounds: no
//! observer costs less. Both depend on how far apart the lanes are, which may be another in the
//! next round. So rounds of near lanes and of far ones are kept apart (`stage.rs`).

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use elfen_console::duration::number;
use elfen_shim::clock;
use elfen_shim::pacing::{AUTO_NS, Pacing};
use elfen_shim::session::ObserverControl;

use super::stage::{Bare, Lanes, NEAR_TICKS, line, observe, play_apart};
use crate::bench::{
    BenchError, Column, Hear, Part, Report, Row, Scenario, Table, Values, label, metric,
    number as figure, row, value_of,
};

/// What a batch of work takes, unobserved.
const BATCH_NS: u64 = 4_000_000;
/// So small a part of a batch goes before it.
const WARM_UP: u64 = 8;
/// As fast as it goes, and what the paper has its figures for.
const PERIODS_TICKS: [u64; 3] = [0, 1_200, 2_600];
/// What observing may cost. Longer periods are tried for programs that pay more at the last one,
/// up to a look each 40 us or so.
const CHEAP_PERCENT: f64 = 2.0;
const LONGEST_TICKS: u64 = 80_000;
/// The observer, as it is printed.
pub(super) const SHIM: &str = "elfen shim";

/// Of a program, next to each observer.
pub(super) const COSTS: &[Column] = &[
    label("program", "observed"),
    // Where it writes the word that is observed.
    label("stores", "stores"),
    label("by", "by"),
    // Of looks; 0 for as fast as it goes.
    label("period_ticks", "each, ticks"),
    // If that is what the default made of the distance.
    label("auto", "auto"),
    // How far apart the lanes were, in the median.
    figure("round_trip_ticks", "round trip", "ticks", 0),
    metric("slowdown_percent", "slower", "%", 1).percent_of("time").lower().show(&[
        Part::Median,
        Part::Interval,
        Part::N,
    ]),
];

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

/// One program next to no observer, to a bare load and to Shim's observer, at one period.
struct Observed<'a> {
    lanes: Lanes,
    program: &'a Program,
    word: &'static AtomicU64,
    rounds: u64,
    /// `None` is the default: by the distance in each round, and from there on.
    period_ticks: Option<u64>,
    round_trip_ticks: u64,
    /// The first periods that the default took.
    taken: Vec<u64>,
}

impl Scenario for Observed<'_> {
    const COLUMNS: &'static [Column] = COSTS;

    fn cases(&self) -> Vec<Row> {
        let mut taken = self.taken.clone();
        taken.sort_unstable();
        let median = taken.get(taken.len() / 2).copied();
        let row = |by| {
            row![
                "program" => self.program.name,
                "stores" => self.program.stores,
                "by" => by,
                "period_ticks" => self.period_ticks.or(median),
                "auto" => self.period_ticks.is_none(),
                "round_trip_ticks" => self.round_trip_ticks,
            ]
        };
        [NOTHING, "one bare load", SHIM].map(row).to_vec()
    }

    fn baseline(&self, case: usize) -> Option<usize> {
        (case > 0).then_some(0)
    }

    /// Ticks of a batch of work, once the observer is at it.
    fn run(&mut self, case: usize, _: usize, values: &mut Values) -> Result<(), BenchError> {
        let Self { lanes, program, word, rounds, .. } = *self;
        let (period_ticks, pacing) = match self.period_ticks {
            Some(ticks) => (ticks, None),
            None => {
                let pacing = Pacing::new(lanes.clock.ticks(AUTO_NS), lanes.distance()?);
                (pacing.initial_period(), Some(pacing))
            }
        };
        let work = || {
            // An observer has memory to write first. Without one, it sleeps as long.
            thread::sleep(Duration::from_millis(2));
            // A CPU that slept is slow at first.
            (program.work)(word, rounds / WARM_UP);
            ticks_of(program, word, rounds)
        };
        let ticks = match case {
            0 => work(),
            1 => {
                let load = Bare::start(lanes, word, period_ticks);
                let ticks = work();
                load.join()?;
                ticks
            }
            _ => {
                self.taken.push(period_ticks);
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
    }
}

/// No observer: the baseline.
const NOTHING: &str = "nothing";

/// On the observed lane.
pub(super) fn measure(lanes: Lanes, runs: usize, hear: Hear<'_>) -> Result<Report, BenchError> {
    let mut costs: Vec<Row> = Vec::new();
    for program in &PROGRAMS {
        let word = line();
        let rounds = rounds_of(lanes, program, word);
        let mut at = |period_ticks| -> Result<Vec<Row>, BenchError> {
            let (taken, round_trip_ticks) = (Vec::new(), 0);
            let mut observed =
                Observed { lanes, program, word, rounds, period_ticks, round_trip_ticks, taken };
            let mut rows = Vec::new();
            for (ticks, samples) in play_apart(&mut observed, lanes, runs, hear)? {
                observed.round_trip_ticks = ticks;
                rows.extend(observed.table_of("costs", &samples).rows);
            }
            rows.retain(|row| value_of(row, "by") != NOTHING);
            Ok(rows)
        };
        let mut periods = PERIODS_TICKS.to_vec();
        let mut measured = 0;
        while let Some(&period_ticks) = periods.get(measured) {
            let rows = at(Some(period_ticks))?;
            measured += 1;
            let is_dear = rows.iter().any(|row| is_usual(row) && slowdown(row) > CHEAP_PERCENT);
            if is_dear && period_ticks < LONGEST_TICKS && measured == periods.len() {
                periods.push(period_ticks * 2);
            }
            costs.extend(rows);
        }
        costs.extend(at(None)?);
    }
    let cheap = Table { key: "cheap_from", columns: CHEAP, rows: cheap_from(&costs) };
    let costs = Table { key: "costs", columns: COSTS, rows: costs };
    Ok(Report { tables: vec![costs, cheap], ..Report::default() })
}

fn slowdown(cost: &Row) -> f64 {
    value_of(cost, "slowdown_percent")["median"].as_f64().unwrap_or(0.0)
}

/// What a user of near lanes pays for a period that the user chose.
fn is_usual(cost: &Row) -> bool {
    let is_near = value_of(cost, "round_trip_ticks").as_u64() <= Some(NEAR_TICKS);
    value_of(cost, "by") == SHIM && value_of(cost, "auto") == false && is_near
}

const CHEAP: &[Column] = &[
    label("program", "observed"),
    label("stores", "stores"),
    label("from_ticks", "at most 2 % slower from, ticks"),
];

/// From which period on each program pays no more than the bar, if any was so long. Where lanes are
/// near.
fn cheap_from(costs: &[Row]) -> Vec<Row> {
    let mut found: Vec<(&Row, Option<u64>)> = Vec::new();
    for cost in costs.iter().filter(|cost| is_usual(cost)) {
        let ticks = value_of(cost, "period_ticks").as_u64().filter(|ticks| *ticks > 0);
        let Some(ticks) = ticks else { continue };
        let is_same = |known: &Row| {
            ["program", "stores"].iter().all(|key| value_of(known, key) == value_of(cost, key))
        };
        let cheap = (slowdown(cost) <= CHEAP_PERCENT).then_some(ticks);
        match found.iter_mut().find(|(known, _)| is_same(known)) {
            // Periods come in order: one that is dearer than the last undoes that.
            Some((_, from)) => *from = cheap.map(|ticks| from.unwrap_or(ticks)),
            None => found.push((cost, cheap)),
        }
    }
    let row = |(cost, from): (&Row, Option<u64>)| {
        let (program, stores) = (value_of(cost, "program"), value_of(cost, "stores"));
        row!["program" => program, "stores" => stores, "from_ticks" => from]
    };
    found.into_iter().map(row).collect()
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
        let row = |program: &str, by: &str, ticks: u64, slower: f64, far: bool, auto: bool| {
            row![
                "program" => program,
                "stores" => "each",
                "by" => by,
                "period_ticks" => ticks,
                "auto" => auto,
                "round_trip_ticks" => if far { 1_000 } else { 200 },
                "slowdown_percent" => serde_json::json!({ "median": slower }),
            ]
        };
        let near = |program, by, ticks, slower| row(program, by, ticks, slower, false, false);
        let costs = [
            near("a", SHIM, 0, 0.0),
            near("a", SHIM, 1_200, 1.0),
            near("a", SHIM, 2_600, 2.5),
            near("a", "one bare load", 2_600, 0.0),
            near("a", SHIM, 5_200, 2.0),
            near("a", SHIM, 10_400, -1.0),
            near("b", SHIM, 1_200, 3.0),
            row("b", SHIM, 2_600, 0.0, true, false),
            row("b", SHIM, 5_000, 0.0, false, true),
        ];
        let found = cheap_from(&costs);
        let of =
            |row: &Row| (value_of(row, "program").clone(), value_of(row, "from_ticks").clone());
        let found: Vec<_> = found.iter().map(of).collect();
        assert_eq!(found, [("a".into(), 5_200.into()), ("b".into(), serde_json::Value::Null)]);
    }
}
