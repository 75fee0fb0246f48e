//! Why a batch thread has no check near the address where it was interrupted.

use std::io;

use elfen_rewrite::DecodeError;

use crate::remote::TouchError;

/// The reason against processes that may not make the system calls of a check.
pub const FILTERED: &str = "its system calls are filtered (seccomp)";

/// The reasons. Those of a process hold for all its threads.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Missed {
    #[error("the thread was in the kernel")]
    Kernel,
    #[error("the code was generated at run time: it is not mapped from a file")]
    Jit,
    #[error("the code belongs to the loader or the kernel")]
    Loader,
    #[error("the bounds of the function are unknown")]
    NoFunction,
    #[error("the function cannot be patched: {0}")]
    Function(#[from] DecodeError),
    #[error("no instruction there can be moved")]
    NoSite,
    #[error("every check there would run too often")]
    TooDense,
    #[error("the thread was inside a check")]
    Ours,
    #[error("the process ended or executed another program")]
    Gone,
    #[error("the process does not belong to this batch")]
    Foreign,
    #[error("the thread did not stop in its own code")]
    Busy,
    #[error("the process: {0}")]
    Process(String),
    /// Holds as long as another process traces it.
    #[error("the process: {0}")]
    Traced(String),
}

/// Whether an error means that the process has ended.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ESRCH | libc::ENOENT))
}

impl Missed {
    pub(super) fn of_io(error: io::Error) -> Self {
        if is_gone(&error) { Self::Gone } else { Self::Process(error.to_string()) }
    }

    /// Whether a check in a caller may help instead.
    pub(super) fn callers_may_help(&self) -> bool {
        matches!(self, Self::NoFunction | Self::Function(_) | Self::NoSite | Self::TooDense)
    }

    /// Whether the failure depends only on the code, not on the thread. Such a failure holds until
    /// a check is added or removed.
    pub(super) fn depends_on_code_only(&self) -> bool {
        self.callers_may_help() || matches!(self, Self::Loader)
    }

    /// The name in reports.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Jit => "jit",
            Self::Loader => "ld_so",
            Self::NoFunction => "no_function",
            Self::Function(_) | Self::NoSite => "no_place",
            Self::TooDense => "too_dense",
            Self::Ours | Self::Gone | Self::Foreign | Self::Busy => "passing",
            Self::Process(_) | Self::Traced(_) => "refused",
        }
    }
}

impl From<TouchError> for Missed {
    fn from(error: TouchError) -> Self {
        match error {
            TouchError::Busy => Self::Busy,
            TouchError::NoVdso => Self::Gone,
            TouchError::Refused(ref why) if is_gone(why) => Self::Gone,
            TouchError::Refused(_) => Self::Traced(error.to_string()),
            error => Self::Process(error.to_string()),
        }
    }
}
