//! `elfen-load`: an open-loop load generator.
//!
//! A [`plan::Plan`] says when each request is due; the [`engine`] decides, without a clock or a
//! socket, what is sent where and what an answer means; the [`driver`] gives it both; a
//! [`record::Recorder`] keeps what was measured; [`report`] says it. [`reference`] is a service
//! whose response times are known, for this generator and others to be held against.

mod args;
pub mod command;
mod driver;
mod engine;
mod plan;
mod protocol;
mod queries;
mod record;
mod reference;
pub(crate) mod report;

use std::io;
use thiserror::Error;

pub(crate) use queries::task_query;
pub(crate) use record::Distribution;

/// Why there is nothing to report.
#[derive(Debug, Error)]
pub(crate) enum LoadError {
    /// The arguments, or the files that they name, ask for what cannot be.
    #[error("{0}")]
    Usage(String),
    #[error("{0}")]
    Failed(String),
    #[error("{overrun}{}", after_lost_connection(.last_error))]
    Late { overrun: engine::Overrun, last_error: Option<io::Error> },
    #[error("waiting for the network: {0}")]
    Poll(#[from] io::Error),
    #[error("interrupted before anything was measured")]
    NothingMeasured,
}

fn after_lost_connection(error: &Option<io::Error>) -> String {
    error.as_ref().map(|error| format!(" (a connection was lost: {error})")).unwrap_or_default()
}
