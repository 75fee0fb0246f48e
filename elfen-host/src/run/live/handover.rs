//! One change on its way from the planner to a guard, and what becomes of it.
//!
//! Both are under one lock. A planner that gives up has either the change back, or what the guard
//! did with it: a change that was written and is taken for late would be written again.

use parking_lot::Mutex;

/// What became of a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    Applied,
    Refused,
    /// There was no moment for it.
    Late,
}

#[derive(Debug, Default)]
pub(super) enum State<C> {
    #[default]
    Empty,
    Waits(C),
    Done(Outcome),
}

/// A lock of this crate, or of a test's.
pub(super) trait Lock<T> {
    fn with<R>(&self, act: impl FnOnce(&mut T) -> R) -> R;

    /// `None` if another has it.
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

/// A guard does what `write` does, if a change waits and nobody else has it. Nothing from `write`:
/// the change waits on. Says whether something became of it.
pub(super) fn take_up<C>(
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

/// What a guard has done with the change; nothing yet, where none has taken it up.
pub(super) fn outcome<C>(lock: &impl Lock<State<C>>) -> Option<Outcome> {
    lock.with(|state| if let State::Done(outcome) = *state { Some(outcome) } else { None })
}

/// The planner takes the change back, unless a guard has done something with it.
pub(super) fn give_up<C>(lock: &impl Lock<State<C>>) -> Outcome {
    lock.with(|state| match std::mem::take(state) {
        State::Done(outcome) => outcome,
        State::Waits(_) | State::Empty => Outcome::Late,
    })
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

    /// Goal: a change is written once at most, and the planner knows whether it was. Method: two
    /// guards and a planner that looks once and gives up, in all orders.
    #[test]
    fn what_was_written_is_never_late() {
        loom::model(|| {
            let lock = Arc::new(loom::sync::Mutex::new(State::<()>::Empty));
            let writes = Arc::new(AtomicU32::new(0));
            put(&*lock, ());
            let guards = [(); 2].map(|()| {
                let (lock, writes) = (lock.clone(), writes.clone());
                loom::thread::spawn(move || {
                    take_up(&*lock, |()| {
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

    /// Goal: the model above can fail. Method: an outcome beside the lock, stored when it is free.
    #[test]
    #[should_panic(expected = "written and taken for late")]
    fn an_outcome_beside_the_lock_comes_late() {
        loom::model(|| {
            let change = Arc::new(loom::sync::Mutex::new(Some(())));
            let applied = Arc::new(AtomicU32::new(0));
            let (ours, outcome) = (change.clone(), applied.clone());
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
