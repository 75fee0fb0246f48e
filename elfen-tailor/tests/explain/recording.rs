//! Goal: the report says how the recording itself affected the requests. Method: a recorder that
//! takes the service's CPU, and a recording that was paused.

use elfen_tailor::rank::SlowThreshold;
use elfen_tailor::report::report;
use elfen_tailor::segment::RECORDER;
use elfen_tailor::trace::{Gap, Note, ThreadName};

use crate::trace_builder::{EPOLL, HOG, MS, SERVICE, TraceBuilder, WORKER};
use crate::{hogged, named};

/// The hog is the recorder, and another thread also preempted one request.
#[test]
fn a_recorder_that_takes_the_cpu_is_reported() {
    let mut builder = hogged();
    let at = 10_010 * MS;
    builder.ready(at, 1).read(at, 1).switch(at + 10, SERVICE, None, WORKER);
    builder.switch(at + 9 * MS, WORKER, Some(EPOLL), SERVICE).answer(at + 9 * MS + 50, 1);
    let text = report(&builder.trace, SlowThreshold::Quantile(980_000), 3, &[]).unwrap().text();
    assert!(!text.contains("recorder"), "{text}");
    let name = ThreadName { thread: HOG, at_ns: 2, name: RECORDER.to_owned() };
    builder.trace.names.remove(&HOG);
    builder.trace.add_note(Note::Names(vec![name]));
    let result = report(&builder.trace, SlowThreshold::Quantile(980_000), 3, &[]).unwrap();
    let text = result.text().replace('\n', " ");
    assert!(text.contains("because   this recording itself ran on the CPU"), "{text}");
    assert!(text.contains("The recorder caused 91 % of it"), "{text}");
    assert!(text.contains("taskset") && text.contains("--duty 10%"), "{text}");
    assert!(text.contains("Of the rest, 100 % is because worker ran on the CPU"), "{text}");
    assert!(result.summary().iter().any(|line| line.contains("The recorder caused")));
}

/// The states of threads during a pause are unknown: a service that ran before the pause sleeps
/// after it.
#[test]
fn requests_during_a_pause_are_left_out() {
    let mut builder = TraceBuilder::new();
    builder.switch(2, 0, None, SERVICE);
    for at in 1..=100 {
        builder.ready(at * MS, 1).read(at * MS + 10, 1).answer(at * MS + 20, 1);
    }
    builder.switch(101 * MS, SERVICE, None, HOG);
    let at = 900 * MS;
    builder.trace.gaps.push(Gap { cpu: None, count: 0, from_ns: 99 * MS, to_ns: at });
    builder.ready(at + 1_000, 1).wake(at + 2_000, SERVICE, 0, 0);
    builder.switch(at + 5_000, 0, None, SERVICE).read(at + 6_000, 1).answer(at + 10_000, 1);
    builder.switch(1_000 * MS, SERVICE, Some(EPOLL), 0);
    builder.trace.ended_ns = Some(1_000 * MS + 1);
    let result = report(&builder.trace, SlowThreshold::AboveNs(0), 1, &[]).unwrap();
    assert_eq!((result.requests, result.complete, result.lost_events), (101, 99, 0));
    let text = result.text();
    assert!(text.contains("nothing lost, 2 requests left out"), "{text}");
    assert!(text.contains("recorded for 20 % of that time"), "{text}");
    let expected = [("unknown", 1_000), ("wake", 3_000), ("busy", 1_000), ("work", 4_000)];
    assert_eq!(builder.last(), named(&expected));
}
