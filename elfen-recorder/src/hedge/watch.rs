//! Whether a server on this machine runs: by the CPU clocks of its processes, which tell of any
//! time between two looks, and take no more rights than to see the process.
//!
//! A server that has not run stands still if it was stopped or wants a CPU and has none, whatever
//! its CPU did meanwhile: proxy and server may share one. One that sleeps has chosen to: it waits
//! for a disk, a lock or another service, and would elsewhere as well.

use elfen_hedge_policy::Server;
use elfen_host::process::{cpu_time_ns, stat, threads_of};

use super::lookout::{Changed, Lookout};
use super::serving::{Change, Serving};
use crate::service::NotFound;

#[derive(Debug)]
pub struct Watched {
    processes: Vec<u32>,
    cpu_ns: Option<u64>,
    ran: bool,
}

/// Both servers, as they come and go.
#[derive(Debug)]
pub struct Looks {
    pub(super) servers: [Watched; 2],
    lookout: Lookout,
}

impl Looks {
    pub fn find(ports: [u16; 2]) -> Result<Self, NotFound> {
        let [first, second] = ports.map(Serving::find);
        let serving = [first?, second?];
        let servers = serving.each_ref().map(|serving| Watched::of(serving.processes()));
        Ok(Self { servers, lookout: Lookout::begin(serving, |_| {}) })
    }

    /// Servers that were started anew. Whoever serves now is looked at.
    pub(super) fn anew(&mut self) -> Vec<Server> {
        let mut anew = Vec::new();
        for Changed { server, change, processes } in self.lookout.take() {
            self.servers[server.index()] = Watched::of(&processes);
            if change == Change::All {
                anew.push(server);
            }
        }
        anew
    }
}

impl Watched {
    fn of(processes: &[u32]) -> Self {
        Self { processes: processes.to_vec(), cpu_ns: None, ran: true }
    }

    /// Whether it has run since this was asked last, or did not want to; who can't be read may
    /// have.
    pub fn ran(&mut self) -> bool {
        let clocks = self.processes.iter().map(|process| cpu_time_ns(*process));
        let now: Option<u64> = clocks.sum();
        let before = std::mem::replace(&mut self.cpu_ns, now);
        self.ran = now.is_none() || before.is_none() || now != before || !self.is_kept();
        self.ran
    }

    /// Whether a thread of it is stopped, or wants a CPU.
    fn is_kept(&self) -> bool {
        let mut threads = self.processes.iter().flat_map(|process| threads_of(*process));
        threads.any(|thread| stat(thread).is_some_and(|stat| matches!(stat.state, 'T' | 't' | 'R')))
    }

    /// Whether it could take requests: nothing keeps it, as far as its state tells.
    pub fn is_free(&self) -> bool {
        let mut stats = self.processes.iter().map(|process| stat(*process));
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
    use super::super::serving::worker_of;
    use super::*;
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;
    use std::net::TcpListener;

    #[test]
    fn a_process_that_works_has_run() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let serving = Serving::find(listener.local_addr().unwrap().port()).unwrap();
        let mut own = Watched::of(serving.processes());
        assert!(own.ran(), "nothing is known yet");
        let before = cpu_time_ns(std::process::id()).unwrap();
        while cpu_time_ns(std::process::id()) == Some(before) {}
        assert!(own.ran() && own.is_free());
    }

    /// Goal: who sleeps is left to sleep, and who is stopped stands still. Method: a process that
    /// waits for input it never gets, and is the only one with its socket.
    #[test]
    fn asleep_is_not_stopped() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut worker = worker_of(&listener);
        drop(listener);
        let is = |state| stat(worker.id()).is_some_and(|stat| stat.state == state);
        while !is('S') {
            std::thread::yield_now();
        }
        let mut watched = Watched::of(Serving::find(port).unwrap().processes());
        assert!(watched.ran() && watched.ran() && watched.is_free());
        let id = Pid::from_raw(i32::try_from(worker.id()).unwrap());
        kill(id, Signal::SIGSTOP).unwrap();
        while !is('T') {
            std::thread::yield_now();
        }
        // What it ran until it was stopped.
        watched.ran();
        assert!(!watched.ran() && !watched.is_free());
        kill(id, Signal::SIGKILL).unwrap();
        worker.wait().unwrap();
    }
}
