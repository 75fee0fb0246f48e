//! Goal: a report of live runs shows what the runs measured, and the error for a damaged file names
//! the line. Method: runs with known medians and ratios, written as an experiment writes them.

use std::path::Path;

use elfen_run as run;
use elfen_run::figures::Figures;
use elfen_run::latency::Latency;
use experiments::record::{Alone, BadLine, Line, Run, Scenario, Setup, read};
use experiments::report::HtmlReport;
use experiments::report::figure::{Across, Figure, Point, Series};
use experiments::report::live::{Unusable, report};
use proptest::prelude::*;
use snapbox::data::DataFormat;
use snapbox::{Assert, Data};

use super::page::{csv_of, named, parse, render};

fn setup() -> Line {
    Line::Setup(Setup {
        elfen: "0.1.0".to_owned(),
        kernel: "6.18".to_owned(),
        cpu: "a CPU".to_owned(),
        cpus: 2,
        lanes: "0:1".to_owned(),
        command: "elfen lab experiment --lanes 0:1".to_owned(),
        capacity_rps: 1000.0,
        documents: 500,
        alone: vec![Alone { batch: "xz".to_owned(), per_second: 1e4, ..Alone::default() }],
        helpers: "the load generator runs on CPU 1".to_owned(),
        limits: vec!["not shown: interference".to_owned()],
        ..Setup::default()
    })
}

/// Creates a run with a given p99. The other numbers follow from it.
fn run(scenario: Scenario, load: f64, invocation: u32, p99_ms: f64) -> Run {
    let alone = scenario == Scenario::None;
    Run {
        scenario,
        batch: (!alone).then(|| "xz".to_owned()),
        load,
        rps: load * 1000.0,
        invocation,
        seed: 1,
        duration_s: 10.0,
        requests: 1000,
        achieved_rps: load * 1000.0,
        p50_ms: p99_ms / 10.0,
        p95_ms: p99_ms / 2.0,
        p99_ms,
        p999_ms: p99_ms * 2.0,
        max_ms: p99_ms * 3.0,
        mean_ms: p99_ms / 5.0,
        request_lane_utilisation: load,
        batch_lane_utilisation: if alone { 0.0 } else { 1.0 - load },
        batch_per_second: (!alone).then_some(p99_ms * 100.0),
        batch_verified: (!alone).then_some(true),
        ..Run::default()
    }
}

/// Creates three invocations at each load. p99 of the service alone is 10, 20 and 60 ms at every
/// load.
fn lines(loads: &[f64], scenarios: &[(Scenario, f64)]) -> Vec<Line> {
    let mut lines = vec![setup()];
    for (invocation, p99_ms) in [(0, 10.0), (1, 20.0), (2, 60.0)] {
        for &load in loads {
            for &(scenario, times) in scenarios {
                lines.push(Line::Run(run(scenario, load, invocation, p99_ms * times)));
            }
        }
    }
    lines
}

const THREE: [(Scenario, f64); 3] =
    [(Scenario::None, 1.0), (Scenario::Unrestrained, 4.0), (Scenario::BorrowIdle, 1.25)];

#[track_caller]
fn figure<'a>(report: &'a HtmlReport, id: &str) -> &'a Figure {
    report.figures.iter().find(|figure| figure.id == id).unwrap_or_else(|| panic!("no {id}"))
}

fn ids(report: &HtmlReport) -> Vec<&str> {
    report.figures.iter().map(|figure| figure.id.as_str()).collect()
}

#[test]
fn medians_and_ratios() {
    let report = report(&lines(&[0.2, 0.5], &THREE)).expect("a report");
    let expected =
        ["live-cost", "live-percentiles", "live-co-running", "live-policies", "live-throughput"];
    assert_eq!(ids(&report), expected);
    let cost = figure(&report, "live-cost");
    assert!(
        matches!(&cost.x, Across::Names { names, .. } if *names == ["unrestrained", "borrow-idle"])
    );
    assert_eq!(cost.panels.len(), 2);
    for panel in &cost.panels {
        // The ratio is the same in every invocation, although p99 differs by a factor of six.
        let ratio = |x, y| Point { x, y, interval: Some((y, y)) };
        assert_eq!(panel.series[0].points, [ratio(0.0, 4.0), ratio(1.0, 1.25)]);
    }
    let p99 = &figure(&report, "live-percentiles").panels[0].series[2];
    assert_eq!(p99.name, "p99");
    let point = |x| Point { x, y: 20.0, interval: Some((10.0, 60.0)) };
    assert_eq!(p99.points, [point(20.0), point(50.0)]);
    let policies = &figure(&report, "live-policies").panels[1];
    let borrow = policies.series.iter().find(|series| series.name == "borrow-idle");
    assert!(borrow.expect("borrow-idle").points.iter().all(|point| point.y == 1.0));
    let work = &figure(&report, "live-throughput").panels[0].series[0].points;
    assert_eq!((work[0].y, work[1].y), (0.8, 0.25));
}

/// Returns what a reader would compare in two reports: all texts, but not the values of the points.
fn digest(name: &str, lines: &[Line]) -> String {
    let report = report(lines).expect("a report");
    render(&report);
    let mut digest = format!("== {name}\n");
    for note in &report.notes {
        digest += &format!("{note}\n");
    }
    for table in report.tables.iter().chain(&report.appendix) {
        for row in std::iter::once(&table.head).chain(&table.rows) {
            digest += &format!("| {}\n", row.join(" | "));
        }
    }
    for figure in &report.figures {
        digest += &format!("{}: {}: {}\n", figure.id, figure.title, figure.reading);
        for panel in &figure.panels {
            let of =
                |one: &Series| format!("{} ({}, {})", one.name, one.style.name, one.points.len());
            let series: Vec<String> = panel.series.iter().map(of).collect();
            digest += &format!("    {}: {}\n", panel.y.label(), series.join(", "));
        }
    }
    digest
}

/// Changes all runs of a scenario.
fn change(mut lines: Vec<Line>, scenario: Scenario, change: impl Fn(&mut Run)) -> Vec<Line> {
    for line in &mut lines {
        if let Line::Run(run) = line
            && run.scenario == scenario
        {
            change(run);
        }
    }
    lines
}

/// Goal: the runs determine which parts a report has. Method: digests of several reports are
/// compared with a file. `SNAPSHOTS=overwrite` writes the file.
#[test]
fn what_reports_say() {
    let one = lines(&[0.5], &THREE);
    let two = lines(&[0.2, 0.5], &THREE);
    let with_figures = change(one.clone(), Scenario::BorrowIdle, |run| {
        let reaction_ns =
            Latency { median: Some(52_000), p99: Some(480_000), ..Latency::default() };
        run.report = Some(Box::new(run::report::RunReport {
            source: "tasks (elfend)".to_owned(),
            nap: "mwaitx".to_owned(),
            checks: "guard".to_owned(),
            request_busy_ns: Some(4000),
            figures: Figures { overlapped_ns: Some(100), reaction_ns, ..Figures::default() },
            ..run::report::RunReport::default()
        }));
    });
    let mut batches = one.clone();
    batches.extend(lines(&[0.5], &THREE[1..]).into_iter().skip(1).map(|line| match line {
        Line::Run(run) => Line::Run(Run { batch: Some("lua <5>".to_owned()), ..run }),
        setup @ Line::Setup(_) => setup,
    }));
    let mut budgets = lines(&[0.2, 0.5], &THREE[..1]);
    for (budget, load) in [("1ms", 0.2), ("1ms", 0.5), ("2500us", 0.2), ("2500us", 0.5)] {
        let run = run(Scenario::FixedBudget, load, 0, 30.0);
        budgets.push(Line::Run(Run { asked: format!("fixed-budget:{budget}"), ..run }));
    }
    let mut doubtful = change(one.clone(), Scenario::Unrestrained, |run| {
        run.warnings.push(format!("the generator took {} us to wake", run.invocation));
    });
    let Some(Line::Run(run)) = doubtful.last_mut() else { panic!("the last line is a run") };
    (run.errors, run.batch_verified, run.late_p99_ms) = (3, Some(false), run.p99_ms / 2.0);
    let cases = [
        ("two loads", two.clone()),
        ("one load", one),
        ("with what elfen run counted", with_figures),
        ("the service alone", lines(&[0.2, 0.5], &THREE[..1])),
        ("never alone", lines(&[0.2, 0.5], &THREE[1..])),
        ("two batch programs", batches),
        ("two budgets of a policy", budgets),
        ("failures and warnings", doubtful),
    ];
    let said: String = cases.iter().map(|(name, lines)| digest(name, lines)).collect();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/report_files/live.txt");
    let expected = Data::read_from(&file, Some(DataFormat::Text));
    Assert::new().action_env("SNAPSHOTS").normalize_paths(false).eq(said, expected);
}

#[test]
fn lines_that_give_no_report() {
    assert_eq!(report(&[]), Err(Unusable::Empty));
    assert_eq!(report(&[setup()]), Err(Unusable::NoRuns));
    let all = lines(&[0.5], &THREE);
    assert_eq!(report(&all[1..]), Err(Unusable::NoSetup));
    // An experiment that was continued has a second setup.
    let mut continued = all.clone();
    continued.insert(4, setup());
    assert_eq!(report(&continued).map(|one| one.tables), report(&all).map(|one| one.tables));
    let other = Setup { cpu: "another".to_owned(), ..Setup::default() };
    continued[4] = Line::Setup(other);
    assert_eq!(report(&continued), Err(Unusable::OtherSetup { line: 5 }));
    for bad in [f64::NAN, f64::INFINITY, -1.0, 1e13] {
        let mut lines = all.clone();
        let Line::Run(run) = &mut lines[3] else { panic!("line 4 is a run") };
        run.p95_ms = bad;
        let error = report(&lines).map(|_| ()).expect_err("nothing measures that");
        assert!(error.to_string().starts_with("line 4: p95_ms is "), "{error}");
    }
}

fn text(lines: &[Line]) -> String {
    lines.iter().map(|line| serde_json::to_string(line).expect("JSON") + "\n").collect()
}

#[test]
fn files_that_are_damaged() {
    let whole = text(&lines(&[0.5], &THREE));
    let all = read(whole.as_bytes()).expect("lines");
    assert_eq!((all.lines.len(), all.bytes, all.cut), (10, whole.len(), None));
    let cut = read(&whole.as_bytes()[..whole.len() - 9]).expect("lines");
    assert_eq!((cut.lines.len(), cut.cut), (9, Some(10)));
    assert!(whole[..cut.bytes].ends_with("}\n") && whole[cut.bytes..].lines().count() == 1);
    let wrong = whole.replacen("\"p50_ms\":1.0", "\"p50_ms\":\"slow\"", 1);
    let error = read(wrong.as_bytes()).expect_err("no number").to_string();
    assert!(error.starts_with("line 2: invalid type: string"), "{error}");
    assert!(!error.contains("line 1"), "{error}");
    let mut binary = whole.clone().into_bytes();
    binary.insert(whole.find('\n').expect("lines") + 5, 0xff);
    assert_eq!(read(&binary), Err(BadLine::NoText(2)));
    let error = read(b"\n").expect_err("no JSON").to_string();
    assert!(error.starts_with("line 1: "), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// A file that is cut off or has a changed byte gives a report or an error that names a line.
    #[test]
    fn any_damage(at in 0.0..1.0, byte in any::<u8>(), cut in any::<bool>()) {
        let mut bytes = text(&lines(&[0.2, 0.5], &THREE)).into_bytes();
        let at = simulator::time::nanoseconds(at * (bytes.len() - 1) as f64);
        let at = usize::try_from(at).expect("an index");
        if cut { bytes.truncate(at) } else { bytes[at] = byte }
        match read(&bytes) {
            Err(error) => prop_assert!(error.to_string().starts_with("line "), "{error}"),
            Ok(results) => {
                prop_assert!(results.lines.len() <= 19);
                if let Ok(report) = report(&results.lines) {
                    let html = render(&report);
                    for figure in named(parse(&html).root(), "figure") {
                        prop_assert!(!csv_of(figure).is_empty());
                    }
                }
            }
        }
    }

    /// Extreme measurements can be drawn: only zeros, huge or tiny values, a single run.
    #[test]
    fn any_measurement(
        values in prop::collection::vec(
            prop_oneof![Just(0.0), 1e-9..1e-3, 1.0..100.0, 1e9..1e12], 1..12),
        loads in prop::collection::vec(prop_oneof![Just(0.0), 0.001..2.0, 1e6..1e8], 1..3),
    ) {
        let mut all = vec![setup()];
        for (index, value) in values.iter().enumerate() {
            let (scenario, _) = THREE[index % 3];
            let invocation = u32::try_from(index / 3).expect("few");
            let mut run = run(scenario, loads[index % loads.len()], invocation, *value);
            run.max_ms = 0.0;
            run.p999_ms = 0.0;
            run.request_lane_utilisation = *value;
            run.batch_lane_utilisation = 0.0;
            run.batch_per_second = Some(*value);
            all.push(Line::Run(run));
        }
        render(&report(&all).expect("a report"));
    }
}
