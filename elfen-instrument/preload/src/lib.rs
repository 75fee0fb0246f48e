//! The library that `elfen run` loads into batch programs (`LD_PRELOAD`).
//!
//! Its hooks ([`hooks`]) are what compilers call at function entries when asked to; where
//! they left room for it instead, [`patch`] writes checks into the program as it is loaded.
//! A program with neither is none the wiser: the library then does nothing at all. For
//! `elfen shim` it shares the globals that are looked at ([`shared`]). What a check does is in
//! `elfen_rt::check`; so is the slow path of the checks in `elfen_check.h`, which this library
//! exports.
//!
//! A crate of its own because it is built like no other: no std, no unwinding, nothing needed but
//! the C library that is there already.

// A debug build checks its arithmetic and may unwind, which takes std; so does a test program.
// There are no tests in here, but `--all-targets` builds one.
#![cfg_attr(not(any(debug_assertions, test)), no_std)]
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod hooks;
mod patch;
mod shared;

/// Called by the loader when the library and what it needs are in place, before `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    if elfen_rt::inherit::is_named() {
        patch::patch_all();
    }
    if let Some(order) = elfen_rt::tag::Order::own() {
        shared::share(&order);
        hooks::say_functions();
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
