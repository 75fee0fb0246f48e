//! Wakes batch threads that block in a nap: one waker for each request lane, which sleeps in the
//! kernel until that lane idles.
//!
//! Only for `--nap block`. A waker runs on the batch lane, which is free at that time, and ranks
//! above the batch.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use elfen_kernel::sleep::Alarm;
use elfen_rt::nap::block;

use super::channels::Channels;
use elfen_machine::affinity;

/// How soon a waker notices that it has to end.
const SLEEP_AT_MOST: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub struct Wakers {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Wakers {
    pub fn start(channels: &Arc<Channels>, alarm: &Arc<Alarm>) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut wakers = Self { stop: stop.clone(), threads: Vec::new() };
        for request in channels.requests() {
            let channels = channels.clone();
            let alarm = alarm.clone();
            let stop = stop.clone();
            let waker = move || wake(&channels, &alarm, request, &stop);
            wakers.threads.push(thread::Builder::new().name("elfen-waker".into()).spawn(waker)?);
        }
        Ok(wakers)
    }
}

impl Drop for Wakers {
    fn drop(&mut self) {
        // Relaxed: the join below orders everything else.
        self.stop.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            // Without a waker, a batch thread's sleep is still bounded.
            let _ended = thread.join();
        }
    }
}

fn wake(channels: &Channels, alarm: &Alarm, request: u32, stop: &AtomicBool) {
    let pairs = (0..).zip(channels.assigned()).filter(|(_, (_, of))| *of == request);
    let lanes: Vec<u32> = pairs.clone().map(|(index, _)| index).collect();
    if let Some((_, &(batch, _))) = pairs.clone().next() {
        let _moved = affinity::pin(batch);
    }
    // It was opened once before the run began. Without it, naps end at their bound.
    let Ok(mut sleeper) = alarm.sleeper(request) else { return };
    while !stop.load(Relaxed) {
        if sleeper.sleep(SLEEP_AT_MOST) {
            let slots = lanes.iter().filter_map(|&index| channels.lanes().slot(index));
            slots.for_each(|slot| block::wake(&slot.wakes));
        }
    }
}
