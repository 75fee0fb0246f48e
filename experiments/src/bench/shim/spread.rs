//! The paper's first figure, in software: the finer one looks, the more there is to see.
//!
//! The rate of calls of a Lua with functions, at three periods: the spread of what is seen narrows
//! as each sample covers more, while the functions that take most of the time stay the same.

use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use super::programs::{Program, SCRIPTS};
use super::stage::{Error, Lanes};

const PERIODS_TICKS: [u64; 3] = [1_200, 50_000, 5_000_000];
const SECONDS: f64 = 4.0;
const HOTTEST: usize = 10;

/// What is seen at one period.
#[derive(Debug, Serialize)]
pub(crate) struct Spread {
    pub(crate) program: String,
    pub(crate) period_ticks: u64,
    /// Calls a microsecond.
    pub(crate) p10: f64,
    pub(crate) median: f64,
    pub(crate) p90: f64,
    pub(crate) kept_percent: f64,
    /// Of the ten functions that take most time at the first period.
    pub(crate) same_of_ten_hottest: usize,
}

/// `None` of a Lua without functions.
pub(super) fn measure(lanes: Lanes, lua: &Path) -> Result<Option<Vec<Spread>>, Error> {
    let folder = tempfile::tempdir()?;
    // Strings go through more functions than fib does.
    let program = Program::new(lanes, lua, folder.path(), SCRIPTS[1])?;
    if !program.has_functions() {
        return Ok(None);
    }
    let rounds = program.rounds(SECONDS)?;
    let mut first: Option<Vec<String>> = None;
    let mut rows = Vec::new();
    for period_ticks in PERIODS_TICKS {
        let period = format!("{}ns", lanes.clock.ns(period_ticks));
        let json = |words: &[&str]| -> Result<Value, Error> {
            let words = [&["--json", "--keep", "histogram", "--period", &period], words].concat();
            serde_json::from_slice(&program.shim(&words, rounds)?)
                .map_err(|error| Error::Program(format!("elfen shim --json: {error}")))
        };
        let hottest = hottest(&json(&["--watch", "function"])?);
        // With no signal that names what is done, all calls are in one distribution.
        let seen = json(&["--watch", "value", "--rate", "calls"])?;
        let rate = &seen["rates"][0];
        let of = |key: &str| {
            rate[key].as_f64().ok_or_else(|| Error::Program("no call was counted".to_owned()))
        };
        let same = first.get_or_insert_with(|| hottest.clone());
        rows.push(Spread {
            program: program.name(),
            period_ticks,
            p10: of("p10")?,
            median: of("median")?,
            p90: of("p90")?,
            kept_percent: of("kept_percent")?,
            same_of_ten_hottest: hottest.iter().filter(|name| same.contains(name)).count(),
        });
    }
    Ok(Some(rows))
}

/// Tags are in the order of their times.
fn hottest(summary: &Value) -> Vec<String> {
    let tags = summary["tags"].as_array().into_iter().flatten();
    let functions = tags.filter(|tag| tag["signal"] == "function");
    functions.filter_map(|tag| tag["name"].as_str()).take(HOTTEST).map(str::to_owned).collect()
}
