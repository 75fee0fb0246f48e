//! Compares the simulator with queueing theory, which gives exact mean waiting times.
//!
//! Method: simulate some million requests with a fixed seed on several independent cores. Compare
//! the mean wait with the Pollaczek-Khinchine formula, or with Erlang's formula for a shared queue.
//! One percent is about two standard errors.

use std::sync::Arc;

use elfen_rt::policy::Policy;
use simulator::demand::Demand;
use simulator::load::{Bursts, Load};
use simulator::outcome::Outcome;
use simulator::pair::{Batch, Control, Polling, Signal, Tally};
use simulator::source::{Requests, Until};
use simulator::time::{MS, S};
use simulator::trace::Served;
use simulator::{Model, Queue};

const SEED: u64 = 20_161;
const SERVICE_NS: f64 = 5e6;

/// A batch whose naps cost nothing.
const BATCH: Batch = Batch {
    request_slowdown_milli: 1500,
    batch_slowdown_milli: 1500,
    nap_slowdown_milli: 1000,
    polling: Polling::Checks { every_ns: 1000 },
    signal: Signal::Service,
    sleep_ns: 1600,
    wake_ns: 700,
    ipc_after_ns: 0,
};

fn model(demand: Demand, utilisation: f64, requests: u64) -> Model {
    let rps = utilisation * 1e9 / demand.mean_ns();
    Model {
        machines: 8,
        cores: 1,
        queue: Queue::PerCore,
        requests: Requests::Drawn { load: Load::steady(rps), demand },
        until: Until::Requests(requests / 8),
        batch: BATCH,
        control: Control::NoBatch,
        watch: None,
        seed: SEED,
    }
}

#[track_caller]
fn assert_within(part: f64, found: f64, expected: f64) {
    let error = (found / expected - 1.0).abs();
    assert!(error <= part, "{found} instead of {expected}, off by {error:.4}; seed {SEED}");
}

/// Returns the mean wait in a queue with one worker. `variability` is the second moment of the
/// service times, divided by the square of their mean.
fn pollaczek_khinchine_ns(utilisation: f64, mean_ns: f64, variability: f64) -> f64 {
    utilisation * mean_ns * variability / (2.0 * (1.0 - utilisation))
}

const EXPONENTIAL: Demand = Demand::Exponential { mean_ns: SERVICE_NS };

#[test]
fn one_worker() {
    let log_normal = |sigma: f64| (Demand::log_normal(SERVICE_NS, sigma), f64::exp(sigma * sigma));
    let several = [0.3, 0.6, 0.8];
    for (utilisations, (demand, variability)) in [
        (&several[..], (EXPONENTIAL, 2.0)),
        (&several[..], (Demand::Fixed { ns: 5 * MS }, 1.0)),
        (&[0.3], log_normal(1.0)),
        (&[0.6], log_normal(0.7)),
    ] {
        for &utilisation in utilisations {
            let outcome = model(demand.clone(), utilisation, 8_000_000).run();
            let expected = pollaczek_khinchine_ns(utilisation, SERVICE_NS, variability);
            assert_within(0.01, outcome.mean_wait_ns(), expected);
            assert_within(0.005, outcome.request_lane_utilisation(), utilisation);
        }
    }
}

/// Returns Erlang's C: the probability that a request has to wait if `workers` share a queue.
fn erlang_c(workers: u32, offered: f64) -> f64 {
    let mut blocked = 1.0;
    for worker in 1..=workers {
        blocked = offered * blocked / (f64::from(worker) + offered * blocked);
    }
    let utilisation = offered / f64::from(workers);
    blocked / (1.0 - utilisation * (1.0 - blocked))
}

#[test]
fn a_shared_queue() {
    for utilisation in [0.4, 0.7] {
        let mut model = model(EXPONENTIAL, utilisation * 7.0, 6_000_000);
        (model.cores, model.queue) = (7, Queue::Shared);
        let expected = erlang_c(7, 7.0 * utilisation) * SERVICE_NS / (7.0 * (1.0 - utilisation));
        assert_within(0.01, model.run().mean_wait_ns(), expected);
    }
}

/// Goal: next to an unrestrained batch, or to a lane that naps with PAUSE, every request is slowed
/// from its start to its end. Method: compare with a queue with longer service times.
#[test]
fn a_lane_that_always_interferes_is_a_slower_machine() {
    let polling = Polling::Checks { every_ns: 1 };
    let pause = Batch { nap_slowdown_milli: 1370, polling, sleep_ns: 0, wake_ns: 0, ..BATCH };
    for (slowdown, batch, control, both_lanes) in [
        (1.5, BATCH, Control::Unrestrained, 1.6),
        (1.37, pause, Control::Policy(Policy::BorrowIdle), 1.0),
    ] {
        let mut model = model(EXPONENTIAL, 0.4, 4_000_000);
        (model.batch, model.control) = (batch, control);
        let outcome = model.run();
        let expected = pollaczek_khinchine_ns(0.4 * slowdown, SERVICE_NS * slowdown, 2.0);
        assert_within(0.01, outcome.mean_wait_ns(), expected);
        assert_within(0.005, outcome.request_lane_utilisation(), 0.4 * slowdown);
        assert_within(0.005, outcome.utilisation(), both_lanes);
    }
}

/// Goal: under `borrow-idle`, a request that finds the lane idle is slowed during the batch's
/// reaction. This takes half a check interval on average, and the time to enter the nap. Method:
/// checks every millisecond make the reaction measurable.
#[test]
fn borrow_idle_costs_one_reaction() {
    let mut model = model(Demand::Fixed { ns: 5 * MS }, 0.2, 400_000);
    model.batch =
        Batch { polling: Polling::Checks { every_ns: MS }, sleep_ns: MS / 10, wake_ns: 0, ..BATCH };
    model.control = Control::Policy(Policy::BorrowIdle);
    let outcome = model.run();
    let reactions = outcome.tally.naps as f64 * (0.5 + 0.1) * 1e6;
    assert_within(0.01, outcome.tally.overlapped_ns as f64, reactions);
    assert_within(0.02, outcome.tally.naps as f64, 0.8 * outcome.requests as f64);
    assert_within(0.001, outcome.utilisation(), 1.0 + outcome.overlapped_fraction());
}

/// Goal: a request shares its core for the rest of the guard's period. The guard's timer starts
/// when the lane becomes idle, and is independent of the next request. Exponential idle times leave
/// slightly more than half of a period on average. Method: a guard that polls every millisecond.
#[test]
fn borrow_idle_by_a_guard_costs_the_rest_of_its_period() {
    let mut model = model(Demand::Fixed { ns: 5 * MS }, 0.2, 400_000);
    let polling = Polling::Guard { every_ns: MS };
    model.batch = Batch { polling, sleep_ns: 0, wake_ns: 0, ..BATCH };
    model.control = Control::Policy(Policy::BorrowIdle);
    let outcome = model.run();
    let polls_per_idle_time = MS as f64 / (SERVICE_NS / 0.2);
    let rest = 1.0 - (1.0 / polls_per_idle_time - 1.0 / polls_per_idle_time.exp_m1());
    assert!((0.5..0.51).contains(&rest), "{rest}");
    let reactions = outcome.tally.naps as f64 * rest * 1e6;
    assert_within(0.005, outcome.tally.overlapped_ns as f64, reactions);
}

/// Goal: fixed-budget with only the task map lends one budget in each busy period, whichever
/// requests it has. So each request ends later than alone by at most the cost of one budget.
/// Method: compare each end with the same request's end without a batch.
#[test]
fn a_busy_period_is_delayed_by_one_budget_at_most() {
    let mut model = model(EXPONENTIAL, 0.6, 80_000);
    let ends = |model: &Model| {
        let mut ends = Vec::new();
        let outcome = model.run_into(&mut |served: &Served| ends.push(served.ended_ns));
        (ends, outcome)
    };
    let (alone, _) = ends(&model);
    let budget_ns = 4 * MS;
    model.control = Control::Policy(Policy::FixedBudget { budget_ns });
    let (_, by_requests) = ends(&model);
    model.batch.signal = Signal::Tasks;
    let (shared, by_tasks) = ends(&model);
    // The cost is a third of the shared time, because the slowdown is 1.5. The shared time includes
    // one reaction.
    let most_ns = (budget_ns + 1000 + BATCH.sleep_ns) / 3 + 1;
    let late_ns = |(end, alone): (&u64, &u64)| end - alone;
    let latest_ns = shared.iter().zip(&alone).map(late_ns).max().expect("requests");
    assert!(latest_ns <= most_ns, "{latest_ns} of {most_ns}; seed {SEED}");
    assert!(latest_ns > most_ns * 99 / 100, "{latest_ns} of {most_ns}; seed {SEED}");
    // With only the task map, requests that waited use the rest of the budget.
    assert!(by_tasks.overlapped_fraction() > by_requests.overlapped_fraction());
}

/// Goal: bursts and days have the number of requests that their rates give. Method: count the
/// requests of one day.
#[test]
fn rates_that_change() {
    let demand = Demand::Fixed { ns: 1000 };
    let day = Load { low_rps: 20.0, high_rps: 60.0, bursts: None };
    let bursts = Bursts { extra_rps: 100.0, length_ns: 2e9, pause_ns: 8e9 };
    let on_off = Load { low_rps: 0.0, high_rps: 0.0, bursts: Some(bursts) };
    for (load, rps) in [(day, 40.0), (on_off, 20.0)] {
        let mut model = model(demand.clone(), 0.1, 8);
        model.requests = Requests::Drawn { load, demand: demand.clone() };
        model.until = Until::Time { ns: 24 * 3600 * S };
        let seconds = 24.0 * 3600.0 * 8.0;
        assert_within(0.02, model.run().requests as f64 / seconds, rps);
    }
}

/// Returns all numbers of an outcome, bit for bit. The histogram's internal minimum is left out: it
/// depends on the order of addition and does not affect any number.
fn figures(outcome: &Outcome) -> (Vec<u64>, Vec<u64>, Tally) {
    let quantile = |rank| outcome.quantile_ns(f64::from(rank) / 1000.0);
    let quantiles = (1..=1000).map(quantile).collect();
    let means = [outcome.mean_ms(), outcome.mean_wait_ns(), outcome.core_seconds()];
    let means = means.iter().map(|mean| mean.to_bits());
    let counts = [outcome.requests, outcome.windows, outcome.windows_held];
    (quantiles, means.chain(counts).collect(), outcome.tally)
}

/// Goal: outcomes do not depend on the number of threads. Method: the same model on 1, 2 and 5
/// threads, for both kinds of queue, with random load, demand and bursts.
#[test]
fn the_same_seed_gives_the_same_outcome() {
    let bursts = Bursts { extra_rps: 300.0, length_ns: 1e8, pause_ns: 1e9 };
    let load = Load { low_rps: 200.0, high_rps: 300.0, bursts: Some(bursts) };
    for queue in [Queue::PerCore, Queue::Shared] {
        let mut model = model(Demand::Search, 0.1, 160_000);
        model.requests = Requests::Drawn { load, demand: Demand::Search };
        (model.cores, model.queue) = (5, queue);
        let budget_ns = 20 * MS;
        model.control = Control::Policy(Policy::RefreshBudget { budget_ns });
        let alone = figures(&model.run_on(1));
        assert_eq!(alone, figures(&model.run_on(2)), "seed {SEED}");
        assert_eq!(alone, figures(&model.run_on(5)), "seed {SEED}");
        model.seed += 1;
        assert_ne!(alone, figures(&model.run_on(1)));
    }
}

/// Goal: a trace that a simulation wrote gives the same outcome. Method: simulate the trace, and
/// compare all numbers.
#[test]
fn a_trace_is_its_simulation() {
    let mut drawn = model(Demand::Search, 0.5, 8000);
    drawn.machines = 1;
    let mut trace = Vec::new();
    let first = drawn.run_into(&mut |served: &Served| {
        trace.push((served.arrived_ns, served.demand_ns));
    });
    let mut traced = drawn.clone();
    traced.requests = Requests::Trace(Arc::from(trace));
    assert_eq!(figures(&first), figures(&traced.run()), "seed {SEED}");
}
