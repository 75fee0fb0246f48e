//! What being observed costs programs that nobody wrote for it: Lua, started by `elfen shim` as a
//! user starts it, and beside that by `perf record`.
//!
//! A script says by its own CPU clock what its work took, so that what starts it is in no figure.
//! Unobserved is one that is looked at each millisecond: all that its functions store is stored.
//! What the stores cost by themselves is another row, against the program started alone.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use elfen_console::duration::number;
use elfen_console::programs::find_program;
use elfen_shim::round_trip;
use serde::Serialize;
use serde_json::Value;

use super::cost::{Cost, SHIM};
use super::distance::{Distances, TRIES};
use super::stage::{Error, Lanes, at, on_lane};

pub(super) const SCRIPTS: [(&str, &str); 2] = [
    (
        "fib",
        "local function fib(n) if n < 2 then return n end return fib(n - 1) + fib(n - 2) end
local function work() return fib(20) end",
    ),
    (
        "strings",
        "local function work()
  local parts = {}
  for i = 1, 1500 do
    local text = string.format('%d:%s', i, ('x'):rep(i % 7))
    parts[#parts + 1] = text:gsub('x', 'yz'):upper()
  end
  return #table.concat(parts, ','):reverse()
end",
    ),
];
/// Of any script: takes so many rounds, and writes what they took.
const ROUNDS: &str = "
local start = os.clock()
for _ = 1, tonumber(arg[2]) do work() end
local took = os.clock() - start
io.open(arg[1], 'w'):write(string.format('%.9f', took)):close()
";

/// What a run takes, unobserved.
const RUN_SECONDS: f64 = 0.1;
/// One with the cost measured by `elfen shim` itself: it has a figure each tenth of a second.
const MEASURED_SECONDS: f64 = 1.5;
const MEASURED_TURNS: usize = 7;
/// Turns that are begun for that, at most, and by how much lanes may be further apart at a turn's
/// end or begin for both ways to have measured the same.
const TRIED_TURNS: usize = 12;
const SAME_DISTANCE: f64 = 1.25;
const PERIODS_TICKS: [u64; 4] = [0, 300, 1_200, 2_600];
/// What both ways of measuring a cost are compared at.
const COMPARED_TICKS: u64 = 300;
/// Looked at, and next to never.
const UNOBSERVED: &str = "1ms";
const PERF_HZ: u64 = 50_000;
/// Runs that perf makes five times as long need no more.
const PERF_PAIRS: usize = 11;

/// The cost of one run as `elfen shim --measure-cost` says it, and as pairs of runs do.
#[derive(Debug, Serialize)]
pub(crate) struct Agreement {
    pub(crate) program: String,
    pub(crate) period_ticks: u64,
    pub(crate) by_pairs_percent: f64,
    pub(crate) by_measure_cost_percent: f64,
    /// How far the second is from the first, in the median of the turns; quartiles.
    pub(crate) apart: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
    pub(crate) turns: usize,
    /// In which the lanes did not stay as far apart as they were.
    pub(crate) turns_left_out: usize,
}

/// How a script is run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Beside {
    Alone,
    Unobserved,
    Observed(u64),
    /// By the default.
    Auto,
    Perf,
}

/// A Lua and one script.
pub(super) struct Program<'a> {
    lanes: Lanes,
    elfen: PathBuf,
    lua: &'a Path,
    folder: &'a Path,
    script: PathBuf,
    /// What to watch: its functions, if it says them.
    watch: &'static [&'static str],
    stores: String,
}

impl<'a> Program<'a> {
    pub(super) fn new(
        lanes: Lanes,
        lua: &'a Path,
        folder: &'a Path,
        script: (&str, &str),
    ) -> Result<Self, Error> {
        let path = folder.join(format!("{}.lua", script.0));
        fs::write(&path, format!("{}{ROUNDS}", script.1))?;
        let elfen = find_program("elfen")?;
        let stores = String::new();
        let mut program = Self { lanes, elfen, lua, folder, script: path, watch: &[], stores };
        let looked = program.shim(&["--json", "--watch", "function", "--period", UNOBSERVED], 1)?;
        program.stores = match source_of(&looked) {
            Some(source) => {
                program.watch = &["--watch", "function"];
                source
            }
            None => "none: it was built without".to_owned(),
        };
        Ok(program)
    }

    pub(super) fn lanes(&self) -> Lanes {
        self.lanes
    }

    pub(super) fn has_functions(&self) -> bool {
        !self.watch.is_empty()
    }

    /// One run by `elfen shim`; gives what it prints.
    pub(super) fn shim(&self, words: &[&str], rounds: u64) -> Result<Vec<u8>, Error> {
        let mut command = Command::new(&self.elfen);
        let [on, from] = [self.lanes.on, self.lanes.from].map(|lane| lane.to_string());
        command.args(["shim", "--on", &on, "--from", &from]).args(words).arg("--");
        Ok(command.args(self.words(rounds)).stderr(Stdio::null()).output()?.stdout)
    }

    pub(super) fn words(&self, rounds: u64) -> [OsString; 4] {
        let rounds = rounds.to_string().into();
        [self.lua.into(), self.script.clone().into(), self.took().into(), rounds]
    }

    fn took(&self) -> PathBuf {
        self.folder.join("took")
    }

    /// Seconds that the rounds took.
    fn run(&self, beside: Beside, rounds: u64) -> Result<f64, Error> {
        let _none_yet = fs::remove_file(self.took());
        match beside {
            Beside::Alone => {
                let words = self.words(rounds);
                on_lane(self.lanes.on, || {
                    Ok(Command::new(&words[0]).args(&words[1..]).output()?)
                })?;
            }
            Beside::Unobserved | Beside::Observed(_) | Beside::Auto => {
                let period = match beside {
                    Beside::Auto => "auto".to_owned(),
                    Beside::Observed(0) => "max".to_owned(),
                    Beside::Observed(ticks) => format!("{}ns", self.lanes.clock.ns(ticks)),
                    Beside::Alone | Beside::Unobserved | Beside::Perf => UNOBSERVED.to_owned(),
                };
                let words: Vec<&str> =
                    self.watch.iter().copied().chain(["--period", &period]).collect();
                self.shim(&words, rounds)?;
            }
            Beside::Perf => {
                let mut perf = Command::new("perf");
                let rate = PERF_HZ.to_string();
                perf.args(["record", "-q", "-e", "cpu-clock", "-F", &rate, "-o"]);
                perf.arg(self.folder.join("perf.data")).arg("--").args(self.words(rounds));
                perf.stdout(Stdio::null()).stderr(Stdio::null()).status()?;
            }
        }
        let text = fs::read_to_string(self.took()).unwrap_or_default();
        let seconds = text.trim().parse().ok().filter(|&seconds: &f64| seconds > 0.0);
        seconds.ok_or_else(|| Error::Program(format!("{} did not run", self.lua.display())))
    }

    /// Rounds that take about so long.
    pub(super) fn rounds(&self, seconds: f64) -> Result<u64, Error> {
        let ten = self.run(Beside::Unobserved, 10)?;
        // A number of rounds, by the type that a whole number can be had from.
        Ok(Duration::from_secs_f64((seconds / ten * 10.0).clamp(1.0, 1e9)).as_secs())
    }

    pub(super) fn name(&self) -> String {
        let name =
            |path: &Path| path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let lua = self.lua.file_name().unwrap_or_default().to_string_lossy();
        format!("{lua}: {}", name(&self.script))
    }
}

/// What says the functions. Nothing is printed of a program whose functions cannot be watched.
fn source_of(printed: &[u8]) -> Option<String> {
    let printed: Value = serde_json::from_slice(printed).ok()?;
    let mut signals = printed["signals"].as_array()?.iter();
    let function = signals.find(|signal| signal["name"] == "function")?;
    function["source"].as_str().map(str::to_owned)
}

/// Costs of one Lua, and whether both ways of measuring them agree.
pub(super) fn measure(
    lanes: Lanes,
    lua: &Path,
    pairs: usize,
) -> Result<(Vec<Cost>, Vec<Agreement>), Error> {
    let folder = tempfile::tempdir()?;
    let (mut costs, mut agreements) = (Vec::new(), Vec::new());
    for script in SCRIPTS {
        let program = Program::new(lanes, lua, folder.path(), script)?;
        costs.extend(of_script(&program, pairs)?);
        if program.has_functions() {
            agreements.push(agreement(&program)?);
        }
    }
    Ok((costs, agreements))
}

fn of_script(program: &Program<'_>, pairs: usize) -> Result<Vec<Cost>, Error> {
    let rounds = program.rounds(RUN_SECONDS)?;
    let mut ways = vec![Beside::Alone];
    ways.extend(PERIODS_TICKS.map(Beside::Observed));
    ways.push(Beside::Auto);
    if has_perf() {
        ways.push(Beside::Perf);
    }
    let mut distances = Distances::begin(program.lanes)?;
    for pair in 0..pairs * TRIES {
        if distances.most() >= pairs {
            break;
        }
        let asked = |way: &Beside| *way != Beside::Perf || pair < PERF_PAIRS;
        let all = ways.iter().copied().filter(asked);
        let mut all: Vec<Beside> = std::iter::once(Beside::Unobserved).chain(all).collect();
        // Whatever changes with time is on either side as often.
        let first = pair % all.len();
        all.rotate_left(first);
        let mut took = Vec::with_capacity(all.len());
        for way in all {
            took.push((way, program.run(way, rounds)?));
        }
        let of = |way| took.iter().find(|(other, _)| *other == way).map(|(_, seconds)| *seconds);
        let Some(unobserved) = of(Beside::Unobserved) else { continue };
        let ratio = |way| {
            let seconds = of(way)?;
            // What the stores cost is the other way round: alone, there are none.
            let (more, less) = match way {
                Beside::Alone => (unobserved, seconds),
                _ => (seconds, unobserved),
            };
            Some((way, (more / less - 1.0) * 100.0))
        };
        let ratios: Vec<(Beside, f64)> = ways.iter().copied().filter_map(ratio).collect();
        distances.add(ratios)?;
    }
    let row = |round_trip_ticks, way, mut ratios: Vec<f64>| {
        ratios.sort_by(f64::total_cmp);
        let (by, period_ticks) = match way {
            Beside::Alone => ("nobody: its stores alone", None),
            Beside::Observed(ticks) => (SHIM, Some(ticks)),
            // Whatever it was at each run.
            Beside::Auto => (SHIM, None),
            Beside::Perf | Beside::Unobserved => {
                let ticks = program.lanes.clock.ticks_per_second / PERF_HZ;
                ("perf record -e cpu-clock", Some(ticks))
            }
        };
        Cost {
            program: program.name(),
            stores: program.stores.clone(),
            by,
            period_ticks,
            auto: way == Beside::Auto,
            round_trip_ticks,
            slowdown_percent: at(&ratios, 50),
            low: at(&ratios, 25),
            high: at(&ratios, 75),
            pairs: ratios.len(),
        }
    };
    let mut rows = Vec::new();
    for (round_trip_ticks, found) in distances.found() {
        let of = |way: Beside| {
            let all = found.iter().flatten().filter(|(other, _)| *other == way);
            all.map(|(_, ratio)| *ratio).collect::<Vec<f64>>()
        };
        let ways = ways.iter().map(|&way| (way, of(way))).filter(|(_, all)| !all.is_empty());
        rows.extend(ways.map(|(way, ratios)| row(round_trip_ticks, way, ratios)));
    }
    Ok(rows)
}

pub(super) fn has_perf() -> bool {
    let mut perf = Command::new("perf");
    perf.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
    perf.status().is_ok_and(|status| status.success())
}

/// Whether both ways agree: by turns, as what a look costs changes with how far apart the lanes
/// are, which may be another in a second.
fn agreement(program: &Program<'_>) -> Result<Agreement, Error> {
    let rounds = program.rounds(MEASURED_SECONDS)?;
    let period = format!("{}ns", program.lanes.clock.ns(COMPARED_TICKS));
    let words = ["--json", "--measure-cost", "--period", &period];
    let words: Vec<&str> = program.watch.iter().copied().chain(words).collect();
    let (mut by_pairs, mut by_itself, mut apart) = (Vec::new(), Vec::new(), Vec::new());
    let mut turns_left_out = 0;
    let lanes = program.lanes;
    let distance = || on_lane(lanes.from, || Ok(round_trip::measure_ticks(lanes.on)));
    let mut before = distance()?;
    for turn in 0..TRIED_TURNS {
        if apart.len() == MEASURED_TURNS {
            break;
        }
        let [mut unobserved, mut observed, mut measured] = [0.0; 3];
        for which in (0..3).map(|which| (turn + which) % 3) {
            match which {
                0 => unobserved = program.run(Beside::Unobserved, rounds)?,
                1 => observed = program.run(Beside::Observed(COMPARED_TICKS), rounds)?,
                _ => measured = measured_cost(&program.shim(&words, rounds)?)?,
            }
        }
        let after = distance()?;
        let both = std::mem::replace(&mut before, after).zip(after);
        let stayed = both.is_some_and(|(before, after)| {
            number(before.max(after)) <= SAME_DISTANCE * number(before.min(after))
        });
        if !stayed {
            turns_left_out += 1;
            continue;
        }
        let pair = (observed / unobserved - 1.0) * 100.0;
        by_pairs.push(pair);
        by_itself.push(measured);
        apart.push(measured - pair);
    }
    for all in [&mut by_pairs, &mut by_itself, &mut apart] {
        all.sort_by(f64::total_cmp);
    }
    Ok(Agreement {
        program: program.name(),
        period_ticks: COMPARED_TICKS,
        by_pairs_percent: at(&by_pairs, 50),
        by_measure_cost_percent: at(&by_itself, 50),
        apart: at(&apart, 50),
        low: at(&apart, 25),
        high: at(&apart, 75),
        turns: apart.len(),
        turns_left_out,
    })
}

/// What `elfen shim --measure-cost` says.
fn measured_cost(printed: &[u8]) -> Result<f64, Error> {
    let printed: Value = serde_json::from_slice(printed)
        .map_err(|error| Error::Program(format!("elfen shim --measure-cost: {error}")))?;
    printed["cost_percent"]["median"].as_f64().ok_or_else(|| {
        let why = printed["cost_unknown"].as_str().unwrap_or("it says no cost");
        Error::Program(format!("elfen shim --measure-cost: {why}"))
    })
}
