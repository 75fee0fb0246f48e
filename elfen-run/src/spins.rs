//! Threads that spin inside the kernel, and how to end that.
//!
//! A process that reaps a thread or a child discards the /proc entries of that task. While another
//! thread does the same, the kernel retries until that thread has ended. If that thread is itself
//! exiting, on the same CPU, at SCHED_IDLE and next to another session's group, the retries leave
//! it no CPU time. Linux 6.18 spins like this for as long as the lane is busy in between.
//!
//! The exiting thread is in no list any more, but the spinning one is. Moved to another CPU for
//! some milliseconds, it leaves the lane to the exiting thread.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use elfen_rt::clock::monotonic_ns;

use super::hotplug::online;
use elfen_machine::affinity;
use elfen_machine::cpulist::CpuSet;
use elfen_machine::process::{Stat, descends, status_field, thread_stat, threads_of};

/// The system time since the last sample that makes a waiting thread a suspect.
const TICKS: u64 = 5;
const SAMPLE_INTERVAL_NS: u64 = 900_000_000;
const AWAY: Duration = Duration::from_millis(10);

/// Watches the threads of this process, one of which reaps.
#[derive(Debug)]
pub(super) struct OwnSpinWatch {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl OwnSpinWatch {
    pub(super) fn watch(requests: Vec<u32>) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let ends = stop.clone();
        let watch = move || {
            let mut spins = SpinDetector { are_own: true, ..SpinDetector::default() };
            // Relaxed: the join orders everything else.
            while !ends.load(Relaxed) {
                spins.move_spinning(|| threads_of(std::process::id()), || requests.clone());
                thread::park_timeout(Duration::from_nanos(SAMPLE_INTERVAL_NS));
            }
        };
        let thread = thread::Builder::new().name("elfen-spins".into()).spawn(watch)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for OwnSpinWatch {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The thread does not panic.
            let _ended = thread.join();
        }
    }
}

/// The samples of one round, to compare with the next.
#[derive(Debug, Default)]
pub(super) struct SpinDetector {
    last_samples: HashMap<u32, ThreadSample>,
    sampled_at_ns: u64,
    /// Whether the threads are this process's own. They never work in the kernel for long, so one
    /// that is runnable is suspected too: between two samples it yields now and then.
    are_own: bool,
}

#[derive(Clone, Copy, Debug)]
struct ThreadSample {
    stat: Stat,
    /// Its number of voluntary context switches, once it is suspected.
    sleeps: Option<u64>,
}

impl SpinDetector {
    /// Samples these threads, if the last samples are a second old, and moves threads that spin to
    /// another CPU and back.
    pub(super) fn move_spinning(
        &mut self,
        threads: impl FnOnce() -> Vec<u32>,
        requests: impl FnOnce() -> Vec<u32>,
    ) {
        let now_ns = monotonic_ns();
        if now_ns.saturating_sub(self.sampled_at_ns) < SAMPLE_INTERVAL_NS {
            return;
        }
        self.sampled_at_ns = now_ns;
        let samples =
            threads().into_iter().filter_map(|thread| Some((thread, thread_stat(thread)?)));
        let spinning = self.spinning(samples, sleeps);
        if spinning.is_empty() {
            return;
        }
        let requests = requests().into_iter().collect();
        for thread in spinning {
            // Fails for a thread that has ended, which needs no help, and for one that a cpuset
            // keeps where it is; but such a thread is in no session's group.
            let _moved = move_away(thread, &requests);
        }
    }

    /// The threads that have been spinning since the sample before the last one.
    fn spinning(
        &mut self,
        samples: impl Iterator<Item = (u32, Stat)>,
        sleeps: impl Fn(u32) -> Option<u64>,
    ) -> Vec<u32> {
        let mut spinning = Vec::new();
        let mut last_samples = HashMap::new();
        for (thread, stat) in samples {
            let before = self.last_samples.get(&thread);
            let waits = stat.state == 'S' || self.are_own;
            let suspect = before.is_some_and(|before| waits && is_suspect(before.stat, stat));
            let sleeps = if suspect { sleeps(thread) } else { None };
            if sleeps.is_some() && before.is_some_and(|before| before.sleeps == sleeps) {
                spinning.push(thread);
            }
            last_samples.insert(thread, ThreadSample { stat, sleeps });
        }
        self.last_samples = last_samples;
        spinning
    }
}

fn is_suspect(before: Stat, now: Stat) -> bool {
    let system = now.system_ticks.saturating_sub(before.system_ticks);
    now.user_ticks == before.user_ticks && system >= TICKS
}

/// How often a thread gave up its CPU voluntarily.
fn sleeps(thread: u32) -> Option<u64> {
    status_field(thread, "voluntary_ctxt_switches")?.parse().ok()
}

/// Moves all threads of a process to other CPUs and back, for a process that cannot do it itself.
pub(super) fn move_threads_away(process: u32, requests: &[u32]) {
    let requests = requests.iter().copied().collect();
    for thread in threads_of(process) {
        // Fails for a thread that has ended, which needs no help.
        let _moved = move_away(thread, &requests);
    }
}

/// Moves a thread to a CPU that it is not on, and back. The request lanes are the last choice.
fn move_away(thread: u32, requests: &CpuSet) -> io::Result<()> {
    // Another thread may have this id by now.
    let own = Path::new("/proc/self/task").join(thread.to_string());
    let is_ours = || {
        if own.exists() || descends(thread, std::process::id()) {
            Ok(())
        } else {
            Err(io::Error::from_raw_os_error(libc::ESRCH))
        }
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
    use std::process::Command;

    fn took(sleeps: bool, user_ticks: u64, system_ticks: u64) -> Stat {
        let state = if sleeps { 'S' } else { 'R' };
        Stat { state, user_ticks, system_ticks, ..Stat::default() }
    }

    /// Goal: only a thread that spins is moved. Method: three samples each, of one that spins and
    /// of some that look similar.
    #[test]
    fn a_waiting_thread_that_uses_cpu_without_sleeping_spins() {
        let spins_if = |are_own, samples: [Stat; 3], slept: [u64; 3]| {
            let mut spins = SpinDetector { are_own, ..SpinDetector::default() };
            let found = samples.into_iter().zip(slept).map(|(stat, slept)| {
                !spins.spinning([(7, stat)].into_iter(), |_| Some(slept)).is_empty()
            });
            found.collect::<Vec<_>>()
        };
        let spins = |samples, slept| spins_if(false, samples, slept);
        let asleep = [took(true, 3, 10), took(true, 3, 60), took(true, 3, 110)];
        assert_eq!(spins(asleep, [4; 3]), [false, false, true]);
        assert_eq!(spins(asleep, [4, 5, 6]), [false; 3], "it wakes and sleeps");
        let awake = [took(false, 3, 10), took(false, 3, 60), took(false, 3, 110)];
        assert_eq!(spins(awake, [4; 3]), [false; 3], "a long system call");
        assert_eq!(spins_if(true, awake, [4; 3]), [false, false, true], "ours make none");
        let works = [took(true, 3, 10), took(true, 5, 60), took(true, 7, 110)];
        assert_eq!(spins(works, [4; 3]), [false; 3], "its program runs");
        let idles = [took(true, 3, 10), took(true, 3, 10), took(true, 3, 10)];
        assert_eq!(spins(idles, [4; 3]), [false; 3], "it sleeps");
    }

    #[test]
    fn a_thread_is_moved_and_comes_back() {
        assert!(online().unwrap().cpus().len() >= 2, "needs two CPUs");
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let home: CpuSet = affinity::allowed().unwrap().iter().take(1).collect();
        affinity::set(child.id(), &home).unwrap();
        let mut spins = SpinDetector::default();
        assert!(sleeps(child.id()).is_some());
        spins.move_spinning(|| vec![child.id()], || vec![0]);
        assert!(spins.last_samples.contains_key(&child.id()));
        move_away(child.id(), &home).unwrap();
        assert_eq!(affinity::of(child.id()).unwrap(), home);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(move_away(child.id(), &home).is_err());
    }
}
