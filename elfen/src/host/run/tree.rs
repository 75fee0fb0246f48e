//! The batch's processes, and keeping all their threads where they belong.
//!
//! Affinity and SCHED_IDLE are inherited, so this only finds programs that change their own. They are put back, and
//! counted: the report says how often.

use std::fs;
use std::io;

use crate::host::cpulist::CpuSet;

/// All descendants of a process.
pub(crate) fn processes_below(ancestor: u32) -> Vec<u32> {
    let mut found = Vec::new();
    let mut ahead = children(ancestor);
    while let Some(process) = ahead.pop() {
        ahead.extend(children(process));
        found.push(process);
    }
    found
}

pub(crate) fn threads_of(process: u32) -> Vec<u32> {
    numbers_in(&format!("/proc/{process}/task"))
}

/// Processes that a process started or inherited, over all its threads.
fn children(process: u32) -> Vec<u32> {
    let lists = threads_of(process).into_iter().map(|thread| {
        // Ended meanwhile: its children are somebody else's, and found there the next time.
        fs::read_to_string(format!("/proc/{process}/task/{thread}/children")).unwrap_or_default()
    });
    let numbers = |list: String| {
        list.split_whitespace().filter_map(|word| word.parse().ok()).collect::<Vec<u32>>()
    };
    lists.flat_map(numbers).collect()
}

fn numbers_in(folder: &str) -> Vec<u32> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Where the scheduler groups tasks by session, SCHED_IDLE ranks a thread below others of its own session alone. A batch
/// process with a session of its own, whose group is as heavy as the guard's, is made as light as a group can be.
pub(crate) fn lighten_session(process: u32) {
    let Ok(pid) = i32::try_from(process) else { return };
    // SAFETY: takes a number.
    let theirs = unsafe { libc::getsid(pid) };
    // SAFETY: takes a number; 0 is the caller.
    let ours = unsafe { libc::getsid(0) };
    if theirs != ours {
        // Absent without autogroups; refused within a tenth of a second of the last time: the next look tries again.
        let _lightened = fs::write(format!("/proc/{process}/autogroup"), "19");
    }
}

/// A batch thread's place: the batch lanes, at the lowest priority there is.
#[derive(Debug)]
pub(crate) struct Place {
    mask: Vec<u64>,
}

impl Place {
    pub(crate) fn new(lanes: &CpuSet) -> Self {
        let words = lanes.last().map_or(1, |last| last / 64 + 1);
        let mut mask = vec![0; usize::try_from(words).unwrap_or(1)];
        for lane in lanes.iter() {
            if let Some(word) = usize::try_from(lane / 64).ok().and_then(|word| mask.get_mut(word))
            {
                *word |= 1 << (lane % 64);
            }
        }
        Self { mask }
    }

    /// Puts a thread there; 0 is the caller. Makes system calls alone, so that it can run between fork and exec.
    pub(crate) fn take(&self, thread: u32) -> io::Result<()> {
        let size = size_of_val(self.mask.as_slice());
        // SAFETY: the kernel reads `size` bytes of the mask, which is ours.
        let moved =
            unsafe { libc::syscall(libc::SYS_sched_setaffinity, thread, size, self.mask.as_ptr()) };
        if moved < 0 {
            return Err(io::Error::last_os_error());
        }
        let none = libc::sched_param { sched_priority: 0 };
        // SAFETY: `none` is a live sched_param; SCHED_IDLE asks for nothing that needs a privilege.
        let lowered =
            unsafe { libc::syscall(libc::SYS_sched_setscheduler, thread, libc::SCHED_IDLE, &none) };
        if lowered < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Whether a thread has left its place; `None` if it ended.
    pub(crate) fn is_left_by(&self, thread: u32) -> Option<bool> {
        // Longer than any machine's: the kernel writes as much as it has.
        let mut mask = [0_u64; 128];
        let size = size_of_val(&mask);
        // SAFETY: the kernel writes at most `size` bytes into `mask`.
        let got =
            unsafe { libc::syscall(libc::SYS_sched_getaffinity, thread, size, mask.as_mut_ptr()) };
        if got < 0 {
            return None;
        }
        let outside = mask
            .iter()
            .enumerate()
            .any(|(index, &word)| word & !self.mask.get(index).copied().unwrap_or(0) != 0);
        // SAFETY: takes a number.
        let policy = unsafe { libc::syscall(libc::SYS_sched_getscheduler, thread) };
        (policy >= 0).then_some(outside || policy != i64::from(libc::SCHED_IDLE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// Goal: a program that leaves its place is found and put back. Method: a child that starts elsewhere than asked.
    #[test]
    fn who_leaves_is_put_back() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let own = std::process::id();
        while !processes_below(own).contains(&child.id()) {
            std::thread::yield_now();
        }
        let place = Place::new(&crate::host::affinity::allowed().unwrap());
        assert_eq!(place.is_left_by(child.id()), Some(true), "not at SCHED_IDLE");
        place.take(child.id()).unwrap();
        assert_eq!(place.is_left_by(child.id()), Some(false));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(place.is_left_by(child.id()), None);
    }
}
