//! The page: the cause of the tail in a sentence, the slowest request as a picture, and then what
//! is read by who wants to know more.

use elfen_console::duration::show;
use elfen_console::page::{document, escape};

use super::tail;
use super::timeline::{COLOURS, Drawer};
use crate::report::{Report, SlowRequest};
use crate::timeline::Timeline;
use crate::trace::Tale;

/// The arrows of wake-ups; and the first picture closer to the top, so that it is on the first
/// screen.
const STYLE: &str = "\
.wake { fill: none; stroke: var(--ink); stroke-width: 1; }
.key { display: inline-block; width: 0.9rem; height: 0.8rem; background: var(--c); }
body { padding-top: 1rem; }
h1 { margin-bottom: 0.4rem; }
header + main > figure:first-child { margin-top: 0.75rem; }
";

/// The report as one HTML file that needs nothing else.
pub fn page(report: &Report, tale: &Tale) -> String {
    let timeline = Timeline::of(tale);
    let drawer = Drawer { tale, timeline: &timeline };
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
        against_the_middle(report),
    );
    document(&title, STYLE, &body)
}

fn paragraph(text: &str) -> String {
    format!("<p>{}</p>\n", escape(text))
}

/// What a request's time is charged to, the most first.
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
        "<ul class=\"legend\">\n{entries}</ul>\n<figcaption>Above, the request's own time. Below, \
         what ran meanwhile: blue its threads, red others. Arrows are wake-ups.</figcaption>\n"
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

fn against_the_middle(report: &Report) -> String {
    if report.causes.is_empty() {
        return String::new();
    }
    let caption = "<figcaption>Red: a slow request, on average. Blue: one of the middle, between \
                   p40 and p60.</figcaption>\n";
    figure("Tail against middle", &tail::picture(&report.causes), caption)
}
