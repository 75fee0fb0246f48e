//! The calling thread's id, asked of the kernel once.

use core::arch::{asm, global_asm};
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

// As in `check::thread`: stable Rust has no thread-locals without std.
global_asm!(
    ".pushsection .tbss,\"awT\",@nobits",
    ".balign 4",
    ".globl elfen_own_thread_rt",
    ".hidden elfen_own_thread_rt",
    ".type elfen_own_thread_rt, @object",
    ".size elfen_own_thread_rt, 4",
    "elfen_own_thread_rt:",
    ".zero 4",
    ".popsection",
);

/// 0 until the thread has asked.
#[inline(always)]
fn with_word<R>(with: impl FnOnce(&AtomicU32) -> R) -> R {
    let word: *const AtomicU32;
    // SAFETY: reads the thread pointer, which every thread has at %fs:0, and the word's distance
    // from it, which the loader has filled in.
    unsafe {
        asm!(
            "mov {word}, qword ptr fs:[0]",
            "add {word}, qword ptr [rip + elfen_own_thread_rt@GOTTPOFF]",
            word = out(reg) word,
            options(pure, nomem, nostack),
        );
    }
    // SAFETY: the word lives as long as its thread, which is in this function, and is atomic.
    with(unsafe { &*word })
}

/// In the thread's own pid namespace.
#[inline]
pub(crate) fn own_thread() -> u32 {
    match with_word(|word| word.load(Relaxed)) {
        0 => ask(),
        thread => thread,
    }
}

#[cold]
fn ask() -> u32 {
    // SAFETY: takes nothing and cannot fail.
    let thread = unsafe { libc::gettid() }.unsigned_abs();
    with_word(|word| word.store(thread, Relaxed));
    thread
}

/// After a fork the thread that goes on in the child is another.
pub(crate) fn forget_own_thread() {
    with_word(|word| word.store(0, Relaxed));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_has_its_own() {
        let ids = || {
            // SAFETY: takes nothing.
            let asked = unsafe { libc::gettid() }.unsigned_abs();
            (own_thread(), own_thread(), asked)
        };
        let (first, again, asked) = ids();
        assert_eq!((first, again), (asked, asked));
        let other = std::thread::spawn(ids).join().unwrap();
        assert!(other.0 == other.2 && other.0 != first);
        forget_own_thread();
        assert_eq!(own_thread(), asked);
    }
}
