//! What the standard library has no call for: how a child starts, what it leaves with us, and
//! Ctrl-C.
//!
//! The only unsafe code of this crate. Between fork and exec a child makes system calls alone.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

use elfen_machine::affinity::Mask;

/// `prctl` of core scheduling (linux/prctl.h): a new cookie for the calling thread.
const PR_SCHED_CORE: i32 = 62;
const PR_SCHED_CORE_CREATE: u64 = 1;
/// The lowest slice that the kernel grants; a thread with a short one preempts others sooner, since
/// Linux 6.12.
const SHORT_SLICE_NS: u64 = 100_000;

/// How the scheduler ranks a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rank {
    Normal,
    /// SCHED_FIFO: before everything else that is not.
    Fifo(i32),
    Nice(i32),
    /// SCHED_OTHER with the shortest slice.
    ShortSlice,
    Idle,
    /// SCHED_IDLE, and never on a core with another program.
    OwnCore,
}

/// Where and how a child runs, and the signal that it gets when we die.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// Empty leaves it to the kernel.
    pub(crate) cpus: Vec<u32>,
    pub(crate) rank: Rank,
    pub(crate) last_word: i32,
}

impl Place {
    pub(crate) fn on(cpu: u32, rank: Rank) -> Self {
        Self { cpus: vec![cpu], ..Self::anywhere(rank) }
    }

    pub(crate) fn anywhere(rank: Rank) -> Self {
        Self { cpus: Vec::new(), rank, last_word: libc::SIGKILL }
    }
}

/// Has the command start in its place, in a process group of its own: the terminal's signals are
/// for us to act upon.
pub(super) fn prepare(command: &mut Command, place: &Place) {
    let mask = Some(&place.cpus).filter(|cpus| !cpus.is_empty());
    let mask = mask.map(|cpus| Mask::of(&cpus.iter().copied().collect()));
    let (rank, last_word) = (place.rank, place.last_word);
    let parent = std::process::id();
    command.process_group(0);
    // SAFETY: the closure makes system calls alone, on memory that it owns.
    unsafe {
        command.pre_exec(move || {
            leave_with(parent, last_word)?;
            if let Some(mask) = &mask {
                mask.impose_on(0)?;
            }
            take_rank(0, rank)
        });
    }
}

/// Changes the rank of a thread of ours; 0 is the caller.
pub(super) fn take_rank(thread: i32, rank: Rank) -> io::Result<()> {
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
            done(unsafe { libc::setpriority(libc::PRIO_PROCESS, who, nice) }.into())
        }
        Rank::ShortSlice => shorten_slice(thread),
    }
}

/// Sends a signal to a process that we started.
pub(crate) fn send(pid: u32, signal: i32) {
    let Ok(pid) = i32::try_from(pid) else { return };
    // SAFETY: kill takes numbers. A process that is gone already needs none.
    unsafe { libc::kill(pid, signal) };
}

/// The same to a process group that one of them leads.
pub(super) fn send_group(leader: u32, signal: i32) {
    let Ok(leader) = i32::try_from(leader) else { return };
    if leader > 1 {
        // SAFETY: kill takes numbers; the leader of a group of ours is a child of ours.
        unsafe { libc::kill(-leader, signal) };
    }
}

/// CPU time of all children that we have waited for, and of all that they had waited for.
pub(super) fn waited_for_ns() -> u64 {
    // SAFETY: all zeros is a valid rusage.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one rusage; the call fails on a bad address alone.
    unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage) };
    let us = |time: libc::timeval| {
        let (seconds, us) = (u64::try_from(time.tv_sec), u64::try_from(time.tv_usec));
        seconds.unwrap_or(0) * 1_000_000 + us.unwrap_or(0)
    };
    (us(usage.ru_utime) + us(usage.ru_stime)) * 1_000
}

/// How many ticks of /proc make a second.
pub(super) fn ticks_a_second() -> u64 {
    // SAFETY: sysconf takes a number.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    u64::try_from(ticks).ok().filter(|&ticks| ticks > 0).unwrap_or(100)
}

/// Whether core scheduling can be asked for here; tried in a child, which ends with its cookie.
pub(super) fn core_scheduling() -> io::Result<()> {
    let mut command = Command::new("true");
    prepare(&mut command, &Place::anywhere(Rank::OwnCore));
    command.status().map(|_| ())
}

static ASKED: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(signal: i32) {
    // Relaxed: a flag that is polled; nothing is published through it.
    ASKED.store(signal, Relaxed);
}

/// From now on Ctrl-C, SIGTERM and SIGHUP set a flag; a second one ends us as usual.
pub(super) fn heed_signals() -> io::Result<()> {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: all zeros is a valid sigaction.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = note as *const () as usize;
        action.sa_flags = libc::SA_RESETHAND;
        // SAFETY: `action` is live, and `note` only stores to an atomic.
        done(unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) }.into())?;
    }
    Ok(())
}

/// The signal that asked us to end, if one did.
pub(super) fn asked_to_end() -> Option<i32> {
    Some(ASKED.load(Relaxed)).filter(|&signal| signal != 0)
}

fn leave_with(parent: u32, last_word: i32) -> io::Result<()> {
    let signal = u64::from(last_word.unsigned_abs());
    // SAFETY: prctl takes numbers here.
    done(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, signal, 0, 0, 0) }.into())?;
    // SAFETY: getppid takes nothing.
    let now = unsafe { libc::getppid() };
    // It died before we asked to be told.
    if u32::try_from(now) == Ok(parent) { Ok(()) } else { Err(io::ErrorKind::Interrupted.into()) }
}

fn set_scheduler(thread: i32, policy: i32, priority: i32) -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: `parameters` is a live sched_param.
    done(unsafe { libc::syscall(libc::SYS_sched_setscheduler, thread, policy, &parameters) })
}

fn new_cookie() -> io::Result<()> {
    // SAFETY: prctl takes numbers here: this thread, and it alone.
    done(unsafe { libc::prctl(PR_SCHED_CORE, PR_SCHED_CORE_CREATE, 0_u64, 0_u64, 0_u64) }.into())
}

/// `struct sched_attr` as far as the slice (linux/sched/types.h, SCHED_ATTR_SIZE_VER0).
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
    // SAFETY: `attributes` is live and says its size.
    done(unsafe { libc::syscall(libc::SYS_sched_setattr, thread, &attributes, 0) })
}

fn done(result: i64) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a child is where it was put, at the rank it was given. Method: /proc of a child on CPU
    /// 0 at SCHED_IDLE.
    #[test]
    fn children_start_in_their_place() {
        let mut command = Command::new("sh");
        command
            .args(["-c", "grep Cpus_allowed_list /proc/self/status; cut -d' ' -f41 /proc/$$/stat"]);
        let place = Place { cpus: vec![0], rank: Rank::Idle, last_word: libc::SIGKILL };
        prepare(&mut command, &place);
        let output = command.output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "Cpus_allowed_list:\t0\n5\n");
    }

    /// Goal: a program that cannot start in its place does not start at all. Method: a CPU that no
    /// machine has.
    #[test]
    fn a_place_that_does_not_exist_is_an_error() {
        let mut command = Command::new("true");
        let place = Place { cpus: vec![60_000], rank: Rank::Normal, last_word: libc::SIGKILL };
        prepare(&mut command, &place);
        assert!(command.status().is_err());
    }
}
