//! Claims a slot for each thread of a program that tags its functions, before the thread runs.
//!
//! Tags are plain stores, so they cannot claim a slot themselves. Therefore pthread_create(3) is
//! wrapped, and a fixed set of start slots hands the start routine to the new thread. All start
//! slots may be taken by threads that have not begun yet. Then the thread begins without a slot,
//! and its tags go to memory that is never read.

use core::arch::naked_asm;
use core::ffi::{c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering::*};

use elfen_rt::{count, tag};

/// The start routine that pthread_create(3) is given.
type Start = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
type Create = unsafe extern "C" fn(
    *mut libc::pthread_t,
    *const libc::pthread_attr_t,
    Start,
    *mut c_void,
) -> c_int;

/// The start routine and argument of a thread, on their way from its creator.
struct StartSlot {
    taken: AtomicBool,
    start: AtomicUsize,
    argument: AtomicPtr<c_void>,
}

static START_SLOTS: [StartSlot; 256] = [const {
    StartSlot {
        taken: AtomicBool::new(false),
        start: AtomicUsize::new(0),
        argument: AtomicPtr::new(ptr::null_mut()),
    }
}; 256];

/// Whether threads claim slots, and whether they open their counters.
static CLAIMED: AtomicBool = AtomicBool::new(false);
static COUNTED: AtomicBool = AtomicBool::new(false);

/// Makes each thread claim a slot when it begins, and with `counts` open its counters.
pub(crate) fn claim_slots(counts: bool) {
    CLAIMED.store(true, Relaxed);
    COUNTED.store(counts, Relaxed);
}

/// Does this for the calling thread.
pub(crate) fn begin_this_thread() {
    tag::begin_thread();
    if COUNTED.load(Relaxed) {
        count::begin_thread();
    }
}

/// Makes forked children claim slots too. Must be registered after [`begin_this_thread`], because
/// the first handler in a child takes its parent's slot from it.
pub(crate) fn claim_in_children() {
    // SAFETY: the handler lives as long as the process, because this library is never unloaded.
    unsafe { libc::pthread_atfork(None, None, Some(begin_child)) };
}

unsafe extern "C" fn begin_child() {
    tag::begin_thread();
}

/// The start routine and its argument, returned in two registers.
#[repr(C)]
struct StartCall {
    start: usize,
    argument: *mut c_void,
}

/// Runs in the new thread: claims its slot, and returns the program's start routine.
extern "C" fn begin_in_slot(slot: &StartSlot) -> StartCall {
    // Relaxed: pthread_create(3) orders the creator's stores before everything in the new thread.
    let call = StartCall { start: slot.start.load(Relaxed), argument: slot.argument.load(Relaxed) };
    // Release: pairs with the Acquire of the next thread that takes the slot.
    slot.taken.store(false, Release);
    begin_this_thread();
    call
}

/// Where a thread with a start slot begins. It jumps to the program's start routine, which returns
/// to the C library.
#[unsafe(naked)]
unsafe extern "C" fn thread_entry(slot: *mut c_void) -> *mut c_void {
    naked_asm!(
        ".cfi_startproc",
        "sub rsp, 8",
        ".cfi_adjust_cfa_offset 8",
        "call {begin_in_slot}",
        "add rsp, 8",
        ".cfi_adjust_cfa_offset -8",
        "mov rdi, rdx",
        "jmp rax",
        ".cfi_endproc",
        begin_in_slot = sym begin_in_slot,
    );
}

fn free_slot() -> Option<&'static StartSlot> {
    let free = |slot: &&StartSlot| {
        let taken = slot.taken.compare_exchange(false, true, Acquire, Relaxed);
        taken.is_ok()
    };
    if CLAIMED.load(Relaxed) { START_SLOTS.iter().find(free) } else { None }
}

/// The C library's own function.
fn libc_create() -> Option<Create> {
    static FOUND: AtomicUsize = AtomicUsize::new(0);
    let mut found = FOUND.load(Relaxed);
    if found == 0 {
        // SAFETY: the name is NUL-terminated.
        found = unsafe { libc::dlsym(libc::RTLD_NEXT, c"pthread_create".as_ptr()) }.addr();
        FOUND.store(found, Relaxed);
    }
    // SAFETY: null becomes `None`, and the C library's function has this type.
    unsafe { core::mem::transmute::<usize, Option<Create>>(found) }
}

/// Replaces the C library's function. Leaves nothing on the stack of the new thread.
///
/// # Safety
/// 1. As for pthread_create(3).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: Start,
    argument: *mut c_void,
) -> c_int {
    let Some(libc_create) = libc_create() else { return libc::EAGAIN };
    let Some(slot) = free_slot() else {
        // SAFETY: by the contract above.
        return unsafe { libc_create(thread, attributes, start, argument) };
    };
    slot.start.store(start as usize, Relaxed);
    slot.argument.store(argument, Relaxed);
    let slot_argument = ptr::from_ref(slot).cast_mut().cast();
    // SAFETY: by the contract above; `thread_entry` gets a start slot that only this thread uses.
    let failed = unsafe { libc_create(thread, attributes, thread_entry, slot_argument) };
    if failed != 0 {
        slot.taken.store(false, Release);
    }
    failed
}
