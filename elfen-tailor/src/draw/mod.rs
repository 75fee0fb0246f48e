//! A report as pictures: a page for a browser, and a trace for Perfetto.
//!
//! | file | what it draws |
//! | --- | --- |
//! | `page` | the page: first the slowest request and its cause, then the ranking |
//! | `timeline` | one request's time, and below it what ran on its CPUs |
//! | `perfetto` | threads and requests as tracks |

mod page;
mod perfetto;
mod timeline;

pub use page::page;
pub use perfetto::write_perfetto;
