//! The page: the cause of the tail in a sentence, a picture of the slowest request, then details.

use elfen_console::duration::show;
use elfen_console::page::{Block, Figure, Page, Table};

use super::timeline::{COLOURS, Drawer};
use crate::report::TailorReport;
use crate::timeline::Timeline;
use crate::trace::Trace;

/// Styles for the arrows of wake-ups. Less space at the top puts the first picture on the first
/// screen.
const STYLE: &str = "\
.wake { fill: none; stroke: var(--ink); stroke-width: 1; }
.key { display: inline-block; width: 0.9rem; height: 0.8rem; background: var(--c); }
body { padding-top: 1rem; }
h1 { margin-bottom: 0.4rem; }
header + main > figure:first-child { margin-top: 0.75rem; }
";

/// The report as one self-contained HTML file.
pub fn page(report: &TailorReport, trace: &Trace) -> String {
    let timeline = Timeline::new(trace, &trace.events_in_order());
    let drawer = Drawer { trace, timeline: &timeline };
    let figures = report.slowest.iter().enumerate().map(|(index, one)| {
        let charged = format!("{}, {}", show(one.latency_ns), one.charged());
        let mut figure = Figure {
            id: format!("request-{}", index + 1),
            title: charged,
            picture: drawer.picture(one),
            description: format!("The time of a request of {}", show(one.latency_ns)),
            ..Figure::default()
        };
        if index == 0 {
            figure.title = format!("The slowest: {}", figure.title);
            figure.legend = legend();
            figure.caption = "Top: the request's own time. Below: the threads that ran meanwhile; \
                those of the service are blue, others are red. Arrows are wake-ups."
                .to_owned();
        }
        Block::Figure(Box::new(figure))
    });
    let mut blocks: Vec<Block> = figures.collect();
    if !report.causes.is_empty() {
        blocks.insert(blocks.len().min(1), Block::Table(ranking(report)));
    }
    let title = format!("Why the slowest requests of {} were slow", report.service);
    let (notes, command, style) = (report.summary(), String::new(), STYLE.to_owned());
    Page { title, notes, blocks, command, style }.html()
}

fn legend() -> Vec<(String, String)> {
    let entry = |(colour, name, _): &(&str, &str, _)| {
        (format!("<span class=\"key {colour}\"></span>"), (*name).to_owned())
    };
    COLOURS.iter().map(entry).collect()
}

fn ranking(report: &TailorReport) -> Table {
    let head = [report.heading(), &["they were slow because"]].concat();
    let row = |cause| [report.row(cause), vec![cause.words.clone()]].concat();
    let rows = report.causes.iter().map(row).collect();
    Table::new("Causes of the tail, the largest first", &head, rows).noted(
        "The middle is between p40 and p60. A cause that is also large there slows down all \
            requests, not only the tail.",
    )
}
