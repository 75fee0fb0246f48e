//! What was asked of a server, and how long it took.

use std::time::Duration;

/// A request, by when it was to be sent.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Asked {
    pub(super) due: Duration,
    pub(super) took_us: f64,
}
