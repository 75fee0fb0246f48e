//! What is known of the processes of a program.

use elfen_instrument::process::stat;
use elfen_machine::process::{children, cpu_time_ns};

/// A process and its descendants.
pub(crate) fn family(root: u32) -> Vec<u32> {
    let mut found = vec![root];
    let mut at = 0;
    while let Some(&process) = found.get(at) {
        found.extend(children(process));
        at += 1;
    }
    found
}

/// The user time of a process, in ticks.
pub(crate) fn user_ticks(process: u32) -> Option<u64> {
    stat(process).map(|stat| stat.user_ticks)
}

/// Nanoseconds of a tick of the accounts in /proc.
pub(crate) fn tick_ns() -> u64 {
    1_000_000_000 / ticks_per_second()
}

/// The time stamp counter.
pub(crate) fn ticks() -> u64 {
    // SAFETY: each processor for this architecture has the instruction.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// The CPU time of this process.
pub(crate) fn own_ns() -> u64 {
    cpu_time_ns(std::process::id()).unwrap_or(0)
}

/// Ticks of the clock that user times are counted in.
pub(crate) fn ticks_per_second() -> u64 {
    // SAFETY: takes a number.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    u64::try_from(ticks).ok().filter(|&ticks| ticks > 0).unwrap_or(100)
}
