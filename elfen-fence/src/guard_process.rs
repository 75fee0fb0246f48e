//! The guard process: it runs the guards of all lanes and renews leases. Of fences it only knows
//! whether they hold any process.
//!
//! It runs no guards while all fences are empty or paused: occupying a lane without a batch would
//! only cost the request. A fence that is populated gets its guards within [`TICK`].

use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use elfen_rt::nap::Nap;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use nix::unistd::{ForkResult, Pid, fork, getppid, pipe2};

use super::lent_lanes::LaneGroup;
use super::log::{Level, report};
use elfen_machine::cgroup::{Group, Hierarchies};
use elfen_machine::fence::state::Folder;
use elfen_run::guard::Guards;
use elfen_run::hotplug::{Online, online};
use elfen_run::liveness::{Heartbeat, ObservedChild, Pulse, Silence};
use elfen_run::poll_timing::PollTiming;
use elfen_run::upkeep::LaneUpkeep;

/// How long a fence may be populated before its guards start.
const TICK: Duration = Duration::from_millis(20);
/// How many ticks pass between two rounds of the slow upkeep.
const TICKS_OF_UPKEEP: u32 = 5;

/// The daemon's handle of the process.
#[derive(Debug)]
pub(super) struct GuardProcess {
    pub(super) child: ObservedChild,
    /// Readable once the guards have started.
    pub(super) ready: File,
}

/// What the process works with. It has its own copy after the fork.
pub(super) struct GuardInputs<'a> {
    pub(super) lanes: &'a [LaneGroup],
    pub(super) nap: &'a Arc<Nap>,
    pub(super) poll_timing: PollTiming,
    pub(super) folder: &'a Folder,
    pub(super) hierarchies: &'a Hierarchies,
}

pub(super) fn start(inputs: &GuardInputs<'_>) -> io::Result<GuardProcess> {
    let heartbeat = Heartbeat::new()?;
    let (ready, to_us) = pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
    let parent = nix::unistd::getpid();
    // SAFETY: the only other thread that the daemon can have is the task map's visitor, which only
    // makes system calls, so no lock is held: the child may run any code. The freeze-on-exit thread
    // of an earlier guard process has ended with it.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => {
            let child = ObservedChild::new(child, heartbeat);
            Ok(GuardProcess { child, ready: File::from(ready) })
        }
        ForkResult::Child => {
            drop(ready);
            let ended = run(inputs, &heartbeat, File::from(to_us), parent);
            if let Err(error) = &ended {
                report(Level::Error, format_args!("the guards' process ends: {error}"));
            }
            // SAFETY: ends the process without dropping its copies of the daemon's values.
            unsafe { libc::_exit(i32::from(ended.is_err())) }
        }
    }
}

fn run(
    inputs: &GuardInputs<'_>,
    heartbeat: &Heartbeat,
    mut ready: File,
    daemon: Pid,
) -> io::Result<()> {
    let sigterm = SigSet::from(Signal::SIGTERM);
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&sigterm), None)?;
    // SAFETY: this prctl takes a number.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut upkeep: Vec<LaneUpkeep> =
        inputs.lanes.iter().map(|lanes| LaneUpkeep::start(&lanes.order, &lanes.channels)).collect();
    let mut guards = RunningGuards::default();
    let mut known: Option<Online> = None;
    let mut is_announced = false;
    for tick in 0_u32.. {
        heartbeat.beat();
        if getppid() != daemon {
            return Err(freeze_all(inputs));
        }
        guards.start_or_stop(inputs, is_needed(inputs)?)?;
        heartbeat.report_missing_guard(guards.find_missing_guard());
        if tick % TICKS_OF_UPKEEP == 0 {
            upkeep.iter_mut().for_each(|lanes| {
                lanes.tick(false);
            });
            known = follow_hotplug(inputs, known);
        }
        if !std::mem::replace(&mut is_announced, true) {
            ready.write_all(b"!")?;
        }
        // The daemon ends this process by SIGKILL. SIGTERM comes from the kernel when the daemon
        // has died.
        if terminated_within(&sigterm, TICK) {
            return Err(freeze_all(inputs));
        }
    }
    Ok(())
}

/// Guards on all lanes, or on none.
#[derive(Default)]
struct RunningGuards {
    guards: Vec<Guards>,
    /// The batch lane of each guard, and how long the guard has not polled.
    silences: Vec<(u32, Silence)>,
    observed_at: Option<Instant>,
    missing: Option<u32>,
}

impl RunningGuards {
    fn start_or_stop(&mut self, inputs: &GuardInputs<'_>, needed: bool) -> io::Result<()> {
        if !needed {
            *self = Self { observed_at: self.observed_at, ..Self::default() };
        } else if self.guards.is_empty() {
            for lanes in inputs.lanes {
                self.guards.push(Guards::start(&lanes.channels, inputs.nap, inputs.poll_timing)?);
                let batches = lanes.channels.assigned().iter().map(|&(batch, _)| batch);
                self.silences.extend(batches.map(|batch| (batch, Silence::default())));
            }
        }
        Ok(())
    }

    /// The lane of a guard that does not poll: it may not run on its CPU, or its thread is stuck.
    /// Logged once.
    fn find_missing_guard(&mut self) -> Option<u32> {
        let since = self.observed_at.replace(Instant::now()).map_or(TICK, |at| at.elapsed());
        let polls = self.guards.iter().flat_map(Guards::polls);
        let mut missing = None;
        for ((lane, silence), polls) in self.silences.iter_mut().zip(polls) {
            if silence.observe(polls, since) != Pulse::Alive {
                missing = Some(*lane);
            }
        }
        if let Some(lane) = missing.filter(|_| self.missing.is_none()) {
            let why = "its guard does not run there: check that the CPU is in the cpuset of \
                elfend's cgroup";
            report(Level::Error, format_args!("CPU {lane}: {why}"));
        }
        self.missing = missing;
        missing
    }
}

/// Whether any fence could run.
fn is_needed(inputs: &GuardInputs<'_>) -> io::Result<bool> {
    if inputs.folder.paused()?.is_some() {
        return Ok(false);
    }
    for fence in inputs.folder.recorded_fences()? {
        let group = Group::new(inputs.hierarchies, fence.path);
        if group.is_populated().map_err(io::Error::other)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Publishes which CPUs are online: an offline request lane serves no request, and a guard whose
/// lane is offline must not run on another CPU.
fn follow_hotplug(inputs: &GuardInputs<'_>, known: Option<Online>) -> Option<Online> {
    let now = online().or(known.clone())?;
    if known.as_ref() != Some(&now) {
        inputs.lanes.iter().for_each(|lanes| lanes.channels.follow_hotplug(&now));
    }
    Some(now)
}

fn terminated_within(sigterm: &SigSet, time: Duration) -> bool {
    let time = libc::timespec {
        tv_sec: 0,
        tv_nsec: libc::c_long::from(time.subsec_nanos().cast_signed()),
    };
    let nowhere = std::ptr::null_mut::<libc::siginfo_t>();
    // SAFETY: the kernel reads a signal set and a time, both live, and writes nothing.
    unsafe { libc::sigtimedwait(sigterm.as_ref(), nowhere, &time) == libc::SIGTERM }
}

/// Freezes all fences, because the daemon, which checks their guarantees, has died.
fn freeze_all(inputs: &GuardInputs<'_>) -> io::Error {
    let noted = match inputs.folder.recorded_fences() {
        Ok(noted) => noted,
        Err(error) => return error,
    };
    for fence in noted {
        if let Err(error) = fence.freezer.freeze() {
            report(Level::Error, format_args!("fence {:?} does not freeze: {error}", fence.name));
        }
    }
    io::Error::other("elfend has ended unexpectedly, so all fences were frozen")
}
