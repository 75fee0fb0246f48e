//! A simulator of SMT cores. Requests run on one lane of a core and batch threads on the other. The
//! policies of `elfen-rt` decide when the batch runs.
//!
//! | file | what it models |
//! | --- | --- |
//! | `model` | the parameters of a simulation |
//! | [`load`], [`demand`], [`trace`] | when requests arrive and how long they run |
//! | [`source`] | the requests of one queue, drawn or from a trace |
//! | [`batches`] | the thesis's batch programs and naps |
//! | [`pair`] | one core: how lanes and naps slow a request, when checks or a guard poll |
//! | `queue` | which core serves which request, and when |
//! | [`windows`] | the SLO over time, and the controller of `slo-budget` |
//! | [`outcome`] | the counts and the histogram of a simulation |
//! | [`plan`] | the highest safe budget and load |
//! | [`thesis`] | the thesis's published numbers and the model's |
//!
//! `experiments/README.md` lists what the model leaves out.

#![forbid(unsafe_code)]

pub mod batches;
pub mod demand;
pub mod load;
mod model;
pub mod outcome;
pub mod pair;
pub mod plan;
mod queue;
pub mod random;
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
use trace::Served;

impl Model {
    /// Simulates with one thread per CPU. The outcome does not depend on the number of threads.
    pub fn run(&self) -> Outcome {
        self.run_on(thread::available_parallelism().map_or(1, NonZeroUsize::get))
    }

    /// Simulates with this number of threads.
    pub fn run_on(&self, threads: usize) -> Outcome {
        let next = AtomicU64::new(0);
        let work = || {
            let mut sum = Outcome::default();
            loop {
                // Relaxed is enough: the counter only gives each thread another queue and publishes
                // no data.
                let queue = next.fetch_add(1, Ordering::Relaxed);
                if queue >= self.queues() {
                    return sum;
                }
                sum.add(&self.run_queue(queue, &mut |_| {}));
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

    /// Simulates on the calling thread, one queue after the other, and passes every request to
    /// `sink`.
    pub fn run_into(&self, sink: &mut impl FnMut(&Served)) -> Outcome {
        let mut sum = Outcome::default();
        for queue in 0..self.queues() {
            sum.add(&self.run_queue(queue, sink));
        }
        sum
    }

    fn run_queue(&self, queue: u64, sink: &mut impl FnMut(&Served)) -> Outcome {
        let of = self.queues() / self.machines;
        let share = Share { machine: queue / of, queue, index: queue % of, of };
        let source = Source::new(&self.requests, self.until, self.seed, share);
        match self.queue {
            Queue::PerCore => queue::run_own(self, queue, source, sink),
            Queue::Shared if self.cores == 1 => queue::run_own(self, queue, source, sink),
            Queue::Shared => queue::run_shared(self, queue * self.cores, source, sink),
        }
    }
}
