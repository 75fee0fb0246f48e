//! A value that a process makes once, in the thread that needs it first, without a lock.
//!
//! No thread may wait here. A signal handler that needs the value may interrupt the thread that
//! makes it, and a fork may leave that thread behind. So every thread that finds no value may make
//! one, each in a slot of its own, and the first thread to finish publishes. A thread that finds
//! all slots taken goes on without the value and tries again later.

use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicU64, Ordering::*};

use crate::signal::snapshot::Word;

/// Nothing is published yet. Otherwise the word holds the slot's index plus 1, or [`NONE`].
const OPEN: u64 = 0;
/// The value cannot be made in this process.
const NONE: u64 = u64::MAX;

/// How many threads can make the value at the same time.
const SLOTS: usize = 4;

/// A value made at most once, as the file's header describes.
#[derive(Debug)]
pub(crate) struct Once<T> {
    claimed: AtomicU64,
    published: AtomicU64,
    slots: [UnsafeCell<MaybeUninit<T>>; SLOTS],
}

// SAFETY: only the thread that claimed a slot writes it, and other threads read it only after it
// was published.
unsafe impl<T: Send + Sync> Sync for Once<T> {}

/// The result of [`Once::get_or_make`].
#[derive(Debug)]
pub(crate) enum Made<'a, T> {
    Value(&'a T),
    Never,
    /// Other threads are making the value.
    NotYet,
}

impl<T> Once<T> {
    pub(crate) const fn new() -> Self {
        Self {
            claimed: AtomicU64::new(0),
            published: AtomicU64::new(OPEN),
            slots: [const { UnsafeCell::new(MaybeUninit::uninit()) }; SLOTS],
        }
    }

    /// Returns the value, and makes it by `make` if no thread has published one yet.
    pub(crate) fn get_or_make(&self, make: impl FnOnce() -> Option<T>) -> Made<'_, T> {
        match state(&self.published) {
            OPEN => {}
            published => return self.at(published),
        }
        let Some(slot) = claim(&self.claimed, SLOTS as u64) else { return Made::NotYet };
        let ours = match make() {
            Some(value) => {
                self.write(slot, value);
                slot + 1
            }
            None => NONE,
        };
        let published = publish(&self.published, ours);
        if published != ours && ours != NONE {
            self.discard(slot);
        }
        self.at(published)
    }

    fn cell(&self, slot: u64) -> Option<&UnsafeCell<MaybeUninit<T>>> {
        self.slots.get(usize::try_from(slot).ok()?)
    }

    fn write(&self, slot: u64, value: T) {
        if let Some(cell) = self.cell(slot) {
            // SAFETY: `claim` gave this slot to this thread only, and no thread reads it before
            // `publish`.
            unsafe { cell.get().write(MaybeUninit::new(value)) };
        }
    }

    fn discard(&self, slot: u64) {
        if let Some(cell) = self.cell(slot) {
            // SAFETY: `claim` gave this slot to this thread, which did not publish it, so there is
            // no other reference to it.
            let value = unsafe { &mut *cell.get() };
            // SAFETY: `write` filled the slot, and nothing uses it afterwards.
            unsafe { value.assume_init_drop() };
        }
    }

    fn at(&self, published: u64) -> Made<'_, T> {
        let Some(cell) = published.checked_sub(1).and_then(|slot| self.cell(slot)) else {
            return Made::Never;
        };
        // SAFETY: a published slot is never written again.
        let value = unsafe { &*cell.get() };
        // SAFETY: the slot was filled before it was published; the acquire in `state` and `publish`
        // pairs with the release of that `publish`.
        Made::Value(unsafe { value.assume_init_ref() })
    }
}

fn state<W: Word>(published: &W) -> u64 {
    // Acquire: pairs with the release in `publish`.
    published.load(Acquire)
}

/// Claims a slot for the caller; `None` when all are taken.
fn claim<W: Word>(claimed: &W, slots: u64) -> Option<u64> {
    // Relaxed: the exchange decides.
    let mut taken = claimed.load(Relaxed);
    while taken < slots {
        match claimed.compare_exchange(taken, taken + 1) {
            Ok(slot) => return Some(slot),
            Err(found) => taken = found,
        }
    }
    None
}

/// Publishes the caller's slot unless another caller was first. Returns what is published.
fn publish<W: Word>(published: &W, made: u64) -> u64 {
    match published.compare_exchange(OPEN, made) {
        Ok(_) => made,
        Err(first) => first,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use loom::sync::atomic::AtomicU64 as Model;
    use std::sync::Arc;
    use std::vec::Vec;

    /// A model of `Once`. A value is two words that must be seen together; a slot holds them as
    /// plain stores would.
    struct ModelOnce {
        claimed: Model,
        published: Model,
        slots: [[Model; 2]; 2],
    }

    impl ModelOnce {
        fn new() -> Self {
            let word = || Model::new(0);
            let slot = || [word(), word()];
            Self { claimed: word(), published: word(), slots: [slot(), slot()] }
        }

        /// Does what `Once::get_or_make` does, with the same three functions.
        fn get_or_make(&self, slots: u64, order_of_writes: [usize; 2]) -> Option<u64> {
            let mut published = state(&self.published);
            if published == OPEN {
                let slot = claim(&self.claimed, slots)?;
                let slot_at = usize::try_from(slot).unwrap();
                for half in order_of_writes {
                    self.slots[slot_at][half].store(7 + slot, Relaxed);
                }
                published = publish(&self.published, slot + 1);
            }
            let slot = &self.slots[usize::try_from(published - 1).unwrap()];
            let halves = [0, 1].map(|half| slot[half].load(Relaxed));
            assert_eq!(halves, [6 + published; 2], "a value is seen whole");
            Some(halves[0])
        }
    }

    /// Goal: threads that see a value see the same whole value, and at least one thread sees it.
    /// Method: every interleaving of two threads, with one slot in total and with one slot for
    /// each.
    #[test]
    fn all_threads_see_one_whole_value() {
        for slots in [1, 2] {
            loom::model(move || {
                let once = Arc::new(ModelOnce::new());
                let other = {
                    let once = once.clone();
                    loom::thread::spawn(move || once.get_or_make(slots, [0, 1]))
                };
                let own = once.get_or_make(slots, [1, 0]);
                let seen: Vec<_> = [own, other.join().unwrap()].into_iter().flatten().collect();
                assert!(seen.windows(2).all(|pair| pair[0] == pair[1]), "{seen:?}");
                assert!(seen.len() as u64 >= slots, "{seen:?}");
                assert_eq!(once.get_or_make(slots, [0, 1]), seen.first().copied());
            });
        }
    }

    #[test]
    fn a_value_that_cannot_be_made_is_not_tried_again() {
        let once = Once::<u64>::new();
        assert!(matches!(once.get_or_make(|| None), Made::Never));
        assert!(matches!(once.get_or_make(|| Some(1)), Made::Never));
    }

    /// Goal: the losing value is dropped, and the published one is kept. Method: a second call
    /// overtakes the first one, as in a signal handler.
    #[test]
    fn an_overtaken_value_is_dropped() {
        let counted = Arc::new(());
        let once = Once::<Arc<()>>::new();
        let made = once.get_or_make(|| {
            assert!(matches!(once.get_or_make(|| Some(counted.clone())), Made::Value(_)));
            Some(Arc::new(()))
        });
        let Made::Value(seen) = made else { panic!("{made:?}") };
        assert!(Arc::ptr_eq(seen, &counted));
    }

    /// Goal: no thread waits for a maker that is gone. Method: claim all slots and never publish,
    /// as after a fork.
    #[test]
    fn with_all_slots_taken_a_thread_goes_on_without_the_value() {
        let once = Once::<u64>::new();
        for _ in 0..SLOTS {
            assert!(claim(&once.claimed, SLOTS as u64).is_some());
        }
        assert!(matches!(once.get_or_make(|| Some(1)), Made::NotYet));
    }
}
