//! Figures and tables as one self-contained HTML file.
//!
//! | module | contents |
//! | --- | --- |
//! | [`figure`] | the data of a report: tables, figures, panels, series, points |
//! | [`live`] | the summary and the figures of a results file |
//! | [`simulated`] | the thesis's figures from the simulator, and the times of naps |
//! | [`shim`] | the figures of a recording of `elfen shim` |
//! | [`timeline`] | the lanes of one simulated pair over time, as an SVG file |
//! | `draw` | the picture of a figure, drawn with plotters |
//! | `page` | the HTML page, with the numbers of its figures as CSV |
//! | `text` | formats numbers and names for readers |
//!
//! `live`, `simulated` and `shim` fill in a [`HtmlReport`]. Rendering measures and simulates
//! nothing, so the same report always gives the same bytes.

mod draw;
pub mod figure;
pub mod live;
mod page;
pub mod shim;
pub mod simulated;
pub(crate) mod text;
pub mod timeline;

pub use figure::HtmlReport;
