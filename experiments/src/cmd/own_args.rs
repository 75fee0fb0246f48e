//! A program of the user's own, and how `elfen run` checks it, as commands that measure take them.

use std::ffi::OsStr;

use elfen_console::failure::{Failure, Status};
use elfen_instrument::{Inject, Reason, inspect};

pub(super) const AUTO: &str = "auto";

/// As `elfen run --inject` takes it.
pub(super) fn injects() -> impl Iterator<Item = &'static str> {
    [AUTO].into_iter().chain(Inject::BEST_FIRST.map(Inject::name))
}

/// Said before minutes go by. A file that says nothing of itself may still be one that runs.
pub(super) fn refuse_no_program(program: &OsStr) -> Result<(), Failure> {
    let why = match inspect(program) {
        Err(reason @ Reason::NotFound) => reason.to_string(),
        Err(reason @ (Reason::NotExecutable | Reason::Unreadable(_))) => format!("it {reason}"),
        _ => return Ok(()),
    };
    let fix = "name one that PATH has, or its file";
    let what = format!("program {:?}", program.to_string_lossy());
    Err(Failure::new(Status::Usage, what, why, fix))
}
