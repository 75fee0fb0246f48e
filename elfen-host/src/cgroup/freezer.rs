//! The file that stops all tasks of a cgroup, and lets them go on.
//!
//! Apart from the rest of a cgroup, and written down as it is: the kill switch finds it in a file
//! and needs nothing else, neither the daemon nor the settings.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::file::{Error, read, write};
use super::hierarchies::Version;

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Freezer {
    pub folder: PathBuf,
    pub version: Version,
}

impl Freezer {
    pub fn freeze(&self) -> Result<(), Error> {
        match self.version {
            Version::One => write(&self.folder.join("freezer.state"), "FROZEN"),
            Version::Two => write(&self.folder.join("cgroup.freeze"), "1"),
        }
    }

    pub fn thaw(&self) -> Result<(), Error> {
        match self.version {
            Version::One => write(&self.folder.join("freezer.state"), "THAWED"),
            Version::Two => write(&self.folder.join("cgroup.freeze"), "0"),
        }
    }

    /// Whether it was told to freeze; a task may still be on its way to its stop.
    pub fn is_told(&self) -> Result<bool, Error> {
        match self.version {
            Version::One => Ok(read(&self.folder.join("freezer.self_freezing"))? == "1"),
            Version::Two => Ok(read(&self.folder.join("cgroup.freeze"))? == "1"),
        }
    }

    /// Whether the kernel says that all tasks stand.
    pub fn is_frozen(&self) -> Result<bool, Error> {
        match self.version {
            Version::One => Ok(read(&self.folder.join("freezer.state"))? == "FROZEN"),
            Version::Two => {
                let events = read(&self.folder.join("cgroup.events"))?;
                Ok(events.lines().any(|line| line == "frozen 1"))
            }
        }
    }
}
