//! Becoming the service: the watcher is forked off, and this process executes the program.
//!
//! The watcher is forked twice, so that the service has no child that it did not start; it has a
//! session of its own, so that no Ctrl-C reaches it; and it keeps none of the descriptors that the
//! service inherits, so that whoever waits for their end (a pipe, a lock) does not wait for it.
//! Only standard error stays, for what it has to say.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use nix::fcntl::OFlag;
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork, pipe2, setsid};

use super::{Notice, Order, Service, watch};
use crate::host::affinity;
use crate::host::process::stat;

/// Executes the program on the request lanes, and leaves a watcher behind. Returns only if that
/// fails: before the program, or with what `execve` said.
pub(crate) fn become_program(
    order: &Order,
    command: &mut Command,
    tell: &mut dyn FnMut(Notice<'_>),
) -> io::Result<io::Error> {
    let own = std::process::id();
    let started = stat(own).ok_or_else(|| io::Error::other("/proc does not list this process"))?;
    let service = Service::started_here(own, started.started_ticks);
    let ended = pidfd_of(own)?;
    let (outcome, mut say) =
        pipe2(OFlag::O_CLOEXEC).map(|(r, w)| (File::from(r), File::from(w)))?;
    // SAFETY: this process has one thread, so the child may go on as if it had started itself.
    match unsafe { fork() }? {
        ForkResult::Child => {
            drop(say);
            let status = leave_a_watcher(order, service, outcome, &ended, tell);
            // SAFETY: ends the process; buffers of ours must not be written twice.
            unsafe { libc::_exit(status) }
        }
        ForkResult::Parent { child } => waitpid(child, None)?,
    };
    affinity::set(0, &order.request_lanes)?;
    let error = command.exec();
    // The watcher has nothing to watch; if it cannot be told, it finds out when we end.
    let _told = say.write_all(b"x");
    Ok(error)
}

/// The first child: its own child watches, and it ends.
fn leave_a_watcher(
    order: &Order,
    service: Service,
    outcome: File,
    ended: &OwnedFd,
    tell: &mut dyn FnMut(Notice<'_>),
) -> i32 {
    // SAFETY: this process has one thread.
    let watched = match unsafe { fork() } {
        Ok(ForkResult::Child) => watch_it(order, service, outcome, ended, tell),
        Ok(ForkResult::Parent { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    };
    if let Err(error) = &watched {
        tell(Notice::Unwatched(error));
    }
    i32::from(watched.is_err())
}

fn watch_it(
    order: &Order,
    service: Service,
    mut outcome: File,
    ended: &OwnedFd,
    tell: &mut dyn FnMut(Notice<'_>),
) -> io::Result<()> {
    setsid()?;
    std::env::set_current_dir(Path::new("/"))?;
    let_go_of_descriptors(&[outcome.as_raw_fd(), ended.as_raw_fd()])?;
    // Closed by the exec, or by the end of the process; a byte says that there was no program.
    if outcome.read(&mut [0])? != 0 {
        return Ok(());
    }
    watch::keep_started(order, service, ended.as_fd(), tell)
}

/// Closes all but standard error and these; input and output become /dev/null.
fn let_go_of_descriptors(kept: &[RawFd]) -> io::Result<()> {
    let null = File::options().read(true).write(true).open("/dev/null")?;
    for standard in [libc::STDIN_FILENO, libc::STDOUT_FILENO] {
        // SAFETY: takes numbers; nothing in this process uses the two but by their numbers.
        unsafe { libc::dup2(null.as_raw_fd(), standard) };
    }
    drop(null);
    let open: Vec<RawFd> = fs::read_dir("/proc/self/fd")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    for fd in open.into_iter().filter(|fd| *fd > libc::STDERR_FILENO && !kept.contains(fd)) {
        // SAFETY: takes a number; what this process still uses is in `kept`, the rest was inherited
        // from whoever started it and has no owner here. That of `open` itself is closed already.
        unsafe { libc::close(fd) };
    }
    Ok(())
}

/// A descriptor that can be read when the process has ended.
fn pidfd_of(process: u32) -> io::Result<OwnedFd> {
    // SAFETY: takes numbers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) };
    let fd = RawFd::try_from(fd).map_err(io::Error::other)?;
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just opened it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
