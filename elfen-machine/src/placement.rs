//! Places batch threads: on the batch lanes, at SCHED_IDLE, with long slices.
//!
//! Children inherit all three. Only programs that change their own affinity or class leave the
//! placement, and the supervisor restores it.
//!
//! Why slices matter: next to a guard that occupies the lane, the scheduler owes the batch 3 parts
//! in 1027. The batch gets them when the scheduler picks the next thread. It must do so when the
//! slice of the current thread, or any shorter slice on this CPU, ends. So guard and batch have
//! slices longer than most requests. The batch's slices are not longer than that. Some threads spin
//! until another thread runs, as in virtual machines, and would spin for a whole slice. Kernels
//! before 6.12 ignore the length.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::thread;

use crate::affinity::{self, Mask};
use crate::cgroup::{CgroupPath, Error, Group, Hierarchies};
use crate::cpulist::CpuSet;
use crate::fence::rank::parting;

/// The longest slice that the kernel allows.
const GUARD_SLICE_NS: u64 = 100_000_000;
const BATCH_SLICE_NS: u64 = 10_000_000;
/// The shortest slice that the kernel allows. If a queued thread has it, threads alternate at the
/// highest rate.
pub const SHORTEST_SLICE_NS: u64 = 100_000;

/// Gives a batch process the least weight if it has a session of its own.
///
/// If autogroups are enabled, the scheduler groups tasks by session. SCHED_IDLE then ranks a thread
/// below other threads of its session only, and each session has the weight of the guard's session.
pub fn lower_session_weight(process: u32) {
    let Ok(pid) = i32::try_from(process) else { return };
    // SAFETY: getsid takes a number.
    let theirs = unsafe { libc::getsid(pid) };
    // SAFETY: getsid takes a number; 0 is the caller.
    let ours = unsafe { libc::getsid(0) };
    if theirs != ours {
        // The file exists only with autogroups. The kernel refuses a second write within 0.1 s; the
        // supervisor's next round writes again.
        let _lightened = fs::write(format!("/proc/{process}/autogroup"), "19");
    }
}

/// Makes the calling thread an ordinary one, whatever class it had. A real-time thread that spins
/// keeps every other thread off its CPU, even a thread that would stop it.
pub fn use_ordinary_class() -> io::Result<()> {
    set_policy(0, libc::SCHED_OTHER, 0)
}

/// Gives the calling thread the rank of a guard: above all threads at SCHED_IDLE, equal to ordinary
/// threads.
///
/// Nice values and classes are inherited. So without this, `nice -n 19 elfen run` would leave the
/// batch a sixth of an occupied lane. A guard at SCHED_IDLE would leave it half.
pub fn take_guard_rank() -> io::Result<()> {
    use_ordinary_class()?;
    set_own_nice(0)?;
    set_slice(0, GUARD_SLICE_NS);
    Ok(())
}

/// Gives the calling thread a rank above all ordinary threads, for a moment in which nothing else
/// may run on its lane.
pub fn take_realtime_rank() -> io::Result<()> {
    set_policy(0, libc::SCHED_FIFO, 1)
}

/// Whether this process may give guards their rank: see [`take_guard_rank`].
pub fn may_take_guard_rank() -> io::Result<()> {
    // In a new thread, so that the rank of all other threads of this process stays the same.
    thread::spawn(take_guard_rank).join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
}

/// Whether guards may take the rank that patching a program on several lanes requires.
pub fn may_take_realtime_rank() -> io::Result<()> {
    let taken = thread::spawn(take_realtime_rank).join();
    taken.unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
}

/// Keeps the calling thread off the request lanes, and with it all threads and processes that it
/// starts later. The CPU time of supervision would slow down requests.
pub fn avoid_lanes(requests: &CpuSet) -> io::Result<()> {
    avoid_lanes_within(&affinity::allowed()?, requests)
}

/// Keeps the calling thread off the request lanes. `all` are the CPUs that the process may use; the
/// thread's own mask may already be smaller.
pub fn avoid_lanes_within(all: &CpuSet, requests: &CpuSet) -> io::Result<()> {
    let rest = all.without(requests);
    // If no other CPU is left, the thread stays on the request lanes.
    if rest.is_empty() { Ok(()) } else { Mask::of(&rest).impose_on(0) }
}

/// The placement of batch threads: on the batch lanes, at the lowest priority.
#[derive(Debug)]
pub struct Placement {
    mask: Mask,
}

impl Placement {
    pub fn new(lanes: &CpuSet) -> Self {
        Self { mask: Mask::of(lanes) }
    }

    /// Places a thread; 0 means the caller. Makes only system calls, so it may be called between
    /// fork and exec.
    pub fn apply(&self, thread: u32) -> io::Result<()> {
        self.mask.impose_on(thread)?;
        set_slice(thread, BATCH_SLICE_NS);
        set_policy(thread, libc::SCHED_IDLE, 0)
    }

    /// Ranks the calling thread below ordinary threads and above the batch. It then runs soon, and
    /// takes almost no time from a guard on the same lane.
    pub fn lower_own_priority() -> io::Result<()> {
        set_own_nice(19)
    }

    /// Gives a batch thread a share of its lane next to the guard. Fails without the right to raise
    /// priorities.
    pub fn raise(thread: u32) -> io::Result<()> {
        set_policy(thread, libc::SCHED_OTHER, 0)?;
        set_slice(thread, SHORTEST_SLICE_NS);
        Ok(())
    }

    /// Whether a thread no longer has its placement; `None` if the thread has ended.
    pub fn is_left_by(&self, thread: u32) -> Option<bool> {
        let outside = !Mask::read(thread).ok()?.is_within(&self.mask);
        // SAFETY: sched_getscheduler takes a number.
        let policy = unsafe { libc::syscall(libc::SYS_sched_getscheduler, thread) };
        (policy >= 0).then_some(outside || policy != i64::from(libc::SCHED_IDLE))
    }
}

/// `struct sched_attr`, as in the first kernel that had it.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime_ns: u64,
    deadline_ns: u64,
    period_ns: u64,
}

const ATTRIBUTES_BYTES: u32 = 48;
const _: () = assert!(size_of::<Attributes>() == ATTRIBUTES_BYTES as usize);

/// Sets the length of an ordinary thread's slices. The length stays when the thread's class
/// changes. Makes only system calls. The kernel may refuse: an unprivileged user may not make a
/// thread at SCHED_IDLE ordinary. Then the slices stay as they are, and the [pacer](super::pacer)
/// limits the consequences.
pub fn set_slice(thread: u32, slice_ns: u64) {
    // SAFETY: getpriority takes numbers. The result -1 is either a nice value or means that the
    // thread has ended; both are harmless here.
    let nice = unsafe { libc::getpriority(libc::PRIO_PROCESS, thread) };
    let attributes =
        Attributes { size: ATTRIBUTES_BYTES, nice, runtime_ns: slice_ns, ..Attributes::default() };
    // SAFETY: `attributes` is live, and its size field is correct.
    let _kept = unsafe { libc::syscall(libc::SYS_sched_setattr, thread, &raw const attributes, 0) };
}

/// Sets the nice value of the calling thread.
fn set_own_nice(nice: i32) -> io::Result<()> {
    // SAFETY: gettid takes nothing and cannot fail.
    let thread = unsafe { libc::gettid() }.unsigned_abs();
    // SAFETY: setpriority takes numbers.
    let set = unsafe { libc::setpriority(libc::PRIO_PROCESS, thread, nice) };
    if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Sets the class of a thread, and its priority in a real-time class; 0 means the caller. Makes one
/// system call, so it may be called between fork and exec.
pub fn set_policy(thread: u32, policy: i32, priority: i32) -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: `parameters` is a live sched_param.
    let set = unsafe { libc::syscall(libc::SYS_sched_setscheduler, thread, policy, &parameters) };
    if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Finds batch processes that no longer rank below their guards.
///
/// SCHED_IDLE ranks a thread below other threads of its own cgroup only. A container starts cgroups
/// of its own. Such a process shares an occupied lane with the guard by the weights of their
/// cgroups, whatever its class is. A run cannot change that, but a fence can. So the supervisor
/// reports each such process once.
#[derive(Debug)]
pub struct UnrankedProcesses {
    /// The cgroup of the guards; `None` if the kernel does not rank cgroups.
    home: Option<(Hierarchies, CgroupPath)>,
    known: BTreeSet<u32>,
}

impl UnrankedProcesses {
    pub fn next_to_this_process() -> Self {
        let home = Hierarchies::read().and_then(|hierarchies| {
            let home = hierarchies.cgroup_of(std::process::id())?;
            Ok((hierarchies, home))
        });
        Self { home: home.ok(), known: BTreeSet::new() }
    }

    /// The processes that do not rank below their guard and were not found by the last call.
    pub fn find_new(&mut self, processes: &[u32]) -> Vec<u32> {
        let Some((hierarchies, home)) = &self.home else { return Vec::new() };
        let is_unranked = |process: u32| -> Result<bool, Error> {
            let path = hierarchies.cgroup_of(process)?;
            let Some(child) = parting(home, &path).to_fence else { return Ok(false) };
            Ok(!Group::new(hierarchies, child).rank()?.idle)
        };
        // A process that has ended is not in any cgroup.
        let mut unranked: BTreeSet<u32> = processes.iter().copied().collect();
        unranked.retain(|process| is_unranked(*process).unwrap_or(false));
        let new = unranked.difference(&self.known).copied().collect();
        self.known = unranked;
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::below;
    use std::process::Command;

    /// Goal: a program that leaves its placement is found and placed again. Method: a child that
    /// starts without placement.
    #[test]
    fn a_thread_that_leaves_its_placement_is_put_back() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let own = std::process::id();
        while !below(own).contains(&child.id()) {
            thread::yield_now();
        }
        let placement = Placement::new(&affinity::allowed().unwrap());
        assert_eq!(placement.is_left_by(child.id()), Some(true), "not at SCHED_IDLE");
        placement.apply(child.id()).unwrap();
        assert_eq!(placement.is_left_by(child.id()), Some(false));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(placement.is_left_by(child.id()), None);
    }

    /// A thread's slice, as the kernel reports it. Before 6.12 it reports 0 for every ordinary
    /// thread.
    fn slice_ns(thread: u32) -> u64 {
        let mut read = Attributes::default();
        // SAFETY: `read` is live and has the size that is passed.
        let done = unsafe {
            libc::syscall(libc::SYS_sched_getattr, thread, &raw mut read, ATTRIBUTES_BYTES, 0)
        };
        assert_eq!(done, 0);
        read.runtime_ns
    }

    /// Goal: no slice of guard or batch ends during a typical request, and a batch that has to exit
    /// gets short slices. Method: read the slices of threads in each placement, and of the threads
    /// that they start.
    #[test]
    #[ignore = "needs Linux 6.12"]
    fn slices_are_longer_than_requests() {
        assert_ne!(slice_ns(0), 0, "needs Linux 6.12, which has slices");
        let placement = Placement::new(&affinity::allowed().unwrap());
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        // SAFETY: setpriority takes numbers.
        assert_eq!(unsafe { libc::setpriority(libc::PRIO_PROCESS, child.id(), 3) }, 0);
        placement.apply(child.id()).unwrap();
        assert_eq!(slice_ns(child.id()), BATCH_SLICE_NS, "kept at SCHED_IDLE");
        // SAFETY: getpriority takes numbers.
        assert_eq!(unsafe { libc::getpriority(libc::PRIO_PROCESS, child.id()) }, 3);
        if Placement::raise(child.id()).is_ok() {
            assert_eq!(slice_ns(child.id()), SHORTEST_SLICE_NS);
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let ranked = thread::spawn(|| {
            take_guard_rank().unwrap();
            (slice_ns(0), thread::spawn(|| slice_ns(0)).join().unwrap())
        });
        assert_eq!(ranked.join().unwrap(), (GUARD_SLICE_NS, GUARD_SLICE_NS), "inherited");
    }
}
