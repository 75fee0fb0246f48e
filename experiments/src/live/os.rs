//! System calls that the standard library lacks: how a child starts, CPU time of reaped children,
//! and Ctrl-C.
//!
//! The only unsafe code of this crate. Between fork and exec, a child only makes system calls.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

use elfen_machine::affinity::Mask;

/// `prctl` of core scheduling (linux/prctl.h): a new cookie for the calling thread.
const PR_SCHED_CORE: i32 = 62;
const PR_SCHED_CORE_CREATE: u64 = 1;
/// The shortest slice that the kernel grants. Since Linux 6.12, a thread with a short slice
/// preempts others sooner.
const SHORT_SLICE_NS: u64 = 100_000;

/// The scheduling class and priority of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rank {
    Normal,
    /// SCHED_FIFO, which runs before all ordinary threads.
    Fifo(i32),
    Nice(i32),
    /// SCHED_OTHER with the shortest slice.
    ShortSlice,
    Idle,
    /// SCHED_IDLE, and a core-scheduling cookie: never on a core with another program.
    OwnCore,
}

/// The CPUs and the priority of a child, and the signal that it gets when this process dies.
#[derive(Clone, Debug)]
pub(crate) struct ChildSetup {
    /// Empty: all CPUs of this process.
    pub(crate) cpus: Vec<u32>,
    pub(crate) rank: Rank,
    pub(crate) death_signal: i32,
}

impl ChildSetup {
    pub(crate) fn on(cpu: u32, rank: Rank) -> Self {
        Self { cpus: vec![cpu], ..Self::anywhere(rank) }
    }

    pub(crate) fn anywhere(rank: Rank) -> Self {
        Self { cpus: Vec::new(), rank, death_signal: libc::SIGKILL }
    }
}

/// Applies the setup to the command. The child gets its own process group: only this process
/// handles the signals of the terminal.
pub(super) fn configure(command: &mut Command, setup: &ChildSetup) {
    let mask = Some(&setup.cpus).filter(|cpus| !cpus.is_empty());
    let mask = mask.map(|cpus| Mask::of(&cpus.iter().copied().collect()));
    let (rank, death_signal) = (setup.rank, setup.death_signal);
    let parent = std::process::id();
    command.process_group(0);
    // SAFETY: between fork and exec the closure only makes system calls, on memory that it owns.
    unsafe {
        command.pre_exec(move || {
            die_with_parent(parent, death_signal)?;
            if let Some(mask) = &mask {
                mask.impose_on(0)?;
            }
            set_rank(0, rank)
        });
    }
}

/// Sets the rank of one of our threads; 0 is the caller.
pub(super) fn set_rank(thread: i32, rank: Rank) -> io::Result<()> {
    match rank {
        Rank::Normal => Ok(()),
        Rank::Fifo(priority) => set_scheduler(thread, libc::SCHED_FIFO, priority),
        Rank::Idle => set_scheduler(thread, libc::SCHED_IDLE, 0),
        Rank::OwnCore => {
            new_cookie()?;
            set_scheduler(thread, libc::SCHED_IDLE, 0)
        }
        Rank::Nice(nice) => {
            let who = u32::try_from(thread).unwrap_or(0);
            // SAFETY: setpriority takes numbers.
            check_result(unsafe { libc::setpriority(libc::PRIO_PROCESS, who, nice) }.into())
        }
        Rank::ShortSlice => shorten_slice(thread),
    }
}

/// Sends a signal to a process that we started.
pub(crate) fn send(pid: u32, signal: i32) {
    let Ok(pid) = i32::try_from(pid) else { return };
    // SAFETY: kill takes numbers. A process that is gone needs no signal.
    unsafe { libc::kill(pid, signal) };
}

/// Sends a signal to the process group of a child.
pub(super) fn send_group(leader: u32, signal: i32) {
    let Ok(leader) = i32::try_from(leader) else { return };
    if leader > 1 {
        // SAFETY: kill takes numbers; the leader of a group of ours is a child of ours.
        unsafe { libc::kill(-leader, signal) };
    }
}

/// CPU time of all children that this process has reaped, and of the descendants that they reaped.
pub(super) fn reaped_cpu_ns() -> u64 {
    // SAFETY: all zeros is a valid rusage.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one rusage, and the call only fails on a bad address.
    unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage) };
    let us = |time: libc::timeval| {
        let (seconds, us) = (u64::try_from(time.tv_sec), u64::try_from(time.tv_usec));
        seconds.unwrap_or(0) * 1_000_000 + us.unwrap_or(0)
    };
    (us(usage.ru_utime) + us(usage.ru_stime)) * 1_000
}

/// The ticks of /proc per second.
pub(super) fn ticks_per_second() -> u64 {
    // SAFETY: sysconf takes a number.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    u64::try_from(ticks).ok().filter(|&ticks| ticks > 0).unwrap_or(100)
}

/// Tries core scheduling in a child, whose cookie ends with it.
pub(super) fn core_scheduling() -> io::Result<()> {
    let mut command = Command::new("true");
    configure(&mut command, &ChildSetup::anywhere(Rank::OwnCore));
    command.status().map(|_| ())
}

static TERMINATION_SIGNAL: AtomicI32 = AtomicI32::new(0);

extern "C" fn note_signal(signal: i32) {
    // Relaxed: a flag that is polled; nothing is published through it.
    TERMINATION_SIGNAL.store(signal, Relaxed);
}

/// From now on, the first SIGINT, SIGTERM or SIGHUP sets a flag. The second has its default effect.
pub(super) fn install_signal_handlers() -> io::Result<()> {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: all zeros is a valid sigaction.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = note_signal as *const () as usize;
        action.sa_flags = libc::SA_RESETHAND;
        // SAFETY: `action` is live, and `note` only stores to an atomic.
        check_result(unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) }.into())?;
    }
    Ok(())
}

/// The signal that asked this process to end, if there was one.
pub(super) fn termination_signal() -> Option<i32> {
    Some(TERMINATION_SIGNAL.load(Relaxed)).filter(|&signal| signal != 0)
}

fn die_with_parent(parent: u32, death_signal: i32) -> io::Result<()> {
    let signal = u64::from(death_signal.unsigned_abs());
    // SAFETY: prctl takes numbers here.
    check_result(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, signal, 0, 0, 0) }.into())?;
    // SAFETY: getppid takes nothing.
    let now = unsafe { libc::getppid() };
    // The parent died before prctl: then no signal comes.
    if u32::try_from(now) == Ok(parent) { Ok(()) } else { Err(io::ErrorKind::Interrupted.into()) }
}

fn set_scheduler(thread: i32, policy: i32, priority: i32) -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: `parameters` is a live sched_param.
    check_result(unsafe {
        libc::syscall(libc::SYS_sched_setscheduler, thread, policy, &parameters)
    })
}

fn new_cookie() -> io::Result<()> {
    // SAFETY: prctl takes numbers here, and only affects this thread.
    check_result(
        unsafe { libc::prctl(PR_SCHED_CORE, PR_SCHED_CORE_CREATE, 0_u64, 0_u64, 0_u64) }.into(),
    )
}

/// The first 48 bytes of `struct sched_attr` (linux/sched/types.h, SCHED_ATTR_SIZE_VER0).
#[repr(C)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime_ns: u64,
    deadline_ns: u64,
    period_ns: u64,
}

fn shorten_slice(thread: i32) -> io::Result<()> {
    let attributes = SchedAttr {
        size: 48,
        policy: 0,
        flags: 0,
        nice: 0,
        priority: 0,
        runtime_ns: SHORT_SLICE_NS,
        deadline_ns: 0,
        period_ns: 0,
    };
    // SAFETY: `attributes` is live, and has its own size in the first field.
    check_result(unsafe { libc::syscall(libc::SYS_sched_setattr, thread, &attributes, 0) })
}

fn check_result(result: i64) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a child has its CPUs and its rank. Method: /proc of a child on CPU 0 at SCHED_IDLE.
    #[test]
    fn children_start_with_their_setup() {
        let mut command = Command::new("sh");
        command
            .args(["-c", "grep Cpus_allowed_list /proc/self/status; cut -d' ' -f41 /proc/$$/stat"]);
        let setup = ChildSetup { cpus: vec![0], rank: Rank::Idle, death_signal: libc::SIGKILL };
        configure(&mut command, &setup);
        let output = command.output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "Cpus_allowed_list:\t0\n5\n");
    }

    /// Goal: a child does not start if its setup fails. Method: a CPU that no machine has.
    #[test]
    fn a_missing_cpu_is_an_error() {
        let mut command = Command::new("true");
        let setup =
            ChildSetup { cpus: vec![60_000], rank: Rank::Normal, death_signal: libc::SIGKILL };
        configure(&mut command, &setup);
        assert!(command.status().is_err());
    }
}
