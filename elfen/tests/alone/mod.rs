//! The command with the preload library as it is shipped, and no other.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::preload::library;

/// The command in a folder of its own: what lies beside it comes before `ELFEN_LIB`, and cargo may
/// have put a debug build of the library there.
fn alone() -> &'static Path {
    static ALONE: OnceLock<PathBuf> = OnceLock::new();
    ALONE.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("alone");
        let alone = folder.join("elfen");
        fs::create_dir_all(&folder).unwrap();
        // Replaced at once: tests of other files run it meanwhile.
        let new = folder.join(std::process::id().to_string());
        fs::hard_link(env!("CARGO_BIN_EXE_elfen"), &new).unwrap();
        fs::rename(&new, &alone).unwrap();
        alone
    })
}

pub(crate) fn command_with_its_library() -> Command {
    let mut command = Command::new(alone());
    command.env("ELFEN_LIB", library());
    command
}
