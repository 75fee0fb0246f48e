//! What a program's first thread does as `/proc` has it: running or ready, asleep in a system call,
//! or waiting for a device. It needs no right but that to look at one's own processes, and is
//! coarse: a reading is a system call that takes a lock of the process, so it is made a tenth of a
//! millisecond apart.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A thread's state, and where it is put.
#[derive(Debug)]
pub struct ProcState {
    file: File,
    /// The system call that it sleeps in, where this user may know.
    call: Option<File>,
    pub word: &'static AtomicU64,
}

/// Letters of `/proc/PID/stat`, and what they are called here.
const STATES: [(u8, &str); 6] = [
    (b'R', "runs, or waits for a CPU"),
    (b'S', "sleeps"),
    (b'D', "waits for a device"),
    (b'T', "is stopped"),
    (b't', "is stopped by a tracer"),
    (b'Z', "has ended"),
];

/// Calls that threads sleep in, with names; a table of all is no use here.
const CALLS: [(libc::c_long, &str); 24] = [
    (libc::SYS_read, "read"),
    (libc::SYS_pread64, "pread"),
    (libc::SYS_readv, "readv"),
    (libc::SYS_write, "write"),
    (libc::SYS_writev, "writev"),
    (libc::SYS_fsync, "fsync"),
    (libc::SYS_fdatasync, "fdatasync"),
    (libc::SYS_poll, "poll"),
    (libc::SYS_ppoll, "poll"),
    (libc::SYS_select, "select"),
    (libc::SYS_pselect6, "select"),
    (libc::SYS_epoll_wait, "epoll_wait"),
    (libc::SYS_epoll_pwait, "epoll_wait"),
    (libc::SYS_futex, "futex"),
    (libc::SYS_nanosleep, "sleep"),
    (libc::SYS_clock_nanosleep, "sleep"),
    (libc::SYS_wait4, "wait for a child"),
    (libc::SYS_waitid, "wait for a child"),
    (libc::SYS_accept, "accept"),
    (libc::SYS_accept4, "accept"),
    (libc::SYS_connect, "connect"),
    (libc::SYS_recvfrom, "recv"),
    (libc::SYS_recvmsg, "recv"),
    (libc::SYS_flock, "flock"),
];

impl ProcState {
    pub fn open(process: u32) -> io::Result<Self> {
        let own = |name| File::open(format!("/proc/{process}/task/{process}/{name}"));
        let word = Box::leak(Box::new(AtomicU64::new(0)));
        Ok(Self { file: own("stat")?, call: own("syscall").ok(), word })
    }

    /// Above the letter, the number of a call in the table, from 1.
    fn call(&self) -> u64 {
        let mut line = [0; 32];
        let Some(Ok(count)) = self.call.as_ref().map(|file| file.read_at(&mut line, 0)) else {
            return 0;
        };
        let digits = line[..count].split(|byte| !byte.is_ascii_digit()).next();
        let digits = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        let Some(number) = digits.and_then(|digits| digits.parse::<libc::c_long>().ok()) else {
            return 0;
        };
        let at = CALLS.iter().position(|(call, _)| *call == number);
        at.map_or(0, |at| (at as u64 + 1) << 8)
    }

    pub fn fetch(&self) {
        let mut line = [0; 512];
        let Ok(count) = self.file.read_at(&mut line, 0) else { return };
        let line = &line[..count.min(line.len())];
        // The name may hold parentheses and spaces.
        let Some(end) = line.iter().rposition(|&byte| byte == b')') else { return };
        if let Some(&letter) = line.get(end + 2) {
            let call = if letter == b'S' { self.call() } else { 0 };
            self.word.store(u64::from(letter) | call, Relaxed);
        }
    }

    pub fn names() -> Vec<(u64, String)> {
        let states = STATES.iter().map(|(letter, name)| (u64::from(*letter), (*name).to_owned()));
        let asleep = |(at, (_, call)): (u64, &(libc::c_long, &str))| {
            (u64::from(b'S') | at << 8, format!("sleeps: {call}"))
        };
        states.chain((1..).zip(&CALLS).map(asleep)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_sleeps_is_seen_to() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let state = ProcState::open(child.id()).unwrap();
        let names = ProcState::names();
        // The call that it sleeps in is either of two.
        let is_asleep =
            |value| names.iter().any(|(word, name)| *word == value && name == "sleeps: sleep");
        while !is_asleep(state.word.load(Relaxed)) {
            state.fetch(); // It has to load itself first.
        }
        child.kill().unwrap();
        child.wait().unwrap();
        state.fetch();
        assert!(is_asleep(state.word.load(Relaxed)), "of a thread that is gone, what was last");
    }
}
