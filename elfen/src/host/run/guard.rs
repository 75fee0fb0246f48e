//! The guard of one batch lane: a thread that has the lane whenever it wants it, and wants it while the policy says nap.
//!
//! Asleep it costs the batch a timer and two context switches per look. Awake it holds the lane and naps there, so that
//! nothing of the batch runs next to a request. Its reaction is bounded by how often it looks; programs with checks of
//! their own react at once, and find the guard's decision in the same lane slot.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use elfen_rt::borrow::{Borrow, Sources};
use elfen_rt::clock::monotonic_ns;
use elfen_rt::nap::block::Block;
use elfen_rt::nap::{Nap, protocol};
use elfen_rt::policy::Verdict;
use elfen_rt::signal::task::TaskSlot;

use super::channels::Channels;
use super::ipc::Meter;
use crate::host::affinity;

/// How long a nap lasts without looking at the policy again, when nothing that the guard watches changes.
const NAP_BOUND_NS: u64 = 50_000;

/// The guards of a run. They leave their lanes when this drops.
#[derive(Debug)]
pub(crate) struct Guards {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Guards {
    /// Starts a guard on every batch lane.
    pub(crate) fn start(
        channels: &Arc<Channels>,
        nap: &Arc<Nap>,
        look_every: Duration,
    ) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut guards = Self { stop: stop.clone(), threads: Vec::new() };
        for index in 0..channels.assigned().len() {
            let (channels, nap, stop) = (channels.clone(), nap.clone(), stop.clone());
            let guard = move || guard(&channels, index, &nap, look_every, &stop);
            guards.threads.push(thread::Builder::new().name("elfen-guard".into()).spawn(guard)?);
        }
        Ok(guards)
    }
}

impl Drop for Guards {
    fn drop(&mut self) {
        // Relaxed: the join below orders everything else.
        self.stop.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            // A guard does not panic; if it did, its lane is no worse off than without it.
            let _ended = thread.join();
        }
    }
}

fn guard(channels: &Channels, index: usize, how: &Nap, look_every: Duration, stop: &AtomicBool) {
    let (batch, request) = channels.assigned()[index];
    let Some(slot) = u32::try_from(index).ok().and_then(|index| channels.lanes().slot(index))
    else {
        return;
    };
    stay_on(batch);
    let sources = channels.sources(request);
    let mut borrow = Borrow::new(sources, channels.control(), slot);
    let mut meter = Meter::default();
    let mut disobeyed = Disobeyed::default();
    while !stop.load(Relaxed) {
        let now_ns = monotonic_ns();
        if let Some(ipc_milli) = channels.counted(request).and_then(|now| meter.window(now)) {
            slot.publish_ipc(ipc_milli, now_ns);
        }
        let look = borrow.look(now_ns);
        match look.verdict {
            Verdict::Nap if matches!(how, Nap::Block) => {
                if disobeyed.since_last(channels.busy_ns(batch, now_ns), now_ns) {
                    hold(sources);
                } else {
                    let bound_ns = u64::try_from(look_every.as_nanos()).unwrap_or(u64::MAX);
                    block(&slot.wakes, sources, bound_ns);
                }
            }
            Verdict::Nap => nap(how, request, sources, &slot.wakes),
            Verdict::Run => {
                disobeyed = Disobeyed::default();
                let budget = look.until_ns.map(|until| until.saturating_sub(now_ns));
                let budget = budget.map_or(look_every, Duration::from_nanos);
                thread::sleep(look_every.min(budget));
            }
        }
    }
    borrow.leave(monotonic_ns());
}

/// The lane can go offline while we run: then the kernel moves us, and the keeper's next look at the batch brings us back.
fn stay_on(batch: u32) {
    let _moved = affinity::pin(batch);
    // SAFETY: prctl takes numbers. Timers of this thread fire when they are due, not up to 50 us later.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1, 0, 0, 0) };
}

/// Whether somebody runs on a batch lane whose threads ought to block: a program without checks, or one whose checks are
/// rare. Told by the time that the lane was busy since the guard last looked.
#[derive(Debug, Default)]
struct Disobeyed {
    before: Option<(u64, u64)>,
}

impl Disobeyed {
    fn since_last(&mut self, busy_ns: Option<u64>, now_ns: u64) -> bool {
        let before = self.before;
        self.before = busy_ns.map(|busy_ns| (busy_ns, now_ns));
        let (Some(busy_ns), Some((busy_before_ns, before_ns))) = (busy_ns, before) else {
            return false;
        };
        busy_ns.saturating_sub(busy_before_ns) > now_ns.saturating_sub(before_ns) / 2
    }
}

/// Leaves the lane to whoever else wants it, asleep, until the waker comes.
fn block(wakes: &AtomicU64, sources: Sources<'_>, bound_ns: u64) {
    let end_ns = monotonic_ns().saturating_add(bound_ns);
    let busy = || sources.tasks.is_some_and(TaskSlot::is_busy);
    protocol::nap(&Block::on(wakes), busy, || end_ns.saturating_sub(monotonic_ns()));
}

/// Waits on the lane until the request lane idles, or the bound passes: a policy may decide otherwise by then. Without a task
/// map there is no word that the kernel writes, and the service's are watched by PAUSE.
fn nap(how: &Nap, request: u32, sources: Sources<'_>, wakes: &AtomicU64) {
    match sources.tasks.filter(|slot| slot.is_busy()) {
        Some(slot) => {
            how.nap(request, slot, wakes, NAP_BOUND_NS);
        }
        None => hold(sources),
    }
}

/// Stays on the lane until something changes, or the bound passes.
fn hold(sources: Sources<'_>) {
    let seen = Seen::now(sources);
    let end_ns = monotonic_ns() + NAP_BOUND_NS;
    while Seen::now(sources) == seen && monotonic_ns() < end_ns {
        std::hint::spin_loop();
    }
}

/// The words that a policy decides by.
#[derive(PartialEq)]
struct Seen {
    busy: Option<bool>,
    service: Option<[u64; 2]>,
}

impl Seen {
    fn now(sources: Sources<'_>) -> Self {
        let slot = sources.service.and_then(|(reader, lane)| reader.slot(lane));
        Self {
            busy: sources.tasks.map(|tasks| tasks.is_busy()),
            service: slot
                .map(|s| [&s.running_request, &s.queue_len].map(|word| word.load(Relaxed))),
        }
    }
}
