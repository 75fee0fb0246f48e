//! Whether a server on this machine runs: by the CPU clocks of its processes, which tell of any
//! time between two looks, and take no more rights than to see the process.
//!
//! That a server has not run means that it was stopped, starved or asleep, whatever its CPU did
//! meanwhile: proxy and server may share one.

use std::fs;

use elfen_rt::clock::monotonic_ns;

use crate::service::{NotFound, Service, Which};

/// Looking for processes takes as long as some hundred looks.
const REFRESH_NS: u64 = 1_000_000_000;

#[derive(Debug)]
pub struct Watched {
    service: Service,
    cpu_ns: Option<u64>,
    ran: bool,
    refreshed_ns: u64,
}

impl Watched {
    pub fn find(port: u16) -> Result<Self, NotFound> {
        let service = Service::find(Which::Port(port))?;
        Ok(Self { service, cpu_ns: None, ran: true, refreshed_ns: 0 })
    }

    /// Whether it has run since this was asked last; who can't be read may have.
    pub fn ran(&mut self) -> bool {
        let clocks = self.service.processes.iter().map(|process| cpu_ns(*process));
        let now: Option<u64> = clocks.sum();
        if now.is_none() && monotonic_ns().saturating_sub(self.refreshed_ns) > REFRESH_NS {
            self.refreshed_ns = monotonic_ns();
            self.service.refresh();
        }
        let before = std::mem::replace(&mut self.cpu_ns, now);
        self.ran = now.is_none() || before.is_none() || now != before;
        self.ran
    }

    /// Whether it could take requests: nothing keeps it, as far as its state tells.
    pub fn is_free(&self) -> bool {
        let mut states = self.service.processes.iter().map(|process| state(*process));
        states.all(|state| match state {
            Some('S' | 'I') => true,
            // It waits for a CPU if it did not run.
            Some('R') => self.ran,
            _ => false,
        })
    }
}

/// The CPU time of all threads of a process.
fn cpu_ns(process: u32) -> Option<u64> {
    let process = libc::pid_t::try_from(process).ok()?;
    let mut clock: libc::clockid_t = 0;
    // SAFETY: the call writes one number to where it is told.
    if unsafe { libc::clock_getcpuclockid(process, &raw mut clock) } != 0 {
        return None;
    }
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call fills the structure, which is its own size.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return None;
    }
    let (seconds, ns) = (u64::try_from(time.tv_sec).ok()?, u64::try_from(time.tv_nsec).ok()?);
    Some(seconds * 1_000_000_000 + ns)
}

/// As /proc has it: behind the name, which may hold anything.
fn state(process: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_that_works_has_run() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut own = Watched::find(listener.local_addr().unwrap().port()).unwrap();
        assert!(own.ran(), "nothing is known yet");
        let before = cpu_ns(std::process::id()).unwrap();
        while cpu_ns(std::process::id()) == Some(before) {}
        assert!(own.ran() && own.is_free());
    }

    /// Goal: who sleeps is told from who works, and a number that is nobody's is not taken for
    /// somebody who stands still. Method: a process that waits for input it never gets.
    #[test]
    fn a_process_that_waits_has_not_run() {
        let mut cat = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        while state(cat.id()) != Some('S') {
            std::thread::yield_now();
        }
        let before = cpu_ns(cat.id()).unwrap();
        assert_eq!(cpu_ns(cat.id()), Some(before));
        drop(cat.stdin.take());
        cat.wait().unwrap();
        assert_eq!((cpu_ns(cat.id()), state(cat.id())), (None, None));
    }
}
