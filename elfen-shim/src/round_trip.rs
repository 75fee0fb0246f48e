//! Measures the round trip between two CPUs: how long a cache line takes to the other CPU and back.
//!
//! A sample costs the observed program at most one transfer of the line that is read. In a virtual
//! machine, the time of a transfer changes by a factor of five and more, because the host moves
//! virtual CPUs. So it is measured before each run, and the period depends on it.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::thread;
use std::time::{Duration, Instant};

use elfen_machine::affinity;

use crate::clock;

/// The number of round trips per measurement: 0.2 ms at the usual 100 ns each.
const TURNS: u64 = 2000;
/// The number of batches in which round trips are timed. The fastest batch counts, because it was
/// not interrupted.
const BATCHES: u64 = 20;
/// Longer than any round trip. In a slower batch, other threads ran on one of the CPUs.
const FARTHEST: Duration = Duration::from_micros(10);
/// If the other CPU does not answer within this time, the measurement fails.
const LIMIT: Duration = Duration::from_millis(60);
/// The number of polls of the line between two checks of the time.
const LOOK_EVERY: u32 = 4096;

#[repr(align(128))]
struct Line(AtomicU64);

/// Measures the round trip, in ticks, between the CPU of the calling thread and CPU `lane`. Returns
/// `None` if that was not possible within 60 ms.
pub fn measure_ticks(lane: u32) -> Option<u64> {
    let line = Line(AtomicU64::new(0));
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            if affinity::pin(lane).is_ok() {
                respond(&line, &stop);
            }
        });
        let best = measure(&line);
        stop.store(true, Relaxed);
        best
    })
}

/// Answers each odd number in the line with the next even number. Acquire and Release pair with
/// `measure`.
fn respond(line: &Line, stop: &AtomicBool) {
    while !stop.load(Relaxed) {
        let number = line.0.load(Acquire);
        if number % 2 == 1 {
            line.0.store(number + 1, Release);
        } else {
            spin_loop();
        }
    }
}

/// Writes odd numbers to the line, and measures how long the answers take. Acquire and Release pair
/// with `respond`.
fn measure(line: &Line) -> Option<u64> {
    let deadline = Instant::now() + LIMIT;
    let mut best = u64::MAX;
    for batch in 0..BATCHES {
        let (began, start) = (Instant::now(), clock::before());
        for turn in 0..TURNS / BATCHES {
            let number = (batch * (TURNS / BATCHES) + turn) * 2 + 1;
            line.0.store(number, Release);
            let mut looks = 0;
            while line.0.load(Acquire) == number {
                spin_loop();
                looks += 1;
                if looks % LOOK_EVERY == 0 && Instant::now() > deadline {
                    return (best != u64::MAX).then_some(best);
                }
            }
        }
        let turn = (clock::before() - start) / (TURNS / BATCHES);
        if began.elapsed() <= FARTHEST * u32::try_from(TURNS / BATCHES).unwrap_or(1) {
            best = best.min(turn);
        }
    }
    (best != u64::MAX).then_some(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the round trip between two CPUs is measured, and a missing CPU gives `None`. Method:
    /// the CPUs of this machine.
    #[test]
    fn a_round_trip_is_measured() {
        let allowed = affinity::allowed().unwrap();
        let mut cpus = allowed.iter();
        let (first, second) = (cpus.next().unwrap(), cpus.next());
        thread::spawn(move || {
            affinity::pin(first).unwrap();
            if let Some(second) = second {
                // Other work may occupy the CPU for longer than one measurement waits.
                let turn = (0..50).find_map(|_| measure_ticks(second));
                assert!(turn.is_some_and(|turn| turn > 0), "{turn:?}");
            }
            assert!(measure_ticks(u32::MAX - 1).is_none(), "there is no such CPU");
        })
        .join()
        .unwrap();
    }
}
