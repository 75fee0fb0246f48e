//! The folder for the temporary files of one live run, and the name of its service's page.
//!
//! Dropping this value removes the folder and the page. A killed run leaves them behind. The
//! folder's name identifies its process, and the next live run removes the folders of dead
//! processes.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use elfen_rt::process::{Identity, Liveness};
use elfen_rt::service::Service;

const PREFIX: &str = "elfen-live-";

#[derive(Debug)]
pub(crate) struct Scratch {
    dir: PathBuf,
    service: String,
    lanes: u32,
}

impl Scratch {
    /// Creates the folder in the system's folder for temporary files. `lanes` is the number of
    /// request lanes of the service.
    pub(crate) fn new(lanes: u32) -> io::Result<Self> {
        let temporary = std::env::temp_dir();
        let own = Identity::own().ok_or_else(|| io::Error::other("/proc cannot be read"))?;
        remove_leftovers(&temporary);
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let service = format!("{PREFIX}{:x}-{}", own.word(), NEXT.fetch_add(1, Relaxed));
        // The folder's name has the number of lanes, because removing the page requires it.
        let dir = temporary.join(format!("{service}.{lanes}"));
        DirBuilder::new()
            .mode(0o700)
            .create(&dir)
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", dir.display())))?;
        Ok(Self { dir, service, lanes })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Returns new files for the stdout and the stderr of a child.
    pub(super) fn output_files(&self) -> [PathBuf; 2] {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Relaxed);
        ["out", "err"].map(|kind| self.path(&format!("{number}.{kind}")))
    }

    /// Returns the name of the service's page.
    pub(super) fn service(&self) -> &str {
        &self.service
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        remove(&self.dir, &self.service, self.lanes);
    }
}

/// Removes the folder and the page. If another user owns a page with this name, it cannot be opened
/// and is not removed.
fn remove(dir: &Path, service: &str, lanes: u32) {
    if let Ok(page) = Service::open(service, lanes) {
        let _gone = page.remove();
    }
    let _gone = fs::remove_dir_all(dir);
}

/// Removes the folders and pages of this user's killed live runs.
fn remove_leftovers(temporary: &Path) {
    let Ok(own) = fs::metadata("/proc/self").map(|own| own.uid()) else { return };
    let Ok(entries) = fs::read_dir(temporary) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some((service, owner, lanes)) = name.to_str().and_then(owner_of) else { continue };
        let ours = entry.metadata().is_ok_and(|data| data.is_dir() && data.uid() == own);
        if ours && owner.liveness() == Liveness::Dead {
            remove(&entry.path(), service, lanes);
        }
    }
}

/// Parses a folder's name. Returns the service, the process and the number of lanes.
fn owner_of(name: &str) -> Option<(&str, Identity, u32)> {
    let (service, lanes) = name.split_once('.')?;
    let (word, _) = service.strip_prefix(PREFIX)?.split_once('-')?;
    let word = u64::from_str_radix(word, 16).ok()?;
    let lanes = lanes.parse().ok().filter(|&lanes| lanes > 0)?;
    Some((service, Identity::from_word(word)?, lanes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_folders_are_left_alone() {
        for name in [
            "elfen-live-",
            "elfen-live-0-0.1",
            "elfen-live-x-0.1",
            "x.1",
            "elfen-live-fffffffffffffff0-0.0",
        ] {
            assert!(owner_of(name).is_none(), "{name}");
        }
    }
}
