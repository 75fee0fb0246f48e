//! `elfen lab bench`: what Elfen's parts cost on this machine. Each benchmark has its own file or
//! folder.
//!
//! A benchmark has cases, columns, and a closure that runs one round of a case ([`measure`]). This
//! file does the rest for all benchmarks. It interleaves the rounds, so that a disturbance of the
//! machine affects every case. It compares a case with its baseline round by round, because a
//! shared machine drifts more than most parts cost. It prints every benchmark in the same table
//! format and the same JSON format.

pub(crate) mod batch;
pub(crate) mod check;
pub(crate) mod fdo;
pub(crate) mod guard;
pub(crate) mod hedge;
pub(crate) mod nap;
pub(crate) mod overlap;
pub(crate) mod profile;
mod program;
pub(crate) mod service;
pub(crate) mod shim;
pub(crate) mod signal;
pub(crate) mod tailor;
mod trace;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io;

use elfen_console::failure::{Failure, Status};
use elfen_console::programs::ProgramError;
use elfen_console::table;
use elfen_instrument::LibraryError;
use elfen_kernel::task_map;
use elfen_machine::lane_args::LaneArgs;
use elfen_rt::memory::{Memory, MemoryError};
use elfen_rt::process::pid_namespace;
use elfen_rt::service::ClaimError;
use elfen_rt::signal::page::{Page, Slot};
use elfen_rt::signal::service::OpenError;
use elfen_run::args::signals;
use elfen_run::poll_timing::{PollReport, PollTiming};
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use serde_json::Value;

use crate::live::{LiveError, check_interrupted};

/// Receives a description of the current measurement, to show it to the waiting user.
pub(crate) type Progress<'a> = &'a mut dyn FnMut(&str);

/// Keys and their values, in the order in which they are printed.
pub(crate) type Row = Vec<(&'static str, Value)>;

/// `row!["cpu" => 3, "nap" => "spin"]`.
macro_rules! row {
    ($($key:literal => $value:expr),* $(,)?) => {
        vec![$(($key, serde_json::json!($value))),*]
    };
}
pub(crate) use row;

/// What is measured: its labels, and the index of the case that it is compared with, round by
/// round.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    labels: Row,
    baseline: Option<usize>,
}

pub(crate) fn case(labels: Row) -> Case {
    Case { labels, baseline: None }
}

impl Case {
    pub(crate) fn against(self, baseline: usize) -> Self {
        Self { baseline: Some(baseline), ..self }
    }
}

/// Makes one case for each name, with the name as its only label.
pub(crate) fn cases<const N: usize>(key: &'static str, names: [&str; N]) -> Vec<Case> {
    names.map(|name| case(vec![(key, name.into())])).to_vec()
}

/// Makes the first case the baseline of all other cases.
pub(crate) fn with_baseline(mut cases: Vec<Case>) -> Vec<Case> {
    cases.iter_mut().skip(1).for_each(|case| case.baseline = Some(0));
    cases
}

/// Runs `runs` rounds of every case and returns the table. `run` gets the index of the case, the
/// number of the round, and the values to fill in.
pub(crate) fn measure(
    (key, columns): (&'static str, &'static [Column]),
    cases: &[Case],
    runs: usize,
    progress: Progress<'_>,
    run: impl FnMut(usize, usize, &mut Values) -> Result<(), BenchError>,
) -> Result<Table, BenchError> {
    Ok(Table::of((key, columns), cases, &play(cases, runs, progress, run)?))
}

/// Runs every case once in each round.
pub(crate) fn play(
    cases: &[Case],
    runs: usize,
    progress: Progress<'_>,
    mut run: impl FnMut(usize, usize, &mut Values) -> Result<(), BenchError>,
) -> Result<Vec<Samples>, BenchError> {
    let mut all = vec![Samples::default(); cases.len()];
    for round in 0..runs {
        add_round(&mut all, play_round(cases, (round, runs), progress, &mut run)?);
    }
    Ok(all)
}

/// Runs one round and returns the values of each case. Each round starts with a different case, so
/// that no case always follows the same one.
fn play_round(
    cases: &[Case],
    (round, runs): (usize, usize),
    progress: Progress<'_>,
    mut run: impl FnMut(usize, usize, &mut Values) -> Result<(), BenchError>,
) -> Result<Vec<Values>, BenchError> {
    let mut all = vec![Values::default(); cases.len()];
    for case in (0..cases.len()).map(|turn| (turn + round) % cases.len()) {
        check_interrupted()?;
        let labels = cases[case].labels.iter().map(|(_, label)| cell(label, 0, 1.0));
        let labels = labels.collect::<Vec<_>>().join(" ");
        progress(&format!("round {} of {runs}: {labels}", round + 1));
        run(case, round, &mut all[case])?;
    }
    Ok(all)
}

fn add_round(all: &mut [Samples], round: Vec<Values>) {
    all.iter_mut().zip(round).for_each(|(samples, values)| samples.0.push(values));
}

/// The results of one round of a case: measurements, counts and labels.
#[derive(Clone, Default, Debug)]
pub(crate) struct Values {
    measured: BTreeMap<&'static str, Vec<f64>>,
    counts: BTreeMap<&'static str, u64>,
    labels: Row,
}

impl Values {
    pub(crate) fn add(&mut self, key: &'static str, value: f64) {
        self.extend(key, [value]);
    }

    pub(crate) fn extend(&mut self, key: &'static str, values: impl IntoIterator<Item = f64>) {
        self.measured.entry(key).or_default().extend(values);
    }

    /// Adds to a count. The row contains the sum over all rounds.
    pub(crate) fn count(&mut self, key: &'static str, count: u64) {
        *self.counts.entry(key).or_default() += count;
    }

    /// Sets a label. The row contains the label of the last round.
    pub(crate) fn label(&mut self, key: &'static str, value: impl Into<Value>) {
        self.labels.push((key, value.into()));
    }

    fn of(&self, key: &str) -> &[f64] {
        self.measured.get(key).map_or(&[], Vec::as_slice)
    }
}

/// All rounds of one case.
#[derive(Clone, Default, Debug)]
pub(crate) struct Samples(Vec<Values>);

impl Samples {
    pub(crate) fn stats(&self, key: &str) -> Option<Stats> {
        Stats::of(self.0.iter().flat_map(|round| round.of(key)).copied().collect())
    }

    /// Applies `compare` to the medians of this case and of its baseline in each round.
    fn against(&self, base: &Self, key: &str, compare: fn(f64, f64) -> f64) -> Option<Stats> {
        let median = |round: &Values| Stats::of(round.of(key).to_vec()).map(|stats| stats.median);
        let pair = |(own, base)| Some(compare(median(own)?, median(base)?));
        Stats::of(self.0.iter().zip(&base.0).filter_map(pair).collect())
    }

    /// Returns the counts, summed over all rounds, and the labels of the last round.
    fn row(&self) -> Row {
        let mut counts = BTreeMap::<_, u64>::new();
        for (key, count) in self.0.iter().flat_map(|round| &round.counts) {
            *counts.entry(*key).or_default() += count;
        }
        let counts = counts.into_iter().map(|(key, count)| (key, count.into()));
        let labels = self.0.last().map_or(&[][..], |round| &round.labels);
        counts.chain(labels.iter().cloned()).collect()
    }
}

/// Statistics of many measurements of one quantity.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(crate) struct Stats {
    pub(crate) median: f64,
    /// The 95 % interval of the median. It requires at least six values.
    pub(crate) ci95: Option<[f64; 2]>,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
    pub(crate) n: usize,
}

impl Stats {
    /// Returns `None` if `values` is empty.
    pub(crate) fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_unstable_by(f64::total_cmp);
        let n = values.len();
        let (min, max) = (rounded(*values.first()?), rounded(*values.last()?));
        let median = rounded(f64::midpoint(values[(n - 1) / 2], values[n / 2]));
        // Nearest-rank percentiles.
        let at = |permille: usize| rounded(values[(n * permille).div_ceil(1000).max(1) - 1]);
        let [p90, p99, p999] = [900, 990, 999].map(at);
        // The interval by order statistics: the rank (n + 1) / 2 - 1.96 * sqrt(n) / 2, and its
        // mirror image.
        let rank = (100 * (n + 1)).saturating_sub((38_416 * n).isqrt()) / 200;
        let ci95 = rank.checked_sub(1).map(|low| [values[low], values[n - rank]].map(rounded));
        Some(Self { median, ci95, p90, p99, p999, min, max, n })
    }
}

/// Rounds to a thousandth.
pub(crate) fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// Returns a part of a whole in percent, and 0 if the whole is 0.
pub(crate) fn percent(part: u64, whole: u64) -> f64 {
    let number = elfen_console::duration::number;
    if whole == 0 { 0.0 } else { 100.0 * number(part) / number(whole) }
}

/// Where the value of a column comes from.
#[derive(Clone, Copy, Debug)]
enum Of {
    /// A label of the case, or a count.
    Label,
    /// The first count as a percentage of the second count.
    Share(&'static str, &'static str),
    /// Statistics of the values that were measured under the column's key.
    Values,
    /// Statistics of a comparison with the baseline, using the values that were measured under this
    /// key.
    Against(&'static str, fn(f64, f64) -> f64),
}

/// A statistic that the text shows. JSON contains all statistics.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Part {
    Median,
    Interval,
    P90,
    P99,
    P999,
    Max,
    Min,
    /// From the minimum to the maximum.
    Range,
    N,
}
use Part::*;

impl Part {
    /// The heading of the statistic's column. The first statistic uses the column's title instead.
    fn name(self) -> &'static str {
        match self {
            Median => "median",
            Interval => "95 %",
            P90 => "p90",
            P99 => "p99",
            P999 => "p99.9",
            Max => "max",
            Min => "min",
            Range => "range",
            N => "n",
        }
    }
}

/// One column of a table: a label or a metric.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Column {
    key: &'static str,
    title: &'static str,
    of: Of,
    unit: &'static str,
    lower_is_better: Option<bool>,
    digits: usize,
    scale: f64,
    parts: &'static [Part],
}

/// A column that prints a label unchanged.
pub(crate) const fn label(key: &'static str, title: &'static str) -> Column {
    number(key, title, "", 0)
}

/// A column that prints a label of the case as a number.
pub(crate) const fn number(
    key: &'static str,
    title: &'static str,
    unit: &'static str,
    digits: usize,
) -> Column {
    let parts = &[];
    Column { key, title, of: Of::Label, unit, lower_is_better: None, digits, scale: 1.0, parts }
}

/// A column that prints one count as a percentage of another count.
pub(crate) const fn share(
    key: &'static str,
    title: &'static str,
    digits: usize,
    (part, whole): (&'static str, &'static str),
) -> Column {
    Column { of: Of::Share(part, whole), ..number(key, title, "%", digits) }
}

/// A metric: statistics of the values that were measured under this key.
pub(crate) const fn metric(
    key: &'static str,
    title: &'static str,
    unit: &'static str,
    digits: usize,
) -> Column {
    let parts = &[Median, P99, Max, N];
    Column { of: Of::Values, parts, ..number(key, title, unit, digits) }
}

impl Column {
    /// Shows the difference from the baseline.
    pub(crate) const fn added_to(self, key: &'static str) -> Self {
        Self { of: Of::Against(key, |own, base| own - base), parts: &[Median, Interval, N], ..self }
    }

    /// Shows the ratio to the baseline.
    pub(crate) const fn ratio_of(self, key: &'static str) -> Self {
        Self { of: Of::Against(key, |own, base| own / base), parts: &[Median, Interval, N], ..self }
    }

    /// Shows the difference from the baseline in percent of the baseline.
    pub(crate) const fn percent_of(self, key: &'static str) -> Self {
        let compare = |own: f64, base: f64| (own / base - 1.0) * 100.0;
        Self { of: Of::Against(key, compare), parts: &[Median, Interval, N], ..self }
    }

    pub(crate) const fn lower(self) -> Self {
        Self { lower_is_better: Some(true), ..self }
    }

    pub(crate) const fn higher(self) -> Self {
        Self { lower_is_better: Some(false), ..self }
    }

    /// Multiplies the value by `scale` in the text, where the column's unit applies. JSON has the
    /// unscaled value.
    pub(crate) const fn scaled(self, scale: f64) -> Self {
        Self { scale, ..self }
    }

    /// Chooses the statistics that the text shows.
    pub(crate) const fn show(self, parts: &'static [Part]) -> Self {
        Self { parts, ..self }
    }

    /// Adds the column's value to a row that already has its labels and counts.
    fn add_to(&self, row: &mut Row, own: &Samples, base: Option<&Samples>) {
        let value = match self.of {
            Of::Label => return,
            Of::Share(part, whole) => {
                let [part, whole] = [part, whole].map(|key| value_of(row, key).as_u64());
                let share = part.zip(whole).filter(|(_, whole)| *whole > 0);
                serde_json::json!(share.map(|(part, whole)| rounded(percent(part, whole))))
            }
            Of::Values => serde_json::json!(own.stats(self.key)),
            Of::Against(key, compare) => {
                serde_json::json!(base.and_then(|base| own.against(base, key, compare)))
            }
        };
        row.push((self.key, value));
    }

    fn headings(&self) -> Vec<String> {
        let mut title = self.title.to_owned();
        if !self.unit.is_empty() {
            title += &format!(", {}", self.unit);
        }
        title += match self.lower_is_better {
            Some(true) => " ↓",
            Some(false) => " ↑",
            None => "",
        };
        let name = |part: &Part| part.name().to_owned();
        let mut names: Vec<String> = self.parts.iter().map(name).collect();
        match names.first_mut() {
            Some(first) => *first = title,
            None => names.push(title),
        }
        names
    }

    fn cells(&self, value: &Value) -> Vec<String> {
        let show = |value: &Value| cell(value, self.digits, self.scale);
        let part = |part: &Part| match part {
            Interval => match value["ci95"].as_array() {
                Some(ends) => ends.iter().map(show).collect::<Vec<_>>().join(" to "),
                None => "-".to_owned(),
            },
            Range if value.is_null() => "-".to_owned(),
            Range => ["min", "max"].map(|end| show(&value[end])).join(" to "),
            N => cell(&value["n"], 0, 1.0),
            Median => show(&value["median"]),
            P999 => show(&value["p999"]),
            P90 | P99 | Max | Min => show(&value[part.name()]),
        };
        match self.parts {
            [] => vec![show(value)],
            parts => parts.iter().map(part).collect(),
        }
    }
}

fn cell(value: &Value, digits: usize, scale: f64) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::Bool(is) => if *is { "yes" } else { "no" }.to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(values) if values.is_empty() => "-".to_owned(),
        Value::Array(values) => {
            values.iter().map(|value| cell(value, digits, scale)).collect::<Vec<_>>().join(" ")
        }
        Value::Object(map) => {
            map.values().map(|value| cell(value, digits, scale)).collect::<Vec<_>>().join(" ")
        }
        other => other.as_f64().map_or_else(String::new, |n| format!("{:.digits$}", n * scale)),
    }
}

/// The rows of one scenario.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    pub(crate) key: &'static str,
    pub(crate) columns: &'static [Column],
    pub(crate) rows: Vec<Row>,
}

/// Returns the value under a key, or null.
pub(crate) fn value_of<'a>(row: &'a Row, key: &str) -> &'a Value {
    row.iter().find(|(known, _)| *known == key).map_or(&Value::Null, |(_, value)| value)
}

impl Table {
    /// Builds the table from the samples of all rounds.
    pub(crate) fn of(
        (key, columns): (&'static str, &'static [Column]),
        cases: &[Case],
        all: &[Samples],
    ) -> Self {
        let row = |(case, own): (&Case, &Samples)| {
            let mut row = [case.labels.clone(), own.row()].concat();
            let base = case.baseline.map(|base| &all[base]);
            columns.iter().for_each(|column| column.add_to(&mut row, own, base));
            row
        };
        Self { key, columns, rows: cases.iter().zip(all).map(row).collect() }
    }

    fn text(&self) -> String {
        let headings: Vec<String> = self.columns.iter().flat_map(Column::headings).collect();
        let headings: Vec<&str> = headings.iter().map(String::as_str).collect();
        let cells = |row: &Row| {
            let cells = |column: &Column| column.cells(value_of(row, column.key));
            self.columns.iter().flat_map(cells).collect()
        };
        table::lines(&headings, &self.rows.iter().map(cells).collect::<Vec<_>>())
    }
}

/// The results of a benchmark.
#[derive(Clone, Default, Debug)]
pub(crate) struct BenchReport {
    /// Parameters and results that belong to the whole benchmark, not to one case.
    pub(crate) about: Row,
    pub(crate) tables: Vec<Table>,
    /// What could not be measured, and why.
    pub(crate) left_out: Vec<String>,
    /// A wrong result. The command prints the whole report and then fails.
    pub(crate) wrong: Option<String>,
}

impl From<Table> for BenchReport {
    fn from(table: Table) -> Self {
        Self { tables: vec![table], ..Self::default() }
    }
}

impl BenchReport {
    /// A report that says only what could not be measured, and why.
    pub(crate) fn without(what: &str, why: impl Display) -> Self {
        Self { left_out: vec![format!("{what}: {why}")], ..Self::default() }
    }

    pub(crate) fn about(self, about: Row) -> Self {
        Self { about, ..self }
    }

    /// Adds a table. If there already is a table with its key, adds the rows to that table.
    pub(crate) fn add(&mut self, table: Table) {
        match self.tables.iter_mut().find(|known| known.key == table.key) {
            Some(known) => known.rows.extend(table.rows),
            None => self.tables.push(table),
        }
    }

    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for table in self.tables.iter().filter(|table| !table.rows.is_empty()) {
            text += &(table.text() + "\n");
        }
        for (key, value) in self.about.iter().filter(|(_, value)| !value.is_null()) {
            let shown = match value {
                Value::Number(number) if number.is_f64() => cell(value, 3, 1.0),
                value => cell(value, 0, 1.0),
            };
            text += &format!("{}: {shown}\n", key.replace('_', " "));
        }
        for why in &self.left_out {
            text += &format!("not measured: {why}\n");
        }
        text
    }

    /// Returns the report for `--json`. The name of the benchmark is the first entry.
    pub(crate) fn json<'a>(&'a self, benchmark: &'a str) -> impl Serialize {
        Json { benchmark, report: self }
    }
}

struct Json<'a> {
    benchmark: &'a str,
    report: &'a BenchReport,
}

impl Serialize for Json<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("benchmark", self.benchmark)?;
        for (key, value) in &self.report.about {
            map.serialize_entry(key, value)?;
        }
        let mut metrics = BTreeMap::new();
        for Table { key, columns, rows } in &self.report.tables {
            map.serialize_entry(key, &rows.iter().map(Entries).collect::<Vec<_>>())?;
            for column in columns.iter().filter(|column| column.lower_is_better.is_some()) {
                // The unit of a scaled column applies only to the text. JSON keys end with the unit
                // of their values.
                let unit = (column.scale == 1.0).then_some(column.unit);
                let better = column.lower_is_better;
                metrics.insert(
                    format!("{key}.{}", column.key),
                    serde_json::json!({ "unit": unit, "lower_is_better": better }),
                );
            }
        }
        map.serialize_entry("metrics", &metrics)?;
        map.serialize_entry("left_out", &self.report.left_out)?;
        map.end()
    }
}

/// Serializes a row as an object, with its keys in their order.
struct Entries<'a>(&'a Row);

impl Serialize for Entries<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchError {
    /// A failure that already has its final message.
    #[error("{0}")]
    Known(Failure),
    #[error(transparent)]
    Live(#[from] LiveError),
    #[error("{why}")]
    Other { status: Status, why: String, fix: String },
}

impl BenchError {
    pub(crate) fn failed(why: impl Display, fix: impl Display) -> Self {
        Self::Other { status: Status::Failed, why: why.to_string(), fix: fix.to_string() }
    }

    pub(crate) fn unsupported(why: impl Display, fix: impl Display) -> Self {
        Self::Other { status: Status::Unsupported, why: why.to_string(), fix: fix.to_string() }
    }
}

/// Turns an error into a [`BenchError`] that names what failed and what to do.
pub(crate) trait Explain<T> {
    fn explain(self, what: impl Display, fix: &str) -> Result<T, BenchError>;
}

impl<T, E: Display> Explain<T> for Result<T, E> {
    fn explain(self, what: impl Display, fix: &str) -> Result<T, BenchError> {
        self.map_err(|error| BenchError::failed(format_args!("{what}: {error}"), fix))
    }
}

impl From<Failure> for BenchError {
    fn from(failure: Failure) -> Self {
        Self::Known(failure)
    }
}

/// This error also comes from the recorder's programs.
impl From<task_map::Error> for BenchError {
    fn from(error: task_map::Error) -> Self {
        Self::Known(signals::failure("attaching eBPF programs", &error))
    }
}

const BUILD_ALL: &str = "build all of Elfen (`cargo build --release`), or set ELFEN_LIB";
const SHARED_MEMORY: &str = "see `ipcs -l` for the limits of shared memory";

/// What to do about each kind of error, unless a benchmark gives more specific advice.
macro_rules! fixes {
    ($($error:ty => $fix:expr;)*) => {
        $(impl From<$error> for BenchError {
            fn from(error: $error) -> Self {
                Self::failed(error, $fix)
            }
        })*
    };
}

fixes! {
    io::Error => "correct this, and try again";
    ProgramError => BUILD_ALL;
    LibraryError => BUILD_ALL;
    MemoryError => SHARED_MEMORY;
    OpenError => SHARED_MEMORY;
    ClaimError => SHARED_MEMORY;
    serde_json::Error => "use programs of the same version as this command";
}

/// Parses `--runs` of a benchmark.
pub(crate) fn runs() -> clap::builder::RangedU64ValueParser<usize> {
    clap::builder::RangedU64ValueParser::new().range(1..=100_000)
}

/// Returns the request lane and the first batch lane of the first pair.
pub(crate) fn lanes(args: &LaneArgs) -> Result<(u32, u32), BenchError> {
    let pair = args.first_pair()?;
    let batch = pair.batch.iter().next();
    Ok((pair.request, batch.unwrap_or_else(|| unreachable!("a pair has a batch lane"))))
}

/// The poll timing of guards, as reports print it.
pub(crate) fn poll_timing_row(poll_timing: PollTiming) -> Row {
    let PollReport { poll_interval_ns, timer_slack_ns } = poll_timing.into();
    row!["poll_interval_ns" => poll_interval_ns, "timer_slack_ns" => timer_slack_ns]
}

/// Pins the calling thread.
pub(crate) fn pin(cpu: u32) -> Result<(), BenchError> {
    let pinned = elfen_machine::affinity::pin(cpu);
    pinned.explain(format_args!("cannot run on CPU {cpu}"), "see `elfen lanes` for CPUs to use")
}

/// A page in shared memory that is freed when the last process that maps it ends.
fn private_page<S: Slot>(slots: u32) -> Result<Page<S>, MemoryError> {
    let memory = Memory::create_segment(libc::IPC_PRIVATE, Page::<S>::bytes(slots), 0o600)?;
    memory.remove_name()?;
    Page::format(memory, slots, pid_namespace(), &[0; 32]).map_err(|_| MemoryError::Size)
}

/// Returns the result of a thread. A panic of that thread continues here.
pub(crate) fn joined<T>(thread: std::thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_are_of_the_nearest_rank() {
        let stats = |values: Vec<f64>| Stats::of(values).unwrap();
        let many = stats((1..=200).map(f64::from).rev().collect());
        assert_eq!((many.median, many.p90, many.p99, many.p999), (100.5, 180.0, 198.0, 200.0));
        assert_eq!((many.min, many.max, many.n, many.ci95), (1.0, 200.0, 200, Some([86.0, 115.0])));
        let one = stats(vec![2.0404]);
        assert_eq!((one.median, one.p99, one.max, one.n, one.ci95), (2.04, 2.04, 2.04, 1, None));
        assert_eq!(Stats::of(Vec::new()), None);
        // The exact binomial ranks, from tables of order statistics.
        let low = |n: u8| stats((1..=n).map(f64::from).collect()).ci95.map(|[low, _]| low);
        let exact = [(5, None), (6, Some(1.0)), (9, Some(2.0)), (12, Some(3.0)), (20, Some(6.0))];
        exact.iter().for_each(|&(n, rank)| assert_eq!(low(n), rank, "{n}"));
    }

    const DRIFTING: &[Column] = &[
        label("case", "case"),
        metric("ns", "time", "us", 1).scaled(1e-3).lower().show(&[Median, N]),
        number("turns", "turns", "", 0),
        share("half", "half", 1, ("halves", "turns")),
        metric("more", "more", "%", 1).percent_of("ns").show(&[Median, Interval]),
        label("last", "last"),
    ];

    /// Goal: rounds are interleaved, a case is compared with the baseline of its round, counts are
    /// summed, and text and JSON agree. Method: the second of two cases always takes 10 % longer,
    /// and the times double and triple from round to round.
    #[test]
    fn cases_are_played_and_printed() {
        let (mut shown, mut played) = (Vec::new(), Vec::new());
        let cases = with_baseline(cases("case", ["base", "more"]));
        let progress = &mut |what: &str| shown.push(what.to_owned());
        let table = measure(("times", DRIFTING), &cases, 6, progress, |case, round, values| {
            played.push(case);
            let drift = elfen_console::duration::number(round as u64 + 1);
            values.add("ns", drift * if case == 0 { 1000.0 } else { 1100.0 });
            values.count("turns", 2);
            values.count("halves", case as u64);
            values.label("last", round);
            Ok(())
        });
        let table = table.unwrap();
        assert_eq!(played, [0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0]);
        assert_eq!(shown[0], "round 1 of 6: base");
        let left_out = vec!["the rest: no time".to_owned()];
        let about = row!["cpu" => 3];
        let report = BenchReport { about, tables: vec![table], left_out, wrong: None };
        let text = "case  time, us ↓  n  turns  half, %  more, %  95 %          last\n\
                    base  3.5         6  12     0.0      -        -             5\n\
                    more  3.9         6  12     50.0     10.0     10.0 to 10.0  5\n\n\
                    cpu: 3\nnot measured: the rest: no time\n";
        assert_eq!(report.text(), text);
        let json = serde_json::to_string(&report.json("drift")).unwrap();
        let begin = r#"{"benchmark":"drift","cpu":3,"times":[{"case":"base","halves":0,"#;
        assert!(json.starts_with(begin), "{json}");
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["times"][1]["more"]["median"], 10.0);
        assert_eq!(json["metrics"]["times.ns"]["lower_is_better"], true);
        assert_eq!(json["left_out"][0], "the rest: no time");
    }
}
