//! Finds the processes that serve a port, repeatedly. A server may start later, workers join and
//! leave, and a restarted server is another process.
//!
//! Finding processes and their sockets takes milliseconds, and attaching probes to a JVM takes tens
//! of milliseconds. So a separate thread does both.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use elfen_machine::process::{below, stat};
use elfen_rt::clock::monotonic_ns;
use elfen_tailor::service::{NotFound, Service, ServiceSelector};

use crate::policy::Server;

/// The interval between checks whether the processes still exist.
const POLL_EVERY: Duration = Duration::from_millis(200);
/// The interval between searches for child processes.
const JOIN_NS: u64 = 1_000_000_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    /// Some processes joined or left, and others stayed.
    Partial,
    /// None of the earlier processes is left, or there were none before.
    Replaced,
    /// A socket listens, but this user may not see its process.
    Hidden,
}

#[derive(Debug)]
pub(crate) struct ServerProcesses {
    port: u16,
    /// `None` until a process listens on the port.
    service: Option<Service>,
    is_hidden: bool,
    /// The processes and all their descendants.
    family: Vec<u32>,
    joined_ns: u64,
}

impl ServerProcesses {
    /// Finds the server, which may also start later. Returns an error if this user may not see the
    /// process.
    pub(crate) fn find(port: u16) -> Result<Self, NotFound> {
        let service = match Service::find(ServiceSelector::Port(port)) {
            Ok(service) => Some(service),
            Err(NotFound::NothingListens(_)) => None,
            Err(other) => return Err(other),
        };
        let mut serving =
            Self { port, service, is_hidden: false, family: Vec::new(), joined_ns: 0 };
        serving.family = family(serving.processes());
        Ok(serving)
    }

    pub(crate) fn processes(&self) -> &[u32] {
        self.service.as_ref().map_or(&[], |service| &service.processes)
    }

    /// Returns what has changed since the last call. A search for processes is slow. So it happens
    /// only if there are none, or if new processes were started.
    pub(crate) fn poll(&mut self, now_ns: u64) -> Option<Change> {
        let Some(service) = &mut self.service else { return self.find_first() };
        let some_stay = service.processes.iter().any(is_alive);
        if some_stay && now_ns.saturating_sub(self.joined_ns) < JOIN_NS {
            return None;
        }
        self.joined_ns = now_ns;
        let family_now = family(&service.processes);
        if some_stay && family_now == self.family {
            return None;
        }
        let before = service.processes.clone();
        service.refresh();
        self.family = family(&service.processes);
        if service.processes == before {
            return None;
        }
        Some(if some_stay { Change::Partial } else { Change::Replaced })
    }

    fn find_first(&mut self) -> Option<Change> {
        match Service::find(ServiceSelector::Port(self.port)) {
            Ok(service) => {
                self.family = family(&service.processes);
                self.service = Some(service);
                Some(Change::Replaced)
            }
            Err(NotFound::Hidden(_)) if !self.is_hidden => {
                self.is_hidden = true;
                Some(Change::Hidden)
            }
            Err(_) => None,
        }
    }
}

/// A server whose processes have changed.
#[derive(Debug)]
pub(crate) struct ProcessChange {
    pub(crate) server: Server,
    pub(crate) change: Change,
    pub(crate) processes: Vec<u32>,
}

/// A thread that finds changes. It ends after this handle drops.
#[derive(Debug)]
pub(crate) struct ProcessWatcher {
    changed: Receiver<ProcessChange>,
    _stop: Sender<()>,
}

impl ProcessWatcher {
    /// Starts the thread. Before it reports a change, it calls `prepare` with the processes of both
    /// servers.
    pub(crate) fn start(
        mut serving: [ServerProcesses; 2],
        mut prepare: impl FnMut([&[u32]; 2]) + Send + 'static,
    ) -> Self {
        let (sender, changed) = channel();
        let (stop, stopped) = channel::<()>();
        std::thread::spawn(move || {
            while stopped.recv_timeout(POLL_EVERY) == Err(RecvTimeoutError::Timeout) {
                let now_ns = monotonic_ns();
                let changes = serving.each_mut().map(|serving| serving.poll(now_ns));
                if changes == [None; 2] {
                    continue;
                }
                prepare(serving.each_ref().map(ServerProcesses::processes));
                for (server, change) in Server::BOTH.into_iter().zip(changes) {
                    let Some(change) = change else { continue };
                    let processes = serving[server.index()].processes().to_vec();
                    if sender.send(ProcessChange { server, change, processes }).is_err() {
                        return;
                    }
                }
            }
        });
        Self { changed, _stop: stop }
    }

    /// The changes since the last call.
    pub(crate) fn take(&self) -> impl Iterator<Item = ProcessChange> + '_ {
        self.changed.try_iter()
    }
}

fn is_alive(process: &u32) -> bool {
    stat(*process).is_some_and(|stat| stat.state != 'Z')
}

fn family(processes: &[u32]) -> Vec<u32> {
    let with_below = |&process: &u32| [vec![process], below(process)].concat();
    let mut all: Vec<u32> = processes.iter().flat_map(with_below).filter(is_alive).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Starts a process that also holds this socket. It ends when its standard input is closed.
#[cfg(test)]
pub(crate) fn spawn_worker(listener: &std::net::TcpListener) -> std::process::Child {
    use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd};
    use std::os::unix::process::CommandExt;
    let socket = listener.as_raw_fd();
    let mut command = std::process::Command::new("cat");
    command.stdin(std::process::Stdio::piped());
    let keep_socket = move || {
        // SAFETY: the listener lives in the parent, and a fork inherits its descriptors.
        let socket = unsafe { BorrowedFd::borrow_raw(socket) };
        // The started program keeps the copy open.
        let _kept = nix::unistd::dup(socket)?.into_raw_fd();
        Ok(())
    };
    // SAFETY: between fork and exec the closure only calls dup, which is async-signal-safe.
    unsafe { command.pre_exec(keep_socket) };
    command.spawn().unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Polls until the condition holds. Children of other tests hold this test's sockets between
    /// fork and exec, so the first polls may find more processes.
    fn poll_until(serving: &mut ServerProcesses, at_ns: &mut u64, holds: impl Fn(&[u32]) -> bool) {
        for _ in 0..10_000 {
            *at_ns += JOIN_NS;
            serving.poll(*at_ns);
            if holds(serving.processes()) {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        panic!("{:?} serve", serving.processes());
    }

    fn is_own(processes: &[u32]) -> bool {
        processes == [std::process::id()]
    }

    /// Goal: a worker that joins is included and a worker that ends is removed, while the first
    /// process stays. Method: a child process that holds the test's listening socket.
    #[test]
    fn a_worker_joins_and_leaves() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut serving = ServerProcesses::find(listener.local_addr().unwrap().port()).unwrap();
        let mut at_ns = 0;
        poll_until(&mut serving, &mut at_ns, is_own);
        let mut worker = spawn_worker(&listener);
        poll_until(&mut serving, &mut at_ns, |processes| processes.contains(&worker.id()));
        drop(worker.stdin.take());
        worker.wait().unwrap();
        poll_until(&mut serving, &mut at_ns, is_own);
    }
}
