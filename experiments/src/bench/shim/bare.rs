//! One load at a time and nothing besides: what any observer costs whoever writes the word.
//!
//! It shares no code with `elfen shim`, so that it can be held against it: what a program pays more
//! beside that is Shim's, and what it pays here is the processor's, which takes the line from the
//! writer's cache for the load, and gives it back for the next store.

use std::hint::{black_box, spin_loop};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};

use elfen_host::affinity;
use elfen_shim::clock;

use super::stage::Lanes;

/// Loads a word in a thread of its own, until it is told to stop.
pub(super) struct Bare {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<io::Result<Seen>>,
}

/// What it did.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub(super) loads: u64,
    /// Loads that found another value than the one before.
    pub(super) new_values: u64,
}

impl Bare {
    pub(super) fn start(lanes: Lanes, word: &'static AtomicU64, period_ticks: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let told = stop.clone();
        let thread = thread::spawn(move || {
            affinity::pin(lanes.from)?;
            Ok(look(word, period_ticks, &told))
        });
        Self { stop, thread }
    }

    pub(super) fn join(self) -> io::Result<Seen> {
        self.stop.store(true, Relaxed);
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// As far apart as Shim's samples are, and as irregular.
fn look(word: &AtomicU64, period_ticks: u64, stop: &AtomicBool) -> Seen {
    /// Between two looks at whether to go on.
    const LOADS: u32 = 64;
    let mut next = clock::now();
    let mut random = next | 1;
    let (mut seen, mut last) = (Seen { loads: 0, new_values: 0 }, 0);
    while !stop.load(Relaxed) {
        for _ in 0..LOADS {
            let mut now = clock::now();
            while now < next {
                spin_loop();
                now = clock::now();
            }
            clock::fence();
            let value = black_box(word.load(Relaxed));
            seen.new_values += u64::from(value != last);
            last = value;
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            next = now + period_ticks / 2 + (random >> 32) * period_ticks / (1 << 32);
        }
        seen.loads += u64::from(LOADS);
    }
    seen
}
