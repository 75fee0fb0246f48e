//! The report of live runs: a summary, and the thesis's figures from the measurements.
//!
//! `crate::live::summary` computes medians and ratios with their intervals. This file selects them,
//! draws them and describes them.

use std::collections::{BTreeMap, BTreeSet};

use elfen_console::page::Table;

use super::figure::{Across, Axis, Figure, HtmlReport, Mark, Panel, Point, Rule, Scale, Series};
use super::figure::{MOST, Source, Style};
use super::text::{percent, sentence, short};
use crate::live::summary::{self, Row};
use crate::record::{Line, Run, Scenario, Setup};

/// Why a results file gives no report.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    #[error("the file is empty")]
    Empty,
    #[error("line 1 is not a setup")]
    NoSetup,
    #[error("the setup in line {line} differs from the setup in line 1")]
    OtherSetup { line: usize },
    #[error("line {line}: {what} is {value}, which is not a possible measurement")]
    NoMeasure { line: usize, what: &'static str, value: String },
    #[error("the file has a setup, but no runs")]
    NoRuns,
}

/// Creates the report of a results file. The caller may change its title and command before it is
/// rendered.
pub fn report(lines: &[Line]) -> Result<HtmlReport, Unusable> {
    let setup = match lines.first() {
        None => return Err(Unusable::Empty),
        Some(Line::Run(_)) => return Err(Unusable::NoSetup),
        Some(Line::Setup(setup)) => setup,
    };
    let mut runs = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        match line {
            Line::Run(run) => {
                check(run, index + 1)?;
                runs.push(run);
            }
            Line::Setup(other) if is_same(setup, other) => {}
            Line::Setup(_) => return Err(Unusable::OtherSetup { line: index + 1 }),
        }
    }
    if runs.is_empty() {
        return Err(Unusable::NoRuns);
    }
    let measured = Measured { setup, rows: summary::rows(lines) };
    let mut notes = vec![description(setup)];
    notes.extend(mechanisms(&measured.rows));
    notes.extend(limits(setup));
    Ok(HtmlReport {
        title: "Elfen: live runs".to_owned(),
        command: setup.command.clone(),
        notes,
        tables: std::iter::once(measured.table()).chain(doubts(&runs)).collect(),
        figures: measured.figures(),
        appendix: Vec::new(),
    })
}

/// Refuses numbers that no run can have measured.
fn check(run: &Run, line: usize) -> Result<(), Unusable> {
    let numbers = [
        ("load", run.load),
        ("rps", run.rps),
        ("duration_s", run.duration_s),
        ("achieved_rps", run.achieved_rps),
        ("p50_ms", run.p50_ms),
        ("p95_ms", run.p95_ms),
        ("p99_ms", run.p99_ms),
        ("p999_ms", run.p999_ms),
        ("max_ms", run.max_ms),
        ("mean_ms", run.mean_ms),
        ("late_p99_ms", run.late_p99_ms),
        ("request_lane_utilisation", run.request_lane_utilisation),
        ("batch_lane_utilisation", run.batch_lane_utilisation),
        ("batch_per_second", run.batch_per_second.unwrap_or(0.0)),
        ("helper_utilisation", run.helper_utilisation),
        ("steal", run.steal),
    ];
    let latencies = run.latencies_us.iter().map(|us| ("latencies_us", *us));
    let served = run
        .served
        .iter()
        .flat_map(|one| [one.due_us, one.work_us, one.added_us].map(|us| ("served", us)));
    match numbers
        .into_iter()
        .chain(latencies)
        .chain(served)
        .find(|(_, value)| !(0.0..=1e12).contains(value))
    {
        Some((what, value)) => Err(Unusable::NoMeasure { line, what, value: value.to_string() }),
        None => Ok(()),
    }
}

// Notes about the machine, the mechanisms, and doubtful runs.

/// Whether runs after the setup `other` may be compared with those after `setup`. An experiment
/// that was continued has a second setup.
fn is_same(setup: &Setup, other: &Setup) -> bool {
    let place = |s: &Setup| (s.kernel.clone(), s.cpu.clone(), s.cpus, s.smt, s.lanes.clone());
    place(setup) == place(other) && setup.documents == other.documents
}

/// Describes the machine and the service, in a sentence each.
fn description(setup: &Setup) -> String {
    let Setup { elfen, kernel, cpu, cpus, lanes, .. } = setup;
    let rate = short(setup.capacity_rps);
    let service = match setup.plan.as_ref().and_then(|plan| plan.service.as_ref()) {
        None => format!(
            "The service searches {} documents; its capacity is {rate} requests per second",
            setup.documents
        ),
        Some(service) => {
            format!(
                "The service is {}; its capacity (100 %) is {rate} requests per second",
                service.url
            )
        }
    };
    let smt =
        if setup.smt { "the lanes of each pair share a core" } else { "not known to share a core" };
    // In a damaged file, this may be any number.
    let started = i64::try_from(setup.started_s).ok();
    let day = started.and_then(|s| time::OffsetDateTime::from_unix_timestamp(s).ok());
    let day = day.map_or_else(|| "an unknown date".to_owned(), |time| time.date().to_string());
    format!(
        "Measured on {cpu} with {cpus} CPUs, Linux {kernel}, elfen {elfen}, on {day}. Lanes \
         {lanes}, {smt}. {service}, and loads are percentages of it. Seed {}.",
        setup.seed,
    )
}

/// Returns what the machine cannot show, and where the helpers ran.
fn limits(setup: &Setup) -> Vec<String> {
    let mut limits: Vec<&str> = setup.limits.iter().map(String::as_str).collect();
    if limits.iter().all(|limit| !limit.contains(&setup.helpers)) {
        limits.push(&setup.helpers);
    }
    limits.into_iter().filter(|limit| !limit.is_empty()).map(sentence).collect()
}

/// Lists the different choices that `elfen run` made.
fn mechanisms(rows: &[Row]) -> Option<String> {
    let chosen: BTreeSet<&str> = rows.iter().filter_map(|row| row.mechanisms.as_deref()).collect();
    let chosen: Vec<&str> = chosen.into_iter().collect();
    (!chosen.is_empty()).then(|| format!("Elfen ran with {}.", chosen.join("; and with ")))
}

/// If the load generator is later than this fraction of p99, its delay distorts the measurement.
const LATE_PART: f64 = 0.1;
const LATE: &str = "the load generator sent requests late, by more than a tenth of p99";
/// Longer lists of places are replaced by "many".
const PLACES: usize = 4;

/// Returns a table of failures and warnings, if there are any. Warnings that differ only in their
/// numbers are combined.
fn doubts(runs: &[&Run]) -> Option<Table> {
    let mut kinds: BTreeMap<String, (&str, u32, BTreeSet<String>)> = BTreeMap::new();
    for run in runs {
        let found = [
            (run.errors > 0, "requests failed"),
            (run.batch_verified == Some(false), "the batch computed wrong results"),
            (run.late_p99_ms > run.p99_ms * LATE_PART, LATE),
        ];
        let found = found.into_iter().filter_map(|(is, reason)| is.then_some(reason));
        let doubts = found.chain(run.warnings.iter().map(String::as_str));
        let of_run: BTreeMap<String, &str> =
            doubts.map(|one| (without_numbers(one), one)).collect();
        for (kind, doubt) in of_run {
            let (_, runs, places) = kinds.entry(kind).or_insert((doubt, 0, BTreeSet::new()));
            *runs += 1;
            places.insert(place(run));
        }
    }
    let row = |(first, count, places): (&str, u32, BTreeSet<String>)| {
        let places: Vec<String> = places.into_iter().collect();
        let places = if places.len() > PLACES { "many".to_owned() } else { places.join(", ") };
        vec![format!("{count} of {}", runs.len()), first.to_owned(), places]
    };
    (!kinds.is_empty()).then(|| {
        let rows = kinds.into_values().map(row).collect();
        Table::new("Warnings", &["runs", "warning", "scenario"], rows).noted(
            "Similar warnings are combined. The text is that of the first run; the numbers \
                of other runs differ.",
        )
    })
}

fn place(run: &Run) -> String {
    format!("{} at {} load", run.scenario.title(), percent(run.load))
}

/// Removes numbers and their units from a warning.
fn without_numbers(warning: &str) -> String {
    let units = ["ns", "us", "µs", "ms", "s"];
    let is_word =
        |word: &&str| !word.contains(|c: char| c.is_ascii_digit()) && !units.contains(word);
    warning.split_whitespace().filter(is_word).collect::<Vec<_>>().join(" ")
}

/// The scenario that shared the core, and its details.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Side {
    scenario: Scenario,
    /// The plan's notation, such as `fixed-budget:2ms`. Empty in files without it.
    asked: String,
}

impl Side {
    fn of(row: &Row) -> Self {
        Self { scenario: row.scenario, asked: row.asked.clone() }
    }

    fn title(&self) -> String {
        let name = self.scenario.title();
        match self.asked.split_once(':') {
            Some((_, detail)) => format!("{name} {detail}"),
            None => name.to_owned(),
        }
    }
}

/// Returns a number of a row, if the row has it.
type Value = fn(&Row) -> Option<summary::Figure>;
type Cell = fn(&Row) -> String;

/// Returns a row's load in percent, rounded to a ten-thousandth. Loads that are closer count as
/// equal.
fn load_percent(row: &Row) -> f64 {
    (row.load * 1e6).round() / 1e4
}

/// Returns the figure if it can be drawn. A ratio to zero cannot.
fn finite(figure: summary::Figure) -> Option<summary::Figure> {
    let [low, high] = figure.ci95.unwrap_or([figure.median; 2]);
    [figure.median, low, high].iter().all(|value| value.abs() <= MOST).then_some(figure)
}

fn belongs(row: &Row, batch: Option<&str>) -> bool {
    row.scenario == Scenario::None || row.batch.as_deref() == batch
}

const TABLE_NOTE: &str = "Medians over invocations, with 95 % intervals (bootstrap) in parentheses \
    if there are three invocations or more. Percentiles: over the medians of each request, which \
    all runs had. Cost to p99: of the requests of a run, with and without what the emulated core \
    added to them. Batch work: relative to the batch alone. Utilisation: of both lanes; 1.0 is \
    one lane that is always busy. Overlap: the part of the requests' time during which the batch \
    ran. Reaction: from the start of a request until the batch is off its lane; median, p99.";
const HELPERS_NOTE: &str = " With helpers: including load generator and coordinator, if they share \
    the batch lane's CPU.";
/// If helpers take less of a lane than this, their column is left out.
const HELPED: f64 = 0.005;

/// All rows of a results file.
struct Measured<'a> {
    setup: &'a Setup,
    rows: Vec<Row>,
}

impl Measured<'_> {
    /// Returns the batch programs that ran, or a single `None` if only the service alone was
    /// measured.
    fn batches(&self) -> Vec<Option<&str>> {
        let mut batches: Vec<Option<&str>> = Vec::new();
        for row in self.rows.iter().filter(|row| row.scenario != Scenario::None) {
            if !batches.contains(&row.batch.as_deref()) {
                batches.push(row.batch.as_deref());
            }
        }
        if batches.is_empty() { vec![None] } else { batches }
    }

    /// Returns the loads in percent of what the service can serve.
    fn loads(&self) -> Vec<f64> {
        let mut loads: Vec<f64> = self.rows.iter().map(load_percent).collect();
        loads.sort_by(f64::total_cmp);
        loads.dedup();
        loads
    }

    /// Returns the summary: every load with every scenario that shared the core.
    fn table(&self) -> Table {
        let several = self.batches().len() > 1;
        let helped = self.rows.iter().any(|row| row.helper_utilisation.median > HELPED);
        let columns: [(&str, Cell); 13] = [
            ("load", |row| percent(load_percent(row) / 100.0)),
            ("scenario", |row| Side::of(row).title()),
            ("batch program", |row| row.batch.clone().unwrap_or_default()),
            ("p50, ms", |row| with_interval(Some(row.p50_ms), 1.0, "")),
            ("p99, ms", |row| with_interval(Some(row.p99_ms), 1.0, "")),
            ("p99 / no batch", |row| with_interval(row.p99_ratio, 1.0, "")),
            ("cost to p99", |row| with_interval(row.p99_cost, 1.0, "")),
            ("batch work", batch_cell),
            ("utilisation", |row| median(Some(row.utilisation), 1.0, "")),
            ("with helpers", |row| median(Some(row.utilisation_with_helpers), 1.0, "")),
            ("overlap", |row| median(row.overlapped, 100.0, " %")),
            ("reaction, µs", reaction_cell),
            ("runs", |row| row.runs.to_string()),
        ];
        let is_shown = |(name, cell): &(&str, Cell)| {
            let wanted =
                (several || *name != "batch program") && (helped || *name != "with helpers");
            // Columns without any value are left out, such as the overlap without a task map.
            wanted && self.rows.iter().any(|row| !cell(row).is_empty())
        };
        let columns: Vec<_> = columns.into_iter().filter(is_shown).collect();
        let row = |row: &Row| columns.iter().map(|(_, cell)| cell(row)).collect();
        let head: Vec<&str> = columns.iter().map(|(name, _)| *name).collect();
        Table::new("Summary", &head, self.rows.iter().map(row).collect())
            .noted(format!("{TABLE_NOTE}{}", if helped { HELPERS_NOTE } else { "" }))
    }

    fn figures(&self) -> Vec<Figure> {
        let batches = self.batches();
        let mut figures = Vec::new();
        for (index, batch) in batches.iter().enumerate() {
            let number = (batches.len() > 1).then_some(index + 1);
            let bench = Bench { measured: self, batch: *batch, number };
            figures.extend(bench.cost());
            if self.loads().len() > 1 {
                if index == 0 {
                    figures.extend(bench.percentiles());
                }
                figures.extend(OVER_LOAD.iter().filter_map(|of| bench.over_load(of)));
            } else {
                figures.push(bench.at_one_load());
            }
            figures.extend(bench.throughput());
        }
        figures
    }
}

/// The batch's work as a part of its work without a service, or else its work per second.
fn batch_cell(row: &Row) -> String {
    let work = match row.batch_relative.and_then(finite) {
        Some(part) => with_interval(Some(part), 100.0, " %"),
        None => with_interval(row.batch_per_second, 1.0, " per second"),
    };
    if row.batch_verified == Some(false) { format!("{work} WRONG") } else { work }
}

fn reaction_cell(row: &Row) -> String {
    let both = row.reaction_us.and_then(finite).zip(row.reaction_p99_us.and_then(finite));
    both.map_or_else(String::new, |(median, p99)| {
        format!("{}, {}", short(median.median), short(p99.median))
    })
}

fn with_interval(figure: Option<summary::Figure>, times: f64, unit: &str) -> String {
    let interval = figure.and_then(finite).and_then(|figure| figure.ci95);
    let interval = interval.map_or_else(String::new, |[low, high]| {
        format!(" ({}–{})", short(low * times), short(high * times))
    });
    median(figure, times, unit) + &interval
}

fn median(figure: Option<summary::Figure>, times: f64, unit: &str) -> String {
    figure.and_then(finite).map_or_else(String::new, |one| short(one.median * times) + unit)
}

/// A figure with p99 and utilisation of some scenarios over the loads.
struct OverLoad {
    id: &'static str,
    title: &'static str,
    reading: &'static str,
    scenarios: [Scenario; 6],
    /// If only these scenarios ran, other figures already show them.
    known: &'static [Scenario],
}

const OVER_LOAD: [OverLoad; 2] = [
    // The alternatives to borrow-idle, compared as in the thesis's Figure 5.4.
    OverLoad {
        id: "co-running",
        title: "p99 and utilisation without Elfen",
        reading: "p99 with priorities and with core scheduling, compared with borrow-idle.",
        scenarios: [
            Scenario::None,
            Scenario::Unrestrained,
            Scenario::Nice19,
            Scenario::SchedIdle,
            Scenario::CoreScheduling,
            Scenario::BorrowIdle,
        ],
        known: &[Scenario::None, Scenario::BorrowIdle],
    },
    // The policies of Figure 5.11, and slo-budget.
    OverLoad {
        id: "policies",
        title: "p99 and utilisation under Elfen's policies",
        reading: "The p99 of each policy, and the utilisation of the pair that it achieves.",
        scenarios: [
            Scenario::None,
            Scenario::BorrowIdle,
            Scenario::FixedBudget,
            Scenario::RefreshBudget,
            Scenario::DynamicBudget,
            Scenario::SloBudget,
        ],
        known: &[Scenario::None],
    },
];

const PERCENTILES: [(&str, Style, Value); 3] = [
    ("p50", Style::AQUA, |row| Some(row.p50_ms)),
    ("p95", Style::OCHRE, |row| Some(row.p95_ms)),
    ("p99", Style::INK, |row| Some(row.p99_ms)),
];

/// The runs with one batch program, and the runs of the service alone.
struct Bench<'a> {
    measured: &'a Measured<'a>,
    batch: Option<&'a str>,
    /// Appended to the ids of figures if there are several batch programs.
    number: Option<usize>,
}

impl Bench<'_> {
    fn figure(&self, id: &str, title: &str, reading: &str, x: Across) -> Figure {
        let Setup { cpu, lanes, kernel, command, .. } = self.measured.setup;
        let program = self.batch.filter(|_| self.number.is_some());
        Figure {
            id: format!("live-{id}{}", self.number.map_or(String::new(), |n| format!("-{n}"))),
            title: program.map_or(title.to_owned(), |batch| format!("{title}: {batch}")),
            reading: reading.to_owned(),
            source: Source::Live,
            made_with: format!(
                "Measured on {cpu}, lanes {lanes}, Linux {kernel}. Medians over invocations, with \
                 95 % intervals (bootstrap)."
            ),
            command: command.clone(),
            x,
            ..Figure::default()
        }
    }

    /// Returns the rows of this batch program, without those of the service alone.
    fn rows(&self) -> impl Iterator<Item = &Row> + Clone {
        self.measured.rows.iter().filter(|row| row.batch.as_deref() == self.batch)
    }

    /// Returns the scenarios of the runs with this batch, and the service alone.
    fn sides(&self) -> Vec<Side> {
        let rows = self.measured.rows.iter().filter(|row| belongs(row, self.batch));
        let sides: BTreeSet<Side> = rows.map(Side::of).collect();
        sides.into_iter().collect()
    }

    /// Returns only the scenarios with a batch.
    fn beside(&self) -> Vec<Side> {
        self.sides().into_iter().filter(|side| side.scenario != Scenario::None).collect()
    }

    fn value(&self, load: f64, side: &Side, value: Value) -> Option<summary::Figure> {
        let is = |row: &&Row| {
            belongs(row, self.batch) && load_percent(row) == load && Side::of(row) == *side
        };
        self.measured.rows.iter().find(is).and_then(value).and_then(finite)
    }

    /// Creates a line over the loads.
    fn line(&self, name: impl Into<String>, style: Style, side: &Side, value: Value) -> Series {
        let loads = self.measured.loads().into_iter();
        let points = loads.filter_map(|load| Some(point(load, self.value(load, side, value)?)));
        Series::new(name, Mark::Line, style, points.collect())
    }

    /// Creates a mark for each side that has the value, at the index of the side.
    fn marks(&self, mark: Mark, sides: &[Side], load: f64, value: Value) -> Series {
        let places = sides.iter().enumerate();
        let place = |(index, side)| Some(point(index as f64, self.value(load, side, value)?));
        Series::new("median", mark, Style::BLUE, places.filter_map(place).collect())
    }

    /// Creates a figure with a row for each side and a panel for each load. `None` if no side has
    /// the value.
    fn by_side(
        &self,
        (id, title, reading): (&str, &str, &str),
        (mark, axis): (Mark, Axis),
        value: Value,
    ) -> Option<Figure> {
        let sides = self.beside();
        let mut figure = self.figure(id, title, reading, beside_axis(&sides, true));
        for load in self.measured.loads() {
            let marks = self.marks(mark, &sides, load, value);
            if !marks.points.is_empty() {
                let mut y = axis.clone();
                y.quantity = format!("{} at {} % load", y.quantity, short(load));
                figure.panels.push(Panel::new(y, vec![marks]));
            }
        }
        (!figure.panels.is_empty()).then_some(figure)
    }

    /// Draws p99 as a multiple of p99 without a batch. On an emulated core, draws first what the
    /// batch cost the very requests of each run.
    fn cost(&self) -> Option<Figure> {
        let reading = "p99 as a multiple of p99 without a batch. Where the cost to the same \
                       requests is shown, each run is compared with itself: its requests with and \
                       without what the batch added to them.";
        let names = ("cost", "Cost of the batch for the service", reading);
        let ratio = |quantity, value| {
            let axis = Axis::new(quantity, "multiple of p99 without a batch");
            self.by_side(names, (Mark::Dots, axis), value)
        };
        let of_runs = ratio("p99", |row| row.p99_ratio)?;
        let mut figure = of_runs.clone();
        if let Some(same) = ratio("p99 of the same requests", |row| row.p99_cost) {
            figure.panels = [same.panels, of_runs.panels].concat();
        }
        for panel in &mut figure.panels {
            panel.rules.push(Rule { y: 1.0, name: "no batch".to_owned() });
            panel.y.scale = Scale::Auto;
        }
        Some(figure)
    }

    /// Draws the batch's work.
    fn throughput(&self) -> Option<Figure> {
        let relative = self.rows().any(|row| row.batch_relative.is_some());
        let (axis, value): (Axis, Value) = if relative {
            (Axis::new("work", "relative to the batch alone"), |row| row.batch_relative)
        } else {
            let unit = self.rows().find_map(|row| row.batch_unit.clone()).unwrap_or_default();
            let unit = unit + " per second";
            (Axis::new("work", unit.trim_start()), |row| row.batch_per_second)
        };
        let reading = if relative {
            "The batch's work, relative to its work alone."
        } else {
            "The batch's work per second."
        };
        self.by_side(("throughput", "Work of the batch", reading), (Mark::Bars, axis), value)
    }

    /// Draws the percentiles of the service alone (Figure 5.2).
    fn percentiles(&self) -> Option<Figure> {
        let alone = self.sides().into_iter().find(|side| side.scenario == Scenario::None)?;
        let lines = PERCENTILES.map(|(name, style, value)| self.line(name, style, &alone, value));
        let busy =
            self.line("request lane", Style::INK, &alone, |row| Some(row.request_lane_utilisation));
        let reading = "Latency percentiles and utilisation of the service without a batch.";
        let mut figure = self.figure("percentiles", "The service alone", reading, load_axis());
        figure.panels = vec![
            Panel::new(Axis::new("latency", "ms").scaled(Scale::Auto), lines.to_vec()),
            Panel::new(Axis::new("request lane busy", "fraction of the time"), vec![busy]),
        ];
        Some(figure)
    }

    /// Draws a line for each side. `None` if other figures show all of these scenarios.
    fn over_load(&self, of: &OverLoad) -> Option<Figure> {
        let mut sides = self.sides();
        sides.retain(|side| of.scenarios.contains(&side.scenario));
        if sides.iter().all(|side| of.known.contains(&side.scenario)) {
            return None;
        }
        let lines = |value: Value| -> Vec<Series> {
            let line = |(style, side): (Style, &Side)| self.line(side.title(), style, side, value);
            styles(&sides).into_iter().zip(&sides).map(line).collect()
        };
        let mut figure = self.figure(of.id, of.title, of.reading, load_axis());
        let tail = Axis::new("p99 latency", "ms").scaled(Scale::Auto);
        let used = Axis::new("utilisation of the pair", "1.0: one lane always busy");
        figure.panels = vec![
            Panel::new(tail, lines(|row| Some(row.p99_ms))),
            Panel::new(used, lines(|row| Some(row.utilisation))),
        ];
        Some(figure)
    }

    /// Draws the same values as bars, because a single load gives no line.
    fn at_one_load(&self) -> Figure {
        let sides = self.sides();
        let load = self.measured.loads().last().copied().unwrap_or(0.0);
        let title = format!("Latency and utilisation at {} % load", short(load));
        let reading = "The latencies of the service, and the utilisation of both lanes.";
        let mut figure = self.figure("at-one-load", &title, reading, beside_axis(&sides, false));
        let panels: [(&str, &str, Value); 3] = [
            ("p50 latency", "ms", |row| Some(row.p50_ms)),
            ("p99 latency", "ms", |row| Some(row.p99_ms)),
            ("utilisation of both lanes", "1.0: one lane always busy", |row| Some(row.utilisation)),
        ];
        let panel = |(quantity, unit, value)| {
            let bars = self.marks(Mark::Bars, &sides, load, value);
            Panel::new(Axis::new(quantity, unit), vec![bars])
        };
        figure.panels = panels.map(panel).to_vec();
        figure
    }
}

/// Returns a style for each side. If a scenario has several budgets, each further one gets a style
/// that no other scenario uses.
fn styles(sides: &[Side]) -> Vec<Style> {
    let others: Vec<Style> = sides.iter().map(|side| side.scenario.style()).collect();
    let mut taken: Vec<Style> = Vec::new();
    for &own in &others {
        let free = Style::ALL.into_iter().find(|s| !taken.contains(s) && !others.contains(s));
        taken.push(if taken.contains(&own) { free.unwrap_or(own) } else { own });
    }
    taken
}

fn point(x: f64, figure: summary::Figure) -> Point {
    Point { x, y: figure.median, interval: figure.ci95.map(|[low, high]| (low, high)) }
}

fn load_axis() -> Across {
    Across::number("load", "% of the service's capacity")
}

fn beside_axis(sides: &[Side], one_scale: bool) -> Across {
    Across::names("scenario", sides.iter().map(Side::title).collect(), one_scale)
}
