//! What the kernel reports about a process: its CPU time, threads and descendants, whether it has
//! ended, and whether it shares its memory.

use std::fs;
use std::io;
use std::iter;

pub use elfen_instrument::process::{
    Stat, name_of, numbers_in, plain_text, stat, status_field, thread_stat, threads_of,
};
use nix::time::{ClockId, clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;

const GENERATIONS_MAX: usize = 1000;

/// The CPU time of the calling thread.
pub fn own_cpu_ns() -> u64 {
    // This clock exists for every thread.
    clock_ns(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap_or_default()
}

/// The CPU time of a process, including threads that have ended; `None` if the process does not
/// exist.
pub fn cpu_time_ns(process: u32) -> Option<u64> {
    let process = Pid::from_raw(i32::try_from(process).ok()?);
    clock_ns(clock_getcpuclockid(process).ok()?)
}

fn clock_ns(clock: ClockId) -> Option<u64> {
    let time = clock_gettime(clock).ok()?;
    Some(time.tv_sec().unsigned_abs() * 1_000_000_000 + time.tv_nsec().unsigned_abs())
}

/// All descendants of a process.
pub fn below(ancestor: u32) -> Vec<u32> {
    let mut found = Vec::new();
    let mut ahead = children(ancestor);
    while let Some(process) = ahead.pop() {
        ahead.extend(children(process));
        found.push(process);
    }
    found
}

/// Whether a process is a descendant of another. Also `false` if a process between the two ends
/// during the call.
pub fn descends(process: u32, ancestor: u32) -> bool {
    let parent = |&process: &u32| stat(process).map(|stat| stat.parent);
    // Parents never form a cycle, but process ids may be reused while they are read.
    let mut above = iter::successors(parent(&process), parent).take(GENERATIONS_MAX);
    above.any(|process| process == ancestor)
}

/// The current children of a process, over all its threads.
pub fn children(process: u32) -> Vec<u32> {
    let lists = threads_of(process).into_iter().map(|thread| {
        // The list is empty if the thread has ended meanwhile. Its children then have another
        // parent, and the next call finds them there.
        fs::read_to_string(format!("/proc/{process}/task/{thread}/children")).unwrap_or_default()
    });
    let numbers = |list: String| {
        list.split_whitespace().filter_map(|word| word.parse().ok()).collect::<Vec<u32>>()
    };
    lists.flat_map(numbers).collect()
}

/// Whether two processes share one memory, as between vfork and exec. `false` if one of them does
/// not exist; `None` if the kernel does not tell.
pub fn share_memory(one: u32, other: u32) -> Option<bool> {
    const KCMP_VM: i32 = 1;
    // SAFETY: kcmp takes numbers.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_VM, 0, 0) };
    let is_gone = || io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH);
    match order {
        0 => Some(true),
        1.. => Some(false),
        _ => is_gone().then_some(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descendants_are_found_by_their_parents() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let own = std::process::id();
        let parent = std::os::unix::process::parent_id();
        assert!(descends(child.id(), own) && descends(child.id(), parent));
        assert!(!descends(own, child.id()) && !descends(own, own) && !descends(u32::MAX, own));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
