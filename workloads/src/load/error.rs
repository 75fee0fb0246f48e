//! Why there is nothing to report: what the generator's modules return, and the command prints.

use crate::units::{Nanos, show_nanos};
use std::{fmt, io};
use thiserror::Error;

#[derive(Debug, Error)]
pub(crate) enum LoadError {
    /// The arguments, or the files that they name, ask for what cannot be.
    #[error("{0}")]
    Usage(String),
    #[error("{0}")]
    Failed(String),
    #[error("{overrun}{}", after_lost_connection(.last_error))]
    Late { overrun: Overrun, last_error: Option<io::Error> },
    #[error("waiting for the network: {0}")]
    Poll(#[from] io::Error),
    #[error("interrupted before anything was measured")]
    NothingMeasured,
}

fn after_lost_connection(error: &Option<io::Error>) -> String {
    error.as_ref().map(|error| format!(" (a connection was lost: {error})")).unwrap_or_default()
}

/// The schedule was not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overrun {
    pub(crate) late_ns: Nanos,
    pub(crate) bound_ns: Nanos,
    /// The request waited for a connection rather than for the generator.
    pub(crate) starved: bool,
}

impl fmt::Display for Overrun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (late, bound) = (show_nanos(self.late_ns), show_nanos(self.bound_ns));
        let why = if self.starved {
            "no connection had room: use more --connections, --pipeline, or --allow-late"
        } else {
            "the generator fell behind: give it a CPU of its own (--cpu), or --allow-late"
        };
        write!(f, "a request was sent {late} late (bound {bound}) because {why}")
    }
}
