//! Where the batch's threads belong: on the batch lanes, at SCHED_IDLE, with long slices.
//!
//! All three are inherited, so only programs that change their own leave their place, and are put
//! back.
//!
//! Slices: to the scheduler a batch that may not run beside its guard is owed 3 parts in 1027 of
//! the lane, which it gets as soon as it has to choose anew, and it has to when the slice is over
//! of whoever runs, or that of any other on this CPU that is shorter. So both have longer ones than
//! most requests last. The batch's are no longer than that: threads that wait for each other
//! without sleeping, as in a virtual machine, would wait for as long. Kernels before 6.12 know of
//! no slice of one's own.

use std::fs;
use std::io;

use crate::affinity::{self, Mask};
use crate::cpulist::CpuSet;

/// The longest that there is.
const GUARD_SLICE_NS: u64 = 100_000_000;
const BATCH_SLICE_NS: u64 = 10_000_000;
/// The shortest: with it in the queue, turns are as short as the kernel makes them.
const SHORTEST_SLICE_NS: u64 = 100_000;

/// Where the scheduler groups tasks by session, SCHED_IDLE ranks a thread below others of its own
/// session alone. A batch process with a session of its own, whose group is as heavy as the
/// guard's, is made as light as a group can be.
pub(crate) fn lighten_session(process: u32) {
    let Ok(pid) = i32::try_from(process) else { return };
    // SAFETY: takes a number.
    let theirs = unsafe { libc::getsid(pid) };
    // SAFETY: takes a number; 0 is the caller.
    let ours = unsafe { libc::getsid(0) };
    if theirs != ours {
        // Absent without autogroups; refused within a tenth of a second of the last time:
        // the next look tries again.
        let _lightened = fs::write(format!("/proc/{process}/autogroup"), "19");
    }
}

/// Makes the calling thread an ordinary one, of whatever class it was: a real-time one that spins
/// lets nobody else run on its CPU, not even who would tell it to end.
pub fn be_ordinary() -> io::Result<()> {
    set_policy(0, libc::SCHED_OTHER)
}

/// Gives the calling thread the rank of a guard: above every thread at SCHED_IDLE, and beside
/// ordinary ones. It is inherited like everything else: `nice -n 19 elfen run` would leave the
/// batch a sixth of a lane that its guard holds, and SCHED_IDLE a half.
pub(super) fn rank_first() -> io::Result<()> {
    be_ordinary()?;
    // SAFETY: takes nothing and cannot fail.
    let thread = unsafe { libc::gettid() }.unsigned_abs();
    // SAFETY: takes numbers.
    match unsafe { libc::setpriority(libc::PRIO_PROCESS, thread, 0) } {
        0 => {
            set_slice(0, GUARD_SLICE_NS);
            Ok(())
        }
        _ => Err(io::Error::last_os_error()),
    }
}

/// Gives the calling thread a rank above all ordinary ones, for a moment in which nothing else may
/// run on its lane.
pub(super) fn rank_above_all() -> io::Result<()> {
    let lowest = libc::sched_param { sched_priority: 1 };
    // SAFETY: `lowest` is a live sched_param.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const lowest) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Keeps the calling thread, and the threads and processes that it starts, off the request lanes:
/// looking after a batch is work, too.
pub(crate) fn leave(requests: &CpuSet) -> io::Result<()> {
    leave_from(&affinity::allowed()?, requests)
}

/// The same, of a thread that may run on `all`, and may have left others of them before.
pub(crate) fn leave_from(all: &CpuSet, requests: &CpuSet) -> io::Result<()> {
    let rest = all.without(requests);
    // Where there is nothing else, it stays.
    if rest.is_empty() { Ok(()) } else { Mask::of(&rest).impose_on(0) }
}

/// A batch thread's place: the batch lanes, at the lowest priority there is.
#[derive(Debug)]
pub struct Place {
    mask: Mask,
}

impl Place {
    pub fn new(lanes: &CpuSet) -> Self {
        Self { mask: Mask::of(lanes) }
    }

    /// Puts a thread there; 0 is the caller. Makes system calls alone, so that it can
    /// run between fork and exec.
    pub fn take(&self, thread: u32) -> io::Result<()> {
        self.mask.impose_on(thread)?;
        set_slice(thread, BATCH_SLICE_NS);
        set_policy(thread, libc::SCHED_IDLE)
    }

    /// Puts the calling thread below ordinary ones, and above the batch: what it has to do comes at
    /// once, and takes next to nothing of a lane that a guard holds.
    pub(crate) fn lower() -> io::Result<()> {
        // SAFETY: takes nothing and cannot fail.
        let thread = unsafe { libc::gettid() }.unsigned_abs();
        // SAFETY: takes numbers.
        match unsafe { libc::setpriority(libc::PRIO_PROCESS, thread, 19) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Gives a thread a share of its lane beside the guard. Refused without the
    /// right to raise priorities.
    pub(crate) fn raise(thread: u32) -> io::Result<()> {
        set_policy(thread, libc::SCHED_OTHER)?;
        set_slice(thread, SHORTEST_SLICE_NS);
        Ok(())
    }

    /// Whether a thread has left its place; `None` if it ended.
    pub(crate) fn is_left_by(&self, thread: u32) -> Option<bool> {
        let outside = !Mask::read(thread).ok()?.is_within(&self.mask);
        // SAFETY: takes a number.
        let policy = unsafe { libc::syscall(libc::SYS_sched_getscheduler, thread) };
        (policy >= 0).then_some(outside || policy != i64::from(libc::SCHED_IDLE))
    }
}

/// `struct sched_attr` as it was in the first kernel that had it.
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

/// Gives an ordinary thread slices of its own, which it keeps when its class changes. System calls
/// alone. Where that is refused (a thread at SCHED_IDLE may not be made ordinary by everybody), its
/// slices stay as they are: the [pacer](super::pacer) ends what comes of that.
fn set_slice(thread: u32, slice_ns: u64) {
    // SAFETY: takes numbers. -1 is a nice value too, and what a thread gets that is gone.
    let nice = unsafe { libc::getpriority(libc::PRIO_PROCESS, thread) };
    let attributes =
        Attributes { size: ATTRIBUTES_BYTES, nice, runtime_ns: slice_ns, ..Attributes::default() };
    // SAFETY: `attributes` is live and says its size.
    let _kept = unsafe { libc::syscall(libc::SYS_sched_setattr, thread, &raw const attributes, 0) };
}

/// One system call, so that it can be made between fork and exec.
fn set_policy(thread: u32, policy: i32) -> io::Result<()> {
    let none = libc::sched_param { sched_priority: 0 };
    // SAFETY: `none` is a live sched_param.
    let set = unsafe { libc::syscall(libc::SYS_sched_setscheduler, thread, policy, &none) };
    if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::below;
    use std::io::Write;
    use std::process::Command;

    /// Goal: a program that leaves its place is found and put back. Method: a child that
    /// starts elsewhere than asked.
    #[test]
    fn who_leaves_is_put_back() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let own = std::process::id();
        while !below(own).contains(&child.id()) {
            std::thread::yield_now();
        }
        let place = Place::new(&affinity::allowed().unwrap());
        assert_eq!(place.is_left_by(child.id()), Some(true), "not at SCHED_IDLE");
        place.take(child.id()).unwrap();
        assert_eq!(place.is_left_by(child.id()), Some(false));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(place.is_left_by(child.id()), None);
    }

    /// As the kernel says it; before 6.12 it says 0 of every ordinary thread.
    fn slice_ns(thread: u32) -> u64 {
        let mut read = Attributes::default();
        // SAFETY: `read` is live and as large as is said.
        let done = unsafe {
            libc::syscall(libc::SYS_sched_getattr, thread, &raw mut read, ATTRIBUTES_BYTES, 0)
        };
        assert_eq!(done, 0);
        read.runtime_ns
    }

    /// Goal: neither guard nor batch is interrupted by the end of a slice, and a dying batch gets
    /// turns at once. Method: what the kernel says of threads in each place, and of what they
    /// start.
    #[test]
    fn slices_are_longer_than_requests() {
        if slice_ns(0) == 0 {
            let why = "skipped: slices_are_longer_than_requests: it takes Linux 6.12";
            return writeln!(io::stderr(), "{why}").unwrap();
        }
        let place = Place::new(&affinity::allowed().unwrap());
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        // SAFETY: takes numbers.
        assert_eq!(unsafe { libc::setpriority(libc::PRIO_PROCESS, child.id(), 3) }, 0);
        place.take(child.id()).unwrap();
        assert_eq!(slice_ns(child.id()), BATCH_SLICE_NS, "kept at SCHED_IDLE");
        // SAFETY: takes numbers.
        assert_eq!(unsafe { libc::getpriority(libc::PRIO_PROCESS, child.id()) }, 3);
        if Place::raise(child.id()).is_ok() {
            assert_eq!(slice_ns(child.id()), SHORTEST_SLICE_NS);
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let ranked = std::thread::spawn(|| {
            rank_first().unwrap();
            (slice_ns(0), std::thread::spawn(|| slice_ns(0)).join().unwrap())
        });
        assert_eq!(ranked.join().unwrap(), (GUARD_SLICE_NS, GUARD_SLICE_NS), "inherited");
    }
}
