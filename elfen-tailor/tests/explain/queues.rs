//! Goal: where the threads of a service share a CPU, who was kept from it together with others
//! would not have had them before him without that. Method: two threads that serve a client each,
//! at times when the other does not, but where a hog has held up both.

use elfen_rt::signal::event::Kind as What;
use elfen_tailor::rank::Slow;
use elfen_tailor::report::report;

use crate::story::{EPOLL, HOG, MS, SERVICE, Story, WORKER};

/// For a millisecond from `begin` on; afterwards the CPU is `next`'s.
fn serves(story: &mut Story, thread: u32, begin: u64, next: u32) {
    let connection = u64::from(thread);
    let received = What::Received { connection, bytes: 5, peek: false };
    story.event(0, begin, thread, received);
    story.event(0, begin + MS, thread, What::Transmitted { connection, end: 1 });
    story.event(0, begin + MS, thread, What::Sent { connection, end: 1 });
    story.switch(begin + MS, thread, Some(EPOLL), next);
}

fn comes(story: &mut Story, thread: u32, at: u64) {
    story.ready(at, u64::from(thread)).wake(at, thread, 0, 0);
}

#[test]
fn threads_that_share_a_cpu_are_one_queue() {
    let mut story = Story::new();
    story.switch(2, HOG, Some(EPOLL), 0);
    for round in 1..=1_000 {
        let at = round * 20 * MS;
        let (first, second) = (at, at + 2 * MS);
        if round % 20 > 0 {
            for (thread, at) in [(SERVICE, first), (WORKER, second)] {
                comes(&mut story, thread, at);
                story.switch(at, 0, None, thread);
                serves(&mut story, thread, at, 0);
            }
            continue;
        }
        story.switch(at - 1, 0, None, HOG);
        comes(&mut story, SERVICE, first);
        comes(&mut story, WORKER, second);
        story.switch(at + 5 * MS, HOG, Some(EPOLL), SERVICE);
        serves(&mut story, SERVICE, at + 5 * MS, WORKER);
        serves(&mut story, WORKER, at + 6 * MS, 0);
    }
    let without = ["preempted:hog".to_owned()];
    let told = report(&story.tale, Slow::Quantile(950_000), 3, &without).unwrap();
    assert!(told.replay_valid && told.complete == 2_000, "{told:#?}");
    assert_eq!(told.latency_ns.p99, 6 * MS);
    // Each had its millisecond of work, and the second one the first's before that.
    let left = told.without.and_then(|without| without.latency_ns).unwrap();
    assert_eq!((left.p50, left.max), (MS, MS));
    let causes: Vec<&str> = told.causes.iter().map(|cause| cause.row.cause.as_str()).collect();
    assert_eq!(causes, ["preempted:hog"], "nobody is charged for the other one's turn");
}
