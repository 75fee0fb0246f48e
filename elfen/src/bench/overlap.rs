//! How long a batch runs next to requests under borrow-idle, and whether the runtime's own account of it is true.
//!
//! Two pinned threads as in `reaction`: one is busy and idle in turns and notes them; the other, the batch, reads the clock
//! all the time, so that a stretch without a reading is one that it did not run. What the two notes have in common is the overlap
//! as seen from outside; beside it stands what the scheduler's trace and what the lane page say of the same turns.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use elfen_rt::clock::monotonic_ns;
use elfen_rt::signal::lane::LaneSlot;

use super::borrower::{Inject, Stretch, pauses};
use super::trace::Trace;
use crate::host::affinity;
use crate::host::run::Order;
use crate::host::run::channels::Channels;
use crate::host::run::guard::Guards;

/// A stretch without a reading that is longer was no reading of the clock, but something else on the CPU.
const PAUSE_NS: u64 = 2_000;
/// Notes are made in memory that is there already: so many turns at most.
const TURNS_MAX: usize = 8_000;

/// Of all turns of one length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Overlap {
    pub(crate) turns: usize,
    /// By the request thread's notes.
    pub(crate) busy_ns: u64,
    /// By the notes of both.
    pub(crate) seen_ns: u64,
    /// By the scheduler's trace; `None` without one, or if the batch naps on its lane, where the scheduler sees it run.
    pub(crate) traced_ns: Option<u64>,
    /// By the task map and the lane page.
    pub(crate) reported_busy_ns: u64,
    pub(crate) reported_ns: u64,
}

/// Plays turns of each length for `time`.
pub(crate) fn measure(
    order: &Order,
    channels: &Arc<Channels>,
    inject: Inject,
    turns: &[Duration],
    time: Duration,
) -> io::Result<Vec<Overlap>> {
    let (batch, request) = channels.assigned()[0];
    channels.renew_leases();
    let _guards = match inject {
        Inject::Guard => Some(Guards::start(channels, &order.nap, order.looks)?),
        Inject::Inline => None,
    };
    let stop = Arc::new(AtomicBool::new(false));
    let (say_task, task) = mpsc::channel();
    let borrower = {
        let stop = stop.clone();
        thread::spawn(move || {
            // Nobody who waits for it hears nothing but that this has ended.
            let _heard = say_task.send(nix::unistd::gettid().as_raw());
            pauses(batch, inject, PAUSE_NS, &stop)
        })
    };
    let task = task.recv().map_err(io::Error::other)?;
    let trace = match inject {
        Inject::Guard => Trace::start(&[batch, request]).ok(),
        Inject::Inline => None,
    };
    let player = {
        let (channels, turns) = (channels.clone(), turns.to_vec());
        let traced = Traced { trace, task };
        thread::spawn(move || {
            affinity::pin(request)?;
            turns.iter().map(|&turn| play(&channels, &traced, turn, time)).collect()
        })
    };
    let played: io::Result<Vec<Played>> = join(player);
    stop.store(true, Relaxed);
    let pauses = join(borrower)?;
    let overlap = |played: Played| {
        let length = |&(from, to): &Stretch| to - from;
        Overlap {
            turns: played.busy.len(),
            busy_ns: played.busy.iter().map(length).sum(),
            seen_ns: shared_ns(&played.busy, &pauses),
            traced_ns: played.traced_ns,
            reported_busy_ns: played.reported_busy_ns,
            reported_ns: played.reported_ns,
        }
    };
    Ok(played?.into_iter().map(overlap).collect())
}

fn join<T>(thread: thread::JoinHandle<T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// The scheduler's trace, and which task of it is the batch.
struct Traced {
    trace: Option<Trace>,
    task: i32,
}

struct Played {
    busy: Vec<Stretch>,
    traced_ns: Option<u64>,
    reported_busy_ns: u64,
    reported_ns: u64,
}

/// The request's side, for turns of one length.
fn play(
    channels: &Channels,
    Traced { trace, task }: &Traced,
    turn: Duration,
    time: Duration,
) -> io::Result<Played> {
    let (batch, request) = channels.assigned()[0];
    let lane: &LaneSlot = channels.lanes().slot(0).ok_or(io::ErrorKind::NotFound)?;
    let account = || {
        let busy_ns = channels.busy_ns(request, monotonic_ns()).unwrap_or(0);
        (busy_ns, lane.overlapped_ns.load(Relaxed))
    };
    let turn_ns = u64::try_from(turn.as_nanos()).unwrap_or(u64::MAX);
    let mut busy = Vec::with_capacity(TURNS_MAX);
    channels.renew_leases();
    // The first turn brings the lease, and the batch to its lane.
    thread::sleep(turn + Duration::from_millis(20));
    trace.as_ref().map(Trace::clear).transpose()?;
    // The trace knows who runs on a lane from its next switch on, and the guard looks meanwhile.
    thread::sleep(Duration::from_millis(5));
    let (before, start_ns) = (account(), monotonic_ns());
    let (start, mut renewed) = (Instant::now(), Instant::now());
    while start.elapsed() < time && busy.len() < TURNS_MAX {
        let now_ns = monotonic_ns();
        // The lane was busy before this thread could note it.
        let from_ns = channels.busy_since_ns(request).unwrap_or(now_ns).max(start_ns);
        while monotonic_ns() < now_ns + turn_ns {}
        if renewed.elapsed() > Duration::from_secs(1) {
            channels.renew_leases();
            renewed = Instant::now();
        }
        busy.push((from_ns, monotonic_ns()));
        thread::sleep(turn);
    }
    // The batch counts at its next look: let it have one.
    thread::sleep(Duration::from_millis(20));
    let after = account();
    let switches = trace.as_ref().map(Trace::read).transpose()?;
    let traced_ns = switches.map(|traced| {
        let (since_ns, until_ns) = traced.known(batch);
        let inside = |(from, to): Stretch| (from.max(since_ns), to.min(until_ns));
        let busy = traced.busy(request).into_iter().map(inside).filter(|(from, to)| from < to);
        shared_ns(&busy.collect::<Vec<_>>(), &traced.without(batch, *task))
    });
    let (reported_busy_ns, reported_ns) = (after.0 - before.0, after.1 - before.1);
    Ok(Played { busy, traced_ns, reported_busy_ns, reported_ns })
}

/// How much of `busy` is in none of the pauses. Both are in their order.
fn shared_ns(busy: &[Stretch], pauses: &[Stretch]) -> u64 {
    let mut first = 0;
    let mut shared_ns = 0;
    for &(from, to) in busy {
        while pauses.get(first).is_some_and(|&(_, end)| end <= from) {
            first += 1;
        }
        let during = pauses[first..].iter().take_while(|&&(begin, _)| begin < to);
        let paused_ns: u64 = during.map(|&(begin, end)| end.min(to) - begin.max(from)).sum();
        shared_ns += (to - from).saturating_sub(paused_ns);
    }
    shared_ns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_no_pause_is_shared() {
        let busy = [(100, 200), (300, 400), (500, 600)];
        assert_eq!(shared_ns(&busy, &[]), 300);
        assert_eq!(shared_ns(&busy, &[(0, 1000)]), 0, "one pause over all turns");
        assert_eq!(shared_ns(&busy, &[(10, 90), (110, 250), (290, 390)]), 10 + 10 + 100);
        assert_eq!(shared_ns(&busy, &[(150, 350), (550, 560), (570, 700)]), 50 + 50 + 60);
    }
}
