//! A mutex that can't be held across an await: a closure gets the value.

use std::sync::{Mutex, PoisonError};

#[derive(Debug, Default)]
pub(crate) struct Lock<T>(Mutex<T>);

impl<T> Lock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        // No closure panics half-way, so a poisoned value is consistent.
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
