//! Draws the picture of a figure with plotters.
//!
//! Plotters counts in whole pixels, so a pixel of the page is ten of plotters' pixels. The picture
//! has the colours of the light theme. [`style`] maps them to the colours of the page, and gives
//! each line its dashes. So one picture serves the light theme, the dark theme and paper. Browsers
//! show the numbers of a mark when the pointer is on it.

use std::error::Error;
use std::ops::Range;

use elfen_console::page::escape;
use plotters::coord::Shift;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::figure::{Across, Axis, Figure, Mark, Panel, Point, Scale, Series, Style};
use super::text::{clip, short};

/// Plotters' pixels for each pixel of the page.
pub(super) const PX: i32 = 10;
/// All figures have the same width, so that their text has the same size.
const WIDTH: i32 = 760 * PX;
pub(super) const FONT: i32 = 12 * PX;
/// The width of the labels to the left of a panel over numbers, and of the names to the left of
/// rows.
const LABELS: i32 = 62 * PX;
const NAMES: i32 = 168 * PX;
/// The width of the number at the end of a bar.
const NUMBER: i32 = 76 * PX;
/// The height of a panel's title, and of the labels below the panel.
const TITLE: i32 = 26 * PX;
const FOOT: i32 = 44 * PX;
/// The height of a row: this for each series, and some space.
const BAR: i32 = 18 * PX;
const BETWEEN: i32 = 10 * PX;
const DOT: i32 = 4 * PX;

/// The widths of lines. The style sheet recognizes lines and rules by their width.
const STROKE: u32 = 19;
const WHISKER: u32 = 13;
const RULE: u32 = 11;

/// The colours of everything but series, with the page's names for them.
const SOFT: (u32, &str) = (0x5f5e5a, "soft");
const LINE: (u32, &str) = (0xe1e0da, "line");
const BASE: (u32, &str) = (0xa3a29b, "base");
const TEXT: (u32, &str) = (0x2b2b2a, "ink");

pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
pub(super) type Drawn = Result<(), Box<dyn Error>>;

/// Returns the style sheet that maps the colours of a picture to those of the page, and gives lines
/// their dashes.
pub(super) fn style() -> String {
    let mut style = format!("[stroke-width=\"{RULE}\"] {{ stroke-dasharray: 30 30; }}\n");
    for Style { rgb, dash, .. } in Style::ALL {
        let line = format!("[stroke=\"#{rgb:06X}\"][stroke-width=\"{STROKE}\"]");
        style += &format!("{line} {{ stroke-dasharray: {dash}; }}\n");
    }
    let series = Style::ALL.map(|style| (style.rgb, format!("c-{}", style.name)));
    let others = [SOFT, LINE, BASE, TEXT].map(|(rgb, name)| (rgb, name.to_owned()));
    for (rgb, name) in series.into_iter().chain(others) {
        style += &format!("svg [stroke=\"#{rgb:06X}\"] {{ stroke: var(--{name}); }}\n");
        style += &format!("svg [fill=\"#{rgb:06X}\"] {{ fill: var(--{name}); }}\n");
    }
    style
}

pub(super) fn colour(rgb: u32) -> RGBColor {
    let [_, red, green, blue] = rgb.to_be_bytes();
    RGBColor(red, green, blue)
}

pub(super) fn text_style(rgb: u32, h_pos: HPos) -> TextStyle<'static> {
    // The back end divides the size by this factor.
    let style = ("sans-serif", f64::from(FONT) * 1.24).with_color(colour(rgb));
    style.into_text_style(&(0, 0)).pos(Pos::new(h_pos, VPos::Center))
}

/// Converts a number of things on a page.
pub(super) fn count(of: usize) -> i32 {
    i32::try_from(of.min(10_000)).unwrap_or(0)
}

/// Shortens a text so that it fits into a width.
pub(super) fn fit(text: &str, width: i32) -> String {
    const CHARACTER: i32 = 64;
    clip(text, usize::try_from(width / CHARACTER).unwrap_or(0))
}

/// An axis of numbers or of names.
struct Ruler {
    /// The range of the axis; on a logarithmic axis, the range of the logarithms.
    places: RangedCoordf64,
    log: bool,
    /// `None` lets plotters choose the ticks.
    ticks: Option<Vec<f64>>,
}

impl Ruler {
    /// On a logarithmic axis, smaller values say nothing about a measurement.
    const LOG_LEAST: f64 = 1e-9;
    /// [`Scale::Auto`] is logarithmic if the values differ by more than this factor.
    const LOG_FROM: f64 = 8.0;

    /// Creates an axis with a row for each name, the first name at the top.
    fn names(names: usize) -> Self {
        let ticks = (0..names).map(|index| index as f64).collect();
        let places = (names as f64 - 0.5..-0.5).into();
        Self { places, log: false, ticks: Some(ticks) }
    }

    /// Creates an axis for these values. A logarithmic axis has at most `ticks` ticks.
    fn over(values: impl Iterator<Item = f64> + Clone, scale: Scale, ticks: usize) -> Self {
        let low = values.clone().fold(f64::INFINITY, f64::min);
        let high = values.fold(f64::NEG_INFINITY, f64::max);
        let (low, high) = if low <= high { (low, high) } else { (0.0, 1.0) };
        let wants_log = match scale {
            Scale::Log => true,
            Scale::Auto => high > low * Self::LOG_FROM,
            Scale::Linear => false,
        };
        if wants_log && low >= Self::LOG_LEAST {
            return Self::logarithmic(low, high, ticks);
        }
        let (low, high) = (low.min(0.0), high.max(0.0));
        let room = (high - low) * 0.04;
        let from = if low == 0.0 { 0.0 } else { low - room };
        let to = if high == 0.0 { 0.0 } else { high + room };
        let to = if to - from < Self::LOG_LEAST { from + 1.0 } else { to };
        Self { places: (from..to).into(), log: false, ticks: None }
    }

    /// Creates a logarithmic axis. Both ends are 1, 2 or 5 times a power of ten.
    fn logarithmic(low: f64, high: f64, most: usize) -> Self {
        let decade = |power: i32| [1.0, 2.0, 5.0].map(|one| one * 10_f64.powi(power));
        let steps: Vec<f64> = (-10..=16).flat_map(decade).collect();
        let first = steps.iter().rposition(|step| *step <= low).unwrap_or(0);
        let last =
            steps.iter().position(|step| *step >= high).unwrap_or(steps.len() - 1).max(first + 1);
        let count = last - first + 1;
        // Label every step, every power of ten, or every second, third and so on of the powers.
        let every = if count <= most { 1 } else { 3 * count.div_ceil(3 * most) };
        let ticks = (first..=last).filter(|index| index % every == 0).map(|index| steps[index]);
        Self {
            places: (steps[first].ln()..steps[last].ln()).into(),
            log: true,
            ticks: Some(ticks.collect()),
        }
    }
}

impl Ranged for Ruler {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let place = if self.log { value.ln() } else { *value };
        // Plotters uses i32 coordinates. A place far outside of the axis would overflow.
        let Range { start, end } = self.places.range();
        self.places.map(&place.clamp(start.min(end), start.max(end)), limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        match &self.ticks {
            _ if hint.max_num_points() == 0 => Vec::new(),
            Some(ticks) => ticks.clone(),
            None => self.places.key_points(hint),
        }
    }

    fn range(&self) -> Range<f64> {
        self.places.range()
    }
}

impl ValueFormatter<f64> for Ruler {
    fn format(value: &f64) -> String {
        short(*value)
    }
}

/// Draws a figure: its panels one above the other.
pub(super) fn picture(figure: &Figure) -> String {
    let heights: Vec<i32> = (0..figure.panels.len()).map(|index| height(figure, index)).collect();
    svg((WIDTH, heights.iter().sum::<i32>().max(PX)), |root, marks| {
        let mut rest = root.clone();
        for (index, height) in heights.into_iter().enumerate() {
            let (area, below) = rest.split_vertically(height);
            draw_panel(&area, figure, index, marks)?;
            rest = below;
        }
        Ok(())
    })
}

/// Returns the height of a panel. Over numbers, the first panel is the most important one.
fn height(figure: &Figure, index: usize) -> i32 {
    let plot = match &figure.x {
        Across::Names { names, .. } => {
            (BAR * count(figure.panels[index].series.len().max(1)) + BETWEEN) * count(names.len())
        }
        Across::Number(_) if index == 0 => 216 * PX,
        Across::Number(_) => 132 * PX,
    };
    TITLE + plot + foot(figure, index)
}

/// Returns the height of the labels below a panel.
fn foot(figure: &Figure, index: usize) -> i32 {
    if has_labels(figure, index) { FOOT } else { FOOT / 3 }
}

/// Panels over the same numbers have labels only below the last panel.
fn has_labels(figure: &Figure, index: usize) -> bool {
    matches!(figure.x, Across::Names { .. }) || index + 1 == figure.panels.len()
}

/// Draws a series for the legend.
pub(super) fn key(series: &Series) -> String {
    let middle = (18 * PX, 7 * PX);
    svg((36 * PX, 14 * PX), |root, _| {
        let color = colour(series.style.rgb);
        match series.mark {
            Mark::Bars | Mark::Histogram { .. } => {
                let corners = [(10 * PX, PX), (26 * PX, 13 * PX)];
                root.draw(&Rectangle::new(corners, color.filled()))?;
            }
            Mark::Line | Mark::Curve => {
                let ends = [(PX, middle.1), (35 * PX, middle.1)];
                root.draw(&PathElement::new(ends, color.stroke_width(STROKE)))?;
            }
            Mark::Dots | Mark::Rings => {}
        }
        marker(series, middle).map_or(Ok(()), |marker| Ok(root.draw(&marker)?))
    })
}

/// Renders an `svg` element of this size. Adds the texts that a browser shows for marks.
pub(super) fn svg(
    (width, height): (i32, i32),
    draw: impl FnOnce(&Area<'_>, &mut String) -> Drawn,
) -> String {
    let (mut svg, mut marks) = (String::new(), String::new());
    let size = (width.unsigned_abs(), height.unsigned_abs());
    let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
    draw(&root, &mut marks).expect("a string takes every drawing");
    drop(root);
    svg.replace("</svg>", &(marks + "</svg>"))
}

/// Creates the axis of values of a panel.
fn values(figure: &Figure, panel: &Panel, ticks: usize) -> Ruler {
    let is_alike = matches!(figure.x, Across::Names { one_scale: true, .. });
    let panels = figure.panels.iter().filter(|other| is_alike || *other == panel);
    let values = panels.flat_map(|panel| {
        let points = panel.series.iter().flat_map(|series| &series.points);
        points.flat_map(Point::values).chain(panel.rules.iter().map(|rule| rule.y))
    });
    // The length of a bar is meaningful only if its axis is linear and begins at 0.
    let has_bars = panel.series.iter().any(|series| series.mark == Mark::Bars);
    Ruler::over(values, if has_bars { Scale::Linear } else { panel.y.scale }, ticks)
}

/// Creates the horizontal axis of numbers.
fn places(figure: &Figure, axis: &Axis, ticks: usize) -> Ruler {
    let ends = |series: &Series| {
        let width = if let Mark::Histogram { width } = series.mark { width } else { 0.0 };
        series.points.iter().flat_map(|point| [point.x, point.x + width]).collect::<Vec<_>>()
    };
    let all: Vec<f64> = figure.series().flat_map(ends).collect();
    Ruler::over(all.into_iter(), axis.scale, ticks)
}

fn draw_panel(area: &Area<'_>, figure: &Figure, index: usize, marks: &mut String) -> Drawn {
    const TICKS: usize = 12;
    let panel = &figure.panels[index];
    let (is_names, left, right, x, y) = match &figure.x {
        Across::Names { names, .. } => {
            (true, NAMES, NUMBER, values(figure, panel, TICKS), Ruler::names(names.len()))
        }
        Across::Number(axis) => {
            (false, LABELS, 24 * PX, places(figure, axis, TICKS), values(figure, panel, 6))
        }
    };
    let title = fit(&panel.y.label(), WIDTH - left);
    area.draw_text(&title, &text_style(TEXT.0, HPos::Left), (left, TITLE / 2))?;
    let mut builder = ChartBuilder::on(area);
    builder.margin_top(TITLE).margin_right(right).y_label_area_size(left);
    builder.x_label_area_size(foot(figure, index));
    let mut chart = builder.build_cartesian_2d(x, y)?;

    let beside = |along: &f64| match &figure.x {
        Across::Names { .. } => fit(&figure.x.place(*along), NAMES - 12 * PX),
        Across::Number(_) => short(*along),
    };
    let below = |value: &f64| if has_labels(figure, index) { short(*value) } else { String::new() };
    let mut mesh = chart.configure_mesh();
    mesh.max_light_lines(0).bold_line_style(colour(LINE.0).stroke_width(8));
    mesh.axis_style(colour(BASE.0).stroke_width(10)).set_all_tick_mark_size(4 * PX);
    mesh.x_labels(TICKS).x_label_formatter(&below);
    mesh.y_labels(if index == 0 { 7 } else { 5 }).y_label_formatter(&beside);
    mesh.label_style(text_style(SOFT.0, HPos::Center));
    if is_names {
        mesh.disable_y_mesh().y_label_style(text_style(TEXT.0, HPos::Right));
    } else {
        mesh.disable_x_mesh();
    }
    if has_labels(figure, index) && !is_names {
        mesh.x_desc(fit(&figure.x.label(), WIDTH - LABELS));
    }
    mesh.draw()?;
    drop(mesh);

    // Over names, values go to the right, and places go down.
    let at = |along: f64, value: f64| if is_names { (value, along) } else { (along, value) };
    let soft = |h_pos| text_style(SOFT.0, h_pos);
    for rule in &panel.rules {
        let ends = [at(f64::MIN, rule.y), at(f64::MAX, rule.y)];
        chart.draw_series([PathElement::new(ends, colour(SOFT.0).stroke_width(RULE))])?;
        let name = fit(&rule.name, WIDTH - LABELS);
        // The name of the rule: below the labels, or at the left end below the line.
        let (end, at, h_pos) = if is_names {
            (ends[1], (0, 34 * PX), HPos::Center)
        } else {
            (ends[0], (6 * PX, 9 * PX), HPos::Left)
        };
        let text = Text::new(name, at, soft(h_pos));
        chart.draw_series([EmptyElement::at(end) + text])?;
    }
    for (nth, series) in panel.series.iter().enumerate() {
        let color = colour(series.style.rgb);
        // The series of a row share its height.
        let slot = if is_names { 0.8 / panel.series.len() as f64 } else { 0.0 };
        let shift = slot * f64::from(from_middle(nth, panel.series.len())) / 2.0;
        let middle = |point: &Point| at(point.x + shift, point.y);
        if matches!(series.mark, Mark::Line | Mark::Curve) && series.points.len() > 1 {
            let line = PathElement::new(
                series.points.iter().map(middle).collect::<Vec<_>>(),
                color.stroke_width(STROKE),
            );
            chart.draw_series([line])?;
        }
        for point in &series.points {
            let columns = match series.mark {
                Mark::Bars => Some((point.x + shift - slot * 0.4, point.x + shift + slot * 0.4)),
                Mark::Histogram { width } => Some((point.x, point.x + width)),
                _ => None,
            };
            chart.draw_series(columns.map(|(from, to)| {
                Rectangle::new([at(from, 0.0), at(to, point.y)], color.filled())
            }))?;
            if let Some((low, high)) = point.interval {
                let rgb = if columns.is_some() { TEXT.0 } else { series.style.rgb };
                let ends = [low, high].map(|value| at(point.x + shift, value));
                chart.draw_series([PathElement::new(ends, colour(rgb).stroke_width(WHISKER))])?;
            }
            chart.draw_series(marker(series, middle(point)))?;
            let (x, y) = chart.backend_coord(&middle(point));
            if is_names {
                let end = at(point.x + shift, point.values().into_iter().fold(point.y, f64::max));
                let number = Text::new(short(point.y), (8 * PX, 0), soft(HPos::Left));
                chart.draw_series([EmptyElement::at(end) + number])?;
            }
            let numbers =
                format!("{}, {}: {}", series.name, figure.x.place(point.x), point.shown());
            *marks += &format!(
                "<circle class=\"hit\" cx=\"{x}\" cy=\"{y}\" r=\"{}\"><title>{}</title></circle>\n",
                6 * PX,
                escape(&numbers)
            );
        }
    }
    Ok(())
}

/// Returns twice the distance from the middle of `of` equally spaced things to thing number `at`.
fn from_middle(at: usize, of: usize) -> i32 {
    2 * count(at) - (count(of) - 1)
}

/// Returns the mark of a point, in pixels or in the units of the axes.
fn marker<At>(series: &Series, at: At) -> Option<Circle<At, i32>> {
    let color = colour(series.style.rgb);
    match series.mark {
        Mark::Line | Mark::Dots => Some(Circle::new(at, DOT, color.filled())),
        Mark::Rings => Some(Circle::new(at, DOT, color.stroke_width(16))),
        Mark::Curve | Mark::Bars | Mark::Histogram { .. } => None,
    }
}
