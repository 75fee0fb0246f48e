//! What the commands for papers on profiles begin with: `elfen`, a folder, and programs.

use std::fmt::Display;
use std::path::PathBuf;

use elfen_console::failure::{Failure, Status};
use elfen_console::programs::find_program;

use crate::live::scratch::Scratch;
use crate::profile::programs::{self, Program};

pub(super) struct Laboratory {
    pub(super) elfen: PathBuf,
    /// Where the inputs are, and where recordings go.
    pub(super) folder: PathBuf,
    pub(super) programs: Vec<Program>,
    /// Programs that are not installed.
    pub(super) missing: Vec<&'static str>,
    _scratch: Scratch,
}

impl Laboratory {
    /// Prepares the chosen programs, or all, for a command.
    pub(super) fn of(command: &str, chosen: &[String]) -> Result<Self, Failure> {
        let failed = |why: &dyn Display, fix: &str| Failure::new(Status::Failed, command, why, fix);
        let elfen =
            find_program("elfen").map_err(|error| failed(&error, "install the package elfen"))?;
        let scratch = Scratch::new(1).map_err(|error| failed(&error, "set TMPDIR"))?;
        let folder = scratch.path("");
        let (programs, missing) = programs::prepare(&folder, chosen)
            .map_err(|error| failed(&error, "free space in TMPDIR"))?;
        if programs.is_empty() {
            let why = "none of the programs is installed";
            let fix = format!("install one of them: {}", missing.join(", "));
            return Err(Failure::new(Status::Unsupported, command, why, &fix));
        }
        Ok(Self { elfen, folder, programs, missing, _scratch: scratch })
    }
}
