//! Figures and tables as one self-contained HTML file.
//!
//! | file | what it does |
//! | --- | --- |
//! | [`figure`] | what a figure is: panels, series, points, and what they cannot be |
//! | [`live`] | figures and the summary of a results file |
//! | [`simulated`] | the thesis's figures, by the model |
//! | [`naps`] | how long naps take, by `elfen bench nap` |
//! | `lines`, `rows` | a figure's picture, over numbers and over names |
//! | `page`, `csv` | the HTML around it, and its numbers |
//!
//! Whoever makes a report fills in a [`Report`] and renders it; nothing is measured or simulated
//! while it is drawn, so the same report is always the same bytes.

mod company;
mod csv;
pub mod figure;
mod lines;
pub mod live;
pub mod naps;
mod page;
mod rows;
mod scale;
pub mod simulated;
mod style;
mod svg;

use std::io;

use serde::Serialize;

use figure::{Figure, Refused};

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

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error(transparent)]
    Write(#[from] io::Error),
}

impl Report {
    /// Refuses what cannot be drawn.
    pub fn check(&self) -> Result<(), Refused> {
        self.figures.iter().try_for_each(Figure::check)
    }

    /// Writes the report as one HTML file that needs nothing else.
    pub fn render(&self, out: &mut impl io::Write) -> Result<(), RenderError> {
        self.check()?;
        Ok(out.write_all(page::html(self).as_bytes())?)
    }
}
