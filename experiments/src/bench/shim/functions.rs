//! What a program says of its functions, and what that costs it: one program, built without, with
//! room at its entries, with room and returns, and with the hooks that `-finstrument-functions` has
//! it call.
//!
//! A function works for five parts, calls one that works for one, and works for five again: ten of
//! eleven are its own. Who hears of entries alone gives what it does behind the call to the callee.
//! What the stores cost is told by calls of a function that does nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use elfen_console::duration::number;
use elfen_console::programs::find_program;
use elfen_instrument::find_library;
use serde::Serialize;
use serde_json::Value;

use super::stage::{Error, Lanes, at, on_lane};

const SOURCE: &str = include_str!("functions.c");
const ROOM: &str = "-fpatchable-function-entry=43";
const RETURNS: &str = "-mfunction-return=thunk-extern";
const WAYS: [(&str, &[&str]); 4] = [
    ("nothing", &[]),
    ("entries", &[ROOM]),
    ("entries and returns", &[ROOM, RETURNS]),
    ("calls of hooks", &["-finstrument-functions"]),
];
/// Of the caller: five, one and five parts, and the middle one is the callee's.
pub(crate) const TRUE_SHARE_PERCENT: f64 = 1000.0 / 11.0;
const SANDWICHES: u64 = 300_000;
const CALLS: u64 = 20_000_000;
/// What the calls of each take is the median of so many turns.
const TURNS: usize = 11;
const PERIOD_TICKS: u64 = 300;

/// One way of saying it.
#[derive(Debug, Serialize)]
pub(crate) struct Functions {
    pub(crate) says: &'static str,
    pub(crate) file_bytes: u64,
    /// Of an empty function, with all stores and next to no observer, in the median; quartiles.
    pub(crate) ns_a_call: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
    /// Of the caller, as it was seen; `None` if nothing is said.
    pub(crate) caller_percent: Option<f64>,
}

struct Built {
    lanes: Lanes,
    folder: tempfile::TempDir,
    elfen: PathBuf,
}

/// Or why it cannot be measured here.
pub(super) fn measure(lanes: Lanes) -> Result<Result<Vec<Functions>, String>, Error> {
    let library = match find_library() {
        Ok(library) => library,
        Err(error) => return Ok(Err(error.to_string())),
    };
    let built = Built { lanes, folder: tempfile::tempdir()?, elfen: find_program("elfen")? };
    fs::write(built.path("functions.c"), SOURCE)?;
    for (says, flags) in WAYS {
        if let Err(why) = built.compile(says, flags, &library) {
            return Ok(Err(why));
        }
    }
    let mut took = WAYS.map(|_| Vec::new());
    for turn in 0..TURNS {
        // Whatever changes with time is with each as often.
        for which in (0..WAYS.len()).map(|which| (which + turn) % WAYS.len()) {
            let seconds = built.run(WAYS[which].0, "calls", CALLS)?.0;
            took[which].push(seconds * 1e9 / number(CALLS));
        }
    }
    let mut rows = Vec::new();
    for ((says, _), mut took) in WAYS.into_iter().zip(took) {
        took.sort_by(f64::total_cmp);
        let caller_percent = match says == WAYS[0].0 {
            true => None,
            false => Some(share(&built.run(says, "sandwich", SANDWICHES)?.1)?),
        };
        let file_bytes = fs::metadata(built.path(says))?.len();
        let (low, ns_a_call, high) = (at(&took, 25), at(&took, 50), at(&took, 75));
        rows.push(Functions { says, file_bytes, ns_a_call, low, high, caller_percent });
    }
    Ok(Ok(rows))
}

impl Built {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn compile(&self, name: &str, flags: &[&str], library: &Path) -> Result<(), String> {
        let mut compiler = Command::new("cc");
        compiler.args(["-O2", "-falign-functions=64", "-o"]).arg(self.path(name)).args(flags);
        compiler.arg(self.path("functions.c"));
        if flags.contains(&RETURNS) {
            compiler.arg(library.with_file_name("libelfen_return.a"));
        }
        let done = compiler.output().map_err(|error| format!("no C compiler, cc: {error}"))?;
        let said = String::from_utf8_lossy(&done.stderr);
        match done.status.success() {
            true => Ok(()),
            false => Err(format!("cc: {}", said.lines().next().unwrap_or("it failed"))),
        }
    }

    /// The CPU time that it took, in seconds, and what `elfen shim` printed.
    fn run(&self, name: &str, what: &str, rounds: u64) -> Result<(f64, Output), Error> {
        let (program, told) = (self.path(name), self.path("told"));
        let _none_yet = fs::remove_file(&told);
        let (lanes, rounds) = (self.lanes, rounds.to_string());
        let period = match what {
            "calls" => "1ms".to_owned(),
            _ => format!("{}ns", lanes.clock.ns(PERIOD_TICKS)),
        };
        let output = if name == WAYS[0].0 {
            on_lane(lanes.on, || {
                Ok(Command::new(&program).arg(&told).args([what, &rounds]).output()?)
            })?
        } else {
            let mut shim = Command::new(&self.elfen);
            let [on, from] = [lanes.on, lanes.from].map(|lane| lane.to_string());
            shim.args(["shim", "--json", "--watch", "function", "--on", &on, "--from", &from]);
            shim.args(["--period", &period, "--"]).arg(&program).arg(&told);
            shim.args([what, &rounds]).output()?
        };
        let text = fs::read_to_string(&told).unwrap_or_default();
        let seconds = text.trim().parse().ok().filter(|&seconds: &f64| seconds > 0.0);
        let said = String::from_utf8_lossy(&output.stderr);
        let why = || Error::Program(format!("one that says {name}: {}", said.trim()));
        Ok((seconds.ok_or_else(why)?, output))
    }
}

/// Of the caller, in the time of both.
fn share(output: &Output) -> Result<f64, Error> {
    let printed: Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| Error::Program(format!("elfen shim --json: {error}")))?;
    let tags = printed["tags"].as_array().into_iter().flatten();
    let functions = tags.filter(|tag| tag["signal"] == "function");
    let time = |name: &str| {
        let found = functions.clone().find(|tag| tag["name"] == name);
        found.and_then(|tag| tag["time_ns"].as_f64()).unwrap_or(0.0)
    };
    let (caller, callee) = (time("bread"), time("filling"));
    Ok(100.0 * caller / (caller + callee).max(1.0))
}
