//! Whether a server on this machine runs: by the CPU clocks of its processes, which tell of any
//! time between two looks, and take no more rights than to see the process.
//!
//! That a server has not run means that it was stopped, starved or asleep, whatever its CPU did
//! meanwhile: proxy and server may share one.

use elfen_host::process::{cpu_time_ns, stat};
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
        let clocks = self.service.processes.iter().map(|process| cpu_time_ns(*process));
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
        let mut stats = self.service.processes.iter().map(|process| stat(*process));
        stats.all(|stat| match stat.map(|stat| stat.state) {
            Some('S' | 'I') => true,
            // It waits for a CPU if it did not run.
            Some('R') => self.ran,
            _ => false,
        })
    }
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
        let before = cpu_time_ns(std::process::id()).unwrap();
        while cpu_time_ns(std::process::id()) == Some(before) {}
        assert!(own.ran() && own.is_free());
    }

    /// Goal: who sleeps is told from who works, and a number that is nobody's is not taken for
    /// somebody who stands still. Method: a process that waits for input it never gets.
    #[test]
    fn a_process_that_waits_has_not_run() {
        let mut cat = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        while stat(cat.id()).is_none_or(|stat| stat.state != 'S') {
            std::thread::yield_now();
        }
        let before = cpu_time_ns(cat.id()).unwrap();
        assert_eq!(cpu_time_ns(cat.id()), Some(before));
        drop(cat.stdin.take());
        cat.wait().unwrap();
        assert_eq!((cpu_time_ns(cat.id()), stat(cat.id())), (None, None));
    }
}
