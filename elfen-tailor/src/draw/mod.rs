//! Draws a report: a page for a browser, and a trace for Perfetto.
//!
//! | file | contents |
//! | --- | --- |
//! | `page` | the page: the cause of the tail, the slowest request, then the ranking |
//! | `timeline` | one request's time, and below it what ran on its CPUs |
//! | `perfetto` | threads and requests as tracks |

mod page;
mod perfetto;
mod timeline;

pub use page::page;
pub use perfetto::write_perfetto;
