//! What a program says of its functions, and what that costs it: one program, built without, with
//! room at its entries, with room and returns, and with the hooks that `-finstrument-functions` has
//! it call.
//!
//! A function works for five parts, calls one that works for one, and works for five again: ten of
//! eleven are its own. An observer that is told only of entries gives the callee what the caller
//! does after the call. What the stores cost is told by calls of a function that does nothing.

use std::fs;
use std::process::{Command, Output};

use elfen_console::duration::number;
use elfen_instrument::find_library;
use serde_json::Value;

use super::stage::{Lanes, on_lane, program_failed};
use crate::bench::program::Sources;
use crate::bench::{
    BenchError, Column, Hear, Part, Report, Row, Scenario, Values, label, metric, number as figure,
    rounded, row,
};

const ROOM: &str = "-fpatchable-function-entry=43";
const RETURNS: &str = "-mfunction-return=thunk-extern";
const WAYS: [(&str, &[&str]); 4] = [
    ("nothing", &[]),
    ("entries", &[ROOM]),
    ("entries and returns", &[ROOM, RETURNS]),
    ("calls of hooks", &["-finstrument-functions"]),
];
/// Of the caller: five, one and five parts, and the middle one is the callee's.
const TRUE_SHARE_PERCENT: f64 = 1000.0 / 11.0;
const SANDWICHES: u64 = 300_000;
const CALLS: u64 = 20_000_000;
const TURNS: usize = 11;
const PERIOD_TICKS: u64 = 300;

/// Each way of saying it, built.
struct Functions {
    lanes: Lanes,
    sources: Sources,
    /// Of the caller, as it was seen, by way; `None` if nothing is said.
    caller_percent: [Option<f64>; 4],
}

pub(super) fn measure(lanes: Lanes, hear: Hear<'_>) -> Result<Report, BenchError> {
    let left_out = |why: String| {
        Ok(Report { left_out: vec![format!("functions: {why}")], ..Report::default() })
    };
    let library = match find_library() {
        Ok(library) => library,
        Err(error) => return left_out(error.to_string()),
    };
    let sources = Sources::new(&[("functions.c", include_str!("functions.c"))])?;
    let thunks = library.with_file_name("libelfen_return.a").to_string_lossy().into_owned();
    for (says, flags) in WAYS {
        let with = if flags.contains(&RETURNS) { &[thunks.as_str()][..] } else { &[] };
        let words = [&["functions.c", "-o", says], flags, with].concat();
        if let Err(why) = sources.compile(&words)? {
            return left_out(why);
        }
    }
    let mut all = Functions { lanes, sources, caller_percent: [None; 4] };
    for way in 1..WAYS.len() {
        all.caller_percent[way] = Some(share(&all.run_way(way, "sandwich", SANDWICHES)?.1)?);
    }
    let table = all.table("functions", TURNS, hear)?;
    Ok(Report { tables: vec![table], ..Report::default() })
}

impl Scenario for Functions {
    const COLUMNS: &'static [Column] = &[
        label("says", "functions say by"),
        figure("file_bytes", "file", "bytes", 0),
        // Of an empty function, with all stores and next to no observer.
        metric("ns_a_call", "an empty call", "ns", 2).lower().show(&[Part::Median, Part::Interval]),
        figure("caller_percent", "caller", "%", 1),
        figure("true_caller_percent", "truth", "%", 1),
    ];

    fn cases(&self) -> Vec<Row> {
        let row = |((says, _), seen): ((&str, _), Option<f64>)| {
            row![
                "says" => says,
                "file_bytes" => fs::metadata(self.sources.path(says)).map_or(0, |file| file.len()),
                "caller_percent" => seen.map(rounded),
                "true_caller_percent" => rounded(TRUE_SHARE_PERCENT),
            ]
        };
        WAYS.into_iter().zip(self.caller_percent).map(row).collect()
    }

    fn run(&mut self, case: usize, _: usize, values: &mut Values) -> Result<(), BenchError> {
        let seconds = self.run_way(case, "calls", CALLS)?.0;
        values.add("ns_a_call", seconds * 1e9 / number(CALLS));
        Ok(())
    }
}

impl Functions {
    /// The CPU time that it took, in seconds, and what `elfen shim` printed.
    fn run_way(&self, way: usize, what: &str, rounds: u64) -> Result<(f64, Output), BenchError> {
        let (says, _) = WAYS[way];
        let (program, told) = (self.sources.path(says), self.sources.path("told"));
        let _none_yet = fs::remove_file(&told);
        let (lanes, rounds) = (self.lanes, rounds.to_string());
        let output = if way == 0 {
            on_lane(lanes.on, || {
                Ok(Command::new(&program).arg(&told).args([what, &rounds]).output()?)
            })?
        } else {
            let period = match what {
                "calls" => "1ms".to_owned(),
                _ => lanes.period(PERIOD_TICKS),
            };
            let mut shim = lanes.shim()?;
            shim.args(["--json", "--watch", "function", "--period", &period, "--"]);
            shim.arg(&program).arg(&told).args([what, &rounds]).output()?
        };
        let text = fs::read_to_string(&told).unwrap_or_default();
        let seconds = text.trim().parse().ok().filter(|&seconds: &f64| seconds > 0.0);
        let said = String::from_utf8_lossy(&output.stderr);
        let why = || program_failed(format_args!("one that says {says}: {}", said.trim()));
        Ok((seconds.ok_or_else(why)?, output))
    }
}

/// Of the caller, in the time of both.
fn share(output: &Output) -> Result<f64, BenchError> {
    let printed: Value = serde_json::from_slice(&output.stdout)?;
    let tags = printed["tags"].as_array().into_iter().flatten();
    let functions = tags.filter(|tag| tag["signal"] == "function");
    let time = |name: &str| {
        let found = functions.clone().find(|tag| tag["name"] == name);
        found.and_then(|tag| tag["time_ns"].as_f64()).unwrap_or(0.0)
    };
    let (caller, callee) = (time("bread"), time("filling"));
    Ok(100.0 * caller / (caller + callee).max(1.0))
}
