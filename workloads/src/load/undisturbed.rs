//! Which requests of a run say something of the generator: those during which neither it nor the
//! service was kept from running.
//!
//! A pause makes those late that are under way, and all that queue behind them. So after a pause
//! nothing counts until the service has idled, in truth and according to the plan.

use super::record::Sample;
use crate::units::{Nanos, micros};

/// Times from the run's origin.
#[derive(Clone, Copy, Debug)]
pub(super) struct Interval {
    pub(super) from_ns: Nanos,
    pub(super) to_ns: Nanos,
}

impl Interval {
    pub(super) fn ms(&self) -> f64 {
        micros(self.to_ns - self.from_ns) / 1e3
    }
}

/// For each sample, whether it counts. Samples are in the order of the plan, `planned` are the
/// response times it has for them; pauses come one after the other.
pub(super) fn undisturbed(samples: &[Sample], planned: &[Nanos], pauses: &[Interval]) -> Vec<bool> {
    let mut counts = Vec::with_capacity(samples.len());
    let (mut free_by_plan, mut free, mut clean) = (0, 0, true);
    for (sample, response) in samples.iter().zip(planned) {
        let (at, done) = (sample.intended_ns, sample.done_ns);
        clean |= at >= free_by_plan && at >= free;
        let next = pauses.partition_point(|pause| pause.to_ns < at);
        clean &= pauses.get(next).is_none_or(|pause| pause.from_ns > done);
        free_by_plan = at + response;
        free = free.max(done);
        counts.push(clean);
    }
    counts
}

/// Two threads pause at their own times: what overlaps becomes one.
pub(super) fn one_after_the_other(mut pauses: Vec<Interval>) -> Vec<Interval> {
    pauses.sort_by_key(|pause| pause.from_ns);
    let mut joined: Vec<Interval> = Vec::with_capacity(pauses.len());
    for pause in pauses {
        match joined.last_mut() {
            Some(last) if pause.from_ns <= last.to_ns => last.to_ns = last.to_ns.max(pause.to_ns),
            _ => joined.push(pause),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(intended_ns: Nanos, done_ns: Nanos) -> Sample {
        Sample {
            index: 0,
            query: 0,
            connection: None,
            intended_ns,
            sent_ns: Some(intended_ns),
            done_ns,
            result: Ok(()),
            queue_ns: None,
            service_ns: None,
        }
    }

    fn counting(samples: &[(Nanos, Nanos)], pauses: &[(Nanos, Nanos)]) -> Vec<bool> {
        // The plan has 10 ns for each, one after the other.
        let planned = samples.iter().scan(0, |free, (at, _)| {
            *free = (*free).max(*at) + 10;
            Some(*free - at)
        });
        let planned: Vec<Nanos> = planned.collect();
        let samples: Vec<Sample> = samples.iter().map(|(at, done)| sample(*at, *done)).collect();
        let interval =
            |(from_ns, to_ns): &(Nanos, Nanos)| Interval { from_ns: *from_ns, to_ns: *to_ns };
        let pauses: Vec<Interval> = pauses.iter().map(interval).collect();
        undisturbed(&samples, &planned, &one_after_the_other(pauses))
    }

    /// Goal: a pause takes out what it touched and what queued behind, and nothing else. Method:
    /// requests before, in, behind and after one, in truth and by the plan.
    #[test]
    fn a_pause_takes_out_what_it_touched() {
        let alone = [(0, 10), (100, 110), (200, 210)];
        assert_eq!(counting(&alone, &[]), [true, true, true]);
        assert_eq!(counting(&alone, &[(20, 90)]), [true, true, true], "nothing was under way");
        assert_eq!(counting(&alone, &[(105, 150)]), [true, false, true]);
        assert_eq!(counting(&alone, &[(50, 100)]), [true, false, true], "it begins in one");
        assert_eq!(counting(&alone, &[(112, 120), (5, 150)]), [false, false, true], "of two");
        // The second is answered late, the third behind it, the fourth when all is over.
        let queued = [(0, 10), (20, 60), (30, 70), (100, 110)];
        assert_eq!(counting(&queued, &[(25, 55)]), [true, false, false, true]);
        // By the plan the third queues behind the second, which was answered too early to be true.
        let hasty = [(0, 10), (20, 22), (25, 40), (100, 110)];
        assert_eq!(counting(&hasty, &[(21, 22)]), [true, false, false, true]);
    }
}
