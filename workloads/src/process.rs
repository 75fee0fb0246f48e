//! What each program here asks of its own process: where a thread runs, how many connections may be
//! open, how long a listening queue is, and to end with a report.

use core_affinity::{CoreId, get_core_ids, set_for_current};
use nix::errno::Errno;
use nix::sched::CpuSet;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::sys::socket::{Backlog, listen};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use thiserror::Error;

#[derive(Debug, Error)]
pub(crate) enum PinError {
    #[error("pinning to CPU {cpu}: the kernel refused; name a CPU that this process may run on")]
    Refused { cpu: usize },
    #[error("pinning to CPU {cpu}: no CPU above {} can be named", CpuSet::count() - 1)]
    TooHigh { cpu: usize },
    #[error("the kernel does not tell which CPUs this process may run on; name one")]
    Untold,
}

/// Pins the calling thread.
pub(crate) fn pin(cpu: usize) -> Result<(), PinError> {
    // Beyond the set's end, `set_for_current` panics.
    if cpu >= CpuSet::count() {
        return Err(PinError::TooHigh { cpu });
    }
    if set_for_current(CoreId { id: cpu }) { Ok(()) } else { Err(PinError::Refused { cpu }) }
}

/// The CPUs that this process may run on, in order.
pub(crate) fn allowed_cpus() -> Result<Vec<usize>, PinError> {
    Ok(get_core_ids().ok_or(PinError::Untold)?.into_iter().map(|core| core.id).collect())
}

/// Descriptors that are no connections: an index's files, epoll, a listener, standard streams.
const OTHERS: u64 = 100;

#[derive(Debug, Error)]
#[error(
    "opening {connections} connections: {errno}; raise `ulimit -n`, or use fewer --connections"
)]
pub(crate) struct TooMany {
    connections: usize,
    errno: Errno,
}

/// Makes room for many connections: raises the soft limit on open files as far as it must be.
pub(crate) fn allow_connections(connections: usize) -> Result<(), TooMany> {
    let failed = |errno| TooMany { connections, errno };
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
pub(crate) fn catch_interrupts() -> Result<(), Errno> {
    // SA_RESETHAND restores the default after the first signal. Without SA_RESTART, epoll_wait
    // returns at once.
    let action = SigAction::new(SigHandler::Handler(note), SaFlags::SA_RESETHAND, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        // SAFETY: `note` only stores to an atomic, which is allowed in a signal handler at any
        // point.
        unsafe { sigaction(signal, &action) }?;
    }
    Ok(())
}
