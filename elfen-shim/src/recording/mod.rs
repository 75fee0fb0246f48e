//! Recordings: the samples of each signal as runs of equal values, in memory and in a file.
//!
//! A file consists of `ELFNSHIM`, a version, and blocks. The blocks are a head in JSON, chunks of
//! one signal each, and a tail with the number of chunks. Numbers are little-endian. The file is
//! written at the end of the run, so the head can contain results of the run. A truncated file is
//! read up to its last complete chunk. Files are untrusted input: every length is compared with the
//! bytes that remain.
//!
//! While sampling, the observer encodes runs in few bytes (`series.rs`). The process that writes
//! the file compresses each chunk separately (`file.rs`).

#![forbid(unsafe_code)]

#[cfg(test)]
mod damaged;
mod file;
mod form;
mod join;
mod pool;
mod series;
#[cfg(test)]
mod tests;

pub use file::{ReadError, Recording, open, write};
pub use form::{
    ChunkHead, Cost, Dte, Head, Kind, MAGIC, NO_NAME, ObserverHead, Periods, RateFigure, Run,
    RunFigures, Signal, Source, State, StateNames, VERSION,
};
pub use join::Row;
pub use pool::{Full, Pool};
pub use series::Series;
