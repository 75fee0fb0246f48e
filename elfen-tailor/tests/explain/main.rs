//! Goal: requests are explained exactly, to the nanosecond. Method: made-up traces of a service
//! whose thread 10 reads and answers, so that the parts of each request are known.

mod drawn;
mod marked;
mod neighbours;
mod queues;
mod recording;
mod trace_builder;

use elfen_rt::signal::event::{Event, EventKind, Runtime, STATE_STOPPED, Stall, Switch};
use elfen_tailor::account::{Account, charges};
use elfen_tailor::rank::SlowThreshold;
use elfen_tailor::report::{NothingToReport, report};
use elfen_tailor::segment::describe_cause;
use elfen_tailor::trace::{FULL, Gap, KernelFunction, Note};
use proptest::prelude::*;
use trace_builder::{EPOLL, FSYNC, FUTEX, HOG, MS, SERVICE, TraceBuilder, WORKER};

fn named(expected: &[(&str, u64)]) -> Vec<(String, u64)> {
    expected.iter().map(|(name, ns)| ((*name).to_owned(), *ns)).collect()
}

#[test]
fn a_preempted_request_names_the_thread_that_ran() {
    let mut builder = TraceBuilder::new();
    builder.switch(2, SERVICE, Some(EPOLL), 0).ready(100, 1).wake(105, SERVICE, 0, 0);
    builder.switch(110, 0, None, SERVICE).read(120, 1);
    builder.switch(150, SERVICE, None, HOG).switch(150 + 9 * MS, HOG, Some(EPOLL), SERVICE);
    builder.answer(200 + 9 * MS, 1);
    let expected = [
        ("wait:epoll_pwait", 5),
        ("wake", 5),
        ("busy", 10),
        ("work", 30),
        ("preempted:hog", 9 * MS),
        ("work", 50),
    ];
    assert_eq!(builder.last(), named(&expected));
}

#[test]
fn a_stopped_service_and_the_queue_behind_it() {
    let mut builder = TraceBuilder::new();
    builder.switch(2, SERVICE, Some(EPOLL), 0).ready(100, 1).wake(100, SERVICE, 0, 0);
    builder.switch(100, 0, None, SERVICE).read(110, 1);
    builder.switch_on(0, 200, SERVICE, None, 0, STATE_STOPPED).ready(300, 2);
    builder.wake(200 + MS, SERVICE, 77, 77).switch(210 + MS, 0, None, SERVICE);
    builder.answer(500 + MS, 1).read(600 + MS, 2).answer(700 + MS, 2);
    let expected = [
        ("stopped", MS - 100),
        ("wake", 10),
        // The rest of the first request, then the system calls that read the second.
        ("queue", 291),
        ("busy", 99),
        ("work", 100),
    ];
    assert_eq!(builder.last(), named(&expected));
}

#[test]
fn a_lock_names_its_holder_and_storage_its_call() {
    let mut builder = TraceBuilder::new();
    builder.switch(2, SERVICE, Some(EPOLL), 0).ready(100, 1).wake(100, SERVICE, 0, 0);
    builder.switch(100, 0, None, SERVICE).read(110, 1);
    builder.switch(200, SERVICE, Some(FUTEX), 0).wake(900, SERVICE, WORKER, SERVICE);
    builder.switch(900, 0, None, SERVICE).switch(1_000, SERVICE, Some(FSYNC), 0);
    builder.wake(3_000, SERVICE, 0, 0).switch(3_000, 0, None, SERVICE);
    builder.switch(3_100, SERVICE, Some(FUTEX), 0).wake(4_000, SERVICE, 12, SERVICE);
    builder.switch(4_000, 0, None, SERVICE).answer(4_500, 1);
    let expected = [
        ("busy", 10),
        ("work", 90),
        ("lock:worker", 700),
        ("work", 100),
        ("io:fsync", 2_000),
        ("work", 100),
        ("safepoint", 900),
        ("work", 500),
    ];
    assert_eq!(builder.last(), named(&expected));
}

/// A coordinator passes a request to a worker, and the worker's time belongs to the request.
#[test]
fn the_walk_follows_wake_ups_to_the_worker() {
    let mut builder = TraceBuilder::new();
    builder.switch(2, SERVICE, Some(EPOLL), 0).switch_on(1, 3, WORKER, Some(FUTEX), 0, 1);
    builder.ready(100, 1).wake(100, SERVICE, 0, 0).switch(100, 0, None, SERVICE).read(110, 1);
    builder.wake(150, WORKER, SERVICE, SERVICE).switch(160, SERVICE, Some(EPOLL), 0);
    builder.switch_on(1, 170, 0, None, WORKER, 0).switch_on(1, 500, WORKER, None, HOG, 0);
    builder.switch_on(1, 800, HOG, Some(EPOLL), WORKER, 1);
    builder.wake(1_000, SERVICE, WORKER, SERVICE).switch(1_010, 0, None, SERVICE).answer(1_100, 1);
    builder.trace.events[0].sort_by_key(|event| event.at_ns);
    builder.trace.events[1].sort_by_key(|event| event.at_ns);
    let expected = [
        ("busy", 10),
        ("work", 40),
        ("wake", 20),
        ("work", 330),
        ("preempted:hog", 300),
        ("work", 200),
        ("wake", 10),
        ("work", 90),
    ];
    assert_eq!(builder.last(), named(&expected));
}

/// With Nagle's algorithm, the end of the answer leaves long after it was written.
#[test]
fn an_answer_held_back_by_nagle_is_tcp_out() {
    let mut builder = TraceBuilder::new();
    builder.switch(2, SERVICE, Some(EPOLL), SERVICE).ready(100, 1).read(100, 1).answer(200, 1);
    builder.event(0, 250, SERVICE, EventKind::Sent { connection: 1, end: 9 });
    builder.switch(300, SERVICE, Some(EPOLL), 0);
    builder.event(0, 40 * MS, 0, EventKind::Transmitted { connection: 1, end: 9 });
    assert_eq!(builder.last(), named(&[("work", 150), ("tcp-out", 40 * MS - 250)]));
}

#[test]
fn interrupts_and_stolen_time_are_separate_segments() {
    let mut builder = TraceBuilder::new();
    builder.switch(2, 0, None, SERVICE).ready(1_000, 1).read(1_000, 1);
    builder.event(0, 70_000, SERVICE, EventKind::Softirq { since_ns: 50_000, vector: 3 });
    builder.answer(100_000, 1);
    let stolen = Switch {
        previous: SERVICE,
        process: 0,
        preempted: false,
        iowait: false,
        state: 1,
        call: None,
        stolen_ns: 0,
    };
    builder.event(0, 200_000, 0, EventKind::Switch(stolen));
    let expected = [("work", 49_000), ("softirq:NET_RX", 20_000), ("work", 30_000)];
    assert_eq!(builder.last(), named(&expected));
    let EventKind::Switch(last) = &mut builder.trace.events[0].last_mut().unwrap().kind else {
        panic!()
    };
    last.stolen_ns = 15_000;
    let expected =
        [("steal", 14_002), ("work", 34_998), ("softirq:NET_RX", 20_000), ("work", 30_000)];
    assert_eq!(builder.last(), named(&expected));
}

/// Goal: stolen time is charged once, also if a request waited for that CPU. Method: the hypervisor
/// steals 30 us at the beginning of a run in which two requests are served. It steals as much from
/// another thread's run on a CPU that a third request waits for.
#[test]
fn stolen_time_is_charged_once() {
    const STOLEN_NS: u64 = 30_000;
    let mut builder = TraceBuilder::new();
    let switch = |previous, preempted, state, stolen_ns| {
        let (process, iowait, call) = (previous, false, None);
        EventKind::Switch(Switch { previous, process, preempted, iowait, state, call, stolen_ns })
    };
    builder.event(0, 1_000, SERVICE, switch(0, false, 0, 0));
    builder.ready(2_000, 1).read(2_000, 1).answer(50_000, 1);
    builder.ready(60_000, 1).read(60_000, 1).answer(100_000, 1);
    builder.event(0, 110_000, HOG, switch(SERVICE, true, 0, STOLEN_NS));
    builder.ready(110_000, 1);
    builder.event(0, 210_000, SERVICE, switch(HOG, false, 1, STOLEN_NS * 2));
    builder.read(210_000, 1).answer(220_000, 1);
    let account = Account::of(&builder.trace);
    let stolen = |at: usize| {
        let of = charges(&account.explained[at], &builder.trace).into_iter();
        of.filter(|(name, _)| name == "steal").map(|(_, ns)| ns).sum::<u64>()
    };
    assert_eq!([0, 1, 2].map(stolen), [STOLEN_NS - 1_000, 0, STOLEN_NS]);
    let waited = charges(&account.explained[2], &builder.trace);
    assert_eq!(waited[0].1, 100_000 - STOLEN_NS, "{waited:?}");
}

/// Goal: a collection ends when threads may continue, not when the JVM reports its end. Method: a
/// woken thread takes its waker's CPU for a millisecond. Only then the waker wakes the other thread
/// and reports the end of the halt. In between, a thread that slept for another reason takes the
/// CPU, too.
#[test]
fn a_halt_ends_when_threads_continue() {
    const VM: u32 = 12;
    let step = |step| EventKind::Runtime(step);
    let mut builder = TraceBuilder::new();
    builder.switch(2, 0, None, SERVICE).ready(1_000, 1).read(1_000, 1);
    builder.event(0, 2_000, VM, step(Runtime::SafepointBegin));
    builder.event(0, 2_000, VM, step(Runtime::GcBegin));
    builder.switch(3_000, SERVICE, Some(FUTEX), VM);
    // The socket wakes this thread for a moment.
    builder.wake(MS, WORKER, 0, 0).switch(MS, VM, None, WORKER);
    builder.switch(MS + 5_000, WORKER, Some(FUTEX), VM);
    builder.event(0, 5 * MS, VM, step(Runtime::GcEnd));
    builder.wake(5 * MS + 1_000, WORKER, VM, SERVICE).switch(5 * MS + 2_000, VM, None, WORKER);
    builder.switch(6 * MS, WORKER, Some(FUTEX), VM).wake(6 * MS + 1_000, SERVICE, VM, SERVICE);
    builder.event(0, 6 * MS + 1_500, VM, step(Runtime::SafepointEnd));
    builder.switch(6 * MS + 2_000, VM, Some(FUTEX), SERVICE).answer(6 * MS + 3_000, 1);
    let account = Account::of(&builder.trace);
    let result = charges(&account.explained[0], &builder.trace);
    let of = |name: &str| result.iter().find(|(cause, _)| cause == name).map_or(0, |(_, ns)| *ns);
    assert_eq!(of("gc"), 5 * MS + 2_000 - 3_000, "{result:?}");
    assert_eq!(of("safepoint"), MS, "{result:?}");
}

/// Goal: a thread that is woken on its way to sleep waits for its CPU, not for input. Method: a
/// wake-up that precedes the switch of the sleep that it ends. Also a wake-up of a thread that
/// stayed awake, and sleeps later until another wake-up.
#[test]
fn a_thread_woken_on_its_way_to_sleep_waits_for_its_cpu() {
    let mut builder = TraceBuilder::new();
    builder.switch(2, 0, None, SERVICE);
    builder.ready(1_000, 1).wake(1_001, SERVICE, 0, 0);
    builder.switch(1_010, SERVICE, Some(EPOLL), HOG).switch(5_000, HOG, Some(EPOLL), SERVICE);
    builder.read(5_010, 1).answer(6_000, 1);
    let expected = [("busy", 10), ("preempted:hog", 3_990), ("busy", 10), ("work", 990)];
    assert_eq!(builder.last(), named(&expected));
    builder.wake(7_000, SERVICE, 0, 0).switch(8_000, SERVICE, Some(EPOLL), 0);
    builder.ready(9_000, 1).wake(9_500, SERVICE, 0, 0).switch(9_600, 0, None, SERVICE);
    builder.read(9_700, 1).answer(9_800, 1);
    let expected = [("wait:epoll_pwait", 500), ("wake", 100), ("busy", 100), ("work", 100)];
    assert_eq!(builder.last(), named(&expected));
}

/// Goal: waits inside the kernel are causes of their own, in any system call. Method: a page fault
/// during a request's work reclaims and compacts memory behind a lock. Its fsync waits for another
/// lock. Another thread waits for a third lock.
#[test]
fn waits_of_the_kernel_are_causes_of_their_own() {
    let mut builder = TraceBuilder::new();
    builder.trace.head.detail = FULL.to_owned();
    builder.switch(2, 0, None, SERVICE).ready(1_000, 1).read(1_000, 1);
    let stall = |since_ns, what| EventKind::Stall { since_ns, what };
    builder.event(0, 5_000, SERVICE, stall(4_000, Stall::Compaction));
    builder.event(0, 6_000, SERVICE, stall(3_000, Stall::Contention(32 | 1)));
    builder.event(0, 7_000, WORKER, stall(1_000, Stall::Contention(1)));
    builder.event(0, 9_000, SERVICE, stall(2_000, Stall::Reclaim));
    builder.event(0, 9_400, SERVICE, EventKind::Fault { since_ns: 1_900, address: 1 << 12 });
    builder.event(0, 9_900, SERVICE, EventKind::Fault { since_ns: 9_500, address: 2 << 12 });
    builder.switch(10_000, SERVICE, Some(FSYNC), 0);
    builder.wake(40_000, SERVICE, 0, 0).switch(40_000, 0, None, SERVICE);
    builder.event(0, 40_100, SERVICE, stall(20_000, Stall::Contention(2)));
    builder.answer(50_000, 1);
    let expected = [
        ("work", 900),
        ("fault", 100),
        ("reclaim", 2_000),
        ("compaction", 1_000),
        ("reclaim", 4_000),
        ("fault", 400),
        ("work", 600),
        ("io:fsync", 10_000),
        ("contention:rwsem", 20_000),
        ("contention:rwsem", 100),
        ("work", 9_900),
    ];
    assert_eq!(builder.last(), named(&expected));
    let result = report(&builder.trace, SlowThreshold::AboveNs(1), 1, &[]).unwrap();
    assert_eq!(result.faults.map(|faults| faults.tail.round()), Some(2.0));
    assert!(
        result.text().contains("page faults of a request: 2.0 in the tail"),
        "{}",
        result.text()
    );
    assert!(result.causes.iter().any(|cause| cause.row.cause == "contention:rwsem"));
}

/// Goal: a wait for a disk names the kernel function, if the function is known. Method: two reads
/// in one request, whose stacks begin with generic functions, and a page fault in functions without
/// names.
#[test]
fn a_wait_for_a_disk_names_the_kernel_function() {
    const PREAD: u16 = 17;
    let mut builder = TraceBuilder::new();
    let names = [(1, "io_schedule"), (2, "folio_wait_bit_common"), (3, "filemap_read"), (4, "cc")];
    let of = |(address, name): (u32, &str)| KernelFunction { address, name: name.to_owned() };
    builder.trace.add_note(Note::Functions(names.map(of).into()));
    builder.switch(2, 0, None, SERVICE).ready(1_000, 1).read(1_000, 1);
    let mut sleeps = |from_ns: u64, call: Option<u16>, stacks: &[(bool, [u32; 4])]| {
        let (previous, process, preempted, iowait, state) = (SERVICE, SERVICE, false, true, 1);
        let stolen_ns = 0;
        let switch = Switch { previous, process, preempted, iowait, state, call, stolen_ns };
        builder.event(0, from_ns, 0, EventKind::Switch(switch)).wake(from_ns + 900, SERVICE, 0, 0);
        for &(second, frames) in stacks {
            builder.event(0, from_ns + 1_000, SERVICE, EventKind::Blocked { second, frames });
        }
        builder.switch(from_ns + 1_000, 0, None, SERVICE);
    };
    sleeps(2_000, Some(PREAD), &[(false, [1, 2, 3, 4]), (true, [4, 4, 0, 0])]);
    sleeps(4_000, Some(PREAD), &[(false, [1, 1, 2, 2]), (true, [4, 3, 0, 0])]);
    sleeps(6_000, None, &[(false, [9, 8, 7, 6]), (true, [0; 4])]);
    builder.answer(8_000, 1);
    let expected = [
        ("work", 1_000),
        ("io:pread64/filemap_read", 900),
        ("wake", 100),
        ("work", 1_000),
        ("io:pread64/cc", 900),
        ("wake", 100),
        ("work", 1_000),
        ("io:page-fault", 900),
        ("wake", 100),
        ("work", 1_000),
    ];
    assert_eq!(builder.last(), named(&expected));
    let all =
        |without: &str| report(&builder.trace, SlowThreshold::AboveNs(1), 1, &[without.to_owned()]);
    assert!(["io", "io:pread64", "io:pread64/cc"].iter().all(|name| all(name).is_ok()));
    assert!(all("io:pread").is_err(), "no part of a name");
    let result = describe_cause("io:pread64/filemap_read");
    assert_eq!(result, "the service waited for storage in pread64 (the kernel: filemap_read)");
}

/// Requests that overlap a gap are left out, and counted.
#[test]
fn lost_events_are_reported() {
    let mut builder = TraceBuilder::new();
    builder.switch(2, SERVICE, Some(EPOLL), SERVICE);
    for at in 1..=200 {
        builder.ready(at * MS, 1).read(at * MS + 10, 1).answer(at * MS + 20 + at, 1);
    }
    let gap = Gap { cpu: Some(0), count: 9, from_ns: 50 * MS, to_ns: 60 * MS };
    builder.trace.gaps.push(gap);
    let result = report(&builder.trace, SlowThreshold::Quantile(990_000), 5, &[]).unwrap();
    assert_eq!((result.requests, result.complete, result.lost_events), (200, 189, 9));
    assert!(result.text().contains("9 events lost; 11 requests left out"), "{}", result.text());
    builder.trace.gaps[0].to_ns = u64::MAX;
    builder.trace.gaps[0].from_ns = 0;
    let none = report(&builder.trace, SlowThreshold::Quantile(990_000), 5, &[]);
    assert_eq!(none, Err(NothingToReport::NoneComplete(200)));
    let empty = report(&TraceBuilder::new().trace, SlowThreshold::Quantile(990_000), 5, &[]);
    assert_eq!(empty, Err(NothingToReport::NoRequests { port: 80 }));
}

/// 1,000 requests of 0.1 ms. A hog preempts 20 of them for 5 ms.
fn hogged() -> TraceBuilder {
    let mut builder = TraceBuilder::new();
    builder.switch(2, 0, None, SERVICE);
    for at in 1..=1_000 {
        let (begin, slow) = (at * 10 * MS, at % 50 == 0);
        builder.ready(begin, 1).read(begin, 1);
        if slow {
            builder.switch(begin + 10, SERVICE, None, HOG);
            builder.switch(begin + 10 + 5 * MS, HOG, Some(EPOLL), SERVICE);
        }
        let end = begin + MS / 10 + at + if slow { 5 * MS } else { 0 };
        builder.answer(end, 1);
    }
    builder
}

/// Goal: the report names the largest cause first, in words, with the tail without it.
#[test]
fn the_ranking_names_the_cause() {
    let builder = hogged();
    let result = report(&builder.trace, SlowThreshold::Quantile(980_000), 3, &[]).unwrap();
    let first = &result.causes[0].row;
    assert_eq!((first.cause.as_str(), first.requests), ("preempted:hog", 20));
    assert!(first.share > 0.99 && first.share_ci95.0 > 0.99, "{first:?}");
    assert!(first.whatif_p99_ns.is_some_and(|ns| ns < MS / 5), "{first:?}");
    assert!(result.latency_ns.p99 > 5 * MS && result.replay_valid);
    assert_eq!(result.slowest.len(), 3);
    assert_eq!((result.slowest[0].outlier, result.slowest[0].charges[0].ns), ("noise", 5 * MS));
    let text = result.text();
    assert!(text.contains("because\n  hog ran on the CPU that they needed."), "{text}");
}

/// Goal: exactly the named causes are removed, separately and together. Method: some other requests
/// wait for a disk instead of the hog.
#[test]
fn named_causes_are_taken_out() {
    let mut builder = hogged();
    for at in 0..40_u64 {
        let begin = (2_000 + at * 10) * 10 * MS;
        builder.ready(begin, 1).read(begin, 1).switch(begin + 10, SERVICE, Some(FSYNC), 0);
        builder.wake(begin + 2 * MS, SERVICE, 0, 0).switch(begin + 2 * MS, 0, None, SERVICE);
        builder.answer(begin + 3 * MS, 1);
    }
    let result = |without: &[&str]| {
        let without: Vec<String> = without.iter().map(|name| (*name).to_owned()).collect();
        report(&builder.trace, SlowThreshold::Quantile(940_000), 1, &without)
    };
    let p99 = |without: &[&str]| {
        let result = result(without).unwrap();
        assert!(result.text().contains(&format!("without {}: p50", without.join(", "))));
        result.without.unwrap().latency_ns.expect("one thread is a queue").p99
    };
    assert!(result(&[]).unwrap().latency_ns.p99 > 5 * MS && result(&[]).unwrap().without.is_none());
    assert_eq!(p99(&["preempted:hog"]), 3 * MS, "the disk's are left");
    assert_eq!(p99(&["preempted"]), 3 * MS, "all of a kind");
    assert!(p99(&["io:fsync"]) > 5 * MS, "the hog's are left");
    assert!(p99(&["io", "preempted"]) < 2 * MS, "both");
    for wrong in ["preempted:cc1", "work", "queue", "", "together"] {
        let Err(NothingToReport::NoSuchCause { requested, available }) = result(&["io", wrong])
        else {
            panic!()
        };
        assert_eq!(requested, wrong);
        assert_eq!(available[..2], ["preempted:hog", "io:fsync"]);
    }
}

fn events() -> impl Strategy<Value = Vec<(usize, Event)>> {
    let time = prop_oneof![0..3_000_u64, Just(u64::MAX)];
    let thread = || prop_oneof![Just(0_u32), SERVICE..SERVICE + 4];
    let switch = (thread(), any::<bool>(), prop_oneof![Just(EPOLL), Just(FUTEX), Just(FSYNC)]);
    let connection = || 1..4_u64;
    let what = prop_oneof![
        switch.prop_map(|(previous, preempted, call)| EventKind::Switch(Switch {
            previous,
            process: SERVICE,
            preempted,
            iowait: false,
            state: u8::from(!preempted),
            call: Some(call),
            stolen_ns: u64::from(previous) << 10,
        })),
        (thread(), thread()).prop_map(|(waker, waker_process)| EventKind::Waking {
            waker,
            waker_process,
            process: SERVICE
        }),
        connection().prop_map(|connection| EventKind::Ready { connection, bytes: 1 }),
        connection().prop_map(|connection| EventKind::Received {
            connection,
            bytes: 1,
            peek: false
        }),
        connection().prop_map(|connection| EventKind::Sent { connection, end: 1 }),
        connection().prop_map(|connection| EventKind::Transmitted { connection, end: 1 }),
        (0..3_000_u64).prop_map(|since_ns| EventKind::Softirq { since_ns, vector: 3 }),
        (0..3_000_u64, prop_oneof![Just(Stall::Contention(1)), Just(Stall::Reclaim)])
            .prop_map(|(since_ns, what)| EventKind::Stall { since_ns, what }),
        (0..3_000_u64).prop_map(|since_ns| EventKind::Fault { since_ns, address: 0 }),
        any::<bool>().prop_map(|second| EventKind::Blocked { second, frames: [0, 1, 2, 3] }),
    ];
    let event = (0..2_usize, time, thread(), what)
        .prop_map(|(cpu, at_ns, thread, kind)| (cpu, Event { at_ns, thread, kind }));
    proptest::collection::vec(event, 0..200)
}

proptest! {
    /// Goal: no file causes a panic, and the segments of each request sum up. Method: random
    /// events, also out of order and with extreme times.
    #[test]
    fn any_events_are_accounted_for(
        mut events in events(), began_ns in 0..2_000_u64, is_sorted: bool,
        strange in proptest::collection::vec((any::<prop::sample::Index>(), any::<u64>()), 0..4),
    ) {
        for (index, at_ns) in strange {
            if !events.is_empty() {
                index.get_mut(&mut events).1.at_ns = at_ns;
            }
        }
        let mut builder = TraceBuilder::new();
        builder.trace.head.began_ns = began_ns;
        builder.trace.head.cores = vec![vec![0, 1]];
        for (cpu, event) in events {
            builder.trace.events[cpu].push(event);
        }
        if is_sorted {
            let events = builder.trace.events.iter_mut();
            events.for_each(|events| events.sort_by_key(|event| event.at_ns));
        }
        for one in Account::of(&builder.trace).explained {
            let mut at_ns = one.arrived_ns;
            for segment in &one.segments {
                prop_assert_eq!(segment.from_ns, at_ns);
                at_ns = segment.to_ns;
            }
            prop_assert_eq!(at_ns, one.ended_ns);
        }
        let result = report(&builder.trace, SlowThreshold::AboveNs(1), 10, &[]);
        if let Ok(result) = result {
            prop_assert!(!result.text().is_empty());
            prop_assert!(drawn::can_be_drawn(&result, &builder.trace));
        }
    }
}
