//! Response times of a queue with one worker and Poisson arrivals, as queueing theory has them:
//! what the generator's percentiles are held against.
//!
//! M/M/1 has exponential service times, M/D/1 equal ones. Besides their stationary distributions
//! there is Lindley's recursion, which gives the response time of each request of one particular
//! plan; against it no sampling error is left.

use crate::units::Nanos;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Model {
    /// Exponential service times.
    Mm1,
    /// Equal service times.
    Md1,
}

impl Model {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Mm1 => "M/M/1",
            Self::Md1 => "M/D/1",
        }
    }
}

/// The response time (waiting and service) that a share `quantile` of requests stays below, in
/// units of the mean service time, at a load of `0 < load < 1`.
pub(crate) fn response_quantile(model: Model, load: f64, quantile: f64) -> f64 {
    match model {
        // The response time is exponential with mean 1 / (1 - load).
        Model::Mm1 => -(1.0 - quantile).ln() / (1.0 - load),
        Model::Md1 => 1.0 + md1_wait_quantile(load, quantile),
    }
}

/// The mean response time in units of the mean service time (Pollaczek and Khinchine).
pub(crate) fn response_mean(model: Model, load: f64) -> f64 {
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
pub(crate) fn lindley(
    arrivals: impl Iterator<Item = Nanos>,
    services: impl Iterator<Item = Nanos>,
) -> impl Iterator<Item = Nanos> {
    arrivals.zip(services).scan(0, |free_at: &mut Nanos, (at, service)| {
        *free_at = at.max(*free_at) + service;
        Some(*free_at - at)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::arrivals::{Arrivals, End, Plan};
    use crate::load::reference::ServiceTimes;

    fn close(got: f64, expected: f64, tolerance: f64) {
        assert!((got / expected - 1.0).abs() < tolerance, "{got} instead of {expected}");
    }

    /// Goal: the formulas at points known by hand. Method: M/M/1's median; M/D/1's share that
    /// doesn't wait (1 - load), and its first step, where the sum has one term.
    #[test]
    fn known_points() {
        close(response_quantile(Model::Mm1, 0.5, 0.5), 2.0 * std::f64::consts::LN_2, 1e-12);
        close(md1_wait_below(0.8, 0.0), 0.2, 1e-12);
        close(md1_wait_below(0.8, 0.5), 0.2 * (0.4_f64).exp(), 1e-12);
        close(response_mean(Model::Md1, 0.8), 3.0, 1e-12);
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
            close(1.0 + tail * step, response_mean(Model::Md1, load), 1e-3);
        }
    }

    /// Goal: the recursion and the formulas agree, which come from different sides, on the arrivals
    /// and service times of one seed: a queue where one follows the other is no M/M/1. Method: two
    /// million requests at 80 % load; percentiles within several standard errors, which are 2 % for
    /// p99: it lives on some 400 busy periods.
    #[test]
    fn recursion_and_formulas_agree() {
        for model in [Model::Mm1, Model::Md1] {
            let requests = 2_000_000;
            let plan = Plan::new(&Arrivals::Exponential, 800.0, End::Requests(requests), 1, 77);
            let exponential = model == Model::Mm1;
            let times = ServiceTimes { exponential, mean_ns: 1_000_000, stall: None };
            let mut all: Vec<Nanos> =
                lindley(plan.map(|arrival| arrival.at_ns), times.iter(77)).collect();
            all.sort_unstable();
            let figures = [(0.5, 1_000_000, 0.03), (0.9, 1_800_000, 0.03), (0.99, 1_980_000, 0.06)];
            for (quantile, rank, tolerance) in figures {
                let expected = response_quantile(model, 0.8, quantile) * 1e6;
                close(all[rank] as f64, expected, tolerance);
            }
        }
    }
}
