//! What guards and the planner pass to each other: misses, and changes with their outcomes.
//!
//! A change and its outcome are under one lock, so a planner that gives up gets either the change
//! back or its outcome. Otherwise a change that a guard has written could count as late, and be
//! written a second time.

use std::sync::atomic::AtomicU32;

use elfen_instrument::live::{Change, StoppedAt};
use parking_lot::Mutex;

use super::rendezvous::Rendezvous;

/// The outcome of a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    Applied,
    Refused,
    /// No guard had an opportunity in time.
    Late,
}

#[derive(Debug, Default)]
pub(super) enum State<C> {
    #[default]
    Empty,
    Waits(C),
    Done(Outcome),
}

/// A lock: parking_lot's, or loom's in tests.
pub(super) trait Lock<T> {
    fn with<R>(&self, act: impl FnOnce(&mut T) -> R) -> R;

    /// `None` if another thread holds the lock.
    fn try_with<R>(&self, act: impl FnOnce(&mut T) -> R) -> Option<R>;
}

impl<T> Lock<T> for Mutex<T> {
    fn with<R>(&self, act: impl FnOnce(&mut T) -> R) -> R {
        act(&mut self.lock())
    }

    fn try_with<R>(&self, act: impl FnOnce(&mut T) -> R) -> Option<R> {
        Some(act(&mut *self.try_lock()?))
    }
}

/// The planner gives a change to the guards.
pub(super) fn put<C>(lock: &impl Lock<State<C>>, change: C) {
    lock.with(|state| *state = State::Waits(change));
}

/// A guard calls `write` on the waiting change, if there is one and the lock is free. The change
/// goes on waiting if `write` returns `None`. Returns whether there is an outcome.
pub(super) fn try_write<C>(
    lock: &impl Lock<State<C>>,
    write: impl FnOnce(&C) -> Option<Outcome>,
) -> bool {
    let taken = lock.try_with(|state| {
        let State::Waits(change) = state else { return false };
        let outcome = write(change);
        if let Some(outcome) = outcome {
            *state = State::Done(outcome);
        }
        outcome.is_some()
    });
    taken.unwrap_or(false)
}

/// The outcome; `None` as long as no guard has finished the change.
pub(super) fn outcome<C>(lock: &impl Lock<State<C>>) -> Option<Outcome> {
    lock.with(|state| if let State::Done(outcome) = *state { Some(outcome) } else { None })
}

/// The planner takes the change back, unless a guard has finished it.
pub(super) fn give_up<C>(lock: &impl Lock<State<C>>) -> Outcome {
    lock.with(|state| match std::mem::take(state) {
        State::Done(outcome) => outcome,
        State::Waits(_) | State::Empty => Outcome::Late,
    })
}

/// Where a batch thread stood that did not answer a probe or ran next to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Miss {
    pub(super) process: u32,
    pub(super) stood: StoppedAt,
}

/// A guard must not wait for a lock that the planner holds. On a shared CPU that would last as long
/// as the guard lets the planner run, so guards only try the locks.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) miss: Mutex<Option<Miss>>,
    pub(super) change: Mutex<State<Change>>,
    /// How often a guard found a thread inside the patch site of the change.
    pub(super) unclear: AtomicU32,
    /// How many changes guards have finished.
    pub(super) written: AtomicU32,
    /// Only with several lanes.
    pub(super) rendezvous: Option<Rendezvous>,
}

impl Exchange {
    pub(super) fn of(lanes: usize) -> Self {
        Self {
            miss: Mutex::default(),
            change: Mutex::default(),
            unclear: AtomicU32::new(0),
            written: AtomicU32::new(0),
            rendezvous: (lanes > 1).then(|| Rendezvous::of(lanes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use loom::sync::atomic::{AtomicU32, Ordering::SeqCst};

    impl<T> Lock<T> for loom::sync::Mutex<T> {
        fn with<R>(&self, act: impl FnOnce(&mut T) -> R) -> R {
            act(&mut self.lock().unwrap())
        }

        fn try_with<R>(&self, act: impl FnOnce(&mut T) -> R) -> Option<R> {
            Some(act(&mut *self.try_lock().ok()?))
        }
    }

    /// Goal: a change is written at most once, and the planner knows whether it was. Method: two
    /// guards, and a planner that checks once and gives up, in all orders.
    #[test]
    fn a_written_change_is_never_late() {
        loom::model(|| {
            let lock = Arc::new(loom::sync::Mutex::new(State::<()>::Empty));
            let writes = Arc::new(AtomicU32::new(0));
            put(&*lock, ());
            let guards = [(); 2].map(|()| {
                let lock = lock.clone();
                let writes = writes.clone();
                loom::thread::spawn(move || {
                    try_write(&*lock, |()| {
                        writes.fetch_add(1, SeqCst);
                        Some(Outcome::Applied)
                    })
                })
            });
            let known = outcome(&*lock).unwrap_or_else(|| give_up(&*lock));
            let taken = guards.map(|guard| guard.join().unwrap());
            let written = writes.load(SeqCst);
            assert!(written <= 1);
            assert_eq!(known == Outcome::Applied, written == 1);
            assert_eq!(taken.into_iter().filter(|&one| one).count(), written as usize);
        });
    }

    /// Goal: the model above can fail. Method: an outcome that is stored after the lock is free.
    #[test]
    #[should_panic(expected = "written and taken for late")]
    fn an_outcome_outside_the_lock_comes_late() {
        loom::model(|| {
            let change = Arc::new(loom::sync::Mutex::new(Some(())));
            let applied = Arc::new(AtomicU32::new(0));
            let ours = change.clone();
            let outcome = applied.clone();
            let guard = loom::thread::spawn(move || {
                let taken = ours.try_lock().ok().and_then(|mut change| change.take());
                outcome.store(u32::from(taken.is_some()), SeqCst);
                taken.is_some()
            });
            let is_back = change.lock().unwrap().take().is_some();
            let is_late = is_back || applied.load(SeqCst) == 0;
            assert!(!(guard.join().unwrap() && is_late), "written and taken for late");
        });
    }
}
