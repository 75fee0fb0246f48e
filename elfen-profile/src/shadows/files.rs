//! The open files of a program, as a shadow sees them: read through descriptors of our own, with
//! what the shadow has written on top.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};

use elfen_instrument::process::read_text;

/// Bytes that a shadow can write to files, and read at once.
pub(super) const BYTES_MAX: usize = 16 << 20;

/// Device and inode.
type FileId = (u64, u64);

/// A regular file that the program has open.
#[derive(Debug)]
struct Opened {
    file: File,
    id: FileId,
    offset: u64,
    appends: bool,
}

/// What was written to a file: not to the file itself.
#[derive(Debug, Default)]
struct Written {
    pieces: Vec<(u64, Vec<u8>)>,
    end: u64,
}

/// The files of one shadow.
#[derive(Debug, Default)]
pub(super) struct Files {
    process: u32,
    opened: HashMap<i32, Opened>,
    closed: HashSet<i32>,
    written: HashMap<FileId, Written>,
    bytes: usize,
}

/// Where an offset is counted from.
#[derive(Clone, Copy, Debug)]
pub(super) enum Whence {
    Start,
    Here,
    End,
}

impl Files {
    /// The files of a process, of which those in `used` are opened at once: their offsets are those
    /// of this moment.
    pub(super) fn of(process: u32, used: &BTreeSet<i32>) -> Self {
        let mut files = Self { process, ..Self::default() };
        for &fd in used {
            if let Ok(opened) = open(process, fd) {
                files.opened.insert(fd, opened);
            }
        }
        files
    }

    /// Takes note that the shadow has closed a descriptor.
    pub(super) fn close(&mut self, fd: i32) {
        self.opened.remove(&fd);
        self.closed.insert(fd);
    }

    /// The regular file of a descriptor; `None` if it is none, or cannot be opened.
    fn regular(&mut self, fd: i32) -> Option<&mut Opened> {
        if self.closed.contains(&fd) {
            return None;
        }
        if !self.opened.contains_key(&fd) {
            self.opened.insert(fd, open(self.process, fd).ok()?);
        }
        self.opened.get_mut(&fd)
    }

    /// Descriptors of regular files that the shadow has used.
    pub(super) fn used(&self) -> impl Iterator<Item = i32> {
        self.opened.keys().copied()
    }

    pub(super) fn is_regular(&mut self, fd: i32) -> bool {
        self.regular(fd).is_some()
    }

    /// Reads at an offset, or at that of the descriptor, which moves on.
    pub(super) fn read(&mut self, fd: i32, bytes: usize, at: Option<u64>) -> Option<Vec<u8>> {
        let opened = self.regular(fd)?;
        let (from, id) = (at.unwrap_or(opened.offset), opened.id);
        let mut found = vec![0; bytes.min(BYTES_MAX)];
        let mut length = 0;
        while length < found.len() {
            match opened.file.read_at(&mut found[length..], from + length as u64) {
                Ok(0) => break,
                Ok(more) => length += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return None,
            }
        }
        if let Some(written) = self.written.get(&id) {
            length = length.max(written.read(from, &mut found));
        }
        found.truncate(length);
        if at.is_none() {
            self.regular(fd)?.offset += length as u64;
        }
        Some(found)
    }

    /// Keeps what the shadow writes to a regular file. `None` if that is too much.
    pub(super) fn write(&mut self, fd: i32, bytes: &[u8], at: Option<u64>) -> Option<()> {
        let size = self.size(fd)?;
        let opened = self.regular(fd)?;
        let from = if opened.appends { size } else { at.unwrap_or(opened.offset) };
        let id = opened.id;
        if at.is_none() {
            opened.offset = from.checked_add(bytes.len() as u64)?;
        }
        self.bytes += bytes.len();
        if self.bytes > BYTES_MAX {
            return None;
        }
        let written = self.written.entry(id).or_default();
        written.end = written.end.max(from.checked_add(bytes.len() as u64)?);
        written.pieces.push((from, bytes.to_vec()));
        Some(())
    }

    fn size(&mut self, fd: i32) -> Option<u64> {
        let opened = self.regular(fd)?;
        let (size, id) = (opened.file.metadata().ok()?.size(), opened.id);
        Some(size.max(self.written.get(&id).map_or(0, |written| written.end)))
    }

    /// Moves the offset of a descriptor, and returns it.
    pub(super) fn seek(&mut self, fd: i32, by: i64, from: Whence) -> Option<u64> {
        let size = self.size(fd)?;
        let opened = self.regular(fd)?;
        let from = match from {
            Whence::Start => 0,
            Whence::Here => opened.offset,
            Whence::End => size,
        };
        opened.offset = from.checked_add_signed(by)?;
        Some(opened.offset)
    }

    /// What fstat(2) says of a descriptor of any kind, as the bytes of `struct stat`.
    pub(super) fn stat(&mut self, fd: i32) -> Option<Vec<u8>> {
        if self.closed.contains(&fd) {
            return None;
        }
        let size = self.size(fd);
        let path = std::ffi::CString::new(format!("/proc/{}/fd/{fd}", self.process)).ok()?;
        let mut stat = std::mem::MaybeUninit::<libc::stat>::zeroed();
        // SAFETY: the path ends with a zero, and `stat` is a local variable.
        if unsafe { libc::stat(path.as_ptr(), stat.as_mut_ptr()) } != 0 {
            return None;
        }
        // SAFETY: the value was zeroed and then written by the kernel.
        let mut stat = unsafe { stat.assume_init() };
        if let Some(size) = size.and_then(|size| size.try_into().ok()) {
            stat.st_size = size;
        }
        let at = std::ptr::from_ref(&stat).cast::<u8>();
        // SAFETY: `stat` is plain data without uninitialised bytes: it was zeroed at first.
        Some(unsafe { std::slice::from_raw_parts(at, size_of_val(&stat)) }.to_vec())
    }

    /// The flags of a descriptor, as open(2) takes them.
    pub(super) fn flags(&self, fd: i32) -> Option<i64> {
        if self.closed.contains(&fd) {
            return None;
        }
        info(self.process, fd, "flags:", 8).map(u64::cast_signed)
    }
}

impl Written {
    /// Puts what was written over bytes from an offset on. Returns where the last of it ends.
    fn read(&self, from: u64, bytes: &mut [u8]) -> usize {
        let index = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX);
        let mut last = 0;
        let end = from + bytes.len() as u64;
        for (at, piece) in &self.pieces {
            let piece_end = at + piece.len() as u64;
            let (start, stop) = (from.max(*at), end.min(piece_end));
            if start < stop {
                let to = index(start - from)..index(stop - from);
                let of = index(start - at)..index(stop - at);
                bytes[to.clone()].copy_from_slice(&piece[of]);
                last = last.max(to.end);
            }
        }
        last
    }
}

/// Opens a regular file that a process has open, to read it. Opening has no effect on other kinds
/// of files: it is known to be regular before it is opened to be read.
fn open(process: u32, fd: i32) -> io::Result<Opened> {
    let link = format!("/proc/{process}/fd/{fd}");
    let named = open_path(&link, libc::O_PATH)?;
    let metadata = File::from(named.try_clone()?).metadata()?;
    if !metadata.is_file() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let offset = info(process, fd, "pos:", 10).ok_or(io::ErrorKind::NotFound)?;
    let flags = info(process, fd, "flags:", 8).unwrap_or(0);
    let own = format!("/proc/self/fd/{}", named.as_raw_fd());
    let file = File::from(open_path(&own, libc::O_RDONLY)?);
    Ok(Opened {
        file,
        id: (metadata.dev(), metadata.ino()),
        offset,
        appends: flags & u64::from(libc::O_APPEND.unsigned_abs()) != 0,
    })
}

fn open_path(path: &str, flags: i32) -> io::Result<OwnedFd> {
    let path = std::ffi::CString::new(path)?;
    // SAFETY: the path ends with a zero.
    let fd = unsafe { libc::open(path.as_ptr(), flags | libc::O_CLOEXEC | libc::O_NOCTTY) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A field of `/proc/PID/fdinfo/FD`.
fn info(process: u32, fd: i32, name: &str, radix: u32) -> Option<u64> {
    let text = read_text(&format!("/proc/{process}/fdinfo/{fd}")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    u64::from_str_radix(line.trim(), radix).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, SeekFrom, Write};

    #[test]
    fn a_shadow_reads_what_it_has_written_and_the_file_stays() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"0123456789").unwrap();
        file.seek(SeekFrom::Start(2)).unwrap();
        let fd = file.as_raw_fd();
        let mut files = Files::of(std::process::id(), &BTreeSet::from([fd]));
        // The offset is that of the moment when it was opened.
        file.seek(SeekFrom::Start(7)).unwrap();
        assert_eq!(files.read(fd, 3, None).unwrap(), b"234");
        files.write(fd, b"abcdefgh", Some(6)).unwrap();
        assert_eq!(files.read(fd, 100, None).unwrap(), b"5abcdefgh");
        assert_eq!(files.read(fd, 4, Some(4)).unwrap(), b"45ab");
        assert_eq!(files.seek(fd, -1, Whence::End).unwrap(), 13);
        assert_eq!(files.read(fd, 9, None).unwrap(), b"h");
        assert_eq!(files.read(fd, 9, None).unwrap(), b"");
        assert!(files.write(fd, &vec![0; BYTES_MAX], None).is_none(), "it is too much");
        let mut text = String::new();
        file.seek(SeekFrom::Start(0)).unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "0123456789");
        files.close(fd);
        assert!(files.read(fd, 1, Some(0)).is_none());
    }

    #[test]
    fn only_regular_files_are_opened() {
        let (reader, writer) = io::pipe().unwrap();
        let mut files = Files::of(std::process::id(), &BTreeSet::new());
        for fd in [reader.as_raw_fd(), writer.as_raw_fd(), -1] {
            assert!(!files.is_regular(fd), "{fd}");
        }
        let null = File::open("/dev/null").unwrap();
        assert!(!files.is_regular(null.as_raw_fd()));
    }
}
