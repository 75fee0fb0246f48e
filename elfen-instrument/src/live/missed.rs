//! Why a batch thread has no check near the place where it was interrupted.

use std::io;

use elfen_rewrite::DecodeError;

use crate::remote::TouchError;

/// One reason each; those of a process hold for all of it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Missed {
    #[error("it was in the kernel")]
    Kernel,
    #[error("no file holds the code: a program made it as it ran")]
    Jit,
    #[error("it is the loader's or the kernel's own code")]
    Loader,
    #[error("nothing tells where the function begins and ends")]
    NoFunction,
    #[error("the function is left alone: {0}")]
    Function(#[from] DecodeError),
    #[error("no instruction there can be moved")]
    NoSite,
    #[error("every check there would run too often")]
    TooDense,
    #[error("it was in a check already")]
    Ours,
    #[error("the process ended, or became another program")]
    Gone,
    #[error("it is none of this batch")]
    Foreign,
    #[error("it did not stop in its own code")]
    Busy,
    #[error("the process: {0}")]
    Process(String),
    /// As long as somebody else does.
    #[error("the process: {0}")]
    Traced(String),
}

/// What the kernel says of a process that ended meanwhile.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ESRCH | libc::ENOENT))
}

impl Missed {
    pub(super) fn of_io(error: io::Error) -> Self {
        if is_gone(&error) { Self::Gone } else { Self::Process(error.to_string()) }
    }

    /// Whether code that called this may do instead.
    pub(super) fn callers_may_help(&self) -> bool {
        matches!(self, Self::NoFunction | Self::Function(_) | Self::NoSite | Self::TooDense)
    }

    /// Whether it is so for whoever stands there, until checks come or go.
    pub(super) fn depends_on_code_only(&self) -> bool {
        self.callers_may_help() || matches!(self, Self::Loader)
    }

    /// As reports name it.
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
