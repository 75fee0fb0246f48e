//! The library that `elfen run` loads into batch programs (`LD_PRELOAD`).
//!
//! Its hooks ([`hooks`]) are what compilers call at function entries when asked to; where
//! they left room for it instead, [`patch`] writes checks into the program as it is loaded.
//! A program with neither is none the wiser: the library then does nothing at all. For
//! `elfen shim` it shares the globals that are looked at ([`shared`]), and functions say that they
//! run, each thread in a slot that it claims as it begins ([`threads`]), and some functions what
//! their thread has executed (`elfen_rt::count`). What a check does is in
//! `elfen_rt::check`; so is the slow path of the checks in `elfen_check.h`, which this library
//! exports.
//!
//! A crate of its own because it is built like no other: no std, no unwinding, nothing needed but
//! the C library that is there already.

// A debug build checks its arithmetic and may unwind, which takes std; so does a test program.
// There are no tests in here, but `--all-targets` builds one.
#![cfg_attr(not(any(debug_assertions, test)), no_std)]
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod file_address;
mod hooks;
mod patch;
mod shared;
mod threads;

/// Called by the loader when the library and what it needs are in place, before `main`.
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

/// Nothing here can panic. A release build proves it: if anything could, the library would need a
/// symbol that no library has, and a test looks for it.
#[cfg(not(any(debug_assertions, test)))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    unsafe extern "C" {
        fn elfen_preload_can_panic() -> !;
    }
    // SAFETY: never linked, so never called.
    unsafe { elfen_preload_can_panic() }
}
