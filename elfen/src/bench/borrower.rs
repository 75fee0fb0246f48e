//! A batch of one thread, which notes when it did not run: what benchmarks of reaction and overlap look at from outside.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use elfen_rt::clock::monotonic_ns;
use elfen_rt::nap::Kind;

use crate::host::run::place::Place;

/// A stretch of time, from and to.
pub(super) type Stretch = (u64, u64);

/// How the batch thread is made to stop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Inject {
    Guard,
    /// `check!()` in its loop, and no guard.
    Inline,
}

impl Inject {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Guard => "guard",
            Self::Inline => "inline",
        }
    }

    /// Whether what stops the batch this way can nap like this. Threads of a batch have no descriptor for the device; a guard
    /// is there to hold the lane, and blocks only beside threads that do.
    pub(crate) fn can_nap(self, kind: Kind) -> bool {
        match self {
            Self::Guard => kind != Kind::Block,
            Self::Inline => kind != Kind::Device,
        }
    }
}

/// Notes are made in memory that is there already: so many pauses at most.
const PAUSES_MAX: usize = 2_000_000;

/// On a batch lane, nothing but readings of the clock: the stretches between two that are longer than `longer_ns`.
pub(super) fn pauses(
    cpu: u32,
    inject: Inject,
    longer_ns: u64,
    stop: &AtomicBool,
) -> io::Result<Vec<Stretch>> {
    Place::new(&[cpu].into_iter().collect()).take(0)?;
    let mut pauses = Vec::with_capacity(PAUSES_MAX);
    let mut last_ns = monotonic_ns();
    while !stop.load(Relaxed) && pauses.len() < PAUSES_MAX {
        if inject == Inject::Inline {
            elfen_rt::check!();
        }
        let now_ns = monotonic_ns();
        if now_ns - last_ns > longer_ns {
            pauses.push((last_ns, now_ns));
        }
        last_ns = now_ns;
    }
    Ok(pauses)
}
