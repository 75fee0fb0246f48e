//! A worker: one thread on one request lane. It takes a request from the queue, searches, and
//! passes the answer to the coordinator.
//!
//! Its slot of the service page shows what it works on. A worker uses no sockets, so a slow client
//! does not delay it.

use super::answer::{self, Answer, Timing};
use super::metrics::Metrics;
use super::queue::Queue;
use crate::beside::kernel::Batches;
use crate::beside::{Slowed, Tally};
use crate::search::index::{Beat, Found, SearchError, Seeker};
use elfen_rt::clock::monotonic_ns;
use elfen_rt::service::Worker as Slot;
use hyper::StatusCode;
use parking_lot::Mutex;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use tokio::sync::oneshot;

/// A search that waits for a worker.
#[derive(Debug)]
pub(super) struct Job {
    /// The number that the service gives to the request, never 0.
    pub(super) id: u64,
    pub(super) arrived_ns: u64,
    pub(super) query: String,
    pub(super) limit: usize,
    /// Sends the answer to the task of the connection.
    pub(super) reply: oneshot::Sender<Answer>,
}

/// An emulated core, which the request lane shares with its batch lanes.
pub(super) type Core = Slowed<Batches>;

/// The request lane of one worker.
pub(super) struct Lane {
    /// `None` if nothing is published.
    pub(super) slot: Option<Slot<'static>>,
    /// `None` if no core is emulated.
    pub(super) core: Option<Core>,
}

/// The stage in which the answer is prepared. A search begins in stage 0.
const ANSWERING: u16 = 1;

/// The class of a request. Equal queries need equal work.
fn class_of(query: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    query.hash(&mut hasher);
    hasher.finish().max(1)
}

impl Lane {
    fn begin(&mut self, job: &Job) {
        if let Some(slot) = &mut self.slot {
            slot.begin_arrived(job.id, job.arrived_ns);
            slot.class(class_of(&job.query));
        }
        if let Some(core) = &mut self.core {
            core.pass();
        }
    }

    /// Publishes that the search is over and the answer is prepared.
    fn found(&mut self) {
        if let Some(slot) = &mut self.slot {
            slot.stage(ANSWERING);
        }
    }

    fn end(&mut self) {
        if let Some(slot) = &mut self.slot {
            slot.end();
        }
    }

    fn refresh(&mut self) {
        if let Some(core) = &mut self.core {
            core.refresh();
        }
    }

    fn tally(&self) -> Tally {
        self.core.as_ref().map(Slowed::tally).unwrap_or_default()
    }

    /// Publishes the counts that a shared core would have.
    fn publish_counts(&mut self) {
        if let (Some(slot), Some(core)) = (&mut self.slot, &self.core) {
            let (instructions, cycles) = core.counts();
            // Counts are never 0, because `elfen run` checks for counts before the first request.
            slot.count(instructions + 1, cycles + 1);
        }
    }
}

impl Beat for Lane {
    /// Waits until a shared core would have reached this point of the search.
    fn beat(&mut self) {
        let Some(core) = &mut self.core else { return };
        core.worked();
        self.publish_counts();
        while self.core.as_mut().is_some_and(Slowed::wait) {
            self.publish_counts();
        }
    }
}

/// Serves requests until the queue is closed and empty.
pub(super) fn work(queue: &Queue<Job>, metrics: &Metrics, seeker: &mut Seeker, mut lane: Lane) {
    lane.publish_counts();
    let is_slowed = lane.core.is_some();
    let lane = Arc::new(Mutex::new(lane));
    while let Some(job) = queue.pop() {
        lane.lock().begin(&job);
        let before = lane.lock().tally();
        let begun_ns = monotonic_ns();
        let listener = is_slowed.then(|| -> Arc<Mutex<dyn Beat>> { lane.clone() });
        let mut answer = answer_to(seeker.search(&job.query, job.limit, listener));
        lane.lock().beat();
        lane.lock().found();
        let after = lane.lock().tally();
        let service_ns = monotonic_ns().saturating_sub(begun_ns);
        let queue_ns = begun_ns.saturating_sub(job.arrived_ns);
        let added_ns = is_slowed.then(|| after.added_ns - before.added_ns);
        Timing { queue_ns, service_ns, added_ns }.add_to(&mut answer);
        metrics.count_answer(answer.status());
        metrics.count_search(queue_ns + service_ns, service_ns);
        lane.lock().end();
        metrics.count_slowdown(before, after);
        // If the client disconnected meanwhile, the answer is dropped.
        let _left = job.reply.send(answer);
        lane.lock().refresh();
    }
}

fn answer_to(found: Result<Found, SearchError>) -> Answer {
    match found {
        Ok(found) => {
            let mut body = serde_json::to_vec(&found).expect("an answer is plain data");
            body.push(b'\n');
            answer::json(StatusCode::OK, body)
        }
        Err(error) => {
            let status = match error {
                SearchError::Query(_) => StatusCode::BAD_REQUEST,
                SearchError::Index(_) => StatusCode::INTERNAL_SERVER_ERROR,
            };
            answer::error(status, &error.to_string())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::beside::Lanes;
    use crate::beside::kernel::Kernel;
    use crate::search::index::tests::index_of;
    use crate::search::server::Emulated;
    use elfen_rt::service::Service;
    use elfen_rt::signal::account::Claim;
    use std::sync::atomic::Ordering::Relaxed;

    /// The value of a metric in the metrics text.
    fn value(metrics: &Metrics, name: &str) -> f64 {
        let text = metrics.text(0);
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.expect("the metrics have it").parse().expect("a number")
    }

    /// Goal: next to a batch that always runs, a request takes longer by the slowdown. Metrics and
    /// answers report it, and the published counts show the IPC of a shared core. Without a batch,
    /// no time is added. Method: a task map for tests, whose account runs or is unclaimed.
    #[test]
    fn requests_beside_a_batch_are_slowed() {
        let index = index_of(&["one two"; 200]);
        for (runs, ipc_milli) in [(true, 667), (false, 1_000)] {
            let kernel = Kernel::for_tests(2);
            if runs {
                let account = kernel.map().account_for_tests(1, 0);
                account.claim.store(Claim::of_program(7).word(), Relaxed);
                account.since_ns.store(1, Relaxed);
            }
            let slowdown = "1.5".parse().expect("a factor");
            let lanes: Lanes = "0:1".parse().expect("a pair");
            let emulated = Emulated { slowdown, lanes, kernel: Arc::new(kernel) };
            let metrics = Metrics::new(Some(slowdown));
            let name = format!("worker-test-{}-{runs}", std::process::id());
            let page: &'static Service =
                Box::leak(Box::new(Service::open(&name, 1).expect("a page")));
            let queue = Queue::new(20, None);
            let ask = |id| {
                let (reply, answered) = oneshot::channel();
                let (query, arrived_ns) = ("one two".to_owned(), monotonic_ns());
                let job = Job { id, arrived_ns, query, limit: 10, reply };
                queue.push(job).expect("there is room");
                answered
            };
            let answers: Vec<_> = (1..=20).map(ask).collect();
            queue.close();
            let slot = page.claim(0, 0).expect("it is new");
            let lane = Lane { slot: Some(slot), core: Some(emulated.core(0)) };
            work(&queue, &metrics, &mut index.seeker(), lane);
            let says = |answered: oneshot::Receiver<Answer>| {
                let answer = answered.blocking_recv().expect("each is answered");
                let timing = answer.headers()["server-timing"].to_str().expect("text");
                let (_, ms) = timing.split_once("added;dur=").expect("a core is emulated");
                ms.parse::<f64>().expect("a number") / 1e3
            };
            let said: f64 = answers.into_iter().map(says).sum();
            let slot = page.page().slot(0).expect("one lane");
            let [instructions, cycles] =
                [&slot.instructions, &slot.cycles].map(|word| word.load(Relaxed));
            assert_eq!((instructions * 1_000).div_ceil(cycles), ipc_milli);
            page.page().memory().remove_name().expect("it is ours");
            let [beside, added] = ["beside", "added"]
                .map(|of| value(&metrics, &format!("elfen_search_{of}_seconds_total")));
            if runs {
                assert!(added >= beside / 3.0 - 1e-8, "{added} s for {beside} s");
                assert!((beside - cycles as f64 / 1e9).abs() < 1e-6, "all the time");
                assert!((said - added).abs() < 1e-6, "each answer says its part: {said}, {added}");
            } else {
                assert_eq!((beside, added, said), (0.0, 0.0, 0.0));
            }
        }
    }
}
