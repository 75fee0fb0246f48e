//! Goal: the page and the Perfetto trace show what the report says, whatever the recorded trace
//! holds. Method: reports of made-up traces, and what is in the files.

use elfen_tailor::draw;
use elfen_tailor::rank::SlowThreshold;
use elfen_tailor::report::{Report, report};
use elfen_tailor::trace::{ThreadName, Trace};

use crate::trace_builder::{HOG, MS, SERVICE};

/// Whether both files are written, and hold no number that cannot be drawn.
pub(crate) fn can_be_drawn(result: &Report, trace: &Trace) -> bool {
    let mut perfetto = Vec::new();
    draw::write_perfetto(result, trace, &mut perfetto).unwrap();
    let page = draw::page(result, trace);
    let fine = |text: &str| !text.contains("NaN") && !text.contains("inf\"");
    !perfetto.is_empty() && page.ends_with("</html>\n") && fine(&page)
}

#[test]
fn the_first_picture_is_the_slowest_request() {
    let builder = crate::hogged();
    let result =
        report(&builder.trace, SlowThreshold::Quantile(980_000), 3, &["preempted".to_owned()])
            .unwrap();
    let page = draw::page(&result, &builder.trace);
    let (first, after) = page.split_once("</figure>").expect("a figure");
    assert!(first.contains("The slowest: 5.10 ms, preempted:hog 5.00 ms"), "{first}");
    assert!(first.contains("is because hog ran on the CPU that they needed."), "{first}");
    assert!(first.contains("<title>preempted:hog: 5.00 ms, CPU 0, thread service 10</title>"));
    assert!(first.contains(&format!("<title>hog {HOG}: 5.00 ms</title>")), "{first}");
    assert!(first.contains("without preempted: p50"), "{first}");
    assert!(after.contains("Causes of the tail") && after.contains("Tail and middle"));
    assert_eq!(page.matches("<figure>").count(), 4, "three requests, and the middle");
    assert!(!page.contains("<script") && !page.contains("http://www.w3.org/1999/xlink"));
}

/// The name of a thread is untrusted text.
#[test]
fn names_are_escaped() {
    let mut builder = crate::hogged();
    let name = "<script>'\"&\u{1b}".to_owned();
    builder.trace.add_names(vec![ThreadName { thread: HOG, at_ns: u64::MAX, name }], &[SERVICE]);
    builder.trace.head.service = "<b>".to_owned();
    let result = report(&builder.trace, SlowThreshold::AboveNs(MS), 3, &[]).unwrap();
    let page = draw::page(&result, &builder.trace);
    assert!(page.contains("&lt;script&gt;") && page.contains("&lt;b&gt;"));
    assert!(!page.contains("<script") && !page.contains("<b>") && !page.contains('\u{1b}'));
}

/// Goal: the Perfetto trace has the report's request, and its threads by name. Method: search for
/// names, which it holds verbatim. Unit tests check the packets.
#[test]
fn the_perfetto_trace_has_requests_and_threads() {
    let builder = crate::hogged();
    let result = report(&builder.trace, SlowThreshold::Quantile(980_000), 1, &[]).unwrap();
    let mut perfetto = Vec::new();
    draw::write_perfetto(&result, &builder.trace, &mut perfetto).unwrap();
    let has = |text: &str| perfetto.windows(text.len()).any(|bytes| bytes == text.as_bytes());
    let request = format!("request {}", result.slowest[0].request);
    for name in [&request, "preempted hog", "hog 99", "service 10", "runs on CPU 0", "could run"] {
        assert!(has(name), "{name}");
    }
}
