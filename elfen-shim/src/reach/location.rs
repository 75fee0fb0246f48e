//! The location of a number in memory, and reasons why it cannot be read.

use std::io;
use std::sync::atomic::AtomicU64;

use crate::recording::Source;
use crate::signal_spec::Width;

/// Where a number can be read.
#[derive(Clone, Debug)]
pub struct NumberLocation {
    pub word: &'static AtomicU64,
    /// Byte offset of the number in its word.
    pub offset: u64,
    pub width: Width,
    pub source: Source,
    /// A word that is 0 until the page of this number contains the program's own data. `None` if
    /// the page already contains it.
    pub ready: Option<&'static AtomicU64>,
}

/// Why a number cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum ReachError {
    /// The request is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The request is valid, but not possible here.
    #[error("{0}")]
    Failed(String),
    #[error(transparent)]
    Io(#[from] io::Error),
}
