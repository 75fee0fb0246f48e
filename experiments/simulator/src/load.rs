//! The arrival times of requests: random, at a rate that may follow the time of day and have
//! bursts.
//!
//! Time is a sequence of intervals, each with a constant rate. For each request, one exponentially
//! distributed number is drawn. An interval of `r` requests per second uses up `r` units of this
//! number per second. When the number is used up, the request arrives. So steady rates, days and
//! bursts need no separate code.
//!
//! All cores of a service share the sequence of intervals, so a burst affects them at the same
//! time.

use rand_distr::{Distribution, Exp1};

use super::random::{Purpose, Random, stream};
use super::time::{DAY, S, nanoseconds, real};

/// The rate of a service over time.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Load {
    /// The rate at midnight, when a simulation begins.
    pub low_rps: f64,
    /// The rate at noon. Between midnight and noon, the rate follows a sine. For a steady rate, it
    /// equals `low_rps`.
    pub high_rps: f64,
    pub bursts: Option<Bursts>,
}

/// Bursts of requests. Their lengths and the pauses between them are exponentially distributed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Bursts {
    /// The rate that a burst adds.
    pub extra_rps: f64,
    /// The mean length of a burst.
    pub length_ns: f64,
    /// The mean time from the end of a burst to the start of the next.
    pub pause_ns: f64,
}

impl Load {
    pub fn steady(rps: f64) -> Self {
        Self { low_rps: rps, high_rps: rps, bursts: None }
    }

    /// Returns the load with all rates multiplied by `factor`.
    pub fn scaled(mut self, factor: f64) -> Self {
        self.low_rps *= factor;
        self.high_rps *= factor;
        if let Some(bursts) = &mut self.bursts {
            bursts.extra_rps *= factor;
        }
        self
    }

    /// Whether all rates and lengths are in range and at least one rate is above 0.
    pub fn is_possible(&self) -> bool {
        let extra = self.bursts.map_or(0.0, |bursts| bursts.extra_rps);
        let rates = [self.low_rps, self.high_rps, extra];
        let sane = rates.iter().all(|rate| (0.0..=MOST_RPS).contains(rate));
        let lengths = |b: Bursts| b.length_ns >= 1e6 && b.pause_ns >= 1e6;
        sane && rates.iter().sum::<f64>() > 0.0 && self.bursts.is_none_or(lengths)
    }

    /// Returns the mean rate over whole days.
    pub fn mean_rps(&self) -> f64 {
        let part = |b: Bursts| b.extra_rps * b.length_ns / (b.length_ns + b.pause_ns);
        f64::midpoint(self.low_rps, self.high_rps) + self.bursts.map_or(0.0, part)
    }

    fn rps_at(&self, now_ns: u64) -> f64 {
        let angle = real(now_ns % DAY) / real(DAY) * std::f64::consts::TAU;
        self.low_rps + (self.high_rps - self.low_rps) * (1.0 - angle.cos()) / 2.0
    }
}

/// The highest valid rate: one request per nanosecond.
const MOST_RPS: f64 = 1e9;
/// The length of an interval of constant rate, when the rate follows the time of day.
const DAY_STEP_NS: u64 = 60 * S;

/// The sequence of intervals with constant rates.
#[derive(Clone, Debug)]
struct Rates {
    load: Load,
    random: Random,
    bursting: bool,
    /// When the current burst ends, or when the next burst begins.
    turn_ns: u64,
}

impl Rates {
    fn new(load: &Load, mut random: Random) -> Self {
        let pause = load.bursts.map(|bursts| exponential_ns(&mut random, bursts.pause_ns));
        Self { load: *load, random, bursting: false, turn_ns: pause.unwrap_or(u64::MAX) }
    }

    /// Returns the rate at `from_ns`, and when the interval with this rate ends.
    fn after(&mut self, from_ns: u64) -> (f64, u64) {
        while let Some(bursts) = self.load.bursts.filter(|_| self.turn_ns <= from_ns) {
            self.bursting = !self.bursting;
            let mean_ns = if self.bursting { bursts.length_ns } else { bursts.pause_ns };
            let stretch_ns = exponential_ns(&mut self.random, mean_ns);
            self.turn_ns = self.turn_ns.saturating_add(stretch_ns);
        }
        let steady = self.load.low_rps == self.load.high_rps;
        let step_ns = if steady { u64::MAX } else { (from_ns / DAY_STEP_NS + 1) * DAY_STEP_NS };
        let extra = self.load.bursts.filter(|_| self.bursting).map_or(0.0, |b| b.extra_rps);
        (self.load.rps_at(from_ns) + extra, self.turn_ns.min(step_ns))
    }
}

/// The arrival times of the requests of one queue.
#[derive(Clone, Debug)]
pub struct Arrivals {
    rates: Rates,
    random: Random,
    /// Multiplied by the service's rate in requests per second, this gives the queue's rate in
    /// requests per nanosecond.
    share: f64,
    now_ns: f64,
    until_ns: f64,
    rate: f64,
}

impl Arrivals {
    /// Creates the arrivals of a queue that gets this `share` of the requests of `machine`. The
    /// random stream has the number `queue`.
    pub fn new(load: &Load, seed: u64, machine: u64, queue: u64, share: f64) -> Self {
        let rates = Rates::new(load, stream(seed, Purpose::Load, machine));
        let random = stream(seed, Purpose::Arrivals, queue);
        Self { rates, random, share: share / 1e9, now_ns: 0.0, until_ns: 0.0, rate: 0.0 }
    }

    /// Returns the time of the next arrival.
    #[inline]
    pub fn next_ns(&mut self) -> u64 {
        let mut pressure: f64 = Exp1.sample(&mut self.random);
        loop {
            let at_ns = self.now_ns + pressure / self.rate;
            if at_ns < self.until_ns {
                self.now_ns = at_ns;
                return nanoseconds(at_ns);
            }
            pressure -= (self.until_ns - self.now_ns) * self.rate;
            self.now_ns = self.until_ns;
            let (rps, until_ns) = self.rates.after(nanoseconds(self.now_ns));
            (self.rate, self.until_ns) = (rps * self.share, real(until_ns));
        }
    }
}

/// Draws an exponentially distributed time. It is at least a nanosecond, so that time advances.
fn exponential_ns(random: &mut Random, mean_ns: f64) -> u64 {
    let e: f64 = Exp1.sample(random);
    nanoseconds(e * mean_ns).max(1)
}
