//! Settings of this process: CPU affinity, the limit on open files, the listen backlog, and
//! signals.

use core_affinity::{CoreId, get_core_ids, set_for_current};
use elfen_console::failure::{Failure, Status};
use nix::errno::Errno;
use nix::sched::CpuSet;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::sys::socket::{Backlog, listen};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

/// Pins the calling thread.
pub(crate) fn pin(cpu: usize) -> Result<(), Failure> {
    let refused = |why: &str| {
        let fix = "name a CPU that this process may run on";
        Err(Failure::new(Status::Failed, format!("pinning to CPU {cpu}"), why, fix))
    };
    // `set_for_current` panics on CPU numbers beyond the set's end.
    if cpu >= CpuSet::count() {
        return refused("no CPU as high can be named");
    }
    if set_for_current(CoreId { id: cpu }) { Ok(()) } else { refused("the kernel refused") }
}

/// The CPUs that this process may run on, in order.
pub(crate) fn allowed_cpus() -> Result<Vec<usize>, Failure> {
    let ids = get_core_ids().ok_or_else(|| {
        let why = "the kernel does not list the CPUs that this process may run on";
        Failure::new(Status::Failed, "choosing a CPU", why, "name one")
    })?;
    Ok(ids.into_iter().map(|core| core.id).collect())
}

/// Descriptors that are not connections: an index's files, epoll, a listener, standard streams.
const OTHERS: u64 = 100;

/// Raises the soft limit on open files if this number of connections needs it.
pub(crate) fn allow_connections(connections: usize) -> Result<(), Failure> {
    let failed = |errno: Errno| {
        let what = format!("opening {connections} connections");
        let fix = "raise `ulimit -n`, or use fewer --connections";
        Failure::new(Status::Failed, what, errno, fix)
    };
    let wanted = connections as u64 + OTHERS;
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).map_err(failed)?;
    if soft >= wanted {
        return Ok(());
    }
    setrlimit(Resource::RLIMIT_NOFILE, wanted, hard.max(wanted)).map_err(failed)
}

/// The usual backlog of 128 clients overflows when thousands connect at once. Each refused client
/// retries only after a second.
const UNACCEPTED: i32 = 4096;

/// Binds a nonblocking listener.
pub(crate) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    // A second `listen` changes the length of the backlog on Linux.
    listen(&listener, Backlog::new(UNACCEPTED)?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_signal: i32) {
    // Relaxed: the flag is polled and publishes no other data.
    INTERRUPTED.store(true, Relaxed);
}

/// Whether SIGINT or SIGTERM was received.
pub(crate) fn interrupted() -> bool {
    INTERRUPTED.load(Relaxed)
}

/// Makes the first Ctrl-C or SIGTERM a request to finish and report. It sets a flag and interrupts
/// blocking system calls. The second signal ends the process as usual.
pub(crate) fn catch_interrupts() -> Result<(), Failure> {
    // SA_RESETHAND restores the default after the first signal. Without SA_RESTART, epoll_wait
    // returns at once.
    let action = SigAction::new(SigHandler::Handler(note), SaFlags::SA_RESETHAND, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        // SAFETY: `note` only stores to an atomic, which is allowed in a signal handler at any
        // point.
        let installed = unsafe { sigaction(signal, &action) };
        let what = format!("catching {signal}");
        installed
            .map_err(|errno| Failure::new(Status::Failed, what, errno, "see `man sigaction`"))?;
    }
    Ok(())
}
