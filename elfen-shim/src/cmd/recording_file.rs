//! The file to which a run writes its recording.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use elfen_console::failure::Failure;

use crate::recording::{self, Head, Pool};

/// The file of a recording, which only its owner may read. It is opened before the run, so an
/// unwritable file is reported early. Its old content stays until the recording is written.
pub(super) struct RecordingFile<'a> {
    path: &'a Path,
    file: File,
    /// Whether to remove the file if nothing is written.
    is_new: bool,
}

impl<'a> RecordingFile<'a> {
    pub(super) fn open(path: &'a Path) -> Result<Self, Failure> {
        let is_new = path.symlink_metadata().is_err();
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(false).mode(0o600).open(path);
        let file = file.map_err(|error| Failure::unwritable("recording", path, error))?;
        Ok(Self { path, file, is_new })
    }

    pub(super) fn write(mut self, head: &Head, pool: &Pool) -> Result<(), Failure> {
        let written = self.write_all(head, pool);
        self.is_new = false;
        written.map_err(|error| Failure::unwritable("recording", self.path, error))
    }

    fn write_all(&self, head: &Head, pool: &Pool) -> io::Result<()> {
        // A device cannot be truncated.
        if self.file.metadata()?.is_file() {
            self.file.set_len(0)?;
        }
        let mut out = BufWriter::new(&self.file);
        recording::write(head, pool, &mut out)?;
        out.flush()
    }
}

impl Drop for RecordingFile<'_> {
    fn drop(&mut self) {
        if self.is_new {
            // The run has already failed for another reason, which is printed.
            let _removed = std::fs::remove_file(self.path);
        }
    }
}
