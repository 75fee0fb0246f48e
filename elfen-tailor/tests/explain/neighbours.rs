//! Goal: what runs on the other lanes of a core is named, with what it cost, and nothing else is.
//! Method: recorded streams of a service on cores of two lanes, in which a request takes so much
//! longer for each stretch beside a neighbour as is known.

use elfen_rt::signal::mark::{Mark, Step};
use elfen_tailor::rank::Slow;
use elfen_tailor::report::{Report, report};
use elfen_tailor::trace::{Lent, Named};

use crate::story::{FUTEX, MS, SERVICE, Story};

const LOOP: u32 = 50;
const COMPILER: u32 = 60;
const US: u64 = 1_000;

/// Workers on CPUs 0 to `cores`, each of which has a sibling; thread 10 is on CPU 0.
fn story(cores: u32) -> Story {
    let mut story = Story::of_marks();
    story.tale.head.cpus = cores * 2;
    story.tale.head.cores = (0..cores).map(|core| vec![core, core + cores]).collect();
    story.tale.events = vec![Vec::new(); cores as usize * 2];
    for core in 0..cores {
        story.switch_on(core as usize, 2, 0, None, SERVICE + core, 0);
        let name = |thread, name: &str| Named { thread, at_ns: u64::MAX, name: name.to_owned() };
        // A batch's threads are called by its program.
        let named = vec![name(LOOP + core, "a thread"), name(COMPILER + core, "cc1")];
        story.tale.name(named, &[SERVICE]);
        let lent = Lent { thread: LOOP + core, at_ns: u64::MAX, program: "loop".to_owned() };
        story.tale.lend(vec![lent]);
    }
    story
}

/// A request of so much work alone, of which `neighbour` is there for a time from its beginning on,
/// and takes a part of that in thousandths.
fn request(story: &mut Story, core: u32, at_ns: u64, alone_ns: u64, beside: (u32, u64, u64)) {
    let (neighbour, beside_ns, loss) = beside;
    let ended_ns = at_ns + alone_ns + beside_ns * loss / 1_000;
    assert!(at_ns + beside_ns <= ended_ns, "it runs beside the request");
    let sibling = core as usize + story.tale.head.cores.len();
    if beside_ns > 0 {
        story.switch_on(sibling, at_ns, 0, None, neighbour, 0);
        story.switch_on(sibling, at_ns + beside_ns, neighbour, Some(FUTEX), 0, 1);
    }
    let marks = story.tale.marks.entry(core).or_default();
    let mark = |at_ns, step| Mark { at_ns, thread: SERVICE + core, request: at_ns / US, step };
    marks.push(Mark { request: at_ns, ..mark(at_ns, Step::Begin { arrived_ns: at_ns }) });
    marks.push(Mark { request: at_ns, ..mark(ended_ns, Step::End { class: 3 }) });
}

fn told(story: &Story, slow: Slow) -> Report {
    report(&story.tale, slow, 3, &[]).unwrap()
}

/// A third of what it runs beside: what is beside it from beginning to end takes 1.5 times as long.
const THIRD: u64 = 333;

#[test]
fn a_batch_beside_the_slowest_is_named() {
    let mut story = story(1);
    for at in 1..=1_000_usize {
        let beside_ns = [0, 0, 600 * US, 1_499 * US][at % 4];
        let at = at as u64;
        request(&mut story, 0, at * 10 * MS, MS + at * 20, (LOOP, beside_ns, THIRD));
    }
    let told = told(&story, Slow::AboveNs(1_300 * US));
    let first = &told.causes[0];
    assert_eq!(first.row.cause, "beside:loop", "{:#?}", told.causes);
    assert_eq!(first.words, "loop ran beside them, on another lane of their core");
    assert!(first.row.share > 0.9, "{first:?}");
    assert!(told.latency_ns.p99 > 1_500 * US);
    assert!(first.row.whatif_p99_ns.is_some_and(|ns| ns.abs_diff(1_020 * US) < 30 * US));
    let [row] = &told.beside[..] else { panic!("{:?}", told.beside) };
    assert!(row.slowdown.is_some_and(|factor| (factor - 1.5).abs() < 0.03), "{row:?}");
    assert!(row.tail_ns.abs_diff(1_499 * US) < 2 * US && row.middle_ns < 600 * US, "{row:?}");
    // Of each request, how long it was there and what that cost.
    let slowest = &told.slowest[0];
    assert_eq!((slowest.beside[0].name.as_str(), slowest.beside[0].ns), ("loop", 1_499 * US));
    assert!(slowest.charges[0].ns.abs_diff(500 * US) < 20 * US, "{:?}", slowest.charges);
    let text = told.text();
    assert!(text.contains("1.50 ms of it beside loop"), "{text}");
    assert!(text.contains("1.50 times") || text.contains("1.49 times"), "{text}");
    let without = report(&story.tale, Slow::AboveNs(1_300 * US), 1, &["beside".to_owned()]);
    let without = without.unwrap().without.unwrap().latency_ns.unwrap();
    assert!(without.max.abs_diff(1_020 * US) < 30 * US, "{without:?}");
}

/// Eight CPUs: a batch beside two of the workers, and a compiler, which costs nothing, beside the
/// other two. Who runs on another core is nobody's neighbour.
#[test]
fn four_cores_and_two_neighbours() {
    let mut story = story(4);
    for at in 1..=1_000 {
        for core in 0..4 {
            let beside_ns = (at + u64::from(core)) % 3 * 450 * US;
            let (neighbour, loss) = if core < 2 { (LOOP, THIRD) } else { (COMPILER, 0) };
            let alone_ns = MS + (at * 7 + u64::from(core)) % 13 * 3 * US;
            request(&mut story, core, at * 10 * MS, alone_ns, (neighbour + core, beside_ns, loss));
        }
    }
    let told = told(&story, Slow::AboveNs(1_250 * US));
    assert_eq!(told.causes[0].row.cause, "beside:loop", "{:#?}", told.causes);
    let row = |name| told.beside.iter().find(|row| row.name == name).unwrap();
    assert!(row("loop").slowdown.is_some_and(|factor| (factor - 1.5).abs() < 0.03), "{told:#?}");
    assert_eq!(row("cc1").slowdown, Some(1.0), "it took nothing: {:?}", told.beside);
    assert!(told.causes.iter().all(|cause| cause.row.cause != "beside:cc1"));
    for slow in &told.slowest {
        assert!(slow.beside.len() == 1 && slow.beside[0].name == "loop", "{:?}", slow.beside);
    }
}

/// Where nobody ever had the core for himself, what that costs is not known, nor charged.
#[test]
fn without_a_difference_there_is_nothing_to_compare() {
    let mut story = story(1);
    for at in 1..=500 {
        let alone_ns = MS + at * US;
        request(&mut story, 0, at * 10 * MS, alone_ns, (LOOP, alone_ns * 149 / 100, THIRD));
    }
    let told = told(&story, Slow::Quantile(900_000));
    assert_eq!(told.beside[0].slowdown, None, "{:?}", told.beside);
    assert!(told.causes.iter().all(|cause| cause.row.cause != "beside:loop"), "{told:#?}");
    assert!(told.text().contains("not known"), "{}", told.text());
    // And on cores that are not shared there is nobody beside anybody.
    story.tale.head.cores.clear();
    assert!(self::told(&story, Slow::Quantile(900_000)).beside.is_empty());
}
