//! What a guard takes from a batch while the request lane idles: the share of the time that the
//! batch does not run, with the guard and without it by turns.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use std::{io, thread};

use elfen_console::duration::number;
use elfen_rt::clock::monotonic_ns;
use elfen_run::Order;
use elfen_run::channels::Channels;
use elfen_run::guard::Guards;

use super::borrower::pauses;
use super::distribution::Distribution;

/// Two readings of the clock are nearer than this unless something came between them.
const PAUSE_NS: u64 = 200;
const ROUND: Duration = Duration::from_millis(200);
const SETTLE: Duration = Duration::from_millis(300);

/// Millionths of the time in which the batch was not running.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) with: Distribution,
    pub(crate) without: Distribution,
    /// Each round with the guard less its neighbour without.
    pub(crate) added: Distribution,
}

/// Measures `rounds` pairs; `None` of none.
pub(crate) fn measure(
    order: &Order,
    channels: &Arc<Channels>,
    rounds: usize,
) -> io::Result<Option<Taken>> {
    let (mut with, mut without, mut added) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let baseline = lost_per_million(channels)?;
        let guards = Guards::start(channels, &order.nap, order.poll_timing)?;
        let guarded = lost_per_million(channels)?;
        drop(guards);
        with.push(guarded);
        without.push(baseline);
        added.push(guarded - baseline);
    }
    let all = [with, without, added].map(Distribution::of);
    let [Some(with), Some(without), Some(added)] = all else { return Ok(None) };
    Ok(Some(Taken { with, without, added }))
}

fn lost_per_million(channels: &Channels) -> io::Result<f64> {
    let (batch, _) = channels.assigned()[0];
    let stop = Arc::new(AtomicBool::new(false));
    let borrower = {
        let stop = stop.clone();
        thread::spawn(move || pauses(batch, PAUSE_NS, &stop))
    };
    // On a lane that has idled for a while, guards look less often.
    thread::sleep(SETTLE);
    let start_ns = monotonic_ns();
    thread::sleep(ROUND);
    stop.store(true, Relaxed);
    let pauses = borrower.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    let counted = pauses.iter().filter(|&&(from, _)| from >= start_ns);
    let lost_ns: u64 = counted.map(|&(from, to)| to - from).sum();
    Ok(number(lost_ns) / number(monotonic_ns() - start_ns) * 1e6)
}
