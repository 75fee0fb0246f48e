//! Sets up child processes: their CPUs, their rank, and that they end with this process. Also
//! handles Ctrl-C.
//!
//! This file has the only unsafe code of `live`. Between fork and exec, a child only makes system
//! calls.

use std::hint;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::Relaxed};
use std::thread::{self, JoinHandle};

use elfen_machine::affinity::Mask;
use elfen_machine::placement::{SHORTEST_SLICE_NS, set_policy, set_slice};
use nix::sys::signal::{self, SaFlags, SigAction, SigHandler, SigSet, Signal};
use nix::unistd::Pid;

/// The `prctl` of core scheduling (linux/prctl.h), which creates a new cookie for the calling
/// thread.
const PR_SCHED_CORE: i32 = 62;
const PR_SCHED_CORE_CREATE: u64 = 1;

/// The scheduling class and priority of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rank {
    Normal,
    /// SCHED_FIFO, which runs before all ordinary threads.
    Fifo(i32),
    Nice(i32),
    /// SCHED_OTHER with the shortest slice. Since Linux 6.12, a thread with a short slice preempts
    /// others earlier.
    ShortSlice,
    Idle,
    /// SCHED_IDLE with a core-scheduling cookie: the thread never shares a core with another
    /// program.
    OwnCore,
}

/// The CPUs and the priority of a child, and the signal that it gets when this process dies.
#[derive(Clone, Debug)]
pub(crate) struct ChildSetup {
    /// The CPUs of the child; empty for all CPUs of this process.
    pub(crate) cpus: Vec<u32>,
    pub(crate) rank: Rank,
    pub(crate) death_signal: i32,
    /// Whether the child reads lines from a pipe.
    pub(crate) takes_input: bool,
}

impl ChildSetup {
    pub(crate) fn on(cpu: u32, rank: Rank) -> Self {
        Self { cpus: vec![cpu], ..Self::anywhere(rank) }
    }

    pub(crate) fn anywhere(rank: Rank) -> Self {
        Self { cpus: Vec::new(), rank, death_signal: libc::SIGKILL, takes_input: false }
    }
}

/// Applies the setup to the command. The child gets its own process group, so that the terminal
/// sends its signals only to this process.
pub(crate) fn configure(command: &mut Command, setup: &ChildSetup) {
    let mask = Some(&setup.cpus).filter(|cpus| !cpus.is_empty());
    let mask = mask.map(|cpus| Mask::of(&cpus.iter().copied().collect()));
    let (rank, death_signal) = (setup.rank, setup.death_signal);
    let parent = Pid::this();
    command.process_group(0);
    // SAFETY: between fork and exec, the closure only makes system calls, on memory that it owns.
    unsafe {
        command.pre_exec(move || {
            nix::sys::prctl::set_pdeathsig(Signal::try_from(death_signal)?)?;
            // If the parent died before prctl, the child never gets the signal.
            if Pid::parent() != parent {
                return Err(io::ErrorKind::Interrupted.into());
            }
            if let Some(mask) = &mask {
                mask.impose_on(0)?;
            }
            set_rank(0, rank)
        });
    }
}

/// Sets the rank of a thread of this process; 0 means the calling thread.
pub(super) fn set_rank(thread: u32, rank: Rank) -> io::Result<()> {
    match rank {
        Rank::Normal => {}
        Rank::Fifo(priority) => set_policy(thread, libc::SCHED_FIFO, priority)?,
        Rank::Idle => set_policy(thread, libc::SCHED_IDLE, 0)?,
        Rank::OwnCore => {
            // SAFETY: this prctl takes only numbers, and affects only this thread.
            check_result(unsafe {
                libc::prctl(PR_SCHED_CORE, PR_SCHED_CORE_CREATE, 0_u64, 0_u64, 0_u64)
            })?;
            set_policy(thread, libc::SCHED_IDLE, 0)?;
        }
        Rank::Nice(nice) => {
            // SAFETY: setpriority takes only numbers.
            check_result(unsafe { libc::setpriority(libc::PRIO_PROCESS, thread, nice) })?;
        }
        Rank::ShortSlice => set_slice(thread, SHORTEST_SLICE_NS),
    }
    Ok(())
}

fn check_result(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Sends a signal to a process that this program started. If the process has ended, this does
/// nothing.
pub(crate) fn send(pid: u32, signal: i32) {
    let _gone = signal::kill(Pid::from_raw(pid.cast_signed()), Signal::try_from(signal).ok());
}

/// Threads of this process that spin at SCHED_IDLE, one on each of some CPUs.
#[derive(Debug)]
pub(super) struct Spinners {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<io::Result<()>>>,
}

impl Spinners {
    pub(super) fn start(cpus: impl Iterator<Item = u32>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let spin_on = |cpu: u32| {
            let stop = Arc::clone(&stop);
            thread::spawn(move || {
                // Without its rank, the thread would compete with the helpers.
                set_rank(0, Rank::Idle)?;
                Mask::of(&[cpu].into_iter().collect()).impose_on(0)?;
                while !stop.load(Relaxed) {
                    hint::spin_loop();
                }
                Ok(())
            })
        };
        Self { threads: cpus.map(spin_on).collect(), stop }
    }
}

impl Drop for Spinners {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            let _spun = thread.join();
        }
    }
}

/// Tests core scheduling in a child. Its cookie ends with the child.
pub(super) fn core_scheduling() -> io::Result<()> {
    let mut command = Command::new("true");
    configure(&mut command, &ChildSetup::anywhere(Rank::OwnCore));
    command.status().map(|_| ())
}

static TERMINATION_SIGNAL: AtomicI32 = AtomicI32::new(0);

extern "C" fn note_signal(signal: i32) {
    // Relaxed is enough: the flag is only polled, and no data is published through it.
    TERMINATION_SIGNAL.store(signal, Relaxed);
}

/// Installs the handlers. The first SIGINT, SIGTERM or SIGHUP sets a flag. The second has its
/// default effect.
pub(super) fn install_signal_handlers() -> io::Result<()> {
    let handler = SigHandler::Handler(note_signal);
    let action = SigAction::new(handler, SaFlags::SA_RESETHAND, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: `note_signal` only stores to an atomic.
        unsafe { signal::sigaction(signal, &action) }?;
    }
    Ok(())
}

/// Returns the signal that asked this process to end, if one did.
pub(super) fn termination_signal() -> Option<i32> {
    Some(TERMINATION_SIGNAL.load(Relaxed)).filter(|&signal| signal != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a child gets its CPUs and its rank, and does not start without them. Method: read
    /// /proc of a child on CPU 0 at SCHED_IDLE, and start a child on a CPU that does not exist.
    #[test]
    fn children_start_with_their_setup() {
        let output = |cpu: u32| {
            let mut command = Command::new("sh");
            let line = "grep Cpus_allowed_list /proc/self/status; cut -d' ' -f41 /proc/$$/stat";
            configure(command.args(["-c", line]), &ChildSetup::on(cpu, Rank::Idle));
            command.output()
        };
        let printed = output(0).unwrap().stdout;
        assert_eq!(String::from_utf8_lossy(&printed), "Cpus_allowed_list:\t0\n5\n");
        assert!(output(60_000).is_err());
    }
}
