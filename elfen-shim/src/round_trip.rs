//! How far apart two lanes are: how long a line takes from one to the other and back.
//!
//! A sample costs the observed at most one transfer of the line that is looked at. In a virtual
//! machine that distance changes under us, by a factor of five and more, so it is measured before
//! each run, and the period follows it.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::thread;
use std::time::{Duration, Instant};

use elfen_machine::affinity;

use crate::clock;

/// There and back; a fifth of a millisecond at the usual 100 ns a turn.
const TURNS: u64 = 2000;
/// The turns are timed in batches, and the best batch counts: one that nobody interrupted.
const BATCHES: u64 = 20;
/// Of a turn: no line is so far away. A batch of longer ones met who else is on a lane.
const FARTHEST: Duration = Duration::from_micros(10);
/// If the other lane is not to be had in this time, the distance is not known.
const LIMIT: Duration = Duration::from_millis(60);
/// Turns between two looks at the time.
const LOOK_EVERY: u32 = 4096;

#[repr(align(128))]
struct Line(AtomicU64);

/// Ticks for a turn between the calling thread, which is on the observer's lane, and `lane`. `None`
/// if that could not be measured in 60 ms.
pub fn ticks(lane: u32) -> Option<u64> {
    let line = Line(AtomicU64::new(0));
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            if affinity::pin(lane).is_ok() {
                answer(&line, &stop);
            }
        });
        let best = ask(&line);
        stop.store(true, Relaxed);
        best
    })
}

/// Odd numbers are questions, and the next even one is the answer.
fn answer(line: &Line, stop: &AtomicBool) {
    while !stop.load(Relaxed) {
        let number = line.0.load(Acquire);
        if number % 2 == 1 {
            line.0.store(number + 1, Release);
        } else {
            spin_loop();
        }
    }
}

fn ask(line: &Line) -> Option<u64> {
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

    /// Goal: a turn is measured where two CPUs are, and the answer is that nobody knows where one
    /// would have to be on both. Method: the CPUs at hand.
    #[test]
    fn a_line_goes_there_and_back() {
        let allowed = affinity::allowed().unwrap();
        let mut cpus = allowed.iter();
        let (first, second) = (cpus.next().unwrap(), cpus.next());
        thread::spawn(move || {
            affinity::pin(first).unwrap();
            if let Some(second) = second {
                // Other work may hold the CPU for longer than we wait.
                let turn = (0..50).find_map(|_| ticks(second));
                assert!(turn.is_some_and(|turn| turn > 0), "{turn:?}");
            }
            assert!(ticks(u32::MAX - 1).is_none(), "there is no such CPU");
        })
        .join()
        .unwrap();
    }
}
