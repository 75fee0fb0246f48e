//! The generator's figures beside queueing theory's, for a queue with one worker and Poisson
//! arrivals: M/M/1 has exponential service times, M/D/1 equal ones.
//!
//! In two steps, because a percentile needs millions of requests. Lindley's recursion gives the
//! response time of each request of one plan; over enough of them its percentiles are theory's. And
//! the engine measures what the recursion gives, request by request. No clock in either.

use super::{LIMITS, World, latencies};
use crate::load::arrivals::{Arrivals, End, Plan};
use crate::load::engine::Limits;
use crate::load::record::Distribution;
use crate::load::reference::ServiceTimes;
use crate::units::Nanos;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Model {
    /// Exponential service times.
    Mm1,
    /// Equal service times.
    Md1,
}

/// The response time (waiting and service) that a share `quantile` of requests stays below, in
/// units of the mean service time, at a load of `0 < load < 1`.
fn response_quantile(model: Model, load: f64, quantile: f64) -> f64 {
    match model {
        // The response time is exponential with mean 1 / (1 - load).
        Model::Mm1 => -(1.0 - quantile).ln() / (1.0 - load),
        Model::Md1 => 1.0 + md1_wait_quantile(load, quantile),
    }
}

/// The mean response time in units of the mean service time (Pollaczek and Khinchine).
fn response_mean(model: Model, load: f64) -> f64 {
    match model {
        Model::Mm1 => 1.0 / (1.0 - load),
        Model::Md1 => 1.0 + load / (2.0 * (1.0 - load)),
    }
}

fn md1_wait_quantile(load: f64, quantile: f64) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    while md1_wait_below(load, high) < quantile {
        high *= 2.0;
    }
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if md1_wait_below(load, middle) < quantile { low = middle } else { high = middle }
    }
    high
}

/// Beyond this many service times Erlang's alternating sum loses its digits.
const ERLANG_ENDS: f64 = 12.0;

/// The share of requests that wait at most `t` service times: Erlang's sum, and from where it loses
/// its digits the exponential tail that it has by then.
fn md1_wait_below(load: f64, t: f64) -> f64 {
    if t <= ERLANG_ENDS {
        return erlang(load, t);
    }
    let decay = md1_decay(load);
    1.0 - (1.0 - erlang(load, ERLANG_ENDS)) * (-decay * (t - ERLANG_ENDS)).exp()
}

fn erlang(load: f64, t: f64) -> f64 {
    let mut sum = 0.0;
    let mut k = 0.0;
    let mut factorial = 1.0;
    while k <= t {
        let x = load * (k - t);
        sum += x.powf(k) / factorial * (-x).exp();
        k += 1.0;
        factorial *= k;
    }
    (1.0 - load) * sum
}

/// The rate at which the tail of the waiting time falls: the positive root of `load (e^x - 1) = x`.
fn md1_decay(load: f64) -> f64 {
    let excess = |x: f64| load * x.exp_m1() - x;
    let (mut low, mut high) = (0.0_f64, 1.0_f64);
    while excess(high) < 0.0 {
        low = high;
        high *= 2.0;
    }
    for _ in 0..80 {
        let middle = (low + high) / 2.0;
        if excess(middle) < 0.0 { low = middle } else { high = middle }
    }
    (low + high) / 2.0
}

/// The response time of each request of one plan, for a worker that takes them in order.
fn lindley(
    arrivals: impl Iterator<Item = Nanos>,
    services: impl Iterator<Item = Nanos>,
) -> impl Iterator<Item = Nanos> {
    arrivals.zip(services).scan(0, |free_at: &mut Nanos, (at, service)| {
        *free_at = at.max(*free_at) + service;
        Some(*free_at - at)
    })
}

const MEAN_NS: Nanos = 1_000_000;

impl Model {
    fn services(self) -> ServiceTimes {
        ServiceTimes { exponential: self == Self::Mm1, mean_ns: MEAN_NS, stall: None }
    }
}

fn plan(load: f64, requests: u64, seed: u64) -> Plan {
    let rps = load * 1e9 / MEAN_NS as f64;
    Plan::new(&Arrivals::Exponential, rps, End::Requests(requests), 1, seed)
}

fn close(what: &str, got: f64, expected: f64, tolerance: f64) {
    let off = got / expected - 1.0;
    assert!(off.abs() < tolerance, "{what}: {got} instead of {expected}, {:+.2} %", off * 100.0);
}

/// Goal: the formulas at points known by hand. Method: M/M/1's median; M/D/1's share that doesn't
/// wait (1 - load), and its first step, where the sum has one term.
#[test]
fn known_points() {
    let median = response_quantile(Model::Mm1, 0.5, 0.5);
    close("M/M/1's median", median, 2.0 * std::f64::consts::LN_2, 1e-12);
    close("no wait", md1_wait_below(0.8, 0.0), 0.2, 1e-12);
    close("a short wait", md1_wait_below(0.8, 0.5), 0.2 * (0.4_f64).exp(), 1e-12);
    close("M/D/1's mean", response_mean(Model::Md1, 0.8), 3.0, 1e-12);
}

/// Goal: the distribution agrees with its own mean, through both of its branches. Method: the
/// integral of the tail against Pollaczek and Khinchine.
#[test]
fn md1_distribution_has_its_mean() {
    for load in [0.3, 0.6, 0.8, 0.95] {
        let step = 0.002;
        let tail = (0..200_000_u32)
            .map(|n| 1.0 - md1_wait_below(load, (f64::from(n) + 0.5) * step))
            .sum::<f64>();
        close("M/D/1's mean", 1.0 + tail * step, response_mean(Model::Md1, load), 1e-3);
    }
}

/// Goal: plans and service times make the queues that theory describes, and histograms tell their
/// percentiles: within 2 %. Method: so many requests that the percentile of theirs that varies
/// most, M/M/1's p99, has a standard error below 0.5 %; recorded as the generator records them.
#[test]
fn figures_are_those_of_theory() {
    for (load, requests) in [(0.3, 1_000_000), (0.6, 6_000_000), (0.8, 15_000_000)] {
        for model in [Model::Mm1, Model::Md1] {
            let arrivals = plan(load, requests, 77).map(|arrival| arrival.at_ns);
            let mut measured = Distribution::default();
            lindley(arrivals, model.services().iter(77)).for_each(|ns| measured.record(ns));
            for quantile in [0.5, 0.9, 0.99] {
                let expected = response_quantile(model, load, quantile) * MEAN_NS as f64;
                let got = measured.quantile_ns(quantile) as f64;
                close(&format!("{model:?}, load {load}, {quantile}"), got, expected, 0.02);
            }
            let expected = response_mean(model, load) * MEAN_NS as f64;
            close(&format!("{model:?}, load {load}, mean"), measured.mean_ns(), expected, 0.02);
        }
    }
}

/// Goal: the engine measures that queue to the nanosecond, on as many connections as it has.
/// Method: its latencies beside the recursion's, of the same seed.
#[test]
fn the_engine_measures_the_same_queue() {
    for model in [Model::Mm1, Model::Md1] {
        let arrivals = plan(0.8, 20_000, 5).map(|arrival| arrival.at_ns);
        let expected: Vec<Nanos> = lindley(arrivals, model.services().iter(5)).collect();
        let limits = Limits { connections: 64, pipeline: 64, ..LIMITS };
        let mut services = model.services().iter(5);
        let world = World::new(plan(0.8, 20_000, 5), limits, move |_| services.next());
        let (recorder, _) = world.run().expect("no bound is set");
        assert_eq!(latencies(&recorder), expected, "{model:?}");
    }
}
