//! The generator against a service with known response times: measured percentiles beside those of
//! queueing theory.
//!
//! Two truths stand beside each measurement. Theory is the stationary distribution, which a finite
//! run approaches slowly; the plan is Lindley's recursion over the very arrivals and service times of
//! the run, which leaves no sampling error. The verdict is against the plan: within 2 % or 20 us. How
//! far plans of this length are from theory by chance is known from plans of other seeds, and stands
//! beside it.
//!
//! On a shared machine others take CPUs away, which is no fault of the generator. Neither it nor the
//! service sleeps, so both know when they were kept from running ([`super::pauses`]), and requests
//! that this touched are left out of plan and measurement alike ([`super::undisturbed`]).

use super::arrivals::{Arrivals, End};
use super::driver::{Line, Pulse};
use super::engine::Limits;
use super::pauses::Pause;
use super::protocol::Protocol;
use super::queries::{QuerySet, Target};
use super::record::{Distribution, Sample};
use super::reference::{Reference, ServiceTimes};
use super::run::{RunError, Settings};
use super::theory::{Model, lindley};
use super::undisturbed::{Interval, one_after_the_other, undisturbed};
use super::verdict::{Compared, Figures, Outcome};
use crate::affinity::{PinError, allowed, pin};
use crate::units::Nanos;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};
use thiserror::Error;

/// A percentile of fewer requests is chance.
const FEWEST: usize = 200;
const LOADS: [f64; 3] = [0.3, 0.6, 0.8];
/// Enough to know a spread to a tenth.
const OTHER_SEEDS: u64 = 50;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Check {
    /// The mean service time of the reference service.
    pub(crate) service_ns: Nanos,
    /// Of each of the six runs.
    pub(crate) duration_ns: Nanos,
    pub(crate) seed: u64,
    /// As in [`Line`]; the reference service sleeps where the generator does.
    pub(crate) spin_ns: Option<Nanos>,
    pub(crate) most_late_ns: Option<Nanos>,
}

#[derive(Debug, Error)]
pub(crate) enum CheckError {
    #[error("starting the reference service: {0}")]
    Reference(io::Error),
    #[error(transparent)]
    Pin(#[from] PinError),
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(
        "generator or service was kept from running {pauses} times, which disturbed all but {kept} \
         of {all} requests of a run; give the check two CPUs that nobody else uses"
    )]
    Disturbed { pauses: usize, kept: usize, all: usize },
    #[error("{failed} of {all} requests of the check failed; it measures nothing")]
    Failures { failed: u64, all: u64 },
}

impl Check {
    pub(crate) fn run(&self, mut progress: impl FnMut(&str)) -> Result<Outcome, CheckError> {
        let mut outcome = Outcome::default();
        for model in [Model::Md1, Model::Mm1] {
            for load in LOADS {
                progress(&format!("{} at {:.0} % load", model.name(), load * 100.0));
                let run = self.measure(model, load, self.service_times(model))?;
                self.judge(model, load, &run, &mut outcome)?;
            }
        }
        Ok(outcome)
    }

    fn service_times(&self, model: Model) -> ServiceTimes {
        let exponential = model == Model::Mm1;
        ServiceTimes { exponential, mean_ns: self.service_ns, stall: None }
    }

    /// A run against a service that takes these `times`.
    fn measure(&self, model: Model, load: f64, times: ServiceTimes) -> Result<Run, CheckError> {
        let any_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let reference = Reference::bind(any_port, times, self.seed, self.spin_ns.is_some())
            .map_err(CheckError::Reference)?;
        let address = reference.address().map_err(CheckError::Reference)?;
        // The service on the last CPU, the generator on the first: they spin, and must not share
        // one.
        let cpus = allowed()?;
        let settings = self.settings(address, load, cpus.first().copied());
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let serving = scope.spawn(|| {
                if let Some(last) = cpus.last() {
                    pin(*last)?;
                }
                reference.serve(&stop).map_err(CheckError::Reference)
            });
            let invocation = settings.run(self.seed, &Arc::new(Pulse::default()));
            stop.store(true, Relaxed);
            let of_service = serving.join().expect("the reference service panicked")?;
            let invocation = invocation?;
            let failed = invocation.recorder.errors();
            if failed != 0 {
                let all = invocation.recorder.requests();
                return Err(CheckError::Failures { failed, all });
            }
            let pauses = invocation.pauses.iter().chain(&of_service);
            Ok(Run {
                pauses: pauses.map(|pause| interval(pause, invocation.origin)).collect(),
                plan: self.planned(model, &settings, self.seed),
                samples: invocation.recorder.samples,
                settings,
            })
        })
    }

    fn settings(&self, address: SocketAddr, load: f64, cpu: Option<usize>) -> Settings {
        let target = Target {
            protocol: Protocol::Http,
            host: address.ip().to_string(),
            port: address.port(),
            path: "/".into(),
        };
        let connections = 64;
        Settings {
            line: Line {
                address,
                protocol: Protocol::Http,
                connections,
                patience: Duration::from_secs(5),
                spin_ns: self.spin_ns,
                notes_pauses: self.spin_ns.is_none(),
            },
            queries: Arc::new(QuerySet::of_target(&target).expect("`/` is a good target")),
            arrivals: Arrivals::Exponential,
            rps: load * 1e9 / self.service_ns as f64,
            end: End::At(self.duration_ns),
            warmup_ns: 0,
            limits: Limits {
                connections,
                pipeline: 64,
                timeout_ns: 60_000_000_000,
                // Noted pauses explain what is late, and leave it out.
                most_late_ns: self.most_late_ns.filter(|_| self.spin_ns.is_some()),
                starving_fails: true,
            },
            threads: 1,
            cpus: cpu.into_iter().collect(),
            every_request: true,
            interval_log: false,
        }
    }

    /// Compares what was not disturbed with its plan.
    fn judge(
        &self,
        model: Model,
        load: f64,
        run: &Run,
        outcome: &mut Outcome,
    ) -> Result<(), CheckError> {
        let samples = &run.samples;
        let pauses = run.pauses.len();
        let intervals = one_after_the_other(run.pauses.clone());
        let counts = undisturbed(samples, &run.plan, &intervals);
        let [mut whole_plan, mut plan, mut measured, mut late]: [Distribution; 4] =
            Default::default();
        for ((sample, planned), counts) in samples.iter().zip(&run.plan).zip(counts) {
            whole_plan.record(*planned);
            if counts {
                plan.record(*planned);
                measured.record(sample.latency_ns());
                late.record(sample.late_ns().unwrap_or(0));
            }
        }
        let kept = usize::try_from(measured.count()).unwrap_or(usize::MAX);
        if kept < FEWEST {
            return Err(CheckError::Disturbed { pauses, kept, all: samples.len() });
        }
        let theory = Figures::in_theory(model, load, self.service_ns);
        outcome.pauses += pauses;
        outcome.paused_ms += intervals.iter().map(Interval::ms).sum::<f64>();
        let compared = Compared {
            model: model.name(),
            load,
            rps: run.settings.rps,
            requests: samples.len(),
            kept,
            theory,
            chance: theory.spread(&self.plans_of_other_seeds(model, &run.settings)),
            whole_plan: Figures::of(&whole_plan),
            plan: Figures::of(&plan),
            measured: Figures::of(&measured),
        };
        outcome.add(&compared, &late);
        Ok(())
    }

    /// The response times of this very plan.
    fn planned(&self, model: Model, settings: &Settings, seed: u64) -> Vec<Nanos> {
        let arrivals = settings.plan(seed).map(|arrival| arrival.at_ns);
        lindley(arrivals, self.service_times(model).iter(seed)).collect()
    }

    fn plans_of_other_seeds(&self, model: Model, settings: &Settings) -> Vec<Figures> {
        let seeds = (1..=OTHER_SEEDS).map(|n| self.seed.wrapping_add(n));
        let figures = seeds.map(|seed| {
            let mut distribution = Distribution::default();
            let planned = self.planned(model, settings, seed);
            planned.into_iter().for_each(|planned| distribution.record(planned));
            Figures::of(&distribution)
        });
        figures.collect()
    }
}

/// What a run measured, and what it should have.
#[derive(Clone, Debug)]
struct Run {
    settings: Settings,
    /// In the order of the plan, as recorders give them.
    samples: Vec<Sample>,
    /// The response times of the plan, in its order.
    plan: Vec<Nanos>,
    pauses: Vec<Interval>,
}

fn interval(pause: &Pause, origin: Instant) -> Interval {
    let since = |at: Instant| at.saturating_duration_since(origin).as_nanos();
    let ns = |at: Instant| Nanos::try_from(since(at)).unwrap_or(Nanos::MAX);
    Interval { from_ns: ns(pause.from), to_ns: ns(pause.to) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHECK: Check = Check {
        service_ns: 1_000_000,
        duration_ns: 2_000_000_000,
        seed: 5,
        spin_ns: None,
        most_late_ns: None,
    };
    const LOAD: f64 = 0.6;
    /// There and back.
    const WAY_NS: Nanos = 15_000;

    /// A run in which all went by the plan.
    fn exact(model: Model) -> Run {
        let settings = CHECK.settings(SocketAddr::from((Ipv4Addr::LOCALHOST, 1)), LOAD, None);
        let plan = CHECK.planned(model, &settings, CHECK.seed);
        let samples = settings.plan(CHECK.seed).zip(&plan).map(|(arrival, planned)| Sample {
            index: arrival.index,
            query: 0,
            connection: Some(0),
            intended_ns: arrival.at_ns,
            sent_ns: Some(arrival.at_ns),
            done_ns: arrival.at_ns + planned + WAY_NS,
            result: Ok(()),
            queue_ns: None,
            service_ns: None,
        });
        Run { samples: samples.collect(), plan, pauses: Vec::new(), settings }
    }

    fn passes(model: Model, run: &Run) -> bool {
        let mut outcome = Outcome::default();
        CHECK.judge(model, LOAD, run, &mut outcome).expect("nothing was disturbed");
        outcome.passed
    }

    /// Goal: a generator that errs does not pass. Method: the samples of a perfect run, and those
    /// that generators with typical faults would have made of it.
    #[test]
    fn faults_of_a_generator_are_found() {
        for model in [Model::Md1, Model::Mm1] {
            let exact = exact(model);
            assert!(passes(model, &exact), "a perfect run");
            let with_fault = |fault: fn(&mut Sample, &mut Nanos)| {
                let mut run = exact.clone();
                let mut memory = 0;
                run.samples.iter_mut().for_each(|sample| fault(sample, &mut memory));
                passes(model, &run)
            };
            let sees_answers_late = |sample: &mut Sample, _: &mut Nanos| sample.done_ns += 60_000;
            assert!(!with_fault(sees_answers_late), "{model:?}");
            let looks_once_a_millisecond = |sample: &mut Sample, _: &mut Nanos| {
                sample.done_ns = sample.done_ns.next_multiple_of(1_000_000);
            };
            assert!(!with_fault(looks_once_a_millisecond), "{model:?}");
            let counts_from_when_it_could_send = |sample: &mut Sample, free: &mut Nanos| {
                sample.intended_ns = sample.intended_ns.max(*free);
                *free = sample.done_ns;
            };
            assert!(!with_fault(counts_from_when_it_could_send), "{model:?}");
            let stops_now_and_then = |sample: &mut Sample, _: &mut Nanos| {
                if sample.index.is_multiple_of(50) {
                    sample.done_ns += 5_000_000;
                }
            };
            assert!(!with_fault(stops_now_and_then), "{model:?}");
        }
    }

    /// Goal: what a pause did to a perfect run is left out, and nothing else. Method: a pause of
    /// 20 ms and what the service answers after it; without the pause noted it must not pass.
    #[test]
    fn a_pause_excuses_what_it_did() {
        let mut run = exact(Model::Mm1);
        let pause = Interval { from_ns: 500_000_000, to_ns: 520_000_000 };
        let mut free_ns = 0;
        let services: Vec<Nanos> =
            CHECK.service_times(Model::Mm1).iter(CHECK.seed).take(run.samples.len()).collect();
        for (sample, service) in run.samples.iter_mut().zip(services) {
            let mut begin_ns = free_ns.max(sample.intended_ns);
            if (pause.from_ns..pause.to_ns).contains(&begin_ns) {
                begin_ns = pause.to_ns;
            }
            free_ns = begin_ns + service;
            sample.done_ns = free_ns + WAY_NS;
        }
        assert!(!passes(Model::Mm1, &run), "its backlog shows");
        run.pauses.push(pause);
        assert!(passes(Model::Mm1, &run));
    }

    /// Goal: a service that errs does not pass, measured for real. Method: one that takes 6 % longer
    /// than it should. On a busy machine too few requests are kept, and that is no pass either.
    #[test]
    fn faults_of_a_service_are_found() {
        let slower = ServiceTimes { exponential: false, mean_ns: 1_060_000, stall: None };
        let run = CHECK.measure(Model::Md1, LOAD, slower);
        let mut outcome = Outcome::default();
        let judged = run.and_then(|run| CHECK.judge(Model::Md1, LOAD, &run, &mut outcome));
        assert!(judged.is_err() || !outcome.passed, "{}", outcome.table());
    }
}
