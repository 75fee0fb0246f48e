//! Finds a section by its name in the file of a loaded object. Section headers are needed and,
//! unlike everything else, not mapped.
//!
//! The file may have changed since it was loaded, so the result is only a hint. The caller verifies
//! that the addresses lie in the object, at function starts, on NOPs.

use core::ffi::{CStr, c_int};
use core::mem::{size_of, size_of_val, zeroed};

use elfen_entries::{RETURN_SECTION, SECTION};

/// The name and flags of a section to find.
pub(super) struct WantedSection<const N: usize> {
    /// With the terminating NUL.
    name: [u8; N],
    flags: u64,
}

/// From elf.h: contents in the file, mapped. The list of entries is writable, because the loader
/// relocates it; the shared `ret` is executable.
const SHT_PROGBITS: u32 = 1;
const SHF_WRITE_ALLOC: u64 = 1 | 2;
const SHF_ALLOC_EXECUTE: u64 = 2 | 4;

/// The section in which compilers list function entries.
pub(super) const ENTRIES: WantedSection<{ SECTION.len() + 1 }> =
    WantedSection { name: nul_terminated(SECTION), flags: SHF_WRITE_ALLOC };
/// The section with the shared `ret`.
pub(super) const RETURN: WantedSection<{ RETURN_SECTION.len() + 1 }> =
    WantedSection { name: nul_terminated(RETURN_SECTION), flags: SHF_ALLOC_EXECUTE };

const fn nul_terminated<const N: usize>(name: &str) -> [u8; N] {
    let mut bytes = [0; N];
    let mut at = 0;
    while at < name.len() {
        bytes[at] = name.as_bytes()[at];
        at += 1;
    }
    bytes
}

/// The position of a section, relative to the object's base.
pub(super) struct Section {
    pub(super) address: u64,
    pub(super) len: u64,
}

/// Finds the section in the file.
pub(super) fn find<const N: usize>(path: &CStr, wanted: &WantedSection<N>) -> Option<Section> {
    let file = File::open(path)?;
    let header: libc::Elf64_Ehdr = file.read(0)?;
    let magic = [libc::ELFMAG0, libc::ELFMAG1, libc::ELFMAG2, libc::ELFMAG3, libc::ELFCLASS64];
    let sections = u64::from(header.e_shnum);
    if header.e_ident.first_chunk() != Some(&magic)
        || usize::from(header.e_shentsize) != size_of::<libc::Elf64_Shdr>()
    {
        return None;
    }
    let at = |index: u64| header.e_shoff.checked_add(index * size_of::<libc::Elf64_Shdr>() as u64);
    let names = Names::of(&file, at(header.e_shstrndx.into())?)?;
    let mut index = 0;
    while index < sections {
        let chunk: [libc::Elf64_Shdr; AT_ONCE] = file.read_some(at(index)?)?;
        let is_wanted = |section: &&libc::Elf64_Shdr| names.are_of(section, wanted);
        let left = usize::try_from(sections - index).ok()?;
        if let Some(found) = chunk.iter().take(left).find(is_wanted) {
            return Some(Section { address: found.sh_addr, len: found.sh_size });
        }
        index += AT_ONCE as u64;
    }
    None
}

/// Section headers per read, which take 1 KB of stack.
const AT_ONCE: usize = 16;

/// The section names of a file. The first 512 bytes are read at once, which suffices for most
/// files.
struct Names<'a> {
    file: &'a File,
    at: u64,
    first: [u8; 512],
}

impl<'a> Names<'a> {
    /// Reads the section that `header` describes.
    fn of(file: &'a File, header: u64) -> Option<Self> {
        let header: libc::Elf64_Shdr = file.read(header)?;
        Some(Self { file, at: header.sh_offset, first: file.read_some(header.sh_offset)? })
    }

    /// Whether the section is the wanted one.
    fn are_of<const N: usize>(
        &self,
        section: &libc::Elf64_Shdr,
        wanted: &WantedSection<N>,
    ) -> bool {
        section.sh_type == SHT_PROGBITS
            && section.sh_flags & wanted.flags == wanted.flags
            && self.name(section.sh_name) == Some(wanted.name)
    }

    fn name<const N: usize>(&self, offset: u32) -> Option<[u8; N]> {
        let known = self.first.get(usize::try_from(offset).ok()?..);
        match known.and_then(|known| known.first_chunk()) {
            Some(name) => Some(*name),
            None => self.file.read(self.at.checked_add(offset.into())?),
        }
    }
}

struct File(c_int);

impl File {
    fn open(path: &CStr) -> Option<Self> {
        // SAFETY: `path` is NUL-terminated.
        let fd = unsafe { libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
        (fd >= 0).then(|| Self(fd))
    }

    fn read<T: Plain>(&self, at: u64) -> Option<T> {
        let mut value = T::ZERO;
        (self.fill(at, &mut value)? == size_of::<T>()).then_some(value)
    }

    /// Reads as much as the file has; the rest is zero.
    fn read_some<T: Plain>(&self, at: u64) -> Option<T> {
        let mut value = T::ZERO;
        self.fill(at, &mut value)?;
        Some(value)
    }

    fn fill<T: Plain>(&self, at: u64, value: &mut T) -> Option<usize> {
        let at = i64::try_from(at).ok()?;
        // SAFETY: `value` is valid for writes of its size, and any bytes are a valid `Plain`.
        let count = unsafe {
            libc::pread(self.0, core::ptr::from_mut(value).cast(), size_of_val(value), at)
        };
        usize::try_from(count).ok()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: opened by `open`, and no other code has the descriptor.
        unsafe { libc::close(self.0) };
    }
}

/// # Safety
/// 1. Any bytes are a valid value, and so are zeros.
unsafe trait Plain {
    const ZERO: Self;
}

// SAFETY: consists of integers and arrays of integers.
unsafe impl Plain for libc::Elf64_Ehdr {
    // SAFETY: zeros are a valid value.
    const ZERO: Self = unsafe { zeroed() };
}

// SAFETY: consists of integers.
unsafe impl Plain for libc::Elf64_Shdr {
    // SAFETY: zeros are a valid value.
    const ZERO: Self = unsafe { zeroed() };
}

// SAFETY: the elements are `Plain`.
unsafe impl Plain for [libc::Elf64_Shdr; AT_ONCE] {
    const ZERO: Self = [libc::Elf64_Shdr::ZERO; AT_ONCE];
}

// SAFETY: any bytes are valid.
unsafe impl<const N: usize> Plain for [u8; N] {
    const ZERO: Self = [0; N];
}
