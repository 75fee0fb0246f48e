//! The thesis's figures from live runs. With one load there is nothing to draw a line through: then
//! the same numbers stand in rows.

use super::measured::{Measured, Side, finite};
use crate::live::summary::{self, Row};
use crate::record::{Scenario, Setup};
use crate::report::figure::{
    Across, Axis, Figure, Mark, Panel, Point, Rule, Scale, Series, Source, Style,
};
use crate::report::scale::{percent, said};

/// One batch program's runs, and those without any.
struct Bench<'a> {
    setup: &'a Setup,
    measured: &'a Measured,
    batch: Option<&'a str>,
    /// Behind the names of figures if there are several batch programs.
    suffix: String,
}

/// A number of a row, if it has that.
type Value = fn(&Row) -> Option<summary::Figure>;

const PERCENTILES: [(&str, Style, Value); 3] = [
    ("p50", Style::Aqua, |row| Some(row.p50_ms)),
    ("p95", Style::Ochre, |row| Some(row.p95_ms)),
    ("p99", Style::Ink, |row| Some(row.p99_ms)),
];

/// The scenarios that the thesis's Figure 5.4 would compare with borrow-idle.
const UNAWARE: [Scenario; 6] = [
    Scenario::None,
    Scenario::Unrestrained,
    Scenario::Nice19,
    Scenario::SchedIdle,
    Scenario::CoreScheduling,
    Scenario::BorrowIdle,
];
/// The policies of Figure 5.11, and slo-budget.
const POLICIES: [Scenario; 6] = [
    Scenario::None,
    Scenario::BorrowIdle,
    Scenario::FixedBudget,
    Scenario::RefreshBudget,
    Scenario::DynamicBudget,
    Scenario::SloBudget,
];

/// Ratios within this of 1 are drawn without 0, where they could not be told apart.
const NEAR: f64 = 1.5;

pub(super) fn all(setup: &Setup, measured: &Measured) -> Vec<Figure> {
    let batches = measured.batches();
    let several = batches.len() > 1;
    let mut figures = Vec::new();
    for (index, batch) in batches.iter().enumerate() {
        let suffix = if several { format!("-{}", index + 1) } else { String::new() };
        let bench = Bench { setup, measured, batch: *batch, suffix };
        figures.extend(bench.cost());
        if measured.loads().len() > 1 {
            if index == 0 {
                figures.extend(bench.percentiles());
            }
            let known = [Scenario::None, Scenario::BorrowIdle];
            let title = "p99 and utilisation without Elfen";
            figures.extend(bench.over_load("co-running", title, &UNAWARE, &known));
            let title = "p99 and utilisation under Elfen's policies";
            figures.extend(bench.over_load("policies", title, &POLICIES, &known[..1]));
        } else {
            figures.push(bench.at_one_load());
        }
        figures.extend(bench.throughput());
    }
    figures
}

impl Bench<'_> {
    fn figure(&self, id: &str, title: &str, x: Across) -> Figure {
        let beside = self.batch.filter(|_| !self.suffix.is_empty());
        let title = beside.map_or(title.to_owned(), |batch| format!("{title}: {batch}"));
        Figure {
            id: format!("live-{id}{}", self.suffix),
            title,
            reading: String::new(),
            source: Source::Live,
            made_with: format!(
                "Measured on {}, lanes {}, Linux {}. Medians over invocations, with 95 % intervals \
                 (bootstrap).",
                self.setup.cpu, self.setup.lanes, self.setup.kernel,
            ),
            command: self.setup.command.clone(),
            x,
            panels: Vec::new(),
        }
    }

    fn value(&self, load: f64, side: &Side, value: Value) -> Option<summary::Figure> {
        self.measured.row(load, self.batch, side).and_then(value).and_then(finite)
    }

    /// A line over the loads.
    fn line(&self, name: String, style: Style, side: &Side, value: Value) -> Series {
        let loads = self.measured.loads().into_iter();
        let points = loads.filter_map(|load| Some(point(load, self.value(load, side, value)?)));
        Series::new(name, Mark::Line, style, points.collect())
    }

    /// p99 as a multiple of that alone: a row for everyone, a panel for each load.
    fn cost(&self) -> Option<Figure> {
        let sides = self.beside();
        let mut figure = self.by_side(
            "cost",
            "What the batch costs the service",
            &sides,
            (Mark::Dots, Axis::new("p99", "times that without a batch").scaled(Scale::Auto)),
            |row| row.p99_ratio,
        )?;
        let mut points = figure.panels.iter().flat_map(|panel| &panel.series[0].points);
        let near = points.all(|point| {
            let (low, high) = point.interval.unwrap_or((point.y, point.y));
            low > 1.0 / NEAR && high < NEAR
        });
        figure.panels.iter_mut().for_each(|panel| {
            panel.rules.push(Rule { y: 1.0, name: "no batch".to_owned() });
            panel.y.scale = if near { Scale::Near } else { Scale::Auto };
        });
        let worst = |scenario: Scenario| {
            let rows = self.measured.rows.iter();
            let rows =
                rows.filter(|row| row.scenario == scenario && row.batch.as_deref() == self.batch);
            let all =
                rows.filter_map(|row| Some((finite(row.p99_ratio?)?.median, percent(row.load))));
            all.max_by(|a, b| a.0.total_cmp(&b.0))
        };
        let said =
            [Scenario::BorrowIdle, Scenario::Unrestrained].into_iter().filter_map(|scenario| {
                let (times, load) = worst(scenario)?;
                Some(format!("{} {} times (at {load} load)", scenario.title(), said(times)))
            });
        let worst: Vec<String> = said.collect();
        figure.reading = format!(
            "p99 as a multiple of p99 without a batch, each against the same invocation{}{}.",
            if worst.is_empty() { "" } else { "; at worst: " },
            worst.join(", "),
        );
        Some(figure)
    }

    /// The batch's work: a row for everyone, a panel for each load.
    fn throughput(&self) -> Option<Figure> {
        let sides = self.beside();
        let rows = self.measured.rows.iter().filter(|row| row.batch.as_deref() == self.batch);
        let relative = rows.clone().any(|row| row.batch_relative.is_some());
        let unit = rows.clone().find_map(|row| row.batch_unit.clone());
        let (axis, value): (Axis, Value) = if relative {
            (Axis::new("work", "part of that with nothing beside it"), |row| row.batch_relative)
        } else {
            let unit = unit.unwrap_or_default() + " a second";
            (Axis::new("work", unit.trim_start()), |row| row.batch_per_second)
        };
        let title = "What the batch gets done";
        let mut figure = self.by_side("throughput", title, &sides, (Mark::Bars, axis), value)?;
        let highest = self.highest_load();
        let part = |side: &Side| {
            let work = self.value(highest, side, value)?.median;
            let work = if relative { percent(work) } else { said(work) };
            Some(format!("{work} {}", beside(side)))
        };
        let parts: Vec<String> = sides.iter().filter_map(part).collect();
        let of = if relative { "Of what it does with nothing beside it" } else { "Work a second" };
        figure.reading = format!("{of}, at {} % load: {}.", said(highest), parts.join(", "));
        Some(figure)
    }

    fn highest_load(&self) -> f64 {
        self.measured.loads().last().copied().unwrap_or(0.0)
    }

    /// The scenarios that shared the core.
    fn beside(&self) -> Vec<Side> {
        let sides = self.measured.sides(self.batch).into_iter();
        sides.filter(|side| side.scenario != Scenario::None).collect()
    }

    /// `None` if no side has a value.
    fn by_side(
        &self,
        id: &str,
        title: &str,
        sides: &[Side],
        (mark, axis): (Mark, Axis),
        value: Value,
    ) -> Option<Figure> {
        let names = sides.iter().map(|side| side.title()).collect();
        let x = Across::Names { quantity: "beside the service".to_owned(), names, one_scale: true };
        let mut figure = self.figure(id, title, x);
        for load in self.measured.loads() {
            let points = self.points(sides, load, value);
            if points.is_empty() {
                continue;
            }
            let mut y = axis.clone();
            y.quantity = format!("{} at {} % load", y.quantity, said(load));
            let series = Series::new("median", mark, Style::Blue, points);
            figure.panels.push(Panel { y, series: vec![series], rules: Vec::new() });
        }
        (!figure.panels.is_empty()).then_some(figure)
    }

    /// A point for each side that has the value, numbered by the sides.
    fn points(&self, sides: &[Side], load: f64, value: Value) -> Vec<Point> {
        let places = sides.iter().enumerate();
        let place = |(index, side)| Some(point(index as f64, self.value(load, side, value)?));
        places.filter_map(place).collect()
    }

    /// Figure 5.2.
    fn percentiles(&self) -> Option<Figure> {
        let mut sides = self.measured.sides(self.batch).into_iter();
        let alone = sides.find(|side| side.scenario == Scenario::None)?;
        let lines = PERCENTILES
            .map(|(name, style, value)| self.line(name.to_owned(), style, &alone, value));
        let busy = self.line("request lane".to_owned(), Style::Ink, &alone, |row| {
            Some(row.request_lane_utilisation)
        });
        let mut figure = self.figure("percentiles", "The service alone", load());
        if let (Some(low), Some(high)) = (lines[2].points.first(), lines[2].points.last()) {
            figure.reading = format!(
                "Without a batch p99 goes from {} ms at {} % load to {} ms at {} %.",
                said(low.y),
                said(low.x),
                said(high.y),
                said(high.x),
            );
        }
        let latency = Axis::new("latency", "ms").scaled(Scale::Auto);
        figure.panels = vec![
            Panel { y: latency, series: lines.to_vec(), rules: Vec::new() },
            Panel {
                y: Axis::new("request lane busy", "part of the time"),
                series: vec![busy],
                rules: Vec::new(),
            },
        ];
        Some(figure)
    }

    /// p99 and utilisation of some scenarios over the loads; nothing if only `known` ones ran.
    fn over_load(
        &self,
        id: &str,
        title: &str,
        scenarios: &[Scenario],
        known: &[Scenario],
    ) -> Option<Figure> {
        let sides = self.measured.sides(self.batch).into_iter();
        let sides: Vec<Side> = sides.filter(|side| scenarios.contains(&side.scenario)).collect();
        if sides.iter().all(|side| known.contains(&side.scenario)) {
            return None;
        }
        let lines = |value: Value| -> Vec<Series> {
            let line = |(style, side): (Style, &Side)| self.line(side.title(), style, side, value);
            styles(&sides).into_iter().zip(&sides).map(line).collect()
        };
        let mut figure = self.figure(id, title, load());
        let highest = self.highest_load();
        let p99 = |side: &Side| {
            let p99 = self.value(highest, side, |row| Some(row.p99_ms))?;
            Some(format!("{} ms {}", said(p99.median), beside(side)))
        };
        let p99: Vec<String> = sides.iter().filter_map(p99).collect();
        figure.reading = format!("At {} % load p99 is {}.", said(highest), p99.join(", "));
        let tail = Axis::new("p99 latency", "ms").scaled(Scale::Auto);
        let used = Axis::new("utilisation of the pair", "1.0 is one lane always busy");
        figure.panels = vec![
            Panel { y: tail, series: lines(|row| Some(row.p99_ms)), rules: Vec::new() },
            Panel { y: used, series: lines(|row| Some(row.utilisation)), rules: Vec::new() },
        ];
        Some(figure)
    }

    /// The same in rows, where there is one load.
    fn at_one_load(&self) -> Figure {
        let sides = self.measured.sides(self.batch);
        let names = sides.iter().map(|side| side.title()).collect();
        let x =
            Across::Names { quantity: "beside the service".to_owned(), names, one_scale: false };
        let load = self.highest_load();
        let title = format!("Latency and utilisation at {} % load", said(load));
        let mut figure = self.figure("at-one-load", &title, x);
        let series = |value: Value| {
            vec![Series::new("median", Mark::Bars, Style::Blue, self.points(&sides, load, value))]
        };
        let panel = |y: Axis, value| Panel { y, series: series(value), rules: Vec::new() };
        figure.panels = vec![
            panel(Axis::new("p50 latency", "ms"), |row| Some(row.p50_ms)),
            panel(Axis::new("p99 latency", "ms"), |row| Some(row.p99_ms)),
            panel(Axis::new("both lanes", "1.0: one always busy"), |row| Some(row.utilisation)),
        ];
        figure.reading =
            "What the service's requests take, and how much of both lanes is in use.".to_owned();
        figure
    }
}

/// A scenario's style; a second budget of a scenario takes one that no other scenario has.
fn styles(sides: &[Side]) -> Vec<Style> {
    let mut taken: Vec<Style> = Vec::new();
    for side in sides {
        let own = side.scenario.style();
        let others = sides.iter().map(|side| side.scenario.style()).collect::<Vec<_>>();
        let free = Style::ALL.into_iter().find(|s| !taken.contains(s) && !others.contains(s));
        taken.push(if taken.contains(&own) { free.unwrap_or(own) } else { own });
    }
    taken
}

fn point(x: f64, figure: summary::Figure) -> Point {
    Point { x, y: figure.median, interval: figure.ci95.map(|[low, high]| (low, high)) }
}

/// Behind a number in a sentence.
fn beside(side: &Side) -> String {
    match side.scenario {
        Scenario::None => "without a batch".to_owned(),
        Scenario::Unrestrained => side.title(),
        _ => format!("with {}", side.title()),
    }
}

fn load() -> Across {
    Across::Number(Axis::new("load", "% of what the service can serve"))
}
