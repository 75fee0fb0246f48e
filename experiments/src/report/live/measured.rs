//! The rows of a summary, found by load, batch and scenario.

use crate::live::summary::{Figure, Row};
use crate::record::Scenario;

/// The scenario that shared the core, and how.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Side {
    pub(super) scenario: Scenario,
    /// In the words of the plan, `fixed-budget:2ms`; empty in files that do not say.
    asked: String,
}

impl Side {
    pub(super) fn of(row: &Row) -> Self {
        Self { scenario: row.scenario, asked: row.asked.clone() }
    }

    pub(super) fn title(&self) -> String {
        let name = self.scenario.title();
        match self.asked.split_once(':') {
            Some((_, detail)) => format!("{name} {detail}"),
            None => name.to_owned(),
        }
    }
}

/// All rows.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) rows: Vec<Row>,
}

impl Measured {
    /// The batch programs that ran; one without a name if the service was alone.
    pub(super) fn batches(&self) -> Vec<Option<&str>> {
        let mut batches: Vec<Option<&str>> = Vec::new();
        for row in self.rows.iter().filter(|row| row.scenario != Scenario::None) {
            if !batches.contains(&row.batch.as_deref()) {
                batches.push(row.batch.as_deref());
            }
        }
        if batches.is_empty() { vec![None] } else { batches }
    }

    /// In percent of what the service can serve.
    pub(super) fn loads(&self) -> Vec<f64> {
        let mut loads: Vec<f64> = self.rows.iter().map(percent).collect();
        loads.sort_by(f64::total_cmp);
        loads.dedup();
        loads
    }

    /// The scenarios of the runs with this batch, and the service alone.
    pub(super) fn sides(&self, batch: Option<&str>) -> Vec<Side> {
        let rows = self.rows.iter().filter(|row| belongs(row, batch));
        let mut sides: Vec<Side> = rows.map(Side::of).collect();
        sides.sort();
        sides.dedup();
        sides
    }

    pub(super) fn row(&self, load: f64, batch: Option<&str>, side: &Side) -> Option<&Row> {
        let is = |row: &&Row| belongs(row, batch) && percent(row) == load && Side::of(row) == *side;
        self.rows.iter().find(is)
    }
}

fn belongs(row: &Row, batch: Option<&str>) -> bool {
    row.scenario == Scenario::None || row.batch.as_deref() == batch
}

/// A row's load in percent, to a ten-thousandth: what is closer is the same load.
pub(super) fn percent(row: &Row) -> f64 {
    (row.load * 1e6).round() / 1e4
}

/// What can be drawn: a ratio to nothing is none.
pub(super) fn finite(figure: Figure) -> Option<Figure> {
    let [low, high] = figure.ci95.unwrap_or([figure.median; 2]);
    [figure.median, low, high].iter().all(|value| value.abs() <= 1e15).then_some(figure)
}
