//! The requests: a thread that is busy for a turn and asleep for a pause drawn at random, so that
//! it is in step with no timer.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use elfen_machine::affinity;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

const SEED: u64 = 7;

/// Plays until it drops.
#[derive(Debug)]
pub(super) struct Player {
    /// The thread's id.
    pub(super) thread: i32,
    stop: Arc<AtomicBool>,
    handle: Option<JoinHandle<()>>,
}

impl Player {
    pub(super) fn start(cpu: u32, turn: Duration) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let (said, placed) = channel();
        let handle = thread::Builder::new()
            .name("request".to_owned())
            .spawn(move || play(cpu, turn, &stopped, &said))?;
        let mut player = Self { thread: 0, stop, handle: Some(handle) };
        let ended = |_| io::Error::other("the thread of requests ended early");
        player.thread = placed.recv().map_err(ended)??;
        Ok(player)
    }
}

/// The turn that goes on is played to its end.
impl Drop for Player {
    fn drop(&mut self) {
        // Relaxed: nothing is published through it.
        self.stop.store(true, Relaxed);
        if let Some(Err(panic)) = self.handle.take().map(JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
    }
}

fn play(cpu: u32, turn: Duration, stop: &AtomicBool, said: &Sender<io::Result<i32>>) {
    let placed = affinity::pin(cpu).map(|()| nix::unistd::gettid().as_raw());
    let go_on = placed.is_ok();
    if said.send(placed).is_err() || !go_on {
        return;
    }
    let mut random = Xoshiro256PlusPlus::seed_from_u64(SEED);
    // From half a turn to one and a half, and up to a millisecond more.
    let span_ns = u64::try_from(turn.as_nanos()).unwrap_or(u64::MAX / 2) + 1_000_000;
    while !stop.load(Relaxed) {
        thread::sleep(turn / 2 + Duration::from_nanos(random.random_range(0..span_ns)));
        let begin = Instant::now();
        while begin.elapsed() < turn {}
    }
}
