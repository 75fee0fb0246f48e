//! Figures and tables as one self-contained HTML file.
//!
//! | file | what it does |
//! | --- | --- |
//! | [`figure`] | what a report is: tables, figures, panels, series, points |
//! | [`live`] | figures and the summary of a results file |
//! | [`simulated`] | the thesis's figures, by the model, and its naps |
//! | [`shim`] | a recording of `elfen shim` |
//! | `draw` | a figure's picture, by plotters |
//! | `page` | the HTML around it, and its numbers as CSV |
//! | `text` | numbers and names for people |
//!
//! A module fills in a [`Report`] and renders it. Rendering measures and simulates nothing, so the
//! same report always gives the same bytes.

mod draw;
pub mod figure;
pub mod live;
mod page;
pub mod shim;
pub mod simulated;
mod text;

pub use figure::Report;
