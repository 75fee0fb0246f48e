//! What a report is made of, before it is drawn.

use serde::Serialize;

use super::figure::{Figure, Refused};

/// A report, before it is drawn.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    pub title: String,
    /// The command that wrote the report.
    pub command: String,
    /// What has to be known before any figure, a sentence each.
    pub notes: Vec<String>,
    pub tables: Vec<Table>,
    pub figures: Vec<Figure>,
    /// Behind the figures.
    pub appendix: Vec<Table>,
}

/// Numbers that are better read than seen.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Table {
    pub title: String,
    pub head: Vec<String>,
    pub rows: Vec<Vec<String>>,
    /// How the numbers came about; may be empty.
    pub note: String,
}

impl Report {
    /// Refuses what cannot be drawn.
    pub fn check(&self) -> Result<(), Refused> {
        self.figures.iter().try_for_each(Figure::check)
    }
}
