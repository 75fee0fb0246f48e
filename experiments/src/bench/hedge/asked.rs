//! What was asked of a server, and how long it took.

use std::time::Duration;

/// A request, by when it was to be sent.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Asked {
    pub(super) due: Duration,
    /// By so much its client was late: who is asked does not know of that.
    pub(super) late_us: f64,
    pub(super) took_us: f64,
}
