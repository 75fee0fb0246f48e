//! The page: the cause of the tail in a sentence, the slowest request as a picture, then details.

use elfen_console::duration::{number, show};
use elfen_console::page::{document, escape};

use super::svg::{WIDTH, bar, fitted, line, picture};
use super::timeline::{COLOURS, Drawer};
use crate::report::{CauseRow, Report, SlowRequest};
use crate::timeline::Timeline;
use crate::trace::Trace;

/// The arrows of wake-ups; and less space at the top, so that the first picture is on the first
/// screen.
const STYLE: &str = "\
.wake { fill: none; stroke: var(--ink); stroke-width: 1; }
.key { display: inline-block; width: 0.9rem; height: 0.8rem; background: var(--c); }
body { padding-top: 1rem; }
h1 { margin-bottom: 0.4rem; }
header + main > figure:first-child { margin-top: 0.75rem; }
";

/// Width of the names of causes in the picture of the tail.
const NAMES: f64 = 190.0;
/// Room for the number after a bar.
const NUMBER: f64 = 70.0;
const BAR: f64 = 12.0;
const ROW: f64 = 36.0;
const MOST_ROWS: usize = 10;

/// The report as one self-contained HTML file.
pub fn page(report: &Report, trace: &Trace) -> String {
    let timeline = Timeline::new(trace, &trace.events_in_order());
    let drawer = Drawer { trace, timeline: &timeline };
    let mut slowest = report.slowest.iter();
    let first = slowest.next().map_or_else(String::new, |one| {
        figure(&format!("The slowest: {}", charged(one)), &drawer.picture(one), &legend())
    });
    let others: String =
        slowest.map(|one| figure(&charged(one), &drawer.picture(one), "")).collect();
    let title = format!("Why the slowest requests of {} were slow", report.service);
    let notes: String = report.summary().iter().map(|note| paragraph(note)).collect();
    let body = format!(
        "<header>\n<h1>{}</h1>\n{notes}</header>\n<main>\n{first}{}{}{others}</main>\n",
        escape(&title),
        ranking(report),
        tail_and_middle(report),
    );
    document(&title, STYLE, &body)
}

fn paragraph(text: &str) -> String {
    format!("<p>{}</p>\n", escape(text))
}

/// What a request's time is charged to, the largest part first.
fn charged(one: &SlowRequest) -> String {
    format!("{}, {}", show(one.latency_ns), one.charged())
}

fn figure(title: &str, picture: &str, caption: &str) -> String {
    format!("<figure>\n<h2>{}</h2>\n{picture}{caption}</figure>\n", escape(title))
}

fn legend() -> String {
    let entry = |(colour, name): (&str, &str)| {
        let name = escape(name);
        format!("<li><span class=\"key {colour}\"></span> {name}</li>\n")
    };
    let entries: String = COLOURS.iter().map(|(colour, name, _)| entry((colour, name))).collect();
    format!(
        "<ul class=\"legend\">\n{entries}</ul>\n<figcaption>Above: the request's own time. Below: \
         what ran meanwhile, its threads blue, others red. Arrows are wake-ups.</figcaption>\n"
    )
}

fn ranking(report: &Report) -> String {
    if report.causes.is_empty() {
        return String::new();
    }
    let cells = |cells: &[String], tag: &str| {
        let all: String =
            cells.iter().map(|cell| format!("<{tag}>{}</{}>", escape(cell), &tag[..2])).collect();
        format!("<tr>{all}</tr>\n")
    };
    let rows: String = report
        .causes
        .iter()
        .map(|cause| {
            let row = [report.row(cause), vec![cause.words.clone()]].concat();
            cells(&row, "td")
        })
        .collect();
    let mut heading: Vec<String> = report.heading().iter().map(|name| (*name).to_owned()).collect();
    heading.push("they were slow because".to_owned());
    format!(
        "<div class=\"scroll\"><table><caption>Causes of the tail, the largest first</caption>\n\
         <thead>{}</thead>\n<tbody>\n{rows}</tbody></table></div>\n",
        cells(&heading, "th scope=\"col\""),
    )
}

fn tail_and_middle(report: &Report) -> String {
    if report.causes.is_empty() {
        return String::new();
    }
    let caption = "<figcaption>Red: a slow request, on average. Blue: one of the middle, between \
                   p40 and p60.</figcaption>\n";
    figure("Tail and middle", &tail_picture(&report.causes), caption)
}

/// The time of each cause in slow requests, next to that in requests of the middle. A cause that is
/// large in both makes all requests slow, not the tail.
fn tail_picture(causes: &[CauseRow]) -> String {
    let shown = &causes[..causes.len().min(MOST_ROWS)];
    let longest = shown.iter().map(|cause| cause.row.tail_ns.max(cause.row.middle_ns)).max();
    let longest = number(longest.unwrap_or(0).max(1));
    let mut body = String::new();
    let mut y = 4.0;
    for cause in shown {
        body += &fitted("row-name", (0.0, y + 16.0), &cause.row.cause, NAMES - 10.0);
        let both = [("red", "tail", cause.row.tail_ns), ("blue", "middle", cause.row.middle_ns)];
        for (at, (colour, which, ns)) in (0_u8..).zip(both) {
            let top = y + f64::from(at) * (BAR + 1.0);
            let right = NAMES + (WIDTH - NAMES - NUMBER) * number(ns) / longest;
            let tooltip = format!("{}, {which}: {}", cause.row.cause, show(ns));
            body += &bar(colour, (NAMES, top), (right, top + BAR), &tooltip);
            body += &fitted("number", (right + 6.0, top + 10.0), &show(ns), NUMBER);
        }
        y += ROW;
    }
    body += &line("base", (NAMES, 0.0), (NAMES, y));
    picture(y + 4.0, "What slow requests and those of the middle had of each cause", &body)
}
