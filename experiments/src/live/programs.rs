//! Where the programs are that a live run starts: beside the running command, where a package puts
//! them, or where the user says.
//!
//! `cargo run` builds one program; `cargo build --release` builds all, side by side.

use std::path::{Path, PathBuf};

use super::LiveError;

/// A folder in which to look for Elfen's programs and libraries.
const VARIABLE: &str = "ELFEN_LIB";

/// All that a live run starts.
#[derive(Clone, Debug)]
pub struct Programs {
    pub elfen: PathBuf,
    pub search: PathBuf,
    pub load: PathBuf,
    pub batch: PathBuf,
}

impl Programs {
    /// Finds them, or says what was tried.
    pub fn find() -> Result<Self, LiveError> {
        let elfen = running()?;
        Ok(Self {
            search: find_program("elfen-search")?,
            load: find_program("elfen-load")?,
            batch: find_program("elfen-batch")?,
            elfen,
        })
    }
}

/// One of Elfen's programs, or what was tried.
pub(crate) fn find_program(name: &'static str) -> Result<PathBuf, LiveError> {
    let named = std::env::var_os(VARIABLE).map(PathBuf::from);
    let elfen = running()?;
    let folders = folders(&elfen, named.as_deref());
    let tried: Vec<PathBuf> = folders.iter().map(|folder| folder.join(name)).collect();
    let found = tried.iter().find(|path| path.is_file()).cloned();
    found.ok_or(LiveError::NotFound { name, tried })
}

/// The command that runs.
pub(super) fn running() -> Result<PathBuf, LiveError> {
    std::env::current_exe()
        .map_err(|error| LiveError::Io { what: "finding the running command".to_owned(), error })
}

/// Where to look, in this order.
fn folders(command: &Path, named: Option<&Path>) -> Vec<PathBuf> {
    let beside = command.parent().map(Path::to_owned);
    let packaged = beside.as_deref().and_then(Path::parent).map(|prefix| prefix.join("lib/elfen"));
    [beside, packaged, named.map(Path::to_owned)].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beside_the_command_then_in_the_package_then_where_the_user_says() {
        let found = folders(Path::new("/usr/bin/elfen"), Some(Path::new("/elsewhere")));
        assert_eq!(found, ["/usr/bin", "/usr/lib/elfen", "/elsewhere"].map(PathBuf::from));
    }
}
