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
        put_out(&ranges, |some| self.ask(some))?;
        let to_ns = monotonic_ns();
        Ok(Injured::all(from_ns, to_ns))
    }

    /// How many bytes the kernel has put out, from the first on.
    fn ask(&self, ranges: &[libc::iovec]) -> io::Result<usize> {
        let fd = self.named.descriptor().as_raw_fd();
        let (at, count) = (ranges.as_ptr(), ranges.len());
        // SAFETY: `ranges` is ours and lives; its addresses are the other process's, which the
        // kernel checks.
        let done = unsafe {
            libc::syscall(libc::SYS_process_madvise, fd, at, count, libc::MADV_PAGEOUT, 0)
        };
        usize::try_from(done).map_err(|_| io::Error::last_os_error())
    }
}

/// Puts out all that can be. The kernel stops at a mapping that it can't (one that is locked, of
/// huge pages, or gone) and says how far it came: that one is left out.
fn put_out(
    ranges: &[libc::iovec],
    mut ask: impl FnMut(&[libc::iovec]) -> io::Result<usize>,
) -> io::Result<()> {
    let (mut at, mut refused) = (0, None);
    let mut put = 0;
    while at < ranges.len() {
        let some = &ranges[at..(at + MOST).min(ranges.len())];
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
                // Nothing of the first one: it would say the same again.
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

    /// Goal: what lies behind a mapping that can't be put out is put out. Method: a kernel that
    /// refuses some, as process_madvise(2) does: it stops there, and fails only at the first.
    #[test]
    fn mappings_that_are_refused_are_left_out() {
        let all: Vec<libc::iovec> = (0..3_000_usize)
            .map(|at| libc::iovec { iov_base: std::ptr::without_provenance_mut(at), iov_len: 4096 })
            .collect();
        let run = |refuses: &dyn Fn(usize) -> bool, error: i32| {
            let mut put = Vec::new();
            let asked = put_out(&all, |some| {
                assert!(some.len() <= MOST);
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
