//! Recordings: what was seen of each signal, as runs of equal values, in memory and in a file.
//!
//! A file is `ELFNSHIM`, a version, a head in JSON, chunks of one signal each, and a tail in JSON;
//! numbers are little-endian. It is written when all has been seen, so the head has what is known
//! at the end as well. A file that was cut is read up to its last whole chunk. What is read is
//! input: every length is held against the bytes at hand, and nothing is believed.
//!
//! The observer writes runs in few bytes as it goes (`series.rs`); what of them is frequent takes
//! less than a byte in a file (`pack.rs`).

#![forbid(unsafe_code)]

#[cfg(test)]
mod damaged;
mod file;
mod form;
mod huffman;
mod join;
mod pack;
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
