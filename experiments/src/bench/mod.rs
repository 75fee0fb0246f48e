//! `elfen lab bench`: what Elfen's parts cost on this machine. One file or folder a benchmark.
//!
//! A benchmark is a [`Scenario`]: its cases, how a round of one case is run, and its metrics. This
//! file does the rest for all of them. It interleaves the rounds, so that whatever the machine does
//! meanwhile happens to every case. It compares a case with its baseline round by round, because a
//! shared machine drifts more than most parts cost. It prints one form of table and one form of
//! JSON.

pub(crate) mod batch;
pub(crate) mod check;
pub(crate) mod guard;
pub(crate) mod hedge;
pub(crate) mod nap;
pub(crate) mod overlap;
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

/// Receives what is being measured, to show it to the waiting user.
pub(crate) type Hear<'a> = &'a mut dyn FnMut(&str);

/// Keys and their values, in the order in which they are printed.
pub(crate) type Row = Vec<(&'static str, Value)>;

/// `row!["cpu" => 3, "nap" => "spin"]`.
macro_rules! row {
    ($($key:literal => $value:expr),* $(,)?) => {
        vec![$(($key, serde_json::json!($value))),*]
    };
}
pub(crate) use row;

/// A benchmark, or one table of it.
pub(crate) trait Scenario {
    /// What a row of the table has.
    const COLUMNS: &'static [Column];

    /// The labels of each case. They are read before the rounds, to name the case that runs, and
    /// after them, so they may include what only the rounds have shown.
    fn cases(&self) -> Vec<Row>;

    /// The case that another case is compared with, round by round.
    fn baseline(&self, _case: usize) -> Option<usize> {
        None
    }

    /// Runs one round of a case.
    fn run(&mut self, case: usize, round: usize, values: &mut Values) -> Result<(), BenchError>;

    /// Runs `runs` rounds of every case, and gives the table.
    fn table(
        &mut self,
        key: &'static str,
        runs: usize,
        hear: Hear<'_>,
    ) -> Result<Table, BenchError> {
        let all = play(self, runs, hear)?;
        Ok(self.table_of(key, &all))
    }

    /// The table of rounds that were run.
    fn table_of(&self, key: &'static str, all: &[Samples]) -> Table {
        let row = |(case, mut row): (usize, Row)| {
            let (own, base) = (&all[case], self.baseline(case).map(|base| &all[base]));
            row.extend(Self::COLUMNS.iter().filter_map(|column| column.of_samples(own, base)));
            row
        };
        let rows = self.cases().into_iter().enumerate().map(row).collect();
        Table { key, columns: Self::COLUMNS, rows }
    }
}

/// Runs every case once in each round. Each round begins with another case, so that no case is
/// always behind the same one.
pub(crate) fn play<S: Scenario + ?Sized>(
    scenario: &mut S,
    runs: usize,
    hear: Hear<'_>,
) -> Result<Vec<Samples>, BenchError> {
    let mut all = vec![Samples::default(); scenario.cases().len()];
    for round in 0..runs {
        for (case, values) in play_round(scenario, round, runs, hear)?.into_iter().enumerate() {
            all[case].0.push(values);
        }
    }
    Ok(all)
}

/// One round: the values of each case.
pub(crate) fn play_round<S: Scenario + ?Sized>(
    scenario: &mut S,
    round: usize,
    runs: usize,
    hear: Hear<'_>,
) -> Result<Vec<Values>, BenchError> {
    let cases = scenario.cases();
    let mut all = vec![Values::default(); cases.len()];
    for case in (0..cases.len()).map(|turn| (turn + round) % cases.len()) {
        check_interrupted()?;
        let labels = cases[case].iter().map(|(_, label)| cell(label, 0, 1.0));
        let labels = labels.collect::<Vec<_>>().join(" ");
        hear(&format!("round {} of {runs}: {labels}", round + 1));
        scenario.run(case, round, &mut all[case])?;
    }
    Ok(all)
}

/// What one round of a case measured, by the keys of metrics.
#[derive(Clone, Default, Debug)]
pub(crate) struct Values(BTreeMap<&'static str, Vec<f64>>);

impl Values {
    pub(crate) fn add(&mut self, key: &'static str, value: f64) {
        self.extend(key, [value]);
    }

    pub(crate) fn extend(&mut self, key: &'static str, values: impl IntoIterator<Item = f64>) {
        self.0.entry(key).or_default().extend(values);
    }

    fn of(&self, key: &str) -> &[f64] {
        self.0.get(key).map_or(&[], Vec::as_slice)
    }
}

/// All rounds of one case.
#[derive(Clone, Default, Debug)]
pub(crate) struct Samples(pub(crate) Vec<Values>);

impl Samples {
    pub(crate) fn stats(&self, key: &str) -> Option<Stats> {
        Stats::of(self.0.iter().flat_map(|round| round.of(key)).copied().collect())
    }

    /// What `compare` makes of this case and of its baseline, round by round.
    fn against(&self, base: &Self, key: &str, compare: fn(f64, f64) -> f64) -> Option<Stats> {
        let median = |round: &Values| Stats::of(round.of(key).to_vec()).map(|stats| stats.median);
        let pair = |(own, base)| Some(compare(median(own)?, median(base)?));
        Stats::of(self.0.iter().zip(&base.0).filter_map(pair).collect())
    }
}

/// Many measurements of one thing.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(crate) struct Stats {
    pub(crate) median: f64,
    /// The 95 % interval of the median. It takes six values.
    pub(crate) ci95: Option<[f64; 2]>,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
    pub(crate) n: usize,
}

impl Stats {
    /// `None` of nothing.
    pub(crate) fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_unstable_by(f64::total_cmp);
        let n = values.len();
        let (min, max) = (rounded(*values.first()?), rounded(*values.last()?));
        let median = rounded(f64::midpoint(values[(n - 1) / 2], values[n / 2]));
        // The nearest rank.
        let at = |permille: usize| rounded(values[(n * permille).div_ceil(1000).max(1) - 1]);
        let [p90, p99, p999] = [900, 990, 999].map(at);
        // By order statistics: the rank (n + 1) / 2 - 1.96 * sqrt(n) / 2, and its mirror image.
        let rank = (100 * (n + 1)).saturating_sub((38_416 * n).isqrt()) / 200;
        let ci95 = rank.checked_sub(1).map(|low| [values[low], values[n - rank]].map(rounded));
        Some(Self { median, ci95, p90, p99, p999, min, max, n })
    }
}

/// To a thousandth.
pub(crate) fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// A part of a whole, in percent; 0 of nothing.
pub(crate) fn percent(part: u64, whole: u64) -> f64 {
    let number = elfen_console::duration::number;
    if whole == 0 { 0.0 } else { 100.0 * number(part) / number(whole) }
}

/// What a column holds.
#[derive(Clone, Copy, Debug)]
enum Of {
    /// A label of the case.
    Label,
    /// Statistics of what was measured under the column's key.
    Values,
    /// The same of a comparison with the baseline, of values under this key.
    Against(&'static str, fn(f64, f64) -> f64),
}

/// A part of statistics that the text shows; JSON has all.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Part {
    Median,
    Interval,
    P90,
    P99,
    P999,
    Max,
    Min,
    /// From the least to the most.
    Range,
    N,
}
use Part::*;

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

/// A label, as it is.
pub(crate) const fn label(key: &'static str, title: &'static str) -> Column {
    number(key, title, "", 0)
}

/// A number that the case has as a label.
pub(crate) const fn number(
    key: &'static str,
    title: &'static str,
    unit: &'static str,
    digits: usize,
) -> Column {
    let parts = &[];
    Column { key, title, of: Of::Label, unit, lower_is_better: None, digits, scale: 1.0, parts }
}

/// A metric: statistics of values that were measured under this key.
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
    /// By how much more than the baseline.
    pub(crate) const fn added_to(self, key: &'static str) -> Self {
        Self { of: Of::Against(key, |own, base| own - base), parts: &[Median, Interval, N], ..self }
    }

    /// How many times the baseline.
    pub(crate) const fn ratio_of(self, key: &'static str) -> Self {
        Self { of: Of::Against(key, |own, base| own / base), parts: &[Median, Interval, N], ..self }
    }

    /// By how many percent more than the baseline.
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

    /// The text shows the value times this, in the column's unit; JSON has what was measured.
    pub(crate) const fn scaled(self, scale: f64) -> Self {
        Self { scale, ..self }
    }

    /// What the text shows of statistics.
    pub(crate) const fn show(self, parts: &'static [Part]) -> Self {
        Self { parts, ..self }
    }

    fn of_samples(&self, own: &Samples, base: Option<&Samples>) -> Option<(&'static str, Value)> {
        let stats = match self.of {
            Of::Label => return None,
            Of::Values => own.stats(self.key),
            Of::Against(key, compare) => base.and_then(|base| own.against(base, key, compare)),
        };
        Some((self.key, serde_json::json!(stats)))
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
        let name = |part: &Part| match part {
            Median => title.clone(),
            Interval => "95 %".to_owned(),
            P90 => "p90".to_owned(),
            P99 => "p99".to_owned(),
            P999 => "p99.9".to_owned(),
            Max => "max".to_owned(),
            Min => "min".to_owned(),
            Range => "range".to_owned(),
            N => "n".to_owned(),
        };
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
            Median => show(&value["median"]),
            Interval => match value["ci95"].as_array() {
                Some(ends) => ends.iter().map(show).collect::<Vec<_>>().join(" to "),
                None => "-".to_owned(),
            },
            P90 => show(&value["p90"]),
            P99 => show(&value["p99"]),
            P999 => show(&value["p999"]),
            Max => show(&value["max"]),
            Min => show(&value["min"]),
            Range if value.is_null() => "-".to_owned(),
            Range => ["min", "max"].map(|end| show(&value[end])).join(" to "),
            N => cell(&value["n"], 0, 1.0),
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

/// The rows that one scenario gave.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    pub(crate) key: &'static str,
    pub(crate) columns: &'static [Column],
    pub(crate) rows: Vec<Row>,
}

/// What a row has under a key.
pub(crate) fn value_of<'a>(row: &'a Row, key: &str) -> &'a Value {
    row.iter().find(|(known, _)| *known == key).map_or(&Value::Null, |(_, value)| value)
}

impl Table {
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

/// What a benchmark found.
#[derive(Clone, Default, Debug)]
pub(crate) struct Report {
    /// What was measured with, and what is no case's.
    pub(crate) about: Row,
    pub(crate) tables: Vec<Table>,
    /// What could not be measured, and why.
    pub(crate) left_out: Vec<String>,
    /// What is not as it should be: then the command fails once all is printed.
    pub(crate) wrong: Option<String>,
}

impl Report {
    /// Adds a table, or its rows to the one that has its key.
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
            text += &format!("left out: {why}\n");
        }
        text
    }

    /// For `--json`: the name of the benchmark goes first.
    pub(crate) fn json<'a>(&'a self, benchmark: &'a str) -> impl Serialize {
        Json { benchmark, report: self }
    }
}

struct Json<'a> {
    benchmark: &'a str,
    report: &'a Report,
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
                // Scaled ones have theirs in the text alone; JSON keys end with the unit.
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

/// A row as an object, with its keys in their order.
struct Entries<'a>(&'a Row);

impl Serialize for Entries<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}

/// Why nothing was measured.
#[derive(Debug)]
pub(crate) enum BenchError {
    /// In its last words.
    Known(Failure),
    Live(LiveError),
    Other {
        status: Status,
        why: String,
        fix: String,
    },
}

impl BenchError {
    pub(crate) fn failed(why: impl Display, fix: impl Display) -> Self {
        Self::Other { status: Status::Failed, why: why.to_string(), fix: fix.to_string() }
    }

    pub(crate) fn unsupported(why: impl Display, fix: impl Display) -> Self {
        Self::Other { status: Status::Unsupported, why: why.to_string(), fix: fix.to_string() }
    }
}

impl Display for BenchError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Known(failure) => failure.fmt(f),
            Self::Live(error) => error.fmt(f),
            Self::Other { why, .. } => f.write_str(why),
        }
    }
}

/// Says what failed, and what to do.
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

impl From<LiveError> for BenchError {
    fn from(error: LiveError) -> Self {
        Self::Live(error)
    }
}

/// Of the recorder's programs as well.
impl From<task_map::Error> for BenchError {
    fn from(error: task_map::Error) -> Self {
        Self::Known(signals::failure("attaching programs to the kernel", &error))
    }
}

/// What to do about each kind of error, where a benchmark says nothing closer.
macro_rules! fixes {
    ($($error:ty => $fix:expr;)*) => {
        $(impl From<$error> for BenchError {
            fn from(error: $error) -> Self {
                let fix: fn(&$error) -> (Status, &'static str) = $fix;
                let (status, fix) = fix(&error);
                Self::Other { status, why: error.to_string(), fix: fix.to_owned() }
            }
        })*
    };
}

const BUILD_ALL: &str = "build all of Elfen (`cargo build --release`), or set ELFEN_LIB";
const SHARED_MEMORY: &str = "see `ipcs -l` for the limits of shared memory";

fixes! {
    io::Error => |_| (Status::Failed, "see what the system says of it, and try again");
    ProgramError => |_| (Status::Failed, BUILD_ALL);
    LibraryError => |_| (Status::Failed, BUILD_ALL);
    MemoryError => |_| (Status::Failed, SHARED_MEMORY);
    OpenError => |_| (Status::Failed, SHARED_MEMORY);
    ClaimError => |_| (Status::Failed, SHARED_MEMORY);
    serde_json::Error => |_| (Status::Failed, "use programs of the same version as this command");
}

/// `--runs` of a benchmark, for clap.
pub(crate) fn runs() -> clap::builder::RangedU64ValueParser<usize> {
    clap::builder::RangedU64ValueParser::new().range(1..=100_000)
}

/// The first pair: its request lane and its first batch lane.
pub(crate) fn lanes(args: &LaneArgs) -> Result<(u32, u32), BenchError> {
    let pair = args.first_pair()?;
    let batch = pair.batch.iter().next();
    Ok((pair.request, batch.unwrap_or_else(|| unreachable!("a pair has a batch lane"))))
}

/// How often guards look, as reports have it.
pub(crate) fn looked(looks: PollTiming) -> Row {
    let PollReport { poll_interval_ns, timer_slack_ns } = looks.into();
    row!["poll_interval_ns" => poll_interval_ns, "timer_slack_ns" => timer_slack_ns]
}

/// Pins the calling thread.
pub(crate) fn pin(cpu: u32) -> Result<(), BenchError> {
    let pinned = elfen_machine::affinity::pin(cpu);
    pinned.explain(format_args!("cannot run on CPU {cpu}"), "see `elfen lanes` for CPUs to use")
}

/// A page that goes with the last process that maps it.
fn private_page<S: Slot>(slots: u32) -> Result<Page<S>, MemoryError> {
    let memory = Memory::create_segment(libc::IPC_PRIVATE, Page::<S>::bytes(slots), 0o600)?;
    memory.remove_name()?;
    Page::format(memory, slots, pid_namespace(), &[0; 32]).map_err(|_| MemoryError::Size)
}

/// What a thread returned; its panic goes on here.
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
        // The exact binomial ranks, in the tables of order statistics.
        let low = |n: u8| stats((1..=n).map(f64::from).collect()).ci95.map(|[low, _]| low);
        let exact = [(5, None), (6, Some(1.0)), (9, Some(2.0)), (12, Some(3.0)), (20, Some(6.0))];
        exact.iter().for_each(|&(n, rank)| assert_eq!(low(n), rank, "{n}"));
    }

    /// Two cases, of which the second takes 10 % longer than the first, whatever drifts.
    struct Drifting(Vec<usize>);

    impl Scenario for Drifting {
        const COLUMNS: &'static [Column] = &[
            label("case", "case"),
            metric("ns", "time", "us", 1).scaled(1e-3).lower().show(&[Median, N]),
            number("turns", "turns", "", 0),
            metric("more", "more", "%", 1).percent_of("ns").show(&[Median, Interval]),
        ];

        fn cases(&self) -> Vec<Row> {
            let turns = |case| self.0.iter().filter(|known| **known == case).count();
            let row = |(case, name): (usize, &str)| row!["case" => name, "turns" => turns(case)];
            ["base", "more"].into_iter().enumerate().map(row).collect()
        }

        fn baseline(&self, case: usize) -> Option<usize> {
            (case == 1).then_some(0)
        }

        fn run(&mut self, case: usize, round: usize, to: &mut Values) -> Result<(), BenchError> {
            self.0.push(case);
            let drift = elfen_console::duration::number(round as u64 + 1);
            to.add("ns", drift * if case == 0 { 1000.0 } else { 1100.0 });
            Ok(())
        }
    }

    /// Goal: rounds are interleaved, a case is compared with the baseline of its round, and text
    /// and JSON say the same. Method: a scenario whose times double and triple from round to round.
    #[test]
    fn a_scenario_is_played_and_printed() {
        let mut heard = Vec::new();
        let mut scenario = Drifting(Vec::new());
        let table = scenario.table("times", 6, &mut |what| heard.push(what.to_owned())).unwrap();
        assert_eq!(scenario.0, [0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0]);
        assert_eq!(heard[0], "round 1 of 6: base 0");
        let left_out = vec!["the rest: no time".to_owned()];
        let about = row!["cpu" => 3];
        let report = Report { about, tables: vec![table], left_out, wrong: None };
        let text = "case  time, us ↓  n  turns  more, %  95 %\n\
                    base  3.5         6  6      -        -\n\
                    more  3.9         6  6      10.0     10.0 to 10.0\n\n\
                    cpu: 3\nleft out: the rest: no time\n";
        assert_eq!(report.text(), text);
        let json = serde_json::to_string(&report.json("drift")).unwrap();
        let begin = r#"{"benchmark":"drift","cpu":3,"times":[{"case":"base","turns":6,"#;
        assert!(json.starts_with(begin), "{json}");
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["times"][1]["more"]["median"], 10.0);
        assert_eq!(json["metrics"]["times.ns"]["lower_is_better"], true);
        assert_eq!(json["left_out"][0], "the rest: no time");
    }
}
