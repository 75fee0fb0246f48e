//! What it costs a program to publish the function that it runs. One program is built in four ways:
//! without, with room at entries, with room and returns, and with the hooks of
//! `-finstrument-functions`. It calls an empty function, so the stores are its only cost.

use std::fs;
use std::process::Command;

use elfen_console::duration::number;
use elfen_instrument::find_library;

use super::stage::{Lanes, Stage, on_lane, seconds_written};
use crate::bench::program::Sources;
use crate::bench::{
    BenchError, BenchReport, Case, Column, Part, case, label, metric, number as figure, row,
};

const ROOM: &str = "-fpatchable-function-entry=43";
const RETURNS: &str = "-mfunction-return=thunk-extern";
const WAYS: [(&str, &[&str]); 4] = [
    ("nothing", &[]),
    ("entries", &[ROOM]),
    ("entries and returns", &[ROOM, RETURNS]),
    ("calls of hooks", &["-finstrument-functions"]),
];
const CALLS: u64 = 20_000_000;
const TURNS: usize = 11;

const FUNCTIONS: &[Column] = &[
    label("says", "functions report"),
    figure("file_bytes", "file", "bytes", 0),
    // The time of an empty call with all stores. The observer samples so rarely that it costs
    // nothing.
    metric("ns_a_call", "an empty call", "ns", 2).lower().show(&[Part::Median, Part::Interval]),
];

pub(super) fn measure(stage: &mut Stage<'_>) -> Result<BenchReport, BenchError> {
    let library = match find_library() {
        Ok(library) => library,
        Err(error) => return Ok(BenchReport::without("functions", error)),
    };
    let sources = Sources::new(&[("functions.c", include_str!("functions.c"))])?;
    let thunks = library.with_file_name("libelfen_return.a").to_string_lossy().into_owned();
    for (says, flags) in WAYS {
        let with = if flags.contains(&RETURNS) { &[thunks.as_str()][..] } else { &[] };
        let words = [&["functions.c", "-o", says], flags, with].concat();
        if let Err(why) = sources.compile(&words)? {
            return Ok(BenchReport::without("functions", why));
        }
    }
    let labels = |(says, _)| {
        let bytes = fs::metadata(sources.path(says)).map_or(0, |file| file.len());
        case(row!["says" => says, "file_bytes" => bytes])
    };
    let (lanes, cases): (_, Vec<Case>) = (stage.lanes, WAYS.into_iter().map(labels).collect());
    let table = stage.measure(("functions", FUNCTIONS), &cases, TURNS, |case, _, values| {
        values.add("ns_a_call", seconds(lanes, &sources, case)? * 1e9 / number(CALLS));
        Ok(())
    })?;
    Ok(table.into())
}

/// Returns the CPU time that the calls took.
fn seconds(lanes: Lanes, sources: &Sources, way: usize) -> Result<f64, BenchError> {
    let (program, result, calls) =
        (sources.path(WAYS[way].0), sources.path("result"), CALLS.to_string());
    seconds_written(&result, || {
        if way == 0 {
            return on_lane(lanes.on, || {
                Ok(Command::new(&program).arg(&result).arg(&calls).output()?)
            });
        }
        let mut shim = lanes.shim()?;
        shim.args(["--json", "--watch", "function", "--period", "1ms", "--"]);
        Ok(shim.arg(&program).arg(&result).arg(&calls).output()?)
    })
}
