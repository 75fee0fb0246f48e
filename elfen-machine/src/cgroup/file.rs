//! Reads and writes the kernel's cgroup files as a whole. Errors name the file.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{}: {error}", file.display())]
    File { file: PathBuf, error: io::Error },
    #[error("{} holds {text:?}", file.display())]
    Malformed { file: PathBuf, text: String },
    #[error("no hierarchy here has the {0} controller")]
    NoController(&'static str),
    #[error("{} is {found:?}: a fence requires a cgroup of whole processes", file.display())]
    Threaded { file: PathBuf, found: String },
    #[error("the cgroup of process {0} is not visible from here")]
    Elsewhere(u32),
    #[error("{path} cannot be recorded: {error}")]
    Unrecorded { path: super::path::CgroupPath, error: io::Error },
}

impl Error {
    pub fn unrecorded(path: &super::path::CgroupPath, error: io::Error) -> Self {
        Self::Unrecorded { path: path.clone(), error }
    }

    pub fn is_gone(&self) -> bool {
        let Self::File { error, .. } = self else { return false };
        error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
    }
}

/// A file's text without the line break at its end.
pub(super) fn read(file: &Path) -> Result<String, Error> {
    let mut text = String::new();
    let opened = fs::OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(file);
    let done = opened.and_then(|mut file| file.read_to_string(&mut text));
    match done {
        Ok(_) => Ok(text.trim_end().to_owned()),
        Err(error) => Err(Error::File { file: file.to_owned(), error }),
    }
}

/// Writes with one call, because the kernel takes each write as a separate command.
pub(super) fn write(file: &Path, text: &str) -> Result<(), Error> {
    let opened = fs::OpenOptions::new().write(true).custom_flags(libc::O_NOFOLLOW).open(file);
    let written = opened.and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|error| Error::File { file: file.to_owned(), error })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a symbolic link in place of a cgroup's file does not lead to another file. Method:
    /// each kind of access to a link, and the file behind it.
    #[test]
    fn links_are_not_followed() {
        let folder = std::env::temp_dir().join(format!("elfen-links-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let [file, link] = ["other", "cgroup.procs"].map(|name| folder.join(name));
        fs::write(&file, "mine").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let refused = |error: Error| {
            let Error::File { error, .. } = error else { return false };
            error.raw_os_error() == Some(libc::ELOOP)
        };
        assert!(read(&link).is_err_and(refused));
        assert!(write(&link, "1").is_err_and(refused));
        assert_eq!(read(&file).unwrap(), "mine");
        fs::remove_dir_all(folder).unwrap();
    }
}
