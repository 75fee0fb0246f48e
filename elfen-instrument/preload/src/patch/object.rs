//! A loaded object: where its parts lie in memory. Its program headers are trusted, because the
//! loader has already used them.

use core::ffi::CStr;
use core::slice;

use elfen_entries::{FunctionStarts, RETURN};
use elfen_rt::tag::Order;

use super::section;
use crate::file_address::{File, FileAddress};

/// One object, as the loader describes it. All addresses are in memory.
pub(super) struct Object<'a> {
    base: u64,
    headers: &'a [libc::Elf64_Phdr],
    path: &'a CStr,
}

/// The functions of an object that an order names.
#[derive(Clone, Copy)]
pub(super) struct Counted {
    order: Order<'static>,
    file: File,
    base: u64,
}

impl Counted {
    /// Whether the order names a function, by the address of its entry. That is the function's own
    /// address, or the address after its `endbr64`.
    pub(super) fn names(&self, entry: u64) -> bool {
        let offset = entry.wrapping_sub(self.base);
        self.order.counted().filter_map(FileAddress::parse).any(|named| {
            named.file == self.file && matches!(offset.wrapping_sub(named.address), 0 | 4)
        })
    }
}

/// A range of an object in memory.
#[derive(Clone, Copy)]
pub(super) struct MemoryRange {
    pub(super) address: u64,
    pub(super) len: usize,
}

impl<'a> Object<'a> {
    /// # Safety
    /// 1. `info` comes from `dl_iterate_phdr`, whose callback still runs.
    pub(super) unsafe fn of(info: *const libc::dl_phdr_info) -> Option<Self> {
        // SAFETY: by the contract above.
        let info: &'a libc::dl_phdr_info = unsafe { info.as_ref() }?;
        if info.dlpi_phdr.is_null() || info.dlpi_name.is_null() {
            return None;
        }
        // SAFETY: the loader guarantees this many headers at this address.
        let headers = unsafe { slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
        // SAFETY: the loader's names are NUL-terminated.
        let name = unsafe { CStr::from_ptr(info.dlpi_name) };
        let path = match name.to_bytes().first() {
            // The name of the program itself is empty.
            None => c"/proc/self/exe",
            Some(b'/') => name,
            // An object without a file, such as the vDSO, has a name that is not a path.
            Some(_) => return None,
        };
        Some(Self { base: info.dlpi_addr, headers, path })
    }

    /// The addresses that the compiler listed, relocated by the loader.
    pub(super) fn listed_entries(&self) -> Option<&'a [u64]> {
        let section = section::find(self.path, &section::ENTRIES)?;
        let address = self.base.checked_add(section.address)?;
        let bytes = self.bytes(address, section.len, libc::PF_R)?;
        // SAFETY: any eight bytes are a valid u64. Bytes before and after the aligned words are
        // dropped.
        let (_, entries, _) = unsafe { bytes.align_to::<u64>() };
        Some(entries)
    }

    /// The functions of this object that, by the order, publish their thread's counters.
    pub(super) fn counted(&self, order: Order<'static>) -> Option<Counted> {
        // Saves a system call per object if the order names no functions.
        order.counted().next()?;
        Some(Counted { order, file: File::at(self.path)?, base: self.base })
    }

    /// The address of the shared `ret`, if the program was linked with `libelfen_return.a`.
    pub(super) fn shared_return(&self) -> Option<u64> {
        let section = section::find(self.path, &section::RETURN)?;
        let address = self.base.checked_add(section.address)?;
        self.code_at(address).filter(|code| code.starts_with(&RETURN)).map(|_| address)
    }

    pub(super) fn function_starts(&self) -> Option<FunctionStarts<'a>> {
        let header = self.headers.iter().find(|header| header.p_type == libc::PT_GNU_EH_FRAME)?;
        let address = self.base.checked_add(header.p_vaddr)?;
        let bytes = self.bytes(address, header.p_memsz, libc::PF_R)?;
        FunctionStarts::parse(bytes, address)
    }

    /// The code from `address` to the end of its segment.
    pub(super) fn code_at(&self, address: u64) -> Option<&'a [u8]> {
        let text = self.text()?;
        let offset = address.checked_sub(text.address)?;
        let rest = (text.len as u64).checked_sub(offset)?;
        self.bytes(address, rest, libc::PF_R | libc::PF_X)
    }

    /// The segment with the code. Linkers make only one.
    pub(super) fn text(&self) -> Option<MemoryRange> {
        let mut executable = self.loaded().filter(|header| header.p_flags & libc::PF_X != 0);
        let (only, none) = (executable.next()?, executable.next());
        if none.is_some() {
            return None;
        }
        let len = usize::try_from(only.p_filesz).ok()?;
        Some(MemoryRange { address: self.base.checked_add(only.p_vaddr)?, len })
    }

    fn loaded(&self) -> impl Iterator<Item = &'a libc::Elf64_Phdr> {
        self.headers.iter().filter(|header| header.p_type == libc::PT_LOAD)
    }

    /// Bytes of the object, if one segment with all of `flags` contains them.
    fn bytes(&self, address: u64, len: u64, flags: u32) -> Option<&'a [u8]> {
        let offset = address.checked_sub(self.base)?;
        let end = offset.checked_add(len)?;
        let inside = |header: &&libc::Elf64_Phdr| {
            let segment_end = header.p_vaddr.checked_add(header.p_filesz);
            header.p_flags & flags == flags
                && header.p_vaddr <= offset
                && segment_end.is_some_and(|segment_end| end <= segment_end)
        };
        self.loaded().find(inside)?;
        let pointer = core::ptr::with_exposed_provenance(usize::try_from(address).ok()?);
        // SAFETY: the loader has mapped the segment, readable, and these bytes lie in it. This
        // thread is the only one, and does not write them during the borrow.
        Some(unsafe { slice::from_raw_parts(pointer, usize::try_from(len).ok()?) })
    }
}
