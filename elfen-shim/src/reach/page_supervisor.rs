//! Shares pages of a running process while it is observed (`--share`). Guarantees that the pages
//! become private again, even if a process is killed.
//!
//! The command forks a page supervisor, which traces the observed process. Shared memory would be
//! shared with forked children too. So the supervisor gives each child its own pages before the
//! child's first instruction. When the run is over or the command has ended, the supervisor makes
//! the pages private again. While the process is traced, each signal to it costs two more context
//! switches.
//!
//! If the supervisor is killed, a standby thread of the command makes the pages private. A child
//! that is forked in between ends at its first access to such a page: see `shared_pages.rs`. The
//! supervisor's oom_score_adj is -1000, so the kernel does not choose it when memory is short.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, PipeReader, PipeWriter, Write};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use elfen_instrument::remote::{Group, TouchError, mappings};
use elfen_machine::affinity::Mask;
use elfen_machine::cpulist::CpuSet;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, setsid};

use super::location::{NumberLocation, ReachError};
use super::mapped;
use super::shared_pages::{PAGE, SharedPages, is_ours, left_shared};
use crate::recording::Source;
use crate::signal_spec::Width;

/// How long the observed process was stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StopTimes {
    pub to_share_ns: u64,
    pub at_end_ns: u64,
}

/// The command's handle of its page supervisor. Dropping it makes the pages private again.
#[derive(Debug)]
pub struct PageSupervisor {
    /// Closing this pipe ends the supervisor.
    lifeline: Option<PipeWriter>,
    answers: BufReader<PipeReader>,
    file: File,
    pages: Vec<u64>,
    standby: Option<JoinHandle<Result<Option<Duration>, ReachError>>>,
    killed: Arc<AtomicBool>,
    /// How long the process was stopped to share the pages, and to make them private again.
    pub stopped: StopTimes,
    /// The number of forked children, and how many of them were forked while the process had
    /// several threads. The pages of the latter have the content of a moment after the fork.
    pub children: (u64, u64),
}

impl PageSupervisor {
    /// Starts a supervisor that shares the pages of these addresses. The caller guarantees that
    /// this process has only one thread.
    pub fn share(process: u32, addresses: &[u64], lanes: &CpuSet) -> Result<Self, ReachError> {
        let all = mappings(process)?;
        let wanted = addresses.iter().map(|at| at & !(PAGE - 1));
        let mut pages: Vec<u64> = wanted.chain(left_shared(&all)).collect();
        pages.sort_unstable();
        pages.dedup();
        check_pages(process, &pages)?;
        let (lifeline_reader, lifeline) = io::pipe()?;
        let (answer_reader, answer_writer) = io::pipe()?;
        let lanes = Mask::of(lanes);
        // SAFETY: the caller guarantees that there is only one thread. So no lock is held in the
        // child, and the child may call any function.
        match unsafe { fork() }.map_err(io::Error::from)? {
            ForkResult::Parent { child } => {
                drop((lifeline_reader, answer_writer));
                let mut answers = BufReader::new(answer_reader);
                let answer = read_line(&mut answers)?;
                let words: Vec<u64> =
                    answer.split(' ').filter_map(|word| word.parse().ok()).collect();
                let &[fd, stopped_ns] = &words[..] else {
                    let _ended = waitpid(child, None);
                    return Err(ReachError::Failed(answer));
                };
                let file = File::options().read(true).open(format!("/proc/{child}/fd/{fd}"))?;
                let killed = Arc::new(AtomicBool::new(false));
                let mut shared = SharedPages::of(&pages);
                shared.file = Some(file.try_clone()?);
                let standby =
                    Standby { process, supervisor: child, shared, killed: killed.clone() };
                let thread = std::thread::Builder::new().name("elfen-standby".to_owned());
                let standby = thread.spawn(move || {
                    let _lanes = lanes.impose_on(0);
                    standby.wait()
                })?;
                Ok(Self {
                    lifeline: Some(lifeline),
                    answers,
                    file,
                    pages,
                    standby: Some(standby),
                    killed,
                    stopped: StopTimes { to_share_ns: stopped_ns, at_end_ns: 0 },
                    children: (0, 0),
                })
            }
            ForkResult::Child => {
                drop((lifeline, answer_reader));
                let _own = setsid();
                let _lanes = lanes.impose_on(0);
                // This requires CAP_SYS_RESOURCE. Without it, the standby thread of the command
                // takes over if the supervisor is killed.
                let _spared = fs::write("/proc/self/oom_score_adj", "-1000");
                let done = supervise(process, &pages, &lifeline_reader, &answer_writer);
                if let Err(error) = &done {
                    send_line(&answer_writer, &error.to_string());
                }
                // SAFETY: ends the supervisor without destructors, because they would free objects
                // of the command.
                unsafe { libc::_exit(i32::from(done.is_err())) }
            }
        }
    }

    /// Returns where to read the number at an address that is shared.
    pub fn place(&self, at: u64, width: Width) -> Result<NumberLocation, ReachError> {
        let index = self.pages.iter().position(|&page| page == at & !(PAGE - 1));
        let index = index.ok_or_else(|| ReachError::Failed(format!("{at:#x} is not shared")))?;
        let word = mapped::map_file_word(&self.file, index as u64 * PAGE + at % PAGE)?;
        Ok(NumberLocation { word, offset: at % 8, width, source: Source::Shared, ready: None })
    }

    /// Returns whether the supervisor was killed. Then the pages become private within a moment,
    /// and the process no longer writes the observed words.
    pub fn was_killed(&self) -> bool {
        self.killed.load(Relaxed)
    }

    /// Ends the supervisor, which makes the pages private again.
    pub fn end(&mut self) -> Result<(), ReachError> {
        if self.lifeline.take().is_none() {
            return Ok(());
        }
        let answer = read_line(&mut self.answers);
        let thread = self.standby.take().map(JoinHandle::join);
        let rescued = thread.transpose().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        if let Some(stopped) = rescued.transpose()?.flatten() {
            self.stopped.at_end_ns = u64::try_from(stopped.as_nanos()).unwrap_or(u64::MAX);
            return Ok(());
        }
        let answer = answer?;
        let words: Vec<u64> = answer.split(' ').filter_map(|word| word.parse().ok()).collect();
        match words[..] {
            [stopped_ns, forked, late] => {
                self.stopped.at_end_ns = stopped_ns;
                self.children = (forked, late);
                Ok(())
            }
            _ => Err(ReachError::Failed(answer)),
        }
    }
}

impl Drop for PageSupervisor {
    fn drop(&mut self) {
        // The run has already failed for another reason, which is printed.
        let _ended = self.end();
    }
}

/// The command's thread that waits for the supervisor. If the supervisor was killed, the thread
/// makes the pages private.
struct Standby {
    process: u32,
    supervisor: Pid,
    shared: SharedPages,
    killed: Arc<AtomicBool>,
}

impl Standby {
    /// Returns how long it took to make the pages private, or `None` if the supervisor did it.
    fn wait(mut self) -> Result<Option<Duration>, ReachError> {
        match waitpid(self.supervisor, None).map_err(io::Error::from)? {
            WaitStatus::Exited(_, 0) => Ok(None),
            _ => {
                self.killed.store(true, Relaxed);
                let began = Instant::now();
                self.shared.make_private_after_tracer(self.process)?;
                Ok(Some(began.elapsed()))
            }
        }
    }
}

fn read_line(answers: &mut impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    answers.read_line(&mut line)?;
    match line.trim_end() {
        "" => Err(io::Error::other("the page supervisor ended")),
        line => Ok(line.to_owned()),
    }
}

/// Refuses pages that cannot be shared, before the process is stopped.
fn check_pages(process: u32, pages: &[u64]) -> Result<(), ReachError> {
    let wrong = |why: String| Err(ReachError::Invalid(why));
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    if status.lines().any(|line| line.starts_with("Seccomp:") && !line.ends_with('0')) {
        let why = "its system calls are filtered (seccomp), so it cannot be made to call mmap";
        return Err(ReachError::Failed(why.to_owned()));
    }
    let all = mappings(process)?;
    for page in pages {
        match all.iter().find(|one| one.range.contains(page)) {
            Some(one) if one.name.starts_with("[stack") => {
                return wrong(format!(
                    "page {page:#x} is part of a stack, where threads may wait on words"
                ));
            }
            Some(one) if one.private && one.writable && !one.executable => {}
            Some(one) if is_ours(one) => {}
            Some(_) => return wrong(format!("page {page:#x} is not private, writable data")),
            None => return wrong(format!("process {process} has nothing mapped at {page:#x}")),
        }
    }
    Ok(())
}

/// The supervisor's main loop. It shares the pages, gives forked children their own pages, and
/// makes the pages private when the command closes its pipe.
fn supervise(
    process: u32,
    pages: &[u64],
    lifeline: &PipeReader,
    answers: &PipeWriter,
) -> Result<(), ReachError> {
    let mut handled = SigSet::empty();
    handled.add(Signal::SIGCHLD);
    // All signals are blocked. If a signal ends the command, its pipe closes, and this process ends
    // in an orderly way.
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None).map_err(io::Error::from)?;
    let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
    let signals = SignalFd::with_flags(&handled, flags).map_err(io::Error::from)?;
    let touched = |error: TouchError| ReachError::Failed(error.to_string());
    let mut group = Group::seize(process).map_err(touched)?;
    let mut shared = SharedPages::of(pages);
    let began = Instant::now();
    let outcome = shared.share(&mut group);
    group.go_on();
    let mut stopped = began.elapsed();
    outcome?;
    let fd = shared.file.as_ref().map_or(-1, File::as_raw_fd);
    send_line(answers, &format!("{fd} {}", stopped.as_nanos()));
    stopped = Duration::ZERO;
    loop {
        let mut waits = [
            PollFd::new(std::os::fd::AsFd::as_fd(&signals), PollFlags::POLLIN),
            PollFd::new(std::os::fd::AsFd::as_fd(lifeline), PollFlags::POLLIN),
        ];
        let _interrupted = poll(&mut waits, PollTimeout::from(100_u8));
        let is_over = waits[1].any().unwrap_or(true);
        while let Ok(Some(_)) = signals.read_signal() {}
        while let Some(event) = group.next_event() {
            shared.handle(&mut group, event);
            group.go_on();
        }
        if group.is_empty() {
            break;
        }
        if is_over {
            let began = Instant::now();
            shared.make_private(&mut group).map_err(touched)?;
            group.release();
            stopped = began.elapsed();
            break;
        }
    }
    let (forked, late) = shared.children;
    send_line(answers, &format!("{} {forked} {late}", stopped.as_nanos()));
    Ok(())
}

/// Sends a line to the command in one write, because the supervisor may be killed at any moment. An
/// error means that the command has ended. Then the other pipe is closed too, which ends the
/// supervisor.
fn send_line(mut answers: &PipeWriter, line: &str) {
    let _sent = answers.write_all(format!("{line}\n").as_bytes());
}
