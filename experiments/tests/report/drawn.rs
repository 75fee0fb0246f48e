//! Goal: the picture agrees with the CSV. Method: random figures are rendered. The labels of the
//! ticks show where each value of the CSV belongs. Each mark of the SVG must be there.

use experiments::report::HtmlReport;
use experiments::report::figure::{Across, Axis, Figure, Mark, Panel, Point, Scale, Series, Style};
use proptest::prelude::*;
use roxmltree::Node;

use super::page::{csv_of, named, of_class, parse, render};

/// Coordinates of marks and ticks are rounded to a tenth of a pixel.
const TOLERANCE: f64 = 4.0;

/// An axis, reconstructed from the labels of its ticks.
struct Ruler {
    log: bool,
    ends: [(f64, f64); 2],
}

impl Ruler {
    /// Reads the labels with this text anchor: `middle` for the axis below the picture, `end` for
    /// the axis to the left.
    fn new(figure: Node<'_, '_>, anchor: &str, log: bool) -> Self {
        let along = if anchor == "end" { "y" } else { "x" };
        let ticks: Vec<(f64, f64)> = named(figure, "text")
            .into_iter()
            .filter(|text| text.attribute("text-anchor") == Some(anchor))
            .filter_map(|text| Some((coordinate(text, along), number(text.text()?)?)))
            .collect();
        assert!(ticks.len() > 1, "{figure:?}");
        Self { log, ends: [ticks[0], ticks[ticks.len() - 1]] }
    }

    #[track_caller]
    fn check(&self, value: &str, drawn: f64) {
        let scaled = |value: f64| if self.log { value.log10() } else { value };
        let [(from, low), (to, high)] = self.ends;
        let value: f64 = value.parse().expect("a number");
        let part = (scaled(value) - scaled(low)) / (scaled(high) - scaled(low));
        let expected = from + (to - from) * part;
        assert!((expected - drawn).abs() < TOLERANCE, "{value}: {expected} {drawn}");
    }
}

fn coordinate(node: Node<'_, '_>, name: &str) -> f64 {
    let text = node.attribute(name).unwrap_or_else(|| panic!("no {name} of {node:?}"));
    text.parse().unwrap_or_else(|_| panic!("{name} of {node:?}"))
}

fn number(label: &str) -> Option<f64> {
    label.trim().replace('−', "-").parse().ok()
}

/// Returns the corners of a line.
fn corners(node: Node<'_, '_>) -> Vec<(f64, f64)> {
    let pairs = node.attribute("points").expect("points").split_whitespace();
    let pair = |pair: &str| {
        let (x, y) = pair.split_once(',').expect("x,y");
        (x.parse().expect("x"), y.parse().expect("y"))
    };
    pairs.map(pair).collect()
}

/// Returns the elements of a picture, without the invisible circles for the pointer.
fn drawn<'a, 'b>(figure: Node<'a, 'b>, name: &'a str) -> Vec<Node<'a, 'b>> {
    let all = named(figure, name).into_iter();
    all.filter(|node| node.attribute("class") != Some("hit")).collect()
}

/// Renders a page with one panel and one series.
fn page(x: Across, scale: Scale, mark: Mark, points: Vec<Point>) -> String {
    let series = vec![Series::new("series", mark, Style::INK, points)];
    let panel = Panel { y: Axis::new("y", "ms").scaled(scale), series, rules: Vec::new() };
    let figure = Figure { id: "it".to_owned(), x, panels: vec![panel], ..Figure::default() };
    render(&HtmlReport { figures: vec![figure], ..HtmlReport::default() })
}

fn of_sizes() -> impl Strategy<Value = f64> + Clone {
    prop_oneof![0.001..0.1, 1.0..100.0, 1e3..1e6]
}

/// How the marks of a figure are drawn, and whether its axis has names or numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Line,
    Rings,
    Columns,
    DotsOfNames,
    BarsOfNames,
}

proptest! {
    #[test]
    fn marks_stand_where_their_values_are(
        kind in prop::sample::select(vec![
            Kind::Line, Kind::Rings, Kind::Columns, Kind::DotsOfNames, Kind::BarsOfNames]),
        values in prop::collection::vec(
            (-50.0..2000.0, of_sizes(), prop::option::of((of_sizes(), of_sizes()))), 1..20),
        log in any::<bool>(),
    ) {
        let has_bars = matches!(kind, Kind::Columns | Kind::BarsOfNames);
        let has_names = matches!(kind, Kind::DotsOfNames | Kind::BarsOfNames);
        let is_log = log && !has_bars;
        let point = |(index, (x, y, interval))| {
            let x = if matches!(kind, Kind::Line | Kind::Rings) { x } else { index as f64 };
            Point { x, y, interval }
        };
        let names = (0..values.len()).map(|index| format!("name {index}")).collect();
        let across = if has_names {
            Across::Names { quantity: "which".to_owned(), names, one_scale: false }
        } else {
            Across::Number(Axis::new("x", ""))
        };
        let mark = match kind {
            Kind::Line => Mark::Line,
            Kind::Rings => Mark::Rings,
            Kind::Columns => Mark::Histogram { width: 1.0 },
            Kind::DotsOfNames => Mark::Dots,
            Kind::BarsOfNames => Mark::Bars,
        };
        let scale = if is_log { Scale::Log } else { Scale::Linear };
        let points = values.into_iter().enumerate().map(point).collect();
        let html = page(across, scale, mark, points);
        let page = parse(&html);
        let figure = named(page.root(), "figure")[0];

        // The position of each mark on the axis of values, and on the other axis.
        let right = Ruler::new(figure, "middle", is_log && has_names);
        let up = (!has_names).then(|| Ruler::new(figure, "end", is_log));
        let ends: Vec<(f64, f64)> = if has_bars {
            let end = |bar: Node<'_, '_>| {
                let right = if has_names { coordinate(bar, "width") } else { 0.0 };
                (coordinate(bar, "x") + right, coordinate(bar, "y"))
            };
            drawn(figure, "rect").into_iter().map(end).collect()
        } else {
            let place = |mark| (coordinate(mark, "cx"), coordinate(mark, "cy"));
            drawn(figure, "circle").into_iter().map(place).collect()
        };
        let (csv, hits) = (csv_of(figure), of_class(figure, "hit"));
        prop_assert_eq!((csv.len(), csv.len()), (ends.len(), hits.len()));
        let whiskers = named(figure, "polyline").into_iter();
        let mut whiskers = whiskers.filter(|line| line.attribute("stroke-width") == Some("13"));
        for (row, (x, y)) in csv.iter().zip(&ends) {
            let interval = (!row[4].is_empty()).then(|| whiskers.next().expect("its interval"));
            let interval = interval.map(corners);
            match &up {
                None => {
                    right.check(&row[3], *x);
                    interval.iter().for_each(|ends| right.check(&row[5], ends[1].0));
                }
                Some(up) => {
                    right.check(&row[2], *x);
                    up.check(&row[3], *y);
                    interval.iter().for_each(|ends| up.check(&row[4], ends[0].1));
                    interval.iter().for_each(|ends| up.check(&row[5], ends[1].1));
                }
            }
        }
        prop_assert!(whiskers.next().is_none());
        prop_assert!(!has_names || ends.is_sorted_by(|a, b| a.1 < b.1), "{:?}", ends);
        let feet = drawn(figure, "rect").into_iter().filter(|_| !has_names);
        for bar in feet {
            let foot = coordinate(bar, "y") + coordinate(bar, "height");
            up.as_ref().expect("columns stand over numbers").check("0", foot);
        }
    }
}
