//! Why bursts are not possible.

use std::io;

use elfen_instrument::remote::TouchError;

/// Why no bursts run in a process.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error("{0}")]
    Touch(#[from] TouchError),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Unfit(&'static str),
    /// It may not be loaded yet.
    #[error("it has no C library of a known kind")]
    NoLibrary,
}
