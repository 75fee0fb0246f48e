//! Finds out whether a server on this machine runs, by the CPU clocks of its processes. The clocks
//! cover the whole time between two polls. Reading them only requires the right to see the
//! processes.
//!
//! A server that has not run stands still if it is stopped, or if it is runnable without a CPU. It
//! does not matter which task its CPU ran meanwhile, because proxy and server may share a CPU. A
//! sleeping server waits for a disk, a lock or another service, and the other server would have to
//! wait as well.

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

    /// Whether the server has run since the last call, or did not need to. A server without
    /// readable processes counts as running.
    pub(crate) fn ran(&mut self) -> bool {
        let clocks = self.processes.iter().map(|process| cpu_time_ns(*process));
        let now: Option<u64> = clocks.sum();
        let before = std::mem::replace(&mut self.cpu_ns, now);
        self.ran = now.is_none() || before.is_none() || now != before || !self.is_kept();
        self.ran
    }

    /// Whether any of the server's threads is stopped or runnable.
    fn is_kept(&self) -> bool {
        let mut threads = self.processes.iter().flat_map(|process| threads_of(*process));
        threads.any(|thread| stat(thread).is_some_and(|stat| matches!(stat.state, 'T' | 't' | 'R')))
    }

    /// Whether the server could take requests, according to the state of its processes.
    pub(crate) fn is_free(&self) -> bool {
        let mut stats = self.processes.iter().map(|process| stat(*process));
        stats.all(|stat| match stat.map(|stat| stat.state) {
            Some('S' | 'I') => true,
            // A runnable process that did not run waits for a CPU.
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

    /// Goal: a sleeping server does not stand still, and a stopped server does. Method: a process
    /// that waits for input that never arrives, and is the only process with its socket.
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
        // Consumes the CPU time until the stop.
        watched.ran();
        assert!(!watched.ran() && !watched.is_free());
        kill(id, Signal::SIGKILL).unwrap();
        worker.wait().unwrap();
    }
}
