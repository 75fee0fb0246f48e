//! Goal: what the picture shows is what the CSV says. Method: random figures are rendered; the
//! places of their marks are read from the SVG, turned back into values by the labels of the ticks,
//! and compared with the CSV, point by point.

use experiments::report::Report;
use experiments::report::figure::{
    Across, Axis, Figure, Mark, Panel, Point, Scale, Series, Source, Style,
};
use proptest::prelude::*;

use super::page::{Node, csv_of, render};

/// Of the axis' length: coordinates are written to a hundredth of a pixel.
const TOLERANCE: f64 = 2e-4;

/// An axis, as its labels tell it.
struct Ruler {
    log: bool,
    ends: [(f64, f64); 2],
}

impl Ruler {
    /// From ticks in the group of this class, by their `x` or their `y`.
    fn new(panel: &Node, class: &str, along: &str, log: bool) -> Self {
        let group = panel.of_class(class)[0];
        let ticks: Vec<(f64, f64)> = group
            .named("text")
            .into_iter()
            .map(|text| (coordinate(text, along), number(&text.text)))
            .collect();
        assert!(ticks.len() > 1, "{group:?}");
        // Labels at the left of the picture stand 4 below their line.
        let lowered = if along == "y" { 4.0 } else { 0.0 };
        let end = |tick: &(f64, f64)| (tick.0 - lowered, tick.1);
        Self { log, ends: [end(&ticks[0]), end(&ticks[ticks.len() - 1])] }
    }

    /// Where a value belongs.
    fn place(&self, value: f64) -> f64 {
        let scaled = |value: f64| if self.log { value.log10() } else { value };
        let [(from, low), (to, high)] = self.ends;
        from + (to - from) * (scaled(value) - scaled(low)) / (scaled(high) - scaled(low))
    }

    #[track_caller]
    fn check(&self, value: &str, drawn: f64) {
        let value: f64 = value.parse().expect("a number");
        let expected = self.place(value);
        let length = (self.ends[0].0 - self.ends[1].0).abs();
        assert!(
            (expected - drawn).abs() < length * TOLERANCE + 0.02,
            "{value}: {expected} {drawn}"
        );
    }
}

fn coordinate(node: &Node, name: &str) -> f64 {
    node.attribute(name).parse().unwrap_or_else(|_| panic!("{name} of {node:?}"))
}

fn number(label: &str) -> f64 {
    let plain = label.replace('\u{202f}', "").replace('−', "-");
    plain.parse().unwrap_or_else(|_| panic!("{label:?} at a tick"))
}

/// Where the marks of a panel stand, in the order of the file.
fn marks(panel: &Node) -> Vec<(f64, f64)> {
    let place = |mark: &Node| {
        let translate = mark.attribute("transform");
        let inner = translate.strip_prefix("translate(").and_then(|rest| rest.strip_suffix(')'));
        let (x, y) = inner.and_then(|inner| inner.split_once(' ')).expect("translate(x y)");
        (x.parse().expect("x"), y.parse().expect("y"))
    };
    panel.of_class("mark").into_iter().map(place).collect()
}

fn figure(x: Across, panels: Vec<Panel>) -> Report {
    let figure = Figure {
        id: "it".to_owned(),
        title: "It".to_owned(),
        reading: String::new(),
        source: Source::Live,
        made_with: String::new(),
        command: String::new(),
        x,
        panels,
    };
    Report { figures: vec![figure], ..Report::default() }
}

fn panel(scale: Scale, mark: Mark, points: Vec<Vec<Point>>) -> Panel {
    let series = |(index, points): (usize, Vec<Point>)| {
        Series::new(format!("series {index}"), mark, Style::ALL[index % 10], points)
    };
    let series = points.into_iter().enumerate().map(series).collect();
    Panel { y: Axis::new("y", "ms").scaled(scale), series, rules: Vec::new() }
}

fn points(
    x: impl Strategy<Value = f64>,
    y: impl Strategy<Value = f64> + Clone,
) -> impl Strategy<Value = Vec<Point>> {
    let point = (x, y.clone(), prop::option::of((y.clone(), y)));
    let point = point.prop_map(|(x, y, interval)| Point { x, y, interval });
    prop::collection::vec(point, 1..8)
}

fn of_sizes() -> impl Strategy<Value = f64> + Clone {
    prop_oneof![0.001..0.1, 1.0..100.0, 1e3..1e6]
}

proptest! {
    #[test]
    fn lines_over_numbers(
        series in prop::collection::vec(points(-50.0..2000.0, of_sizes()), 1..5),
        log in any::<bool>(),
        rings in any::<bool>(),
    ) {
        let scale = if log { Scale::Log } else { Scale::Linear };
        let mark = if rings { Mark::Rings } else { Mark::Line };
        let x = Across::Number(Axis::new("x", ""));
        let (_, page) = render(&figure(x, vec![panel(scale, mark, series)]));
        let figure = page.named("figure")[0];
        let panel = figure.of_class("panel")[0];
        let up = Ruler::new(panel, "ticks-y", "y", log);
        let right = Ruler::new(panel, "ticks-x", "x", false);
        let (csv, drawn) = (csv_of(figure), marks(panel));
        prop_assert_eq!(csv.len(), drawn.len());
        for (row, at) in csv.iter().zip(drawn) {
            right.check(&row[2], at.0);
            up.check(&row[3], at.1);
        }
        let intervals: Vec<_> = csv.iter().filter(|row| row[4] != row[5]).collect();
        let whiskers = panel.of_class("whisker");
        prop_assert_eq!(intervals.len() * 3, whiskers.len());
        for (row, whisker) in intervals.iter().zip(whiskers.chunks(3)) {
            up.check(&row[4], coordinate(whisker[0], "y1"));
            up.check(&row[5], coordinate(whisker[0], "y2"));
        }
    }

    #[test]
    fn columns_over_numbers(heights in prop::collection::vec(0.0..50.0, 1..60)) {
        let column = |(index, &y): (usize, &f64)| Point::at(index as f64 * 2.0, y);
        let columns = heights.iter().enumerate().map(column).collect();
        let x = Across::Number(Axis::new("x", ""));
        let mark = Mark::Histogram { width: 2.0 };
        let (_, page) = render(&figure(x, vec![panel(Scale::Linear, mark, vec![columns])]));
        let figure = page.named("figure")[0];
        let up = Ruler::new(figure, "ticks-y", "y", false);
        let right = Ruler::new(figure, "ticks-x", "x", false);
        let (csv, bars) = (csv_of(figure), figure.named("rect"));
        prop_assert_eq!(csv.len(), bars.len());
        for (row, bar) in csv.iter().zip(bars) {
            right.check(&row[2], coordinate(bar, "x"));
            up.check(&row[3], coordinate(bar, "y"));
            up.check("0", coordinate(bar, "y") + coordinate(bar, "height"));
        }
    }

    #[test]
    fn rows_of_names(
        values in prop::collection::vec((of_sizes(), of_sizes()), 1..6),
        log in any::<bool>(),
        one_scale in any::<bool>(),
    ) {
        let names = (0..values.len()).map(|index| format!("name {index}")).collect();
        let x = Across::Names { quantity: "who".to_owned(), names, one_scale };
        let points = |value: fn(&(f64, f64)) -> f64| {
            let point = |(index, pair)| Point::at(index as f64, value(pair));
            vec![values.iter().enumerate().map(point).collect()]
        };
        let scale = if log { Scale::Log } else { Scale::Linear };
        let dots = panel(scale, Mark::Dots, points(|pair| pair.0));
        let bars = panel(Scale::Linear, Mark::Bars, points(|pair| pair.1));
        let (_, page) = render(&figure(x, vec![dots, bars]));
        let figure = page.named("figure")[0];
        let panels = figure.of_class("panel");
        let csv = csv_of(figure);
        let (of_dots, of_bars) = csv.split_at(values.len());
        // Ten thousandths of a logarithmic axis may be without a second label.
        if !log || panels[0].of_class("ticks-x")[0].named("text").len() > 1 {
            let right = Ruler::new(panels[0], "ticks-x", "x", log);
            for (row, at) in of_dots.iter().zip(marks(panels[0])) {
                right.check(&row[3], at.0);
            }
        }
        let right = Ruler::new(panels[1], "ticks-x", "x", false);
        for (row, bar) in of_bars.iter().zip(panels[1].named("rect")) {
            right.check(&row[3], coordinate(bar, "x") + coordinate(bar, "width"));
        }
        let heights: Vec<f64> = marks(panels[0]).iter().map(|at| at.1).collect();
        prop_assert!(heights.is_sorted_by(|a, b| a < b), "{heights:?}");
    }
}
