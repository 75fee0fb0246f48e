//! Goal: the page and the Perfetto trace show the content of the report, for every recorded trace.
//! Method: draw reports of made-up traces, and compare the files.

use std::collections::{BTreeMap, BTreeSet};

use elfen_tailor::draw;
use elfen_tailor::rank::SlowThreshold;
use elfen_tailor::report::{TailorReport, report};
use elfen_tailor::trace::{Note, ThreadName, Trace};
use serde_json::Value;

use crate::trace_builder::{HOG, MS};

/// Whether both files can be written, and contain only numbers that can be drawn.
pub(crate) fn can_be_drawn(result: &TailorReport, trace: &Trace) -> bool {
    let mut perfetto = Vec::new();
    draw::write_perfetto(result, trace, &mut perfetto).unwrap();
    let page = draw::page(result, trace);
    let fine = |text: &str| !text.contains("NaN") && !text.contains("inf\"");
    serde_json::from_slice::<Value>(&perfetto).is_ok() && page.ends_with("</html>\n") && fine(&page)
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
    assert!(after.contains("Causes of the tail"));
    assert_eq!(page.matches("<figure ").count(), 3, "three requests");
    assert!(!page.contains("<script") && !page.contains("http://www.w3.org/1999/xlink"));
}

/// Names of threads are untrusted text.
#[test]
fn names_are_escaped() {
    let mut builder = crate::hogged();
    let name = "<script>'\"&\u{1b}".to_owned();
    let name = ThreadName { thread: HOG, at_ns: u64::MAX, name };
    builder.trace.add_note(Note::Names(vec![name]));
    builder.trace.head.service = "<b>".to_owned();
    let result = report(&builder.trace, SlowThreshold::AboveNs(MS), 3, &[]).unwrap();
    let page = draw::page(&result, &builder.trace);
    assert!(page.contains("&lt;script&gt;") && page.contains("&lt;b&gt;"));
    assert!(!page.contains("<script") && !page.contains("<b>") && !page.contains('\u{1b}'));
}

/// Goal: the Perfetto trace has the report's request, and its threads by name. Method: parse the
/// JSON. Each track is named once, and the slices of a track do not overlap.
#[test]
fn the_perfetto_trace_has_requests_and_threads() {
    let builder = crate::hogged();
    let result = report(&builder.trace, SlowThreshold::Quantile(980_000), 1, &[]).unwrap();
    let mut file = Vec::new();
    draw::write_perfetto(&result, &builder.trace, &mut file).unwrap();
    let file: Value = serde_json::from_slice(&file).unwrap();
    assert_eq!(file["otherData"]["start_monotonic_ns"], builder.trace.head.began_ns);
    let events = file["traceEvents"].as_array().unwrap();
    let named = |what: &str| -> BTreeSet<String> {
        let of = events.iter().filter(|event| event["name"] == what);
        of.map(|event| format!("{} {}", event["args"]["name"].as_str().unwrap(), event["tid"]))
            .collect()
    };
    assert_eq!(named("process_name").len(), 2);
    let tracks = named("thread_name");
    for name in [format!("request {} 1", result.slowest[0].request).as_str(), "hog 99"] {
        assert!(tracks.contains(name), "{name} in {tracks:?}");
    }
    assert!(tracks.contains("service 10"), "{tracks:?}");
    for name in ["preempted hog", "runs on CPU 0", "runnable"] {
        assert!(events.iter().any(|event| event["name"] == name), "{name}");
    }
    let mut ends: BTreeMap<(u64, u64), f64> = BTreeMap::new();
    for slice in events.iter().filter(|event| event["ph"] == "X") {
        let track = (slice["pid"].as_u64().unwrap(), slice["tid"].as_u64().unwrap());
        let at = ["ts", "dur"].map(|key| slice[key].as_f64().unwrap());
        let end = ends.entry(track).or_default();
        assert!(at[0] >= *end - 1e-6 && at[1] > 0.0, "{slice}");
        *end = at[0] + at[1];
    }
    assert_eq!(ends.len(), tracks.len());
}
