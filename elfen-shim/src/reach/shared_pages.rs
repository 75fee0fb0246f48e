//! Shares pages of a running process with the observer, and makes them private again.
//!
//! A traced thread of the process creates a memory file and maps it over the pages, with their
//! content. The mapping is MADV_DONTFORK, so a forked child has a hole there. Its tracer fills the
//! hole with private pages. Without a tracer, the child is killed at its first access to the hole,
//! and the parent's memory stays intact. A child that inherited the mapping would write into its
//! parent's memory.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};

use elfen_instrument::remote::{Event, Group, Mapping, Memory, TouchError, mappings};
use elfen_machine::process::share_memory;
use nix::fcntl::{FcntlArg, fcntl};

use super::globals::SIZE_SEALS;
use super::location::ReachError;

pub(super) const PAGE: u64 = 4096;
const PAGE_BYTES: usize = 4096;
/// Bytes on both sides of a thread pointer that may belong to the thread's control block. That
/// block has words on which other threads wait.
const THREAD_BYTES: u64 = 4096;
const TRIES: u32 = 50;
/// The name of the memory file. Pages that are shared from a program's start have no supervisor,
/// and their file has another name.
const NAME: &[u8] = b"elfen-shared\0";
const MAPPED_NAME: &str = "/memfd:elfen-shared";

/// A page of the process, and its offset in the memory file.
#[derive(Clone, Copy, Debug)]
struct SharedPage {
    address: u64,
    offset: u64,
}

/// The pages of one process.
#[derive(Debug)]
pub(super) struct SharedPages {
    pub(super) file: Option<File>,
    pages: Vec<SharedPage>,
    /// The number of forked children, and how many of them were forked while the process had
    /// several threads. The pages of the latter have the content of a moment after the fork.
    pub(super) children: (u64, u64),
}

/// Pages that an earlier run left shared. This happens if its command and its page supervisor were
/// killed together.
pub(super) fn left_shared(all: &[Mapping]) -> impl Iterator<Item = u64> {
    let left = all.iter().filter(|one| is_ours(one));
    left.flat_map(|one| one.range.clone().step_by(PAGE_BYTES))
}

pub(super) fn is_ours(mapping: &Mapping) -> bool {
    !mapping.private && mapping.name.starts_with(MAPPED_NAME)
}

/// Returns whether a page is part of a thread's stack or control block.
fn of_thread(page: u64, stacks: &[(u64, u64)], all: &[Mapping]) -> bool {
    let mapping = all.iter().find(|one| one.range.contains(&page));
    stacks.iter().any(|(stack, pointer)| {
        let near = pointer.saturating_sub(THREAD_BYTES)..pointer.saturating_add(THREAD_BYTES);
        mapping.is_some_and(|one| one.range.contains(stack))
            || (page < near.end && near.start < page + PAGE)
    })
}

impl SharedPages {
    pub(super) fn of(pages: &[u64]) -> Self {
        let offsets = (0..).step_by(PAGE_BYTES);
        let page = |(&address, offset)| SharedPage { address, offset };
        Self { file: None, pages: pages.iter().zip(offsets).map(page).collect(), children: (0, 0) }
    }

    /// Maps a memory file over the pages of a traced process.
    pub(super) fn share(&mut self, group: &mut Group) -> Result<(), ReachError> {
        let failed = |error: TouchError| ReachError::Failed(error.to_string());
        let thread = group.stop_all(|group, made| _ = group.adopt(made)).map_err(failed)?;
        let (stacks, all) = (group.stacks(), mappings(group.process)?);
        let mut addresses = self.pages.iter().map(|page| page.address);
        if let Some(page) = addresses.find(|page| of_thread(*page, &stacks, &all)) {
            let why = format!("page {page:#x} is part of a thread's stack or control block");
            return Err(ReachError::Invalid(why));
        }
        let (process, memory, pages) = (group.process, &group.memory, &self.pages);
        // The name of the file is written below a thread's stack for the call. Then the previous
        // bytes are restored.
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

    /// Handles an event of the traced process. A forked child gets its own pages.
    pub(super) fn handle(&mut self, group: &mut Group, event: Event) {
        match event {
            Event::Made(made) => {
                let threads = group.threads();
                if group.adopt(made) {
                    return;
                }
                // A child of vfork uses its parent's memory. If the kernel does not report whether
                // memory is shared, the code assumes a copy.
                if share_memory(group.process, made.cast_unsigned()) != Some(true) {
                    self.children.0 += 1;
                    self.children.1 += u64::from(threads > 1);
                    let own = Memory::open(made.cast_unsigned()).map_err(TouchError::Refused);
                    let own = own.and_then(|memory| self.private_in(group, made, &memory));
                    if own.is_err() {
                        // The child would continue with a hole in its memory.
                        // SAFETY: kill takes no pointers. The child is a stopped tracee of this
                        // process, so its id has not been reused.
                        unsafe { libc::kill(made, libc::SIGKILL) };
                    }
                }
                group.release_child(made);
            }
            // The new program's memory has no shared pages.
            Event::Exec => self.pages.clear(),
            Event::Ended | Event::Other => {}
        }
    }

    /// Makes all pages private again.
    pub(super) fn make_private(&mut self, group: &mut Group) -> Result<(), TouchError> {
        if self.pages.is_empty() {
            return group.stop(|group, made| _ = group.adopt(made));
        }
        let mut made_meanwhile = Vec::new();
        let thread = stop_persistently(group, |made| made_meanwhile.push(made));
        for made in made_meanwhile {
            self.handle(group, Event::Made(made));
        }
        let memory = Memory::open(group.process).map_err(TouchError::Refused)?;
        self.private_in(group, thread?, &memory)
    }

    /// Makes the pages private that are still mapped from the file, after the tracer was killed.
    /// The tracer may have made some pages private already, and the process may have written to
    /// them since.
    pub(super) fn make_private_after_tracer(&mut self, process: u32) -> Result<(), ReachError> {
        let Some(file) = &self.file else { return Ok(()) };
        let failed = |error: TouchError| ReachError::Failed(error.to_string());
        let inode = file.metadata()?.ino();
        // A process that has ended, or executes another program, has no shared pages left.
        let all = mappings(process).unwrap_or_default();
        let of_file = |one: &&Mapping| {
            is_ours(one) && one.file.as_ref().is_some_and(|(_, number)| *number == inode)
        };
        let shared: Vec<&Mapping> = all.iter().filter(of_file).collect();
        let is_shared =
            |page: &SharedPage| shared.iter().any(|one| one.range.contains(&page.address));
        self.pages.retain(is_shared);
        if self.pages.is_empty() {
            return Ok(());
        }
        let mut group = Group::seize(process).map_err(failed)?;
        let done = self.make_private(&mut group);
        group.release();
        done.map_err(failed)
    }

    fn private_in(&self, group: &Group, thread: i32, memory: &Memory) -> Result<(), TouchError> {
        let Some(file) = &self.file else { return Ok(()) };
        group.calls(thread, |call| private(file, memory, &self.pages, call))?
    }
}

/// Replaces shared pages by private pages with the same content.
fn private(
    file: &File,
    memory: &Memory,
    pages: &[SharedPage],
    call: Call<'_>,
) -> Result<(), TouchError> {
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED).unsigned_abs();
    let io = |what| move |error| TouchError::Call { what, error };
    for &SharedPage { address, offset } in pages {
        let mut bytes = [0; PAGE_BYTES];
        file.read_exact_at(&mut bytes, offset).map_err(io("the pages"))?;
        let own = [address, PAGE, RIGHTS, flags.into(), u64::MAX, 0];
        call("mmap", libc::SYS_mmap, own)?;
        memory.write(address, &bytes).map_err(io("its pages"))?;
    }
    Ok(())
}

const RIGHTS: u64 = (libc::PROT_READ | libc::PROT_WRITE).unsigned_abs() as u64;

type Call<'a> = &'a dyn Fn(&'static str, i64, [u64; 6]) -> Result<u64, TouchError>;

/// Maps the memory file over the pages, with their content. The process has the file open as `fd`.
fn map(
    process: u32,
    fd: u64,
    memory: &Memory,
    pages: &[SharedPage],
    call: Call<'_>,
) -> Result<File, TouchError> {
    let io = |what| move |error| TouchError::Call { what, error };
    let path = format!("/proc/{process}/fd/{fd}");
    let file = File::options().read(true).write(true).open(path).map_err(io("the memory file"))?;
    file.set_len(pages.len() as u64 * PAGE).map_err(io("the memory file"))?;
    // Without the seals, a process that has the file open could truncate it.
    let _sealed = fcntl(&file, FcntlArg::F_ADD_SEALS(SIZE_SEALS));
    let flags = (libc::MAP_SHARED | libc::MAP_FIXED).unsigned_abs();
    for (index, &SharedPage { address, offset }) in pages.iter().enumerate() {
        let bytes = memory.read_vec(address, PAGE_BYTES).map_err(io("its pages"))?;
        file.write_all_at(&bytes, offset).map_err(io("the memory file"))?;
        let shared = [address, PAGE, RIGHTS, flags.into(), fd, offset];
        let not_inherited = [address, PAGE, libc::MADV_DONTFORK.unsigned_abs().into(), 0, 0, 0];
        let mapped =
            call("mmap", libc::SYS_mmap, shared).map_err(|error| (index, error)).and_then(|_| {
                let done = call("madvise", libc::SYS_madvise, not_inherited);
                done.map_err(|error| (index + 1, error))
            });
        if let Err((shared, error)) = mapped {
            private(&file, memory, &pages[..shared], call)?;
            return Err(error);
        }
    }
    Ok(file)
}

/// Stops all threads like [`Group::stop_all`], but keeps trying while a thread waits for its vfork
/// child. Pages that stay shared are worse than a delay.
fn stop_persistently(group: &mut Group, mut made: impl FnMut(i32)) -> Result<i32, TouchError> {
    let mut tries = 0..TRIES;
    loop {
        match group.stop_all(|_, child| made(child)) {
            Err(TouchError::Busy) if !group.is_empty() && tries.next().is_some() => group.go_on(),
            done => return done,
        }
    }
}
