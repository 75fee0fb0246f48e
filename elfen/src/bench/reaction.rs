//! How fast a batch thread leaves its lane when a request starts, and how fast it is back when the request ends.
//!
//! Two pinned threads. The request's runs and idles in turns and notes when each turn began; the batch's does nothing but
//! read the clock, so that a pause in its readings is a time it did not run. Matched with the turns, the last reading
//! before a pause says when the batch stopped, and the first after it when it was back: measured from outside, and not
//! by what the runtime counts of itself.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use elfen_rt::clock::monotonic_ns;

use super::borrower::{Inject, Stretch, pauses};
use super::distribution::{Distribution, number};
use crate::host::affinity;
use crate::host::run::Order;
use crate::host::run::channels::Channels;
use crate::host::run::guard::Guards;
use crate::host::run::waker::Wakers;

const BUSY_NS: u64 = 2_000_000;
const IDLE: Duration = Duration::from_millis(3);
const TURNS: usize = 400;
/// A pause between two readings longer than any interrupt, and far shorter than a turn.
const PAUSE_NS: u64 = 300_000;
/// How often leases are renewed, in turns: well within one.
const RENEW_EVERY: usize = 100;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Reaction {
    /// From request start to batch stopped.
    pub(crate) stop: Distribution,
    /// From request end to batch running.
    pub(crate) resume: Distribution,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("a thread cannot take its place: {0}")]
    Place(#[from] io::Error),
    #[error("the batch was never seen to stop for a request")]
    NeverStopped,
}

/// Measures one way. For [`Inject::Inline`] the caller has put the run into this process's environment.
pub(crate) fn measure(
    order: &Order,
    channels: &Arc<Channels>,
    inject: Inject,
) -> Result<Reaction, Error> {
    let Some(&(batch, request)) = channels.assigned().first() else {
        return Err(Error::NeverStopped);
    };
    channels.renew_leases();
    let _guards = match inject {
        Inject::Guard => Some(Guards::start(channels, &order.nap, order.looks)?),
        Inject::Inline => None,
    };
    let _wakers = order.alarm.as_ref().map(|a| Wakers::start(channels, a)).transpose()?;
    let stop = Arc::new(AtomicBool::new(false));
    let borrower = {
        let stop = stop.clone();
        thread::spawn(move || pauses(batch, inject, PAUSE_NS, &stop))
    };
    let turns = {
        let channels = channels.clone();
        thread::spawn(move || turns(request, &channels))
    };
    let turns = turns.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    stop.store(true, Relaxed);
    let pauses = borrower.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    let (stops, resumes) = matched(&turns?, &pauses?);
    match (Distribution::of(stops), Distribution::of(resumes)) {
        (Some(stop), Some(resume)) => Ok(Reaction { stop, resume }),
        _ => Err(Error::NeverStopped),
    }
}

/// The request's side: when each of its busy turns began and ended.
fn turns(cpu: u32, channels: &Channels) -> io::Result<Vec<Stretch>> {
    affinity::pin(cpu)?;
    let mut turns = Vec::with_capacity(TURNS);
    for turn in 0..TURNS {
        if turn % RENEW_EVERY == 0 {
            channels.renew_leases();
        }
        thread::sleep(IDLE);
        let now_ns = monotonic_ns();
        // The lane was busy before this thread could note it, and a check reacts in less time than that takes.
        let from_ns = channels.busy_since_ns(cpu).unwrap_or(now_ns);
        while monotonic_ns() < now_ns + BUSY_NS {}
        turns.push((from_ns, monotonic_ns()));
    }
    Ok(turns)
}

/// For each turn that one pause answers: from its start to the pause's, from its end to the pause's.
///
/// A batch that was off its lane already, for a task that is none of ours, or that came back before the end, reacted to
/// something else: left out.
fn matched(turns: &[Stretch], pauses: &[Stretch]) -> (Vec<f64>, Vec<f64>) {
    let answers = turns.iter().filter_map(|&(from, to)| {
        let mut during = pauses.iter().filter(|&&(stop, resume)| resume > from && stop < to);
        let &(stop, resume) = during.next()?;
        let alone = during.next().is_none();
        (alone && stop >= from && resume >= to).then(|| (stop - from, resume - to))
    });
    answers.map(|(stop, resume)| (number(stop), number(resume))).unzip()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_pause_that_answers_the_turn_counts() {
        let turns = [(100, 200), (300, 400), (500, 600), (700, 800)];
        let pauses = [(110, 205), (290, 410), (520, 560), (590, 615), (705, 801)];
        assert_eq!(matched(&turns, &pauses), (vec![10.0, 5.0], vec![5.0, 1.0]));
    }
}
