//! What becomes of a plan when generator and service are kept from running at known times.
//!
//! Whatever falls into a pause happens at its end: a request is sent, seen by the service, answered,
//! and seen by the generator. What queues behind it waits longer as well. So pauses need not be left
//! out, which on a busy machine leaves little: a plan with the pauses in it says what has to be
//! measured, request by request.

use super::pauses::Pause;
use crate::units::Nanos;
use std::time::Instant;

/// The pauses of one thread, in nanoseconds from the run's origin.
#[derive(Clone, Debug, Default)]
pub(super) struct Paused {
    /// From when to when, one after the other.
    times: Vec<(Nanos, Nanos)>,
}

impl Paused {
    /// Pauses as one thread notes them: in order, and apart.
    pub(super) fn new(pauses: &[Pause], origin: Instant) -> Self {
        let since = |at: Instant| at.saturating_duration_since(origin).as_nanos();
        let ns = |at: Instant| Nanos::try_from(since(at)).unwrap_or(Nanos::MAX);
        Self { times: pauses.iter().map(|pause| (ns(pause.from), ns(pause.to))).collect() }
    }

    pub(super) fn number(&self) -> usize {
        self.times.len()
    }

    pub(super) fn total_ns(&self) -> Nanos {
        self.times.iter().map(|(from, to)| to - from).sum()
    }

    /// When the thread does what is to be done at this time.
    fn does(&self, at: Nanos) -> Nanos {
        let next = self.times.partition_point(|(_, to)| *to <= at);
        self.times.get(next).filter(|(from, _)| *from <= at).map_or(at, |(_, to)| *to)
    }
}

/// The response time of each request of a plan: Lindley's recursion, between a generator and a
/// service that pause.
pub(super) fn with_pauses(
    arrivals: impl Iterator<Item = Nanos>,
    services: impl Iterator<Item = Nanos>,
    generator: &Paused,
    service: &Paused,
) -> Vec<Nanos> {
    let mut free_at = 0;
    let response = |(at, takes): (Nanos, Nanos)| {
        let arrived = service.does(generator.does(at));
        free_at = arrived.max(free_at) + takes;
        generator.does(service.does(free_at)) - at
    };
    arrivals.zip(services).map(response).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::theory::lindley;

    fn paused(times: &[(Nanos, Nanos)]) -> Paused {
        Paused { times: times.to_vec() }
    }

    /// The moments at which requests of 10 ns that are due at 0, 100, 105 and 200 are done.
    fn done(generator: &[(Nanos, Nanos)], service: &[(Nanos, Nanos)]) -> Vec<Nanos> {
        const DUE: [Nanos; 4] = [0, 100, 105, 200];
        let services = std::iter::repeat(10);
        let (generator, service) = (paused(generator), paused(service));
        let responses = with_pauses(DUE.into_iter(), services, &generator, &service);
        DUE.into_iter().zip(responses).map(|(at, response)| at + response).collect()
    }

    /// Goal: a pause delays what falls into it and what queues behind, and nothing else. Method:
    /// pauses of either side at every point of a request's way.
    #[test]
    fn pauses_delay_what_falls_into_them() {
        assert_eq!(done(&[], &[]), [10, 110, 120, 210]);
        assert_eq!(done(&[(20, 90)], &[(20, 90)]), [10, 110, 120, 210], "nothing is under way");
        assert_eq!(done(&[(90, 103)], &[]), [10, 113, 123, 210], "sent late, and a queue behind");
        assert_eq!(done(&[], &[(90, 103)]), [10, 113, 123, 210], "seen late");
        assert_eq!(done(&[], &[(109, 115)]), [10, 115, 120, 210], "answered late");
        assert_eq!(done(&[(109, 130)], &[]), [10, 130, 130, 210], "answers are seen late");
        assert_eq!(done(&[(100, 102), (112, 125)], &[(101, 104)]), [10, 125, 125, 210], "in turn");
        assert_eq!(done(&[(10, 11)], &[(110, 110)]), [11, 110, 120, 210], "at their borders");
    }

    /// Goal: without pauses it is the plan. Method: the same times through both.
    #[test]
    fn without_pauses_it_is_the_plan() {
        let (arrivals, services) = ([5, 6, 50, 51, 52], [7, 30, 2, 9, 1]);
        let plan: Vec<Nanos> = lindley(arrivals.into_iter(), services.into_iter()).collect();
        let none = Paused::default();
        let with = with_pauses(arrivals.into_iter(), services.into_iter(), &none, &none);
        assert_eq!(with, plan);
    }
}
