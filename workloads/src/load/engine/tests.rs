//! Tests the engine with a simulated service and a simulated clock. Without sockets and sleeps, all
//! numbers are exact.

use super::*;
use crate::load::plan::{self, End, Plan};
use crate::load::record::Distribution;
use crate::load::reference::ServiceTimes;
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

const MS: Nanos = 1_000_000;
const SECOND: Nanos = 1_000 * MS;

const LIMITS: Limits =
    Limits { connections: 1, pipeline: 1, timeout_ns: 600 * SECOND, most_late_ns: None };

/// A service with one worker and one queue.
struct World<S: FnMut(Nanos) -> Option<Nanos>> {
    engine: Engine,
    /// How long a request takes that begins at this time. `None` means that no answer follows.
    service: S,
    /// The generator does nothing during this time.
    generator_stalls: Option<(Nanos, Nanos)>,
    now: Nanos,
    free_at: Nanos,
    answers: BinaryHeap<Reverse<(Nanos, u64, usize)>>,
    sent: u64,
    deepest: usize,
}

impl<S: FnMut(Nanos) -> Option<Nanos>> World<S> {
    fn new(plan: Plan, limits: Limits, service: S) -> Self {
        let mut engine = Engine::new(Box::new(plan), limits, Recorder::new(0, true));
        (0..limits.connections).for_each(|connection| engine.set_usable(connection, true));
        Self {
            engine,
            service,
            generator_stalls: None,
            now: 0,
            free_at: 0,
            answers: BinaryHeap::new(),
            sent: 0,
            deepest: 0,
        }
    }

    fn run(mut self) -> Result<(Recorder, usize), Overrun> {
        while self.send_due()? {
            let next_answer = self.answers.peek().map(|Reverse((at, ..))| *at);
            let wake = self.engine.wake_at();
            let next = wake.into_iter().chain(next_answer).min().expect("something is awaited");
            self.now = self.now.max(next);
            if let Some((from, to)) = self.generator_stalls
                && (from..to).contains(&self.now)
            {
                self.now = to;
            }
            self.deliver();
            while let Some(connection) = self.engine.expired(self.now) {
                self.close(connection, Fault::Timeout);
            }
        }
        Ok((self.engine.into_recorder(), self.deepest))
    }

    fn send_due(&mut self) -> Result<bool, Overrun> {
        while let Some(send) = self.engine.next_send(self.now)? {
            self.sent += 1;
            let begin = self.free_at.max(self.now);
            if let Some(took) = (self.service)(begin) {
                self.free_at = begin + took;
                self.answers.push(Reverse((self.free_at, self.sent, send.connection)));
            }
            let depth = self.engine.connections[send.connection].in_flight.len();
            self.deepest = self.deepest.max(depth);
        }
        Ok(!self.engine.is_done())
    }

    fn deliver(&mut self) {
        while let Some(Reverse((at, _, connection))) = self.answers.peek().copied()
            && at <= self.now
        {
            self.answers.pop();
            assert!(self.engine.replied(connection, self.now, &Reply::bare(Ok(()))));
        }
    }

    fn close(&mut self, connection: usize, reason: Fault) {
        self.answers.retain(|Reverse((.., of))| *of != connection);
        self.engine.closed(connection, self.now, reason);
        self.engine.set_usable(connection, true);
    }
}

fn poisson(rps: f64, requests: u64, seed: u64) -> Plan {
    Plan::new(plan::Arrivals::Exponential, rps, End::Requests(requests), 1, seed)
}

fn uniform(rps: f64, requests: u64) -> Plan {
    Plan::new(plan::Arrivals::Uniform, rps, End::Requests(requests), 1, 1)
}

/// Latencies in a queue with one worker that takes requests in order. Lindley's recursion computes
/// them independently of the engine.
fn lindley(plan: Plan, services: impl Iterator<Item = Nanos>) -> impl Iterator<Item = Nanos> {
    plan.zip(services).scan(0, |free_at: &mut Nanos, (arrival, service)| {
        *free_at = arrival.at_ns.max(*free_at) + service;
        Some(*free_at - arrival.at_ns)
    })
}

const EXPONENTIAL: ServiceTimes = ServiceTimes { exponential: true, mean_ns: MS, stall: None };
const EQUAL: ServiceTimes = ServiceTimes { exponential: false, ..EXPONENTIAL };

fn latencies(recorder: &Recorder) -> Vec<Nanos> {
    let mut samples = recorder.samples.clone();
    samples.sort_by_key(|sample| sample.index);
    samples.iter().map(Sample::latency_ns).collect()
}

/// Goal: the measured latency is exactly the queue's latency. It does not matter whether requests
/// wait in the service (many connections, or a deep pipeline) or in the generator (one connection).
/// Method: each case is compared with Lindley's recursion.
#[test]
fn latency_is_that_of_the_queue() {
    for (connections, pipeline) in [(1, 1), (1, 1_000), (3, 2), (1_000, 1)] {
        for times in [EXPONENTIAL, EQUAL] {
            let limits = Limits { connections, pipeline, ..LIMITS };
            let mut services = times.iter(6);
            let world = World::new(poisson(800.0, 20_000, 5), limits, move |_| services.next());
            let (recorder, _) = world.run().expect("no bound is set");
            let expected: Vec<Nanos> = lindley(poisson(800.0, 20_000, 5), times.iter(6)).collect();
            let what = format!("{connections} connections, pipeline {pipeline}, {times:?}");
            assert_eq!(latencies(&recorder), expected, "{what}");
            let has_room = connections == 1_000 || pipeline == 1_000;
            assert_eq!(recorder.waited == 0, has_room, "{what}");
        }
    }
}

/// Goal: plans and service times create the queues that theory describes, and histograms report
/// their figures within 2 %. For Poisson arrivals and exponential service times (M/M/1), response
/// times are exponential. Their mean is 1 / (1 - load) service times. For equal service times
/// (M/D/1), the mean is 1 + load / (2 (1 - load)), by Pollaczek and Khinchine.
///
/// Method: Lindley's recursion, which the engine reproduces, recorded as the generator records. The
/// p99 of M/M/1 varies most. The number of requests brings its standard error below 0.5 %.
#[test]
fn figures_are_those_of_theory() {
    let close = |what: &str, load: f64, got: f64, expected: f64| {
        let off = got / (expected * MS as f64) - 1.0;
        assert!(off.abs() < 0.02, "{what}, load {load}: {got} ns, {:+.2} %", off * 100.0);
    };
    for (load, requests) in [(0.3, 1_000_000), (0.6, 6_000_000), (0.8, 15_000_000)] {
        let measure = |times: ServiceTimes| {
            let mut measured = Distribution::default();
            lindley(poisson(load * 1e3, requests, 77), times.iter(77))
                .for_each(|ns| measured.record(ns));
            measured
        };
        let (mm1, md1) = (measure(EXPONENTIAL), measure(EQUAL));
        for quantile in [0.5_f64, 0.9, 0.99] {
            let expected = -(1.0 - quantile).ln() / (1.0 - load);
            close(&format!("M/M/1, {quantile}"), load, mm1.quantile_ns(quantile) as f64, expected);
        }
        close("M/M/1, mean", load, mm1.mean_ns(), 1.0 / (1.0 - load));
        close("M/D/1, mean", load, md1.mean_ns(), 1.0 + load / (2.0 * (1.0 - load)));
    }
}

/// Goal: no coordinated omission. If a service stalls once, every request that was due meanwhile is
/// charged. Method: 100 requests per second, one connection, a stall of one second.
#[test]
fn a_stall_is_charged_to_every_request_it_delays() {
    let service =
        |begin: Nanos| Some(if (5 * SECOND..6 * SECOND).contains(&begin) { SECOND } else { MS });
    let world = World::new(uniform(100.0, 1_000), LIMITS, service);
    let (recorder, _) = world.run().expect("no bound is set");
    let slow = latencies(&recorder).iter().filter(|latency| **latency > 100 * MS).count();
    assert!((95..=105).contains(&slow), "{slow} requests noticed the stall");
    assert_eq!(recorder.latency.max_ns(), SECOND);
    let from_send = recorder.samples.iter().map(|s| s.done_ns - s.sent_ns.expect("was sent"));
    assert_eq!(
        from_send.filter(|ns| *ns > 100 * MS).count(),
        1,
        "a closed loop would have seen one"
    );
}

/// Goal: a slow generator fails the run, and the error contains the lateness. Method: a generator
/// that stops for 50 ms, with a bound below and a bound above that.
#[test]
fn a_late_generator_fails_the_run() {
    let run = |most_late_ns| {
        let limits = Limits { connections: 100, most_late_ns: Some(most_late_ns), ..LIMITS };
        let mut world = World::new(uniform(1_000.0, 2_000), limits, |_| Some(1));
        world.generator_stalls = Some((SECOND, SECOND + 50 * MS));
        world.run()
    };
    let overrun = run(10 * MS).expect_err("50 ms is over 10 ms");
    assert_eq!((overrun.late_ns, overrun.starved), (50 * MS, false));
    let (recorder, _) = run(50 * MS).expect("50 ms is within 50 ms");
    assert_eq!(recorder.late.max_ns(), 50 * MS);
    assert_eq!(recorder.late.count(), 2_000);
}

/// Goal: if a service is too slow for the number of connections, the run fails and the error names
/// the cause. Method: twice the load that one connection can carry.
#[test]
fn starved_requests_fail_the_run() {
    let limits = Limits { most_late_ns: Some(20 * MS), ..LIMITS };
    let world = World::new(uniform(1_000.0, 2_000), limits, |_| Some(2 * MS));
    let overrun = world.run().map(|_| ()).expect_err("the backlog grows by 1 ms a request");
    assert_eq!((overrun.late_ns, overrun.starved), (20 * MS + 1, true));
}

/// Goal: the bound on lateness does not apply to the warm-up. Method: a stall in the warm-up.
#[test]
fn the_warmup_may_be_late() {
    let limits = Limits { most_late_ns: Some(MS), connections: 100, ..LIMITS };
    let mut world = World::new(uniform(1_000.0, 100), limits, |_| Some(1));
    world.engine.recorder = Recorder::new(60 * MS, true);
    world.generator_stalls = Some((10 * MS, 50 * MS));
    let (recorder, _) = world.run().expect("late only before the warm-up ended");
    assert_eq!((recorder.late.max_ns(), recorder.requests()), (0, 41));
}

/// Goal: requests without answers time out, counted from their intended time, whether they were
/// sent or not. Method: a service that answers nothing.
#[test]
fn silence_times_out() {
    let limits = Limits { connections: 3, timeout_ns: 100 * MS, ..LIMITS };
    let (recorder, _) = World::new(uniform(1_000.0, 50), limits, |_| None).run().expect("no bound");
    assert_eq!(recorder.errors.get(&Fault::Timeout), Some(&50));
    assert_eq!(recorder.latency.count(), 0);
    assert!(recorder.samples.iter().all(|sample| sample.latency_ns() == 100 * MS));
}

/// Goal: the connection that was idle for longest is chosen first, so that all are used. Method:
/// light load on ten connections.
#[test]
fn idle_connections_take_turns() {
    let limits = Limits { connections: 10, pipeline: 4, ..LIMITS };
    let (recorder, deepest) =
        World::new(uniform(10.0, 100), limits, |_| Some(MS)).run().expect("no bound");
    let first: Vec<_> = recorder.samples[..10].iter().map(|sample| sample.connection).collect();
    assert_eq!(first, (0..10).map(Some).collect::<Vec<_>>());
    assert_eq!(deepest, 1, "nothing is pipelined while others idle");
}

/// Goal: after `stop`, the engine ends when the requests under way have ended. Method: stop in the
/// middle of an endless plan.
#[test]
fn stopping_waits_for_what_is_under_way() {
    let mut engine = Engine::new(Box::new(uniform(1.0, u64::MAX)), LIMITS, Recorder::new(0, true));
    engine.set_usable(0, true);
    assert_eq!(engine.next_send(2 * SECOND), Ok(Some(Send { connection: 0, query: 0 })));
    assert_eq!(engine.next_send(2 * SECOND), Ok(None));
    engine.stop();
    assert!(!engine.is_done());
    assert!(engine.replied(0, 3 * SECOND, &Reply::bare(Ok(()))));
    assert!(engine.is_done() && engine.wake_at().is_none());
    assert!(!engine.replied(0, 3 * SECOND, &Reply::bare(Ok(()))), "nothing was asked");
}

proptest! {
    /// Goal: each planned request is recorded once, and no connection exceeds its pipeline, despite
    /// failures. Method: random service times, unanswered requests, closed and blocked connections.
    #[test]
    fn every_request_ends_once(
        seed: u64, connections in 1usize..6, pipeline in 1usize..5, requests in 1u64..200,
        silent in 0u32..3, timeout_ms in 1u64..40,
    ) {
        let limits = Limits { connections, pipeline, timeout_ns: timeout_ms * MS, ..LIMITS };
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let service =
            move |_| (rng.random_range(0..10) >= silent).then(|| rng.random_range(1..4 * MS));
        let mut world = World::new(poisson(1_000.0, requests, seed), limits, service);
        let mut breaks = Xoshiro256PlusPlus::seed_from_u64(!seed);
        for _ in 0..40 {
            if !world.send_due().expect("no bound") {
                break;
            }
            let connection = breaks.random_range(0..connections);
            match breaks.random_range(0..4) {
                0 => world.close(connection, Fault::Malformed),
                1 => world.engine.set_usable(connection, false),
                _ => world.engine.set_usable(connection, true),
            }
            world.now += breaks.random_range(0..2 * MS);
            world.deliver();
        }
        (0..connections).for_each(|connection| world.engine.set_usable(connection, true));
        let (recorder, deepest) = world.run().expect("no bound");
        let mut seen: Vec<u64> = recorder.samples.iter().map(|sample| sample.index).collect();
        seen.sort_unstable();
        prop_assert_eq!(seen, (0..requests).collect::<Vec<_>>());
        prop_assert!(deepest <= pipeline);
        for sample in &recorder.samples {
            prop_assert!(sample.sent_ns.is_none_or(|sent| sent >= sample.intended_ns));
        }
    }
}
