//! The page of a run's live checks.

use std::os::fd::{AsRawFd, RawFd};

use elfen_kernel::preempted::Notes;
use elfen_rt::signal::page::{NAME_BYTES, Page};

use super::words::LiveWords;
use crate::run::pages::{PagesError, keep_open, page};

#[derive(Debug)]
pub(in crate::run) struct LivePage {
    words: Page<LiveWords>,
    /// The kernel's map of CPUs whose thread filters its system calls: a descriptor that batch
    /// processes inherit, and the map's length. `None` where the kernel has no such map.
    pub(in crate::run) filters: Option<(RawFd, u64)>,
}

impl LivePage {
    pub(in crate::run) fn make(notes: &Notes, name: &[u8; NAME_BYTES]) -> Result<Self, PagesError> {
        let filters = match notes.filters() {
            Some((map, bytes)) => Some((keep_open(map.as_raw_fd())?, bytes)),
            None => None,
        };
        Ok(Self { words: page(1, name)?, filters })
    }

    pub(in crate::run) fn words(&self) -> Option<&LiveWords> {
        self.words.slot(0)
    }
}
