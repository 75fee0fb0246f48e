//! Records fences in `/run/elfen`: how to freeze each of them, and whether all are paused.
//!
//! `elfen pause` reads only this folder. So it works while the daemon is stopped or hangs. A daemon
//! that starts reads the pause and keeps it.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::cgroup::{CgroupPath, Freezer};

/// The default folder. Each test and each further daemon has its own folder.
pub const FOLDER: &str = "/run/elfen";
const LOCK_PATIENCE: Duration = Duration::from_secs(1);
/// The prefix of a file that is still being written.
const UNFINISHED: &str = ".";

/// The record of a fence: what `elfen pause` needs to freeze it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RecordedFence {
    pub name: String,
    pub path: CgroupPath,
    /// The unit, if systemd owns the cgroup.
    pub unit: Option<String>,
    pub freezer: Freezer,
}

/// The record of a service that is confined to its request lanes: what is needed to undo that.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Confined {
    pub service: String,
    /// The cgroup as the settings name it.
    pub place: String,
    pub path: CgroupPath,
    pub unit: Option<String>,
}

#[derive(Clone, Debug)]
pub struct Folder(PathBuf);

impl Folder {
    pub fn new(path: &Path) -> Self {
        Self(path.to_owned())
    }

    pub fn socket(&self) -> PathBuf {
        self.0.join("elfend.sock")
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    fn fences(&self) -> PathBuf {
        self.0.join("fences")
    }

    fn confined_folder(&self) -> PathBuf {
        self.0.join("confined")
    }

    fn paused_file(&self) -> PathBuf {
        self.0.join("paused")
    }

    pub fn make(&self) -> io::Result<()> {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o755);
        builder.create(self.fences())?;
        builder.create(self.confined_folder())
    }

    /// Locks the folder until the returned file is closed. `None` if another process has the lock.
    /// Waits for a moment, because the children of a daemon that has just ended keep the lock until
    /// they have frozen the fences.
    pub fn lock(&self) -> io::Result<Option<File>> {
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(self.0.join("elfend.lock"))?;
        let began = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(file)),
                Err(fs::TryLockError::WouldBlock) if began.elapsed() < LOCK_PATIENCE => {
                    std::thread::sleep(LOCK_PATIENCE / 50);
                }
                Err(fs::TryLockError::WouldBlock) => return Ok(None),
                Err(fs::TryLockError::Error(error)) => return Err(error),
            }
        }
    }

    pub fn record(&self, fence: &RecordedFence) -> io::Result<()> {
        let text = serde_json::to_string(fence)?;
        self.replace(&self.fences().join(&fence.name), &text)
    }

    pub fn forget(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.fences().join(name))
    }

    /// All fences, sorted by name. An invalid file is an error: skipping it would leave its fence
    /// unfrozen.
    pub fn recorded_fences(&self) -> io::Result<Vec<RecordedFence>> {
        let mut all: Vec<RecordedFence> = all_of(&self.fences())?;
        all.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(all)
    }

    pub fn record_confined(&self, one: &Confined) -> io::Result<()> {
        self.replace(&self.confined_file(&one.path), &serde_json::to_string(one)?)
    }

    pub fn forget_confined(&self, one: &Confined) -> io::Result<()> {
        fs::remove_file(self.confined_file(&one.path))
    }

    /// All confined cgroups, sorted by path.
    pub fn confined(&self) -> io::Result<Vec<Confined>> {
        let mut all: Vec<Confined> = all_of(&self.confined_folder())?;
        all.sort_by(|one, other| one.path.cmp(&other.path));
        Ok(all)
    }

    /// The name of the file that records a confined cgroup.
    fn confined_file(&self, path: &CgroupPath) -> PathBuf {
        let name = path.as_str().replace('%', "%25").replace('/', "%2F");
        self.confined_folder().join(name + ".json")
    }

    /// The reason for the pause of all fences; `None` if they are not paused.
    pub fn paused(&self) -> io::Result<Option<String>> {
        match fs::read_to_string(self.paused_file()) {
            Ok(why) => Ok(Some(why.trim().to_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub fn pause(&self, why: &str) -> io::Result<()> {
        self.make()?;
        self.replace(&self.paused_file(), why)
    }

    /// Ends the pause. Returns whether the fences were paused.
    pub fn resume(&self) -> io::Result<bool> {
        match fs::remove_file(self.paused_file()) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Replaces a file atomically: readers see the old text or the new text, never a part.
    fn replace(&self, path: &Path, text: &str) -> io::Result<()> {
        // No file is confused with an unfinished one: names of fences do not begin with a dot.
        let name = path.file_name().map(OsStr::to_string_lossy).unwrap_or_default();
        let new = path.with_file_name(format!("{UNFINISHED}{name}"));
        let mut file = File::create(&new)?;
        file.set_permissions(fs::Permissions::from_mode(0o644))?;
        writeln!(file, "{text}")?;
        fs::rename(&new, path)
    }
}

fn all_of<T: serde::de::DeserializeOwned>(folder: &Path) -> io::Result<Vec<T>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut all = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let whole = |error| io::Error::other(format!("{}: {error}", path.display()));
        if path.file_name().is_some_and(|name| name.as_bytes().starts_with(UNFINISHED.as_bytes())) {
            continue;
        }
        let text = fs::read_to_string(&path)?;
        all.push(serde_json::from_str(&text).map_err(whole)?);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::Version;

    /// Goal: `elfen pause` finds the fences that a daemon has recorded. Method: a folder of the
    /// test's own.
    #[test]
    fn recorded_fences_are_found() {
        let path = std::env::temp_dir().join(format!("elfen-state-{}", std::process::id()));
        let folder = Folder::new(&path);
        assert_eq!(folder.recorded_fences().unwrap(), []);
        assert_eq!(folder.paused().unwrap(), None);
        folder.make().unwrap();
        let freezer = Freezer { folder: "/sys/fs/cgroup/x".into(), version: Version::Two };
        let cgroup = CgroupPath::parse("x").unwrap();
        let [b, a] = ["b.new", "a"].map(|name| RecordedFence {
            name: name.to_owned(),
            path: cgroup.clone(),
            unit: None,
            freezer: freezer.clone(),
        });
        folder.record(&b).unwrap();
        folder.record(&a).unwrap();
        assert_eq!(folder.recorded_fences().unwrap(), [a, b]);
        fs::write(path.join("fences/.a"), "{").unwrap();
        assert_eq!(folder.recorded_fences().unwrap().len(), 2, "an unfinished file is ignored");
        folder.pause("two\nlines").unwrap();
        assert_eq!(folder.paused().unwrap().as_deref(), Some("two\nlines"));
        assert!(folder.resume().unwrap() && !folder.resume().unwrap());
        fs::write(path.join("fences/odd"), "{").unwrap();
        assert!(folder.recorded_fences().is_err_and(|error| error.to_string().contains("odd")));
        let lock = folder.lock().unwrap();
        assert!(lock.is_some() && folder.lock().unwrap().is_none());
        fs::remove_dir_all(path).unwrap();
    }
}
