//! A report as pictures: a page for a browser, and a trace for Perfetto.
//!
//! | file | what it does |
//! | --- | --- |
//! | `page` | the page: first the slowest request and its cause, then the ranking |
//! | `timeline` | one request's time, and below it what ran on its CPUs |
//! | `tail` | what slow requests had of each cause, against those of the middle |
//! | `svg` | the elements of both pictures |
//! | `perfetto`, `protobuf` | threads and requests as tracks |

mod page;
mod perfetto;
mod protobuf;
mod svg;
mod tail;
mod timeline;

pub use page::page;
pub use perfetto::trace;
