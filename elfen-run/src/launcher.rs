//! The launcher: the `elfen` process that the shell sees. It passes signals, stops and the exit
//! status through as if the batch were its own child.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use elfen_console::output::warn;
use elfen_rt::clock::monotonic_ns;
use elfen_rt::inherit::Inherited;
use elfen_rt::nap::NapKind;
use elfen_rt::process::{Identity, Liveness};
use elfen_rt::signal::account::Claim;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, raise, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd, siginfo};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork};

use super::Order;
use super::channels::Channels;
use super::event::Event;
use super::spare::{self, become_subreaper};
use super::supervisor::Supervision;
use elfen_machine::pidfd::PidFd;
use elfen_machine::placement;

/// How the batch program ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    Exited {
        code: u8,
    },
    Killed {
        signal: i32,
    },
    /// It did not start, for this errno.
    Refused {
        errno: i32,
    },
}

/// Signals that stay unblocked: those of our own faults, and the two that cannot be blocked.
const UNBLOCKED: [Signal; 8] = [
    Signal::SIGKILL,
    Signal::SIGSTOP,
    Signal::SIGSEGV,
    Signal::SIGBUS,
    Signal::SIGILL,
    Signal::SIGFPE,
    Signal::SIGABRT,
    Signal::SIGTRAP,
];

/// Signals that end a batch, unless the batch handles them.
const ENDING: [i32; 4] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT];

/// The end of a run.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    pub ending: Ending,
    /// Batch processes that did not rank below their guards.
    pub beside_guards: u64,
}

/// Runs the batch to its end.
pub fn run(order: &Order, channels: &Arc<Channels>, inheritance: &Inherited) -> io::Result<Ended> {
    let mut ours = SigSet::all();
    UNBLOCKED.into_iter().for_each(|signal| ours.remove(signal));
    let mut found = SigSet::empty();
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&ours), Some(&mut found))?;
    become_subreaper()?;
    // Keeps launcher and supervisor off the request lanes. Where a cpuset forbids that, they stay.
    let _left = placement::avoid_lanes(&channels.requests().into_iter().collect());
    let (events, to_us) = UnixStream::pair()?;
    let events = OwnedFd::from(events);
    let to_us = OwnedFd::from(to_us);
    let launcher_pid = std::process::id();
    // SAFETY: the only other thread that this process can have is the task map's visitor, which
    // only makes system calls, so no lock is held: the child may run any code.
    match unsafe { fork() }? {
        ForkResult::Child => {
            drop(events);
            let kept = spare::stand_by(order, channels, inheritance, found, to_us, launcher_pid);
            // SAFETY: ends the process without writing its copies of buffers a second time.
            unsafe { libc::_exit(i32::from(kept.is_err())) }
        }
        ForkResult::Parent { child } => {
            drop(to_us);
            let signals =
                SignalFd::with_flags(&ours, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
            let mut launcher = Launcher {
                order,
                channels,
                inheritance,
                signals,
                supervisor: Some((File::from(events), child)),
                supervisor_pid: child.as_raw().unsigned_abs(),
                root: None,
                pending_signals: Vec::new(),
                guard_naps: Vec::new(),
                supervision: None,
                beside_guards: 0,
            };
            let ending = launcher.run_until_end()?;
            Ok(Ended { ending, beside_guards: launcher.beside_guards })
        }
    }
}

struct Launcher<'a> {
    order: &'a Order,
    channels: &'a Arc<Channels>,
    inheritance: &'a Inherited,
    signals: SignalFd,
    /// The socket of its events, and our child, the spare; `None` once both are gone.
    supervisor: Option<(File, Pid)>,
    /// The process that supervises the batch.
    supervisor_pid: u32,
    /// The batch program, once it has started.
    root: Option<PidFd>,
    /// Signals that arrived before the program had started.
    pending_signals: Vec<i32>,
    /// The nap kind of each guard that was seen last.
    guard_naps: Vec<u64>,
    /// The supervisor's work, which the launcher does once supervisor and spare were killed.
    supervision: Option<Supervision>,
    beside_guards: u64,
}

impl Launcher<'_> {
    fn run_until_end(&mut self) -> io::Result<Ending> {
        loop {
            self.wait()?;
            self.warn_of_other_naps();
            while let Some(signal) = self.signals.read_signal()? {
                self.forward(&signal);
            }
            let events = match &mut self.supervision {
                Some(supervision) => {
                    let events: Vec<Event> = supervision.tick().collect();
                    let ended =
                        supervision.reap().ok_or_else(|| io::Error::other("the batch is gone"))?;
                    events.into_iter().chain(ended).collect()
                }
                None => self.read_events()?,
            };
            if let Some(ending) = events.into_iter().find_map(|event| self.handle(event)) {
                return Ok(ending);
            }
        }
    }

    /// Warns of each guard whose nap is not supported on its pair, so that it waits by PAUSE.
    fn warn_of_other_naps(&mut self) {
        let ordered = self.order.nap.kind();
        let lanes = self.channels.lanes().slots().zip(self.channels.assigned());
        for (index, (slot, (batch, request))) in lanes.enumerate() {
            let word = slot.guard_nap.load(Relaxed);
            if self.guard_naps.len() <= index {
                self.guard_naps.push(ordered as u64);
            }
            if word == 0 || std::mem::replace(&mut self.guard_naps[index], word) == word {
                continue;
            }
            let by = NapKind::from_word(word).map_or("unknown", NapKind::name);
            warn(&format!(
                "nap {}: lanes {request}:{batch} are not tied, so the guard there uses nap {by}",
                ordered.name()
            ));
        }
    }

    fn wait(&self) -> io::Result<()> {
        let mut ready = vec![PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
        if let Some((events, _)) = &self.supervisor {
            ready.push(PollFd::new(events.as_fd(), PollFlags::POLLIN));
        }
        match poll(&mut ready, PollTimeout::from(100_u16)) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Reads the supervisor's event, if there is one. At the end of the connection, takes over.
    fn read_events(&mut self) -> io::Result<Vec<Event>> {
        let Some((events, spare)) = &mut self.supervisor else { return Ok(Vec::new()) };
        let mut ready = [PollFd::new(events.as_fd(), PollFlags::POLLIN)];
        if poll(&mut ready, PollTimeout::ZERO)? == 0 {
            return Ok(Vec::new());
        }
        if let Ok(event) = Event::read(events) {
            return Ok(vec![event]);
        }
        let spare = *spare;
        self.supervisor = None;
        self.take_over(spare)?;
        Ok(Vec::new())
    }

    /// Supervises the batch after supervisor and spare have closed their end of the socket.
    fn take_over(&mut self, spare: Pid) -> io::Result<()> {
        // How the spare ended makes no difference.
        let _ended = waitpid(spare, None);
        let Some(root) = self.root.as_ref().map(PidFd::pid) else {
            return Err(io::Error::other("the supervisor ended before it had started the program"));
        };
        let claim = Claim::of_run(std::process::id(), self.supervisor_pid);
        let mut supervision =
            Supervision::start(self.order, self.channels, self.inheritance, claim)?;
        supervision.set_root(root.cast_signed());
        self.supervision = Some(supervision);
        Ok(())
    }

    fn handle(&mut self, event: Event) -> Option<Ending> {
        match event {
            Event::Started { batch } => {
                self.root = open_batch(batch);
                for signal in std::mem::take(&mut self.pending_signals) {
                    self.send(signal);
                }
                None
            }
            Event::Supervised { by } => {
                self.supervisor_pid = by;
                None
            }
            Event::LostLanes => {
                warn(
                    "the last batch lane went offline: the batch is stopped until a batch lane is \
                    online",
                );
                None
            }
            Event::HasLanes => {
                warn("a batch lane is online again: the batch continues");
                None
            }
            Event::Unranked { pid } => {
                self.beside_guards += 1;
                if self.beside_guards == 1 {
                    warn(&format!(
                        "process {pid} has a cgroup of its own, so it does not rank below its \
                         guard, and shares a lane with it; in a fence it ranks below (`elfend \
                         --help`). The report counts such processes"
                    ));
                }
                None
            }
            Event::Refused { errno } => Some(Ending::Refused { errno }),
            Event::Stopped { .. } => {
                // The shell must see a stopped job. The signal that continues this process must
                // then continue the batch.
                let _stopped = raise(Signal::SIGSTOP);
                self.send(libc::SIGCONT);
                None
            }
            Event::Ended { status } if libc::WIFSIGNALED(status) => {
                Some(Ending::Killed { signal: libc::WTERMSIG(status) })
            }
            Event::Ended { status } => {
                Some(Ending::Exited { code: u8::try_from(libc::WEXITSTATUS(status)).unwrap_or(1) })
            }
        }
    }

    /// Forwards a signal to the batch, unless the terminal sent it: those signals reach the batch
    /// without us, as it is in our process group.
    fn forward(&mut self, signal: &siginfo) {
        let number = signal.ssi_signo.cast_signed();
        let from_the_terminal = signal.ssi_code == libc::SI_KERNEL;
        if ENDING.contains(&number) {
            self.channels.control().termination_requested_ns.store(monotonic_ns(), Relaxed);
        }
        if number != libc::SIGCHLD && !from_the_terminal {
            self.send(number);
        }
    }

    /// Sends a signal to the batch, or keeps it until the batch has started.
    fn send(&mut self, signal: i32) {
        let Some(root) = &self.root else {
            self.pending_signals.push(signal);
            return;
        };
        self.pending_signals.drain(..).chain([signal]).for_each(|signal| root.send(signal));
    }
}

/// Opens the process with the identity that the batch sent before its exec; `None` if it has ended.
fn open_batch(batch: Option<Identity>) -> Option<PidFd> {
    let batch = batch?;
    PidFd::open(batch.pid().unsigned_abs(), || batch.liveness() == Liveness::Alive)
}

/// Ends this process by the signal that ended the batch, so that a shell sees the same status.
pub fn die_of(signal: i32) -> ! {
    let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `no_core` is a live rlimit.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &no_core) };
    // SAFETY: the default action has no handler that could be unsafe.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
    let unblocked = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None);
    if unblocked.is_ok() {
        // SAFETY: raise takes a number.
        unsafe { libc::raise(signal) };
    }
    std::process::exit(128 + signal)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::wait::{WaitPidFlag, WaitStatus};
    use std::process::{Child, Command};

    /// The arguments of clone3(2), up to `set_tid_size`.
    #[repr(C)]
    #[derive(Default)]
    struct Clone {
        flags: u64,
        pidfd: u64,
        child_tid: u64,
        parent_tid: u64,
        exit_signal: u64,
        stack: u64,
        stack_size: u64,
        tls: u64,
        set_tid: u64,
        set_tid_size: u64,
    }

    fn sleeper() -> Child {
        Command::new("sleep").arg("600").spawn().unwrap()
    }

    /// Starts a child with a chosen process id. It waits until it is killed.
    fn child_with(pid: i32) -> Result<i32, nix::errno::Errno> {
        let tid = pid;
        let ask = Clone {
            exit_signal: u64::from(libc::SIGCHLD.unsigned_abs()),
            set_tid: (&raw const tid).addr() as u64,
            set_tid_size: 1,
            ..Clone::default()
        };
        // SAFETY: `ask` and `tid` outlive the call, which copies the address space as fork does.
        let child = unsafe { libc::syscall(libc::SYS_clone3, &raw const ask, size_of::<Clone>()) };
        if child == 0 {
            loop {
                // SAFETY: pause takes nothing. The child makes no other system call.
                unsafe { libc::pause() };
            }
        }
        nix::errno::Errno::result(child).map(|_| pid)
    }

    /// Goal: a signal that is sent after the batch has ended reaches no other process, even if that
    /// has the batch's process id. Method: a child with the id of an ended child. Another process
    /// may take the id first, so up to a hundred attempts.
    #[test]
    #[ignore = "needs root"]
    fn a_signal_reaches_no_other_process_of_the_same_id() {
        for _ in 0..100 {
            let mut batch = sleeper();
            let pid = batch.id().cast_signed();
            let root = PidFd::open(batch.id(), || true).unwrap();
            batch.kill().unwrap();
            batch.wait().unwrap();
            match child_with(pid) {
                Ok(other) => {
                    root.send(libc::SIGKILL);
                    let ended = waitpid(Pid::from_raw(other), Some(WaitPidFlag::WNOHANG));
                    nix::sys::signal::kill(Pid::from_raw(other), Signal::SIGTERM).unwrap();
                    let end = waitpid(Pid::from_raw(other), None);
                    let by_us = WaitStatus::Signaled(Pid::from_raw(other), Signal::SIGTERM, false);
                    assert_eq!((ended, end), (Ok(WaitStatus::StillAlive), Ok(by_us)));
                    return;
                }
                Err(nix::errno::Errno::EEXIST) => {}
                Err(error) => panic!("needs root, to choose a process id: {error}"),
            }
        }
        panic!("another process took the id each time");
    }
}
