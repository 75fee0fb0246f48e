//! The spare: a process between launcher and keeper that waits for the keeper's end and does
//! nothing else.
//!
//! Orphans of a killed keeper are the spare's children, so it becomes the keeper, whether or not
//! the launcher still runs. Without it, a batch whose launcher and keeper were killed together
//! would run unguarded next to requests for as long as it lives. It has another name, so that
//! `killall elfen` leaves it.

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
use super::event::{Event, ToFront};
use super::supervisor::{self, Tending};
use crate::pidfd::PidFd;

const NAME: &std::ffi::CStr = c"elfen-spare";

/// The spare's process, from fork to exit. `found` is the mask of signals that the front was
/// started with.
pub(super) fn stand_by(
    order: &Order,
    channels: &Arc<Channels>,
    inheritance: &Inherited,
    found: SigSet,
    to_front: OwnedFd,
    front: u32,
) -> io::Result<()> {
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None)?;
    become_the_parent_of_orphans()?;
    let process = PidFd::open(front, || getppid().as_raw().unsigned_abs() == front);
    let socket = File::from(to_front);
    let mut front = ToFront { socket, spare: None, pid: front, process };
    let (mut started, to_spare) = UnixStream::pair()?;
    // SAFETY: this process has no other thread.
    let keeper = match unsafe { fork() }? {
        ForkResult::Child => {
            drop(started);
            become_the_parent_of_orphans()?;
            front.spare = Some(to_spare.into());
            return supervisor::keep(order, channels, inheritance, found, front);
        }
        ForkResult::Parent { child } => child,
    };
    drop(to_spare);
    supervisor::let_go_of_the_terminal();
    // SAFETY: this prctl takes a name that ends in NUL.
    unsafe { libc::prctl(libc::PR_SET_NAME, NAME.as_ptr()) };
    if !was_killed(keeper)? {
        return Ok(());
    }
    // The batch has named itself before its exec; without a word nothing was started.
    let Event::Started { batch: Some(batch) } = Event::read(&mut started)? else { return Ok(()) };
    channels.disclaim(Claim::of_run(front.pid, keeper.as_raw().unsigned_abs()));
    let claim = Claim::of_run(front.pid, std::process::id());
    let mut tending = Tending::start(order, channels, inheritance, claim)?;
    tending.adopt(batch.pid());
    supervisor::tend(tending, &mut front)
}

/// Waits for a child's end, and does not reap it: reaping may take long (see [`super::spins`]), and
/// the lane is not guarded meanwhile.
fn was_killed(child: Pid) -> io::Result<bool> {
    let ended = waitid(Id::Pid(child), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT)?;
    Ok(!matches!(ended, WaitStatus::Exited(..)))
}

pub(super) fn become_the_parent_of_orphans() -> io::Result<()> {
    Ok(nix::sys::prctl::set_child_subreaper(true)?)
}
