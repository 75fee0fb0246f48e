//! Live checks: guards probe whether the batch has checks, and patch checks into the loops that do
//! not answer.
//!
//! ```text
//!  guard, on the lane                      planner, a thread of the supervisor at nice 19
//!  probe, or a real request --- miss ----> elfen_instrument::live: a patch site, and its code
//!  writes, as no batch runs <- change ---     takes out checks that run too often
//!       ^
//!       +-- doorbell: a check of the batch that finds the lane busy
//! ```
//!
//! A probe asks the batch for a check: the guard sets a word, lets the batch run for 50 us, and
//! sees whether a check has answered. If not, although the batch ran all the time, the batch is in
//! a loop without a check, and the kernel has noted where ([`elfen_kernel::preempted`]).
//!
//! A check that finds the request lane busy rings the doorbell. The guard then wakes, has its lane
//! at once, and polls. The guard still decides about policy, nap and overlap.
//!
//! With several lanes, all guards meet in a rendezvous before one of them writes (`rendezvous.rs`),
//! and checks read the lane that their thread is on.

mod handover;
pub mod page;
mod planner;
mod probe_schedule;
mod rendezvous;
mod site_probe;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::thread::{self, JoinHandle, Thread};

use elfen_instrument::live::Pages;
use elfen_kernel::preempted::Notes;

use self::handover::Exchange;
pub(super) use self::site_probe::SiteProbe;
use super::channels::Channels;
use elfen_machine::placement::Placement;

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
        let ours = exchange.clone();
        let theirs = stop.clone();
        let channels = channels.clone();
        let plan = move || {
            // Other programs come before the planner. It comes before a batch on the same CPU.
            let _lowered = Placement::lower_own_priority();
            planner::plan(&channels, pages, &ours, &theirs);
        };
        let thread = thread::Builder::new().name("elfen-planner".into()).spawn(plan)?;
        Ok(Self { exchange, stop, thread: Some(thread) })
    }

    /// What the guard of the lane with this index needs for live checks.
    pub(super) fn site_probe(&self, notes: Arc<Notes>, index: usize) -> Option<SiteProbe> {
        let planner: Thread = self.thread.as_ref()?.thread().clone();
        Some(SiteProbe::new(notes, self.exchange.clone(), planner, index))
    }
}

impl Drop for Planner {
    fn drop(&mut self) {
        // Relaxed: the join below orders everything else.
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The thread does not panic. If it did, the batch would still be guarded.
            let _ended = thread.join();
        }
    }
}
