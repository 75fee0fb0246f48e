//! The folder and the service's page of one live run, and their end.
//!
//! Both go when this drops. A run that is killed leaves them: the folder's name says whose it was,
//! and the next live run removes what dead ones left.

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
    /// Makes the folder in the folder for temporary files; `lanes` are the request lanes of the
    /// service to come.
    pub(crate) fn new(lanes: u32) -> io::Result<Self> {
        let temporary = std::env::temp_dir();
        let own = Identity::own().ok_or_else(|| io::Error::other("/proc cannot be read"))?;
        clear_after_the_dead(&temporary);
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let service = format!("{PREFIX}{:x}-{}", own.word(), NEXT.fetch_add(1, Relaxed));
        // The page's slots are part of the name, as the run that clears up has to know them.
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

    /// The name under which the service publishes.
    pub(super) fn service(&self) -> &str {
        &self.service
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        remove(&self.dir, &self.service, self.lanes);
    }
}

/// A page of the same name that others hold is not removed: opening it fails.
fn remove(dir: &Path, service: &str, lanes: u32) {
    if let Ok(page) = Service::open(service, lanes) {
        let _gone = page.remove();
    }
    let _gone = fs::remove_dir_all(dir);
}

/// Removes what killed live runs of this user left in a folder.
fn clear_after_the_dead(temporary: &Path) {
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

/// The service, the process and the lanes that a folder's name names.
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
    use elfen_rt::signal::service::ServiceReader;

    /// Goal: nothing stays behind, whether we end or are killed. Method: a folder and a page of our
    /// own, and those of a process that never was.
    #[test]
    fn what_the_dead_left_goes_and_so_does_what_is_ours() {
        let dead = Identity::own().unwrap().word() ^ 1; // our id, another start
        let service = format!("{PREFIX}{dead:x}-0");
        let left = std::env::temp_dir().join(format!("{service}.2"));
        fs::create_dir(&left).unwrap();
        fs::write(left.join("file"), "x").unwrap();
        drop(Service::open(&service, 2).unwrap());
        assert!(ServiceReader::open(&service).is_ok());

        let scratch = Scratch::new(1).unwrap();
        assert!(!left.exists());
        assert!(ServiceReader::open(&service).is_err());

        let (dir, service) = (scratch.dir.clone(), scratch.service.clone());
        drop(Service::open(&service, 1).unwrap());
        assert!(dir.is_dir() && ServiceReader::open(&service).is_ok());
        drop(scratch);
        assert!(!dir.exists() && ServiceReader::open(&service).is_err());
    }

    #[test]
    fn other_folders_are_none_of_ours() {
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
