//! Goal: if a hog kept threads of one CPU from it together, the prediction also removes their waits
//! for each other. Method: two threads serve a client each. They serve at different times, except
//! where the hog has delayed both.

use elfen_rt::signal::event::EventKind;
use elfen_tailor::rank::{OffSlot, SlowThreshold};
use elfen_tailor::report::report;

use crate::trace_builder::{EPOLL, FSYNC, HOG, MS, SERVICE, TraceBuilder, WORKER};

/// Serves a request for a millisecond from `begin` on. Then `next` has the CPU.
fn serves(builder: &mut TraceBuilder, thread: u32, begin: u64, next: u32) {
    let connection = u64::from(thread);
    let received = EventKind::Received { connection, bytes: 5, peek: false };
    builder.event(0, begin, thread, received);
    builder.event(0, begin + MS, thread, EventKind::Transmitted { connection, end: 1 });
    builder.event(0, begin + MS, thread, EventKind::Sent { connection, end: 1 });
    builder.switch(begin + MS, thread, Some(EPOLL), next);
}

fn comes(builder: &mut TraceBuilder, thread: u32, at: u64) {
    builder.ready(at, u64::from(thread)).wake(at, thread, 0, 0);
}

#[test]
fn threads_that_share_a_cpu_are_one_queue() {
    let mut builder = TraceBuilder::new();
    builder.switch(2, HOG, Some(EPOLL), 0);
    for round in 1..=1_000 {
        let at = round * 20 * MS;
        let (first, second) = (at, at + 2 * MS);
        if round % 20 > 0 {
            for (thread, at) in [(SERVICE, first), (WORKER, second)] {
                comes(&mut builder, thread, at);
                builder.switch(at, 0, None, thread);
                serves(&mut builder, thread, at, 0);
            }
            continue;
        }
        builder.switch(at - 1, 0, None, HOG);
        comes(&mut builder, SERVICE, first);
        comes(&mut builder, WORKER, second);
        builder.switch(at + 5 * MS, HOG, Some(EPOLL), SERVICE);
        serves(&mut builder, SERVICE, at + 5 * MS, WORKER);
        serves(&mut builder, WORKER, at + 6 * MS, 0);
    }
    let without = ["preempted:hog".to_owned()];
    let result = report(&builder.trace, SlowThreshold::Quantile(950_000), 3, &without).unwrap();
    assert!(result.replay_valid && result.complete == 2_000, "{result:#?}");
    assert_eq!(result.latency_ns.p99, 6 * MS);
    // Each request has its millisecond of work. Only because of the hog, the second waited for the
    // first.
    let left = result.without.and_then(|without| without.latency_ns).unwrap();
    assert_eq!((left.p50, left.max), (MS, MS));
    let causes: Vec<&str> = result.causes.iter().map(|cause| cause.row.cause.as_str()).collect();
    assert_eq!(causes, ["preempted:hog"], "no request is charged for the other one's slot");
}

const US: u64 = 1_000;

/// A service of one thread, which sleeps in `epoll_pwait` between requests.
struct Alone(TraceBuilder);

impl Alone {
    fn new() -> Self {
        let mut builder = TraceBuilder::new();
        builder.switch(2, SERVICE, Some(EPOLL), 0);
        Self(builder)
    }

    fn wakes(&mut self, at: u64) -> &mut TraceBuilder {
        self.0.wake(at, SERVICE, 0, 0).switch(at, 0, None, SERVICE)
    }

    fn sleeps(&mut self, at: u64) {
        self.0.switch(at, SERVICE, Some(EPOLL), 0);
    }

    /// Serves a request that arrives while the service idles.
    fn serves_one(&mut self, at: u64, takes: u64) {
        self.0.ready(at, 1);
        self.wakes(at).read(at, 1).answer(at + takes, 1);
        self.sleeps(at + takes + 10 * US);
    }
}

/// Goal: a service that works on several requests at once is not a queue, and the report says so
/// instead of a prediction. Method: while the first request waits for something, the second begins,
/// waits as well, and is answered first. This happens in all rounds, or in one round of twenty,
/// which is then the tail.
#[test]
fn concurrent_requests_are_no_queue() {
    for seldom in [1, 20] {
        let mut service = Alone::new();
        for round in 1..=400 {
            let at = round * 20 * MS;
            if round % seldom > 0 {
                service.serves_one(at, 8 * MS);
                continue;
            }
            for (connection, at) in [(1, at), (2, at + MS)] {
                service.0.ready(at, connection);
                service.wakes(at).read(at, connection);
                service.sleeps(at + 100 * US);
            }
            for (connection, at) in [(2, at + 7 * MS), (1, at + 9 * MS)] {
                service.wakes(at).answer(at + 100 * US, connection);
                service.sleeps(at + 110 * US);
            }
        }
        let without = ["wait".to_owned()];
        let result =
            report(&service.0.trace, SlowThreshold::AboveNs(8_500 * US), 3, &without).unwrap();
        assert_eq!(result.replay_error.p99.to_bits(), 0, "as it was");
        let OffSlot { all, tail } = result.replay_aside;
        assert!(
            !result.replay_valid && tail > 0.5 && (all < 0.05) == (seldom == 20),
            "{all} {tail}"
        );
        assert!(result.without.as_ref().unwrap().latency_ns.is_none());
        assert!(result.causes.iter().all(|cause| cause.row.whatif_p99_ns.is_none()));
        let text = result.text().replace('\n', " ");
        assert!(text.contains("the service works on several requests at once."), "{text}");
    }
}

/// Goal: a thread's waits belong to the request for which it works, not to the requests that wait
/// for the thread. Method: a thread flushes a file for each request while another request waits.
/// The prediction then removes the flushes.
#[test]
fn requests_do_not_inherit_the_waits_of_the_thread_before_them() {
    let mut service = Alone::new();
    for round in 1..=400 {
        let at = round * 20 * MS;
        service.0.ready(at, 1);
        service.wakes(at).read(at, 1).switch(at + 50 * US, SERVICE, Some(FSYNC), 0);
        service.0.ready(at + MS, 2);
        service.wakes(at + 4 * MS).answer(at + 4 * MS + 50 * US, 1);
        service.0.read(at + 4 * MS + 60 * US, 2).answer(at + 4 * MS + 160 * US, 2);
        service.sleeps(at + 4 * MS + 170 * US);
    }
    let without = ["io".to_owned()];
    let result = report(&service.0.trace, SlowThreshold::Quantile(950_000), 3, &without).unwrap();
    assert!(result.replay_valid, "{:?}", result.replay_aside);
    let left = result.without.and_then(|without| without.latency_ns).unwrap();
    assert_eq!((left.p50, left.max), (100 * US, 110 * US));
}

/// Goal: a service that reads all requests, works for each, and answers in reverse order is one
/// queue. Without the hog, which made the requests arrive together, each request takes only its own
/// work. Method: the hog delays three requests.
#[test]
fn requests_answered_in_reverse_are_one_queue() {
    let mut service = Alone::new();
    for round in 1..=1_000 {
        let at = round * 20 * MS;
        if round % 20 > 0 {
            service.serves_one(at, 100 * US);
            continue;
        }
        service.0.switch(at - 1, 0, None, HOG);
        for connection in 1..=3 {
            service.0.ready(at + connection * MS, connection);
        }
        service.0.wake(at + MS, SERVICE, 0, 0).switch(at + 9 * MS, HOG, Some(EPOLL), SERVICE);
        for connection in 1..=3 {
            service.0.read(at + 9 * MS + connection * 80 * US, connection);
        }
        for connection in 1..=3 {
            service.0.answer(at + 9 * MS + (300 + connection * 20) * US, 4 - connection);
        }
        service.sleeps(at + 10 * MS);
    }
    let without = ["preempted".to_owned()];
    let result = report(&service.0.trace, SlowThreshold::Quantile(950_000), 3, &without).unwrap();
    assert!(result.replay_valid && result.latency_ns.p99 > 7 * MS, "{:?}", result.replay_aside);
    let left = result.without.and_then(|without| without.latency_ns).unwrap();
    assert!(left.max <= 200 * US, "{left:?}");
}

/// Goal: an answer that TCP holds back does not delay the next request. Method: TCP holds back an
/// answer while a hog keeps the service from the next request.
#[test]
fn a_held_answer_does_not_block_the_server() {
    let mut service = Alone::new();
    for round in 1..=200 {
        let at = round * 100 * MS;
        service.0.ready(at, 1);
        let sent = EventKind::Sent { connection: 1, end: 1 };
        service.wakes(at).read(at, 1).event(0, at + 100 * US, SERVICE, sent);
        service.0.switch(at + 110 * US, SERVICE, Some(EPOLL), HOG).ready(at + 11 * MS, 2);
        service.0.wake(at + 11 * MS, SERVICE, 0, 0);
        service.0.switch(at + 15 * MS, HOG, Some(EPOLL), SERVICE).read(at + 15 * MS, 2);
        service.0.answer(at + 15 * MS + 100 * US, 2);
        service.sleeps(at + 15 * MS + 110 * US);
        service.0.event(0, at + 40 * MS, 0, EventKind::Transmitted { connection: 1, end: 1 });
    }
    let without = ["preempted".to_owned()];
    let result = report(&service.0.trace, SlowThreshold::Quantile(950_000), 3, &without).unwrap();
    assert!(result.replay_valid && result.complete == 400, "{:?}", result.replay_aside);
    let left = result.without.and_then(|without| without.latency_ns).unwrap();
    assert_eq!((result.latency_ns.p50, left.p50, left.max), (4_100 * US, 100 * US, 40 * MS));
}
