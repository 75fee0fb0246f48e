//! Figures and tables as one self-contained HTML file.
//!
//! | file | what it does |
//! | --- | --- |
//! | [`figure`] | what a figure is: panels, series, points, and what they cannot be |
//! | [`live`] | figures and the summary of a results file |
//! | [`simulated`] | the thesis's figures, by the model |
//! | [`shim`] | a recording of `elfen shim` |
//! | [`naps`] | how long naps take, by `elfen lab bench nap` |
//! | `lines`, `rows` | a figure's picture, over numbers and over names |
//! | `document` | a report before it is drawn |
//! | `page`, `csv` | the HTML around it, and its numbers |
//!
//! The maker of a report fills in a [`Report`] and renders it; nothing is measured or simulated
//! while it is drawn, so the same report is always the same bytes.

mod csv;
mod document;
pub mod figure;
mod lines;
pub mod live;
pub mod naps;
mod page;
mod rows;
mod scale;
mod scenario;
pub mod shim;
pub mod simulated;
mod style;
mod svg;

pub use document::{Report, Table};
pub use page::RenderError;
