//! A model of SMT cores: requests on one lane, batch threads on the other, and between them the
//! very policies of `elfen-rt`.
//!
//! | file | what it models |
//! | --- | --- |
//! | [`load`], [`demand`], [`trace`] | when requests come and how long they run |
//! | [`pair`] | one core: how lanes slow each other, how checks, naps and wakes take time |
//! | `own_queue`, `shared_queue` | who serves which request |
//! | [`windows`] | the SLO over time, and the controller of `slo-budget` |
//! | [`outcome`] | what is counted |
//!
//! What it leaves out: contention between cores (caches, memory, the lock of a shared queue), the
//! operating system, and batch programs that idle on their own.

pub mod batches;
pub mod demand;
pub mod figure;
pub mod load;
pub mod outcome;
mod own_queue;
pub mod pair;
pub mod random;
mod shared_queue;
pub mod source;
pub mod time;
pub mod trace;
pub mod windows;

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use outcome::Outcome;
use pair::{Batch, Control};
use source::{Requests, Share, Source, Until};
use trace::{NoSink, Sink};
use windows::Watch;

/// How the cores of a machine get their requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Queue {
    /// Each core has its own; a request goes to any of them by chance.
    PerCore,
    /// All cores of a machine take from one.
    Shared,
}

/// Everything that a simulation depends on.
#[derive(Clone, Debug)]
pub struct Model {
    /// Machines that differ in nothing but their random numbers.
    pub machines: u64,
    /// SMT cores of each.
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

/// As many cores as the model is made for.
pub const CORES_MAX: u64 = 10_000;

/// 100 years: far from the end of the clock, even if chance makes it some times as long.
const MOST_NS: f64 = 36_525.0 * 86_400e9;

/// What a model cannot be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ModelError {
    #[error("1 to {CORES_MAX} cores can be simulated, machines times cores")]
    Cores,
    #[error("rates lie between 0 and 1e9 a second, not all 0; bursts and pauses last 1 ms or more")]
    Rate,
    #[error("a slowdown is at least 1, and at most 100")]
    Slowdown,
    #[error("checks are at least 1 ns and at most a minute apart, and so are nap and wake")]
    Latency,
    #[error("windows are at least a millisecond and at most a day long")]
    Window,
    #[error("a request takes at most a day, and all of it ends within 100 years")]
    TooLong,
    #[error("nothing to simulate: neither a request nor a nanosecond")]
    Nothing,
}

impl Model {
    /// Says what is impossible about the model, if anything.
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
        let slowdowns = [self.batch.request_slowdown_milli, self.batch.batch_slowdown_milli];
        if slowdowns.iter().any(|milli| !(1000..=100_000).contains(milli)) {
            return Err(ModelError::Slowdown);
        }
        let latencies = [self.batch.check_ns, self.batch.sleep_ns, self.batch.wake_ns];
        if self.batch.check_ns == 0 || latencies.iter().any(|&ns| ns > 60 * time::S) {
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
        let slowdown = time::real(self.batch.request_slowdown_milli) / 1000.0;
        let (span_ns, work_ns) = self.requests.extent_ns(self.until);
        let fits = span_ns.max(work_ns * slowdown) <= MOST_NS;
        if fits && self.requests.longest_ns() <= time::DAY {
            Ok(())
        } else {
            Err(ModelError::TooLong)
        }
    }

    /// Simulates on as many threads as the machine has; the outcome does not depend on their
    /// number.
    pub fn run(&self) -> Outcome {
        self.run_on(thread::available_parallelism().map_or(1, NonZeroUsize::get))
    }

    /// Simulates on so many threads.
    pub fn run_on(&self, threads: usize) -> Outcome {
        let next = AtomicU64::new(0);
        let work = || {
            let mut sum = Outcome::default();
            loop {
                // Relaxed: the counter hands out numbers and publishes nothing.
                let queue = next.fetch_add(1, Ordering::Relaxed);
                if queue >= self.queues() {
                    return sum;
                }
                sum.add(&self.run_queue(queue, &mut NoSink));
            }
        };
        let mut sum = Outcome::default();
        thread::scope(|scope| {
            let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(work)).collect();
            for worker in workers {
                sum.add(&worker.join().expect("a simulation does not panic"));
            }
        });
        sum
    }

    /// Simulates on this thread and shows every request to `sink`, core by core or machine by
    /// machine.
    pub fn run_into(&self, sink: &mut impl Sink) -> Outcome {
        let mut sum = Outcome::default();
        for queue in 0..self.queues() {
            sum.add(&self.run_queue(queue, sink));
        }
        sum
    }

    fn run_queue(&self, queue: u64, sink: &mut impl Sink) -> Outcome {
        let of = self.queues() / self.machines;
        let share = Share { machine: queue / of, queue, index: queue % of, of };
        let source = Source::new(&self.requests, self.until, self.seed, share);
        match self.queue {
            Queue::PerCore => own_queue::run(self, queue, source, sink),
            Queue::Shared if self.cores == 1 => own_queue::run(self, queue, source, sink),
            Queue::Shared => shared_queue::run(self, queue * self.cores, source, sink),
        }
    }

    fn queues(&self) -> u64 {
        match self.queue {
            Queue::PerCore => self.machines * self.cores,
            Queue::Shared => self.machines,
        }
    }

    fn cores_per_machine(&self) -> usize {
        usize::try_from(self.cores).expect("at most 10,000")
    }
}
