//! A figure as data: panels above each other that share their horizontal axis.
//!
//! It knows nothing of pixels. What is drawn, what the CSV holds and what `--json` prints are all
//! made from this, so that they cannot differ.

use serde::Serialize;

/// One figure of a report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// Names the figure in links and files: lower-case words joined by hyphens.
    pub id: String,
    pub title: String,
    /// What it shows, in one sentence.
    pub reading: String,
    pub source: Source,
    /// The parameters behind a simulation, or the machine behind a measurement.
    pub made_with: String,
    /// The command that makes its numbers.
    pub command: String,
    pub x: Across,
    pub panels: Vec<Panel>,
}

/// Where numbers come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    Simulated,
    Live,
    /// Printed in the thesis.
    Published,
}

/// The horizontal axis.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Across {
    Number(Axis),
    /// The points' `x` counts these from 0.
    Names {
        quantity: String,
        names: Vec<String>,
        /// Whether the panels show the same quantity, and are compared by their lengths.
        #[serde(skip)]
        one_scale: bool,
    },
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Axis {
    pub quantity: String,
    /// May be empty.
    pub unit: String,
    pub scale: Scale,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scale {
    /// From 0, or from the lowest value if that is less.
    #[default]
    Linear,
    /// Linear where a value is 0 or less.
    Log,
    /// Logarithmic if the values span more than a factor of 8.
    Auto,
    /// Linear around the values, without 0.
    Near,
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
    /// A line through its points.
    Line,
    /// A line alone, for many points.
    Curve,
    /// Points alone.
    Dots,
    /// Hollow points: what others published.
    Rings,
    /// Columns side by side, on an axis of names.
    Bars,
    /// Columns of this width to the right of each `x`.
    Histogram { width: f64 },
}

/// A value, and the interval around it where one is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Point {
    pub x: f64,
    pub y: f64,
    pub interval: Option<(f64, f64)>,
}

/// Colour, dash and marker of a series; the same thing looks the same in every figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    Ink,
    Blue,
    Red,
    Aqua,
    Orange,
    Violet,
    Ochre,
    Pink,
    Green,
    Grey,
}

/// Beyond this, and as far below 0, nothing is a measurement.
const MOST: f64 = 1e15;

/// What cannot be drawn.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("figure {figure:?}, series {series:?}: {value} is no number that can be drawn")]
pub struct Refused {
    pub figure: String,
    pub series: String,
    pub value: String,
}

impl Point {
    pub fn at(x: f64, y: f64) -> Self {
        Self { x, y, interval: None }
    }
}

impl Series {
    pub fn new(name: impl Into<String>, mark: Mark, style: Style, points: Vec<Point>) -> Self {
        Self { name: name.into(), mark, style, points }
    }
}

impl Axis {
    pub fn new(quantity: impl Into<String>, unit: impl Into<String>) -> Self {
        Self { quantity: quantity.into(), unit: unit.into(), scale: Scale::Linear }
    }

    pub fn scaled(self, scale: Scale) -> Self {
        Self { scale, ..self }
    }

    /// As it stands at the axis.
    pub fn label(&self) -> String {
        if self.unit.is_empty() {
            self.quantity.clone()
        } else {
            format!("{}, {}", self.quantity, self.unit)
        }
    }
}

impl Across {
    pub fn label(&self) -> String {
        match self {
            Self::Number(axis) => axis.label(),
            Self::Names { quantity, .. } => quantity.clone(),
        }
    }
}

impl Figure {
    /// Refuses infinities, what is no number, and names that do not exist.
    pub fn check(&self) -> Result<(), Refused> {
        let refuse = |series: &str, value: f64| Refused {
            figure: self.title.clone(),
            series: series.to_owned(),
            // As short as it was written: 1e300.
            value: format!("{value:?}"),
        };
        for panel in &self.panels {
            for series in &panel.series {
                for point in &series.points {
                    let (low, high) = point.interval.unwrap_or((point.y, point.y));
                    let values = [point.x, point.y, low, high];
                    if let Some(&value) = values.iter().find(|value| !is_drawable(**value)) {
                        return Err(refuse(&series.name, value));
                    }
                    if !self.x.has(point.x) {
                        return Err(refuse(&series.name, point.x));
                    }
                }
                if let Mark::Histogram { width } = series.mark
                    && !(width > 0.0 && is_drawable(width))
                {
                    return Err(refuse(&series.name, width));
                }
            }
            if let Some(rule) = panel.rules.iter().find(|rule| !is_drawable(rule.y)) {
                return Err(refuse(&rule.name, rule.y));
            }
        }
        Ok(())
    }
}

impl Across {
    /// Whether something stands at `x`.
    fn has(&self, x: f64) -> bool {
        match self {
            Self::Number(_) => true,
            Self::Names { names, .. } => (0..names.len()).any(|index| index as f64 == x),
        }
    }
}

fn is_drawable(value: f64) -> bool {
    // NaN is less than nothing and not at most anything.
    value.abs() <= MOST
}
