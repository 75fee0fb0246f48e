//! A Lua whose functions say that they run, held against perf's profile of the same script, and
//! what a recording of it takes.
//!
//! perf interrupts the program each quarter of a millisecond; which functions it finds there often
//! is the truth that all that have a share of the time are seen. Functions of libraries say nothing
//! of themselves: they are their callers', and so in no figure.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use elfen_shim::recording;
use serde::Serialize;
use serde_json::Value;

use super::programs::{Program, SCRIPTS, has_perf};
use super::stage::{Error, Lanes};
use super::truth::{Size, size};

const SECONDS: f64 = 4.0;
const PERF_HZ: u64 = 4_000;
const PERIOD_TICKS: u64 = 300;
/// 10 MHz.
const RECORDED_AT: &str = "100ns";
/// Shares of perf's profile that have to be seen.
const LEAST_PERCENT: f64 = 2.0;

/// One script.
#[derive(Debug, Serialize)]
pub(crate) struct Profile {
    pub(crate) program: String,
    /// Functions of the program itself with two of a hundred of perf's samples and more.
    pub(crate) by_perf: usize,
    /// Those among them that were seen to run.
    pub(crate) found: usize,
    pub(crate) missing: Vec<String>,
}

/// Of a Lua without functions nothing.
pub(super) fn measure(lanes: Lanes, lua: &Path) -> Result<(Vec<Profile>, Vec<Size>), Error> {
    let folder = tempfile::tempdir()?;
    let (mut profiles, mut sizes) = (Vec::new(), Vec::new());
    for script in SCRIPTS {
        let program = Program::new(lanes, lua, folder.path(), script)?;
        if !program.has_functions() {
            break;
        }
        let rounds = program.rounds(SECONDS)?;
        sizes.push(recorded(&program, folder.path(), rounds)?);
        if has_perf() {
            profiles.push(of_script(&program, lua, folder.path(), rounds)?);
        }
    }
    Ok((profiles, sizes))
}

fn recorded(program: &Program<'_>, folder: &Path, rounds: u64) -> Result<Size, Error> {
    let file = folder.join("run.shim");
    let named = file.to_string_lossy();
    let words = ["--watch", "function", "--period", RECORDED_AT, "--memory", "1GB", "-o", &*named];
    program.shim(&words, rounds)?;
    let recording = recording::open(&file).map_err(|error| Error::Program(error.to_string()))?;
    let bytes = fs::metadata(&file)?.len();
    fs::remove_file(&file)?;
    Ok(size(&recording, bytes, program.name(), RECORDED_AT))
}

fn of_script(
    program: &Program<'_>,
    lua: &Path,
    folder: &Path,
    rounds: u64,
) -> Result<Profile, Error> {
    let data = folder.join("perf.data");
    let mut perf = Command::new("perf");
    let rate = PERF_HZ.to_string();
    perf.args(["record", "-q", "-e", "cpu-clock", "-F", &rate, "-o"]).arg(&data).arg("--");
    perf.args(program.words(rounds)).stdout(Stdio::null()).stderr(Stdio::null()).status()?;
    let mut report = Command::new("perf");
    report.args(["report", "-q", "--stdio", "--sort", "dso,symbol", "-F", "overhead,dso,symbol"]);
    let report = report.arg("-i").arg(&data).stderr(Stdio::null()).output()?;
    let own = lua.file_name().unwrap_or_default().to_string_lossy();
    let of_perf = often(&String::from_utf8_lossy(&report.stdout), &own);
    let period = format!("{}ns", program.lanes().clock.ns(PERIOD_TICKS));
    let words = ["--json", "--watch", "function", "--keep", "histogram", "--period", &period];
    let printed: Value = serde_json::from_slice(&program.shim(&words, rounds)?)
        .map_err(|error| Error::Program(format!("elfen shim --json: {error}")))?;
    let tags = printed["tags"].as_array().into_iter().flatten();
    let seen: Vec<&str> = tags.filter_map(|tag| tag["name"].as_str()).collect();
    let missing = of_perf.iter().filter(|name| !seen.contains(&name.as_str()));
    let missing: Vec<String> = missing.cloned().collect();
    let (by_perf, found) = (of_perf.len(), of_perf.len() - missing.len());
    Ok(Profile { program: program.name(), by_perf, found, missing })
}

/// Functions of one file that a report of perf has often.
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
