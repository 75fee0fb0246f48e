//! A value that a process makes once, in whichever thread needs it first, without a lock.
//!
//! No thread may wait here: the thread that makes the value may be interrupted by a signal handler
//! that wants it too, or be left behind by a fork. So every thread that finds nothing may make the
//! value, each in a place of its own, and the first that is done publishes. A thread that finds all
//! places taken goes on without the value and asks again later.

use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicU64, Ordering::*};

use crate::signal::snapshot::Word;

/// Nothing published yet. Published is a place counted from 1, or [`NONE`].
const OPEN: u64 = 0;
/// There is nothing to publish, and never will be.
const NONE: u64 = u64::MAX;

/// Room for the value; four threads may be at work on it when the first one is done.
const PLACES: usize = 4;

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct Once<T> {
    claimed: AtomicU64,
    published: AtomicU64,
    places: [UnsafeCell<MaybeUninit<T>>; PLACES],
}

// SAFETY: a place is written by the one thread that claimed it, and read by
// others after it was published.
unsafe impl<T: Send + Sync> Sync for Once<T> {}

/// What there is of the value.
#[derive(Debug)]
pub(crate) enum Made<'a, T> {
    Value(&'a T),
    Never,
    /// Others are at work on it.
    NotYet,
}

impl<T> Once<T> {
    pub(crate) const fn new() -> Self {
        Self {
            claimed: AtomicU64::new(0),
            published: AtomicU64::new(OPEN),
            places: [const { UnsafeCell::new(MaybeUninit::uninit()) }; PLACES],
        }
    }

    /// The value; made by `make` if no thread has made it yet.
    pub(crate) fn get_or_make(&self, make: impl FnOnce() -> Option<T>) -> Made<'_, T> {
        match state(&self.published) {
            OPEN => {}
            published => return self.at(published),
        }
        let Some(place) = claim(&self.claimed, PLACES as u64) else { return Made::NotYet };
        let ours = match make() {
            Some(value) => {
                self.write(place, value);
                place + 1
            }
            None => NONE,
        };
        let published = publish(&self.published, ours);
        if published != ours && ours != NONE {
            self.discard(place);
        }
        self.at(published)
    }

    fn cell(&self, place: u64) -> Option<&UnsafeCell<MaybeUninit<T>>> {
        self.places.get(usize::try_from(place).ok()?)
    }

    fn write(&self, place: u64, value: T) {
        if let Some(cell) = self.cell(place) {
            // SAFETY: `claim` gave this place to us alone, and no thread reads it before `publish`.
            unsafe { cell.get().write(MaybeUninit::new(value)) };
        }
    }

    fn discard(&self, place: u64) {
        if let Some(cell) = self.cell(place) {
            // SAFETY: the place is ours, and was not published: there is no other reference to it.
            let value = unsafe { &mut *cell.get() };
            // SAFETY: `write` filled it, and it is used no more.
            unsafe { value.assume_init_drop() };
        }
    }

    fn at(&self, published: u64) -> Made<'_, T> {
        let Some(cell) = published.checked_sub(1).and_then(|place| self.cell(place)) else {
            return Made::Never;
        };
        // SAFETY: a published place is never written again.
        let value = unsafe { &*cell.get() };
        // SAFETY: it was filled before it was published; the acquire in `state` and
        // `publish` pairs with that release.
        Made::Value(unsafe { value.assume_init_ref() })
    }
}

fn state<W: Word>(published: &W) -> u64 {
    // Acquire: pairs with the release in `publish`.
    published.load(Acquire)
}

/// A place that no other caller has; `None` when all are taken.
fn claim<W: Word>(claimed: &W, places: u64) -> Option<u64> {
    // Relaxed: the exchange decides.
    let mut taken = claimed.load(Relaxed);
    while taken < places {
        match claimed.compare_exchange(taken, taken + 1) {
            Ok(place) => return Some(place),
            Err(found) => taken = found,
        }
    }
    None
}

/// Publishes what the caller made unless another caller was first; returns what is published.
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

    /// A value is two words that must be seen together; a place has them as plain stores would.
    struct Modelled {
        claimed: Model,
        published: Model,
        places: [[Model; 2]; 2],
    }

    impl Modelled {
        fn new() -> Self {
            let word = || Model::new(0);
            let place = || [word(), word()];
            Self { claimed: word(), published: word(), places: [place(), place()] }
        }

        /// What `get_or_make` does, with the same three functions.
        fn get_or_make(&self, places: u64, order_of_writes: [usize; 2]) -> Option<u64> {
            let mut published = state(&self.published);
            if published == OPEN {
                let place = claim(&self.claimed, places)?;
                let place_at = usize::try_from(place).unwrap();
                for half in order_of_writes {
                    self.places[place_at][half].store(7 + place, Relaxed);
                }
                published = publish(&self.published, place + 1);
            }
            let place = &self.places[usize::try_from(published - 1).unwrap()];
            let halves = [0, 1].map(|half| place[half].load(Relaxed));
            assert_eq!(halves, [6 + published; 2], "a value is seen whole");
            Some(halves[0])
        }
    }

    /// Every interleaving of two threads, with a place for each or one for both: the threads that
    /// see a value see the same one, whole, and at least one thread does.
    #[test]
    fn all_threads_see_one_whole_value() {
        for places in [1, 2] {
            loom::model(move || {
                let once = Arc::new(Modelled::new());
                let other = {
                    let once = once.clone();
                    loom::thread::spawn(move || once.get_or_make(places, [0, 1]))
                };
                let own = once.get_or_make(places, [1, 0]);
                let seen: Vec<_> = [own, other.join().unwrap()].into_iter().flatten().collect();
                assert!(seen.windows(2).all(|pair| pair[0] == pair[1]), "{seen:?}");
                assert!(seen.len() as u64 >= places, "{seen:?}");
                assert_eq!(once.get_or_make(places, [0, 1]), seen.first().copied());
            });
        }
    }

    #[test]
    fn a_value_that_cannot_be_made_is_not_tried_again() {
        let once = Once::<u64>::new();
        assert!(matches!(once.get_or_make(|| None), Made::Never));
        assert!(matches!(once.get_or_make(|| Some(1)), Made::Never));
    }

    /// Goal: the loser's value is dropped, the winner's kept. Method: a maker that is overtaken by
    /// another, as by a signal handler.
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

    /// Goal: no thread waits for a maker that is gone. Method: makers that never come back, as
    /// after a fork.
    #[test]
    fn with_all_places_taken_one_goes_on_without() {
        let once = Once::<u64>::new();
        for _ in 0..PLACES {
            assert!(claim(&once.claimed, PLACES as u64).is_some());
        }
        assert!(matches!(once.get_or_make(|| Some(1)), Made::NotYet));
    }
}
