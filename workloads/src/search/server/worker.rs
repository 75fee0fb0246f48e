//! A worker: one thread on one request lane, which takes a request, searches, and hands back the
//! answer.
//!
//! It publishes what it works on in its slot of the service page. It never touches a socket: a slow
//! client is the coordinator's business.

use super::metrics::Metrics;
use super::queue::Queue;
use super::request::Status;
use super::response::{self, Shape, Timing};
use crate::search::index::{Found, SearchError, Seeker};
use elfen_rt::clock::monotonic_ns;
use elfen_rt::service::Worker as Slot;
use mio::Waker;
use std::sync::{Mutex, PoisonError};

/// A search that waits.
#[derive(Debug)]
pub(super) struct Job {
    /// Which connection asked; the coordinator's own name for it.
    pub(super) from: u64,
    /// The service's number for the request, never 0.
    pub(super) id: u64,
    pub(super) arrived_ns: u64,
    pub(super) query: String,
    pub(super) limit: usize,
    pub(super) head_only: bool,
    pub(super) keep_alive: bool,
}

/// An answer for the coordinator to send.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) to: u64,
    pub(super) bytes: Vec<u8>,
    pub(super) keep_alive: bool,
}

/// Answers on their way to the coordinator, and how it learns of them.
pub(super) struct Outbox {
    answers: Mutex<Vec<Answer>>,
    waker: Waker,
}

impl Outbox {
    pub(super) fn new(waker: Waker) -> Self {
        Self { answers: Mutex::new(Vec::new()), waker }
    }

    fn put(&self, answer: Answer) {
        let mut answers = self.lock();
        answers.push(answer);
        let first = answers.len() == 1;
        drop(answers);
        // Further ones are found with the first.
        if first {
            self.waker.wake().expect("an eventfd takes a few counts");
        }
    }

    pub(super) fn take(&self) -> Vec<Answer> {
        std::mem::take(&mut *self.lock())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Answer>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Works until the queue is closed and empty.
pub(super) fn work(
    queue: &Queue<Job>,
    outbox: &Outbox,
    metrics: &Metrics,
    seeker: &mut Seeker,
    mut slot: Option<Slot<'_>>,
) {
    while let Some(job) = queue.pop() {
        if let Some(slot) = &mut slot {
            slot.begin_arrived(job.id, job.arrived_ns);
        }
        let begun_ns = monotonic_ns();
        let answer = answer(&job, begun_ns, seeker, metrics);
        if let Some(slot) = &mut slot {
            slot.end();
        }
        outbox.put(answer);
    }
}

fn outcome(found: Result<Found, SearchError>) -> (Status, Vec<u8>) {
    let status = match &found {
        Ok(_) => Status::Ok,
        Err(SearchError::Query(_)) => Status::BadRequest,
        Err(SearchError::Index(_)) => Status::InternalError,
    };
    let body = match found {
        Ok(found) => {
            let mut body = serde_json::to_vec(&found).expect("an answer is plain data");
            body.push(b'\n');
            body
        }
        Err(error) => response::error_body(status, &error.to_string()),
    };
    (status, body)
}

fn answer(job: &Job, begun_ns: u64, seeker: &mut Seeker, metrics: &Metrics) -> Answer {
    let (status, body) = outcome(seeker.search(&job.query, job.limit));
    let ended_ns = monotonic_ns();
    let service_ns = ended_ns.saturating_sub(begun_ns);
    let queue_ns = begun_ns.saturating_sub(job.arrived_ns);
    metrics.answered(status);
    metrics.searched(queue_ns + service_ns, service_ns);
    let shape = Shape {
        status,
        head_only: job.head_only,
        keep_alive: job.keep_alive,
        timing: Some(Timing { queue_ns, service_ns }),
    };
    let mut bytes = Vec::new();
    response::write(&mut bytes, shape, response::JSON, &body);
    Answer { to: job.from, bytes, keep_alive: job.keep_alive }
}
