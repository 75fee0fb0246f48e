//! Goal: threads on the other lanes of a core are reported with their cost, and other threads are
//! not. Method: made-up traces of a service on cores of two lanes, with a known slowdown by each
//! neighbour.

use elfen_rt::signal::mark::{Mark, Step};
use elfen_tailor::rank::SlowThreshold;
use elfen_tailor::report::{TailorReport, report};
use elfen_tailor::trace::{BatchThread, Note, ThreadName};

use crate::trace_builder::{FUTEX, MS, SERVICE, TraceBuilder};

const LOOP: u32 = 50;
const COMPILER: u32 = 60;
const US: u64 = 1_000;

/// Workers on CPUs 0 to `cores`. Each CPU has a sibling. Thread 10 is on CPU 0.
fn builder(cores: u32) -> TraceBuilder {
    let mut builder = TraceBuilder::of_marks();
    builder.trace.head.cpus = cores * 2;
    builder.trace.head.cores = (0..cores).map(|core| vec![core, core + cores]).collect();
    builder.trace.events = vec![Vec::new(); cores as usize * 2];
    for core in 0..cores {
        builder.switch_on(core as usize, 2, 0, None, SERVICE + core, 0);
        let name =
            |thread, name: &str| ThreadName { thread, at_ns: u64::MAX, name: name.to_owned() };
        // Threads of a batch get the name of the batch's program.
        let named = vec![name(LOOP + core, "a thread"), name(COMPILER + core, "cc1")];
        builder.trace.add_note(Note::Names(named));
        let lent = BatchThread { thread: LOOP + core, at_ns: u64::MAX, program: "loop".to_owned() };
        builder.trace.add_note(Note::Batches(vec![lent]));
    }
    builder
}

/// A request with `alone_ns` of work. A neighbour runs next to it from the beginning on, for some
/// time. The work loses a part of that time, in thousandths.
fn request(
    builder: &mut TraceBuilder,
    core: u32,
    at_ns: u64,
    alone_ns: u64,
    (neighbour, shared_ns, loss): (u32, u64, u64),
) {
    let ended_ns = at_ns + alone_ns + shared_ns * loss / 1_000;
    assert!(at_ns + shared_ns <= ended_ns, "it runs next to the request");
    let sibling = core as usize + builder.trace.head.cores.len();
    if shared_ns > 0 {
        builder.switch_on(sibling, at_ns, 0, None, neighbour, 0);
        builder.switch_on(sibling, at_ns + shared_ns, neighbour, Some(FUTEX), 0, 1);
    }
    let marks = builder.trace.marks.entry(core).or_default();
    let mark = |at_ns, step| Mark { at_ns, thread: SERVICE + core, request: at_ns / US, step };
    marks.push(Mark { request: at_ns, ..mark(at_ns, Step::Begin { arrived_ns: at_ns }) });
    marks.push(Mark { request: at_ns, ..mark(ended_ns, Step::End { class: 3 }) });
}

fn report_of(builder: &TraceBuilder, slow: SlowThreshold) -> TailorReport {
    report(&builder.trace, slow, 3, &[]).unwrap()
}

/// Work loses a third of the time next to the neighbour. So if the neighbour runs all the time,
/// work takes 1.5 times as long.
const THIRD: u64 = 333;

#[test]
fn a_batch_next_to_the_slowest_requests_is_named() {
    let mut builder = builder(1);
    for at in 1..=1_000_usize {
        let shared_ns = [0, 0, 600 * US, 1_499 * US][at % 4];
        let at = at as u64;
        request(&mut builder, 0, at * 10 * MS, MS + at * 20, (LOOP, shared_ns, THIRD));
    }
    let result = report_of(&builder, SlowThreshold::AboveNs(1_300 * US));
    let first = &result.causes[0];
    assert_eq!(first.row.cause, "beside:loop", "{:#?}", result.causes);
    assert_eq!(first.words, "loop ran next to them, on another lane of their core");
    assert!(first.row.share > 0.9, "{first:?}");
    assert!(result.latency_ns.p99 > 1_500 * US);
    assert!(first.row.whatif_p99_ns.is_some_and(|ns| ns.abs_diff(1_020 * US) < 30 * US));
    let [row] = &result.beside[..] else { panic!("{:?}", result.beside) };
    assert!(row.slowdown.is_some_and(|factor| (factor - 1.5).abs() < 0.03), "{row:?}");
    assert!(row.tail_ns.abs_diff(1_499 * US) < 2 * US && row.middle_ns < 600 * US, "{row:?}");
    // For each request: how long the batch ran next to it, and what that cost.
    let slowest = &result.slowest[0];
    assert_eq!((slowest.beside[0].name.as_str(), slowest.beside[0].ns), ("loop", 1_499 * US));
    assert!(slowest.charges[0].ns.abs_diff(500 * US) < 20 * US, "{:?}", slowest.charges);
    let text = result.text();
    assert!(text.contains("1.50 ms of it next to loop"), "{text}");
    assert!(text.contains("1.50 times") || text.contains("1.49 times"), "{text}");
    let without =
        report(&builder.trace, SlowThreshold::AboveNs(1_300 * US), 1, &["beside".to_owned()]);
    let without = without.unwrap().without.unwrap().latency_ns.unwrap();
    assert!(without.max.abs_diff(1_020 * US) < 30 * US, "{without:?}");
}

/// Eight CPUs: a batch runs next to two workers, and a compiler that costs nothing next to the
/// other two. A thread on another core does not count.
#[test]
fn neighbours_are_found_on_each_core() {
    let mut builder = builder(4);
    for at in 1..=1_000 {
        for core in 0..4 {
            let shared_ns = (at + u64::from(core)) % 3 * 450 * US;
            let (neighbour, loss) = if core < 2 { (LOOP, THIRD) } else { (COMPILER, 0) };
            let alone_ns = MS + (at * 7 + u64::from(core)) % 13 * 3 * US;
            request(
                &mut builder,
                core,
                at * 10 * MS,
                alone_ns,
                (neighbour + core, shared_ns, loss),
            );
        }
    }
    let result = report_of(&builder, SlowThreshold::AboveNs(1_250 * US));
    assert_eq!(result.causes[0].row.cause, "beside:loop", "{:#?}", result.causes);
    let row = |name| result.beside.iter().find(|row| row.name == name).unwrap();
    assert!(row("loop").slowdown.is_some_and(|factor| (factor - 1.5).abs() < 0.03), "{result:#?}");
    assert_eq!(row("cc1").slowdown, Some(1.0), "it took nothing: {:?}", result.beside);
    assert!(result.causes.iter().all(|cause| cause.row.cause != "beside:cc1"));
    for slow in &result.slowest {
        assert!(slow.beside.len() == 1 && slow.beside[0].name == "loop", "{:?}", slow.beside);
    }
}

/// If no request ever had the core to itself, the cost of a neighbour is unknown and not charged.
#[test]
fn without_a_difference_the_cost_is_unknown() {
    let mut builder = builder(1);
    for at in 1..=500 {
        let alone_ns = MS + at * US;
        request(&mut builder, 0, at * 10 * MS, alone_ns, (LOOP, alone_ns * 149 / 100, THIRD));
    }
    let result = report_of(&builder, SlowThreshold::Quantile(900_000));
    assert_eq!(result.beside[0].slowdown, None, "{:?}", result.beside);
    assert!(result.causes.iter().all(|cause| cause.row.cause != "beside:loop"), "{result:#?}");
    assert!(result.text().contains("not known"), "{}", result.text());
    // Without the list of cores, no neighbours are reported.
    builder.trace.head.cores.clear();
    assert!(report_of(&builder, SlowThreshold::Quantile(900_000)).beside.is_empty());
}
