//! The clock of all channels: CLOCK_MONOTONIC in nanoseconds. `bpf_ktime_get_ns` reads the same
//! clock in the kernel.

/// Nanoseconds of CLOCK_MONOTONIC. Makes no system call, because the vDSO reads the clock.
#[inline]
pub fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a local timespec, and CLOCK_MONOTONIC exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    // The monotonic clock starts at boot: neither field is ever negative.
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// Converts a duration to the nanoseconds of the channels.
pub fn nanos(duration: core::time::Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
