//! Reads words of another process's private memory with a system call.
//!
//! A reading briefly takes the lock of the process's mappings, which delays the process. So words
//! are read every 100 us, and not with each sample.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Copies words of one process into local words.
#[derive(Debug, Default)]
pub struct VmReader {
    process: libc::pid_t,
    addresses: Vec<u64>,
    values: Vec<u64>,
    words: Vec<&'static AtomicU64>,
    /// The number of readings that failed because the memory is no longer mapped.
    pub failed: u64,
}

impl VmReader {
    /// Adds the word at an address of a process. The word is read once, so that a refusal is
    /// reported.
    pub fn add(&mut self, process: u32, at: u64) -> io::Result<&'static AtomicU64> {
        let word: &'static AtomicU64 = Box::leak(Box::new(AtomicU64::new(0)));
        self.process = process.cast_signed();
        self.addresses.push(at);
        self.values.push(0);
        self.words.push(word);
        self.read().inspect_err(|_| {
            self.addresses.pop();
            self.values.pop();
            self.words.pop();
        })?;
        Ok(word)
    }

    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Reads all added words.
    pub fn fetch(&mut self) {
        self.failed += u64::from(self.read().is_err());
    }

    fn read(&mut self) -> io::Result<()> {
        // On the stack, because the sampling loop must not allocate.
        let mut remote = [const { libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 } }; 8];
        for (vector, &at) in remote.iter_mut().zip(&self.addresses) {
            let at = usize::try_from(at).unwrap_or(0);
            *vector = libc::iovec { iov_base: std::ptr::without_provenance_mut(at), iov_len: 8 };
        }
        let count = self.addresses.len().min(remote.len());
        let bytes = count * 8;
        let local = libc::iovec { iov_base: self.values.as_mut_ptr().cast(), iov_len: bytes };
        // SAFETY: `local` is the buffer `values`, which has eight bytes for each address. The
        // kernel checks remote addresses.
        let read = unsafe {
            libc::process_vm_readv(self.process, &local, 1, remote.as_ptr(), count as u64, 0)
        };
        if read < 0 {
            return Err(io::Error::last_os_error());
        }
        if usize::try_from(read).unwrap_or(0) < bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        for (word, value) in self.words.iter().zip(&self.values) {
            word.store(*value, Relaxed);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_this_process_are_read() {
        let own = Box::new(AtomicU64::new(5));
        let at = std::ptr::from_ref(&*own).addr() as u64;
        let mut reader = VmReader::default();
        let word = reader.add(std::process::id(), at).unwrap();
        assert_eq!(word.load(Relaxed), 5);
        own.store(6, Relaxed);
        reader.fetch();
        assert_eq!((word.load(Relaxed), reader.failed), (6, 0));
        assert!(reader.add(std::process::id(), 8).is_err(), "nothing is mapped there");
        reader.fetch();
        assert_eq!(reader.failed, 0, "a refused address is not read again");
    }
}
