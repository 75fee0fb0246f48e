//! What each program here asks of its own process: where a thread runs, how many connections may be
//! open, how long a listening queue is, and to end with a report.

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
    // Beyond the set's end, `set_for_current` panics.
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

/// Descriptors that are no connections: an index's files, epoll, a listener, standard streams.
const OTHERS: u64 = 100;

/// Makes room for many connections: raises the soft limit on open files as far as it must be.
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

/// The usual queue of 128 unaccepted clients overflows when thousands connect at once, and each
/// client that is turned away tries again after a second.
const UNACCEPTED: i32 = 4096;

/// Binds a listener that never blocks.
pub(crate) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    // A second time, with a longer queue: Linux takes it as a change.
    listen(&listener, Backlog::new(UNACCEPTED)?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_signal: i32) {
    // Relaxed: a flag that is polled; nothing is published through it.
    INTERRUPTED.store(true, Relaxed);
}

/// Whether to finish early.
pub(crate) fn interrupted() -> bool {
    INTERRUPTED.load(Relaxed)
}

/// Takes Ctrl-C and SIGTERM as a request to finish and report, instead of losing what was measured.
/// The first one sets a flag and lets blocking system calls return; the second one ends the process
/// as usual.
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
