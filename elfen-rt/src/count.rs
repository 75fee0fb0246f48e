//! Counts a thread's instructions and cycles at entries of functions, for `elfen shim --count-at`.
//! The thread reads its own hardware counters.
//!
//! When a thread begins, where system calls do no harm, it opens two perf events of itself and maps
//! a page of each. The page tells how to read the counter from user space. The code patched into a
//! function's entry calls [`publish`], which reads both counters and stores them in the thread's
//! words ([`crate::signal::thread`]). Without counters it stores nothing.
//!
//! The kernel does not map such pages into forked children. So their addresses lie in memory that
//! the kernel wipes in every child, and a child counts nothing.

use core::arch::{asm, global_asm, naked_asm};
use core::ffi::c_int;
use core::mem::{offset_of, size_of};
use core::ptr;
use core::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed,
};

use crate::process::{errno, set_errno};
use crate::signal::thread::{THREADS, ThreadSlot, ThreadWords};
use crate::tag;

/// The first fields of the page that the kernel maps for an event (`struct perf_event_mmap_page`).
#[repr(C)]
#[derive(Debug)]
pub struct EventPage {
    versions: [u32; 2],
    /// Changes whenever the kernel changes the other fields.
    lock: AtomicU32,
    /// The hardware counter of the event, from 1; 0 while the event has none.
    index: AtomicU32,
    /// Added to the counter's value.
    offset: AtomicU64,
    times: [AtomicU64; 2],
    capabilities: AtomicU64,
    /// The counter's width in bits; the highest bit is its sign.
    width: AtomicU16,
}

const _: () = assert!(offset_of!(EventPage, lock) == 8 && offset_of!(EventPage, index) == 12);
const _: () = assert!(offset_of!(EventPage, offset) == 16);
const _: () = assert!(offset_of!(EventPage, capabilities) == 40);
const _: () = assert!(offset_of!(EventPage, width) == 48);

/// The bit of `capabilities` that says that user space may read the counter.
const MAY_READ: u32 = 2;
/// How often a read is tried. The kernel changes a page from the thread's own CPU, so the second
/// try is nearly always the last.
const TRIES: u32 = 16;
const PAGE: usize = 4096;

/// The event pages of a thread; null where there are none.
#[repr(C)]
#[derive(Debug)]
struct Events {
    instructions: AtomicPtr<EventPage>,
    cycles: AtomicPtr<EventPage>,
}

impl Events {
    const fn none() -> Self {
        Self {
            instructions: AtomicPtr::new(ptr::null_mut()),
            cycles: AtomicPtr::new(ptr::null_mut()),
        }
    }
}

const _: () = assert!(size_of::<Events>() == 16 && offset_of!(Events, cycles) == 8);
const _: () = assert!(offset_of!(ThreadWords, instructions) == 72);
const _: () = assert!(offset_of!(ThreadWords, cycles) == 80);

/// The events of threads that have none.
static NO_EVENTS: Events = Events::none();
/// The events of each slot's thread, in memory that the kernel wipes in children; null if no thread
/// counts.
static TABLE: AtomicPtr<Events> = AtomicPtr::new(ptr::null_mut());

// A thread-local pointer to the thread's events, defined as in `tag`.
global_asm!(
    ".pushsection .tdata,\"awT\",@progbits",
    ".balign 8",
    ".globl elfen_count_events_rt",
    ".hidden elfen_count_events_rt",
    ".type elfen_count_events_rt, @object",
    ".size elfen_count_events_rt, 8",
    "elfen_count_events_rt:",
    ".quad {none}",
    ".popsection",
    none = sym NO_EVENTS,
);

/// Publishes the calling thread's instructions and cycles. Patched function entries call this, so
/// it changes only `%r11` and the flags.
///
/// ```text
///     |                            |
///     | return into the stub       |  <- %rsp on entry, and on return one above
///     | the caller's %rax %rcx     |
///     | %rdx %rsi %rdi %r8 %r10    |  <- %rsp at the calls
/// ```
///
/// # Safety
/// 1. The caller is code at a function's entry, on a stack of its thread.
#[unsafe(naked)]
pub unsafe extern "C" fn publish() {
    naked_asm!(
        ".cfi_startproc",
        "push rax",
        ".cfi_adjust_cfa_offset 8",
        "push rcx",
        ".cfi_adjust_cfa_offset 8",
        "push rdx",
        ".cfi_adjust_cfa_offset 8",
        "push rsi",
        ".cfi_adjust_cfa_offset 8",
        "push rdi",
        ".cfi_adjust_cfa_offset 8",
        "push r8",
        ".cfi_adjust_cfa_offset 8",
        "push r10",
        ".cfi_adjust_cfa_offset 8",
        "mov rax, qword ptr fs:[0]",
        "add rax, qword ptr [rip + elfen_count_events_rt@GOTTPOFF]",
        "mov r11, qword ptr [rax]",
        "mov r10, qword ptr [r11]",
        "call {read}",
        "test edi, edi",
        "jz 2f",
        "mov r8, rax",
        "mov r10, qword ptr [r11 + 8]",
        "call {read}",
        "test edi, edi",
        "jz 2f",
        "mov rcx, qword ptr fs:[0]",
        "add rcx, qword ptr [rip + elfen_tag_block_rt@GOTTPOFF]",
        "mov rcx, qword ptr [rcx]",
        "mov qword ptr [rcx + 72], r8",
        "mov qword ptr [rcx + 80], rax",
        "2:",
        "pop r10",
        ".cfi_adjust_cfa_offset -8",
        "pop r8",
        ".cfi_adjust_cfa_offset -8",
        "pop rdi",
        ".cfi_adjust_cfa_offset -8",
        "pop rsi",
        ".cfi_adjust_cfa_offset -8",
        "pop rdx",
        ".cfi_adjust_cfa_offset -8",
        "pop rcx",
        ".cfi_adjust_cfa_offset -8",
        "pop rax",
        ".cfi_adjust_cfa_offset -8",
        "ret",
        ".cfi_endproc",
        read = sym read_1,
    );
}

/// Reads the counter of the event page in `%r10` into `%rax`, in the way that the kernel documents
/// for the page. `%edi` is 0 if no counter can be read. Also changes `%rcx`, `%rdx` and `%rsi`.
///
/// The counter's highest bit is its sign, so the value is shifted up to the register's sign bit and
/// down again. If the kernel changed the page meanwhile, the counter may belong to another thread
/// by now. Then everything is read again.
#[unsafe(naked)]
unsafe extern "C" fn read_1() {
    naked_asm!(
        ".cfi_startproc",
        "mov edi, {tries}",
        "test r10, r10",
        "jz 3f",
        "2:",
        "mov esi, dword ptr [r10 + 8]",
        "bt dword ptr [r10 + 40], {may_read}",
        "jnc 3f",
        "mov ecx, dword ptr [r10 + 12]",
        "sub ecx, 1",
        "jb 3f",
        "rdpmc",
        "shl rdx, 32",
        "or rdx, rax",
        "movzx ecx, word ptr [r10 + 48]",
        "neg ecx",
        "shl rdx, cl",
        "sar rdx, cl",
        "mov rax, qword ptr [r10 + 16]",
        "add rax, rdx",
        "cmp esi, dword ptr [r10 + 8]",
        "je 4f",
        "sub edi, 1",
        "jnz 2b",
        "3:",
        "xor edi, edi",
        "4:",
        "ret",
        ".cfi_endproc",
        tries = const TRIES,
        may_read = const MAY_READ,
    );
}

/// The count of the calling thread's event; `None` while the event has no counter, or if user space
/// cannot read its counter.
fn read(page: &EventPage) -> Option<u64> {
    let (count, tries): (u64, u32);
    // SAFETY: `read_1` changes only these registers and the flags. It reads a counter only if the
    // page's `capabilities` allow it, and the page lives as long as the borrow.
    unsafe {
        asm!(
            "call {read}",
            read = sym read_1,
            in("r10") ptr::from_ref(page),
            out("rax") count,
            out("edi") tries,
            out("rcx") _,
            out("rdx") _,
            out("rsi") _,
        );
    }
    (tries > 0).then_some(count)
}

/// Why a thread's instructions and cycles cannot be counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CountError {
    /// perf_event_open(2) failed with this errno.
    Open(c_int),
    /// The events count, but user space cannot read them.
    Read,
}

/// `struct perf_event_attr`, as long as its first version.
#[repr(C)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    unused: [u64; 3],
    flags: u64,
    rest: [u64; 2],
}

const ATTRIBUTES_BYTES: u32 = 64;
const _: () = assert!(size_of::<Attributes>() == 64 && offset_of!(Attributes, flags) == 40);

const HARDWARE: u32 = 0;
const CYCLES: u64 = 0;
const INSTRUCTIONS: u64 = 1;
/// Excludes the kernel and the hypervisor, so that counting needs no privilege.
const USER_ONLY: u64 = 1 << 5 | 1 << 6;
const CLOSE_ON_EXEC: u64 = 8;

/// Opens an event of the calling thread, in the group of the event `group` unless that is -1.
fn open(kind: u32, config: u64, group: c_int) -> Result<c_int, CountError> {
    let attributes = Attributes {
        kind,
        size: ATTRIBUTES_BYTES,
        config,
        unused: [0; 3],
        flags: USER_ONLY,
        rest: [0; 2],
    };
    let (this_thread, any_cpu): (c_int, c_int) = (0, -1);
    // SAFETY: the kernel reads the attributes, which contain their size.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            ptr::from_ref(&attributes),
            this_thread,
            any_cpu,
            group,
            CLOSE_ON_EXEC,
        )
    };
    c_int::try_from(fd).ok().filter(|&fd| fd >= 0).ok_or_else(|| CountError::Open(errno()))
}

/// Maps the page of an event. The event lives as long as its page is mapped.
fn map(fd: c_int) -> Result<*mut EventPage, CountError> {
    // SAFETY: the kernel chooses the address, so no mapping of the program's is replaced.
    let page =
        unsafe { libc::mmap(ptr::null_mut(), PAGE, libc::PROT_READ, libc::MAP_SHARED, fd, 0) };
    if page == libc::MAP_FAILED { Err(CountError::Open(errno())) } else { Ok(page.cast()) }
}

fn unmap(page: *mut EventPage) {
    if !page.is_null() {
        // SAFETY: `map` mapped the page, and its thread has ended or does not use it.
        unsafe { libc::munmap(page.cast(), PAGE) };
    }
}

fn close(fd: c_int) {
    // SAFETY: `open` opened the descriptor, and no other code knows it.
    unsafe { libc::close(fd) };
}

/// Opens two events as a group, so that both have a counter or neither has. The first of `configs`
/// is the group's leader.
fn open_both(kind: u32, configs: [u64; 2]) -> Result<[*mut EventPage; 2], CountError> {
    let leader = open(kind, configs[0], -1)?;
    let second = open(kind, configs[1], leader);
    let pages = second.and_then(|second| {
        let first = map(leader);
        let pages = first.and_then(|first| {
            map(second).map(|second| [first, second]).inspect_err(|_| unmap(first))
        });
        close(second);
        pages
    });
    close(leader);
    pages
}

/// Probes whether the calling thread's instructions and cycles can be counted and read.
pub fn probe() -> Result<(), CountError> {
    let pages = open_both(HARDWARE, [CYCLES, INSTRUCTIONS])?;
    let reads = |page: &*mut EventPage| {
        // SAFETY: `open_both` mapped the page, and it is unmapped below.
        let page = unsafe { &**page };
        // At the first try, all hardware counters may be in use for a moment.
        (0..100).any(|_| read(page).is_some())
    };
    let all = pages.iter().all(reads);
    pages.into_iter().for_each(unmap);
    if all { Ok(()) } else { Err(CountError::Read) }
}

/// Whether a seccomp filter was active when the process began. The process that started this one
/// has the same filter, and has opened events under it.
static WAS_FILTERED: AtomicBool = AtomicBool::new(false);

/// Whether a seccomp filter is active for the calling thread. Such a filter may kill the thread for
/// a system call. A filter that refuses prctl(2) itself cannot be detected.
fn is_filtered() -> bool {
    // SAFETY: prctl takes and returns numbers.
    unsafe { libc::prctl(libc::PR_GET_SECCOMP, 0, 0, 0, 0) != 0 }
}

/// Prepares counting for threads that call [`begin_thread`] later. Called while the process has one
/// thread.
pub fn begin() {
    WAS_FILTERED.store(is_filtered(), Relaxed);
    let bytes = THREADS as usize * size_of::<Events>();
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the kernel chooses the address, so no mapping of the program's is replaced.
    let table = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, flags, -1, 0) };
    if table == libc::MAP_FAILED {
        return;
    }
    // SAFETY: mapped above, and no other code uses it yet.
    if unsafe { libc::madvise(table, bytes, libc::MADV_WIPEONFORK) } == 0 {
        TABLE.store(table.cast(), Relaxed);
    } else {
        // Without the wipe, a child would find addresses in the table that it has not mapped.
        // SAFETY: mapped above, and no other code uses it yet.
        unsafe { libc::munmap(table, bytes) };
    }
}

/// Opens the calling thread's events, if the thread has a slot. If that fails, the thread counts
/// nothing, and the page's `uncounted` goes up.
pub fn begin_thread() {
    let errno = errno();
    if let Some(page) = tag::page()
        && let Some(first) = page.slot(0)
        && tag::own_slot().and_then(|slot| count(slot, first)).is_none()
    {
        first.uncounted.fetch_add(1, Relaxed);
    }
    set_errno(errno);
}

fn count(slot: &ThreadSlot, first: &ThreadSlot) -> Option<()> {
    let distance = ptr::from_ref(slot).addr().checked_sub(ptr::from_ref(first).addr())?;
    let index = distance / size_of::<ThreadSlot>();
    let table = TABLE.load(Relaxed);
    if table.is_null() || index >= THREADS as usize {
        return None;
    }
    // A filter that the program has installed since it began may kill it for perf_event_open(2).
    if is_filtered() && !WAS_FILTERED.load(Relaxed) {
        return None;
    }
    // SAFETY: `begin` mapped an entry for each slot, and nothing unmaps the table.
    let events = unsafe { &*table.wrapping_add(index) };
    // The slot's previous thread has ended.
    unmap(events.cycles.swap(ptr::null_mut(), Relaxed));
    unmap(events.instructions.swap(ptr::null_mut(), Relaxed));
    let [cycles, instructions] = open_both(HARDWARE, [CYCLES, INSTRUCTIONS]).ok()?;
    events.cycles.store(cycles, Relaxed);
    events.instructions.store(instructions, Relaxed);
    point_to(events);
    Some(())
}

/// Makes the calling thread publish the counts of `events`.
fn point_to(events: &Events) {
    // SAFETY: stores into this thread's own thread-local word. `events` lies in the table, or in a
    // test that ends its thread first.
    unsafe {
        asm!(
            "mov {at}, qword ptr fs:[0]",
            "add {at}, qword ptr [rip + elfen_count_events_rt@GOTTPOFF]",
            "mov qword ptr [{at}], {events}",
            at = out(reg) _,
            events = in(reg) ptr::from_ref(events),
            options(nostack),
        );
    }
}

#[cfg(test)]
mod tests;
