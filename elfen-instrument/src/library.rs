//! Finds the preload library and puts it into `LD_PRELOAD`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The library's file name.
pub const LIBRARY: &str = "libelfen_preload.so";

/// Names a folder that is searched for Elfen's libraries.
const VARIABLE: &str = "ELFEN_LIB";

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LibraryError {
    #[error("no {LIBRARY} at {}", list_of(.tried))]
    NotFound { tried: Vec<PathBuf> },
    /// The loader splits `LD_PRELOAD` at spaces and colons, and has no escape for them.
    #[error("the path {0:?} contains a space or a colon, which separates libraries in LD_PRELOAD")]
    Path(PathBuf),
}

/// Finds the library in the folder of the running command, in the folder that packages use, or in
/// the folder that `ELFEN_LIB` names.
pub fn find_library() -> Result<PathBuf, LibraryError> {
    let command = std::env::current_exe().ok();
    let folder = command.as_deref().and_then(Path::parent);
    let named = std::env::var_os(VARIABLE).map(PathBuf::from);
    let tried = candidates(folder, named.as_deref());
    let found = tried.iter().find(|place| place.is_file()).cloned();
    let found = found.ok_or(LibraryError::NotFound { tried })?;
    if found.as_os_str().as_bytes().iter().any(|byte| b" :\t\n".contains(byte)) {
        return Err(LibraryError::Path(found));
    }
    Ok(found)
}

fn list_of(tried: &[PathBuf]) -> String {
    tried.iter().map(|place| place.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn candidates(command: Option<&Path>, named: Option<&Path>) -> Vec<PathBuf> {
    let sibling = command.map(Path::to_owned);
    let packaged = command.and_then(Path::parent).map(|prefix| prefix.join("lib/elfen"));
    let folders = [sibling, packaged, named.map(Path::to_owned)];
    folders.into_iter().flatten().map(|folder| folder.join(LIBRARY)).collect()
}

/// The value for `LD_PRELOAD`: the library first, then the previous value.
pub fn preload(library: &Path, before: Option<&OsStr>) -> OsString {
    let mut value = OsString::from(library);
    if let Some(before) = before.filter(|before| !before.is_empty()) {
        value.push(":");
        value.push(before);
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_searched_next_to_the_command_then_in_the_package_then_in_elfen_lib() {
        let found = candidates(Some("/usr/bin".as_ref()), Some("/elsewhere".as_ref()));
        let expected = ["/usr/bin/", "/usr/lib/elfen/", "/elsewhere/"];
        let expected: Vec<PathBuf> =
            expected.iter().map(|folder| PathBuf::from(format!("{folder}{LIBRARY}"))).collect();
        assert_eq!(found, expected);
        let error = LibraryError::NotFound { tried: expected };
        assert!(error.to_string().contains("/usr/lib/elfen/libelfen_preload.so, /elsewhere/"));
    }

    #[test]
    fn previously_preloaded_libraries_stay() {
        let library = Path::new("/l.so");
        assert_eq!(preload(library, None), "/l.so");
        assert_eq!(preload(library, Some("".as_ref())), "/l.so");
        assert_eq!(preload(library, Some("/a.so b.so".as_ref())), "/l.so:/a.so b.so");
    }
}
