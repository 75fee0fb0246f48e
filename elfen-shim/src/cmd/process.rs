//! The process that is observed, as far as it can be looked at, and who tells of its threads.

use elfen_console::failure::{Failure, Status};
use elfen_instrument::remote::mappings;
use elfen_kernel::task_map;
use elfen_rt::memory::{Access, Memory};
use elfen_rt::process::pid_namespace;
use elfen_rt::signal::page::Page;
use elfen_rt::signal::task::TaskMap;
use elfen_rt::signal::thread::{THREADS, ThreadSlot};

use crate::program;

/// A process that can be looked at, by its number.
pub(super) fn check_process(process: u32) -> Result<(), Failure> {
    let what = format!("process {process}");
    let fail = |status, why: &str, fix: &str| Err(Failure::new(status, &what, why, fix));
    if process == std::process::id() {
        return fail(Status::Usage, "that is this command itself", "name another");
    }
    if process == 0 || elfen_machine::process::stat(process).is_none() {
        return fail(Status::Failed, "there is none", "see `ps`");
    }
    if program::is_of_kernel(process) {
        return fail(Status::Failed, "it is a thread of the kernel", "name a program's");
    }
    match mappings(process) {
        Ok(_) => Ok(()),
        Err(error) => {
            let why = format!("its memory is not for this user: {error}");
            // SAFETY: takes nothing.
            let fix = match unsafe { libc::geteuid() } {
                0 => "this root may not look into it: a container lacks CAP_SYS_PTRACE for that",
                _ => "run this as its user, or as root",
            };
            fail(Status::Failed, &why, fix)
        }
    }
}

/// The page that a running process has made for its threads.
pub(super) fn page_of(process: u32) -> Option<&'static Page<ThreadSlot>> {
    let all = mappings(process).ok()?;
    let segments = all.iter().filter(|mapping| mapping.name.starts_with("/SYSV"));
    let mut pages = segments.filter_map(|mapping| {
        let id = i32::try_from(mapping.file.as_ref()?.1).ok()?;
        Page::<ThreadSlot>::open(Memory::attach_id(id, Access::Read).ok()?).ok()
    });
    pages.next().map(|page| &*Box::leak(Box::new(page)))
}

/// The page for a program that we start. It has no name: it goes with the last who maps it.
pub(super) fn new_page() -> Result<&'static Page<ThreadSlot>, Failure> {
    let failed = |error: &dyn std::fmt::Display| {
        Failure::new(Status::Failed, "memory for threads", error, "see `ipcs -l` for the limits")
    };
    let bytes = Page::<ThreadSlot>::bytes(THREADS);
    let memory = Memory::create_segment(libc::IPC_PRIVATE, bytes, 0o600);
    let memory = memory.map_err(|error| failed(&error))?;
    memory.remove_name().map_err(|error| failed(&error))?;
    let page = Page::format(memory, THREADS, pid_namespace(), &[0; 32]);
    Ok(Box::leak(Box::new(page.map_err(|error| failed(&error))?)))
}

/// Who runs on which lane, if this user may know.
pub(super) fn task_map() -> Result<&'static TaskMap, String> {
    match task_map::open() {
        Ok((map, _)) => Ok(Box::leak(Box::new(map))),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_that_cannot_be_looked_at_are_refused() {
        let why = |process| check_process(process).unwrap_err().to_string();
        assert!(why(std::process::id()).contains("this command itself"));
        assert!(why(u32::MAX >> 2).contains("there is none"));
    }
}
