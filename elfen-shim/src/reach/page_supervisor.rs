//! Pages of a running process, shared while it is observed, and the two processes that guarantee
//! their end: the keeper and the front.
//!
//! The keeper traces the observed process. Shared memory would be shared with forked children too,
//! so each child gets pages of its own from the keeper before its first step. At the end, or when
//! the front is gone, the keeper makes the pages private again. While the process is traced, each
//! signal to it costs two switches more.
//!
//! If the keeper is killed, a thread of the front makes the pages private. A child that is forked
//! between the two ends at its first touch of such a page: see `shared_pages.rs`. The keeper's
//! oom_score_adj is -1000, so the kernel does not choose it when memory is short.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, PipeReader, PipeWriter, Write};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use elfen_host::affinity::Mask;
use elfen_host::cpulist::CpuSet;
use elfen_instrument::remote::{Group, TouchError, mappings};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, setsid};

use super::mapped;
use super::place::{Place, Unreached};
use super::shared_pages::{PAGE, SharedPages, is_ours, left_shared};
use crate::recording::Source;
use crate::signal_spec::Width;

/// How long a process was stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stopped {
    pub to_share_ns: u64,
    pub at_end_ns: u64,
}

/// The front's end of a keeper. The pages are private again when it has ended.
#[derive(Debug)]
pub struct Keeper {
    orders: Option<PipeWriter>,
    answers: BufReader<PipeReader>,
    file: File,
    pages: Vec<u64>,
    standby: Option<JoinHandle<Result<Option<Duration>, Unreached>>>,
    killed: Arc<AtomicBool>,
    /// How long the process was stopped, to share the pages and to have its own again.
    pub stopped: Stopped,
    /// Forked children, and those of a process of several threads: they have the pages as they were
    /// a moment later.
    pub children: (u64, u64),
}

impl Keeper {
    /// Shares the pages of these addresses. Call it while there is one thread.
    pub fn share(process: u32, addresses: &[u64], lanes: &CpuSet) -> Result<Self, Unreached> {
        let all = mappings(process)?;
        let wanted = addresses.iter().map(|at| at & !(PAGE - 1));
        let mut pages: Vec<u64> = wanted.chain(left_shared(&all)).collect();
        pages.sort_unstable();
        pages.dedup();
        check(process, &pages)?;
        let ((ordered, orders), (answered, answers)) = (io::pipe()?, io::pipe()?);
        let lanes = Mask::of(lanes);
        // SAFETY: there is one thread, as the caller sees to, so the child may do anything.
        match unsafe { fork() }.map_err(io::Error::from)? {
            ForkResult::Parent { child } => {
                drop((ordered, answers));
                let mut answers = BufReader::new(answered);
                let told = line(&mut answers)?;
                let words: Vec<u64> =
                    told.split(' ').filter_map(|word| word.parse().ok()).collect();
                let &[fd, stopped_ns] = &words[..] else {
                    let _ended = waitpid(child, None);
                    return Err(Unreached::Failed(told));
                };
                let file = File::options().read(true).open(format!("/proc/{child}/fd/{fd}"))?;
                let killed = Arc::new(AtomicBool::new(false));
                let mut shared = SharedPages::of(&pages);
                shared.file = Some(file.try_clone()?);
                let standby = Standby { process, keeper: child, shared, killed: killed.clone() };
                let thread = std::thread::Builder::new().name("elfen-standby".to_owned());
                let standby = thread.spawn(move || {
                    let _lanes = lanes.impose_on(0);
                    standby.wait()
                })?;
                let (orders, standby, children) = (Some(orders), Some(standby), (0, 0));
                let stopped = Stopped { to_share_ns: stopped_ns, at_end_ns: 0 };
                Ok(Self { orders, answers, file, pages, standby, killed, stopped, children })
            }
            ForkResult::Child => {
                drop((orders, answered));
                let _own = setsid();
                let _lanes = lanes.impose_on(0);
                // It takes CAP_SYS_RESOURCE. Without that, the front is there if the keeper dies.
                let _spared = fs::write("/proc/self/oom_score_adj", "-1000");
                let done = keep(process, &pages, &ordered, &answers);
                if let Err(error) = &done {
                    answer(&answers, &error.to_string());
                }
                // SAFETY: ends the keeper; what the front had open is the front's.
                unsafe { libc::_exit(i32::from(done.is_err())) }
            }
        }
    }

    pub fn place(&self, at: u64, width: Width) -> Result<Place, Unreached> {
        let index = self.pages.iter().position(|&page| page == at & !(PAGE - 1));
        let index = index.ok_or_else(|| Unreached::Failed(format!("{at:#x} is not shared")))?;
        let word = mapped::file_word(&self.file, index as u64 * PAGE + at % PAGE)?;
        Ok(Place { word, offset: at % 8, width, source: Source::Shared, ready: None })
    }

    /// Whether the keeper was killed: the pages are, or will be in a moment, the process's own, and
    /// the words that are observed are not written any more.
    pub fn was_killed(&self) -> bool {
        self.killed.load(Relaxed)
    }

    /// Makes the pages private again, and says what went wrong with that.
    pub fn end(&mut self) -> Result<(), Unreached> {
        if self.orders.take().is_none() {
            return Ok(());
        }
        let told = line(&mut self.answers);
        let thread = self.standby.take().map(JoinHandle::join);
        let rescued = thread.transpose().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        if let Some(stopped) = rescued.transpose()?.flatten() {
            self.stopped.at_end_ns = u64::try_from(stopped.as_nanos()).unwrap_or(u64::MAX);
            return Ok(());
        }
        let told = told?;
        let words: Vec<u64> = told.split(' ').filter_map(|word| word.parse().ok()).collect();
        match words[..] {
            [stopped_ns, forked, late] => {
                self.stopped.at_end_ns = stopped_ns;
                self.children = (forked, late);
                Ok(())
            }
            _ => Err(Unreached::Failed(told)),
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // Another failure ends this run, and is printed.
        let _ended = self.end();
    }
}

/// The front's thread that waits for the keeper's end.
struct Standby {
    process: u32,
    keeper: Pid,
    shared: SharedPages,
    killed: Arc<AtomicBool>,
}

impl Standby {
    /// Gives how long it took to do the keeper's last work in its place; `None` if the keeper did
    /// it.
    fn wait(mut self) -> Result<Option<Duration>, Unreached> {
        match waitpid(self.keeper, None).map_err(io::Error::from)? {
            WaitStatus::Exited(_, 0) => Ok(None),
            _ => {
                self.killed.store(true, Relaxed);
                let began = Instant::now();
                self.shared.make_private_alone(self.process)?;
                Ok(Some(began.elapsed()))
            }
        }
    }
}

fn line(answers: &mut impl BufRead) -> io::Result<String> {
    let mut told = String::new();
    answers.read_line(&mut told)?;
    match told.trim_end() {
        "" => Err(io::Error::other("its keeper ended")),
        told => Ok(told.to_owned()),
    }
}

/// What can be said before anything is stopped.
fn check(process: u32, pages: &[u64]) -> Result<(), Unreached> {
    let wrong = |why: String| Err(Unreached::Wrong(why));
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    if status.lines().any(|line| line.starts_with("Seccomp:") && !line.ends_with('0')) {
        let why = "its system calls are filtered (seccomp), so none can be made in its name";
        return Err(Unreached::Failed(why.to_owned()));
    }
    let all = mappings(process)?;
    for page in pages {
        match all.iter().find(|one| one.range.contains(page)) {
            Some(one) if one.name.starts_with("[stack") => {
                return wrong(format!("{page:#x} is of a stack, where threads may wait on words"));
            }
            Some(one) if one.private && one.writable && !one.executable => {}
            Some(one) if is_ours(one) => {}
            Some(_) => return wrong(format!("{page:#x} is no private data that can be written")),
            None => return wrong(format!("process {process} has nothing mapped at {page:#x}")),
        }
    }
    Ok(())
}

/// The keeper's life.
fn keep(
    process: u32,
    pages: &[u64],
    orders: &PipeReader,
    answers: &PipeWriter,
) -> Result<(), Unreached> {
    let mut heard = SigSet::empty();
    heard.add(Signal::SIGCHLD);
    // Whatever ends the front ends this by the pipe, and in order.
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None).map_err(io::Error::from)?;
    let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
    let signals = SignalFd::with_flags(&heard, flags).map_err(io::Error::from)?;
    let touched = |error: TouchError| Unreached::Failed(error.to_string());
    let mut group = Group::seize(process).map_err(touched)?;
    let mut kept = SharedPages::of(pages);
    let began = Instant::now();
    let shared = kept.share(&mut group);
    group.go_on();
    let mut stopped = began.elapsed();
    shared?;
    let fd = kept.file.as_ref().map_or(-1, File::as_raw_fd);
    answer(answers, &format!("{fd} {}", stopped.as_nanos()));
    stopped = Duration::ZERO;
    loop {
        let mut waits = [
            PollFd::new(std::os::fd::AsFd::as_fd(&signals), PollFlags::POLLIN),
            PollFd::new(std::os::fd::AsFd::as_fd(orders), PollFlags::POLLIN),
        ];
        let _interrupted = poll(&mut waits, PollTimeout::from(100_u8));
        let is_over = waits[1].any().unwrap_or(true);
        while let Ok(Some(_)) = signals.read_signal() {}
        while let Some(event) = group.hear() {
            kept.handle(&mut group, event);
            group.go_on();
        }
        if group.is_empty() {
            break;
        }
        if is_over {
            let began = Instant::now();
            kept.make_private(&mut group).map_err(touched)?;
            group.release();
            stopped = began.elapsed();
            break;
        }
    }
    let (forked, late) = kept.children;
    answer(answers, &format!("{} {forked} {late}", stopped.as_nanos()));
    Ok(())
}

/// Tells the front a line, at once: a keeper may be killed at any moment. The front may be gone; it
/// has closed its orders then, which the keeper sees.
fn answer(mut answers: &PipeWriter, told: &str) {
    let _told = answers.write_all(format!("{told}\n").as_bytes());
}
