//! The spare: a process between launcher and supervisor that only watches the supervisor.
//!
//! If the supervisor is stopped or hangs, the spare kills it. If the supervisor is killed, its
//! orphans become the spare's children, and the spare becomes the supervisor, whether or not the
//! launcher still runs. Without it, a batch whose launcher and supervisor were killed together
//! would run unguarded next to requests. The spare has another name, so that `killall elfen` does
//! not kill it.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use elfen_rt::inherit::Inherited;
use elfen_rt::signal::account::Claim;
use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::{ForkResult, fork, getppid};

use super::Order;
use super::channels::Channels;
use super::event::{Event, LauncherLink};
use super::liveness::{Heartbeat, ObservedChild, Pulse, ROUND};
use super::spins;
use super::supervisor::{self, Supervision};
use elfen_machine::pidfd::PidFd;
use elfen_machine::process::thread_stat;

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
    let heartbeat = Heartbeat::new()?;
    // SAFETY: this process has no other thread.
    let child = match unsafe { fork() }? {
        ForkResult::Child => {
            drop(started);
            become_subreaper()?;
            launcher.spare = Some(to_spare.into());
            return supervisor::supervise(
                order,
                channels,
                inheritance,
                found,
                launcher,
                &heartbeat,
            );
        }
        ForkResult::Parent { child } => child,
    };
    drop(to_spare);
    supervisor::detach_from_terminal();
    // SAFETY: this prctl takes a name that ends in NUL.
    unsafe { libc::prctl(libc::PR_SET_NAME, NAME.as_ptr()) };
    if !was_killed(&mut ObservedChild::new(child, heartbeat), channels)? {
        return Ok(());
    }
    // The batch sends its identity before its exec. Without that event nothing was started.
    let Event::Started { batch: Some(batch) } = Event::read(&mut started)? else { return Ok(()) };
    channels.disclaim(Claim::of_run(launcher.pid, child.as_raw().unsigned_abs()));
    let claim = Claim::of_run(launcher.pid, std::process::id());
    let mut supervision = Supervision::start(order, channels, inheritance, claim)?;
    supervision.set_root(batch.pid());
    supervisor::run_until_end(supervision, &mut launcher, None)
}

/// Waits for the end of the supervisor, and kills it if it is stopped or hangs: its guards enforce
/// nothing then. Does not reap it: that may take long (see [`super::spins`]), and the lane is
/// unguarded meanwhile.
fn was_killed(supervisor: &mut ObservedChild, channels: &Channels) -> io::Result<bool> {
    let pid = supervisor.pid.as_raw().unsigned_abs();
    let process = PidFd::open(pid, || true);
    let mut is_killed = false;
    loop {
        let pulse = supervisor.observe();
        if pulse == Pulse::Ended {
            break;
        }
        if is_killed {
            // It was killed a round ago, and the thread that ended its spins is gone.
            spins::move_threads_away(pid, &channels.requests());
        } else if supervisor.has_begun() {
            // Before its first round the supervisor starts the program, which may take long. A
            // silent supervisor that is not stopped may spin in the kernel. It ends that itself, in
            // some seconds.
            is_killed = pulse == Pulse::Lost || pulse == Pulse::Silent && is_stopped(pid);
            if is_killed {
                supervisor.kill();
            }
        }
        match &process {
            Some(process) => process.await_end_for(ROUND),
            None => std::thread::sleep(ROUND),
        }
    }
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
    Ok(!matches!(waitid(Id::Pid(supervisor.pid), flags)?, WaitStatus::Exited(..)))
}

/// Whether a signal or a tracer has stopped the process.
fn is_stopped(process: u32) -> bool {
    thread_stat(process).is_some_and(|stat| matches!(stat.state, 'T' | 't'))
}

pub(super) fn become_subreaper() -> io::Result<()> {
    Ok(nix::sys::prctl::set_child_subreaper(true)?)
}
