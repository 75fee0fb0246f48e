//! Reads the counters that a Java virtual machine keeps in a mapped file, `hsperfdata`.
//!
//! The file is opened through the process's mapping. So it is found in containers, and wherever the
//! machine's temporary folder is. The file is untrusted input: every offset is checked against its
//! length.

use std::fs::File;
use std::io;
use std::path::Path;

use elfen_instrument::remote::{Mapping, mappings};

use crate::mapped;
use crate::process::plain_text;

/// The prefix of the folder's name; the user's name follows.
const FOLDER: &str = "hsperfdata_";
const MAGIC: u32 = 0xcafe_c0c0;
/// Sizes of the file's header and of an entry's header.
const HEAD_BYTES: usize = 32;
const ENTRY_BYTES: usize = 20;
const LITTLE_ENDIAN: u8 = 1;
/// The type of a counter of eight bytes: Java's code for long.
const LONG: u8 = b'J';
/// Limit of the file's size. A JVM has about 300 counters in 32 KiB, and can be configured to
/// reserve more.
const FILE_BYTES_MAX: u64 = 16 << 20;

#[derive(Debug, thiserror::Error)]
pub enum HsperfError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(
        "process {0} has no such counters: it is not a Java virtual machine, or runs with \
         -XX:+PerfDisableSharedMem"
    )]
    None(u32),
    #[error("{0:?} is not a file of counters, or has another format")]
    Form(String),
}

/// An eight-byte counter, and its offset in the file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Counter {
    pub name: String,
    pub offset: u64,
}

/// All counters of a process, and the file that contains them.
pub fn counters(process: u32) -> Result<(File, Vec<Counter>), HsperfError> {
    let is_it = |mapping: &Mapping| {
        let folder = Path::new(&mapping.name).parent().and_then(Path::file_name);
        folder.is_some_and(|folder| folder.to_string_lossy().starts_with(FOLDER))
    };
    let mapping = mappings(process)?.into_iter().find(is_it).ok_or(HsperfError::None(process))?;
    let file = mapped::open(process, &mapping)?;
    let bytes = mapped::read(&file, FILE_BYTES_MAX)?;
    let counters = parse(&bytes).ok_or(HsperfError::Form(mapping.name))?;
    Ok((file, counters))
}

fn parse(bytes: &[u8]) -> Option<Vec<Counter>> {
    let number = |at: usize| {
        let word = bytes.get(at..)?.first_chunk::<4>()?;
        usize::try_from(u32::from_le_bytes(*word)).ok()
    };
    let magic = u32::from_be_bytes(*bytes.first_chunk()?);
    if magic != MAGIC || *bytes.get(4)? != LITTLE_ENDIAN || bytes.len() < HEAD_BYTES {
        return None;
    }
    let mut at = number(24)?;
    let entries = number(28)?;
    let mut found = Vec::new();
    for _ in 0..entries.min(bytes.len() / ENTRY_BYTES) {
        let length = number(at)?;
        let name_at = number(at + 4)?;
        let values = number(at + 8)?;
        let kind = *bytes.get(at + 12)?;
        let data_at = number(at + 16)?;
        if length < ENTRY_BYTES {
            return None;
        }
        let entry = bytes.get(at..at.checked_add(length)?)?;
        let name = entry.get(name_at..)?.split(|&byte| byte == 0).next()?;
        let offset = at + data_at;
        if kind == LONG && values == 0 && data_at + 8 <= length && offset.is_multiple_of(8) {
            found.push(Counter { name: plain_text(name), offset: offset as u64 });
        }
        at = at.checked_add(length)?;
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, kind: u8, value: u64) -> Vec<u8> {
        let mut name = name.as_bytes().to_vec();
        name.resize(name.len() / 4 * 4 + 4, 0);
        let data_at = u32::try_from((20 + name.len()).next_multiple_of(8)).unwrap();
        let mut bytes = Vec::new();
        for word in [data_at + 8, 20, 0] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend([kind, 0, 0, 0]);
        bytes.extend(data_at.to_le_bytes());
        bytes.extend(name);
        bytes.resize(data_at as usize, 0);
        bytes.extend(value.to_le_bytes());
        bytes
    }

    fn file() -> Vec<u8> {
        let mut bytes = vec![0xca, 0xfe, 0xc0, 0xc0, 1, 2, 0, 1];
        bytes.resize(24, 0);
        bytes.extend([32_u32, 3].iter().flat_map(|word| word.to_le_bytes()));
        for one in [
            entry("sun.gc.collector.0.invocations", b'J', 7),
            entry("java.version", b'B', 0),
            entry("sun.os.hrt.ticks", b'J', 9),
        ] {
            bytes.extend(one);
        }
        bytes
    }

    #[test]
    fn counters_are_found_by_name() {
        let bytes = file();
        let found = parse(&bytes).unwrap();
        let values: Vec<(&str, u8)> = found
            .iter()
            .map(|one| (one.name.as_str(), bytes[usize::try_from(one.offset).unwrap()]))
            .collect();
        assert_eq!(values, [("sun.gc.collector.0.invocations", 7), ("sun.os.hrt.ticks", 9)]);
    }

    #[test]
    fn damaged_files_are_refused_or_cut_short() {
        let whole = file();
        for cut in 0..whole.len() {
            let found = parse(&whole[..cut]);
            let inside = |one: &Counter| one.offset + 8 <= cut as u64;
            assert!(found.is_none_or(|found| found.iter().all(inside)), "{cut}");
        }
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 0xff;
            let inside = |one: &Counter| one.offset + 8 <= bytes.len() as u64;
            assert!(parse(&bytes).is_none_or(|found| found.iter().all(inside)), "{at}");
        }
    }

    #[test]
    fn this_process_is_no_java_virtual_machine() {
        assert!(matches!(counters(std::process::id()), Err(HsperfError::None(_))));
    }
}
