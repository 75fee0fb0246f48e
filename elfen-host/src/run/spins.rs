//! Threads that wait inside of the kernel without sleeping, and how they come out of it.
//!
//! A process that reaps a thread or a child throws away what was remembered of it under /proc, and
//! where another thread is just doing that, the kernel looks again and again until that one has
//! ended. If that one is itself a thread that ends, on the same CPU, at SCHED_IDLE and beside a
//! session's group, then the looking leaves it no time: seen on Linux 6.18, for as long as the lane
//! was busy in between. The thread that ends is in no list any more. The one that looks is, and on
//! another CPU for some milliseconds it leaves the lane to what it waits for.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use elfen_rt::clock::monotonic_ns;

use super::hotplug::online;
use crate::affinity;
use crate::cpulist::CpuSet;
use crate::process::{Spent, descends, spent, threads_of};

/// A thread waits in the kernel, and took this much time in it since the last look.
const TICKS: u64 = 5;
const LOOK_EVERY_NS: u64 = 900_000_000;
const AWAY: Duration = Duration::from_millis(10);

/// Looks after the threads of this process, of which one reaps.
#[derive(Debug)]
pub(super) struct OwnSpins {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl OwnSpins {
    pub(super) fn watch(requests: Vec<u32>) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let ends = stop.clone();
        let watch = move || {
            let mut spins = Spins { are_own: true, ..Spins::default() };
            // Relaxed: the join orders everything else.
            while !ends.load(Relaxed) {
                spins.end(|| threads_of(std::process::id()), || requests.clone());
                thread::park_timeout(Duration::from_nanos(LOOK_EVERY_NS));
            }
        };
        let thread = thread::Builder::new().name("elfen-spins".into()).spawn(watch)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for OwnSpins {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It does not panic.
            let _ended = thread.join();
        }
    }
}

/// The threads of one look, compared with the last one.
#[derive(Debug, Default)]
pub(super) struct Spins {
    seen: HashMap<u32, Seen>,
    looked_at_ns: u64,
    /// These threads never work in the kernel for long, so one that the kernel calls runnable is
    /// suspected too: between two looks it yields now and then.
    are_own: bool,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    spent: Spent,
    /// How often it had really slept, once it is suspected.
    sleeps: Option<u64>,
}

impl Spins {
    /// Looks at these threads, if the last look is a second ago, and moves those that spin to
    /// another CPU and back.
    pub(super) fn end(
        &mut self,
        threads: impl FnOnce() -> Vec<u32>,
        requests: impl FnOnce() -> Vec<u32>,
    ) {
        let now_ns = monotonic_ns();
        if now_ns.saturating_sub(self.looked_at_ns) < LOOK_EVERY_NS {
            return;
        }
        self.looked_at_ns = now_ns;
        let looks = threads().into_iter().filter_map(|thread| Some((thread, spent(thread)?)));
        let spinning = self.spinning(looks, sleeps);
        if spinning.is_empty() {
            return;
        }
        let requests = requests().into_iter().collect();
        for thread in spinning {
            // A thread that ended meanwhile needs no help; nor can one be moved that a cpuset
            // keeps where it is, but such a one is in no session's group.
            let _moved = move_away(thread, &requests);
        }
    }

    /// Those that have spun since the look before the last one.
    fn spinning(
        &mut self,
        looks: impl Iterator<Item = (u32, Spent)>,
        sleeps: impl Fn(u32) -> Option<u64>,
    ) -> Vec<u32> {
        let mut spinning = Vec::new();
        let mut seen = HashMap::new();
        for (thread, spent) in looks {
            let before = self.seen.get(&thread);
            let waits = spent.sleeps || self.are_own;
            let suspect = before.is_some_and(|before| waits && is_suspect(before.spent, spent));
            let sleeps = if suspect { sleeps(thread) } else { None };
            if sleeps.is_some() && before.is_some_and(|before| before.sleeps == sleeps) {
                spinning.push(thread);
            }
            seen.insert(thread, Seen { spent, sleeps });
        }
        self.seen = seen;
        spinning
    }
}

fn is_suspect(before: Spent, now: Spent) -> bool {
    let system = now.system_ticks.saturating_sub(before.system_ticks);
    now.user_ticks == before.user_ticks && system >= TICKS
}

/// How often a thread gave up its CPU by itself.
fn sleeps(thread: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
    count.trim().parse().ok()
}

/// Moves a thread to a CPU that it is not on, and back: to one of the request lanes only where
/// there is no other.
fn move_away(thread: u32, requests: &CpuSet) -> io::Result<()> {
    // Its id may be a stranger's by now.
    let own = Path::new("/proc/self/task").join(thread.to_string());
    let is_ours = || match own.exists() || descends(thread, std::process::id()) {
        true => Ok(()),
        false => Err(io::Error::from_raw_os_error(libc::ESRCH)),
    };
    is_ours()?;
    let home = affinity::of(thread)?;
    let Some(online) = online() else { return Ok(()) };
    let elsewhere = online.cpus().without(&home);
    let spared = elsewhere.without(requests);
    let away = if spared.is_empty() { elsewhere } else { spared };
    affinity::set(thread, &away)?;
    thread::sleep(AWAY);
    is_ours()?;
    affinity::set(thread, &home)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::Command;

    const fn took(sleeps: bool, user_ticks: u64, system_ticks: u64) -> Spent {
        Spent { sleeps, user_ticks, system_ticks }
    }

    /// Goal: only a thread that spins is moved. Method: three looks each, of one that spins and of
    /// some that look alike.
    #[test]
    fn what_sleeps_without_sleeping_spins() {
        let spins_if = |are_own, looks: [Spent; 3], slept: [u64; 3]| {
            let mut spins = Spins { are_own, ..Spins::default() };
            let found = looks.into_iter().zip(slept).map(|(spent, slept)| {
                !spins.spinning([(7, spent)].into_iter(), |_| Some(slept)).is_empty()
            });
            found.collect::<Vec<_>>()
        };
        let spins = |looks, slept| spins_if(false, looks, slept);
        let asleep = [took(true, 3, 10), took(true, 3, 60), took(true, 3, 110)];
        assert_eq!(spins(asleep, [4; 3]), [false, false, true]);
        assert_eq!(spins(asleep, [4, 5, 6]), [false; 3], "it wakes and sleeps");
        let awake = [took(false, 3, 10), took(false, 3, 60), took(false, 3, 110)];
        assert_eq!(spins(awake, [4; 3]), [false; 3], "a long system call");
        assert_eq!(spins_if(true, awake, [4; 3]), [false, false, true], "we make none");
        let works = [took(true, 3, 10), took(true, 5, 60), took(true, 7, 110)];
        assert_eq!(spins(works, [4; 3]), [false; 3], "its program runs");
        let idles = [took(true, 3, 10), took(true, 3, 10), took(true, 3, 10)];
        assert_eq!(spins(idles, [4; 3]), [false; 3], "it sleeps");
    }

    #[test]
    fn a_thread_is_moved_and_comes_back() {
        if online().unwrap().cpus().iter().count() < 2 {
            let mut terminal = io::stderr();
            return writeln!(terminal, "skipped: a thread is moved: it takes two CPUs").unwrap();
        }
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let home: CpuSet = affinity::allowed().unwrap().iter().take(1).collect();
        affinity::set(child.id(), &home).unwrap();
        let mut spins = Spins::default();
        assert!(sleeps(child.id()).is_some());
        spins.end(|| vec![child.id()], || vec![0]);
        assert!(spins.seen.contains_key(&child.id()));
        move_away(child.id(), &home).unwrap();
        assert_eq!(affinity::of(child.id()).unwrap(), home);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(move_away(child.id(), &home).is_err());
    }
}
