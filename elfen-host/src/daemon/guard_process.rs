//! The process that holds the guards of all lanes: it steps on lanes and renews leases, and knows
//! of fences only whether somebody is in them.
//!
//! Guards rest while all fences are empty or paused: on a lane that nobody runs on, holding it
//! would take from the request what no batch is there to take. A fence that fills is noticed within
//! [`REST`].

use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use elfen_rt::nap::Nap;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use nix::unistd::{ForkResult, Pid, fork, getppid, pipe2};

use super::heartbeat::{Beat, Heard, Silence};
use super::lent_lanes::Lanes;
use super::log::{Level, say};
use crate::cgroup::{Group, Hierarchies};
use crate::fence::state::Folder;
use crate::run::guard::Guards;
use crate::run::hotplug::{Online, online};
use crate::run::poll_timing::PollTiming;
use crate::run::upkeep::LaneUpkeep;

/// How long a fence may be full before its guards wake.
const REST: Duration = Duration::from_millis(20);
/// Ticks of that between two rounds of what is slow.
const TICKS_OF_CARE: u32 = 5;

/// What the daemon knows of the process.
#[derive(Debug)]
pub(super) struct Keeper {
    pub(super) pid: Pid,
    /// Readable once its guards stand.
    pub(super) ready: File,
    /// Counted up as long as it runs.
    pub(super) beat: Beat,
    pub(super) silence: Silence,
}

/// All that the process is made of; it has its own copy.
pub(super) struct Duties<'a> {
    pub(super) lanes: &'a [Lanes],
    pub(super) nap: &'a Arc<Nap>,
    pub(super) poll_timing: PollTiming,
    pub(super) folder: &'a Folder,
    pub(super) hierarchies: &'a Hierarchies,
}

pub(super) fn start(duties: &Duties<'_>) -> io::Result<Keeper> {
    let beat = Beat::new()?;
    let (ready, to_us) = pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
    let parent = nix::unistd::getpid();
    // SAFETY: the only other thread that the daemon can have is the task map's visitor, which
    // makes system calls alone: the child may go on as if it had started itself. The reflex of
    // an earlier keeper has ended with it.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => {
            let (ready, silence) = (File::from(ready), Silence::default());
            Ok(Keeper { pid: child, ready, beat, silence })
        }
        ForkResult::Child => {
            drop(ready);
            let kept = keep(duties, &beat, File::from(to_us), parent);
            if let Err(error) = &kept {
                say(Level::Error, format_args!("the guards' process ends: {error}"));
            }
            // SAFETY: ends the process; what else the daemon has open is the daemon's.
            unsafe { libc::_exit(i32::from(kept.is_err())) }
        }
    }
}

fn keep(duties: &Duties<'_>, beat: &Beat, mut ready: File, daemon: Pid) -> io::Result<()> {
    let told = SigSet::from(Signal::SIGTERM);
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&told), None)?;
    // SAFETY: this prctl takes a number.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut cares: Vec<LaneUpkeep> =
        duties.lanes.iter().map(|lanes| LaneUpkeep::start(&lanes.order, &lanes.channels)).collect();
    let mut guards = Standing::default();
    let mut known: Option<Online> = None;
    let mut said = false;
    for tick in 0_u32.. {
        beat.beat();
        if getppid() != daemon {
            return Err(freeze_all(duties));
        }
        guards.set(duties, is_needed(duties)?)?;
        beat.miss(guards.missed());
        if tick % TICKS_OF_CARE == 0 {
            cares.iter_mut().for_each(|care| {
                care.tick(false);
            });
            known = follow_hotplug(duties, known);
        }
        if !std::mem::replace(&mut said, true) {
            ready.write_all(b"!")?;
        }
        // The daemon ends this process by SIGKILL; SIGTERM is what its own death sends.
        if told_within(&told, REST) {
            return Err(freeze_all(duties));
        }
    }
    Ok(())
}

/// Guards on all lanes, or on none.
#[derive(Default)]
struct Standing {
    guards: Vec<Guards>,
    /// Of each guard its batch lane, and how long it has not got on.
    silences: Vec<(u32, Silence)>,
    listened: Option<Instant>,
    missed: Option<u32>,
}

impl Standing {
    fn set(&mut self, duties: &Duties<'_>, needed: bool) -> io::Result<()> {
        if !needed {
            *self = Self { listened: self.listened, ..Self::default() };
        } else if self.guards.is_empty() {
            for lanes in duties.lanes {
                self.guards.push(Guards::start(&lanes.channels, duties.nap, duties.poll_timing)?);
                let batches = lanes.channels.assigned().iter().map(|&(batch, _)| batch);
                self.silences.extend(batches.map(|batch| (batch, Silence::default())));
            }
        }
        Ok(())
    }

    /// The lane of a guard that does not stand there: something keeps it off its CPU, or holds its
    /// thread. Said once.
    fn missed(&mut self) -> Option<u32> {
        let since = self.listened.replace(Instant::now()).map_or(REST, |at| at.elapsed());
        let polls = self.guards.iter().flat_map(Guards::polls);
        let mut missed = None;
        for ((lane, silence), polls) in self.silences.iter_mut().zip(polls) {
            if silence.listen(polls, since) != Heard::Lately {
                missed = Some(*lane);
            }
        }
        if let Some(lane) = missed.filter(|_| self.missed.is_none()) {
            let why =
                "its guard does not stand there: is that CPU in the cpuset of elfend's cgroup?";
            say(Level::Error, format_args!("CPU {lane}: {why}"));
        }
        self.missed = missed;
        missed
    }
}

/// Whether any fence could run.
fn is_needed(duties: &Duties<'_>) -> io::Result<bool> {
    if duties.folder.paused()?.is_some() {
        return Ok(false);
    }
    for fence in duties.folder.noted()? {
        let group = Group::new(duties.hierarchies, fence.path);
        if group.is_populated().map_err(io::Error::other)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A request lane that is offline serves nobody, and a guard whose lane is gone must not run
/// elsewhere.
fn follow_hotplug(duties: &Duties<'_>, known: Option<Online>) -> Option<Online> {
    let now = online().or(known.clone())?;
    if known.as_ref() != Some(&now) {
        duties.lanes.iter().for_each(|lanes| lanes.channels.follow_hotplug(&now));
    }
    Some(now)
}

fn told_within(told: &SigSet, time: Duration) -> bool {
    let time = libc::timespec {
        tv_sec: 0,
        tv_nsec: libc::c_long::from(time.subsec_nanos().cast_signed()),
    };
    let nowhere = std::ptr::null_mut::<libc::siginfo_t>();
    // SAFETY: the kernel reads a set of signals and a time, both live, and writes nothing.
    unsafe { libc::sigtimedwait(told.as_ref(), nowhere, &time) == libc::SIGTERM }
}

/// The daemon died, and with it who sees to promises.
fn freeze_all(duties: &Duties<'_>) -> io::Error {
    let noted = match duties.folder.noted() {
        Ok(noted) => noted,
        Err(error) => return error,
    };
    for fence in noted {
        if let Err(error) = fence.freezer.freeze() {
            say(Level::Error, format_args!("fence {:?} does not freeze: {error}", fence.name));
        }
    }
    io::Error::other("elfend is gone, so every fence was frozen")
}
