//! The parameters of a simulation, and their limits.

use super::pair::{Batch, Control};
use super::source::{Requests, Until};
use super::time;
use super::windows::Watch;

/// How requests are assigned to the cores of a machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Queue {
    /// Each core has its own queue. Each request goes to a random queue.
    PerCore,
    /// All cores of a machine share one queue.
    Shared,
}

/// All parameters of a simulation.
#[derive(Clone, Debug)]
pub struct Model {
    /// The number of machines. They differ only in their random numbers.
    pub machines: u64,
    /// SMT cores of each machine.
    pub cores: u64,
    pub queue: Queue,
    /// The requests of one machine.
    pub requests: Requests,
    pub until: Until,
    pub batch: Batch,
    pub control: Control,
    pub watch: Option<Watch>,
    pub seed: u64,
}

/// The highest number of cores, counted over all machines.
pub const CORES_MAX: u64 = 10_000;

/// The longest simulation: 100 years. The clock counts nanoseconds in 64 bits and lasts 584 years,
/// so random delays cannot overflow it.
const MOST_NS: f64 = 36_525.0 * 86_400e9;

/// Why a model is invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ModelError {
    #[error("1 to {CORES_MAX} cores can be simulated, machines times cores")]
    Cores,
    #[error("rates lie between 0 and 1e9 a second, not all 0; bursts and pauses last 1 ms or more")]
    Rate,
    #[error("a slowdown is at least 1, and at most 100")]
    Slowdown,
    #[error("checks or polls are 1 ns to a minute apart; nap and wake take at most a minute")]
    Latency,
    #[error("windows are at least a millisecond and at most a day long")]
    Window,
    #[error("a request takes at most a day, and all of it ends within 100 years")]
    TooLong,
    #[error("nothing to simulate: neither a request nor a nanosecond")]
    Nothing,
}

impl Model {
    /// Checks all parameters and returns an error for the first invalid one.
    pub fn validate(&self) -> Result<(), ModelError> {
        let cores = self.machines.checked_mul(self.cores).ok_or(ModelError::Cores)?;
        if cores == 0 || cores > CORES_MAX {
            return Err(ModelError::Cores);
        }
        if let Requests::Drawn { load, .. } = &self.requests
            && !load.is_possible()
        {
            return Err(ModelError::Rate);
        }
        let batch = &self.batch;
        let of_requests = batch.request_slowdown_milli.max(batch.nap_slowdown_milli);
        let least = batch.request_slowdown_milli.min(batch.nap_slowdown_milli);
        let slowdowns = [least, of_requests, batch.batch_slowdown_milli];
        if slowdowns.iter().any(|milli| !(1000..=100_000).contains(milli)) {
            return Err(ModelError::Slowdown);
        }
        let every_ns = batch.polling.every_ns();
        let latencies = [every_ns, batch.sleep_ns, batch.wake_ns];
        if every_ns == 0 || latencies.iter().any(|&ns| ns > 60 * time::S) {
            return Err(ModelError::Latency);
        }
        let sane = |ns: u64| (time::MS..=time::DAY).contains(&ns);
        if self
            .watch
            .is_some_and(|w| !sane(w.judge_ns) || !sane(w.control_ns.unwrap_or(w.judge_ns)))
        {
            return Err(ModelError::Window);
        }
        if matches!(self.until, Until::Requests(0) | Until::Time { ns: 0 }) {
            return Err(ModelError::Nothing);
        }
        let slowdown = time::real(of_requests) / 1000.0;
        let (span_ns, work_ns) = self.requests.extent_ns(self.until);
        let fits = span_ns.max(work_ns * slowdown) <= MOST_NS;
        if fits && self.requests.longest_ns() <= time::DAY {
            Ok(())
        } else {
            Err(ModelError::TooLong)
        }
    }

    pub(crate) fn queues(&self) -> u64 {
        match self.queue {
            Queue::PerCore => self.machines * self.cores,
            Queue::Shared => self.machines,
        }
    }

    pub(crate) fn cores_per_machine(&self) -> usize {
        usize::try_from(self.cores).expect("at most 10,000")
    }
}
