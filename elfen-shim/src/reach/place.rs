//! A number in memory, and why one cannot be had.

use std::io;
use std::sync::atomic::AtomicU64;

use crate::recording::Source;
use crate::signal_spec::Width;

/// A number that can be read.
#[derive(Clone, Debug)]
pub struct Place {
    pub word: &'static AtomicU64,
    /// Of the number in its word.
    pub offset: u64,
    pub width: Width,
    pub source: Source,
    /// 0 until the word has the program's own value; `None` of a word that has it already.
    pub ready: Option<&'static AtomicU64>,
}

/// Why something cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum Unreached {
    #[error("{0}")]
    Wrong(String),
    #[error("{0}")]
    Failed(String),
    #[error(transparent)]
    Io(#[from] io::Error),
}
