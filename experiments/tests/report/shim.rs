//! Goal: any recording of `elfen shim` gives a page that shows where the time went, and when.
//! Method: a recording of `elfen-truth`, unchanged, with hostile names, and with random times.

use std::path::Path;

use elfen_shim::recording::{Recording, Run, State, open};
use experiments::report::shim;
use proptest::prelude::*;

use super::page::render;

fn recording() -> Recording {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/report_files");
    open(&folder.join("truth.shim")).unwrap()
}

#[test]
fn a_recording_is_a_page() {
    let report = shim::report(&recording(), "elfen lab report truth.shim");
    let ids: Vec<&str> = report.figures.iter().map(|figure| figure.id.as_str()).collect();
    assert_eq!(ids, ["time-0", "lengths-0", "when-0", "value-1", "rate-0"]);
    let points = |figure: usize, series: usize| {
        let points = report.figures[figure].panels[0].series[series].points.iter();
        points.map(|point| point.y).collect::<Vec<f64>>()
    };
    let shares: f64 = points(0, 0).iter().sum();
    assert!((shares - 100.0).abs() < 0.01, "{shares}");
    // The shares in a slice sum up to 100 % at most.
    let series = report.figures[2].panels[0].series.len();
    for slice in 0..points(2, 0).len() {
        let sum: f64 = (0..series).map(|series| points(2, series)[slice]).sum();
        assert!(sum <= 100.001, "slice {slice}: {sum}");
    }
    let longest = report.tables.iter().find(|table| table.title.contains("longest")).unwrap();
    assert!((1..=10).contains(&longest.rows.len()), "{longest:?}");
    let html = render(&report);
    assert!(html.contains("elfen-truth") && html.contains("odd"));
}

#[test]
fn names_of_a_file_are_text() {
    let mut recording = recording();
    let nasty = "<script>alert(1)</script>\u{1b}[31m\u{0}\u{ffff}";
    recording.head.program = nasty.repeat(100);
    recording.head.on = nasty.to_owned();
    recording.head.machine = nasty.to_owned();
    for signal in &mut recording.head.signals {
        signal.name = nasty.to_owned();
        signal.names.iter_mut().for_each(|(_, name)| *name = nasty.to_owned());
    }
    recording.head.rates.iter_mut().for_each(|rate| rate.tag = nasty.to_owned());
    let html = render(&shim::report(&recording, "elfen lab report"));
    assert!(!html.contains("<script>") && !html.contains('\u{1b}'));
}

proptest! {
    #[test]
    fn any_times_are_drawn_or_refused(
        mut times in prop::collection::vec(any::<u64>(), 0..40),
        values in prop::collection::vec(any::<u64>(), 40),
        rate in 1u64..,
        median: f64,
    ) {
        times.sort_unstable();
        let mut recording = recording();
        recording.head.clock.ticks_per_second = rate;
        recording.head.rates[0].median = median;
        let state = |value: u64| match value % 5 {
            0 => State::Gap,
            1 => State::NotRunning,
            2 => State::Other,
            _ => State::Value(value),
        };
        let run = |(&start_ticks, &value)| Run { start_ticks, state: state(value), samples: value };
        let runs: Vec<Run> = times.iter().zip(&values).map(run).collect();
        recording.runs = vec![runs.clone(), runs];
        let _either = shim::report(&recording, "elfen lab report").html();
    }
}
