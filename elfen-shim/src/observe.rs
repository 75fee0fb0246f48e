//! The sampling loop. It repeatedly reads words that other threads write.
//!
//! The loop makes no system call, takes no lock and allocates nothing. A [`Sink`] processes each
//! sample. Each wait between samples is drawn from half to one and a half periods. This jitter
//! avoids aliasing with periodic behaviour of the observed program. A fence follows each wait.
//! Without it, a CPU that speculates past the wait would fetch the words' cache line too early,
//! which slows the observed program for nothing.

use std::arch::asm;
use std::hint::spin_loop;
use std::sync::atomic::AtomicU64;

use crate::clock;
use crate::pacing::BlockStats;
use crate::random::Random;

/// The maximum number of words of one sample.
pub const WORDS_MAX: usize = 8;

/// The maximum number of observers of one run. Each has its own CPU.
pub const OBSERVERS_MAX: usize = 8;

/// The values of all words, and when they were read.
#[derive(Clone, Copy, Debug)]
pub struct Sample<const N: usize> {
    /// Clock ticks before the words were read.
    pub start: u64,
    /// Clock ticks after the words were read; equal to `start` unless [`Sink::BOTH_ENDS`].
    pub end: u64,
    pub words: [u64; N],
}

/// Receives the samples of one observer.
pub trait Sink<'a, const N: usize> {
    /// Whether the sink needs [`Sample::end`], which costs a second clock reading per sample.
    const BOTH_ENDS: bool;

    /// Copies values that only system calls can read into their local words. Called between the
    /// sample's `start` and the loads of its words.
    fn fetch(&mut self, now: u64);

    /// Processes a sample. The sink may replace the words that later samples read.
    fn add_sample(&mut self, sample: &Sample<N>, words: &mut [&'a AtomicU64; N]);

    /// Returns the period to use from now on. Called after each block, unless the period is 0.
    fn next_period(&mut self, now: Period, _found: &BlockStats) -> Period {
        now
    }

    /// Returns whether to continue. Called every [`BLOCK_SAMPLES`] samples, and every
    /// `check_interval_ticks` ticks during longer waits.
    fn keep_going(&mut self, now: u64, words: &mut [&'a AtomicU64; N]) -> bool;

    /// The maximum time in ticks between two calls of `keep_going`.
    fn check_interval_ticks(&self) -> u64;
}

/// The number of samples of a block. After each block, the loop checks whether to continue.
pub const BLOCK_SAMPLES: u32 = 64;

/// Mean ticks between two samples; 0 means as fast as possible.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Period(pub u64);

/// Samples `words` until `sink` returns that it should stop.
pub fn observe<'a, const N: usize, S: Sink<'a, N>>(
    mut period: Period,
    mut words: [&'a AtomicU64; N],
    sink: &mut S,
) {
    let mut random = Random::of(clock::before());
    let mut next = clock::before();
    let mut now = next;
    let mut seen = [0; N];
    let check_interval = sink.check_interval_ticks();
    loop {
        let mut found = BlockStats { samples: BLOCK_SAMPLES, ..BlockStats::default() };
        for turn in 0..BLOCK_SAMPLES {
            // Without a fence between them, the CPU may execute two clock readings in any order.
            now = clock::now().max(now);
            if period.0 > 0 {
                let mut ask_at = now.saturating_add(check_interval);
                while now < next {
                    if now >= ask_at {
                        if !sink.keep_going(now, &mut words) {
                            return;
                        }
                        ask_at = now.saturating_add(check_interval);
                    }
                    spin_loop();
                    now = clock::now();
                }
                clock::fence();
            }
            let sample = sample_words::<N, S>(now, &words, sink);
            if period.0 > 0 {
                let took = if turn == 0 { clock::after() - now } else { 0 };
                if sample.words != seen {
                    found.changed += 1;
                    found.waited = found.waited.or((turn == 0).then_some(took));
                }
                seen = sample.words;
            }
            sink.add_sample(&sample, &mut words);
            next = now.saturating_add(next_wait(period, &mut random));
        }
        if period.0 > 0 {
            period = sink.next_period(period, &found);
        }
        if !sink.keep_going(now, &mut words) {
            return;
        }
    }
}

#[inline(always)]
fn sample_words<'a, const N: usize, S: Sink<'a, N>>(
    start: u64,
    words: &[&'a AtomicU64; N],
    sink: &mut S,
) -> Sample<N> {
    sink.fetch(start);
    let zero = zero_after(start);
    let words = words.map(|word| load(word, zero));
    let end = if S::BOTH_ENDS { clock::after() } else { start };
    Sample { start, end, words }
}

/// Returns 0, through a data dependency on `time`. So instructions that use the result execute only
/// after the clock was read.
#[inline(always)]
fn zero_after(time: u64) -> u64 {
    let zero;
    // SAFETY: changes only this register and the flags.
    unsafe { asm!("and {0}, 0", inlateout(reg) time => zero, options(pure, nomem, nostack)) };
    zero
}

/// Loads a word. `zero` is part of the address, so the load waits for the clock reading from which
/// `zero` was computed. A fence would also wait for the loads of earlier samples. Without a fence,
/// a word that does not change is read in half the time. When a sample finds a change, the CPU
/// discards the loads that it has speculatively executed after it, because they depend on the old
/// value.
#[inline(always)]
fn load(word: &AtomicU64, zero: u64) -> u64 {
    let value;
    // SAFETY: loads the eight bytes that `word` borrows. They are aligned, so the load is atomic.
    // The words are independent, so the load order of x86-64 is enough.
    unsafe {
        asm!(
            "mov {value}, qword ptr [{word} + {zero}]",
            value = lateout(reg) value,
            word = in(reg) word.as_ptr(),
            zero = in(reg) zero,
            options(readonly, nostack, preserves_flags),
        );
    }
    value
}

/// Draws a wait between half a period and one and a half periods.
#[inline(always)]
fn next_wait(period: Period, random: &mut Random) -> u64 {
    match period.0 {
        0 => 0,
        ticks => ticks / 2 + random.below(ticks),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[test]
    fn waits_are_jittered_and_average_one_period() {
        let mut random = Random::of(12_345);
        let waits: Vec<u64> = (0..100_000).map(|_| next_wait(Period(1000), &mut random)).collect();
        assert!(waits.iter().all(|wait| (500..=1500).contains(wait)));
        let mean = waits.iter().sum::<u64>() / 100_000;
        assert!((990..=1010).contains(&mean), "{mean}");
        assert!(waits.iter().any(|&wait| wait < 550) && waits.iter().any(|&wait| wait > 1450));
        assert_eq!(next_wait(Period(0), &mut random), 0);
    }

    struct Count<'a> {
        seen: Vec<[u64; 2]>,
        other: &'a AtomicU64,
    }

    impl<'a> Sink<'a, 2> for Count<'a> {
        const BOTH_ENDS: bool = true;
        fn fetch(&mut self, _: u64) {
            self.other.fetch_add(1, Relaxed);
        }
        fn add_sample(&mut self, sample: &Sample<2>, words: &mut [&'a AtomicU64; 2]) {
            assert!(sample.end >= sample.start);
            self.seen.push(sample.words);
            words[0] = self.other;
        }
        fn keep_going(&mut self, _: u64, _: &mut [&'a AtomicU64; 2]) -> bool {
            false
        }
        fn check_interval_ticks(&self) -> u64 {
            1_000
        }
    }

    /// Goal: an observer ends when its sink requests it, however long its period is. Method: a
    /// period of centuries, and a sink that stops at the first call.
    #[test]
    fn a_long_wait_ends_when_the_sink_says_stop() {
        let (first, other) = (AtomicU64::new(7), AtomicU64::new(100));
        let mut sink = Count { seen: Vec::new(), other: &other };
        observe(Period(u64::MAX / 4), [&first, &other], &mut sink);
        assert!(sink.seen.len() <= 1, "{:?}", sink.seen);
    }

    /// Goal: a block has all its samples, the samples contain fetched values, and the sink can
    /// replace words. Method: one block of a sink that does both.
    #[test]
    fn a_block_is_sampled() {
        let (first, other) = (AtomicU64::new(7), AtomicU64::new(100));
        let mut sink = Count { seen: Vec::new(), other: &other };
        observe(Period(0), [&first, &other], &mut sink);
        assert_eq!(sink.seen.len(), usize::try_from(BLOCK_SAMPLES).unwrap());
        assert_eq!((sink.seen[0], sink.seen[1]), ([7, 101], [102, 102]));
    }
}
