//! A file to read from, unpacked on the way if it is .bz2 (told by its first bytes, not by its
//! name).

use bzip2::bufread::MultiBzDecoder;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

pub(super) type Input = Box<dyn BufRead>;

const BUFFER_BYTES: usize = 256 * 1024;

pub(super) fn open(path: &Path) -> io::Result<Input> {
    let mut file = BufReader::with_capacity(BUFFER_BYTES, File::open(path)?);
    if file.fill_buf()?.starts_with(b"BZh") {
        // Dumps are many streams one after the other.
        let unpacked = MultiBzDecoder::new(file);
        return Ok(Box::new(BufReader::with_capacity(BUFFER_BYTES, unpacked)));
    }
    Ok(Box::new(file))
}
