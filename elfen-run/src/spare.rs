//! The spare: a process between launcher and supervisor that only waits for the supervisor's end.
//!
//! If the supervisor is killed, its orphans become the spare's children, and the spare becomes the
//! supervisor, whether or not the launcher still runs. Without it, a batch whose launcher and
//! supervisor were killed together would run unguarded next to requests. The spare has another
//! name, so that `killall elfen` does not kill it.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use elfen_rt::inherit::Inherited;
use elfen_rt::signal::account::Claim;
use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::{ForkResult, Pid, fork, getppid};

use super::Order;
use super::channels::Channels;
use super::event::{Event, LauncherLink};
use super::supervisor::{self, Supervision};
use elfen_machine::pidfd::PidFd;

const NAME: &std::ffi::CStr = c"elfen-spare";

/// Runs the spare process, from fork to exit. `found` is the signal mask with which the launcher
/// was started.
pub(super) fn stand_by(
    order: &Order,
    channels: &Arc<Channels>,
    inheritance: &Inherited,
    found: SigSet,
    to_launcher: OwnedFd,
    launcher: u32,
) -> io::Result<()> {
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None)?;
    become_subreaper()?;
    let process = PidFd::open(launcher, || getppid().as_raw().unsigned_abs() == launcher);
    let socket = File::from(to_launcher);
    let mut launcher = LauncherLink { socket, spare: None, pid: launcher, process };
    let (mut started, to_spare) = UnixStream::pair()?;
    // SAFETY: this process has no other thread.
    let child = match unsafe { fork() }? {
        ForkResult::Child => {
            drop(started);
            become_subreaper()?;
            launcher.spare = Some(to_spare.into());
            return supervisor::supervise(order, channels, inheritance, found, launcher);
        }
        ForkResult::Parent { child } => child,
    };
    drop(to_spare);
    supervisor::detach_from_terminal();
    // SAFETY: this prctl takes a name that ends in NUL.
    unsafe { libc::prctl(libc::PR_SET_NAME, NAME.as_ptr()) };
    if !was_killed(child)? {
        return Ok(());
    }
    // The batch sends its identity before its exec. Without that event nothing was started.
    let Event::Started { batch: Some(batch) } = Event::read(&mut started)? else { return Ok(()) };
    channels.disclaim(Claim::of_run(launcher.pid, child.as_raw().unsigned_abs()));
    let claim = Claim::of_run(launcher.pid, std::process::id());
    let mut supervision = Supervision::start(order, channels, inheritance, claim)?;
    supervision.set_root(batch.pid());
    supervisor::run_until_end(supervision, &mut launcher)
}

/// Waits for a child's end without reaping it. Reaping may take long (see [`super::spins`]), and
/// the lane is unguarded meanwhile.
fn was_killed(child: Pid) -> io::Result<bool> {
    let ended = waitid(Id::Pid(child), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT)?;
    Ok(!matches!(ended, WaitStatus::Exited(..)))
}

pub(super) fn become_subreaper() -> io::Result<()> {
    Ok(nix::sys::prctl::set_child_subreaper(true)?)
}
