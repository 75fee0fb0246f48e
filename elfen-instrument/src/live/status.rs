//! Reads the fields of `/proc/PID/status` that decide which changes a process allows.

use std::fs;

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Status {
    pub(super) traced: bool,
    /// Its system calls are filtered, so the doorbell's calls may be forbidden.
    pub(super) filtered: bool,
    /// It has a handler for faults, which may look at the faulting address.
    pub(super) catches_faults: bool,
    /// It has a handler for at least one signal.
    pub(super) catches: bool,
    pub(super) threads: u32,
}

/// The reason against processes that may not make the system calls of a check.
pub const FILTERED: &str = "its system calls are filtered (seccomp)";

impl Status {
    pub(super) fn of(process: u32) -> Option<Self> {
        parse(&fs::read_to_string(format!("/proc/{process}/status")).ok()?)
    }

    /// Whether a thread filters its system calls; false if the thread has ended.
    pub(super) fn is_filtered(thread: u32) -> bool {
        Self::of(thread).is_some_and(|status| status.filtered)
    }
}

/// Whether any thread of a process filters its system calls.
pub fn is_filtered(process: u32) -> bool {
    let Ok(entries) = fs::read_dir(format!("/proc/{process}/task")) else { return false };
    let mut threads = entries.flatten().filter_map(|one| one.file_name().to_str()?.parse().ok());
    threads.any(Status::is_filtered)
}

/// Identifies the program that a process runs: an execve(2) gives it another stack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProgramId {
    stack: u64,
}

impl ProgramId {
    /// `None` if the process has ended or may not be inspected.
    pub fn of(process: u32) -> Option<Self> {
        const START_OF_STACK: usize = 28;
        let line = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        let (_, after_name) = line.rsplit_once(')')?;
        // The first field after the name is the third of the line.
        let stack = after_name.split_whitespace().nth(START_OF_STACK - 3)?.parse().ok()?;
        Some(Self { stack })
    }
}

fn parse(text: &str) -> Option<Status> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.trim_start_matches(':').trim())
    };
    let caught = u64::from_str_radix(field("SigCgt")?, 16).ok()?;
    let bit = |signal: i32| 1_u64 << (signal - 1);
    let faults = bit(libc::SIGSEGV) | bit(libc::SIGBUS) | bit(libc::SIGFPE);
    Some(Status {
        traced: field("TracerPid")? != "0",
        // The field is absent if the kernel has no such filters.
        filtered: !matches!(field("Seccomp"), None | Some("0")),
        catches_faults: caught & faults != 0,
        catches: caught != 0,
        threads: field("Threads")?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_by_their_names() {
        let plain = "Name:\tSeccomp\nTracerPid:\t0\nThreads:\t3\nSigCgt:\t0000000000000002\n\
                     Seccomp:\t0\nSeccomp_filters:\t0\n";
        let expected = Status { catches: true, threads: 3, ..Status::default() };
        assert_eq!(parse(plain), Some(expected));
        assert!(!parse(&plain.replace("0002", "0000")).unwrap().catches);
        let of = |from: &str, to: &str| parse(&plain.replace(from, to)).unwrap();
        assert!(of("Pid:\t0", "Pid:\t7").traced);
        assert!(of("Seccomp:\t0", "Seccomp:\t2").filtered);
        for fault in ["400", "40", "80"] {
            assert!(of("0000000000000002", fault).catches_faults, "{fault}");
        }
        assert_eq!(parse("TracerPid:\t0\n"), None);
        assert!(Status::of(std::process::id()).is_some());
    }
}
