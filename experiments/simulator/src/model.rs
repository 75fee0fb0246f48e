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
    #[error("machines times cores must be from 1 to {CORES_MAX}")]
    Cores,
    #[error(
        "a rate must be from 0 to 1e9 per second, and not all rates may be 0; bursts and \
        pauses must last at least 1 ms"
    )]
    Rate,
    #[error("a slowdown must be from 1 to 100")]
    Slowdown,
    #[error(
        "the interval of checks or polls must be from 1 ns to a minute; the times to sleep and \
        to wake must be at most a minute"
    )]
    Latency,
    #[error("a window must last from a millisecond to a day")]
    Window,
    #[error("a request must take at most a day, and the whole simulation at most 100 years")]
    TooLong,
    #[error("there is nothing to simulate: the number of requests or the duration is 0")]
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
