//! A report as data: its tables and its figures. The panels of a figure share a horizontal axis.
//!
//! Nothing here has pixels. The picture, the CSV and `--json` are all made from this data, so they
//! always agree.

use elfen_console::page::Table;
use serde::Serialize;

use super::text::short;
use crate::live::plan::scenario_name;
use crate::record::Scenario;

/// The data of a report.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HtmlReport {
    pub title: String,
    /// The command that wrote the report.
    pub command: String,
    /// What the reader has to know before any figure: one sentence each.
    pub notes: Vec<String>,
    pub tables: Vec<Table>,
    pub figures: Vec<Figure>,
    /// Tables that come after the figures.
    pub appendix: Vec<Table>,
}

/// One figure of a report.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figure {
    /// Names the figure in links and files: lower-case words joined by hyphens.
    pub id: String,
    pub title: String,
    /// What the figure shows, in one sentence.
    pub reading: String,
    pub source: Source,
    /// The parameters behind a simulation, or the machine behind a measurement.
    pub made_with: String,
    /// The command that produces the figure's numbers.
    pub command: String,
    pub x: Across,
    pub panels: Vec<Panel>,
}

/// Where the numbers of a figure come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    Simulated,
    #[default]
    Live,
    /// Printed in the thesis.
    Published,
}

/// The horizontal axis.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Across {
    Number(Axis),
    /// The `x` of a point is an index into `names`, from 0.
    Names {
        quantity: String,
        names: Vec<String>,
        /// Whether all panels show the same quantity. They then have the same scale, so that
        /// lengths are comparable.
        #[serde(skip)]
        one_scale: bool,
    },
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Axis {
    pub quantity: String,
    /// Empty if the quantity has no unit.
    pub unit: String,
    pub scale: Scale,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scale {
    /// Includes 0.
    #[default]
    Linear,
    /// Logarithmic, but linear if a value is 0 or less.
    Log,
    /// Logarithmic if the values span more than a factor of 8.
    Auto,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Panel {
    pub y: Axis,
    pub series: Vec<Series>,
    pub rules: Vec<Rule>,
}

/// A line across the panel, such as an SLO.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rule {
    pub y: f64,
    pub name: String,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Series {
    pub name: String,
    pub mark: Mark,
    #[serde(skip)]
    pub style: Style,
    pub points: Vec<Point>,
}

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mark {
    /// A line through its points, with a dot on each.
    Line,
    /// Only a line, for many points.
    Curve,
    /// Only points.
    Dots,
    /// Hollow points, for numbers that others published.
    Rings,
    /// Columns side by side, on an axis of names.
    Bars,
    /// Columns of this width to the right of each `x`.
    Histogram { width: f64 },
}

/// A value, and its interval if one is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Point {
    pub x: f64,
    pub y: f64,
    pub interval: Option<(f64, f64)>,
}

/// How a series looks. Styles differ in colour, and also in their dashes, so that they can be told
/// apart without colour. A scenario has the same style in every figure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Style {
    /// The name of the colour in `elfen-console/src/page.css`, which defines it for the light
    /// theme, the dark theme and paper. A search chose the colours. It maximized the smallest
    /// distance between colours in the same figure, for full colour vision and for three kinds of
    /// colour blindness.
    pub name: &'static str,
    /// The colour of the light theme, 0xRRGGBB.
    pub rgb: u32,
    /// The lengths of strokes and gaps, in tenths of a pixel.
    pub dash: &'static str,
}

impl Style {
    pub const ALL: [Self; 10] = [
        Self { name: "ink", rgb: 0x2b2b29, dash: "none" },
        Self { name: "blue", rgb: 0x033da1, dash: "90 30" },
        Self { name: "red", rgb: 0xa13100, dash: "60 20 20 20" },
        Self { name: "aqua", rgb: 0x009693, dash: "20 30" },
        Self { name: "orange", rgb: 0xe76e1c, dash: "50 40" },
        Self { name: "violet", rgb: 0x947df1, dash: "120 30 20 30" },
        Self { name: "ochre", rgb: 0x836b21, dash: "40 20" },
        Self { name: "pink", rgb: 0x893152, dash: "140 40" },
        Self { name: "green", rgb: 0x3da56c, dash: "80 30 20 30 20 30" },
        Self { name: "grey", rgb: 0x706f6c, dash: "10 30" },
    ];
    pub const INK: Self = Self::ALL[0];
    pub const BLUE: Self = Self::ALL[1];
    pub const RED: Self = Self::ALL[2];
    pub const AQUA: Self = Self::ALL[3];
    pub const ORANGE: Self = Self::ALL[4];
    pub const VIOLET: Self = Self::ALL[5];
    pub const OCHRE: Self = Self::ALL[6];
    pub const PINK: Self = Self::ALL[7];
    pub const GREEN: Self = Self::ALL[8];
    pub const GREY: Self = Self::ALL[9];
}

impl Scenario {
    /// The name of the scenario in figures and tables.
    pub fn title(self) -> &'static str {
        match self {
            Self::None => "no batch",
            Self::Nice19 => "nice 19",
            Self::SchedIdle => "SCHED_IDLE",
            Self::CoreScheduling => "core scheduling",
            _ => scenario_name(self),
        }
    }

    pub(super) fn style(self) -> Style {
        match self {
            Self::None => Style::INK,
            Self::Unrestrained => Style::RED,
            Self::Nice19 => Style::ORANGE,
            Self::SchedIdle => Style::GREEN,
            Self::CoreScheduling => Style::GREY,
            Self::BorrowIdle => Style::BLUE,
            Self::FixedBudget => Style::AQUA,
            Self::RefreshBudget => Style::OCHRE,
            Self::DynamicBudget => Style::VIOLET,
            Self::SloBudget => Style::PINK,
        }
    }
}

/// No measurement is larger than this, or smaller than its negative.
pub(super) const MOST: f64 = 1e15;

/// A value that cannot be drawn.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("figure {figure:?}, series {series:?}: {value} cannot be drawn")]
pub struct Refused {
    pub figure: String,
    pub series: String,
    pub value: String,
}

impl Point {
    pub fn at(x: f64, y: f64) -> Self {
        Self { x, y, interval: None }
    }

    /// Formats the value and its interval for readers.
    pub(super) fn shown(&self) -> String {
        let interval = self
            .interval
            .map_or_else(String::new, |(low, high)| format!(" ({}–{})", short(low), short(high)));
        short(self.y) + &interval
    }

    /// Returns the value and both ends of its interval.
    pub(super) fn values(&self) -> [f64; 3] {
        let (low, high) = self.interval.unwrap_or((self.y, self.y));
        [self.y, low, high]
    }
}

impl Series {
    pub fn new(name: impl Into<String>, mark: Mark, style: Style, points: Vec<Point>) -> Self {
        Self { name: name.into(), mark, style, points }
    }
}

impl Panel {
    pub(super) fn new(y: Axis, series: Vec<Series>) -> Self {
        Self { y, series, rules: Vec::new() }
    }
}

impl Axis {
    pub fn new(quantity: impl Into<String>, unit: impl Into<String>) -> Self {
        Self { quantity: quantity.into(), unit: unit.into(), scale: Scale::Linear }
    }

    pub fn scaled(self, scale: Scale) -> Self {
        Self { scale, ..self }
    }

    /// Returns the text next to the axis.
    pub fn label(&self) -> String {
        if self.unit.is_empty() {
            self.quantity.clone()
        } else {
            format!("{}, {}", self.quantity, self.unit)
        }
    }
}

impl Default for Across {
    fn default() -> Self {
        Self::Number(Axis::default())
    }
}

impl Across {
    pub(super) fn number(quantity: &str, unit: &str) -> Self {
        Self::Number(Axis::new(quantity, unit))
    }

    pub(super) fn names(quantity: &str, names: Vec<String>, one_scale: bool) -> Self {
        Self::Names { quantity: quantity.to_owned(), names, one_scale }
    }

    pub fn label(&self) -> String {
        match self {
            Self::Number(axis) => axis.label(),
            Self::Names { quantity, .. } => quantity.clone(),
        }
    }

    /// Returns the name at index `x`. `None` on an axis of numbers, or if there is none.
    pub(super) fn name(&self, x: f64) -> Option<&str> {
        let Self::Names { names, .. } = self else { return None };
        let found = names.iter().enumerate().find(|(index, _)| *index as f64 == x);
        found.map(|(_, name)| name.as_str())
    }

    /// Formats a place on the axis for readers.
    pub(super) fn place(&self, x: f64) -> String {
        match self {
            Self::Number(_) => short(x),
            Self::Names { .. } => self.name(x).unwrap_or("").to_owned(),
        }
    }
}

impl Figure {
    /// Returns the series of all panels, in order.
    pub(super) fn series(&self) -> impl Iterator<Item = &Series> {
        self.panels.iter().flat_map(|panel| &panel.series)
    }
}

impl HtmlReport {
    /// Refuses NaN, infinities, values beyond `MOST`, and names that do not exist.
    pub fn check(&self) -> Result<(), Refused> {
        for figure in &self.figures {
            let refuse = |series: &str, value: f64| Refused {
                figure: figure.title.clone(),
                series: series.to_owned(),
                // The shortest notation, such as 1e300.
                value: format!("{value:?}"),
            };
            // Also false for NaN.
            let is_drawable = |value: &f64| value.abs() <= MOST;
            let exists =
                |x: f64| matches!(figure.x, Across::Number(_)) || figure.x.name(x).is_some();
            for series in figure.series() {
                for point in &series.points {
                    let [y, low, high] = point.values();
                    let all = [point.x, y, low, high];
                    let bad = all.into_iter().find(|value| !is_drawable(value));
                    if let Some(value) = bad.or((!exists(point.x)).then_some(point.x)) {
                        return Err(refuse(&series.name, value));
                    }
                }
                if let Mark::Histogram { width } = series.mark
                    && !(width > 0.0 && is_drawable(&width))
                {
                    return Err(refuse(&series.name, width));
                }
            }
            let mut rules = figure.panels.iter().flat_map(|panel| &panel.rules);
            if let Some(rule) = rules.find(|rule| !is_drawable(&rule.y)) {
                return Err(refuse(&rule.name, rule.y));
            }
        }
        Ok(())
    }
}
