//! One invocation: a plan from a seed, what drives it, and what that recorded.

use super::arrivals::{Arrival, Arrivals, End, Plan};
use super::driver::{DriveError, Driven, Driver, Line, Pulse};
use super::engine::{Engine, Limits};
use super::queries::QuerySet;
use super::record::{Distribution, Keep, Recorder};
use crate::process::affinity::{PinError, pin};
use crate::process::descriptors::{self, TooMany};
use crate::process::interrupt;
use crate::units::{Nanos, nanos_from_f64, seconds};
use std::sync::Arc;
use std::thread;
use thiserror::Error;

#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) line: Line,
    pub(crate) queries: Arc<QuerySet>,
    pub(crate) arrivals: Arrivals,
    pub(crate) rps: f64,
    pub(crate) end: End,
    pub(crate) warmup_ns: Nanos,
    pub(crate) limits: Limits,
    /// Where the generator runs; without one the kernel chooses.
    pub(crate) cpu: Option<usize>,
    pub(crate) every_request: bool,
}

#[derive(Debug, Error)]
pub(crate) enum RunError {
    #[error(transparent)]
    Drive(#[from] DriveError),
    #[error(transparent)]
    Pin(#[from] PinError),
    #[error(transparent)]
    TooMany(#[from] TooMany),
}

#[derive(Debug)]
pub(crate) struct Invocation {
    pub(crate) seed: u64,
    pub(crate) recorder: Recorder,
    /// How long after its timer a sleeping generator ran.
    pub(crate) overslept: Distribution,
    pub(crate) lost: u64,
    /// From the end of the warm-up to the last answer, or to the planned end if that is later and
    /// was waited for.
    pub(crate) span_ns: Nanos,
}

impl Invocation {
    /// Requests answered well, per second.
    pub(crate) fn achieved_rps(&self) -> f64 {
        if self.span_ns == 0 {
            return 0.0;
        }
        self.recorder.latency.count() as f64 / seconds(self.span_ns)
    }
}

impl Settings {
    /// The measured part of the plan.
    pub(crate) fn plan(&self, seed: u64) -> Plan {
        Plan::new(&self.arrivals, self.rps, self.end, self.queries.len(), seed)
    }

    /// The measured part, after a warm-up at the same rate; indices count through both.
    fn whole_plan(&self, seed: u64) -> impl Iterator<Item = Arrival> + Send + use<> {
        let end = End::At(self.warmup_ns);
        let warmup_ns = self.warmup_ns;
        let queries = self.queries.len();
        // Another stream than the measured one, so that the warm-up leaves the measurement as it
        // is.
        let warmup = Plan::new(&Arrivals::Exponential, self.rps, end, queries, !seed);
        let measured = self.plan(seed).map(move |mut arrival| {
            arrival.at_ns += warmup_ns;
            arrival
        });
        warmup.chain(measured).zip(0..).map(|(arrival, index)| Arrival { index, ..arrival })
    }

    fn planned_end_ns(&self, seed: u64) -> Nanos {
        let measured = match self.end {
            End::At(ns) => ns,
            End::Requests(_) => {
                let requests = self.plan(seed).expected_requests(self.rps);
                nanos_from_f64(requests as f64 / self.rps * 1e9).unwrap_or(Nanos::MAX / 2)
            }
        };
        self.warmup_ns + measured
    }

    fn keep(&self, seed: u64) -> Keep {
        Keep {
            warmup_ns: self.warmup_ns,
            planned_end_ns: self.planned_end_ns(seed),
            every_request: self.every_request,
        }
    }

    /// Runs the plan of `seed` against the service, on a thread of its own.
    pub(crate) fn run(&self, seed: u64, pulse: &Arc<Pulse>) -> Result<Invocation, RunError> {
        descriptors::allow(self.line.connections)?;
        let driven = thread::scope(|scope| {
            let driving = scope.spawn(|| self.drive(seed, pulse));
            driving.join().expect("the driver's thread panicked")
        })?;
        let Driven { mut recorder, overslept, lost } = driven;
        recorder.samples.sort_by_key(|sample| sample.index);
        let planned = match self.end {
            End::At(_) if !interrupt::asked() => self.planned_end_ns(seed),
            _ => 0,
        };
        let span_ns = recorder.last_done_ns.max(planned).saturating_sub(self.warmup_ns);
        Ok(Invocation { seed, recorder, overslept, lost, span_ns })
    }

    fn drive(&self, seed: u64, pulse: &Arc<Pulse>) -> Result<Driven, RunError> {
        self.cpu.map_or(Ok(()), pin)?;
        let plan = Box::new(self.whole_plan(seed));
        let engine = Engine::new(plan, self.limits, Recorder::new(self.keep(seed)));
        let (line, queries) = (self.line.clone(), self.queries.clone());
        let driver = Driver::connect(line, engine, queries, pulse.clone())?;
        Ok(driver.run()?)
    }
}
