//! Why checks could not be measured.

use std::io;

use elfen_instrument::LibraryError;

use super::kind::Kind;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("no C compiler, `cc`: {0}")]
    NoCompiler(io::Error),
    #[error("{flags}: {message}")]
    Compiler { flags: String, message: String },
    #[error(transparent)]
    Library(#[from] LibraryError),
    #[error("the batch's channels: {0}")]
    Channels(String),
    #[error("a folder to build in: {0}")]
    Folder(io::Error),
    #[error("{program} with {kind}: {what}")]
    Program { program: &'static str, kind: &'static str, what: String },
}

/// How a program is started, and what for.
pub(super) fn failed(program: &'static str, kind: Option<&Kind>, what: impl Into<String>) -> Error {
    Error::Program { program, kind: kind.map_or("no checks", |kind| kind.name), what: what.into() }
}
