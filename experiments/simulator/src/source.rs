//! The requests of one queue in the order of arrival, drawn at random or from a trace.

use std::sync::Arc;

use super::demand::Demand;
use super::load::{Arrivals, Load};
use super::random::{Purpose, Random, mix, stream};
use super::time::real;

/// The source of requests.
#[derive(Clone, Debug)]
pub enum Requests {
    Drawn {
        load: Load,
        demand: Demand,
    },
    /// The arrival time and the demand of each request.
    Trace(Arc<[(u64, u64)]>),
}

impl Requests {
    /// Returns, for one machine, the time from the first arrival to the last and the sum of all
    /// demands. Both are expected values if the requests are drawn at random.
    pub(super) fn extent_ns(&self, until: Until) -> (f64, f64) {
        match self {
            Self::Drawn { load, demand } => {
                let (requests, span_ns) = match until {
                    Until::Requests(count) => (real(count), real(count) * 1e9 / load.mean_rps()),
                    Until::Time { ns } => (load.mean_rps() * real(ns) / 1e9, real(ns)),
                };
                (span_ns, requests * demand.mean_ns())
            }
            Self::Trace(trace) => {
                let span_ns = trace.last().map_or(0.0, |request| real(request.0));
                (span_ns, trace.iter().map(|request| real(request.1)).sum())
            }
        }
    }

    /// Returns the longest service time, or the mean if the distribution has no upper bound.
    pub(super) fn longest_ns(&self) -> u64 {
        match self {
            Self::Drawn { demand, .. } => demand.longest_ns(),
            Self::Trace(trace) => trace.iter().map(|request| request.1).max().unwrap_or(0),
        }
    }
}

/// The condition that ends the requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Until {
    /// They end after this many requests per machine.
    Requests(u64),
    /// They end at this time. The simulation lasts at least until then.
    Time { ns: u64 },
}

/// One queue's share of a machine's requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Share {
    pub(super) machine: u64,
    /// The number of this queue among the queues of all machines.
    pub(super) queue: u64,
    /// The number of this queue among the queues of its machine.
    pub(super) index: u64,
    pub(super) of: u64,
}

#[derive(Debug)]
pub(super) struct Source {
    kind: Kind,
    end_ns: u64,
}

#[derive(Debug)]
enum Kind {
    Drawn { arrivals: Box<Arrivals>, demand: Demand, random: Random, left: u64 },
    Trace { requests: Arc<[(u64, u64)]>, at: usize, seed: u64, share: Share },
}

impl Source {
    pub(super) fn new(requests: &Requests, until: Until, seed: u64, share: Share) -> Self {
        let (left, end_ns) = match until {
            Until::Requests(count) => (share_of(count, share), 0),
            Until::Time { ns } => (u64::MAX, ns),
        };
        let kind = match requests {
            Requests::Drawn { load, demand } => {
                let part = 1.0 / real(share.of);
                let arrivals = Arrivals::new(load, seed, share.machine, share.queue, part);
                let random = stream(seed, Purpose::Demand, share.queue);
                Kind::Drawn { arrivals: Box::new(arrivals), demand: demand.clone(), random, left }
            }
            Requests::Trace(trace) => Kind::Trace { requests: trace.clone(), at: 0, seed, share },
        };
        Self { kind, end_ns }
    }

    /// Returns the earliest end of the simulation, or 0 if only the requests determine the end.
    pub(super) fn end_ns(&self) -> u64 {
        self.end_ns
    }
}

impl Iterator for Source {
    type Item = (u64, u64);

    /// Returns the arrival time and the demand of the next request.
    #[inline]
    fn next(&mut self) -> Option<(u64, u64)> {
        match &mut self.kind {
            Kind::Drawn { arrivals, demand, random, left } => {
                *left = left.checked_sub(1)?;
                let arrived_ns = arrivals.next_ns();
                if self.end_ns > 0 && arrived_ns >= self.end_ns {
                    *left = 0;
                    return None;
                }
                Some((arrived_ns, demand.sample(random)))
            }
            Kind::Trace { requests, at, seed, share } => {
                let ours =
                    |at: usize| mix(mix(*seed, Purpose::Routing as u64), at as u64) % share.of;
                while *at < requests.len() && ours(*at) != share.index {
                    *at += 1;
                }
                let request = requests.get(*at).copied();
                *at += 1;
                request
            }
        }
    }
}

/// Returns the number of requests of this queue: those of the machine, distributed as evenly as
/// possible over its queues.
fn share_of(count: u64, share: Share) -> u64 {
    count / share.of + u64::from(share.index < count % share.of)
}
