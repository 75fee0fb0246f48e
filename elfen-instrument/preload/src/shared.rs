//! Globals that `elfen shim` looks at: their pages are moved to a memory file that it has mapped as
//! well, before the program starts.
//!
//! Shared memory is shared with a forked child too, which would write into its parent's globals
//! and read what its parent writes. So before each fork a copy of the pages is made, and the child
//! puts the copy in the place of the pages, by one system call a page: from then on they are its
//! own. The copy is made last of all handlers before the fork, and a lock keeps two threads that
//! fork at one time from each other's copies. Children that share their parent's memory until they
//! become another program (vfork, posix_spawn) need none of this.

use core::ffi::{CStr, c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering::*};

use elfen_rt::tag::Order;

use crate::file_address::{File, FileAddress, number};

const PAGE: usize = 4096;
/// As many as the front's file has.
const PAGES: usize = 16;

/// Addresses of the pages that are shared, and how many; 0 in a child.
static AT: [AtomicUsize; PAGES] = [const { AtomicUsize::new(0) }; PAGES];
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Where copies of them are made.
static COPY: AtomicUsize = AtomicUsize::new(0);
/// 1 while a thread forks.
static FORKING: AtomicU32 = AtomicU32::new(0);

/// Does what the front has ordered. Only while there is one thread, and before the program runs.
pub(crate) fn share(order: &Order<'_>) {
    let mut fields = order.globals();
    let Some(fd) = fields.next().and_then(number).and_then(|fd| c_int::try_from(fd).ok()) else {
        return;
    };
    for (index, field) in fields.enumerate().take(PAGES) {
        let Some(page) = FileAddress::parse(field) else { continue };
        let mut found = PageSearch { page, address: None };
        // SAFETY: `look` has the type that is asked for, and `found` lives longer than the call.
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
    // SAFETY: the front's file, which this process has inherited for this alone.
    unsafe { libc::close(fd) };
    if COUNT.load(Relaxed) == 0 {
        return;
    }
    // First of all handlers, and so the last before a fork and the first after it.
    // SAFETY: the handlers live as long as the process: this library is never unloaded.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
}

struct PageSearch {
    page: FileAddress,
    address: Option<usize>,
}

/// Whether an object is the file that is meant, and has the page whole in data that stays writable.
unsafe extern "C" fn find_page(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    found: *mut c_void,
) -> c_int {
    // SAFETY: `share` handed this out, and it lives until the call returns.
    let found = unsafe { &mut *found.cast::<PageSearch>() };
    // SAFETY: the loader hands out its description of a loaded object, for the time of this call.
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
    // SAFETY: the loader says that there are so many headers at this address.
    let headers =
        unsafe { core::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
    let (start, page) = (found.page.address, PAGE as u64);
    let Some(end) = start.checked_add(page).filter(|_| start.is_multiple_of(page)) else {
        return 0;
    };
    // The loader maps whole pages, so a page is a segment's if it meets it.
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
        // What the loader has closed: whole pages.
        let last = header.p_vaddr.saturating_add(header.p_memsz) / page * page;
        header.p_vaddr < end && start < last
    });
    if is_data && !is_closed {
        let address = info.dlpi_addr.checked_add(start);
        found.address = address.and_then(|address| usize::try_from(address).ok());
    }
    1
}

/// Copies a page into the file and maps it from there. There is one thread, and nothing is called
/// in between that would write to the page.
fn move_to(fd: c_int, index: usize, address: usize) -> bool {
    let Ok(offset) = i64::try_from(index * PAGE) else { return false };
    let page: *mut c_void = ptr::with_exposed_provenance_mut(address);
    // SAFETY: `look` found the page in an object's data, mapped and readable.
    let copied = unsafe { libc::pwrite(fd, page, PAGE, offset) };
    if usize::try_from(copied) != Ok(PAGE) {
        return false;
    }
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    // SAFETY: the same bytes take the page's place.
    let mapped = unsafe { libc::mmap(page, PAGE, protection, flags, fd, offset) };
    let moved = mapped == page;
    if moved {
        mark_ready(fd, index);
    }
    moved
}

/// Tells the observer that a page has the program's own values: a word for each page stands behind
/// the pages.
fn mark_ready(fd: c_int, index: usize) {
    let ready = 1_u64.to_ne_bytes();
    let Ok(offset) = i64::try_from(PAGES * PAGE + index * ready.len()) else { return };
    // SAFETY: the bytes are ours. Without the word the page is shared and its values are not shown.
    unsafe { libc::pwrite(fd, ready.as_ptr().cast(), ready.len(), offset) };
}

/// Makes the copies that a child will have. If there is no memory for them, the child goes without
/// the pages' values of this moment; so then it keeps none of them shared either: see `in_child`.
unsafe extern "C" fn before_fork() {
    while FORKING.compare_exchange(0, 1, Acquire, Relaxed).is_err() {
        // SAFETY: takes nothing.
        unsafe { libc::sched_yield() };
    }
    let count = COUNT.load(Relaxed).min(PAGES);
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let bytes = count * PAGE;
    if bytes == 0 {
        return;
    }
    // SAFETY: the kernel chooses the address, so no mapping of the program's is replaced.
    let copy = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, flags, -1, 0) };
    if copy == libc::MAP_FAILED {
        return;
    }
    for (index, at) in AT.iter().enumerate().take(count) {
        let from: *const u8 = ptr::with_exposed_provenance(at.load(Relaxed));
        let to = copy.cast::<u8>().wrapping_add(index * PAGE);
        // SAFETY: both are a page that is mapped; the copy is ours alone.
        unsafe { to.copy_from_nonoverlapping(from, PAGE) };
    }
    COPY.store(copy.expose_provenance(), Relaxed);
}

unsafe extern "C" fn in_parent() {
    let copy = COPY.swap(0, Relaxed);
    if copy != 0 {
        let bytes = COUNT.load(Relaxed).min(PAGES) * PAGE;
        // SAFETY: mapped by `before_fork`, and of no use to the parent.
        unsafe { libc::munmap(ptr::with_exposed_provenance_mut(copy), bytes) };
    }
    FORKING.store(0, Release);
}

/// Puts the copies in the place of the pages.
unsafe extern "C" fn in_child() {
    let copy = COPY.swap(0, Relaxed);
    let count = COUNT.swap(0, Relaxed).min(PAGES);
    for (index, at) in AT.iter().enumerate().take(count) {
        let page: *mut c_void = ptr::with_exposed_provenance_mut(at.load(Relaxed));
        if copy == 0 {
            // No copy could be made: a child that went on would write into its parent's memory.
            // SAFETY: ends this process.
            unsafe { libc::_exit(127) };
        }
        let from: *mut c_void = ptr::with_exposed_provenance_mut(copy + index * PAGE);
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: the copy is a page of ours, and takes the place of the one it is a copy of.
        let moved = unsafe { libc::mremap(from, PAGE, PAGE, flags, page) };
        if moved != page {
            // SAFETY: see above.
            unsafe { libc::_exit(127) };
        }
    }
    FORKING.store(0, Release);
}
