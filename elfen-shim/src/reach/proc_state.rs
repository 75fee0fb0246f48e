//! The state of a program's first thread in `/proc`: running or ready, asleep in a system call, or
//! waiting for a device.
//!
//! Reading it needs no privileges for processes of the same user. A reading is a system call that
//! takes a lock of the process, so it is read only every 100 us.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Reads a thread's state into a word.
#[derive(Debug)]
pub struct ProcState {
    file: File,
    /// The system call that the thread sleeps in, if this user may read it.
    call: Option<File>,
    pub word: &'static AtomicU64,
}

/// The state letters of `/proc/PID/stat`, and their names in the output.
const STATES: [(u8, &str); 6] = [
    (b'R', "runs, or waits for a CPU"),
    (b'S', "sleeps"),
    (b'D', "waits for a device"),
    (b'T', "is stopped"),
    (b't', "is stopped by a tracer"),
    (b'Z', "has ended"),
];

/// System calls that threads often sleep in, with their names.
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

    /// The call in the bits above the letter: its position in `CALLS`, counted from 1, or 0 for
    /// other calls.
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
        // The name may contain parentheses and spaces.
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
    fn a_sleeping_thread_is_asleep_in_its_call() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let state = ProcState::open(child.id()).unwrap();
        let names = ProcState::names();
        // sleep(1) uses one of two system calls, which have the same name in `CALLS`.
        let is_asleep =
            |value| names.iter().any(|(word, name)| *word == value && name == "sleeps: sleep");
        while !is_asleep(state.word.load(Relaxed)) {
            state.fetch(); // The process is still loading.
        }
        child.kill().unwrap();
        child.wait().unwrap();
        state.fetch();
        assert!(is_asleep(state.word.load(Relaxed)), "the last state of a thread that has ended");
    }
}
