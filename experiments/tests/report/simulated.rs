//! Goal: the simulated figures show the effects that the thesis shows, and the same seed gives the
//! same bytes. Method: reports from few requests; their data and the rendered page are checked.

use experiments::report::HtmlReport;
use experiments::report::figure::{Figure, Source};
use experiments::report::simulated::{Impossible, Parameters, Simulation};
use simulator::ModelError;
use simulator::demand::Demand;

use super::page::{csv_of, named, of_class, parse, render};

fn simulation(requests: u64, seed: u64) -> Simulation {
    let command = format!("elfen lab report --requests {requests} --seed {seed}");
    Simulation { parameters: Parameters::default(), requests, seed, command }
}

#[track_caller]
fn figure<'a>(report: &'a HtmlReport, id: &str) -> &'a Figure {
    report.figures.iter().find(|figure| figure.id == id).unwrap_or_else(|| panic!("no {id}"))
}

/// Returns the value of a series in panel number `panel` at `x`.
#[track_caller]
fn value(figure: &Figure, panel: usize, series: &str, x: f64) -> f64 {
    let found = figure.panels[panel].series.iter().find(|one| one.name == series);
    let points = &found.unwrap_or_else(|| panic!("{}: no {series}", figure.id)).points;
    points.iter().find(|point| point.x == x).unwrap_or_else(|| panic!("nothing at {x}")).y
}

#[test]
fn the_figures_of_the_thesis() {
    let report = simulation(50_000, 1).report().expect("it can be simulated");
    let ids: Vec<&str> = report.figures.iter().map(|figure| figure.id.as_str()).collect();
    assert_eq!(
        ids,
        [
            "simulated-demand",
            "simulated-percentiles",
            "simulated-unrestrained",
            "simulated-pauses",
            "simulated-borrow-idle",
            "simulated-borrow-idle-7",
            "simulated-dynamic-7",
            "simulated-policies",
            "simulated-overhead",
        ]
    );
    let near = |value: f64, published: f64, part: f64| {
        assert!((value / published - 1.0).abs() < part, "{value} for {published}");
    };
    let alone = figure(&report, "simulated-percentiles");
    near(value(alone, 0, "p99", 100.0), 76.0, 0.05);
    near(value(alone, 1, "request lane", 120.0), 0.7, 0.05);
    assert!(value(alone, 0, "p50", 100.0) < value(alone, 0, "p95", 100.0));
    let beside = figure(&report, "simulated-unrestrained");
    near(value(beside, 0, "next to pause", 40.0), 76.0, 0.05);
    assert!(value(beside, 0, "next to typical", 40.0) > value(beside, 0, "next to pause", 40.0));
    let borrow = figure(&report, "simulated-borrow-idle");
    for rps in [10.0, 60.0, 120.0] {
        near(value(borrow, 0, "borrow-idle", rps), value(borrow, 0, "no batch", rps), 0.02);
        assert!(value(borrow, 1, "borrow-idle", rps) > 0.97);
    }
    near(value(figure(&report, "simulated-dynamic-7"), 1, "dynamic-budget", 600.0), 1.75, 0.05);
    let policies = figure(&report, "simulated-policies");
    let used = |policy| value(policies, 1, policy, 70.0);
    assert!(used("borrow-idle") < used("fixed-budget"));
    assert!(used("fixed-budget") < used("refresh-budget"));
    assert!(used("refresh-budget") < used("dynamic-budget"));
    assert!(used("slo-budget") > 1.2 && value(policies, 0, "slo-budget", 70.0) <= 100.0);
    near(value(figure(&report, "simulated-pauses"), 1, "cumulative", 15.0), 0.53, 0.05);
}

/// A histogram covers all times: its columns and the times beyond the figure sum up to 1.
#[test]
fn histograms_are_whole() {
    let report = simulation(20_000, 3).report().expect("it can be simulated");
    for id in ["simulated-demand", "simulated-pauses"] {
        let [columns, sums] =
            [0, 1].map(|panel| &figure(&report, id).panels[panel].series[0].points);
        let sum: f64 = columns.iter().map(|point| point.y).sum();
        assert!((0.99..1.0 + 1e-9).contains(&sum), "{id}: {sum}");
        let last = sums.last().expect("sums").y;
        assert!((last - sum).abs() < 1e-9, "{id}: {last} {sum}");
        assert!(sums.is_sorted_by(|a, b| a.x < b.x && a.y <= b.y), "{id}");
    }
}

#[test]
fn the_same_seed_gives_the_same_bytes() {
    let page = |seed| render(&simulation(2000, seed).report().expect("it can be simulated"));
    let first = page(7);
    assert_eq!(first, page(7), "seed 7");
    assert_ne!(first, page(8));
}

/// Every figure names its source, its parameters and its command, and has a CSV.
#[test]
fn every_figure_says_how_it_was_made() {
    let report = simulation(2000, 5).report().expect("it can be simulated");
    let html = render(&report);
    let page = parse(&html);
    let figures = named(page.root(), "figure");
    assert_eq!(figures.len(), report.figures.len());
    for (drawn, figure) in figures.into_iter().zip(&report.figures) {
        assert_eq!(figure.source, Source::Simulated);
        assert!(figure.made_with.contains("the parameters of the thesis"), "{}", figure.made_with);
        assert!(figure.made_with.contains("2000 requests per point, seed 5"));
        assert!(figure.reading.ends_with('.'), "{}", figure.reading);
        assert!(figure.command.starts_with("elfen lab report --requests 2000 --seed 5"));
        assert_eq!(of_class(drawn, "source")[0].text(), Some("simulated"));
        assert_eq!(named(drawn, "code")[0].text(), Some(&*figure.command));
        assert!(!csv_of(drawn).is_empty() && named(drawn, "table").len() == figure.panels.len());
    }
}

/// A report with other parameters names their origin and contains no numbers of the thesis. Their
/// times may be of any size.
#[test]
fn other_parameters() {
    for mean_ns in [2e3, 3e6, 7e9] {
        let demand = Demand::Exponential { mean_ns };
        let parameters = Parameters {
            origin: "a file".to_owned(),
            demand,
            are_of_thesis: false,
            ..Parameters::default()
        };
        let simulation = Simulation { parameters, ..simulation(2000, 1) };
        let report = simulation.report().expect("it can be simulated");
        assert!(report.tables.is_empty());
        for figure in &report.figures {
            assert!(
                figure.made_with.starts_with("Simulated with a file: "),
                "{}",
                figure.made_with
            );
            let series = figure.panels.iter().flat_map(|panel| &panel.series);
            assert!(series.clone().all(|one| one.name != "published in the thesis"));
            assert!(series.clone().next().is_some());
        }
        render(&report);
    }
}

#[test]
fn what_cannot_be_simulated() {
    let without = Parameters { batches: Vec::new(), ..Parameters::default() };
    let error = Simulation { parameters: without, ..simulation(10, 1) }.report();
    assert_eq!(error.map(|_| ()), Err(Impossible::NoBatch));
    let error = simulation(0, 1).report();
    assert_eq!(error.map(|_| ()), Err(Impossible::Model(ModelError::Nothing)));
    let error = simulation(u64::MAX, 1).report();
    assert_eq!(error.map(|_| ()), Err(Impossible::Requests));
    render(&simulation(1, 1).report().expect("one request is enough"));
}
