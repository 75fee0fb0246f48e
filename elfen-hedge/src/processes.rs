//! Which processes serve behind a port, as time goes on. A server may not be up yet; workers join
//! and leave; and a server that was restarted is another process.

use elfen_host::process::{below, stat};
use elfen_recorder::service::{NotFound, Service, ServiceSelector};

/// Between two looks at whether the processes are still there.
pub(crate) const LOOK_NS: u64 = 200_000_000;
/// Between two looks for processes that they have started.
const JOIN_NS: u64 = 1_000_000_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    /// Some joined or left, and others stayed.
    Some,
    /// None of the earlier ones is left, or there were none.
    All,
    /// A socket listens, and its process may not be seen.
    Hidden,
}

#[derive(Debug)]
pub(crate) struct Serving {
    port: u16,
    /// `None` until a process listens on the port.
    service: Option<Service>,
    is_hidden: bool,
    /// The processes and all that they have started.
    family: Vec<u32>,
    looked_ns: u64,
    joined_ns: u64,
}

impl Serving {
    /// The server may come later. A process that may not be seen is an error.
    pub(crate) fn find(port: u16) -> Result<Self, NotFound> {
        let service = match Service::find(ServiceSelector::Port(port)) {
            Ok(service) => Some(service),
            Err(NotFound::NothingListens(_)) => None,
            Err(other) => return Err(other),
        };
        let mut serving = Self {
            port,
            service,
            is_hidden: false,
            family: Vec::new(),
            looked_ns: 0,
            joined_ns: 0,
        };
        serving.family = family(serving.processes());
        Ok(serving)
    }

    pub(crate) fn processes(&self) -> &[u32] {
        self.service.as_ref().map_or(&[], |service| &service.processes)
    }

    /// What has changed since the last call. Looking for processes takes long, so it is done only
    /// while there are none, or where some were started.
    pub(crate) fn look(&mut self, now_ns: u64) -> Option<Change> {
        if now_ns.saturating_sub(self.looked_ns) < LOOK_NS {
            return None;
        }
        self.looked_ns = now_ns;
        let Some(service) = &mut self.service else { return self.look_for_first() };
        let some_stay = service.processes.iter().any(is_there);
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
        Some(if some_stay { Change::Some } else { Change::All })
    }

    fn look_for_first(&mut self) -> Option<Change> {
        match Service::find(ServiceSelector::Port(self.port)) {
            Ok(service) => {
                self.family = family(&service.processes);
                self.service = Some(service);
                Some(Change::All)
            }
            Err(NotFound::Hidden(_)) if !self.is_hidden => {
                self.is_hidden = true;
                Some(Change::Hidden)
            }
            Err(_) => None,
        }
    }
}

fn is_there(process: &u32) -> bool {
    stat(*process).is_some_and(|stat| stat.state != 'Z')
}

fn family(processes: &[u32]) -> Vec<u32> {
    let with_below = |&process: &u32| [vec![process], below(process)].concat();
    let mut all: Vec<u32> = processes.iter().flat_map(with_below).filter(is_there).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// A process that has this socket too, and ends with its input.
#[cfg(test)]
pub(crate) fn worker_of(listener: &std::net::TcpListener) -> std::process::Child {
    use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd};
    use std::os::unix::process::CommandExt;
    let socket = listener.as_raw_fd();
    let mut command = std::process::Command::new("cat");
    command.stdin(std::process::Stdio::piped());
    let keeps = move || {
        // SAFETY: the listener lives in the parent, whose descriptors a fork has.
        let socket = unsafe { BorrowedFd::borrow_raw(socket) };
        // It is the started program's from here on.
        let _kept = nix::unistd::dup(socket)?.into_raw_fd();
        Ok(())
    };
    // SAFETY: between fork and exec it calls dup alone, which may be called there.
    unsafe { command.pre_exec(keeps) };
    command.spawn().unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Looks until this holds. Between fork and exec, children of other tests have the sockets of
    /// this one, so what is seen at first may be more.
    fn look_until(serving: &mut Serving, at_ns: &mut u64, holds: impl Fn(&[u32]) -> bool) {
        for _ in 0..10_000 {
            *at_ns += JOIN_NS;
            serving.look(*at_ns);
            if holds(serving.processes()) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        panic!("{:?} serve", serving.processes());
    }

    fn is_own(processes: &[u32]) -> bool {
        processes == [std::process::id()]
    }

    /// Goal: a server that is not up yet is found when it comes. Method: a socket that is bound,
    /// so that the port is its own, and listens later.
    #[test]
    fn a_server_that_comes_later_is_found() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        let _entered = runtime.enter();
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let mut serving = Serving::find(socket.local_addr().unwrap().port()).unwrap();
        assert!(serving.processes().is_empty() && serving.look(LOOK_NS).is_none());
        let _listener = socket.listen(1).unwrap();
        assert_eq!(serving.look(LOOK_NS + 1), None, "it is not time yet");
        assert_eq!(serving.look(2 * LOOK_NS), Some(Change::All));
        look_until(&mut serving, &mut (2 * LOOK_NS), is_own);
    }

    /// Goal: a worker that joins is watched as well, and one that ends is not, while the first one
    /// stays. Method: a child of ours with our listening socket.
    #[test]
    fn a_worker_joins_and_leaves() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut serving = Serving::find(listener.local_addr().unwrap().port()).unwrap();
        let mut at_ns = 0;
        look_until(&mut serving, &mut at_ns, is_own);
        let mut worker = worker_of(&listener);
        assert_eq!(serving.look(at_ns + LOOK_NS / 2), None, "it is not time yet");
        look_until(&mut serving, &mut at_ns, |processes| processes.contains(&worker.id()));
        drop(worker.stdin.take());
        worker.wait().unwrap();
        look_until(&mut serving, &mut at_ns, is_own);
    }
}
