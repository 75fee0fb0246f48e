//! Recordings: what was seen of each signal, as runs of equal values, in memory and in a file.
//!
//! A file is `ELFNSHIM`, a version, a head in JSON, chunks of one signal each, and a tail in JSON;
//! numbers are little-endian. It is written when all has been seen, so the head has what is known
//! at the end as well. A file that was cut is read up to its last whole chunk. What is read is
//! input: every length is held against the bytes at hand, and nothing is believed.

#![forbid(unsafe_code)]

mod file;
mod form;
mod part;
mod pool;
mod read;
mod series;
#[cfg(test)]
mod tests;
mod varint;

pub use file::write;
pub use form::{
    ChunkHead, Cost, Dte, Head, Kind, MAGIC, Observing, Periods, RateFigure, Run, Signal, Source,
    State, VERSION,
};
pub use part::again;
pub use pool::{Full, Pool};
pub use read::{ReadError, Recording, open};
pub use series::Series;
