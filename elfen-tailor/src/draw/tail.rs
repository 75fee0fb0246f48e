//! What a slow request had of each cause, and what one of the middle had: a cause that both have
//! makes all requests slow, and not the tail.

use elfen_console::duration::{number, show};

use super::svg::{self, WIDTH};
use crate::report::CauseRow;

const NAMES: f64 = 190.0;
/// Room for the number behind a bar.
const NUMBER: f64 = 70.0;
const BAR: f64 = 12.0;
const ROW: f64 = 36.0;
const MOST_ROWS: usize = 10;

pub(super) fn picture(causes: &[CauseRow]) -> String {
    let shown = &causes[..causes.len().min(MOST_ROWS)];
    let longest = shown.iter().map(|cause| cause.row.tail_ns.max(cause.row.middle_ns)).max();
    let longest = number(longest.unwrap_or(0).max(1));
    let mut body = String::new();
    let mut y = 4.0;
    for cause in shown {
        body += &svg::fitted("row-name", (0.0, y + 16.0), &cause.row.cause, NAMES - 10.0);
        let both = [("red", "tail", cause.row.tail_ns), ("blue", "middle", cause.row.middle_ns)];
        for (at, (colour, which, ns)) in (0_u8..).zip(both) {
            let top = y + f64::from(at) * (BAR + 1.0);
            let right = NAMES + (WIDTH - NAMES - NUMBER) * number(ns) / longest;
            let told = format!("{}, {which}: {}", cause.row.cause, show(ns));
            body += &svg::bar(colour, (NAMES, top), (right, top + BAR), &told);
            body += &svg::fitted("number", (right + 6.0, top + 10.0), &show(ns), NUMBER);
        }
        y += ROW;
    }
    body += &svg::line("base", (NAMES, 0.0), (NAMES, y));
    svg::picture(y + 4.0, "What slow requests and those of the middle had of each cause", &body)
}
