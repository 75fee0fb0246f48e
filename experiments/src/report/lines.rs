//! Figures over numbers: panels above each other, one horizontal axis for all.

use super::figure::{Axis, Figure, Mark, Panel, Point, Rule, Series};
use super::scale::{Scaled, short};
use super::svg::{self, WIDTH, px};

const LEFT: f64 = 62.0;
/// Room for the names at the lines' ends.
const NAMES: f64 = 158.0;
const NO_NAMES: f64 = 24.0;
const HEADING: f64 = 26.0;
const BELOW: f64 = 14.0;
const BOTTOM: f64 = 44.0;
/// The first panel is the one that matters most.
const FIRST_HEIGHT: f64 = 216.0;
const NEXT_HEIGHT: f64 = 132.0;
/// Between the intervals of two series.
const ASIDE: f64 = 3.0;
/// Lines of text are this far apart.
const TEXT: f64 = 15.0;

/// A panel's place and its axes.
struct Frame {
    left: f64,
    top: f64,
    width: f64,
    height: f64,
    x: Scaled,
    y: Scaled,
}

impl Frame {
    fn at(&self, x: f64, y: f64) -> (f64, f64) {
        (self.left + self.width * self.x.place(x), self.y(y))
    }

    fn y(&self, value: f64) -> f64 {
        self.top + self.height * (1.0 - self.y.place(value))
    }

    fn bottom(&self) -> f64 {
        self.top + self.height
    }

    fn right(&self) -> f64 {
        self.left + self.width
    }
}

/// The height of the picture, and what is in it.
pub(super) fn draw(figure: &Figure, across: &Axis) -> (f64, String) {
    let named = figure.panels.iter().any(|panel| named_lines(panel).count() > 1);
    let width = WIDTH - LEFT - if named { NAMES } else { NO_NAMES };
    let (mut top, mut body) = (0.0, String::new());
    let x = Scaled::over(all_x(figure).into_iter(), across.scale, 9.0);
    for (index, panel) in figure.panels.iter().enumerate() {
        let height = if index == 0 { FIRST_HEIGHT } else { NEXT_HEIGHT };
        let y =
            Scaled::over(svg::extent(&panel.series, &panel.rules), panel.y.scale, height / 34.0);
        let frame = Frame { left: LEFT, top: top + HEADING, width, height, x: x.clone(), y };
        body += "<g class=\"panel\">\n";
        body += &svg::text("axis-title", (4.0, top + 16.0), &panel.y.label());
        body += &axes(&frame, index + 1 == figure.panels.len());
        body += &rules(&frame, panel);
        let middle = (panel.series.len().max(1) - 1) as f64 / 2.0;
        for (index, series) in panel.series.iter().enumerate() {
            let aside = (index as f64 - middle) * ASIDE;
            body += &svg::coloured(series.style, &drawn(&frame, series, [across, &panel.y], aside));
        }
        body += &names(&frame, panel);
        body += "</g>\n";
        top = frame.bottom() + BELOW;
    }
    let middle = LEFT + width / 2.0;
    body += &svg::text("axis-title middle", (middle, top + BOTTOM - 18.0), &across.label());
    (top + BOTTOM - 8.0, body)
}

fn all_x(figure: &Figure) -> Vec<f64> {
    let mut all = Vec::new();
    for series in figure.panels.iter().flat_map(|panel| &panel.series) {
        let width = if let Mark::Histogram { width } = series.mark { width } else { 0.0 };
        all.extend(series.points.iter().flat_map(|point| [point.x, point.x + width]));
    }
    all
}

/// Grid, ticks and, for the last panel, the labels of the shared axis.
fn axes(frame: &Frame, last: bool) -> String {
    let mut axes = String::from("<g class=\"ticks-y\">\n");
    for (tick, label) in frame.y.ticks() {
        let y = frame.y(tick);
        axes += &svg::line("grid", (frame.left, y), (frame.right(), y));
        axes += &svg::text("tick end", (frame.left - 8.0, y + 4.0), &label);
    }
    axes += "</g>\n<g class=\"ticks-x\">\n";
    for (tick, label) in frame.x.ticks() {
        let x = frame.left + frame.width * frame.x.place(tick);
        axes += &svg::line("tick-line", (x, frame.bottom()), (x, frame.bottom() + 4.0));
        if last {
            axes += &svg::text("tick middle", (x, frame.bottom() + 18.0), &label);
        }
    }
    let base = frame.bottom();
    axes + "</g>\n" + &svg::line("base", (frame.left, base), (frame.right(), base))
}

fn rules(frame: &Frame, panel: &Panel) -> String {
    let rule = |rule: &Rule| {
        let y = frame.y(rule.y);
        // Above the line, unless the panel's title is there.
        let name_y = if y - frame.top < TEXT { y + TEXT } else { y - 5.0 };
        svg::line("rule", (frame.left, y), (frame.right(), y))
            + &svg::fitted("rule-name", (frame.left + 6.0, name_y), &rule.name, frame.width)
    };
    panel.rules.iter().map(rule).collect()
}

/// `aside` keeps the intervals of several series at one place apart.
fn drawn(frame: &Frame, series: &Series, [across, up]: [&Axis; 2], aside: f64) -> String {
    let mut parts = String::new();
    if matches!(series.mark, Mark::Line | Mark::Curve) && series.points.len() > 1 {
        parts += &stroke(frame, series);
    }
    for point in &series.points {
        let at = frame.at(point.x, point.y);
        let unit = if across.unit.is_empty() { &across.quantity } else { &across.unit };
        let place = format!("{} {unit}", short(point.x));
        let numbers = svg::numbers(series, point, &place, &up.unit);
        if let Mark::Histogram { width } = series.mark {
            let mut right = frame.at(point.x + width, frame.y.base());
            if right.0 - at.0 > 3.0 {
                right.0 -= 0.8;
            }
            parts += &svg::bar(at, right, &numbers);
            continue;
        }
        if let Some((low, high)) = point.interval {
            let x = at.0 + aside;
            parts += &svg::whisker((x, frame.y(low)), (x, frame.y(high)));
        }
        parts += &svg::marker(series, at, &numbers);
    }
    parts
}

fn stroke(frame: &Frame, series: &Series) -> String {
    let corner = |(index, point): (usize, &Point)| {
        let (x, y) = frame.at(point.x, point.y);
        format!("{}{} {}", if index == 0 { "M" } else { "L" }, px(x), px(y))
    };
    let path: String = series.points.iter().enumerate().map(corner).collect();
    let dash = series.style.dash();
    format!("<path class=\"stroke\" stroke-dasharray=\"{dash}\" d=\"{path}\"/>\n")
}

fn named_lines(panel: &Panel) -> impl Iterator<Item = (&Series, &Point)> {
    let lines =
        panel.series.iter().filter(|series| matches!(series.mark, Mark::Line | Mark::Curve));
    lines.filter_map(|series| Some((series, series.points.last()?)))
}

/// The names at the ends of the lines, moved apart where they would meet.
fn names(frame: &Frame, panel: &Panel) -> String {
    let mut ends: Vec<(&Series, (f64, f64))> =
        named_lines(panel).map(|(series, point)| (series, frame.at(point.x, point.y))).collect();
    if ends.len() < 2 {
        return String::new();
    }
    ends.sort_by(|a, b| a.1.1.total_cmp(&b.1.1));
    let wanted: Vec<f64> = ends.iter().map(|end| end.1.1).collect();
    let places = apart(&wanted, frame.top + 4.0, frame.bottom() - 2.0);
    let x = frame.right() + 12.0;
    let mut names = String::new();
    for ((series, end), y) in ends.into_iter().zip(places) {
        let leader = svg::line("leader", (end.0 + 6.0, end.1), (x - 2.0, y));
        let mark = format!(
            "<path class=\"dot\" transform=\"translate({} {})\" d=\"{}\"/>\n",
            px(x + 5.0),
            px(y),
            series.style.marker()
        );
        let name = svg::fitted("name", (x + 14.0, y + 4.0), &series.name, NAMES - 28.0);
        names += &svg::coloured(series.style, &(leader + &mark + &name));
    }
    names
}

/// Places in the order of `wanted`, near them, within the two ends and a line of text apart if
/// there is room.
fn apart(wanted: &[f64], top: f64, bottom: f64) -> Vec<f64> {
    let between = (wanted.len().max(2) - 1) as f64;
    let gap = TEXT.min((bottom - top) / between);
    let mut places: Vec<f64> = Vec::with_capacity(wanted.len());
    for &want in wanted {
        let free = places.last().map_or(top, |last| last + gap);
        places.push(want.max(free));
    }
    let mut limit = bottom;
    for place in places.iter_mut().rev() {
        *place = place.min(limit);
        limit = *place - gap;
    }
    places
}
