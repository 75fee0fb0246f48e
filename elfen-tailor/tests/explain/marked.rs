//! Tests with a service that reports its requests itself, by marks.

use elfen_rt::signal::mark::Step;
use elfen_tailor::account::Account;
use elfen_tailor::rank::SlowThreshold;
use elfen_tailor::report::StageRow;
use elfen_tailor::report::report;
use elfen_tailor::segment::SegmentKind;
use elfen_tailor::trace::{Gap, MARKS_ALONE};

use crate::trace_builder::{EPOLL, FUTEX, MS, SERVICE, TraceBuilder, WORKER};

const END: Step = Step::End { class: 0 };

const fn begin(arrived_ns: u64) -> Step {
    Step::Begin { arrived_ns }
}

/// Goal: a request that waits for another request names it. The work of a coordinator before it
/// passes a request on belongs to that request. Method: a coordinator, and a worker with two
/// requests.
#[test]
fn a_request_is_queued_behind_another_by_its_number() {
    let mut builder = TraceBuilder::of_marks();
    builder.switch_on(1, 2, SERVICE, Some(EPOLL), 0, 1).switch(3, WORKER, Some(FUTEX), 0);
    // The coordinator reads the first request, and wakes the worker.
    builder.switch_on(1, 90, 0, None, SERVICE, 0).wake(120, WORKER, SERVICE, SERVICE);
    builder.switch(130, 0, None, WORKER).switch_on(1, 140, SERVICE, Some(EPOLL), 0, 1);
    builder.mark(150, WORKER, 71, begin(100)).mark(400, WORKER, 71, END);
    builder.mark(410, WORKER, 72, begin(200)).mark(500, WORKER, 72, END);
    builder.switch(600, WORKER, Some(FUTEX), 0);
    let account = Account::of(&builder.trace);
    let result = |at: usize| -> Vec<(SegmentKind, u64, Option<u64>)> {
        let segments = account.explained[at].segments.iter();
        segments.map(|segment| (segment.kind, segment.ns(), segment.behind)).collect()
    };
    let first = [
        (20, SegmentKind::Work),
        (10, SegmentKind::Wake),
        (20, SegmentKind::Busy),
        (250, SegmentKind::Work),
    ];
    assert_eq!(result(0), first.map(|(ns, kind)| (kind, ns, None)));
    let second = [
        (SegmentKind::Queue, 200, Some(71)),
        (SegmentKind::Busy, 10, None),
        (SegmentKind::Work, 90, None),
    ];
    assert_eq!(result(1), second);
    let shown = report(&builder.trace, SlowThreshold::AboveNs(1), 2, &[]).unwrap();
    assert_eq!(shown.slowest[1].segments[0].who, "request 71");
    assert!(shown.text().starts_with(", by its marks: 2 requests"), "{}", shown.text());
}

/// Twenty requests, a millisecond apart, of two classes. The last request of each class has
/// `more_ns` more work in a stage.
fn of_classes(builder: &mut TraceBuilder, more_ns: u64) {
    for number in 1..=20 {
        let (class, at) = (1 + number % 2, number * MS);
        let usual_ns = class * 100_000;
        let more_ns = if number >= 19 { more_ns } else { 0 };
        builder.mark(at, SERVICE, number, begin(at)).mark(at + 50, SERVICE, number, Step::Stage(3));
        builder.mark(at + usual_ns + more_ns, SERVICE, number, Step::End { class });
    }
}

/// Goal: work counts as long if it exceeds the usual work of its own class, and the report shows
/// the longer stage. Method: two classes, of which one takes twice as long as the other.
#[test]
fn work_is_compared_within_its_class() {
    let mut builder = TraceBuilder::of_marks();
    builder.switch(2, 0, None, SERVICE);
    of_classes(&mut builder, 50_000);
    builder.switch(30 * MS, SERVICE, Some(EPOLL), 0);
    let result = report(&builder.trace, SlowThreshold::AboveNs(140_000), 20, &[]).unwrap();
    assert_eq!(result.slow_requests, 11, "all of the second kind, and one of the first");
    let long = result.causes.iter().find(|cause| cause.row.cause == "long").unwrap();
    assert_eq!((long.row.requests, long.row.share), (2, 1.0));
    let [first, third] = result.stages[..] else { panic!("{:?}", result.stages) };
    assert_eq!(first, StageRow { stage: 0, tail_ns: 50, middle_ns: 50 });
    assert!(third.stage == 3 && third.tail_ns > third.middle_ns, "{third:?}");
    assert!(result.text().contains("stage"), "{}", result.text());
}

/// Goal: without kernel events, marks give queueing and service, and requests with lost marks are
/// left out. Method: a trace without events.
#[test]
fn without_kernel_events_marks_give_queue_and_work() {
    let mut builder = TraceBuilder::of_marks();
    builder.trace.head.detail = MARKS_ALONE.to_owned();
    builder.mark(500, 7, 1, begin(100)).mark(900, 8, 1, END);
    builder.mark(2_000, 7, 2, begin(1_500)).mark(2_500, 7, 2, END);
    assert_eq!(builder.last(), [("queue".to_owned(), 500), ("work".to_owned(), 500)]);
    builder.trace.gaps.push(Gap { cpu: None, count: 9, from_ns: 1_800, to_ns: 1_900 });
    let result = report(&builder.trace, SlowThreshold::AboveNs(1), 2, &[]).unwrap();
    assert_eq!((result.requests, result.complete, result.lost_events), (2, 1, 9));
    assert!(result.text().contains("no kernel events"), "{}", result.text());
}
