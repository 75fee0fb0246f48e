//! A figure's picture, by plotters.
//!
//! Plotters counts in whole pixels, so a pixel of the page is ten of its own. It draws in the
//! colours of the light theme. [`style`] makes the page's colours of them, so one picture serves
//! light, dark and paper, and gives each line its dash. Browsers show the numbers of a mark when
//! the pointer is on it.

use std::error::Error;
use std::ops::Range;

use elfen_console::page::escape;
use plotters::coord::Shift;
use plotters::coord::cartesian::Cartesian2d;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::figure::{Across, Figure, Mark, Marker, Panel, Point, Scale, Series, Style};
use super::text::{clip, short, tick};

/// Plotters' pixels to one of the page.
const PX: i32 = 10;
/// Every figure is as wide, so that text is as large in all of them.
const WIDTH: i32 = 760 * PX;
const FONT: i32 = 12 * PX;
/// Room for the labels at the left of a panel over numbers, and for the names of rows.
const LABELS: i32 = 62 * PX;
const NAMES: i32 = 168 * PX;
/// Room for the number behind a bar.
const NUMBER: i32 = 54 * PX;
/// Below a panel: ticks and their labels, and what they count.
const TICKS: i32 = 6 * PX;
const FOOT: i32 = 44 * PX;
/// The thickness of a bar, and the space between two rows.
const BAR: i32 = 18 * PX;
const BETWEEN: i32 = 10 * PX;
/// Panels over names that stand side by side; more go below.
const BESIDE: usize = 3;

/// Widths of lines; the style knows lines and rules by them.
const STROKE: u32 = 19;
const WHISKER: u32 = 13;
const RULE: u32 = 11;

/// Colours of what is no series, with the page's names for them.
const SOFT: (u32, &str) = (0x5f5e5a, "soft");
const LINE: (u32, &str) = (0xe1e0da, "line");
const BASE: (u32, &str) = (0xa3a29b, "base");
const TEXT: (u32, &str) = (0x2b2b2a, "ink");

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn Error>>;
type Place = (i32, i32);

/// What turns the colours of a picture into those of the page, and gives lines their dashes.
pub(super) fn style() -> String {
    let mut style = format!(".chart [stroke-width=\"{RULE}\"] {{ stroke-dasharray: 30 30; }}\n");
    for Style { rgb, dash, .. } in Style::ALL {
        let line = format!("[stroke=\"{}\"][stroke-width=\"{STROKE}\"]", hexadecimal(rgb));
        style += &format!(".chart {line} {{ stroke-dasharray: {dash}; }}\n");
    }
    let series = Style::ALL.map(|style| (style.rgb, format!("c-{}", style.name)));
    let others = [SOFT, LINE, BASE, TEXT].map(|(rgb, name)| (rgb, name.to_owned()));
    for (rgb, name) in series.into_iter().chain(others) {
        let colour = hexadecimal(rgb);
        style += &format!(".chart [stroke=\"{colour}\"] {{ stroke: var(--{name}); }}\n");
        style += &format!(".chart [fill=\"{colour}\"] {{ fill: var(--{name}); }}\n");
    }
    style
}

fn hexadecimal(rgb: u32) -> String {
    format!("#{rgb:06X}")
}

fn colour(rgb: u32) -> RGBColor {
    let [_, red, green, blue] = rgb.to_be_bytes();
    RGBColor(red, green, blue)
}

fn text_style(rgb: u32, h_pos: HPos) -> TextStyle<'static> {
    // The back end divides the size by this.
    let style = ("sans-serif", f64::from(FONT) * 1.24).with_color(colour(rgb));
    style.into_text_style(&(0, 0)).pos(Pos::new(h_pos, VPos::Center))
}

/// A count of what a page has room for.
fn count(of: usize) -> i32 {
    i32::try_from(of.min(10_000)).unwrap_or(0)
}

/// A text in a width, cut off where it is longer.
fn fit(text: &str, width: i32) -> String {
    const CHARACTER: i32 = 64;
    clip(text, usize::try_from(width / CHARACTER).unwrap_or(0))
}

/// An axis of numbers or of names.
struct Ruler {
    /// Of the logarithms on a logarithmic axis.
    places: RangedCoordf64,
    log: bool,
    /// `None` leaves them to plotters.
    ticks: Option<Vec<f64>>,
    /// Where columns begin: 0 if the axis has it.
    base: f64,
}

impl Ruler {
    /// Below this a logarithm says nothing about a measurement.
    const LOG_LEAST: f64 = 1e-9;
    /// From this factor between the values on, [`Scale::Auto`] is logarithmic.
    const LOG_FROM: f64 = 8.0;
    /// A difference smaller than this part of the values is rounding.
    const SAME: f64 = 1e-9;

    fn linear(Range { start, end }: Range<f64>, ticks: Option<Vec<f64>>) -> Self {
        let base = start.max(0.0).min(end);
        Self { places: (start..end).into(), log: false, ticks, base }
    }

    /// A row for each name, the first at the top.
    fn names(names: usize) -> Self {
        let ticks = (0..names).map(|index| index as f64).collect();
        Self::linear(names as f64 - 0.5..-0.5, Some(ticks))
    }

    /// An axis for these values, with no more ticks than wanted if it is logarithmic.
    fn over(values: impl Iterator<Item = f64> + Clone, scale: Scale, ticks: usize) -> Self {
        let low = values.clone().fold(f64::INFINITY, f64::min);
        let high = values.fold(f64::NEG_INFINITY, f64::max);
        let (low, high) = if low <= high { (low, high) } else { (0.0, 1.0) };
        let wants_log = match scale {
            Scale::Log => true,
            Scale::Auto => high > low * Self::LOG_FROM,
            Scale::Linear | Scale::Near => false,
        };
        if wants_log && low >= Self::LOG_LEAST {
            return Self::logarithmic(low, high, ticks);
        }
        let is_near = scale == Scale::Near;
        let (low, high) = if is_near { (low, high) } else { (low.min(0.0), high.max(0.0)) };
        let size = low.abs().max(high.abs());
        let is_same = high - low <= size * Self::SAME;
        let room = if is_same { size * 0.05 } else { (high - low) * 0.04 };
        let from = if low == 0.0 { 0.0 } else { low - room };
        let to = if high == 0.0 { 0.0 } else { high + room };
        let to = if to - from < Self::LOG_LEAST { from + 1.0 } else { to };
        Self::linear(from..to, None)
    }

    /// From one of 1, 2 and 5 times a power of ten to another one.
    fn logarithmic(low: f64, high: f64, most: usize) -> Self {
        let decade = |power: i32| [1.0, 2.0, 5.0].map(|one| one * 10_f64.powi(power));
        let steps: Vec<f64> = (-10..=16).flat_map(decade).collect();
        let reaches = |step: &f64| *step >= high * (1.0 - Self::SAME);
        let first = steps.iter().rposition(|step| *step <= low * (1.0 + Self::SAME)).unwrap_or(0);
        let last = steps.iter().position(reaches).unwrap_or(steps.len() - 1).max(first + 1);
        let count = last - first + 1;
        // Every step, every power of ten, or every second, third and so on of those.
        let every = if count <= most { 1 } else { 3 * count.div_ceil(3 * most) };
        let ticks = (first..=last).filter(|index| index % every == 0).map(|index| steps[index]);
        Self {
            places: (steps[first].ln()..steps[last].ln()).into(),
            log: true,
            ticks: Some(ticks.collect()),
            base: steps[first],
        }
    }
}

impl Ranged for Ruler {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: Place) -> i32 {
        let place = if self.log { value.ln() } else { *value };
        // Plotters counts in an i32, which a place far outside of the axis does not fit into.
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
        tick(*value)
    }
}

/// Where a panel's marks are drawn.
#[derive(Clone, Copy)]
struct Frame {
    left: i32,
    top: i32,
    width: i32,
    height: i32,
}

/// The picture of a figure: an `svg` element with these attributes and this head.
pub(super) fn picture(figure: &Figure, attributes: &str, head: &str) -> String {
    let (frames, height) = frames(figure);
    let mut marks = String::new();
    let draw = |root: &Area<'_>| {
        let mut frames = frames.iter().enumerate();
        frames.try_for_each(|(index, frame)| draw_panel(root, figure, index, *frame, &mut marks))
    };
    let drawn = svg((WIDTH, height), draw);
    format!("<svg {attributes} viewBox=\"0 0 {WIDTH} {height}\">\n{head}{drawn}{marks}</svg>\n")
}

/// A series as the legend shows it.
pub(super) fn key(mark: Mark, style: Style) -> String {
    let (width, height) = (36 * PX, 14 * PX);
    let series = Series::new("", mark, style, Vec::new());
    let drawn = svg((width, height), |root| match mark {
        Mark::Bars | Mark::Histogram { .. } => {
            draw_bar(root, style, [(10 * PX, PX), (26 * PX, 13 * PX)])
        }
        _ => draw_line(root, &series, &[(PX, 7 * PX), (35 * PX, 7 * PX)])
            .and_then(|()| draw_marker(root, &series, (18 * PX, 7 * PX))),
    });
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"chart\" width=\"36\" height=\"14\" \
         viewBox=\"0 0 {width} {height}\" aria-hidden=\"true\">{drawn}</svg>"
    )
}

/// What is inside of the `svg` element that plotters makes.
fn svg((width, height): Place, draw: impl FnOnce(&Area<'_>) -> Drawn) -> String {
    let mut svg = String::new();
    let root = SVGBackend::with_string(&mut svg, (width.unsigned_abs(), height.unsigned_abs()));
    let root = root.into_drawing_area();
    draw(&root).expect("a string takes every drawing");
    drop(root);
    let inside = svg.split_once(">\n").and_then(|(_, rest)| rest.rsplit_once("</svg>"));
    inside.map_or_else(String::new, |(inside, _)| inside.to_owned())
}

/// A frame for each panel, and the height of the picture.
///
/// Over numbers they stand above each other, the first, which matters most, the highest. Over names
/// they stand side by side.
fn frames(figure: &Figure) -> (Vec<Frame>, i32) {
    let mut frames = Vec::new();
    let mut top = 0;
    let Across::Names { names, .. } = &figure.x else {
        let heights = std::iter::once(216 * PX).chain(std::iter::repeat(132 * PX));
        for (_, height) in figure.panels.iter().zip(heights) {
            top += 26 * PX;
            frames.push(Frame { left: LABELS, top, width: WIDTH - LABELS - 24 * PX, height });
            top += height + 14 * PX;
        }
        return (frames, top + FOOT - 14 * PX);
    };
    for panels in figure.panels.chunks(BESIDE) {
        let series = panels.iter().map(|panel| panel.series.len().max(1)).max();
        let height = (BAR * count(series.unwrap_or(1)) + BETWEEN) * count(names.len());
        let width = (WIDTH - NAMES) / count(panels.len());
        top += 46 * PX;
        for index in 0..count(panels.len()) {
            let left = NAMES + width * index;
            frames.push(Frame { left, top, width: width - 22 * PX - NUMBER, height });
        }
        top += height + FOOT;
    }
    (frames, top)
}

/// The values that the axis of these panels has to cover.
fn values<'a>(
    panels: impl Iterator<Item = &'a Panel> + Clone,
) -> impl Iterator<Item = f64> + Clone {
    panels.flat_map(|panel| {
        let points = panel.series.iter().flat_map(|series| &series.points);
        points.flat_map(Point::values).chain(panel.rules.iter().map(|rule| rule.y))
    })
}

/// One panel, and where it is drawn.
struct Canvas<'a, 'b> {
    root: &'a Area<'b>,
    figure: &'a Figure,
    panel: &'a Panel,
    frame: Frame,
    /// Over names the values go to the right, and the places down.
    is_names: bool,
    /// Whether labels stand below it: those of panels above each other are below the last.
    has_labels: bool,
}

type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<Ruler, Ruler>>;

fn draw_panel(
    root: &Area<'_>,
    figure: &Figure,
    index: usize,
    frame: Frame,
    marks: &mut String,
) -> Drawn {
    let is_names = matches!(figure.x, Across::Names { .. });
    let has_labels = is_names || index + 1 == figure.panels.len();
    let panel = &figure.panels[index];
    let canvas = Canvas { root, figure, panel, frame, is_names, has_labels };
    let (x, y) = canvas.rulers();
    let base = if is_names { x.base } else { y.base };
    let chart = canvas.draw_axes(index, x, y)?;
    canvas.write_titles()?;
    let place = |along: f64, value: f64| {
        chart.backend_coord(&if is_names { (value, along) } else { (along, value) })
    };
    canvas.draw_rules(&place)?;
    for at in 0..panel.series.len() {
        canvas.draw_series(at, base, &place, marks)?;
    }
    Ok(())
}

impl<'b> Canvas<'_, 'b> {
    fn write(&self, text: &str, (rgb, h_pos): (u32, HPos), at: Place, room: i32) -> Drawn {
        Ok(self.root.draw_text(&fit(text, room), &text_style(rgb, h_pos), at)?)
    }

    fn rulers(&self) -> (Ruler, Ruler) {
        let Self { figure, panel, .. } = self;
        let ticks = self.ticks();
        match &figure.x {
            Across::Number(axis) => {
                let ends = |series: &'_ Series| {
                    let width = series.width();
                    let points = series.points.iter();
                    points.flat_map(|point| [point.x, point.x + width]).collect::<Vec<_>>()
                };
                let all: Vec<f64> = figure.series().flat_map(ends).collect();
                let y = Ruler::over(values(std::iter::once(*panel)), panel.y.scale, 6);
                (Ruler::over(all.into_iter(), axis.scale, ticks), y)
            }
            Across::Names { names, one_scale, .. } => {
                let alike = figure.panels.iter().filter(|other| *one_scale || other == panel);
                // A bar without its foot shows nothing.
                let has_bars = panel.series.iter().any(|series| series.mark == Mark::Bars);
                let scale = if has_bars { Scale::Linear } else { panel.y.scale };
                (Ruler::over(values(alike), scale, ticks), Ruler::names(names.len()))
            }
        }
    }

    /// How many labels the horizontal axis has room for.
    fn ticks(&self) -> usize {
        usize::try_from(self.frame.width / (45 * PX)).unwrap_or(0).max(3)
    }

    fn draw_axes(&self, index: usize, x: Ruler, y: Ruler) -> Result<Chart<'_, 'b>, Box<dyn Error>> {
        let Frame { left, top, width, height } = self.frame;
        let first = if self.is_names { NAMES } else { LABELS };
        let labels = if self.is_names && !index.is_multiple_of(BESIDE) { 0 } else { first };
        let foot = if self.has_labels { FOOT } else { TICKS };
        let area = self.root.clone().shrink((left - labels, top), (width + labels, height + foot));
        let mut builder = ChartBuilder::on(&area);
        builder.set_label_area_size(LabelAreaPosition::Left, labels).x_label_area_size(foot);
        let mut chart = builder.build_cartesian_2d(x, y)?;
        let left = |along: &f64| match &self.figure.x {
            Across::Names { .. } => fit(self.figure.x.name(*along).unwrap_or(""), NAMES - 12 * PX),
            Across::Number(_) => tick(*along),
        };
        let below = |value: &f64| if self.has_labels { tick(*value) } else { String::new() };
        let mut mesh = chart.configure_mesh();
        mesh.max_light_lines(0).bold_line_style(colour(LINE.0).stroke_width(8));
        mesh.axis_style(colour(BASE.0).stroke_width(10)).set_all_tick_mark_size(4 * PX);
        mesh.x_labels(self.ticks()).x_label_formatter(&below);
        mesh.y_labels(if index == 0 { 7 } else { 5 }).y_label_formatter(&left);
        mesh.label_style(text_style(SOFT.0, HPos::Center));
        if self.is_names {
            mesh.disable_y_mesh().y_label_style(text_style(TEXT.0, HPos::Right));
        } else {
            mesh.disable_x_mesh();
        }
        mesh.draw()?;
        Ok(chart)
    }

    fn write_titles(&self) -> Drawn {
        let Frame { left, top, width, height } = self.frame;
        let y = &self.panel.y;
        if self.is_names {
            let room = width + NUMBER;
            self.write(&y.quantity, (TEXT.0, HPos::Left), (left, top - 31 * PX), room)?;
            return self.write(&y.unit, (SOFT.0, HPos::Left), (left, top - 15 * PX), room);
        }
        self.write(&y.label(), (TEXT.0, HPos::Left), (left, top - 14 * PX), width)?;
        if self.has_labels {
            let at = (left + width / 2, top + height + 34 * PX);
            self.write(&self.figure.x.label(), (SOFT.0, HPos::Center), at, width)?;
        }
        Ok(())
    }

    fn draw_rules(&self, place: &dyn Fn(f64, f64) -> Place) -> Drawn {
        let Frame { left, top, width, height } = self.frame;
        for rule in &self.panel.rules {
            let (x, y) = place(0.0, rule.y);
            let (ends, anchor, at) = if self.is_names {
                let at = (x, top + height + 34 * PX);
                ([(x, top), (x, top + height)], HPos::Center, at)
            } else {
                // Above the line, unless the panel's title is there.
                let above = if y - top < 20 * PX { 9 * PX } else { -9 * PX };
                ([(left, y), (left + width, y)], HPos::Left, (left + 6 * PX, y + above))
            };
            self.root.draw(&PathElement::new(ends, colour(SOFT.0).stroke_width(RULE)))?;
            self.write(&rule.name, (SOFT.0, anchor), at, width)?;
        }
        Ok(())
    }

    /// From the middle of the row to a mark of the series: the series that have the row share it.
    fn down(&self, at: usize, point: &Point) -> i32 {
        if !self.is_names {
            return 0;
        }
        let has = |series: &&Series| series.points.iter().any(|other| other.x == point.x);
        let all = self.panel.series.iter().filter(has).count();
        let before = self.panel.series[..at].iter().filter(has).count();
        from_middle(before, all) * BAR / 2
    }

    fn draw_series(
        &self,
        at: usize,
        base: f64,
        place: &dyn Fn(f64, f64) -> Place,
        marks: &mut String,
    ) -> Drawn {
        let Self { root, figure, panel, .. } = self;
        let series = &panel.series[at];
        let of = |point: &Point, value: f64| {
            let (x, y) = place(point.x, value);
            (x, y + self.down(at, point))
        };
        let places: Vec<Place> = series.points.iter().map(|point| of(point, point.y)).collect();
        draw_line(root, series, &places)?;
        for (point, &(x, y)) in series.points.iter().zip(&places) {
            let mut corners = [(x - 6 * PX, y - 6 * PX), (x + 6 * PX, y + 6 * PX)];
            if let Mark::Histogram { width } = series.mark {
                corners = [(x, y), place(point.x + width, base)];
                draw_bar(root, series.style, corners)?;
            } else if series.mark == Mark::Bars {
                let foot = of(point, base);
                let half = BAR * 3 / 8;
                corners = if self.is_names {
                    [(foot.0, y - half), (x, y + half)]
                } else {
                    [(x - half, foot.1), (x + half, y)]
                };
                draw_bar(root, series.style, corners)?;
            }
            let mut end = x;
            if let Some((low, high)) = point.interval {
                // Intervals of several series at one place stand next to each other.
                let by = if self.is_names { 0 } else { from_middle(at, panel.series.len()) * 15 };
                let ends = [low, high].map(|value| of(point, value)).map(|(x, y)| (x + by, y));
                end = end.max(ends[0].0).max(ends[1].0);
                let is_bar = series.mark == Mark::Bars;
                let rgb = if is_bar { TEXT.0 } else { series.style.rgb };
                root.draw(&PathElement::new(ends, colour(rgb).stroke_width(WHISKER)))?;
            }
            draw_marker(root, series, (x, y))?;
            if self.is_names {
                self.write(&short(point.y), (SOFT.0, HPos::Left), (end + 8 * PX, y), NUMBER)?;
            }
            *marks += &pointed_at(corners, &numbers(figure, panel, series, point));
        }
        Ok(())
    }
}

/// Twice the distance from the middle of so many things to one of them.
fn from_middle(at: usize, of: usize) -> i32 {
    2 * count(at) - (count(of) - 1)
}

fn draw_line(root: &Area<'_>, series: &Series, places: &[Place]) -> Drawn {
    if matches!(series.mark, Mark::Line | Mark::Curve) && places.len() > 1 {
        let style = colour(series.style.rgb).stroke_width(STROKE);
        root.draw(&PathElement::new(places, style))?;
    }
    Ok(())
}

fn draw_bar(root: &Area<'_>, style: Style, corners: [Place; 2]) -> Drawn {
    Ok(root.draw(&Rectangle::new(corners, colour(style.rgb).filled()))?)
}

fn draw_marker(root: &Area<'_>, series: &Series, (x, y): Place) -> Drawn {
    let look = series.style;
    match series.mark {
        Mark::Line | Mark::Dots => {
            let outline = outline(&look.marker).map(|(right, down)| (x + right, y + down));
            root.draw(&Polygon::new(outline.collect::<Vec<_>>(), colour(look.rgb).filled()))?;
        }
        Mark::Rings => {
            root.draw(&Circle::new((x, y), 4 * PX, colour(look.rgb).stroke_width(16)))?;
        }
        Mark::Curve | Mark::Bars | Mark::Histogram { .. } => {}
    }
    Ok(())
}

/// The corners of a marker around its middle.
fn outline(marker: &Marker) -> impl Iterator<Item = Place> {
    let Marker { corners, angle_degrees, waist } = *marker;
    (0..2 * corners).map(move |half| {
        let angle = angle_degrees.to_radians()
            + f64::from(half) * std::f64::consts::PI / f64::from(corners);
        let side = (std::f64::consts::PI / f64::from(corners)).cos();
        let inner = if waist < 1.0 { waist } else { side };
        let radius = f64::from(PX) * if half % 2 == 0 { 4.6 } else { 4.6 * inner };
        #[expect(clippy::cast_possible_truncation, reason = "less than 100")]
        let place = ((radius * angle.cos()).round() as i32, (radius * angle.sin()).round() as i32);
        place
    })
}

/// What a browser shows when the pointer is between these corners.
fn pointed_at([from, to]: [Place; 2], numbers: &str) -> String {
    let (left, top) = (from.0.min(to.0), from.1.min(to.1));
    let (width, height) = ((from.0 - to.0).abs(), (from.1 - to.1).abs());
    format!(
        "<rect class=\"hit\" x=\"{left}\" y=\"{top}\" width=\"{width}\" height=\"{height}\">\
         <title>{}</title></rect>\n",
        escape(numbers)
    )
}

fn numbers(figure: &Figure, panel: &Panel, series: &Series, point: &Point) -> String {
    let place = match &figure.x {
        Across::Names { .. } => figure.x.name(point.x).unwrap_or("").to_owned(),
        Across::Number(axis) => {
            let unit = if axis.unit.is_empty() { &axis.quantity } else { &axis.unit };
            format!("{} {unit}", short(point.x))
        }
    };
    let value = format!("{}, {place}: {} {}", series.name, short(point.y), panel.y.unit);
    let interval = point.interval.map_or_else(String::new, |(low, high)| {
        format!(" (95 %: {} to {})", short(low), short(high))
    });
    value.trim_end().to_owned() + &interval
}
