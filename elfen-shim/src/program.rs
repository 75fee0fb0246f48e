//! The program that is observed: one that we start, or one that runs.

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

/// How to start it.
#[derive(Debug)]
pub struct Start<'a> {
    pub words: &'a [OsString],
    pub on: &'a CpuSet,
    /// Id of the segment with the page of its threads.
    pub segment: i32,
    /// What the preload library has to do; without anything it is not loaded.
    pub preload: Option<String>,
    pub output: Output<'a>,
    /// Signals as they were before this process took some for itself.
    pub signals: SigSet,
}

/// Where a program's output goes.
#[derive(Clone, Copy, Debug)]
pub enum Output<'a> {
    /// Where ours goes.
    Ours,
    /// Where errors go, because ours is for a script.
    Errors,
    /// It has no terminal: another picture is on it.
    File(&'a fs::File),
}

/// A program whose process is there, and waits before it becomes the program.
#[derive(Debug)]
pub struct Held {
    pub process: u32,
    go: PipeWriter,
    spawning: JoinHandle<io::Result<Child>>,
}

impl Held {
    /// Lets it go.
    pub fn go(self) -> Result<Child, StartError> {
        let Self { mut go, spawning, .. } = self;
        // If it is gone, `spawn` tells why.
        let _gone = go.write_all(&[1]);
        drop(go);
        let spawned = spawning.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        spawned.map_err(StartError::of)
    }
}

/// Makes a process for it, on its lanes, that waits: so its first step is seen as well.
pub fn start(order: &Start<'_>) -> Result<Held, StartError> {
    let (program, arguments) = order.words.split_first().ok_or(StartError::NoProgram)?;
    let mut command = Command::new(program);
    command.args(arguments);
    let name = VARIABLE.to_string_lossy().into_owned();
    let own = std::process::id();
    let mut told = format!("1 {} {own}", order.segment);
    if let Some(rest) = &order.preload {
        told += &format!(" {rest}");
        let library = find_library()?;
        let before = std::env::var_os("LD_PRELOAD");
        command.env("LD_PRELOAD", preload(&library, before.as_deref()));
    }
    command.env(name, told);
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
        // Ours to close, or the pipe would not end with the front.
        nix::unistd::close(going)?;
        (&tell).write_all(&std::process::id().to_ne_bytes())?;
        if (&wait).read_exact(&mut [0]).is_err() {
            // The front has refused, or ended: nobody is left whom an error could be told.
            // SAFETY: ends this process, which nothing of the program has run in.
            unsafe { libc::_exit(127) };
        }
        Ok(())
    };
    // SAFETY: between fork and exec it makes system calls alone, and allocates nothing.
    unsafe { command.pre_exec(prepare) };
    // `spawn` returns when the program is there.
    let spawning = thread::spawn(move || command.spawn());
    let mut process = [0; 4];
    match born.read_exact(&mut process) {
        Ok(()) => Ok(Held { process: u32::from_ne_bytes(process), go, spawning }),
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
    #[error("it cannot be run: {0}")]
    NotExecutable(io::Error),
    #[error(transparent)]
    Library(#[from] elfen_instrument::LibraryError),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The status that a shell would give: a program that a signal ended has 128 and its number.
pub fn status_of(status: std::process::ExitStatus) -> i32 {
    status.code().or_else(|| Some(128 + status.signal()?)).unwrap_or(1)
}

/// What a process is called.
pub fn name_of(process: u32) -> Option<String> {
    let name = fs::read_to_string(format!("/proc/{process}/comm")).ok()?;
    Some(name.trim_end().chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect())
}

/// Whether it is a thread of the kernel, which has no memory to look at.
pub fn is_of_kernel(process: u32) -> bool {
    fs::read(format!("/proc/{process}/cmdline")).is_ok_and(|line| line.is_empty())
        && fs::read_link(format!("/proc/{process}/exe"))
            .is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Time that the host took from these lanes, in ns.
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
    fn a_program_is_started_with_what_it_is_told() {
        let words = ["sh", "-c", "test \"$ELFEN_SHIM\" = \"1 77 $PPID\" && exit 3"];
        let words = words.map(OsString::from);
        let on = elfen_machine::affinity::allowed().unwrap();
        let order = Start {
            words: &words,
            on: &on,
            segment: 77,
            preload: None,
            output: Output::Errors,
            signals: SigSet::empty(),
        };
        let mut child = start(&order).unwrap().go().unwrap();
        assert_eq!(status_of(child.wait().unwrap()), 3);
        let none = Start { words: &["/no/such/program".into()], ..order };
        assert!(matches!(start(&none).unwrap().go(), Err(StartError::NotFound)));
        assert!(is_of_kernel(2) || name_of(2).as_deref() != Some("kthreadd"));
        assert!(!is_of_kernel(std::process::id()));
    }
}
