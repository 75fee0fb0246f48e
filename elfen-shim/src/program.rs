//! Starts the observed program, and reads information about processes from /proc.
//!
//! A program is started in two steps. [`spawn_pending`] creates its process, which then waits
//! before exec. [`PendingProgram::release`] releases the process once the observer samples, so that
//! the program's first instruction is observed too.

use std::ffi::OsString;
use std::fs;
use std::io::{self, PipeWriter, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};

use elfen_instrument::{find_library, preload};
use elfen_machine::affinity::Mask;
use elfen_machine::cpulist::CpuSet;
use elfen_rt::tag::VARIABLE;
use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};

/// How to start a program.
#[derive(Debug)]
pub struct StartOptions<'a> {
    pub words: &'a [OsString],
    pub on: &'a CpuSet,
    /// The id of the shared memory segment with the page of the program's threads.
    pub segment: i32,
    /// The arguments of the preload library. If they are `None`, the library is not loaded.
    pub preload: Option<String>,
    pub output: Output<'a>,
    /// The program's signal mask. It is the mask of this command before the command blocked
    /// signals.
    pub signals: SigSet,
}

/// Where a program's output goes.
#[derive(Clone, Copy, Debug)]
pub enum Output<'a> {
    /// To the standard output of this command.
    Ours,
    /// To standard error, because standard output has JSON.
    Errors,
    /// To a file, because this command draws on the terminal.
    File(&'a fs::File),
}

/// A process that waits until it is released, and then executes the program.
#[derive(Debug)]
pub struct PendingProgram {
    pub process: u32,
    go: PipeWriter,
    spawning: JoinHandle<io::Result<Child>>,
}

impl PendingProgram {
    /// Releases the process.
    pub fn release(self) -> Result<Child, StartError> {
        let Self { mut go, spawning, .. } = self;
        // If the process has ended, `spawn` returns the reason.
        let _gone = go.write_all(&[1]);
        drop(go);
        let spawned = spawning.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        spawned.map_err(StartError::of)
    }
}

/// Creates a process on the program's lanes that waits to be released.
pub fn spawn_pending(order: &StartOptions<'_>) -> Result<PendingProgram, StartError> {
    let (program, arguments) = order.words.split_first().ok_or(StartError::NoProgram)?;
    let mut command = Command::new(program);
    command.args(arguments);
    let name = VARIABLE.to_string_lossy().into_owned();
    let own = std::process::id();
    let mut value = format!("1 {} {own}", order.segment);
    if let Some(rest) = &order.preload {
        value += &format!(" {rest}");
        let library = find_library()?;
        let before = std::env::var_os("LD_PRELOAD");
        command.env("LD_PRELOAD", preload(&library, before.as_deref()));
    }
    command.env(name, value);
    match order.output {
        Output::Ours => {}
        Output::Errors => {
            let stderr = io::stderr().as_fd().try_clone_to_owned()?;
            command.stdout(Stdio::from(stderr));
        }
        Output::File(file) => {
            command.stdout(file.try_clone()?).stderr(file.try_clone()?).stdin(Stdio::null());
        }
    }
    let (mask, signals) = (Mask::of(order.on), order.signals);
    let (mut born, tell) = io::pipe()?;
    let (wait, go) = io::pipe()?;
    let going = go.as_raw_fd();
    let prepare = move || {
        mask.impose_on(0)?;
        sigprocmask(SigmaskHow::SIG_SETMASK, Some(&signals), None)?;
        // The fork copied the writing end of the pipe. Left open, it would keep the pipe open after
        // this command's end.
        nix::unistd::close(going)?;
        (&tell).write_all(&std::process::id().to_ne_bytes())?;
        if (&wait).read_exact(&mut [0]).is_err() {
            // This command has failed or ended, so no error is reported.
            // SAFETY: ends the forked process, in which nothing of the program has run yet.
            unsafe { libc::_exit(127) };
        }
        Ok(())
    };
    // SAFETY: between fork and exec, `prepare` makes only system calls and allocates nothing.
    unsafe { command.pre_exec(prepare) };
    // A separate thread, because `spawn` returns only after the process has executed the program.
    let spawning = thread::spawn(move || command.spawn());
    let mut process = [0; 4];
    match born.read_exact(&mut process) {
        Ok(()) => Ok(PendingProgram { process: u32::from_ne_bytes(process), go, spawning }),
        Err(_) => {
            let spawned = spawning.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            let error = spawned.err().unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into());
            Err(StartError::of(error))
        }
    }
}

impl StartError {
    fn of(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::NotFound,
            io::ErrorKind::PermissionDenied => Self::NotExecutable(error),
            _ => Self::Io(error),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("no program is named")]
    NoProgram,
    #[error("it is not found")]
    NotFound,
    #[error("it cannot be executed: {0}")]
    NotExecutable(io::Error),
    #[error(transparent)]
    Library(#[from] elfen_instrument::LibraryError),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The exit status as a shell reports it: 128 plus the signal, if a signal ended the program.
pub fn status_of(status: std::process::ExitStatus) -> i32 {
    status.code().or_else(|| Some(128 + status.signal()?)).unwrap_or(1)
}

/// Returns whether a process is a kernel thread, which has no memory to observe.
pub fn is_of_kernel(process: u32) -> bool {
    fs::read(format!("/proc/{process}/cmdline")).is_ok_and(|line| line.is_empty())
        && fs::read_link(format!("/proc/{process}/exe"))
            .is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Steal time of these lanes in ns: how long the host did not run them.
pub fn steal_ns(lanes: &CpuSet) -> u64 {
    let Ok(text) = fs::read_to_string("/proc/stat") else { return 0 };
    // SAFETY: sysconf takes a number.
    let ticks_a_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    let tick_ns = 1_000_000_000 / u64::try_from(ticks_a_second).unwrap_or(100).max(1);
    let of_line = |line: &str| {
        let mut fields = line.strip_prefix("cpu")?.split_whitespace();
        let cpu: u32 = fields.next()?.parse().ok()?;
        lanes.contains(cpu).then(|| fields.nth(7)?.parse::<u64>().ok()).flatten()
    };
    text.lines().filter_map(of_line).sum::<u64>() * tick_ns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_gets_its_arguments_and_environment() {
        let words = ["sh", "-c", "test \"$ELFEN_SHIM\" = \"1 77 $PPID\" && exit 3"];
        let words = words.map(OsString::from);
        let on = elfen_machine::affinity::allowed().unwrap();
        let order = StartOptions {
            words: &words,
            on: &on,
            segment: 77,
            preload: None,
            output: Output::Errors,
            signals: SigSet::empty(),
        };
        let mut child = spawn_pending(&order).unwrap().release().unwrap();
        assert_eq!(status_of(child.wait().unwrap()), 3);
        let none = StartOptions { words: &["/no/such/program".into()], ..order };
        assert!(matches!(spawn_pending(&none).unwrap().release(), Err(StartError::NotFound)));
        assert!(
            is_of_kernel(2) || elfen_instrument::process::name_of(2).as_deref() != Some("kthreadd")
        );
        assert!(!is_of_kernel(std::process::id()));
    }
}
