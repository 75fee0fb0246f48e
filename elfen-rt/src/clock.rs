//! The one clock of every channel: CLOCK_MONOTONIC, in nanoseconds, as
//! `bpf_ktime_get_ns` reads it in the kernel.

/// Nanoseconds of CLOCK_MONOTONIC. No system call: the vDSO answers.
#[inline]
pub fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a live timespec of ours, and CLOCK_MONOTONIC exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    // The monotonic clock starts at boot: neither field is ever negative.
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// A duration as the channels' words have it.
pub fn nanos(duration: core::time::Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
