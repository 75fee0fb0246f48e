//! Shared memory without a name, handed on as a descriptor: a memfd whose size is sealed.
//!
//! The id of a System V segment is valid in one IPC namespace only. A descriptor can be sent over a
//! socket, into a container too. A process that receives it could truncate the file under the other
//! readers. So the maker seals the size before it hands on the descriptor, and readers map only
//! sealed files. A seal cannot be removed.

use core::ffi::c_int;
use core::mem::zeroed;

use crate::bpf::Descriptor;
use crate::memory::{Access, Memory, MemoryError};

/// Which processes can map a sealed file writable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Writers {
    AnyProcess,
    /// Only the maker's first mapping is writable. The kernel allows only read-only mappings after
    /// it.
    MakerOnly,
}

/// The seals that a file must have to be mapped.
const OF_SIZE: c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

/// Makes a file of `len` zero bytes. Returns a writable mapping, and a descriptor to hand on.
pub fn create(len: usize, writers: Writers) -> Result<(Memory, Descriptor), MemoryError> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a NUL-terminated literal.
    let fd = unsafe { libc::memfd_create(c"elfen".as_ptr(), flags) };
    if fd < 0 {
        return Err(MemoryError::last());
    }
    // SAFETY: the kernel has just given us this descriptor.
    let file = unsafe { Descriptor::from_raw(fd) };
    let size = libc::off_t::try_from(len).map_err(|_| MemoryError::Size)?;
    // SAFETY: ftruncate takes numbers.
    if unsafe { libc::ftruncate(fd, size) } != 0 {
        return Err(MemoryError::last());
    }
    // Mapped before the seals, one of which forbids writable mappings.
    // SAFETY: `ftruncate` has given the file `len` bytes. No other process has the file, and this
    // function does not return the descriptor before the size is sealed below.
    let memory = unsafe { Memory::map_descriptor(fd, len, Access::Write) }?;
    let of_writers = match writers {
        Writers::AnyProcess => 0,
        Writers::MakerOnly => libc::F_SEAL_FUTURE_WRITE,
    };
    let seals = OF_SIZE | of_writers | libc::F_SEAL_SEAL;
    // SAFETY: F_ADD_SEALS takes numbers.
    match unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, seals) } {
        0 => Ok((memory, file)),
        _ => Err(MemoryError::last()),
    }
}

/// Whether a descriptor refers to a file whose size is sealed. Only memfds can have these seals.
pub fn is_sealed(file: &Descriptor) -> bool {
    // SAFETY: F_GET_SEALS takes a number, and fails on files without seals.
    let seals = unsafe { libc::fcntl(file.raw(), libc::F_GET_SEALS) };
    seals >= 0 && seals & OF_SIZE == OF_SIZE
}

/// Maps a file that another process has made, if its size is sealed.
pub fn map(file: &Descriptor, access: Access) -> Result<Memory, MemoryError> {
    if !is_sealed(file) {
        return Err(MemoryError::Denied);
    }
    // SAFETY: an all-zero stat is a valid value of that plain C structure.
    let mut stat: libc::stat = unsafe { zeroed() };
    // SAFETY: `stat` is ours.
    if unsafe { libc::fstat(file.raw(), &mut stat) } != 0 {
        return Err(MemoryError::last());
    }
    let len = usize::try_from(stat.st_size).map_err(|_| MemoryError::Size)?;
    // SAFETY: the seals were checked before the size was read, so the size cannot change any more.
    unsafe { Memory::map_descriptor(file.raw(), len, access) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::errno;
    use crate::signal::control::ControlSlot;
    use crate::signal::lane::LaneSlot;
    use crate::signal::page::{Page, PageError};

    fn is_refused(done: c_int) -> bool {
        done == -1 && errno() == libc::EPERM
    }

    /// Goal: a receiver can neither truncate a page nor write to a read-only one. Method: every
    /// call that would do so, on the descriptor of each kind.
    #[test]
    fn a_handed_on_file_keeps_its_size_and_its_writers() {
        for writers in [Writers::AnyProcess, Writers::MakerOnly] {
            let (ours, file) = create(5000, writers).unwrap();
            for len in [0, 4096, 9000] {
                // SAFETY: ftruncate takes numbers.
                assert!(is_refused(unsafe { libc::ftruncate(file.raw(), len) }), "{len}");
            }
            // SAFETY: F_ADD_SEALS takes numbers.
            let more = unsafe { libc::fcntl(file.raw(), libc::F_ADD_SEALS, libc::F_SEAL_WRITE) };
            assert!(is_refused(more), "further seals, such as one against the maker's writes");
            let writable = map(&file, Access::Write).map(|memory| memory.len());
            let reader = map(&file, Access::Read).unwrap();
            let base = reader.base().as_ptr().cast();
            let both = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: mprotect of a mapping of this test.
            let upgraded = unsafe { libc::mprotect(base, reader.len(), both) } == 0;
            match writers {
                Writers::AnyProcess => assert_eq!(writable, Ok(5000)),
                Writers::MakerOnly => {
                    assert_eq!((writable, upgraded), (Err(MemoryError::Denied), false));
                }
            }
            // SAFETY: the mapping belongs to this test, and is writable.
            unsafe { ours.base().write_volatile(7) };
            // SAFETY: the mapping has at least a byte.
            assert_eq!(unsafe { reader.base().read_volatile() }, 7, "its maker can still write");
        }
    }

    /// Goal: a file that could shrink is not mapped, and neither is a file that is too short.
    /// Method: a file without seals, with one of two seals, a pipe, and files that are shorter than
    /// a header or than their slots.
    #[test]
    fn files_that_could_shrink_are_refused() {
        let file = |seals: c_int, len| {
            // SAFETY: the name is a NUL-terminated literal.
            let fd = unsafe { libc::memfd_create(c"x".as_ptr(), libc::MFD_ALLOW_SEALING) };
            // SAFETY: ftruncate takes numbers.
            assert_eq!(unsafe { libc::ftruncate(fd, len) }, 0);
            // SAFETY: F_ADD_SEALS takes numbers.
            assert_eq!(unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, seals) }, 0);
            // SAFETY: the kernel has just given us this descriptor.
            unsafe { Descriptor::from_raw(fd) }
        };
        for seals in [0, libc::F_SEAL_SHRINK, libc::F_SEAL_GROW, libc::F_SEAL_SEAL] {
            assert_eq!(map(&file(seals, 8192), Access::Read).unwrap_err(), MemoryError::Denied);
        }
        let mut ends = [0; 2];
        // SAFETY: the kernel writes two numbers.
        assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
        // SAFETY: the kernel has just given us both.
        let ends = ends.map(|end| unsafe { Descriptor::from_raw(end) });
        assert_eq!(map(&ends[0], Access::Read).unwrap_err(), MemoryError::Denied);

        assert_eq!(map(&file(OF_SIZE, 0), Access::Read).unwrap_err(), MemoryError::Size);
        let short = map(&file(OF_SIZE, 100), Access::Read).unwrap();
        assert!(matches!(Page::<LaneSlot>::open(short), Err(PageError::Truncated { .. })));
        let (whole, handed) = create(Page::<ControlSlot>::bytes(2), Writers::MakerOnly).unwrap();
        Page::<ControlSlot>::format(whole, 2, 0, &[0; 32]).unwrap();
        assert_eq!(
            Page::<ControlSlot>::open(map(&handed, Access::Read).unwrap()).unwrap().slot_count(),
            2
        );
        let (less, handed) = create(Page::<ControlSlot>::bytes(1), Writers::AnyProcess).unwrap();
        let page = Page::<ControlSlot>::format(less, 1, 0, &[0; 32]).unwrap();
        page.header().slot_count.store(2, core::sync::atomic::Ordering::Relaxed);
        let error = Page::<ControlSlot>::open(map(&handed, Access::Read).unwrap()).unwrap_err();
        assert!(matches!(error, PageError::Size { .. }), "{error}");
    }
}
