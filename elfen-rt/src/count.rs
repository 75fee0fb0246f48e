//! What a thread has executed, by hardware counters of its own that it reads itself, at entries of
//! functions: for `elfen shim --count-at`.
//!
//! The thread opens two events of itself as it begins, where system calls do no harm, and maps a
//! page of each, by which the kernel says how to read the counter from user space. What is written
//! at an entry calls [`publish`], which reads both and stores them in the thread's words
//! ([`crate::signal::thread`]); without a counter it stores nothing.
//!
//! The kernel maps such pages into no forked child, so the addresses are in memory that a child,
//! however it was forked, finds wiped: it counts nothing.

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

/// The head of what the kernel maps of an event (`struct perf_event_mmap_page`).
#[repr(C)]
#[derive(Debug)]
pub struct EventPage {
    versions: [u32; 2],
    /// Another than before: the rest was changed meanwhile.
    lock: AtomicU32,
    /// The counter that the event is on, from 1; 0 while it is on none.
    index: AtomicU32,
    /// To add to what the counter says.
    offset: AtomicU64,
    times: [AtomicU64; 2],
    capabilities: AtomicU64,
    /// Bits of the counter, whose highest is its sign.
    width: AtomicU16,
}

const _: () = assert!(offset_of!(EventPage, lock) == 8 && offset_of!(EventPage, index) == 12);
const _: () = assert!(offset_of!(EventPage, offset) == 16);
const _: () = assert!(offset_of!(EventPage, capabilities) == 40);
const _: () = assert!(offset_of!(EventPage, width) == 48);

/// In `capabilities`: user space may read the counter.
const MAY_READ: u32 = 2;
/// The kernel changes a page from this very CPU, so a second try is nearly always the last.
const TRIES: u32 = 16;
const PAGE: usize = 4096;

/// The events of a thread; null where there are none.
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

/// Of threads that have none.
static NO_EVENTS: Events = Events::none();
/// The events of each slot's thread, in memory that is wiped in children; null if none count.
static TABLE: AtomicPtr<Events> = AtomicPtr::new(ptr::null_mut());

// As in `tag`: a pointer to the thread's events.
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

/// What is called at entries, out of functions that know nothing of it: changes `%r11` and the
/// flags alone.
///
/// ```text
///     |                            |
///     | return into the stub       |  <- %rsp on entry, and on return one above
///     | the caller's %rax %rcx     |
///     | %rdx %rsi %rdi %r8 %r10    |  <- %rsp at the calls
/// ```
///
/// # Safety
/// 1. Called by code at a function's entry, on a stack of the thread's.
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

/// Reads the counter of the event in `%r10` into `%rax`, as the kernel says how; `%edi` is 0 if
/// there is none to be read. Changes `%rcx`, `%rdx` and `%rsi` besides.
///
/// The counter's highest bit is its sign: it is shifted up to where a register has its own, and
/// down again. All is read anew if the kernel changed the page meanwhile, as a counter is another
/// thread's once that has happened.
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

/// What the calling thread's event has counted; `None` while it is on no counter, or if its counter
/// can't be read from here.
fn read(page: &EventPage) -> Option<u64> {
    let (count, tries): (u64, u32);
    // SAFETY: `read_1` changes these registers and the flags alone; the kernel says by the page
    // that the counter may be read, and the page lives as long as the borrow.
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

/// Why nothing can be counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lacks {
    /// perf_event_open(2) said so.
    Open(c_int),
    /// The events count, and are not to be read without the kernel.
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
/// Nothing of the kernel and the hypervisor: what anybody may count of himself.
const USER_ONLY: u64 = 1 << 5 | 1 << 6;
const CLOSE_ON_EXEC: u64 = 8;

/// Opens an event of the calling thread, in a group if there is one.
fn open(kind: u32, config: u64, group: c_int) -> Result<c_int, Lacks> {
    let attributes = Attributes {
        kind,
        size: ATTRIBUTES_BYTES,
        config,
        unused: [0; 3],
        flags: USER_ONLY,
        rest: [0; 2],
    };
    let (this_thread, any_cpu): (c_int, c_int) = (0, -1);
    // SAFETY: the kernel reads the attributes, whose size they say.
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
    c_int::try_from(fd).ok().filter(|&fd| fd >= 0).ok_or_else(|| Lacks::Open(errno()))
}

/// The page of an event, which lives as long as it is mapped.
fn map(fd: c_int) -> Result<*mut EventPage, Lacks> {
    // SAFETY: the kernel chooses the address, so no mapping of the program's is replaced.
    let page =
        unsafe { libc::mmap(ptr::null_mut(), PAGE, libc::PROT_READ, libc::MAP_SHARED, fd, 0) };
    if page == libc::MAP_FAILED { Err(Lacks::Open(errno())) } else { Ok(page.cast()) }
}

fn unmap(page: *mut EventPage) {
    if !page.is_null() {
        // SAFETY: mapped by `map`, for a thread that has ended or has no use for it.
        unsafe { libc::munmap(page.cast(), PAGE) };
    }
}

fn close(fd: c_int) {
    // SAFETY: opened here, and nobody else knows it.
    unsafe { libc::close(fd) };
}

/// Both events, on counters together or not at all: the first of `configs` leads.
fn open_both(kind: u32, configs: [u64; 2]) -> Result<[*mut EventPage; 2], Lacks> {
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

/// Whether the calling thread's instructions and cycles can be counted and read.
pub fn probe() -> Result<(), Lacks> {
    let pages = open_both(HARDWARE, [CYCLES, INSTRUCTIONS])?;
    let reads = |page: &*mut EventPage| {
        // SAFETY: mapped a moment ago, and unmapped below.
        let page = unsafe { &**page };
        // In a first try the kernel may have had no counter free for a moment.
        (0..100).any(|_| read(page).is_some())
    };
    let all = pages.iter().all(reads);
    pages.into_iter().for_each(unmap);
    if all { Ok(()) } else { Err(Lacks::Read) }
}

/// Whether the process's system calls were filtered as it began. Such a filter is its starter's as
/// well, who has opened events beneath it.
static WAS_FILTERED: AtomicBool = AtomicBool::new(false);

/// Whether some system calls are refused to the calling thread (seccomp), which can be its end. A
/// filter that lets nobody ask this is not to be known.
fn is_filtered() -> bool {
    // SAFETY: takes numbers and answers by one.
    unsafe { libc::prctl(libc::PR_GET_SECCOMP, 0, 0, 0, 0) != 0 }
}

/// From now on threads that begin count ([`begin_thread`]); while there is one thread.
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
    // SAFETY: mapped a moment ago, for this alone.
    if unsafe { libc::madvise(table, bytes, libc::MADV_WIPEONFORK) } == 0 {
        TABLE.store(table.cast(), Relaxed);
    } else {
        // SAFETY: as above; a child would find addresses in it that are not mapped there.
        unsafe { libc::munmap(table, bytes) };
    }
}

/// Opens the calling thread's events, if it has a slot; if that fails it counts nothing, and the
/// page says of how many threads so.
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
    // A program that has shut itself in since it began may end by a call that it does not make.
    if is_filtered() && !WAS_FILTERED.load(Relaxed) {
        return None;
    }
    // SAFETY: `begin` mapped one for each slot, and nothing unmaps them.
    let events = unsafe { &*table.wrapping_add(index) };
    // The slot's thread before has ended.
    unmap(events.cycles.swap(ptr::null_mut(), Relaxed));
    unmap(events.instructions.swap(ptr::null_mut(), Relaxed));
    let [cycles, instructions] = open_both(HARDWARE, [CYCLES, INSTRUCTIONS]).ok()?;
    events.cycles.store(cycles, Relaxed);
    events.instructions.store(instructions, Relaxed);
    point_to(events);
    Some(())
}

/// Has the calling thread publish what these count.
fn point_to(events: &Events) {
    // SAFETY: stores into this thread's own word, which is there as long as the thread; `events`
    // is of the table, or of a test that ends its thread before it.
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
