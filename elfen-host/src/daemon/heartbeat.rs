//! Whether the process of the guards still runs, and each of them stands: a counter that it counts
//! up at each of its rounds, and a word for a guard that it misses, in memory that the daemon has
//! too.
//!
//! A process that is stopped, or waits for ever, is alive to whoever asks the kernel, and its
//! guards hold nothing. How long it has been silent is counted in time in which the listener ran
//! itself: a machine that was suspended, or a daemon that was stopped, says nothing of its keeper.

use std::io;
use std::mem::size_of;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// As many rounds of the keeper as a busy machine does not swallow at once.
pub(super) const SILENCE: Duration = Duration::from_secs(3);
/// Who has not come back by then is given up.
const GIVEN_UP: Duration = Duration::from_secs(10);
/// The listener's own rounds are a tenth of a second apart; what is more, it has missed itself.
const LONGEST_STEP: Duration = Duration::from_millis(200);

/// Both words. A process that is forked off has them as well.
#[derive(Debug)]
pub(super) struct Beat(NonNull<Words>);

#[derive(Debug)]
struct Words {
    beats: AtomicU64,
    /// The batch lane of a guard that does not stand, and 1; 0 while all do.
    missed: AtomicU64,
}

impl Beat {
    pub(super) fn new() -> io::Result<Self> {
        let (rights, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        let anywhere = std::ptr::null_mut();
        // SAFETY: new memory, where the kernel likes, of no file.
        let page = unsafe { libc::mmap(anywhere, size_of::<Words>(), rights, kind, -1, 0) };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(page.cast()).map(Self).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    fn words(&self) -> &Words {
        // SAFETY: `new` mapped a page of zeros there, which stays until this drops.
        unsafe { self.0.as_ref() }
    }

    pub(super) fn beat(&self) {
        // Relaxed: that it changes is all that is read of it.
        self.words().beats.fetch_add(1, Relaxed);
    }

    pub(super) fn beats(&self) -> u64 {
        self.words().beats.load(Relaxed)
    }

    /// The keeper misses the guard of this lane, or none.
    pub(super) fn miss(&self, lane: Option<u32>) {
        self.words().missed.store(lane.map_or(0, |lane| u64::from(lane) + 1), Relaxed);
    }

    pub(super) fn misses(&self) -> bool {
        self.words().missed.load(Relaxed) != 0
    }
}

impl Drop for Beat {
    fn drop(&mut self) {
        // SAFETY: `new` mapped it, and nobody else here has it.
        unsafe { libc::munmap(self.0.as_ptr().cast(), size_of::<Words>()) };
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Heard {
    Lately,
    /// Nobody knows whether its guards hold anything.
    NotLately,
    /// Nobody waits for it any more.
    GivenUp,
}

/// How long there was nothing to hear.
#[derive(Debug, Default)]
pub(super) struct Silence {
    beats: u64,
    lasts: Duration,
}

impl Silence {
    /// `since`: the listener's last round.
    pub(super) fn listen(&mut self, beats: u64, since: Duration) -> Heard {
        if beats == self.beats {
            self.lasts += since.min(LONGEST_STEP);
        } else {
            *self = Self { beats, lasts: Duration::ZERO };
        }
        match self.lasts {
            lasts if lasts >= GIVEN_UP => Heard::GivenUp,
            lasts if lasts >= SILENCE => Heard::NotLately,
            _ => Heard::Lately,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUND: Duration = Duration::from_millis(100);

    /// Goal: who is silent is noticed, given up, and heard again. Method: rounds of a listener.
    #[test]
    fn silence_is_noticed() {
        let mut silence = Silence::default();
        let mut rounds =
            |beats, of: Heard| (0..).take_while(|_| silence.listen(beats, ROUND) != of).count();
        assert_eq!(rounds(1, Heard::Lately), 0);
        assert_eq!(rounds(1, Heard::NotLately), 29);
        assert_eq!(rounds(2, Heard::Lately), 0, "it has come back");
        assert_eq!(rounds(2, Heard::NotLately), 29);
        assert_eq!(rounds(2, Heard::GivenUp), 69);
    }

    /// Goal: time that the listener has missed itself is no silence. Method: a listener that was
    /// stopped for an hour.
    #[test]
    fn who_was_away_has_heard_nothing() {
        let mut silence = Silence::default();
        silence.listen(1, ROUND);
        assert_eq!(silence.listen(1, Duration::from_secs(3600)), Heard::Lately);
    }

    #[test]
    fn both_have_the_counter() {
        let beat = Beat::new().unwrap();
        assert_eq!(beat.beats(), 0);
        beat.beat();
        assert_eq!(beat.beats(), 1);
        assert!(!beat.misses());
        beat.miss(Some(0));
        assert!(beat.misses());
        beat.miss(None);
        assert!(!beat.misses());
    }
}
