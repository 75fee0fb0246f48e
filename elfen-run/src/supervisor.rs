//! The supervisor: the process that is the parent of the batch, holds its guards, and reaps the
//! processes that the batch leaves behind.
//!
//! [`Supervision`] is the work. The supervisor process does it. After its death the spare does it
//! (see [`super::spare`]), or the launcher. The work ends when no process of the batch is left.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use elfen_instrument::preload;
use elfen_rt::clock::monotonic_ns;
use elfen_rt::inherit::{Inherited, VARIABLE};
use elfen_rt::process::Identity;
use elfen_rt::signal::account::Claim;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::{setgid, setgroups, setuid};

use super::channels::Channels;
use super::event::{Event, LauncherLink};
use super::guard::Guards;
use super::hotplug::{Hotplug, online};
use super::live::Planner;
use super::liveness::Heartbeat;
use super::spins::{OwnSpinWatch, SpinDetector};
use super::upkeep::LaneUpkeep;
use super::waker::Wakers;
use super::{Order, PRELOAD};
use elfen_machine::cpulist::CpuSet;
use elfen_machine::pidfd::PidFd;
use elfen_machine::placement::{Placement, UnrankedProcesses, lower_session_weight};
use elfen_machine::process::{below, stat, threads_of};

const TICK_MS: u16 = 100;

/// The supervision of one running batch.
#[derive(Debug)]
pub(super) struct Supervision {
    channels: Arc<Channels>,
    claim: Claim,
    placement: Placement,
    hotplug: Hotplug,
    spins: SpinDetector,
    _own_spins: OwnSpinWatch,
    unranked: UnrankedProcesses,
    root: Option<i32>,
    upkeep: LaneUpkeep,
    guards: Option<Guards>,
    _planner: Option<Planner>,
    _wakers: Option<Wakers>,
}

impl Supervision {
    /// Starts the guards, and records this process in the control page as the supervisor of the
    /// run. The batch are the descendants of the processes in `claim`.
    pub(super) fn start(
        order: &Order,
        channels: &Arc<Channels>,
        inheritance: &Inherited,
        claim: Claim,
    ) -> io::Result<Self> {
        channels.claim(claim);
        let upkeep = LaneUpkeep::start(order, channels);
        let planner = order.notes.as_ref().and_then(|_| channels.pages(inheritance));
        let planner = planner.map(|pages| Planner::start(channels, pages)).transpose()?;
        let live = planner.as_ref().zip(order.notes.as_ref());
        let probe =
            |index| live.and_then(|(planner, notes)| planner.site_probe(notes.clone(), index));
        Ok(Self {
            channels: channels.clone(),
            claim,
            placement: Placement::new(&order.lanes().map(|(batch, _)| batch).collect()),
            hotplug: Hotplug::after(channels.batch_lanes_offline() == channels.assigned().len()),
            spins: SpinDetector::default(),
            _own_spins: OwnSpinWatch::watch(channels.requests())?,
            unranked: UnrankedProcesses::next_to_this_process(),
            root: None,
            upkeep,
            _wakers: order.alarm.as_ref().map(|a| Wakers::start(channels, a)).transpose()?,
            guards: Some(Guards::start_with_probes(
                channels,
                &order.nap,
                order.poll_timing,
                probe,
            )?),
            _planner: planner,
        })
    }

    pub(super) fn set_root(&mut self, root: i32) {
        self.root = Some(root);
    }

    /// To be called ten times a second. Returns an event if the batch lost its last lane or has one
    /// again, and one for each process that no longer ranks below its guard.
    pub(super) fn tick(&mut self) -> impl Iterator<Item = Event> {
        let event = self.follow_hotplug();
        let due = self.upkeep.tick(event.is_some());
        let unranked = if due { self.restore_placement() } else { Vec::new() };
        let unranked = unranked.into_iter().map(|pid| Event::Unranked { pid: pid.cast_signed() });
        event.into_iter().chain(unranked)
    }

    /// Moves the batch to the lanes that are online, and stops it while there is none. Otherwise
    /// the kernel would move its threads to any other CPU, also to a request lane.
    fn follow_hotplug(&mut self) -> Option<Event> {
        let change = self.hotplug.update(&online()?, self.channels.assigned())?;
        self.channels.follow_hotplug(&change.online);
        if let Some(lanes) = &change.lanes {
            self.placement = Placement::new(lanes);
        }
        let signal = match change.event? {
            Event::LostLanes => libc::SIGSTOP,
            _ => libc::SIGCONT,
        };
        signal_batch(signal);
        change.event
    }

    /// Collects children that ended or stopped. `None` when no child is left.
    pub(super) fn reap(&mut self) -> Option<Vec<Event>> {
        // The planner stops processes by ptrace for a moment; only its own thread waits for them.
        const OPTIONS: i32 = libc::WNOHANG | libc::WUNTRACED | libc::__WNOTHREAD;
        let mut events = Vec::new();
        loop {
            let mut status = 0;
            // SAFETY: `status` is a live local.
            let child = unsafe { libc::waitpid(-1, &mut status, OPTIONS) };
            match child {
                0 => return Some(events),
                -1 => return if events.is_empty() { None } else { Some(events) },
                // The terminal did not cause this stop, so a shell must not see it.
                _ if libc::WIFSTOPPED(status)
                    && (self.hotplug.has_stopped_batch() || !is_job_control(status)) => {}
                child if Some(child) == self.root => events.push(if libc::WIFSTOPPED(status) {
                    Event::Stopped { signal: libc::WSTOPSIG(status) }
                } else {
                    self.root = None;
                    Event::Ended { status }
                }),
                _ => {}
            }
        }
    }

    /// Sends SIGTERM to all that is left of the batch. Called when this process receives SIGTERM
    /// and the launcher, which forwards signals, is gone. Otherwise the user would have to kill the
    /// supervisor, which would leave the batch unguarded.
    fn terminate_batch(&self) {
        self.channels.control().termination_requested_ns.store(monotonic_ns(), Relaxed);
        signal_batch(libc::SIGTERM);
    }

    /// Brings back threads that left the batch lanes or SCHED_IDLE. A dying process gets ordinary
    /// priority: it runs none of its program any more, and on a lane that is always busy it would
    /// keep its memory for long. Returns processes that can't be brought back below their guard.
    fn restore_placement(&mut self) -> Vec<u32> {
        let mut threads = Vec::new();
        // A process that is reaped by its parent frees its id for others. The pidfd tells whether
        // that has happened before each thread is changed.
        let processes: Vec<PidFd> = descendants().collect();
        for process in processes.iter().filter(|process| !process.has_ended()) {
            lower_session_weight(process.pid());
            let dying = stat(process.pid()).is_some_and(|stat| stat.dying);
            for thread in threads_of(process.pid()) {
                if !process.has_thread(thread) {
                    continue;
                }
                threads.push(thread);
                if dying {
                    let _raised = Placement::raise(thread);
                } else if self.placement.is_left_by(thread) == Some(true) {
                    // Fails for a thread that has ended meanwhile, and for a program of another
                    // user.
                    let _put_back = self.placement.apply(thread);
                }
            }
        }
        let processes: Vec<u32> = processes.iter().map(PidFd::pid).collect();
        self.spins.move_spinning(|| threads, || self.channels.requests());
        self.unranked.find_new(&processes)
    }
}

/// All processes below this one that have not ended.
fn descendants() -> impl Iterator<Item = PidFd> {
    below(std::process::id()).into_iter().filter_map(PidFd::descendant)
}

fn signal_batch(signal: i32) {
    descendants().for_each(|process| process.send(signal));
}

/// Whether a shell would see this stop. The planner's stops, to make a system call in the name of a
/// process, are ptrace events instead.
fn is_job_control(status: i32) -> bool {
    const STOPS: [i32; 4] = [libc::SIGSTOP, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];
    status >> 16 == 0 && STOPS.contains(&libc::WSTOPSIG(status))
}

impl Drop for Supervision {
    fn drop(&mut self) {
        // Guards add the kernel's account to their counters until they end, so they end first.
        drop(self.guards.take());
        self.channels.disclaim(self.claim);
    }
}

/// Runs the supervisor process, from fork to exit.
pub(super) fn supervise(
    order: &Order,
    channels: &Arc<Channels>,
    inheritance: &Inherited,
    signals: SigSet,
    mut launcher: LauncherLink,
    heartbeat: &Heartbeat,
) -> io::Result<()> {
    let claim = Claim::of_run(launcher.pid, std::process::id());
    let mut supervision = Supervision::start(order, channels, inheritance, claim)?;
    match start_batch(order, channels, inheritance, signals, &launcher) {
        Ok(root) => supervision.set_root(i32::try_from(root.id()).unwrap_or(i32::MAX)),
        Err(error) => {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            launcher.report(Event::Refused { errno });
            return Ok(());
        }
    }
    detach_from_terminal();
    run_until_end(supervision, &mut launcher, Some(heartbeat))
}

/// Supervises a batch until none of its processes is left. `heartbeat` is for the spare, if there
/// is one.
pub(super) fn run_until_end(
    mut supervision: Supervision,
    launcher: &mut LauncherLink,
    heartbeat: Option<&Heartbeat>,
) -> io::Result<()> {
    let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
    let children = SignalFd::with_flags(&SigSet::all(), flags)?;
    launcher.report(Event::Supervised { by: std::process::id() });
    while let Some(events) = supervision.reap() {
        heartbeat.into_iter().for_each(Heartbeat::beat);
        events.into_iter().for_each(|event| launcher.report(event));
        supervision.tick().for_each(|event| launcher.report(event));
        let mut wait = [PollFd::new(children.as_fd(), PollFlags::POLLIN)];
        poll(&mut wait, PollTimeout::from(TICK_MS))?;
        while let Ok(Some(signal)) = children.read_signal() {
            let is_sigterm = signal.ssi_signo.cast_signed() == libc::SIGTERM;
            if is_sigterm && launcher.is_gone() {
                supervision.terminate_batch();
            }
        }
    }
    Ok(())
}

/// Replaces the standard streams of this process by /dev/null. A reader of the batch's output waits
/// until the last process that could print has ended; that must not be the supervisor.
pub(super) fn detach_from_terminal() {
    let Ok(null) = File::options().read(true).write(true).open("/dev/null") else { return };
    for standard in 0..3 {
        // SAFETY: dup2 takes numbers. This process uses the three descriptors only by number.
        unsafe { libc::dup2(null.as_raw_fd(), standard) };
    }
}

/// Starts the program. `signals` is the signal mask with which the launcher was started. The child
/// sends its identity to `launcher`.
fn start_batch(
    order: &Order,
    channels: &Arc<Channels>,
    inheritance: &Inherited,
    signals: SigSet,
    launcher: &LauncherLink,
) -> io::Result<Child> {
    let lanes: CpuSet = order.lanes().map(|(batch, _)| batch).collect();
    let placement = Placement::new(&lanes);
    let mut command = Command::new(&order.program);
    let variable = VARIABLE.to_str().unwrap_or_else(|_| unreachable!("ASCII"));
    command.args(&order.arguments).env(variable, inheritance.to_string());
    if let Some(user) = &order.user {
        command.env("HOME", &user.home).env("USER", &user.name).env("LOGNAME", &user.name);
    }
    if let Some(library) = &order.library {
        let before = std::env::var_os(PRELOAD);
        command.env(PRELOAD, preload(library, before.as_deref()));
    }
    let channels = channels.clone();
    let sockets =
        [Some(launcher.socket.as_raw_fd()), launcher.spare.as_ref().map(OwnedFd::as_raw_fd)];
    let user = order.user.clone();
    let settle = move || {
        let batch = Identity::own();
        channels.control().batch.store(batch.map_or(0, Identity::word), Relaxed);
        sockets.iter().flatten().for_each(|&socket| Event::Started { batch }.send(socket));
        placement.apply(0)?;
        if let Some(user) = &user {
            setgroups(&user.groups)?;
            setgid(user.gid)?;
            setuid(user.uid)?;
        }
        sigprocmask(SigmaskHow::SIG_SETMASK, Some(&signals), None)?;
        Ok(())
    };
    // SAFETY: `settle` only makes system calls, on memory that exists: no allocation, no lock.
    unsafe { command.pre_exec(settle) };
    command.spawn()
}
