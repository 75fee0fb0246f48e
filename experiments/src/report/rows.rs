//! Figures over names: a row for each, and panels side by side, so that long names stay readable.

use super::figure::{Figure, Mark, Panel, Scale, Series};
use super::scale::{Scaled, short};
use super::svg::{self, WIDTH};

/// Room for the names of the rows.
const NAMES: f64 = 168.0;
const GAP: f64 = 22.0;
/// Room for the number behind a bar.
const NUMBER: f64 = 54.0;
/// A line for what is measured and one for its unit.
const HEADING: f64 = 46.0;
const FOOT: f64 = 40.0;
/// The height of a bar with its share of the space between two.
const BAR: f64 = 18.0;
const BETWEEN: f64 = 10.0;
/// Panels beyond this go below.
const BESIDE: usize = 3;

/// The height of the picture, and what is in it.
pub(super) fn draw(figure: &Figure, names: &[String], one_scale: bool) -> (f64, String) {
    let (mut top, mut body) = (0.0, String::new());
    for panels in figure.panels.chunks(BESIDE) {
        let most = panels.iter().map(|panel| panel.series.len()).max().unwrap_or(0).max(1);
        let row = BAR * most as f64 + BETWEEN;
        let height = row * names.len() as f64;
        for (index, name) in names.iter().enumerate() {
            let y = top + HEADING + row * (index as f64 + 0.5) + 4.0;
            body += &svg::fitted("row-name end", (NAMES - 10.0, y), name, NAMES - 12.0);
        }
        let width = (WIDTH - NAMES) / panels.len() as f64 - GAP;
        for (index, panel) in panels.iter().enumerate() {
            let left = NAMES + (width + GAP) * index as f64;
            let alike = figure.panels.iter().filter(|other| one_scale || *other == panel);
            let values = alike.flat_map(|panel| svg::extent(&panel.series, &panel.rules));
            let x = Scaled::over(values, scale_of(panel), ((width - NUMBER) / 60.0).max(2.0));
            let frame = Frame { left, width: width - NUMBER, top: top + HEADING, height, row, x };
            body += &format!("<g class=\"panel\">\n{}</g>\n", frame.panel(panel, names));
        }
        top += HEADING + height + FOOT;
    }
    (top, body)
}

/// A bar without its foot shows nothing.
fn scale_of(panel: &Panel) -> Scale {
    let bars = panel.series.iter().any(|series| series.mark == Mark::Bars);
    if bars { Scale::Linear } else { panel.y.scale }
}

struct Frame {
    left: f64,
    width: f64,
    top: f64,
    height: f64,
    row: f64,
    x: Scaled,
}

impl Frame {
    fn x(&self, value: f64) -> f64 {
        self.left + self.width * self.x.place(value)
    }

    fn panel(&self, panel: &Panel, names: &[String]) -> String {
        let bottom = self.top + self.height;
        let room = self.width + NUMBER;
        let (title, unit) = ((self.left, self.top - 27.0), (self.left, self.top - 11.0));
        let mut parts = svg::fitted("axis-title", title, &panel.y.quantity, room);
        parts += &svg::fitted("tick", unit, &panel.y.unit, room);
        parts += "<g class=\"ticks-x\">\n";
        for (tick, label) in self.x.ticks() {
            let x = self.x(tick);
            parts += &svg::line("grid", (x, self.top), (x, bottom));
            parts += &svg::text("tick middle", (x, bottom + 16.0), &label);
        }
        parts += "</g>\n";
        for rule in &panel.rules {
            let x = self.x(rule.y);
            parts += &svg::line("rule", (x, self.top), (x, bottom));
            parts += &svg::text("rule-name middle", (x, bottom + 32.0), &rule.name);
        }
        let base = self.x(self.x.base());
        parts += &svg::line("base", (base, self.top), (base, bottom));
        for series in &panel.series {
            parts += &svg::coloured(series.style, &self.series(series, panel, names));
        }
        parts
    }

    /// The height of a series' mark in the row of a name: those that have one share the row.
    fn y(&self, series: &Series, panel: &Panel, row: f64) -> f64 {
        let has = |other: &&Series| other.points.iter().any(|point| point.x == row);
        let beside = panel.series.iter().filter(has).count();
        let before = panel.series.iter().filter(has).take_while(|other| *other != series).count();
        let offset = BAR * (before as f64 - (beside as f64 - 1.0) / 2.0);
        self.top + self.row * (row + 0.5) + offset
    }

    fn series(&self, series: &Series, panel: &Panel, names: &[String]) -> String {
        let mut parts = String::new();
        for point in &series.points {
            let (x, y) = (self.x(point.y), self.y(series, panel, point.x));
            let name = names.iter().enumerate().find(|(index, _)| *index as f64 == point.x);
            let name = name.map_or("", |(_, name)| name.as_str());
            let numbers = svg::numbers(series, point, name, &panel.y.unit);
            if series.mark == Mark::Bars {
                let base = self.x(self.x.base());
                parts += &svg::bar((base, y - BAR * 0.38), (x, y + BAR * 0.38), &numbers);
            }
            let mut end = x;
            if let Some((low, high)) = point.interval {
                parts += &svg::whisker((self.x(low), y), (self.x(high), y));
                end = end.max(self.x(high));
            }
            parts += &svg::marker(series, (x, y), &numbers);
            parts += &svg::text("number", (end + 8.0, y + 4.0), &short(point.y));
        }
        parts
    }
}
