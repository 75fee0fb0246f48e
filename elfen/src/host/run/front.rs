//! The front: what the shell sees. It passes signals, stops and the exit status through as if the batch were its own child.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use elfen_rt::clock::monotonic_ns;
use elfen_rt::process::Identity;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd, siginfo};
use nix::unistd::{ForkResult, fork, pipe2};

use super::Order;
use super::channels::Channels;
use super::keeper::{self, Event, Tending};

/// How the batch program ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ending {
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

/// What a batch that is told so ends of, unless it decides otherwise.
const ENDS: [i32; 4] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT];

/// Runs the batch to its end.
pub(crate) fn run(
    order: &Order,
    channels: &Arc<Channels>,
    inheritance: &str,
) -> io::Result<Ending> {
    let mut ours = SigSet::all();
    NOT_OURS.into_iter().for_each(|signal| ours.remove(signal));
    let mut found = SigSet::empty();
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&ours), Some(&mut found))?;
    become_the_parent_of_orphans()?;
    let (events, to_us) = pipe2(OFlag::O_CLOEXEC)?;
    // SAFETY: this process has one thread so far, so the child may go on as if it had started itself.
    match unsafe { fork() }? {
        ForkResult::Child => {
            drop(events);
            let kept = keeper_process(order, channels, inheritance, found, to_us);
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
                signals,
                keeper: Some((File::from(events), child.as_raw())),
                root: None,
                held_back: Vec::new(),
                tending: None,
            };
            front.until_the_end()
        }
    }
}

fn keeper_process(
    order: &Order,
    channels: &Arc<Channels>,
    inheritance: &str,
    found: SigSet,
    front: OwnedFd,
) -> io::Result<()> {
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None)?;
    become_the_parent_of_orphans()?;
    keeper::keep(order, channels, inheritance, found, File::from(front))
}

fn become_the_parent_of_orphans() -> io::Result<()> {
    // SAFETY: prctl takes numbers.
    match unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

struct Front<'a> {
    order: &'a Order,
    channels: &'a Arc<Channels>,
    signals: SignalFd,
    /// Its events and its process, until it is gone.
    keeper: Option<(File, i32)>,
    root: Option<i32>,
    held_back: Vec<i32>,
    /// What the keeper did, after it was killed.
    tending: Option<Tending>,
}

impl Front<'_> {
    fn until_the_end(&mut self) -> io::Result<Ending> {
        loop {
            self.wait()?;
            while let Some(signal) = self.signals.read_signal()? {
                self.pass_on(&signal);
            }
            let events = match &mut self.tending {
                Some(tending) => {
                    tending.tick();
                    tending.reap().ok_or_else(|| io::Error::other("the batch is gone"))?
                }
                None => self.heard()?,
            };
            if let Some(ending) = events.into_iter().find_map(|event| self.meet(event)) {
                return Ok(ending);
            }
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

    /// What the keeper says; when it is gone without a word, its children are ours.
    fn heard(&mut self) -> io::Result<Vec<Event>> {
        let Some((events, keeper)) = &mut self.keeper else { return Ok(Vec::new()) };
        let mut ready = [PollFd::new(events.as_fd(), PollFlags::POLLIN)];
        if poll(&mut ready, PollTimeout::ZERO)? == 0 {
            return Ok(Vec::new());
        }
        if let Ok(event) = Event::read(events) {
            return Ok(vec![event]);
        }
        let keeper = *keeper;
        self.keeper = None;
        self.take_over(keeper)?;
        Ok(Vec::new())
    }

    fn take_over(&mut self, keeper: i32) -> io::Result<()> {
        // SAFETY: waits for a child of ours that has closed its end of the pipe; no status is asked for.
        unsafe { libc::waitpid(keeper, std::ptr::null_mut(), 0) };
        let Some(root) = self.root.or_else(|| self.said_by_itself()) else {
            return Err(io::Error::other("the keeper ended before it had started anything"));
        };
        self.root = Some(root);
        let mut tending = Tending::start(self.order, self.channels)?;
        tending.adopt(root);
        self.tending = Some(tending);
        Ok(())
    }

    /// The batch's process id from the control page, if the keeper was killed before it could tell us.
    fn said_by_itself(&self) -> Option<i32> {
        let batch = self.channels.control().batch.load(Relaxed);
        Identity::from_word(batch).map(Identity::pid)
    }

    fn meet(&mut self, event: Event) -> Option<Ending> {
        match event {
            Event::Started { pid } => {
                self.root = Some(pid);
                std::mem::take(&mut self.held_back)
                    .into_iter()
                    .for_each(|signal| self.send(signal));
                None
            }
            Event::Refused { errno } => Some(Ending::Refused { errno }),
            Event::Stopped { .. } => {
                // The shell must see a stopped job; whoever continues us continues the batch too.
                // SAFETY: raise takes a number.
                unsafe { libc::raise(libc::SIGSTOP) };
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

    /// What the terminal sends reaches the batch without us, as it is in our process group; the rest is for us to pass on.
    fn pass_on(&mut self, signal: &siginfo) {
        let number = signal.ssi_signo.cast_signed();
        let from_the_terminal = signal.ssi_code == libc::SI_KERNEL;
        if ENDS.contains(&number) {
            self.channels.control().told_to_end_ns.store(monotonic_ns(), Relaxed);
        }
        if number != libc::SIGCHLD && !from_the_terminal {
            self.send(number);
        }
    }

    /// Signals may come before the batch has started: it gets them then.
    fn send(&mut self, signal: i32) {
        self.root = self.root.or_else(|| self.said_by_itself());
        let Some(root) = self.root else {
            self.held_back.push(signal);
            return;
        };
        for signal in self.held_back.drain(..).chain([signal]) {
            // SAFETY: `root` is not reaped before its end is known here, so the id is still its own.
            unsafe { libc::kill(root, signal) };
        }
    }
}

/// Ends this process the way the batch ended, so that a shell sees the same.
pub(crate) fn die_of(signal: i32) -> ! {
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
