//! Checks that a process can be observed, and opens the shared pages about its threads.

use elfen_console::failure::{Failure, Status};
use elfen_instrument::remote::mappings;
use elfen_kernel::task_map;
use elfen_rt::memory::{Access, Memory};
use elfen_rt::process::pid_namespace;
use elfen_rt::signal::page::Page;
use elfen_rt::signal::task::TaskMap;
use elfen_rt::signal::thread::{THREADS, ThreadSlot};

use crate::program;

/// Refuses a process that cannot be observed.
pub(super) fn check_process(process: u32) -> Result<(), Failure> {
    let what = format!("process {process}");
    let fail = |status, why: &str, fix: &str| Err(Failure::new(status, &what, why, fix));
    if process == std::process::id() {
        return fail(Status::Usage, "it is this command itself", "name another process");
    }
    if process == 0 || elfen_machine::process::stat(process).is_none() {
        return fail(Status::Failed, "it does not exist", "find its id with `ps`");
    }
    if program::is_of_kernel(process) {
        return fail(Status::Failed, "it is a kernel thread", "name the process of a program");
    }
    match mappings(process) {
        Ok(_) => Ok(()),
        Err(error) => {
            let why = format!("this user may not read its memory: {error}");
            // SAFETY: geteuid takes no arguments.
            let fix = match unsafe { libc::geteuid() } {
                0 => "give this container CAP_SYS_PTRACE, or run it outside",
                _ => "run this as the user of the process, or as root",
            };
            fail(Status::Failed, &why, fix)
        }
    }
}

/// Finds the page that a running process has created for its threads.
pub(super) fn find_thread_page(process: u32) -> Option<&'static Page<ThreadSlot>> {
    let all = mappings(process).ok()?;
    let segments = all.iter().filter(|mapping| mapping.name.starts_with("/SYSV"));
    let mut pages = segments.filter_map(|mapping| {
        let id = i32::try_from(mapping.file.as_ref()?.1).ok()?;
        Page::<ThreadSlot>::open(Memory::attach_id(id, Access::Read).ok()?).ok()
    });
    pages.next().map(|page| &*Box::leak(Box::new(page)))
}

/// Creates the page for the threads of a program to start. Its segment has no name, so it is freed
/// with the last process that maps it.
pub(super) fn create_thread_page() -> Result<&'static Page<ThreadSlot>, Failure> {
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

/// Opens the task map, if this user may.
pub(super) fn open_task_map() -> Result<&'static TaskMap, String> {
    match task_map::open() {
        Ok((map, _)) => Ok(Box::leak(Box::new(map))),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_that_cannot_be_observed_are_refused() {
        let why = |process| check_process(process).unwrap_err().to_string();
        assert!(why(std::process::id()).contains("this command itself"));
        assert!(why(u32::MAX >> 2).contains("does not exist"));
    }
}
