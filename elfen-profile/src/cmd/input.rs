//! The profiles that subcommands read.

use std::path::Path;

use elfen_console::failure::{Failure, Status, named};

use crate::elfprof;
use crate::profile::Profile;

pub(super) fn read(path: &Path) -> Result<Profile, Failure> {
    elfprof::read(path).map_err(|error| {
        let fix = "name a file that `elfen profile record -o` wrote";
        Failure::new(Status::Failed, named("the profile", path), error, fix)
    })
}

/// Refuses a profile without counts.
pub(super) fn check_counted(profile: &Profile, path: &Path) -> Result<(), Failure> {
    if profile.blocks.is_empty() {
        let fix = "record a program that runs longer, or use `--by everything`";
        return Err(Failure::new(
            Status::Failed,
            named("the profile", path),
            "nothing was counted",
            fix,
        ));
    }
    Ok(())
}
