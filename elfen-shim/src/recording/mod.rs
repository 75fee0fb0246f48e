//! Recordings: the samples of each signal as runs of equal values, in memory and in a file.
//!
//! A file consists of `ELFNSHIM`, a version, and blocks: a head in JSON, chunks of one signal each,
//! and a tail with the number of chunks. Numbers are little-endian. The file is written at the end
//! of the run, so the head also has what is known only then. A truncated file is read up to its
//! last complete chunk. Files are untrusted input: every length is checked against the bytes that
//! are there.
//!
//! The observer writes runs in few bytes while it samples (`series.rs`). The process that writes
//! the file compresses each chunk by itself (`file.rs`).

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
