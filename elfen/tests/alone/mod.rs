//! The command `elfen` with a release build of the preload library.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::preload::library;

/// The command in a folder without the preload library. The command prefers a library in its own
/// folder to `ELFEN_LIB`, and cargo may have put a debug build there.
fn lone_command() -> &'static Path {
    static COMMAND: OnceLock<PathBuf> = OnceLock::new();
    COMMAND.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("alone");
        let command = folder.join("elfen");
        fs::create_dir_all(&folder).unwrap();
        // Replaced atomically, because other test programs run this command meanwhile.
        let new = folder.join(std::process::id().to_string());
        fs::hard_link(env!("CARGO_BIN_EXE_elfen"), &new).unwrap();
        fs::rename(&new, &command).unwrap();
        command
    })
}

pub(crate) fn command_with_its_library() -> Command {
    let mut command = Command::new(lone_command());
    command.env("ELFEN_LIB", library());
    command
}
