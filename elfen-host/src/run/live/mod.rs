//! Live checks: the guard rehearses requests, and gives checks to the loops that do not answer.
//!
//! ```text
//!  guard, on the lane                     planner, a thread of the keeper at nice 19
//!  drill, or a real request --- miss ---> elfen_instrument::live: a place, and its code
//!  writes, as nothing runs  <-- change --     what runs too often is taken out again
//!       ^
//!       +-- bell: a check of the batch that finds the lane busy
//! ```
//!
//! A drill is the question who checks: the guard sets a word, lets the batch go on for 50 us, and
//! looks whether a check has answered. If none has and the batch ran all the while, it stood in a
//! loop that has no check, and the kernel knows where ([`elfen_kernel::preempted`]).
//!
//! A check that finds the request lane busy rings: the guard wakes, has its lane at once, and does
//! what it would have done at its next look. What the policy is, how the lane naps and what counts
//! as overlap stays with it.
//!
//! With several lanes the guards meet before one of them writes (`meeting.rs`), and checks look at
//! the lane that their thread is on.

mod exchange;
mod handover;
pub(super) mod page;
mod planner;
mod probe_schedule;
mod rendezvous;
mod site_probe;
pub mod words;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::thread::{self, JoinHandle, Thread};

use elfen_instrument::live::Pages;
use elfen_kernel::preempted::Notes;

use self::exchange::Exchange;
pub(super) use self::site_probe::Rehearsal;
use super::channels::Channels;
use super::placement::Place;

/// The planner of a run. It ends when this drops.
#[derive(Debug)]
pub(super) struct Planner {
    exchange: Arc<Exchange>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Planner {
    pub(super) fn start(channels: &Arc<Channels>, pages: Pages) -> io::Result<Self> {
        let exchange = Arc::new(Exchange::of(channels.assigned().len()));
        let stop = Arc::new(AtomicBool::new(false));
        let (ours, theirs, channels) = (exchange.clone(), stop.clone(), channels.clone());
        let plan = move || {
            // A planner is no service, and where it shares a CPU with the batch it comes first.
            let _lowered = Place::lower();
            planner::plan(&channels, pages, &ours, &theirs);
        };
        let thread = thread::Builder::new().name("elfen-planner".into()).spawn(plan)?;
        Ok(Self { exchange, stop, thread: Some(thread) })
    }

    /// What the guard of a lane, by its index, needs to rehearse there.
    pub(super) fn rehearsal(&self, notes: Arc<Notes>, index: usize) -> Option<Rehearsal> {
        let planner: Thread = self.thread.as_ref()?.thread().clone();
        Some(Rehearsal::new(notes, self.exchange.clone(), planner, index))
    }
}

impl Drop for Planner {
    fn drop(&mut self) {
        // Relaxed: the join below orders everything else.
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It does not panic; if it did, the batch is guarded all the same.
            let _ended = thread.join();
        }
    }
}
