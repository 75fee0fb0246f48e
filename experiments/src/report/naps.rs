//! Figure 5.8: how long a lane takes to fall asleep and to wake, as the thesis measured it, and as
//! `elfen lab bench nap --json` does here.

use serde::Deserialize;

use super::figure::{Across, Axis, Figure, Mark, Panel, Point, Scale, Series, Source, Style};
use super::scale::short;

/// What `elfen lab bench nap --json` printed, as far as the figure needs it.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct Naps {
    pub request_cpu: u32,
    pub batch_cpu: u32,
    pub tsc_mhz: f64,
    pub naps: Vec<Nap>,
}

#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct Nap {
    pub nap: String,
    pub sleep_cycles: Option<Cycles>,
    pub wake_cycles: Option<Cycles>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
pub struct Cycles {
    pub median: f64,
}

/// Cycles at 2 GHz to sleep and to wake (section 5.3.2), under our name for the same.
const PUBLISHED: [(&str, f64, f64); 3] =
    [("mwait", 2443.0, 1036.0), ("device", 3285.0, 1438.0), ("futex", 11518.0, 3968.0)];

/// The published naps, and those that were measured if there are any.
pub fn figure(measured: Option<&Naps>, command: &str) -> Figure {
    let mut names: Vec<String> = PUBLISHED.iter().map(|nap| nap.0.to_owned()).collect();
    let here = measured.map_or(&[][..], |measured| &measured.naps);
    let ran = |nap: &&Nap| nap.sleep_cycles.is_some() || nap.wake_cycles.is_some();
    for nap in here.iter().filter(ran) {
        if !names.contains(&nap.nap) {
            names.push(nap.nap.clone());
        }
    }
    let published = |value: fn(&(&str, f64, f64)) -> f64| {
        let points = PUBLISHED.iter().enumerate();
        let points = points.map(|(index, nap)| Point::at(index as f64, value(nap))).collect();
        Series::new("published in the thesis", Mark::Rings, Style::Ink, points)
    };
    let live = |value: fn(&Nap) -> Option<Cycles>| {
        let place = |nap: &Nap| names.iter().position(|name| *name == nap.nap);
        let point = |nap: &Nap| Some(Point::at(place(nap)? as f64, value(nap)?.median));
        let points = here.iter().filter_map(point).collect();
        Series::new("measured here", Mark::Dots, Style::Blue, points)
    };
    let panel = |what: &str, published: Series, live: Series| Panel {
        y: Axis::new(what, "cycles").scaled(Scale::Log),
        series: std::iter::once(published).chain(measured.map(|_| live)).collect(),
        rules: Vec::new(),
    };
    let panels = vec![
        panel("to fall asleep", published(|nap| nap.1), live(|nap| nap.sleep_cycles)),
        panel("to wake", published(|nap| nap.2), live(|nap| nap.wake_cycles)),
    ];
    Figure {
        id: "naps".to_owned(),
        title: "Naps: to sleep and to wake".to_owned(),
        reading: READING.to_owned() + &here_too(here),
        source: if measured.is_some() { Source::Live } else { Source::Published },
        made_with: made_with(measured),
        command: command.to_owned(),
        x: Across::Names { quantity: "nap".to_owned(), names, one_scale: true },
        panels,
    }
}

const READING: &str = "On the thesis's machine nanonap (here: device) gives a lane away in 3285 \
    cycles and takes it back in 1438, close to the bare instruction, where a futex takes 3.5 and \
    2.8 times as long.";

/// What was measured, in the same words.
fn here_too(here: &[Nap]) -> String {
    let cycles = |nap: &Nap| Some((nap.sleep_cycles?.median, nap.wake_cycles?.median));
    let said = |nap: &Nap| {
        let (sleep, wake) = cycles(nap)?;
        Some(format!("{} {} and {}", nap.nap, short(sleep), short(wake)))
    };
    let said: Vec<String> = here.iter().filter_map(said).collect();
    if said.is_empty() { String::new() } else { format!(" Here: {}.", said.join(", ")) }
}

fn made_with(measured: Option<&Naps>) -> String {
    let thesis = "The thesis's cycles are those of 2 GHz, means of 100.";
    match measured {
        None => format!("{thesis} Nothing was measured here: elfen lab bench nap --json does."),
        Some(Naps { request_cpu, batch_cpu, tsc_mhz, .. }) => format!(
            "{thesis} Here: medians, cycles of a {tsc_mhz} MHz counter; CPU {request_cpu} asks CPU \
             {batch_cpu}."
        ),
    }
}
