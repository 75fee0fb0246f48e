//! The library that `elfen run` and `elfen shim` load into programs (`LD_PRELOAD`).
//!
//! - [`hooks`]: functions that compilers call at function entries, for checks and function tags.
//! - [`patch`]: writes checks and tags over the NOPs that compilers left, while the program is
//!   loaded.
//! - [`shared`]: shares the globals that `elfen shim` observes.
//! - [`threads`]: claims a slot for each thread of a program that tags its functions.
//!
//! A program without hooks and NOPs runs unchanged. The check itself is in `elfen_rt::check`, like
//! the slow path of `elfen_check.h`, which this library exports. Counters are in `elfen_rt::count`.
//!
//! This is a separate crate because it is built differently: without std and without unwinding. It
//! depends only on the C library, which every program has loaded already.

// A debug build has overflow checks and may unwind, which needs std, and so does a test program.
// This crate has no tests, but `--all-targets` builds one.
#![cfg_attr(not(any(debug_assertions, test)), no_std)]
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod file_address;
mod hooks;
mod patch;
mod shared;
mod threads;

/// The loader calls this after it has loaded this library and its dependencies, before `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    let order = elfen_rt::tag::Order::own();
    let functions = order.map_or(&b""[..], |order| order.functions());
    let tags = functions == b"entries";
    if tags || functions == b"hooks" {
        let counts = order.is_some_and(|order| order.counted().next().is_some());
        if counts {
            elfen_rt::count::begin();
        }
        // The first thread's slot is claimed here, where system calls do no harm.
        threads::claim_slots(counts);
        threads::begin_this_thread();
        threads::claim_in_children();
    }
    patch::patch_all(patch::Patches {
        tags: order.filter(|_| tags),
        checks: elfen_rt::inherit::is_named(),
    });
    if let Some(order) = order {
        shared::share(&order);
    }
    if functions == b"hooks" {
        hooks::tag_functions();
    }
}

/// No code here can panic. A release build proves it: a panic would need a symbol that no library
/// defines, and a test searches for that symbol.
#[cfg(not(any(debug_assertions, test)))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    unsafe extern "C" {
        fn elfen_preload_can_panic() -> !;
    }
    // SAFETY: never linked, so never called.
    unsafe { elfen_preload_can_panic() }
}

/// No code here can allocate, which a release build proves likewise. `alloc` is linked when other
/// crates of one build need more of a dependency than this one does.
#[cfg(not(any(debug_assertions, test)))]
mod no_allocator {
    use core::alloc::{GlobalAlloc, Layout};

    struct Never;

    #[global_allocator]
    static NEVER: Never = Never;

    unsafe extern "C" {
        fn elfen_preload_can_allocate() -> !;
    }

    // SAFETY: never linked, so never called.
    unsafe impl GlobalAlloc for Never {
        unsafe fn alloc(&self, _: Layout) -> *mut u8 {
            // SAFETY: as above.
            unsafe { elfen_preload_can_allocate() }
        }

        unsafe fn dealloc(&self, _: *mut u8, _: Layout) {
            // SAFETY: as above.
            unsafe { elfen_preload_can_allocate() }
        }
    }
}
