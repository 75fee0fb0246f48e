//! The memory of another process: what is mapped (`/proc/PID/maps`), and its bytes
//! (`/proc/PID/mem`).

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use crate::process::read_text;

/// One line of `/proc/PID/maps`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mapping {
    pub range: Range<u64>,
    pub writable: bool,
    pub executable: bool,
    /// Writes to it are not seen by other processes.
    pub private: bool,
    pub offset: u64,
    /// Device and inode of the mapped file; `None` for anonymous memory.
    pub file: Option<(String, u64)>,
    pub name: String,
}

/// Reads the mappings of a process, in order of their addresses.
pub fn mappings(process: u32) -> io::Result<Vec<Mapping>> {
    Ok(read_text(&format!("/proc/{process}/maps"))?.lines().filter_map(parse).collect())
}

fn parse(line: &str) -> Option<Mapping> {
    let mut fields = line.splitn(6, ' ');
    let mut next = || fields.next();
    let (from, to) = next()?.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    let rights = next()?.as_bytes();
    let offset = number(next()?)?;
    let device = next()?.to_owned();
    let inode: u64 = next()?.parse().ok()?;
    Some(Mapping {
        range: number(from)?..number(to)?,
        writable: rights.get(1) == Some(&b'w'),
        executable: rights.get(2) == Some(&b'x'),
        private: rights.get(3) == Some(&b'p'),
        offset,
        file: (inode != 0).then_some((device, inode)),
        name: next().unwrap_or_default().trim_start().to_owned(),
    })
}

/// The address space that a process had when this was opened. After an execve(2) it still refers to
/// the address space of the old program.
#[derive(Debug)]
pub struct Memory(File);

impl Memory {
    pub fn open(process: u32) -> io::Result<Self> {
        File::options().read(true).write(true).open(format!("/proc/{process}/mem")).map(Self)
    }

    pub fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(bytes, at)
    }

    pub fn read_vec(&self, at: u64, bytes: usize) -> io::Result<Vec<u8>> {
        let mut found = vec![0; bytes];
        self.read(at, &mut found)?;
        Ok(found)
    }

    pub fn words(&self, at: u64, count: usize) -> io::Result<Vec<u64>> {
        let bytes = self.read_vec(at, 8 * count)?;
        let words = bytes.chunks_exact(8);
        Ok(words.map(|word| word.try_into().map_or(0, u64::from_ne_bytes)).collect())
    }

    /// The same as [`Memory::read_vec`], but fewer bytes if the memory ends before.
    pub fn read_up_to(&self, at: u64, bytes: usize) -> io::Result<Vec<u8>> {
        let mut found = vec![0; bytes];
        let length = self.0.read_at(&mut found, at)?;
        found.truncate(length);
        Ok(found)
    }

    /// Writes `bytes`, even to memory that the process itself may not write. Pages of its text
    /// become private copies.
    pub fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, at)
    }

    /// Writes `bytes` if the memory holds `expected`. Returns whether it wrote.
    pub fn replace(&self, at: u64, expected: &[u8], bytes: &[u8]) -> io::Result<bool> {
        if self.read_vec(at, expected.len())? != expected {
            return Ok(false);
        }
        self.write(at, bytes).map(|()| true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_kernel_are_parsed() {
        let line = "7f1c00200000-7f1c00221000 r-xp 00026000 08:01 1234   /lib/x y.so (deleted)";
        let expected = Mapping {
            range: 0x7f1c_0020_0000..0x7f1c_0022_1000,
            writable: false,
            executable: true,
            private: true,
            offset: 0x2_6000,
            file: Some(("08:01".to_owned(), 1234)),
            name: "/lib/x y.so (deleted)".to_owned(),
        };
        assert_eq!(parse(line), Some(expected));
        let heap = parse("55d0c000-55d0d000 rw-s 00000000 00:00 0 ").unwrap();
        assert!(heap.writable && !heap.executable && !heap.private);
        assert_eq!((heap.file, heap.name.as_str()), (None, ""));
        for bad in ["", "1-2", "1-g r-xp 0 0 0", "1-2 r-xp 0 0:0 x"] {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_process_finds_its_own_code() {
        let here = a_process_finds_its_own_code as fn() as usize as u64;
        let own = mappings(std::process::id()).unwrap();
        let code = own.iter().find(|mapping| mapping.range.contains(&here)).unwrap();
        assert!(code.executable && !code.writable && code.private && code.file.is_some());
        assert!(own.is_sorted_by_key(|mapping| mapping.range.start));
    }

    #[test]
    fn unexpected_bytes_are_left_alone() {
        let memory = Memory::open(std::process::id()).unwrap();
        let word = Box::new(0x1122_3344_5566_7788_u64);
        let at = std::ptr::from_ref(&*word).expose_provenance() as u64;
        assert_eq!(memory.read_vec(at, 2).unwrap(), [0x88, 0x77]);
        assert!(!memory.replace(at, &[0x87], &[1]).unwrap());
        assert!(memory.replace(at, &[0x88], &[0x99]).unwrap());
        assert_eq!(memory.read_vec(at, 2).unwrap(), [0x99, 0x77]);
        assert!(memory.read_vec(0, 1).is_err());
    }
}
