//! Goal: whatever the data, a page can be parsed, and loads or runs nothing. Method: figures and
//! tables with any text and any number are rendered and parsed. NaN and infinities are refused.

use elfen_console::page::Table;
use experiments::report::HtmlReport;
use experiments::report::figure::{
    Across, Axis, Figure, Mark, Panel, Point, Rule, Scale, Series, Source, Style,
};
use proptest::prelude::*;
use roxmltree::Node;

use super::page::{csv_of, named, of_class, parse, render};

const XMLNS: [&str; 2] = ["http://www.w3.org/1999/xhtml", "http://www.w3.org/2000/svg"];
/// Hostile names.
const NASTY: [&str; 8] = [
    "<script>alert(1)</script>",
    "\"/><img src=x onerror=alert(1)>",
    "a&amp;b &lt; ]]> -->",
    "' onload='alert(1)",
    "comma, \"quote\"\r\nnew line\ttab",
    "\u{0}\u{7f}\u{1b}[31m\u{ffff}\u{202e}",
    "漢字 العربية 🧝",
    "",
];

fn words() -> impl Strategy<Value = String> {
    prop_oneof![
        prop::sample::select(&NASTY[..]).prop_map(str::to_owned),
        any::<String>(),
        "[a-z ]{0,600}",
    ]
}

fn value() -> impl Strategy<Value = f64> {
    prop_oneof![-1e15..1e15, -1.0..1.0, Just(0.0), Just(1e15), Just(1e-300), 1.0..1000.0]
}

fn panel() -> impl Strategy<Value = Panel> {
    let mark = prop_oneof![
        Just(Mark::Line),
        Just(Mark::Curve),
        Just(Mark::Dots),
        Just(Mark::Rings),
        Just(Mark::Bars),
        (1e-9..1e15).prop_map(|width| Mark::Histogram { width }),
    ];
    let scale = prop::sample::select(vec![Scale::Linear, Scale::Log, Scale::Auto]);
    let point = (value(), value(), prop::option::of((value(), value())));
    let point = point.prop_map(|(x, y, interval)| Point { x, y, interval });
    let style = prop::sample::select(&Style::ALL[..]);
    let series = (words(), mark, style, prop::collection::vec(point, 0..6))
        .prop_map(|(name, mark, style, points)| Series::new(name, mark, style, points));
    let rule = (value(), words()).prop_map(|(y, name)| Rule { y, name });
    let some = (prop::collection::vec(series, 0..12), prop::collection::vec(rule, 0..2));
    (words(), words(), scale, some).prop_map(|(quantity, unit, scale, (series, rules))| Panel {
        y: Axis { quantity, unit, scale },
        series,
        rules,
    })
}

fn report() -> impl Strategy<Value = HtmlReport> {
    let names = prop::option::of(prop::collection::vec(words(), 1..5));
    let texts = prop::array::uniform5(words());
    let figure = (texts, names, prop::collection::vec(panel(), 0..5));
    let figure =
        figure.prop_map(|([title, reading, made_with, command, axis], names, mut panels)| {
            let count = names.as_ref().map_or(0, Vec::len);
            let x = match names {
                Some(names) => Across::Names { quantity: axis, names, one_scale: true },
                None => Across::Number(Axis::new(axis, "")),
            };
            if count > 0 {
                let points = panels.iter_mut().flat_map(|panel| &mut panel.series);
                for (index, point) in points.flat_map(|series| &mut series.points).enumerate() {
                    point.x = (index % count) as f64;
                }
            }
            let (id, source) = ("figure".to_owned(), Source::Simulated);
            Figure { id, title, reading, source, made_with, command, x, panels }
        });
    let cells = prop::collection::vec(prop::collection::vec(words(), 0..4), 0..4);
    (words(), words(), prop::collection::vec(words(), 0..3), cells, figure).prop_map(
        |(title, command, notes, mut rows, figure)| {
            let head = rows.pop().unwrap_or_default();
            let table = Table { title: title.clone(), head, rows, note: command.clone() };
            let appendix = vec![table.clone()];
            HtmlReport {
                title,
                command,
                notes,
                tables: vec![table],
                figures: vec![figure],
                appendix,
            }
        },
    )
}

/// Returns a description of a node that a browser would follow or run.
fn forbidden(node: Node<'_, '_>) -> Option<String> {
    let (name, namespace) = (node.tag_name().name(), node.tag_name().namespace());
    let bad_element = ["script", "img", "iframe", "object", "embed"].contains(&name);
    let is_loose = node.is_element() && !namespace.is_some_and(|one| XMLNS.contains(&one));
    let bad = |key: &str, value: &str| match key {
        "href" => !(value.starts_with('#') || value.starts_with("data:")),
        key => key.starts_with("on") || key == "src",
    };
    let is_bad = bad_element || is_loose;
    let has_bad = node.attributes().any(|one| bad(one.name(), one.value()));
    (is_bad || has_bad).then(|| format!("{node:?}"))
}

/// Returns a coordinate that no browser can draw.
fn undrawable(node: Node<'_, '_>) -> Option<String> {
    let bad = |key: &str, value: &str| match key {
        "x" | "y" | "cx" | "cy" | "points" => value.contains("NaN") || value.contains("inf"),
        "width" | "height" => value.starts_with('-'),
        _ => false,
    };
    node.attributes().find(|one| bad(one.name(), one.value())).map(|one| format!("{one:?}"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn any_text_and_any_number(report in report()) {
        let html = render(&report);
        let page = parse(&html);
        for node in page.root().descendants() {
            prop_assert_eq!(forbidden(node), None);
            prop_assert_eq!(undrawable(node), None);
        }
        let figure = named(page.root(), "figure")[0];
        let drawn = of_class(figure, "picture")[0];
        let points: usize = report.figures[0]
            .panels
            .iter()
            .flat_map(|panel| &panel.series)
            .map(|series| series.points.len())
            .sum();
        prop_assert_eq!(csv_of(figure).len(), points);
        prop_assert_eq!(of_class(drawn, "hit").len(), points);
        prop_assert_eq!(render(&report), html.clone());
    }

    /// NaN, an infinity or too large a number is refused, wherever in the report it occurs.
    #[test]
    fn what_is_no_number_is_refused(
        bad in prop::sample::select(vec![f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 2e15]),
        place in 0..6,
    ) {
        let mut point = Point { x: 1.0, y: 1.0, interval: Some((1.0, 1.0)) };
        let (mut width, mut rule) = (1.0, 1.0);
        match place {
            0 => point.x = bad,
            1 => point.y = bad,
            2 => point.interval = Some((bad, 1.0)),
            3 => point.interval = Some((1.0, bad)),
            4 => width = bad,
            _ => rule = bad,
        }
        let series = Series::new("s", Mark::Histogram { width }, Style::INK, vec![point]);
        let rules = vec![Rule { y: rule, name: "s".to_owned() }];
        let panel = Panel { y: Axis::default(), series: vec![series], rules };
        let report = of(Across::default(), panel);
        prop_assert!(report.html().is_err());
    }
}

fn of(x: Across, panel: Panel) -> HtmlReport {
    let figure = Figure { id: "f".to_owned(), x, panels: vec![panel], ..Figure::default() };
    HtmlReport { figures: vec![figure], ..HtmlReport::default() }
}

/// Goal: a point at a name that does not exist is refused. Method: one name, and points next to it.
#[test]
fn names_that_do_not_exist() {
    for (x, fine) in [(0.0, true), (1.0, false), (0.5, false), (-1.0, false)] {
        let series = Series::new("s", Mark::Bars, Style::INK, vec![Point::at(x, 1.0)]);
        let panel = Panel { y: Axis::default(), series: vec![series], rules: Vec::new() };
        let names = vec!["only".to_owned()];
        let across = Across::Names { quantity: String::new(), names, one_scale: false };
        assert_eq!(of(across, panel).check().is_ok(), fine, "{x}");
    }
}

/// Goal: the styles have the colours of the light theme, and no two styles have the same dashes.
/// Method: all pairs.
#[test]
fn dashes_differ() {
    let css = include_str!("../../../elfen-console/src/page.css");
    for (index, one) in Style::ALL.into_iter().enumerate() {
        let property = format!("--c-{}: #{:06x};", one.name, one.rgb);
        let light = css.split("@media").next().expect("a first theme");
        assert!(light.contains(&property), "{property}");
        for other in &Style::ALL[index + 1..] {
            assert!(one.dash != other.dash, "{one:?} {other:?}");
        }
    }
}
