//! A model of SMT cores: requests on one lane, batch threads on the other, and between them the
//! very policies of `elfen-rt`.
//!
//! | file | what it models |
//! | --- | --- |
//! | `model` | everything that a simulation depends on |
//! | [`load`], [`demand`], [`trace`] | when requests come and how long they run |
//! | [`batches`] | the thesis's batch programs and naps |
//! | [`pair`] | one core: how lanes and naps slow a request, when checks or a guard look |
//! | `own_queue`, `shared_queue` | which core serves which request, and when |
//! | [`windows`] | the SLO over time, and the controller of `slo-budget` |
//! | [`outcome`] | what is counted |
//!
//! What it leaves out: `experiments/README.md` says.

#![forbid(unsafe_code)]

pub mod batches;
pub mod demand;
pub mod figure;
pub mod load;
mod model;
pub mod outcome;
mod own_queue;
pub mod pair;
pub mod plan;
pub mod random;
mod shared_queue;
pub mod source;
pub mod thesis;
pub mod time;
pub mod trace;
pub mod windows;

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

pub use model::{CORES_MAX, Model, ModelError, Queue};

use outcome::Outcome;
use source::{Share, Source};
use trace::{NoSink, Sink};

impl Model {
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
}
