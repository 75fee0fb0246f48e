//! Makes a service wait for storage: evicts the pages of its files from memory, so that the next
//! access waits for a disk.

use std::ffi::c_void;
use std::fs;
use std::io;
use std::os::fd::AsRawFd;

use elfen_rt::clock::monotonic_ns;

use super::inject::{Injection, Stop};

/// A process whose mapped files are evicted from memory.
#[derive(Debug)]
pub struct PageOut {
    process: u32,
    process_handle: Stop,
}

/// The kernel takes no more ranges in one call (IOV_MAX).
const RANGES_MAX: usize = 1_024;

impl PageOut {
    pub fn new(process: u32) -> io::Result<Self> {
        Ok(Self { process, process_handle: Stop::new(process)? })
    }

    /// Evicts the data of mapped files, but not their code. Returns how long that took.
    pub fn inject(&self) -> io::Result<Injection> {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.process))?;
        let ranges: Vec<libc::iovec> = maps.lines().filter_map(range).collect();
        if ranges.is_empty() {
            return Err(io::Error::other("it has mapped no file's data"));
        }
        let from_ns = monotonic_ns();
        evict(&ranges, |some| self.advise(some))?;
        let to_ns = monotonic_ns();
        Ok(Injection::all(from_ns, to_ns))
    }

    /// Asks the kernel to evict ranges. Returns how many bytes it did, from the first on.
    fn advise(&self, ranges: &[libc::iovec]) -> io::Result<usize> {
        let fd = self.process_handle.descriptor().as_raw_fd();
        let at = ranges.as_ptr();
        let count = ranges.len();
        // SAFETY: `ranges` is a live slice of ours. Its addresses are in the other process, and the
        // kernel checks them.
        let done = unsafe {
            libc::syscall(libc::SYS_process_madvise, fd, at, count, libc::MADV_PAGEOUT, 0)
        };
        usize::try_from(done).map_err(|_| io::Error::last_os_error())
    }
}

/// Evicts all that can be evicted. The kernel stops at a mapping that it can't evict (locked, of
/// huge pages, or gone) and returns how far it came. That mapping is skipped.
fn evict(
    ranges: &[libc::iovec],
    mut ask: impl FnMut(&[libc::iovec]) -> io::Result<usize>,
) -> io::Result<()> {
    let mut at = 0;
    let mut refused = None;
    let mut put = 0;
    while at < ranges.len() {
        let some = &ranges[at..(at + RANGES_MAX).min(ranges.len())];
        match ask(some) {
            Ok(bytes) => {
                let mut left = bytes;
                let whole = some.iter().take_while(|range| {
                    let is_whole = range.iov_len <= left;
                    left -= if is_whole { range.iov_len } else { 0 };
                    is_whole
                });
                let whole = whole.count();
                put += whole;
                // If it did not evict even the first range, retrying that range would fail again.
                at += whole.max(1);
            }
            Err(error) => match error.raw_os_error() {
                Some(libc::EINVAL | libc::ENOMEM) => {
                    refused = Some(error);
                    at += 1;
                }
                _ => return Err(error),
            },
        }
    }
    refused.filter(|_| put == 0).map_or(Ok(()), Err)
}

/// Parses a line of /proc/PID/maps. Returns `None` unless it is data of a file on a disk.
fn range(line: &str) -> Option<libc::iovec> {
    let mut fields = line.split_whitespace();
    let range = fields.next()?;
    let rights = fields.next()?;
    let path = fields.nth(3)?;
    let is_data = rights.starts_with('r') && !rights.contains('x') && path.starts_with('/');
    if !is_data || path.starts_with("/dev/") || path.starts_with("/memfd:") {
        return None;
    }
    let (from, to) = range.split_once('-')?;
    let from = usize::from_str_radix(from, 16).ok()?;
    let to = usize::from_str_radix(to, 16).ok()?;
    let iov_base = std::ptr::without_provenance_mut::<c_void>(from);
    Some(libc::iovec { iov_base, iov_len: to.checked_sub(from)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: mappings behind one that can't be evicted are evicted. Method: a model of
    /// process_madvise(2) that refuses some: it stops there, and fails only if that is the first.
    #[test]
    fn refused_mappings_are_skipped() {
        let all: Vec<libc::iovec> = (0..3_000_usize)
            .map(|at| libc::iovec { iov_base: std::ptr::without_provenance_mut(at), iov_len: 4096 })
            .collect();
        let run = |refuses: &dyn Fn(usize) -> bool, error: i32| {
            let mut put = Vec::new();
            let asked = evict(&all, |some| {
                assert!(some.len() <= RANGES_MAX);
                let before = put.len();
                let good = some.iter().map(|range| range.iov_base.addr());
                put.extend(good.take_while(|at| !refuses(*at)));
                match put.len() - before {
                    0 => Err(io::Error::from_raw_os_error(error)),
                    some => Ok(some * 4096),
                }
            });
            (put, asked.map_err(|error| error.raw_os_error()))
        };
        let refuses = |at: usize| [0, 7, 8, 2_999].contains(&at);
        let (put, asked) = run(&refuses, libc::EINVAL);
        let expected: Vec<usize> = (0..3_000).filter(|at| !refuses(*at)).collect();
        assert_eq!((put, asked), (expected, Ok(())));
        assert_eq!(run(&|_| true, libc::EINVAL), (Vec::new(), Err(Some(libc::EINVAL))));
        assert_eq!(run(&|at| at > 5, libc::ESRCH).1, Err(Some(libc::ESRCH)));
    }

    #[test]
    fn only_data_of_files_is_evicted() {
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
