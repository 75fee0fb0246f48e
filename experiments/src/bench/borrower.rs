//! A batch of one thread, which notes when it did not run.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use elfen_machine::placement::Placement;
use elfen_rt::clock::monotonic_ns;

/// A stretch of time, from and to.
pub(super) type Stretch = (u64, u64);

/// Notes are made in memory that is there already: so many pauses at most.
const PAUSES_MAX: usize = 2_000_000;

/// On a batch lane, nothing but readings of the clock: the stretches between two that are longer
/// than `longer_ns`.
pub(super) fn pauses(cpu: u32, longer_ns: u64, stop: &AtomicBool) -> io::Result<Vec<Stretch>> {
    Placement::new(&[cpu].into_iter().collect()).apply(0)?;
    let mut pauses = Vec::with_capacity(PAUSES_MAX);
    let mut last_ns = monotonic_ns();
    while !stop.load(Relaxed) && pauses.len() < PAUSES_MAX {
        let now_ns = monotonic_ns();
        if now_ns - last_ns > longer_ns {
            pauses.push((last_ns, now_ns));
        }
        last_ns = now_ns;
    }
    Ok(pauses)
}
