//! A snapshot: several words of one writer, read together or not at all.
//!
//! The writer counts up `begun`, stores the words, then counts up `done`. A reader loads `done`,
//! the words, then `begun`. If both counters agree, no write overlapped the read. The writer never
//! waits. A reader gives up after a few tries, because a writer that was killed between its two
//! counters would make it wait for ever.
//!
//! The functions are generic over the word, so that the model checker runs this same code on its
//! own atomics.

use core::sync::atomic::{AtomicU64, Ordering, Ordering::*};

/// An atomic 64-bit word.
pub trait Word {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64>;
    fn fence(order: Ordering);
}

impl Word for AtomicU64 {
    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    #[inline]
    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }

    #[inline]
    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
        self.compare_exchange(current, new, AcqRel, Acquire)
    }

    #[inline]
    fn fence(order: Ordering) {
        core::sync::atomic::fence(order);
    }
}

/// How often a reader tries. A write takes a few nanoseconds, so 16 overlaps in a row mean that the
/// writer is dead.
const TRIES: u32 = 16;

/// The writer's half: `write` stores the words, relaxed.
#[inline]
pub fn publish<W: Word>(begun: &W, done: &W, write: impl FnOnce()) {
    let next = begun.load(Relaxed).wrapping_add(1);
    begun.store(next, Relaxed);
    // Release fence: orders `begun` before the words; pairs with the acquire fence in `read`.
    W::fence(Release);
    write();
    // Release: orders the words before `done`; pairs with the acquire load in `read`.
    done.store(next, Release);
}

/// The reader's half: `words` loads the words, relaxed. `None` if every try overlapped a write.
#[inline]
pub fn read<W: Word, T>(begun: &W, done: &W, words: impl Fn() -> T) -> Option<T> {
    for _ in 0..TRIES {
        if let Some(value) = attempt(begun, done, &words) {
            return Some(value);
        }
        core::hint::spin_loop();
    }
    None
}

#[inline]
fn attempt<W: Word, T>(begun: &W, done: &W, words: impl Fn() -> T) -> Option<T> {
    let before = done.load(Acquire);
    let value = words();
    // Acquire fence: orders the words before `begun`; pairs with the release fence in `publish`.
    W::fence(Acquire);
    (begun.load(Relaxed) == before).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    impl Word for loom::sync::atomic::AtomicU64 {
        fn load(&self, order: Ordering) -> u64 {
            self.load(order)
        }
        fn store(&self, value: u64, order: Ordering) {
            self.store(value, order);
        }
        fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
            self.compare_exchange(current, new, AcqRel, Acquire)
        }
        fn fence(order: Ordering) {
            loom::sync::atomic::fence(order);
        }
    }

    struct Pair {
        begun: loom::sync::atomic::AtomicU64,
        done: loom::sync::atomic::AtomicU64,
        left: loom::sync::atomic::AtomicU64,
        right: loom::sync::atomic::AtomicU64,
    }

    impl Pair {
        fn new() -> Self {
            let word = || loom::sync::atomic::AtomicU64::new(0);
            Self { begun: word(), done: word(), left: word(), right: word() }
        }
        fn write(&self, value: u64) {
            self.left.store(value, Relaxed);
            self.right.store(value, Relaxed);
        }
        fn words(&self) -> (u64, u64) {
            (self.left.load(Relaxed), self.right.load(Relaxed))
        }
    }

    /// Goal: a reader gets two words that belong together, or nothing. Method: every interleaving
    /// of a writer with a reader.
    #[test]
    fn a_reader_never_sees_half_a_write() {
        loom::model(|| {
            let pair = Arc::new(Pair::new());
            let writer = {
                let pair = pair.clone();
                loom::thread::spawn(move || {
                    publish(&pair.begun, &pair.done, || pair.write(1));
                    publish(&pair.begun, &pair.done, || pair.write(2));
                })
            };
            if let Some((left, right)) = attempt(&pair.begun, &pair.done, || pair.words()) {
                assert_eq!(left, right);
            }
            writer.join().unwrap();
            assert_eq!(attempt(&pair.begun, &pair.done, || pair.words()), Some((2, 2)));
        });
    }

    /// The model can fail: without the counter before the words, a reader sees half a write.
    #[test]
    #[should_panic(expected = "half a write")]
    fn the_model_finds_the_torn_read_of_a_single_counter() {
        loom::model(|| {
            let pair = Arc::new(Pair::new());
            let writer = {
                let pair = pair.clone();
                loom::thread::spawn(move || {
                    pair.write(1);
                    pair.done.store(1, Release);
                })
            };
            let before = pair.done.load(Acquire);
            let (left, right) = pair.words();
            loom::sync::atomic::fence(Acquire);
            if pair.done.load(Relaxed) == before {
                assert!(left == right, "half a write");
            }
            writer.join().unwrap();
        });
    }

    #[test]
    fn a_writer_that_died_during_a_write_does_not_block_its_readers() {
        let (begun, done) = (AtomicU64::new(7), AtomicU64::new(6));
        assert_eq!(read(&begun, &done, || 1), None);
        assert_eq!(read(&begun, &begun, || 1), Some(1));
    }
}
