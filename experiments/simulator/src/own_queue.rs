//! A core with a queue of its own: requests one after the other, without an event list.
//!
//! First come, first served on one worker means that a request starts when it arrives or when the
//! one before it ends. So each is known completely before the next is looked at, and a core takes
//! constant memory.

use super::model::Model;
use super::outcome::Outcome;
use super::pair::{Control, Pair};
use super::source::Source;
use super::trace::{Served, Sink};
use super::windows::Windows;

/// Simulates core `core` of `model`, until its requests are used up.
pub(super) fn run(model: &Model, core: u64, mut source: Source, sink: &mut impl Sink) -> Outcome {
    let mut outcome = Outcome::default();
    let mut windows = model.watch.map(Windows::new);
    let mut pair = Pair::new(model.batch, model.control);
    let mut free_ns = 0;
    let mut next = source.next();
    while let Some((arrived_ns, demand_ns)) = next {
        next = source.next();
        let started_ns = arrived_ns.max(free_ns);
        if free_ns < started_ns {
            pair.idle(free_ns, started_ns);
        }
        if let Some(policy) = windows.as_mut().and_then(|windows| windows.policy_at(started_ns)) {
            pair.control = Control::Policy(policy);
        }
        let overlapped_ns = pair.tally.overlapped_ns;
        pair.begin(outcome.requests + 1, started_ns, demand_ns);
        let waiting = |now_ns| next.is_some_and(|(arrives_ns, _)| arrives_ns <= now_ns);
        let ended_ns = pair.finish(waiting).expect("a request has begun");
        outcome.record(arrived_ns, started_ns, ended_ns);
        if let Some(windows) = &mut windows {
            windows.finished(ended_ns, ended_ns - arrived_ns, &mut outcome);
        }
        let overlapped_ns = pair.tally.overlapped_ns - overlapped_ns;
        sink.served(&Served { core, arrived_ns, started_ns, ended_ns, demand_ns, overlapped_ns });
        free_ns = ended_ns;
    }
    let end_ns = source.end_ns().max(free_ns);
    pair.idle(free_ns, end_ns);
    if let Some(windows) = &mut windows {
        windows.judge(&mut outcome);
    }
    outcome.close_core(&pair.tally, end_ns);
    outcome
}
