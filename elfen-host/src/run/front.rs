//! The front: what the shell sees. It passes signals, stops and the exit status through as if the
//! batch were its own child.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use elfen_console::output::warn;
use elfen_rt::clock::monotonic_ns;
use elfen_rt::inherit::Inherited;
use elfen_rt::nap::Kind;
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
use super::keeper::Tending;
use super::place;
use super::spare::{self, become_the_parent_of_orphans};
use crate::pidfd::PidFd;

/// How the batch program ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    Exited {
        code: u8,
    },
    Killed {
        signal: i32,
    },
    /// It never started; errno says why.
    Refused {
        errno: i32,
    },
}

/// Faults of our own must not be held back, and these two can't be.
const NOT_OURS: [Signal; 8] = [
    Signal::SIGKILL,
    Signal::SIGSTOP,
    Signal::SIGSEGV,
    Signal::SIGBUS,
    Signal::SIGILL,
    Signal::SIGFPE,
    Signal::SIGABRT,
    Signal::SIGTRAP,
];

/// Signals that end a batch, unless it decides otherwise.
const ENDS: [i32; 4] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT];

/// The end of a run.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    pub ending: Ending,
    /// Processes of the batch that did not rank below their guards.
    pub beside_guards: u64,
}

/// Runs the batch to its end.
pub fn run(order: &Order, channels: &Arc<Channels>, inheritance: &Inherited) -> io::Result<Ended> {
    let mut ours = SigSet::all();
    NOT_OURS.into_iter().for_each(|signal| ours.remove(signal));
    let mut found = SigSet::empty();
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&ours), Some(&mut found))?;
    become_the_parent_of_orphans()?;
    // Front and keeper both; where a cpuset of ours says otherwise, they stay where they are.
    let _left = place::leave(&channels.requests().into_iter().collect());
    let (events, to_us) = UnixStream::pair()?;
    let (events, to_us) = (OwnedFd::from(events), OwnedFd::from(to_us));
    let front = std::process::id();
    // SAFETY: the only other thread that this process can have is the task map's visitor, which
    // makes system calls alone: the child may go on as if it had started itself.
    match unsafe { fork() }? {
        ForkResult::Child => {
            drop(events);
            let kept = spare::stand_by(order, channels, inheritance, found, to_us, front);
            // SAFETY: ends the process; buffers of ours must not be written twice.
            unsafe { libc::_exit(i32::from(kept.is_err())) }
        }
        ForkResult::Parent { child } => {
            drop(to_us);
            let signals =
                SignalFd::with_flags(&ours, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
            let mut front = Front {
                order,
                channels,
                inheritance,
                signals,
                keeper: Some((File::from(events), child)),
                kept_by: child.as_raw().unsigned_abs(),
                root: None,
                held_back: Vec::new(),
                napped_by: Vec::new(),
                tending: None,
                beside_guards: 0,
            };
            let ending = front.until_the_end()?;
            Ok(Ended { ending, beside_guards: front.beside_guards })
        }
    }
}

struct Front<'a> {
    order: &'a Order,
    channels: &'a Arc<Channels>,
    inheritance: &'a Inherited,
    signals: SignalFd,
    /// Its events, and our child that stands by for it, until both are gone.
    keeper: Option<(File, Pid)>,
    kept_by: u32,
    root: Option<PidFd>,
    held_back: Vec<i32>,
    /// How the guards were last seen to nap.
    napped_by: Vec<u64>,
    /// The keeper's work, which the front does after the keeper was killed.
    tending: Option<Tending>,
    beside_guards: u64,
}

impl Front<'_> {
    fn until_the_end(&mut self) -> io::Result<Ending> {
        loop {
            self.wait()?;
            self.say_how_guards_nap();
            while let Some(signal) = self.signals.read_signal()? {
                self.pass_on(&signal);
            }
            let events = match &mut self.tending {
                Some(tending) => {
                    let events: Vec<Event> = tending.tick().collect();
                    let ended =
                        tending.reap().ok_or_else(|| io::Error::other("the batch is gone"))?;
                    events.into_iter().chain(ended).collect()
                }
                None => self.heard()?,
            };
            if let Some(ending) = events.into_iter().find_map(|event| self.meet(event)) {
                return Ok(ending);
            }
        }
    }

    /// A guard whose nap can't be had on its pair waits by PAUSE, which is not what was announced.
    fn say_how_guards_nap(&mut self) {
        let ordered = self.order.nap.kind();
        let lanes = self.channels.lanes().slots().zip(self.channels.assigned());
        for (index, (slot, (batch, request))) in lanes.enumerate() {
            let word = slot.guard_nap.load(Relaxed);
            if self.napped_by.len() <= index {
                self.napped_by.push(ordered as u64);
            }
            if word == 0 || std::mem::replace(&mut self.napped_by[index], word) == word {
                continue;
            }
            let by = Kind::from_word(word).map_or("unknown", Kind::name);
            warn(&format!(
                "nap {}: lanes {request}:{batch} are not tied, so the guard there naps by {by}",
                ordered.name()
            ));
        }
    }

    fn wait(&self) -> io::Result<()> {
        let mut ready = vec![PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
        if let Some((events, _)) = &self.keeper {
            ready.push(PollFd::new(events.as_fd(), PollFlags::POLLIN));
        }
        match poll(&mut ready, PollTimeout::from(100_u16)) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// What the keeper says; when the keeper is gone without a word, its children are ours.
    fn heard(&mut self) -> io::Result<Vec<Event>> {
        let Some((events, spare)) = &mut self.keeper else { return Ok(Vec::new()) };
        let mut ready = [PollFd::new(events.as_fd(), PollFlags::POLLIN)];
        if poll(&mut ready, PollTimeout::ZERO)? == 0 {
            return Ok(Vec::new());
        }
        if let Ok(event) = Event::read(events) {
            return Ok(vec![event]);
        }
        let spare = *spare;
        self.keeper = None;
        self.take_over(spare)?;
        Ok(Vec::new())
    }

    /// Keeper and spare have both closed their end of the socket.
    fn take_over(&mut self, spare: Pid) -> io::Result<()> {
        // How it ended makes no difference.
        let _ended = waitpid(spare, None);
        let Some(root) = self.root.as_ref().map(PidFd::pid) else {
            return Err(io::Error::other("the keeper ended before it had started anything"));
        };
        let claim = Claim::of_run(std::process::id(), self.kept_by);
        let mut tending = Tending::start(self.order, self.channels, self.inheritance, claim)?;
        tending.adopt(root.cast_signed());
        self.tending = Some(tending);
        Ok(())
    }

    fn meet(&mut self, event: Event) -> Option<Ending> {
        match event {
            Event::Started { batch } => {
                self.root = find(batch);
                std::mem::take(&mut self.held_back)
                    .into_iter()
                    .for_each(|signal| self.send(signal));
                None
            }
            Event::Kept { by } => {
                self.kept_by = by;
                None
            }
            Event::LostLanes => {
                warn("the last batch lane went offline: the batch is stopped until one is back");
                None
            }
            Event::HasLanes => {
                warn("a batch lane is back: the batch goes on");
                None
            }
            Event::Beside { pid } => {
                self.beside_guards += 1;
                if self.beside_guards == 1 {
                    warn(&format!(
                        "process {pid} has a cgroup of its own, and shares a lane with its \
                         guard; a fence ranks it below (`elfend --help`). The report counts them"
                    ));
                }
                None
            }
            Event::Refused { errno } => Some(Ending::Refused { errno }),
            Event::Stopped { .. } => {
                // The shell must see a stopped job; a signal that continues us continues the batch
                // too.
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

    /// The terminal's signals reach the batch without us, as it is in our process group; the front
    /// passes on the rest.
    fn pass_on(&mut self, signal: &siginfo) {
        let number = signal.ssi_signo.cast_signed();
        let from_the_terminal = signal.ssi_code == libc::SI_KERNEL;
        if ENDS.contains(&number) {
            self.channels.control().termination_requested_ns.store(monotonic_ns(), Relaxed);
        }
        if number != libc::SIGCHLD && !from_the_terminal {
            self.send(number);
        }
    }

    /// Signals may come before the batch has started: the front holds them back until then.
    fn send(&mut self, signal: i32) {
        let Some(root) = &self.root else {
            self.held_back.push(signal);
            return;
        };
        self.held_back.drain(..).chain([signal]).for_each(|signal| root.send(signal));
    }
}

/// The batch by the identity that it sent before its exec; `None` if it has ended.
fn find(batch: Option<Identity>) -> Option<PidFd> {
    let batch = batch?;
    PidFd::open(batch.pid().unsigned_abs(), || batch.liveness() == Liveness::Alive)
}

/// Ends this process the way the batch ended, so that a shell sees the same.
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
    use std::io::Write;
    use std::process::{Child, Command};

    /// As the kernel takes it: clone3(2) up to `set_tid_size`.
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

    /// A child that waits for its end, under an id of our choice.
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
                // SAFETY: takes nothing; the child makes this system call alone, until it ends.
                unsafe { libc::pause() };
            }
        }
        nix::errno::Errno::result(child).map(|_| pid)
    }

    /// Goal: a signal that comes when the batch has ended and its id is another process's reaches
    /// nobody. Method: that; another process may take the id first, so up to a hundred times.
    #[test]
    fn a_signal_reaches_no_other_process_of_the_same_id() {
        const TEST: &str = "a_signal_reaches_no_other_process_of_the_same_id";
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
                Err(error) => {
                    let mut terminal = io::stderr();
                    writeln!(terminal, "skipped: {TEST}: choosing an id: {error}").unwrap();
                    return;
                }
            }
        }
        panic!("the id was taken each time");
    }
}
