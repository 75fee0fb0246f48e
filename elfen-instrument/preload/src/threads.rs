//! Threads of a program whose functions say that they run: each claims its slot before it begins.
//!
//! Code at entries asks for nothing, so it cannot find a slot. What a thread is to begin with is
//! handed to it by one of some places that are there already; if all are taken, which takes as many
//! threads that have not begun yet, the thread begins without a slot, and writes where nobody
//! reads.

use core::arch::naked_asm;
use core::ffi::{c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering::*};

use elfen_rt::{count, tag};

/// What pthread_create(3) is given.
type Start = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
type Create = unsafe extern "C" fn(
    *mut libc::pthread_t,
    *const libc::pthread_attr_t,
    Start,
    *mut c_void,
) -> c_int;

/// What a thread begins with, on its way from the one that creates it.
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

/// Whether threads are to claim slots, and to open their counters.
static CLAIMED: AtomicBool = AtomicBool::new(false);
static COUNTED: AtomicBool = AtomicBool::new(false);

/// From now on each thread claims its slot as it begins, and `counts` what it executes.
pub(crate) fn claim_slots(counts: bool) {
    CLAIMED.store(true, Relaxed);
    COUNTED.store(counts, Relaxed);
}

/// What the calling thread does of that.
pub(crate) fn begin_this_thread() {
    tag::begin_thread();
    if COUNTED.load(Relaxed) {
        count::begin_thread();
    }
}

/// Has forked children claim slots too: code at their entries can't. Behind [`begin_this`], as the
/// first handler in a child takes its parent's slot from it.
pub(crate) fn claim_in_children() {
    // SAFETY: the handler lives as long as the process: this library is never unloaded.
    unsafe { libc::pthread_atfork(None, None, Some(begin_child)) };
}

unsafe extern "C" fn begin_child() {
    tag::begin_thread();
}

/// What a thread is to do, as two registers.
#[repr(C)]
struct StartCall {
    start: usize,
    argument: *mut c_void,
}

/// In the new thread: claims its slot, and gives what it begins with.
extern "C" fn begin_in_slot(slot: &StartSlot) -> StartCall {
    // Relaxed: pthread_create(3) orders what its caller wrote before all that the thread does.
    let call = StartCall { start: slot.start.load(Relaxed), argument: slot.argument.load(Relaxed) };
    // Release: pairs with the next one that takes the place.
    slot.taken.store(false, Release);
    begin_this_thread();
    call
}

/// Where a thread begins that has a slot to claim: jumps to what its creator gave it, whose return
/// is the C library's.
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

/// The C library's own.
fn libc_create() -> Option<Create> {
    static FOUND: AtomicUsize = AtomicUsize::new(0);
    let mut found = FOUND.load(Relaxed);
    if found == 0 {
        // SAFETY: the name is NUL-terminated.
        found = unsafe { libc::dlsym(libc::RTLD_NEXT, c"pthread_create".as_ptr()) }.addr();
        FOUND.store(found, Relaxed);
    }
    // SAFETY: null is `None`, and what the loader finds by this name has this type.
    unsafe { core::mem::transmute::<usize, Option<Create>>(found) }
}

/// Stands before the C library's. Nothing of ours is on the thread's stack once it has begun.
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
    let handed = ptr::from_ref(slot).cast_mut().cast();
    // SAFETY: by the contract above; `begin` takes a place, which is this thread's alone.
    let failed = unsafe { libc_create(thread, attributes, thread_entry, handed) };
    if failed != 0 {
        slot.taken.store(false, Release);
    }
    failed
}
