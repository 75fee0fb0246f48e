//! The loop: words that others write, read again and again.
//!
//! It makes no system call, takes no lock and allocates nothing; what is done with a sample is the
//! sink's. Waits between samples vary by half their length to either side, so that no rhythm of the
//! observed is met again and again at the same beat. Behind a wait stands a fence: a CPU that takes
//! the wait to be over too early would fetch the words' line for nothing, which the observed pays.

use std::arch::asm;
use std::hint::spin_loop;
use std::sync::atomic::AtomicU64;

use crate::clock;
use crate::pacing::Stretch;
use crate::random::Random;

/// Words read at one time.
pub const WORDS_MAX: usize = 8;

/// Observers of one run, each on a lane of its own.
pub const OBSERVERS_MAX: usize = 8;

/// What was read, and when.
#[derive(Clone, Copy, Debug)]
pub struct Sample<const N: usize> {
    /// Before the words were read.
    pub start: u64,
    /// After that; equal to `start` where only tags are looked at.
    pub end: u64,
    pub words: [u64; N],
}

/// Where samples go.
pub trait Sink<'a, const N: usize> {
    /// Whether `end` is needed: a second reading of the clock.
    const BOTH_ENDS: bool;

    /// Brings in what lies in no memory of ours. Within the sample's time.
    fn fetch(&mut self, now: u64);

    /// A sample; the sink may have other words read from now on.
    fn take(&mut self, sample: &Sample<N>, words: &mut [&'a AtomicU64; N]);

    /// Once a stretch, unless it goes as fast as it can: the period from now on.
    fn period(&mut self, now: Period, _found: &Stretch) -> Period {
        now
    }

    /// Every [`STRETCH`] samples, and in waits that take longer than `patience`: whether to go on.
    fn goes_on(&mut self, now: u64, words: &mut [&'a AtomicU64; N]) -> bool;

    /// Ticks for which the loop may wait without asking.
    fn patience(&self) -> u64;
}

/// Samples between two looks at whether to go on.
pub const STRETCH: u32 = 64;

/// Ticks between two samples, in the mean; 0 for as fast as it goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Period(pub u64);

/// Samples until the sink says that it is enough.
pub fn observe<'a, const N: usize, S: Sink<'a, N>>(
    mut period: Period,
    mut words: [&'a AtomicU64; N],
    sink: &mut S,
) {
    let mut random = Random::of(clock::before());
    let mut next = clock::before();
    let mut now = next;
    let mut seen = [0; N];
    let patience = sink.patience();
    loop {
        let mut found = Stretch { samples: STRETCH, ..Stretch::default() };
        for turn in 0..STRETCH {
            // Two readings without a fence between them may be had in any order.
            now = clock::now().max(now);
            if period.0 > 0 {
                let mut ask_at = now.saturating_add(patience);
                while now < next {
                    if now >= ask_at {
                        if !sink.goes_on(now, &mut words) {
                            return;
                        }
                        ask_at = now.saturating_add(patience);
                    }
                    spin_loop();
                    now = clock::now();
                }
                clock::fence();
            }
            let sample = one::<N, S>(now, &words, sink);
            if period.0 > 0 {
                let took = if turn == 0 { clock::after() - now } else { 0 };
                if sample.words != seen {
                    found.changed += 1;
                    found.waited = found.waited.or((turn == 0).then_some(took));
                }
                seen = sample.words;
            }
            sink.take(&sample, &mut words);
            next = now.saturating_add(wait(period, &mut random));
        }
        if period.0 > 0 {
            period = sink.period(period, &found);
        }
        if !sink.goes_on(now, &mut words) {
            return;
        }
    }
}

#[inline(always)]
fn one<'a, const N: usize, S: Sink<'a, N>>(
    start: u64,
    words: &[&'a AtomicU64; N],
    sink: &mut S,
) -> Sample<N> {
    sink.fetch(start);
    let zero = none_of(start);
    let words = words.map(|word| load(word, zero));
    let end = if S::BOTH_ENDS { clock::after() } else { start };
    Sample { start, end, words }
}

/// 0, which is not known before the time is.
#[inline(always)]
fn none_of(time: u64) -> u64 {
    let zero;
    // SAFETY: changes this register and the flags alone.
    unsafe { asm!("and {0}, 0", inlateout(reg) time => zero, options(pure, nomem, nostack)) };
    zero
}

/// What a word holds. Its address takes `zero`, so the load waits for the reading of the clock that
/// this was made of, and not for the loads of samples before, as a fence would have it: a quiet
/// word is read in half the time. A sample that finds a change has what the CPU began behind it
/// thrown away and read anew, as that went by the old value.
#[inline(always)]
fn load(word: &AtomicU64, zero: u64) -> u64 {
    let value;
    // SAFETY: loads the eight bytes that `word` borrows, which are aligned, so that they are read
    // at once; each word means something by itself, so no order but that of x86-64 is needed.
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

/// Between a half and one and a half periods.
#[inline(always)]
fn wait(period: Period, random: &mut Random) -> u64 {
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
    fn waits_are_irregular_and_right_in_the_mean() {
        let mut random = Random::of(12_345);
        let waits: Vec<u64> = (0..100_000).map(|_| wait(Period(1000), &mut random)).collect();
        assert!(waits.iter().all(|wait| (500..=1500).contains(wait)));
        let mean = waits.iter().sum::<u64>() / 100_000;
        assert!((990..=1010).contains(&mean), "{mean}");
        assert!(waits.iter().any(|&wait| wait < 550) && waits.iter().any(|&wait| wait > 1450));
        assert_eq!(wait(Period(0), &mut random), 0);
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
        fn take(&mut self, sample: &Sample<2>, words: &mut [&'a AtomicU64; 2]) {
            assert!(sample.end >= sample.start);
            self.seen.push(sample.words);
            words[0] = self.other;
        }
        fn goes_on(&mut self, _: u64, _: &mut [&'a AtomicU64; 2]) -> bool {
            false
        }
        fn patience(&self) -> u64 {
            1_000
        }
    }

    /// Goal: an observer ends when its sink says so, however long its period is. Method: a period
    /// of centuries, and a sink that ends at the first question.
    #[test]
    fn a_long_period_ends_when_it_is_told() {
        let (first, other) = (AtomicU64::new(7), AtomicU64::new(100));
        let mut sink = Count { seen: Vec::new(), other: &other };
        observe(Period(u64::MAX / 4), [&first, &other], &mut sink);
        assert!(sink.seen.len() <= 1, "{:?}", sink.seen);
    }

    /// Goal: a stretch has its samples, what is fetched is in them, and words can be changed.
    #[test]
    fn a_stretch_is_sampled() {
        let (first, other) = (AtomicU64::new(7), AtomicU64::new(100));
        let mut sink = Count { seen: Vec::new(), other: &other };
        observe(Period(0), [&first, &other], &mut sink);
        assert_eq!(sink.seen.len(), usize::try_from(STRETCH).unwrap());
        assert_eq!((sink.seen[0], sink.seen[1]), ([7, 101], [102, 102]));
    }
}
