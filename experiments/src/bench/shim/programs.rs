//! Lua, a program that was not written to be observed, under `elfen shim` as a user starts it. It
//! measures:
//!
//! - what being observed costs, compared with `perf record`,
//! - whether all functions that perf finds are seen,
//! - the size of a recording,
//! - how the spread of a rate narrows with the period.
//!
//! Each script measures its work with its own CPU clock, so the time of starting it is not
//! included. A run with one sample each millisecond counts as unobserved: it does all stores of its
//! functions. Another row shows the cost of the stores, compared with the program without `elfen
//! shim`.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use elfen_shim::recording;
use serde_json::Value;

use super::cost::{COSTS, SHIM};
use super::stage::{Lanes, Stage, on_lane, program_failed, seconds_written};
use super::truth::{SIZES, size};
use crate::bench::{
    BenchError, BenchReport, Column, Part, Row, Table, case, label, metric, number as figure, row,
};

const SCRIPTS: [(&str, &str); 2] = [
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
/// Appended to each script: runs the given number of rounds, and writes their seconds to a file.
const ROUNDS: &str = "
local start = os.clock()
for _ = 1, tonumber(arg[2]) do work() end
local took = os.clock() - start
io.open(arg[1], 'w'):write(string.format('%.9f', took)):close()
";

/// How long a run takes without an observer.
const RUN_SECONDS: f64 = 0.1;
/// How long a run with `--measure-cost` takes. `elfen shim` then has a result each tenth of a
/// second.
const MEASURED_SECONDS: f64 = 1.5;
const MEASURED_TURNS: usize = 10;
const PERIODS_TICKS: [u64; 4] = [0, 300, 1_200, 2_600];
/// The period at which both ways of measuring a cost are compared, and functions are searched.
const COMPARED_TICKS: u64 = 300;
/// So long a period that the run counts as unobserved.
const UNOBSERVED: &str = "1ms";
const PERF_HZ: u64 = 50_000;
/// perf makes a run five times as long, so fewer runs are enough.
const PERF_ROUNDS: usize = 11;

/// How a script is run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Alone,
    Unobserved,
    Observed(u64),
    /// With the default period.
    Auto,
    Perf,
}

/// A Lua and one script.
struct Program<'a> {
    lanes: Lanes,
    lua: &'a Path,
    folder: &'a Path,
    script: PathBuf,
    /// The options that watch its functions. Empty if it does not publish them.
    watch: &'static [&'static str],
    stores: String,
}

impl<'a> Program<'a> {
    fn new(
        lanes: Lanes,
        lua: &'a Path,
        folder: &'a Path,
        script: (&str, &str),
    ) -> Result<Self, BenchError> {
        let path = folder.join(format!("{}.lua", script.0));
        fs::write(&path, format!("{}{ROUNDS}", script.1))?;
        let stores = String::new();
        let mut program = Self { lanes, lua, folder, script: path, watch: &[], stores };
        let listing =
            program.shim(&["--json", "--watch", "function", "--period", UNOBSERVED], 1)?;
        program.stores = match source_of(&listing.stdout) {
            Some(source) => {
                program.watch = &["--watch", "function"];
                source
            }
            None => "none".to_owned(),
        };
        Ok(program)
    }

    fn has_functions(&self) -> bool {
        !self.watch.is_empty()
    }

    /// Runs the script under `elfen shim`.
    fn shim(&self, words: &[&str], rounds: u64) -> Result<Output, BenchError> {
        let mut command = self.lanes.shim()?;
        Ok(command.args(words).arg("--").args(self.words(rounds)).output()?)
    }

    fn words(&self, rounds: u64) -> [OsString; 4] {
        let rounds = rounds.to_string().into();
        [self.lua.into(), self.script.clone().into(), self.took().into(), rounds]
    }

    fn took(&self) -> PathBuf {
        self.folder.join("took")
    }

    /// Runs the script, and returns the seconds that its rounds took.
    fn run(&self, way: Way, rounds: u64) -> Result<f64, BenchError> {
        let observed = |period: &str| {
            let words = [self.watch, &["--period", period]].concat();
            self.shim(&words, rounds)
        };
        seconds_written(&self.took(), || match way {
            Way::Alone => {
                let words = self.words(rounds);
                on_lane(self.lanes.on, || Ok(Command::new(&words[0]).args(&words[1..]).output()?))
            }
            Way::Unobserved => observed(UNOBSERVED),
            Way::Observed(ticks) => observed(&self.lanes.period(ticks)),
            Way::Auto => observed("auto"),
            Way::Perf => Ok(self.perf(PERF_HZ, rounds)?.1),
        })
    }

    /// Runs the script under `perf record`. Returns the file of the samples.
    fn perf(&self, hz: u64, rounds: u64) -> Result<(PathBuf, Output), BenchError> {
        let data = self.folder.join("perf.data");
        let mut perf = Command::new("perf");
        perf.args(["record", "-q", "-e", "cpu-clock", "-F", &hz.to_string(), "-o"]).arg(&data);
        let output = perf.arg("--").args(self.words(rounds)).output()?;
        Ok((data, output))
    }

    /// Returns what `elfen shim --json` prints at this period.
    fn summary(&self, words: &[&str], ticks: u64, rounds: u64) -> Result<Value, BenchError> {
        let period = self.lanes.period(ticks);
        let words = [&["--json", "--period", &period], words].concat();
        let printed = self.shim(&words, rounds)?.stdout;
        serde_json::from_slice(&printed)
            .map_err(|error| program_failed(format_args!("elfen shim --json: {error}")))
    }

    /// Returns the rounds that take about this many seconds.
    fn rounds(&self, seconds: f64) -> Result<u64, BenchError> {
        let ten = self.run(Way::Unobserved, 10)?;
        // `Duration` converts the number to an integer without a cast.
        Ok(Duration::from_secs_f64((seconds / ten * 10.0).clamp(1.0, 1e9)).as_secs())
    }

    fn name(&self) -> String {
        let name =
            |path: &Path| path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let lua = self.lua.file_name().unwrap_or_default().to_string_lossy();
        format!("{lua}: {}", name(&self.script))
    }
}

/// Returns how the program publishes its functions. `None` if its functions cannot be watched.
fn source_of(printed: &[u8]) -> Option<String> {
    let printed: Value = serde_json::from_slice(printed).ok()?;
    let mut signals = printed["signals"].as_array()?.iter();
    let function = signals.find(|signal| signal["name"] == "function")?;
    function["source"].as_str().map(str::to_owned)
}

/// Prepares all scripts for one Lua.
fn each<'a>(
    lanes: Lanes,
    lua: &'a Path,
    folder: &'a Path,
) -> Result<[Program<'a>; SCRIPTS.len()], BenchError> {
    let [first, second] = SCRIPTS.map(|script| Program::new(lanes, lua, folder, script));
    Ok([first?, second?])
}

fn without_functions(what: &str, lua: &Path) -> String {
    format!("{what}: the functions of {} do not publish their entries", lua.display())
}

/// Measures the costs of one Lua, and whether both ways of measuring a cost agree.
pub(super) fn measure(
    stage: &mut Stage<'_>,
    lua: &Path,
    runs: usize,
) -> Result<BenchReport, BenchError> {
    let folder = tempfile::tempdir()?;
    let mut report = BenchReport::default();
    let mut ways = vec![Way::Alone, Way::Unobserved];
    ways.extend(PERIODS_TICKS.map(Way::Observed));
    ways.push(Way::Auto);
    match has_perf() {
        true => ways.push(Way::Perf),
        false => report
            .left_out
            .push("perf record of the same programs: perf is not installed".to_owned()),
    }
    for program in each(stage.lanes, lua, folder.path())? {
        report.add(costs(stage, &program, &ways, runs)?);
        if program.has_functions() {
            report.add(both_ways(stage, &program)?);
        }
    }
    Ok(report)
}

/// Runs one script in each way.
fn costs(
    stage: &mut Stage<'_>,
    program: &Program<'_>,
    ways: &[Way],
    runs: usize,
) -> Result<Table, BenchError> {
    let perf_ticks = stage.lanes.clock.ticks_per_second / PERF_HZ;
    let labels = |way: &Way| {
        let (by, period_ticks) = match way {
            Way::Alone => ("nothing, built without stores", None),
            Way::Unobserved => ("nothing, built with stores", None),
            Way::Observed(ticks) => (SHIM, Some(*ticks)),
            // The period may differ from run to run.
            Way::Auto => (SHIM, None),
            Way::Perf => ("perf record -e cpu-clock", Some(perf_ticks)),
        };
        let case = case(row![
            "program" => program.name(),
            "stores" => program.stores,
            "by" => by,
            "period_ticks" => period_ticks,
            "auto" => *way == Way::Auto,
        ]);
        // The cost of the stores is the slowdown of the unobserved run compared with `Alone`.
        match way {
            Way::Alone => case,
            Way::Unobserved => case.against(0),
            Way::Observed(_) | Way::Auto | Way::Perf => case.against(1),
        }
    };
    let cases: Vec<_> = ways.iter().map(labels).collect();
    let rounds = program.rounds(RUN_SECONDS)?;
    let mut table = stage.measure(("costs", COSTS), &cases, runs, |case, round, values| {
        if ways[case] != Way::Perf || round < PERF_ROUNDS {
            values.add("time", program.run(ways[case], rounds)?);
        }
        Ok(())
    })?;
    // The baseline has no comparison to print.
    table.rows.remove(0);
    Ok(table)
}

fn has_perf() -> bool {
    let mut perf = Command::new("perf");
    perf.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
    perf.status().is_ok_and(|status| status.success())
}

/// The cost of observing, as `elfen shim --measure-cost` prints it and as pairs of runs show it.
/// Both are measured in the same rounds, because the cost of a sample depends on the distance of
/// the lanes.
const AGREEMENTS: &[Column] = &[
    label("program", "observed"),
    label("period_ticks", "period, ticks"),
    metric("by_pairs_percent", "slowdown by pairs", "%", 2).show(&[Part::Median]),
    metric("by_measure_cost_percent", "by --measure-cost", "%", 2).show(&[Part::Median]),
    metric("apart", "difference", "%", 2).show(&[Part::Median, Part::Interval, Part::N]),
];

fn both_ways(stage: &mut Stage<'_>, program: &Program<'_>) -> Result<Table, BenchError> {
    let rounds = program.rounds(MEASURED_SECONDS)?;
    let words: Vec<&str> = program.watch.iter().copied().chain(["--measure-cost"]).collect();
    let one = case(row!["program" => program.name(), "period_ticks" => COMPARED_TICKS]);
    stage.measure(("agreements", AGREEMENTS), &[one], MEASURED_TURNS, |_, round, values| {
        let [mut unobserved, mut observed, mut measured] = [0.0; 3];
        for which in (0..3).map(|which| (round + which) % 3) {
            match which {
                0 => unobserved = program.run(Way::Unobserved, rounds)?,
                1 => observed = program.run(Way::Observed(COMPARED_TICKS), rounds)?,
                _ => measured = measured_cost(&program.summary(&words, COMPARED_TICKS, rounds)?)?,
            }
        }
        let by_pairs = (observed / unobserved - 1.0) * 100.0;
        values.add("by_pairs_percent", by_pairs);
        values.add("by_measure_cost_percent", measured);
        values.add("apart", measured - by_pairs);
        Ok(())
    })
}

/// Returns the cost that `elfen shim --measure-cost` printed.
fn measured_cost(printed: &Value) -> Result<f64, BenchError> {
    printed["cost_percent"]["median"].as_f64().ok_or_else(|| {
        let why = printed["cost_unknown"].as_str().unwrap_or("it printed no cost");
        program_failed(format_args!("elfen shim --measure-cost: {why}"))
    })
}

/// How long a run takes when functions are searched or calls are counted.
const PROFILED_SECONDS: f64 = 4.0;
const PROFILED_HZ: u64 = 4_000;
/// 10 MHz.
const RECORDED_AT: &str = "100ns";
/// The share of perf's samples from which on a function has to be seen.
const LEAST_PERCENT: f64 = 2.0;

/// The program's own functions that have at least 2 % of perf's samples, and how many of them Shim
/// saw.
const PROFILES: &[Column] = &[
    label("program", "functions with at least 2 %, of"),
    figure("by_perf", "by perf", "", 0),
    figure("found", "found by Shim", "", 0).higher(),
    label("missing", "not found"),
];

/// Compares a Lua whose functions publish that they run with perf's profile of the same script.
/// Also measures the size of a recording.
///
/// perf interrupts the program each quarter of a millisecond. Every function that perf often finds
/// should be seen by Shim. Functions of libraries publish nothing: Shim counts them as their
/// callers, so they are left out.
pub(super) fn profile(stage: &mut Stage<'_>, lua: &Path) -> Result<BenchReport, BenchError> {
    let folder = tempfile::tempdir()?;
    let mut report = BenchReport::default();
    for program in each(stage.lanes, lua, folder.path())? {
        if !program.has_functions() {
            report.left_out.push(without_functions("profile", lua));
            break;
        }
        let rounds = program.rounds(PROFILED_SECONDS)?;
        let recorded = stage.undisturbed(|_| recorded(&program, rounds))?;
        report.add(Table { key: "sizes", columns: SIZES, rows: vec![recorded] });
        if has_perf() {
            let rows = vec![stage.undisturbed(|_| profile_of(&program, rounds))?];
            report.add(Table { key: "profiles", columns: PROFILES, rows });
        }
    }
    Ok(report)
}

fn recorded(program: &Program<'_>, rounds: u64) -> Result<Row, BenchError> {
    let file = program.folder.join("run.shim");
    let named = file.to_string_lossy();
    let words = ["--watch", "function", "--period", RECORDED_AT, "--memory", "1GB", "-o", &*named];
    program.shim(&words, rounds)?;
    let recording = recording::open(&file).map_err(program_failed)?;
    let bytes = fs::metadata(&file)?.len();
    fs::remove_file(&file)?;
    Ok(size(&recording, bytes, program.name(), RECORDED_AT))
}

fn profile_of(program: &Program<'_>, rounds: u64) -> Result<Row, BenchError> {
    let (data, _) = program.perf(PROFILED_HZ, rounds)?;
    let mut report = Command::new("perf");
    report.args(["report", "-q", "--stdio", "--sort", "dso,symbol", "-F", "overhead,dso,symbol"]);
    let report = report.arg("-i").arg(&data).stderr(Stdio::null()).output()?;
    let own = program.lua.file_name().unwrap_or_default().to_string_lossy();
    let by_perf = often(&String::from_utf8_lossy(&report.stdout), &own);
    let words = ["--watch", "function", "--keep", "histogram"];
    let summary = program.summary(&words, COMPARED_TICKS, rounds)?;
    let tags = summary["tags"].as_array().into_iter().flatten();
    let seen: Vec<&str> = tags.filter_map(|tag| tag["name"].as_str()).collect();
    let missing: Vec<&String> =
        by_perf.iter().filter(|name| !seen.contains(&name.as_str())).collect();
    Ok(row![
        "program" => program.name(),
        "by_perf" => by_perf.len(),
        "found" => by_perf.len() - missing.len(),
        "missing" => missing,
    ])
}

/// Returns the functions of one file that have at least `LEAST_PERCENT` in a report of perf.
fn often(report: &str, file: &str) -> Vec<String> {
    let of_line = |line: &str| {
        let mut words = line.split_whitespace();
        let percent: f64 = words.next()?.strip_suffix('%')?.parse().ok()?;
        let in_file = words.next()? == file && words.next()? == "[.]";
        let name = words.next()?;
        (in_file && percent >= LEAST_PERCENT).then(|| name.to_owned())
    };
    report.lines().filter_map(of_line).collect()
}

const SPREAD_TICKS: [u64; 3] = [1_200, 50_000, 5_000_000];
const HOTTEST: usize = 10;

/// The rates at one period, in calls per microsecond.
const SPREADS: &[Column] = &[
    label("program", "calls of"),
    label("period_ticks", "period, ticks"),
    figure("p10", "p10", "1/us", 2),
    figure("median", "median", "1/us", 2),
    figure("p90", "p90", "1/us", 2),
    figure("kept_percent", "kept", "%", 2),
    // How many of the ten hottest functions are also among the ten hottest at the first period.
    figure("same_of_ten_hottest", "same of ten hottest", "", 0),
];

/// The paper's first figure, in software: shorter periods show more detail.
///
/// Measures the rate of calls of a Lua with functions, at three periods. The spread narrows as each
/// sample covers more time, while the hottest functions stay the same.
pub(super) fn spread(stage: &mut Stage<'_>, lua: &Path) -> Result<BenchReport, BenchError> {
    let folder = tempfile::tempdir()?;
    // The script with strings calls more different functions than fib does.
    let program = Program::new(stage.lanes, lua, folder.path(), SCRIPTS[1])?;
    if !program.has_functions() {
        let left_out = vec![without_functions("rates of calls", lua)];
        return Ok(BenchReport { left_out, ..BenchReport::default() });
    }
    let rounds = program.rounds(PROFILED_SECONDS)?;
    let mut first: Option<Vec<String>> = None;
    let mut rows = Vec::new();
    for ticks in SPREAD_TICKS {
        let keep = ["--keep", "histogram", "--watch"];
        let (functions, seen) = stage.undisturbed(|_| {
            let functions = [&keep[..], &["function"]].concat();
            // No signal is watched that would split the calls by function, so there is one
            // distribution.
            let calls = [&keep[..], &["value", "--rate", "calls"]].concat();
            let summary = |words: &[&str]| program.summary(words, ticks, rounds);
            Ok((summary(&functions)?, summary(&calls)?))
        })?;
        let hottest = hottest(&functions);
        let rate = &seen["rates"][0];
        if rate["median"].as_f64().is_none() {
            return Err(program_failed("no call was counted"));
        }
        let same = first.get_or_insert_with(|| hottest.clone());
        rows.push(row![
            "program" => program.name(),
            "period_ticks" => ticks,
            "p10" => rate["p10"],
            "median" => rate["median"],
            "p90" => rate["p90"],
            "kept_percent" => rate["kept_percent"],
            "same_of_ten_hottest" => hottest.iter().filter(|name| same.contains(name)).count(),
        ]);
    }
    Ok(Table { key: "spreads", columns: SPREADS, rows }.into())
}

/// Returns the functions with the most time. The tags are already sorted by time.
fn hottest(summary: &Value) -> Vec<String> {
    let tags = summary["tags"].as_array().into_iter().flatten();
    let functions = tags.filter(|tag| tag["signal"] == "function");
    functions.filter_map(|tag| tag["name"].as_str()).take(HOTTEST).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_perf_is_read() {
        let report = "\n    31.40%  lua-5   [.] luaV_execute\n     2.00%  lua-5  [.] lua_gc  \n\
                      \x20    9.10%  libc.so.6  [.] memcpy\n     1.99%  lua-5  [.] luaH_get\n\
                      \x20    5.00%  [kernel]  [k] clear_page\n# a remark\n";
        assert_eq!(often(report, "lua-5"), ["luaV_execute", "lua_gc"]);
        assert_eq!(often("", "lua-5"), [""; 0]);
    }
}
