//! Goal: the page and the trace show what the report says, whatever the tale holds. Method: reports
//! of made-up tales, and what is in the files.

use elfen_tailor::draw;
use elfen_tailor::rank::Slow;
use elfen_tailor::report::{Report, report};
use elfen_tailor::trace::{Named, Tale};

use crate::story::{HOG, MS, SERVICE};

/// Whether a page and a trace are made, and hold no number that cannot be drawn.
pub(crate) fn is_whole(told: &Report, tale: &Tale) -> bool {
    let mut trace = Vec::new();
    draw::trace(told, tale, &mut trace).unwrap();
    let page = draw::page(told, tale);
    let fine = |text: &str| !text.contains("NaN") && !text.contains("inf\"");
    !trace.is_empty() && page.ends_with("</html>\n") && fine(&page)
}

#[test]
fn the_first_picture_is_the_slowest_request() {
    let story = crate::hogged();
    let told = report(&story.tale, Slow::Quantile(980_000), 3, &["preempted".to_owned()]).unwrap();
    let page = draw::page(&told, &story.tale);
    let (first, after) = page.split_once("</figure>").expect("a figure");
    assert!(first.contains("The slowest: 5.10 ms, preempted:hog 5.00 ms"), "{first}");
    assert!(first.contains("is because hog ran on the CPU that they needed."), "{first}");
    assert!(first.contains("<title>preempted:hog: 5.00 ms, CPU 0, thread service 10</title>"));
    assert!(first.contains(&format!("<title>hog {HOG}: 5.00 ms</title>")), "{first}");
    assert!(first.contains("without preempted: p50"), "{first}");
    assert!(after.contains("Causes of the tail") && after.contains("Tail against middle"));
    assert_eq!(page.matches("<figure>").count(), 4, "three requests, and the middle");
    assert!(!page.contains("<script") && !page.contains("http://www.w3.org/1999/xlink"));
}

/// Names of threads are anybody's.
#[test]
fn a_name_is_no_markup() {
    let mut story = crate::hogged();
    let name = "<script>'\"&\u{1b}".to_owned();
    story.tale.name(vec![Named { thread: HOG, at_ns: u64::MAX, name }], &[SERVICE]);
    story.tale.head.service = "<b>".to_owned();
    let told = report(&story.tale, Slow::AboveNs(MS), 3, &[]).unwrap();
    let page = draw::page(&told, &story.tale);
    assert!(page.contains("&lt;script&gt;") && page.contains("&lt;b&gt;"));
    assert!(!page.contains("<script") && !page.contains("<b>") && !page.contains('\u{1b}'));
}

/// Goal: the trace has the report's request, and its threads by name. Method: names lie in it as
/// they are; what the packets say is checked where they are made.
#[test]
fn the_trace_has_requests_and_threads() {
    let story = crate::hogged();
    let told = report(&story.tale, Slow::Quantile(980_000), 1, &[]).unwrap();
    let mut trace = Vec::new();
    draw::trace(&told, &story.tale, &mut trace).unwrap();
    let has = |text: &str| trace.windows(text.len()).any(|bytes| bytes == text.as_bytes());
    let request = format!("request {}", told.slowest[0].request);
    for name in [&request, "preempted hog", "hog 99", "service 10", "runs on CPU 0", "could run"] {
        assert!(has(name), "{name}");
    }
}
