//! What makes a service wait for storage: its files' pages are put out of memory, so that whoever
//! touches them waits for a disk.

use std::ffi::c_void;
use std::fs;
use std::io;
use std::os::fd::AsRawFd;

use elfen_rt::clock::monotonic_ns;

use super::inject::{Injured, Stop};

/// A process whose mapped files are put out of memory.
#[derive(Debug)]
pub struct PageOut {
    process: u32,
    named: Stop,
}

/// The kernel takes no more at once (IOV_MAX).
const MOST: usize = 1_024;

impl PageOut {
    pub fn new(process: u32) -> io::Result<Self> {
        Ok(Self { process, named: Stop::new(process)? })
    }

    /// Puts out what it has mapped of files and does not execute; says how long that took.
    pub fn hurt(&self) -> io::Result<Injured> {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.process))?;
        let ranges: Vec<libc::iovec> = maps.lines().filter_map(range).collect();
        if ranges.is_empty() {
            return Err(io::Error::other("it has mapped no file's data"));
        }
        let from_ns = monotonic_ns();
        for some in ranges.chunks(MOST) {
            let fd = self.named.descriptor().as_raw_fd();
            let (at, count) = (some.as_ptr(), some.len());
            // SAFETY: `some` is ours and lives; its addresses are the other process's, which the
            // kernel checks.
            let done = unsafe {
                libc::syscall(libc::SYS_process_madvise, fd, at, count, libc::MADV_PAGEOUT, 0)
            };
            if done < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        let to_ns = monotonic_ns();
        Ok(Injured { from_ns, to_ns, effective_ns: to_ns - from_ns, connection: None })
    }
}

/// A line of /proc/PID/maps, if it is data of a file on a disk.
fn range(line: &str) -> Option<libc::iovec> {
    let mut fields = line.split_whitespace();
    let (range, rights) = (fields.next()?, fields.next()?);
    let path = fields.nth(3)?;
    let is_data = rights.starts_with('r') && !rights.contains('x') && path.starts_with('/');
    if !is_data || path.starts_with("/dev/") || path.starts_with("/memfd:") {
        return None;
    }
    let (from, to) = range.split_once('-')?;
    let (from, to) = (usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?);
    let iov_base = std::ptr::without_provenance_mut::<c_void>(from);
    Some(libc::iovec { iov_base, iov_len: to.checked_sub(from)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_of_files_alone() {
        let line = |rights: &str, path: &str| {
            let line = format!("7f0000001000-7f0000003000 {rights} 00000000 fe:00 12 {path}");
            range(&line).map(|range| (range.iov_base.addr(), range.iov_len))
        };
        assert_eq!(line("r--s", "/srv/index"), Some((0x7f00_0000_1000, 0x2000)));
        for (rights, path) in [("r-xp", "/usr/lib/a.so"), ("---p", "/srv/index")] {
            assert_eq!(line(rights, path), None);
        }
        let kernels = ["[heap]", "", "/dev/shm/a", "/memfd:a"];
        assert!(kernels.iter().all(|path| line("rw-p", path).is_none()));
    }
}
