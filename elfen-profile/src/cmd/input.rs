//! The profiles that subcommands read.

use std::path::Path;

use elfen_console::failure::{Failure, Status, named};

use crate::elfprof;
use crate::profile::{Profile, Source};

pub(super) fn read(path: &Path) -> Result<Profile, Failure> {
    elfprof::read(path).map_err(|error| {
        let fix = "name a file that `elfen profile record -o` wrote";
        Failure::new(Status::Failed, named("the profile", path), error, fix)
    })
}

/// Refuses a profile without counts.
pub(super) fn check_counted(profile: &Profile, path: &Path) -> Result<(), Failure> {
    check_blocks(profile, path)?;
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

/// Refuses a profile of single instructions, which has no counts of blocks.
pub(super) fn check_blocks(profile: &Profile, path: &Path) -> Result<(), Failure> {
    if profile.by != Source::Samples {
        return Ok(());
    }
    let what = named("the profile", path);
    let why = "it has samples of single instructions, and no counts of blocks";
    let fix = "record it with `--by bursts`; `elfen profile report` prints samples";
    Err(Failure::new(Status::Failed, what, why, fix))
}
