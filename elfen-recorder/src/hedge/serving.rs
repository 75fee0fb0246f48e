//! Who serves behind a port, as time goes on: workers join and leave, and a server that was started
//! anew is another process.

use elfen_host::process::{below, stat};

use crate::service::{NotFound, Service, Which};

/// Between two looks at whether the processes are still there.
pub(super) const LOOK_NS: u64 = 200_000_000;
/// Between two looks at who was started by them.
const JOIN_NS: u64 = 1_000_000_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Change {
    /// Some joined or left, and others stayed.
    Some,
    /// None of those is there any more that were.
    All,
}

#[derive(Debug)]
pub(super) struct Serving {
    service: Service,
    /// They and all that they have started.
    family: Vec<u32>,
    looked_ns: u64,
    joined_ns: u64,
}

impl Serving {
    pub(super) fn find(port: u16) -> Result<Self, NotFound> {
        let service = Service::find(Which::Port(port))?;
        let family = family(&service.processes);
        Ok(Self { service, family, looked_ns: 0, joined_ns: 0 })
    }

    pub(super) fn processes(&self) -> &[u32] {
        &self.service.processes
    }

    /// Whether others serve than when this was asked last. Looking for those takes long, so it is
    /// done only while none is there, or where some were started.
    pub(super) fn look(&mut self, now_ns: u64) -> Option<Change> {
        if now_ns.saturating_sub(self.looked_ns) < LOOK_NS {
            return None;
        }
        self.looked_ns = now_ns;
        let some_stay = self.service.processes.iter().any(is_there);
        if some_stay && now_ns.saturating_sub(self.joined_ns) < JOIN_NS {
            return None;
        }
        self.joined_ns = now_ns;
        let family = family(&self.service.processes);
        if some_stay && family == self.family {
            return None;
        }
        let before = self.service.processes.clone();
        self.service.refresh();
        self.family = self::family(&self.service.processes);
        if self.service.processes == before {
            return None;
        }
        Some(if some_stay { Change::Some } else { Change::All })
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
pub(super) fn worker_of(listener: &std::net::TcpListener) -> std::process::Child {
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

    /// Goal: a worker that joins is watched as well, and one that ends is not, while the first one
    /// stays. Method: a child of ours with our listening socket.
    #[test]
    fn a_worker_joins_and_leaves() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut serving = Serving::find(listener.local_addr().unwrap().port()).unwrap();
        assert_eq!(serving.look(JOIN_NS), None, "nobody has come");
        let mut worker = worker_of(&listener);
        assert_eq!(serving.look(JOIN_NS + LOOK_NS / 2), None, "it is not time yet");
        assert_eq!(serving.look(2 * JOIN_NS), Some(Change::Some));
        assert!(serving.processes().contains(&worker.id()));
        drop(worker.stdin.take());
        worker.wait().unwrap();
        assert_eq!(serving.look(3 * JOIN_NS), Some(Change::Some));
        assert_eq!(serving.processes(), [std::process::id()]);
    }
}
