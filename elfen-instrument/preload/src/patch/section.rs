//! Finds a section by its name in the file of a loaded object: section headers are the one
//! thing that is not mapped.
//!
//! The file may have changed since it was loaded. So nothing that is read here is more than a hint:
//! the caller checks that the addresses lie in the object, at starts of functions, on NOPs.

use core::ffi::{CStr, c_int};
use core::mem::{size_of, size_of_val, zeroed};

use elfen_entries::{RETURN_SECTION, SECTION};

/// A section to look for.
pub(super) struct WantedSection<const N: usize> {
    /// With the zero that ends it.
    name: [u8; N],
    flags: u64,
}

/// elf.h: the program's own contents, mapped; data that can be written, because the loader
/// relocates it, or code.
const SHT_PROGBITS: u32 = 1;
const SHF_WRITE_ALLOC: u64 = 1 | 2;
const SHF_ALLOC_EXECUTE: u64 = 2 | 4;

/// What compilers list the entries in.
pub(super) const ENTRIES: WantedSection<{ SECTION.len() + 1 }> =
    WantedSection { name: nul_terminated(SECTION), flags: SHF_WRITE_ALLOC };
/// What functions return by.
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

/// Where a section lies, counted from the object's base.
pub(super) struct Section {
    pub(super) address: u64,
    pub(super) len: u64,
}

/// The section, if the file has it.
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

/// Section headers in one read: 1 KB of stack.
const AT_ONCE: usize = 16;

/// The names of a file's sections, the first of them read at once: most files have no more.
struct Names<'a> {
    file: &'a File,
    at: u64,
    first: [u8; 512],
}

impl<'a> Names<'a> {
    /// From the section header at `header`.
    fn of(file: &'a File, header: u64) -> Option<Self> {
        let header: libc::Elf64_Shdr = file.read(header)?;
        Some(Self { file, at: header.sh_offset, first: file.read_some(header.sh_offset)? })
    }

    /// Whether it is the section that is wanted.
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

    /// As much as the file has; the rest is zero.
    fn read_some<T: Plain>(&self, at: u64) -> Option<T> {
        let mut value = T::ZERO;
        self.fill(at, &mut value)?;
        Some(value)
    }

    fn fill<T: Plain>(&self, at: u64, value: &mut T) -> Option<usize> {
        let at = i64::try_from(at).ok()?;
        // SAFETY: `value` is ours, as long as said, and `Plain`: any bytes will do.
        let count = unsafe {
            libc::pread(self.0, core::ptr::from_mut(value).cast(), size_of_val(value), at)
        };
        usize::try_from(count).ok()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: opened by `open`, and no other code knows it.
        unsafe { libc::close(self.0) };
    }
}

/// # Safety
/// 1. Any bytes are a value, and zeroes are.
unsafe trait Plain {
    const ZERO: Self;
}

// SAFETY: integers and arrays of them.
unsafe impl Plain for libc::Elf64_Ehdr {
    // SAFETY: see above.
    const ZERO: Self = unsafe { zeroed() };
}

// SAFETY: integers.
unsafe impl Plain for libc::Elf64_Shdr {
    // SAFETY: see above.
    const ZERO: Self = unsafe { zeroed() };
}

// SAFETY: see the elements.
unsafe impl Plain for [libc::Elf64_Shdr; AT_ONCE] {
    const ZERO: Self = [libc::Elf64_Shdr::ZERO; AT_ONCE];
}

// SAFETY: any bytes are bytes.
unsafe impl<const N: usize> Plain for [u8; N] {
    const ZERO: Self = [0; N];
}
