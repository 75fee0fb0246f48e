//! A process's memory as a file: `/proc/PID/mem`.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The memory that a process had when this was opened: after an exec it is that of the old program,
/// which nobody runs any more, and not that of the new one.
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

    /// Writes also where the process itself may not: its text becomes private, a page at a time.
    pub fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, at)
    }

    /// Writes if `expected` is there.
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
    fn what_is_not_as_expected_is_left_alone() {
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
