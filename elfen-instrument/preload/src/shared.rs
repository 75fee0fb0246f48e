//! Shares the globals that `elfen shim` observes: before the program starts, their pages move to a
//! memory file that the observer has mapped too.
//!
//! A forked child would share these pages with its parent and overwrite them. So a copy of the
//! pages is made before each fork. The child replaces the shared pages by the copy, with one system
//! call per page. The copy is made by the last handler that runs before the fork. A lock separates
//! the copies of threads that fork at the same time. Children of vfork and posix_spawn run in their
//! parent's memory until they execute another program, and need no copy.

use core::ffi::{CStr, c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering::*};

use elfen_rt::tag::Order;

use crate::file_address::{File, FileAddress, number};

const PAGE: usize = 4096;
/// As many as the launcher's file has.
const PAGES: usize = 16;

/// Addresses of the shared pages, and their number, which is 0 in a child.
static AT: [AtomicUsize; PAGES] = [const { AtomicUsize::new(0) }; PAGES];
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Address of the copies.
static COPY: AtomicUsize = AtomicUsize::new(0);
/// 1 while a thread forks.
static FORKING: AtomicU32 = AtomicU32::new(0);

/// Shares the pages that the launcher has ordered. Must run before the program, while there is only
/// one thread.
pub(crate) fn share(order: &Order<'_>) {
    let mut fields = order.globals();
    let Some(fd) = fields.next().and_then(number).and_then(|fd| c_int::try_from(fd).ok()) else {
        return;
    };
    for (index, field) in fields.enumerate().take(PAGES) {
        let Some(page) = FileAddress::parse(field) else { continue };
        let mut found = PageSearch { page, address: None };
        // SAFETY: `find_page` has the required type, and `found` outlives the call.
        unsafe { libc::dl_iterate_phdr(Some(find_page), (&raw mut found).cast()) };
        let Some(address) = found.address else { continue };
        if move_to(fd, index, address) {
            let count = COUNT.load(Relaxed);
            if let Some(at) = AT.get(count) {
                at.store(address, Relaxed);
                COUNT.store(count + 1, Relaxed);
            }
        }
    }
    // SAFETY: the launcher's file, which this process inherited only for this function.
    unsafe { libc::close(fd) };
    if COUNT.load(Relaxed) == 0 {
        return;
    }
    // Registered before all other handlers, and so the last before a fork and the first after it.
    // SAFETY: the handlers live as long as the process, because this library is never unloaded.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
}

struct PageSearch {
    page: FileAddress,
    address: Option<usize>,
}

/// Whether an object is the wanted file and has the whole page in data that stays writable.
unsafe extern "C" fn find_page(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    found: *mut c_void,
) -> c_int {
    // SAFETY: `share` passed this pointer, which is valid until the call returns.
    let found = unsafe { &mut *found.cast::<PageSearch>() };
    // SAFETY: the loader passes its description of a loaded object, valid during this call.
    let Some(info) = (unsafe { info.as_ref() }) else { return 0 };
    if info.dlpi_phdr.is_null() || info.dlpi_name.is_null() {
        return 0;
    }
    // SAFETY: the loader's names are NUL-terminated.
    let name = unsafe { CStr::from_ptr(info.dlpi_name) };
    let path = if name.is_empty() { c"/proc/self/exe" } else { name };
    if File::at(path) != Some(found.page.file) {
        return 0;
    }
    // SAFETY: the loader guarantees this many headers at this address.
    let headers =
        unsafe { core::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
    let (start, page) = (found.page.address, PAGE as u64);
    let Some(end) = start.checked_add(page).filter(|_| start.is_multiple_of(page)) else {
        return 0;
    };
    // The loader maps whole pages, so a page belongs to each segment that overlaps it.
    let meets = |header: &libc::Elf64_Phdr| {
        let last = header.p_vaddr.saturating_add(header.p_memsz);
        header.p_vaddr < end && start < last
    };
    let data = |header: &&libc::Elf64_Phdr| {
        header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_W != 0
    };
    let is_data = headers.iter().filter(data).any(meets);
    let closed = |header: &&libc::Elf64_Phdr| header.p_type == libc::PT_GNU_RELRO;
    let is_closed = headers.iter().filter(closed).any(|header| {
        // The loader makes whole pages read-only.
        let last = header.p_vaddr.saturating_add(header.p_memsz) / page * page;
        header.p_vaddr < end && start < last
    });
    if is_data && !is_closed {
        let address = info.dlpi_addr.checked_add(start);
        found.address = address.and_then(|address| usize::try_from(address).ok());
    }
    1
}

/// Copies a page into the file and maps it from there. There is only one thread, and it calls
/// nothing in between that writes to the page.
fn move_to(fd: c_int, index: usize, address: usize) -> bool {
    let Ok(offset) = i64::try_from(index * PAGE) else { return false };
    let page: *mut c_void = ptr::with_exposed_provenance_mut(address);
    // SAFETY: `find_page` found the page in an object's data, mapped and readable.
    let copied = unsafe { libc::pwrite(fd, page, PAGE, offset) };
    if usize::try_from(copied) != Ok(PAGE) {
        return false;
    }
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    // SAFETY: the new mapping holds the same bytes.
    let mapped = unsafe { libc::mmap(page, PAGE, protection, flags, fd, offset) };
    let moved = mapped == page;
    if moved {
        mark_ready(fd, index);
    }
    moved
}

/// Tells the observer that a page holds the program's own values. The file has one word for each
/// page after the pages.
fn mark_ready(fd: c_int, index: usize) {
    let ready = 1_u64.to_ne_bytes();
    let Ok(offset) = i64::try_from(PAGES * PAGE + index * ready.len()) else { return };
    // SAFETY: `ready` is a local variable. If the write fails, the page is shared but its values
    // are not shown.
    unsafe { libc::pwrite(fd, ready.as_ptr().cast(), ready.len(), offset) };
}

/// Makes the copies for the child. Without memory for them, the child exits: see `in_child`.
unsafe extern "C" fn before_fork() {
    while FORKING.compare_exchange(0, 1, Acquire, Relaxed).is_err() {
        // SAFETY: takes no arguments.
        unsafe { libc::sched_yield() };
    }
    let count = COUNT.load(Relaxed).min(PAGES);
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let bytes = count * PAGE;
    if bytes == 0 {
        return;
    }
    // SAFETY: the kernel chooses the address, so the program's mappings stay.
    let copy = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, flags, -1, 0) };
    if copy == libc::MAP_FAILED {
        return;
    }
    for (index, at) in AT.iter().enumerate().take(count) {
        let from: *const u8 = ptr::with_exposed_provenance(at.load(Relaxed));
        let to = copy.cast::<u8>().wrapping_add(index * PAGE);
        // SAFETY: both pages are mapped, and no other code knows the copy.
        unsafe { to.copy_from_nonoverlapping(from, PAGE) };
    }
    COPY.store(copy.expose_provenance(), Relaxed);
}

unsafe extern "C" fn in_parent() {
    let copy = COPY.swap(0, Relaxed);
    if copy != 0 {
        let bytes = COUNT.load(Relaxed).min(PAGES) * PAGE;
        // SAFETY: mapped by `before_fork`. The parent does not need it.
        unsafe { libc::munmap(ptr::with_exposed_provenance_mut(copy), bytes) };
    }
    FORKING.store(0, Release);
}

/// Replaces the shared pages by the copies.
unsafe extern "C" fn in_child() {
    let copy = COPY.swap(0, Relaxed);
    let count = COUNT.swap(0, Relaxed).min(PAGES);
    for (index, at) in AT.iter().enumerate().take(count) {
        let page: *mut c_void = ptr::with_exposed_provenance_mut(at.load(Relaxed));
        if copy == 0 {
            // Without a copy, the child would write into its parent's memory.
            // SAFETY: ends this process.
            unsafe { libc::_exit(127) };
        }
        let from: *mut c_void = ptr::with_exposed_provenance_mut(copy + index * PAGE);
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: the copy is our own page, and replaces the page that it is a copy of.
        let moved = unsafe { libc::mremap(from, PAGE, PAGE, flags, page) };
        if moved != page {
            // SAFETY: ends this process.
            unsafe { libc::_exit(127) };
        }
    }
    FORKING.store(0, Release);
}
