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
use elfen_rt::clock::{monotonic_ns, nanos};
use elfen_rt::nap::block::Block;
use elfen_rt::nap::{Nap, protocol};
use elfen_rt::policy::Verdict;
use elfen_rt::signal::task::TaskSlot;

use super::channels::Channels;
use super::ipc::Meter;
use super::looks::{Activity, Idling, Looks};
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
        looks: Looks,
    ) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut guards = Self { stop: stop.clone(), threads: Vec::new() };
        for index in 0..channels.assigned().len() {
            let (channels, nap, stop) = (channels.clone(), nap.clone(), stop.clone());
            let guard = move || guard(&channels, index, &nap, looks, &stop);
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

fn guard(channels: &Channels, index: usize, how: &Nap, looks: Looks, stop: &AtomicBool) {
    let (batch, request) = channels.assigned()[index];
    let Some(slot) = u32::try_from(index).ok().and_then(|index| channels.lanes().slot(index))
    else {
        return;
    };
    stay_on(batch);
    let sources = channels.sources(request);
    let own = channels.sources(batch).tasks;
    let active = |now_ns| {
        let service = sources.service.and_then(|(reader, lane)| reader.slot(lane));
        Activity::of(channels.busy_ns(request, now_ns), service)
    };
    let told_to_end_ns = || channels.control().told_to_end_ns.load(Relaxed);
    let mut slack = Slack::none();
    let mut idling = Idling::from(monotonic_ns(), active(monotonic_ns()));
    let mut borrow = Borrow::new(sources, channels.control(), slot);
    let mut meter = Meter::default();
    let mut disobeyed = Disobeyed::default();
    while !stop.load(Relaxed) {
        let now_ns = monotonic_ns();
        if let Some(ipc_milli) = channels.counted(request).and_then(|now| meter.window(now)) {
            slot.publish_ipc(ipc_milli, now_ns);
        }
        // The batch stopped when we were switched in, which is a while before we look.
        let stopped_ns = own.and_then(TaskSlot::snapshot).and_then(|switch| switch.at_ns);
        let look = borrow.look_after(stopped_ns.unwrap_or(now_ns), now_ns);
        slack.set(idling.slack(&look, active(now_ns), now_ns).min(looks.slack));
        match look.verdict {
            Verdict::Nap if let Some(slice) = time_to_end(told_to_end_ns(), now_ns) => {
                thread::sleep(slice);
                slot.add_overlapped(monotonic_ns() - now_ns);
            }
            Verdict::Nap if matches!(how, Nap::Block) => {
                if disobeyed.since_last(channels.busy_ns(batch, now_ns), now_ns) {
                    hold(sources);
                } else {
                    block(&slot.wakes, sources, nanos(looks.every));
                }
            }
            Verdict::Nap => nap(how, request, sources, &slot.wakes),
            Verdict::Run => {
                disobeyed = Disobeyed::default();
                let budget = look.until_ns.map(|until| until.saturating_sub(now_ns));
                let budget = budget.map_or(looks.every, Duration::from_nanos);
                thread::sleep(looks.every.min(budget));
            }
        }
    }
    borrow.leave(monotonic_ns());
}

/// A batch that was told to end may have its lane for a tenth of the next second, whatever runs there: on a lane that is busy all the
/// time it could not even die. The rest of the slice, if this is one.
fn time_to_end(told_ns: u64, now_ns: u64) -> Option<Duration> {
    const FOR: Duration = Duration::from_secs(1);
    const EVERY: Duration = Duration::from_millis(100);
    const SLICE: Duration = Duration::from_millis(10);
    let since = Duration::from_nanos(now_ns.saturating_sub(told_ns));
    let phase = Duration::from_nanos(nanos(since) % nanos(EVERY));
    (told_ns != 0 && since < FOR).then(|| SLICE.checked_sub(phase)).flatten()
}

/// The lane can go offline while we run: then the kernel moves us, and the keeper's next look at the batch brings us back.
fn stay_on(batch: u32) {
    let _moved = affinity::pin(batch);
}

/// How much later than due the kernel may let this thread's timers fire, to save an interrupt.
struct Slack(Duration);

impl Slack {
    /// Instead of the usual 50 us.
    fn none() -> Self {
        let mut slack = Self(Duration::MAX);
        slack.set(Duration::ZERO);
        slack
    }

    fn set(&mut self, slack: Duration) {
        if self.0 != slack {
            self.0 = slack;
            // SAFETY: prctl takes numbers; of these, 0 would stand for the usual slack.
            unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, nanos(slack).max(1), 0, 0, 0) };
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_told_to_end_gets_a_tenth_of_a_second_in_all() {
        const MS: u64 = 1_000_000;
        assert_eq!(time_to_end(0, 5 * MS), None, "nobody told it");
        let at =
            |ms: u64| time_to_end(1_000 * MS, (1_000 + ms) * MS).map(|slice| slice.as_millis());
        assert_eq!([at(0), at(4), at(9), at(11), at(99)], [Some(10), Some(6), Some(1), None, None]);
        let given = (0..3_000).filter(|&ms| at(ms).is_some_and(|slice| slice > 0)).count();
        assert_eq!(given, 100);
    }
}
