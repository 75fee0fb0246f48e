//! Pages of a process that runs already, shared while it is looked at, by a keeper: a process of
//! its own that traces the observed, and that ends it all when the front is gone.
//!
//! The process is stopped; a thread of it makes a memory file and maps it over the pages, with what
//! they held; and it goes on. Shared memory would be shared with its forked children too, so the
//! keeper stays its tracer: a child gets pages of its own before its first step. At the end the
//! process is stopped once more, and the pages are private again. While it is traced, each signal
//! that it is given costs two switches more.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, PipeReader, PipeWriter, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use elfen_host::affinity::Mask;
use elfen_host::cpulist::CpuSet;
use elfen_host::process::share_memory;
use elfen_instrument::remote::{Event, Group, Mapping, Memory, TouchError, mappings};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::{ForkResult, fork, setsid};

use super::mapped;
use super::place::{Place, Unreached};
use crate::recording::Source;
use crate::signal::Width;

const PAGE: u64 = 4096;
const PAGE_BYTES: usize = 4096;
/// From a thread's pointer to both sides: what the C library keeps of it, which others may wait on.
const THREAD_BYTES: u64 = 4096;
const TRIES: u32 = 50;
const NAME: &[u8] = b"elfen-globals\0";

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
    child: nix::unistd::Pid,
    file: File,
    pages: Vec<u64>,
    /// How long the process was stopped, to share the pages and to have its own again.
    pub stopped: Stopped,
    /// Forked children, and those of a process of several threads: they have the pages as they were
    /// a moment later.
    pub children: (u64, u64),
}

impl Keeper {
    /// Shares the pages of these addresses. Call it while there is one thread.
    pub fn share(process: u32, addresses: &[u64], lanes: &CpuSet) -> Result<Self, Unreached> {
        let mut pages: Vec<u64> = addresses.iter().map(|at| at & !(PAGE - 1)).collect();
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
                    let _ended = nix::sys::wait::waitpid(child, None);
                    return Err(Unreached::Failed(told));
                };
                let file = File::open(format!("/proc/{child}/fd/{fd}"))?;
                let (orders, children) = (Some(orders), (0, 0));
                let stopped = Stopped { to_share_ns: stopped_ns, at_end_ns: 0 };
                Ok(Self { orders, answers, child, file, pages, stopped, children })
            }
            ForkResult::Child => {
                drop((orders, answered));
                let _own = setsid();
                let _lanes = lanes.impose_on(0);
                let done = keep(process, &pages, &ordered, &answers);
                if let Err(error) = &done {
                    // Nobody is left to be told otherwise.
                    let _told = writeln!(&answers, "{error}");
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
        Ok(Place { word, offset: at % 8, width, source: Source::Shared })
    }

    /// Makes the pages private again, and says what went wrong with that.
    pub fn end(&mut self) -> Result<(), Unreached> {
        if self.orders.take().is_none() {
            return Ok(());
        }
        let told = line(&mut self.answers)?;
        let _ended = nix::sys::wait::waitpid(self.child, None);
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
        // On the way out because of another failure, which is told.
        let _ended = self.end();
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
            Some(_) => return wrong(format!("{page:#x} is no private data that can be written")),
            None => return wrong(format!("process {process} has nothing mapped at {page:#x}")),
        }
    }
    Ok(())
}

/// Whether a page is of a stack or of what the C library keeps of a thread.
fn of_thread(page: u64, stacks: &[(u64, u64)], all: &[Mapping]) -> bool {
    let mapping = all.iter().find(|one| one.range.contains(&page));
    stacks.iter().any(|(stack, pointer)| {
        let near = pointer.saturating_sub(THREAD_BYTES)..pointer.saturating_add(THREAD_BYTES);
        mapping.is_some_and(|one| one.range.contains(stack))
            || (page < near.end && near.start < page + PAGE)
    })
}

/// The keeper's life.
fn keep(
    process: u32,
    pages: &[u64],
    orders: &PipeReader,
    mut answers: &PipeWriter,
) -> Result<(), Unreached> {
    let mut heard = SigSet::empty();
    heard.add(Signal::SIGCHLD);
    // Whatever ends the front ends this by the pipe, and in order.
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None).map_err(io::Error::from)?;
    let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
    let signals = SignalFd::with_flags(&heard, flags).map_err(io::Error::from)?;
    let touched = |error: TouchError| Unreached::Failed(error.to_string());
    let mut group = Group::seize(process).map_err(touched)?;
    let mut kept = Kept { file: None, pages: pages.to_vec(), children: (0, 0) };
    let began = Instant::now();
    let shared = kept.share(&mut group);
    group.go_on();
    let mut stopped = began.elapsed();
    shared?;
    let fd = kept.file.as_ref().map_or(-1, File::as_raw_fd);
    // A front that is gone has closed its orders as well.
    let _told = writeln!(answers, "{fd} {}", stopped.as_nanos());
    stopped = std::time::Duration::ZERO;
    loop {
        let mut waits = [
            PollFd::new(std::os::fd::AsFd::as_fd(&signals), PollFlags::POLLIN),
            PollFd::new(std::os::fd::AsFd::as_fd(orders), PollFlags::POLLIN),
        ];
        let _interrupted = poll(&mut waits, PollTimeout::from(100_u8));
        let is_over = waits[1].any().unwrap_or(true);
        while let Ok(Some(_)) = signals.read_signal() {}
        while let Some(event) = group.hear() {
            kept.heed(&mut group, event);
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
    // The front may be gone.
    let _told = writeln!(answers, "{} {forked} {late}", stopped.as_nanos());
    Ok(())
}

/// What is shared.
struct Kept {
    file: Option<File>,
    pages: Vec<u64>,
    children: (u64, u64),
}

impl Kept {
    fn share(&mut self, group: &mut Group) -> Result<(), Unreached> {
        let failed = |error: TouchError| Unreached::Failed(error.to_string());
        let thread = stop(group, |group, made| _ = group.adopt(made)).map_err(failed)?;
        let (stacks, all) = (group.stacks(), mappings(group.process)?);
        if let Some(page) = self.pages.iter().find(|page| of_thread(**page, &stacks, &all)) {
            let why = format!("{page:#x} is of a thread's stack or control block");
            return Err(Unreached::Wrong(why));
        }
        let (process, memory, pages) = (group.process, &group.memory, &self.pages);
        // A place for the file's name, which is put back.
        let name_at = stacks.first().map_or(0, |(stack, _)| stack.saturating_sub(1024) & !15);
        let file = group.calls(thread, |call| -> Result<File, TouchError> {
            let io = |what| move |error| TouchError::Call { what, error };
            let before = memory.read_vec(name_at, NAME.len()).map_err(io("its stack"))?;
            memory.write(name_at, NAME).map_err(io("its stack"))?;
            let flags = u64::from(libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
            let made = call("memfd_create", libc::SYS_memfd_create, [name_at, flags, 0, 0, 0, 0]);
            memory.write(name_at, &before).map_err(io("its stack"))?;
            let fd = made?;
            let close = || call("close", libc::SYS_close, [fd, 0, 0, 0, 0, 0]);
            let file = map(process, fd, memory, pages, call);
            close()?;
            file
        });
        self.file = Some(file.map_err(failed)?.map_err(failed)?);
        Ok(())
    }

    fn heed(&mut self, group: &mut Group, event: Event) {
        match event {
            Event::Made(made) => {
                let threads = group.threads();
                if group.adopt(made) {
                    return;
                }
                // One of vfork has its parent's memory itself. Where the kernel does not say,
                // it is taken to have a copy.
                if share_memory(group.process, made.cast_unsigned()) != Some(true) {
                    self.children.0 += 1;
                    self.children.1 += u64::from(threads > 1);
                    let own = Memory::open(made.cast_unsigned()).map_err(TouchError::Refused);
                    let own = own.and_then(|memory| self.private_in(group, made, &memory));
                    if own.is_err() {
                        // It would write into its parent's memory.
                        // SAFETY: kill takes numbers; it is our tracee, and so has its number.
                        unsafe { libc::kill(made, libc::SIGKILL) };
                    }
                }
                group.dismiss(made);
            }
            // Another program's memory has nothing of ours.
            Event::Exec => self.pages.clear(),
            Event::Ended | Event::Other => {}
        }
    }

    fn make_private(&mut self, group: &mut Group) -> Result<(), TouchError> {
        if self.pages.is_empty() {
            return group.stop(|group, made| _ = group.adopt(made));
        }
        let mut made_meanwhile = Vec::new();
        let thread = stop(group, |_, made| made_meanwhile.push(made));
        for made in made_meanwhile {
            self.heed(group, Event::Made(made));
        }
        let memory = Memory::open(group.process).map_err(TouchError::Refused)?;
        self.private_in(group, thread?, &memory)
    }

    fn private_in(&self, group: &Group, thread: i32, memory: &Memory) -> Result<(), TouchError> {
        let Some(file) = &self.file else { return Ok(()) };
        group.calls(thread, |call| private(file, memory, &self.pages, call))?
    }
}

/// Puts pages of the process's own in the place of those that are shared.
fn private(file: &File, memory: &Memory, pages: &[u64], call: Call<'_>) -> Result<(), TouchError> {
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED).unsigned_abs();
    let io = |what| move |error| TouchError::Call { what, error };
    for (index, &page) in pages.iter().enumerate() {
        let mut bytes = [0; PAGE_BYTES];
        file.read_exact_at(&mut bytes, index as u64 * PAGE).map_err(io("the pages"))?;
        let own = [page, PAGE, RIGHTS, flags.into(), u64::MAX, 0];
        call("mmap", libc::SYS_mmap, own)?;
        memory.write(page, &bytes).map_err(io("its pages"))?;
    }
    Ok(())
}

const RIGHTS: u64 = (libc::PROT_READ | libc::PROT_WRITE).unsigned_abs() as u64;

type Call<'a> = &'a dyn Fn(&'static str, i64, [u64; 6]) -> Result<u64, TouchError>;

/// Puts the file of a descriptor of the process in the place of its pages, with what they hold.
fn map(
    process: u32,
    fd: u64,
    memory: &Memory,
    pages: &[u64],
    call: Call<'_>,
) -> Result<File, TouchError> {
    let io = |what| move |error| TouchError::Call { what, error };
    let path = format!("/proc/{process}/fd/{fd}");
    let file = File::options().read(true).write(true).open(path).map_err(io("the memory file"))?;
    file.set_len(pages.len() as u64 * PAGE).map_err(io("the memory file"))?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: F_ADD_SEALS takes numbers. Without them, who maps the file could cut it.
    let _sealed = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) };
    let flags = (libc::MAP_SHARED | libc::MAP_FIXED).unsigned_abs();
    for (index, &page) in pages.iter().enumerate() {
        let bytes = memory.read_vec(page, PAGE_BYTES).map_err(io("its pages"))?;
        let offset = index as u64 * PAGE;
        file.write_all_at(&bytes, offset).map_err(io("the memory file"))?;
        let shared = [page, PAGE, RIGHTS, flags.into(), fd, offset];
        if let Err(error) = call("mmap", libc::SYS_mmap, shared) {
            private(&file, memory, &pages[..index], call)?;
            return Err(error);
        }
    }
    Ok(file)
}

/// Stops all threads, one of which can make calls.
fn stop(group: &mut Group, mut made: impl FnMut(&mut Group, i32)) -> Result<i32, TouchError> {
    for _ in 0..TRIES {
        group.stop(&mut made)?;
        if let Some(thread) = group.able() {
            return Ok(thread);
        }
        group.go_on();
    }
    Err(TouchError::Busy)
}
