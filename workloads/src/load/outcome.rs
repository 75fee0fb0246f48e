//! How a request ended, in the words that the table, the JSON and the CSV share.

use std::fmt;

/// Why a request got no good answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Failure {
    /// An HTTP status other than 2xx.
    Status(u16),
    /// Redis's own error reply.
    Refused,
    /// Bytes that aren't the protocol.
    Malformed,
    /// The connection ended before the answer did.
    Closed,
    /// No answer within the timeout, counted from the intended send time.
    Timeout,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => write!(f, "{status}"),
            Self::Refused => f.write_str("refused"),
            Self::Malformed => f.write_str("malformed"),
            Self::Closed => f.write_str("closed"),
            Self::Timeout => f.write_str("timeout"),
        }
    }
}

/// What the service says of a request, as far as it does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Timing {
    pub(crate) queue_ns: Option<u64>,
    pub(crate) service_ns: Option<u64>,
    /// Of the latter, what an emulated core made it longer.
    pub(crate) added_ns: Option<u64>,
}

/// A complete answer, whatever it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) result: Result<(), Failure>,
    pub(crate) timing: Timing,
    /// The service will close the connection after this answer.
    pub(crate) closes: bool,
}

impl Reply {
    pub(crate) fn bare(result: Result<(), Failure>) -> Self {
        Self { result, timing: Timing::default(), closes: false }
    }
}

/// The bytes are not the protocol; the connection can't be used any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Malformed;
