//! Tells whether a server on this machine runs, by the CPU clocks of its processes. The clocks
//! cover all time between two polls, and reading them only takes the right to see the process.
//!
//! A server that has not run stands still if it was stopped, or if it is runnable without a CPU. It
//! does not matter what its CPU did meanwhile: proxy and server may share one. A sleeping server
//! waits for a disk, a lock or another service, and would wait elsewhere as well.

use elfen_machine::process::{cpu_time_ns, stat, threads_of};

#[derive(Debug)]
pub(crate) struct WatchedServer {
    processes: Vec<u32>,
    cpu_ns: Option<u64>,
    ran: bool,
}

impl WatchedServer {
    pub(crate) fn of(processes: &[u32]) -> Self {
        Self { processes: processes.to_vec(), cpu_ns: None, ran: true }
    }

    /// Whether it has run since the last call, or did not need to. A server without readable
    /// processes counts as one that ran.
    pub(crate) fn ran(&mut self) -> bool {
        let clocks = self.processes.iter().map(|process| cpu_time_ns(*process));
        let now: Option<u64> = clocks.sum();
        let before = std::mem::replace(&mut self.cpu_ns, now);
        self.ran = now.is_none() || before.is_none() || now != before || !self.is_kept();
        self.ran
    }

    /// Whether a thread of it is stopped or runnable.
    fn is_kept(&self) -> bool {
        let mut threads = self.processes.iter().flat_map(|process| threads_of(*process));
        threads.any(|thread| stat(thread).is_some_and(|stat| matches!(stat.state, 'T' | 't' | 'R')))
    }

    /// Whether it could take requests, as far as its state shows.
    pub(crate) fn is_free(&self) -> bool {
        let mut stats = self.processes.iter().map(|process| stat(*process));
        stats.all(|stat| match stat.map(|stat| stat.state) {
            Some('S' | 'I') => true,
            // If it did not run, it waits for a CPU.
            Some('R') => self.ran,
            _ => false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::processes::{ServerProcesses, spawn_worker};
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;
    use std::net::TcpListener;

    /// Goal: a sleeping server does not stand still, and a stopped one does. Method: a process that
    /// waits for input it never gets, and is the only one with its socket.
    #[test]
    fn a_sleeping_server_does_not_stand_still() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut worker = spawn_worker(&listener);
        drop(listener);
        let is = |state| stat(worker.id()).is_some_and(|stat| stat.state == state);
        while !is('S') {
            std::thread::yield_now();
        }
        let mut watched = WatchedServer::of(ServerProcesses::find(port).unwrap().processes());
        assert!(watched.ran() && watched.ran() && watched.is_free());
        let id = Pid::from_raw(i32::try_from(worker.id()).unwrap());
        kill(id, Signal::SIGSTOP).unwrap();
        while !is('T') {
            std::thread::yield_now();
        }
        // Consumes what it ran until it was stopped.
        watched.ran();
        assert!(!watched.ran() && !watched.is_free());
        kill(id, Signal::SIGKILL).unwrap();
        worker.wait().unwrap();
    }
}
