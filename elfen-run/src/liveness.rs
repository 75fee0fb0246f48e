//! Whether a process still does its work: the guard process of elfend, which the daemon observes,
//! and the supervisor of a run, which the spare observes.
//!
//! The process increments a counter in shared memory in each round, its heartbeat. A process that
//! is stopped or hangs still looks alive to the kernel, but its guards enforce nothing. Silence is
//! measured in time during which the observer ran itself: the suspension of the machine, or a stop
//! of the observer, says nothing about the process.

use std::io;
use std::mem::size_of;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;

/// Longer than the delays of a few rounds on a busy machine.
const SILENT_AFTER: Duration = Duration::from_secs(3);
/// After this much silence the process is to be killed and replaced.
const LOST_AFTER: Duration = Duration::from_secs(10);
/// How often to observe.
pub const ROUND: Duration = Duration::from_millis(100);
/// If more time has passed between two rounds, the observer itself did not run.
const LONGEST_STEP: Duration = Duration::from_millis(200);

/// The heartbeat, and a word for a guard that is missing. A forked child shares them.
#[derive(Debug)]
pub struct Heartbeat(NonNull<Words>);

#[derive(Debug)]
struct Words {
    beats: AtomicU64,
    /// The batch lane of a guard that is missing, plus 1; 0 while all are there.
    missing_guard: AtomicU64,
}

impl Heartbeat {
    pub fn new() -> io::Result<Self> {
        let (rights, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        let anywhere = std::ptr::null_mut();
        // SAFETY: a new anonymous mapping, at an address that the kernel chooses.
        let page = unsafe { libc::mmap(anywhere, size_of::<Words>(), rights, kind, -1, 0) };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(page.cast()).map(Self).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    fn words(&self) -> &Words {
        // SAFETY: `new` mapped a page of zeros there, which stays mapped until this drops.
        unsafe { self.0.as_ref() }
    }

    pub fn beat(&self) {
        // Relaxed: the reader only wants to see that the counter changes.
        self.words().beats.fetch_add(1, Relaxed);
    }

    fn count(&self) -> u64 {
        self.words().beats.load(Relaxed)
    }

    /// Reports that the guard of this lane is missing, or that none is.
    pub fn report_missing_guard(&self, lane: Option<u32>) {
        self.words().missing_guard.store(lane.map_or(0, |lane| u64::from(lane) + 1), Relaxed);
    }

    fn lacks_guard(&self) -> bool {
        self.words().missing_guard.load(Relaxed) != 0
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        // SAFETY: `new` mapped it, and no other reference into it exists in this process.
        unsafe { libc::munmap(self.0.as_ptr().cast(), size_of::<Words>()) };
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pulse {
    Alive,
    /// Its guards may no longer enforce anything.
    Silent,
    /// It has to be killed.
    Lost,
    Ended,
}

/// A child process and its heartbeat.
#[derive(Debug)]
pub struct ObservedChild {
    pub pid: Pid,
    heartbeat: Heartbeat,
    silence: Silence,
    observed_at: Instant,
}

impl ObservedChild {
    pub fn new(pid: Pid, heartbeat: Heartbeat) -> Self {
        Self { pid, heartbeat, silence: Silence::default(), observed_at: Instant::now() }
    }

    /// To be called once a [`ROUND`]. Reaps nothing: reaping may take long, and the process that
    /// takes over must not wait for it.
    pub fn observe(&mut self) -> Pulse {
        let since = std::mem::replace(&mut self.observed_at, Instant::now()).elapsed();
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        if !matches!(waitid(Id::Pid(self.pid), flags), Ok(WaitStatus::StillAlive)) {
            return Pulse::Ended;
        }
        self.silence.observe(self.heartbeat.count(), since)
    }

    /// Whether the process has begun its rounds.
    pub fn has_begun(&self) -> bool {
        self.heartbeat.count() != 0
    }

    pub fn lacks_guard(&self) -> bool {
        self.heartbeat.lacks_guard()
    }

    pub fn kill(&self) {
        // Fails only if it has ended. It is our child and not reaped, so its id is its own.
        let _ended = kill(self.pid, Signal::SIGKILL);
    }
}

/// How long a counter has not changed.
#[derive(Debug, Default)]
pub struct Silence {
    beats: u64,
    lasts: Duration,
}

impl Silence {
    /// `since`: the time since the observer's last round.
    pub fn observe(&mut self, beats: u64, since: Duration) -> Pulse {
        if beats == self.beats {
            self.lasts += since.min(LONGEST_STEP);
        } else {
            *self = Self { beats, lasts: Duration::ZERO };
        }
        match self.lasts {
            lasts if lasts >= LOST_AFTER => Pulse::Lost,
            lasts if lasts >= SILENT_AFTER => Pulse::Silent,
            _ => Pulse::Alive,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: silence is noticed, becomes final, and ends with the next heartbeat. Method: rounds of
    /// an observer.
    #[test]
    fn silence_is_noticed() {
        let mut silence = Silence::default();
        let mut rounds =
            |beats, of: Pulse| (0..).take_while(|_| silence.observe(beats, ROUND) != of).count();
        assert_eq!(rounds(1, Pulse::Alive), 0);
        assert_eq!(rounds(1, Pulse::Silent), 29);
        assert_eq!(rounds(2, Pulse::Alive), 0, "a heartbeat");
        assert_eq!(rounds(2, Pulse::Silent), 29);
        assert_eq!(rounds(2, Pulse::Lost), 69);
    }

    /// Goal: time during which the observer did not run is not silence. Method: an observer that
    /// was stopped for an hour.
    #[test]
    fn time_without_the_observer_is_no_silence() {
        let mut silence = Silence::default();
        silence.observe(1, ROUND);
        assert_eq!(silence.observe(1, Duration::from_secs(3600)), Pulse::Alive);
    }

    #[test]
    fn both_have_the_counter() {
        let beat = Heartbeat::new().unwrap();
        assert_eq!(beat.count(), 0);
        beat.beat();
        assert_eq!(beat.count(), 1);
        assert!(!beat.lacks_guard());
        beat.report_missing_guard(Some(0));
        assert!(beat.lacks_guard());
        beat.report_missing_guard(None);
        assert!(!beat.lacks_guard());
    }
}
