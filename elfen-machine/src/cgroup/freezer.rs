//! Freezes and thaws all tasks of a cgroup.
//!
//! The run folder records each freezer separately from the rest of its cgroup. So `elfen pause` can
//! freeze a fence without the daemon and without the settings file.

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

    /// Whether freezing was requested; some tasks may not have stopped yet.
    pub fn is_requested(&self) -> Result<bool, Error> {
        match self.version {
            Version::One => Ok(read(&self.folder.join("freezer.self_freezing"))? == "1"),
            Version::Two => Ok(read(&self.folder.join("cgroup.freeze"))? == "1"),
        }
    }

    /// Whether the kernel reports all tasks as stopped.
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
