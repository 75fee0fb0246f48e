//! Starts a program that is traced from its first instruction.

use std::ffi::OsString;
use std::io::{self, Read, Write, pipe};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::thread;

use elfen_instrument::remote::Tracee;
use elfen_instrument::{file_of, gains_rights};

use crate::signals;

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The program was not found, or cannot be executed.
    #[error("{0}")]
    Program(io::Error),
    #[error("tracing it: {0}")]
    Trace(io::Error),
    #[error("it has a set-user-ID bit or capabilities, which a traced program does not get")]
    Rights,
}

/// Whether a program would lose rights because this process traces it.
pub(super) fn loses_rights(file: &Path) -> bool {
    // SAFETY: takes nothing.
    let is_root = unsafe { libc::geteuid() } == 0;
    !is_root && gains_rights(file)
}

/// Starts a program. Its first event is that it has executed.
pub(super) fn start(words: &[OsString]) -> Result<Child, StartError> {
    let (program, arguments) = words.split_first().ok_or_else(|| {
        StartError::Program(io::Error::new(io::ErrorKind::InvalidInput, "no program"))
    })?;
    if file_of(program).is_some_and(|file| loses_rights(&file)) {
        return Err(StartError::Rights);
    }
    let (mut ready, tell) = pipe().map_err(StartError::Trace)?;
    let (wait, mut go) = pipe().map_err(StartError::Trace)?;
    let mut command = Command::new(program);
    signals::pass_to(command.args(arguments));
    let (tell_fd, wait_fd) = (tell.as_raw_fd(), wait.as_raw_fd());
    // SAFETY: the closure makes system calls only. Both descriptors stay open until `spawn`
    // returns, and close on exec.
    unsafe {
        command.pre_exec(move || wait_for_tracer(tell_fd, wait_fd));
    }
    thread::scope(|scope| {
        // `spawn` returns once the program was executed, and so after the thread was traced.
        let spawning = scope.spawn(move || {
            let child = command.spawn();
            drop((tell, wait));
            child
        });
        let mut id = [0; 4];
        let traced = match ready.read_exact(&mut id) {
            Ok(()) => Tracee(libc::pid_t::from_ne_bytes(id)).seize(),
            // No process was created.
            Err(_) => Ok(()),
        };
        let _gone = if traced.is_ok() { go.write_all(&[1]) } else { Ok(()) };
        drop(go);
        let child = spawning.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()));
        traced.map_err(StartError::Trace)?;
        child.map_err(StartError::Program)
    })
}

/// Runs in the new process: says its id, and waits until it is traced.
fn wait_for_tracer(tell: i32, wait: i32) -> io::Result<()> {
    // SAFETY: takes nothing.
    let id = unsafe { libc::getpid() }.to_ne_bytes();
    // SAFETY: `id` is a local array.
    let told = unsafe { libc::write(tell, id.as_ptr().cast(), id.len()) };
    let mut byte = 0_u8;
    // SAFETY: `byte` is a local variable.
    let read = unsafe { libc::read(wait, (&raw mut byte).cast(), 1) };
    if told == 4 && read == 1 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
