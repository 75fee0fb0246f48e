//! `--count-at`: functions that publish their thread's counts of instructions and cycles.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use elfen_console::failure::{Failure, Status};
use elfen_console::output;
use elfen_rt::count::{self, CountError};

use crate::symbols::{FunctionReporting, Symbols};

/// Makes the preload library's argument for these functions: `,DEVICE:INODE:ADDRESS` for each.
pub(super) fn preload_argument(
    names: &[String],
    file: &Path,
    symbols: Option<&Symbols>,
) -> Result<String, Failure> {
    let mut order = String::new();
    if names.is_empty() {
        return Ok(order);
    }
    let wrong = |name: &str, why: &dyn std::fmt::Display, fix: &str| {
        Failure::new(Status::Usage, format!("--count-at {name:?}"), why, fix)
    };
    let first = &names[0];
    let can = [Some(FunctionReporting::Entries), Some(FunctionReporting::EntriesAndReturns)];
    let Some(symbols) = symbols.filter(|symbols| can.contains(&symbols.reporting)) else {
        let why = "the program's functions have no room at their entries";
        return Err(wrong(first, &why, "build it with -fpatchable-function-entry=43"));
    };
    let about = fs::metadata(file).map_err(|error| wrong(first, &error, "check its file"))?;
    for name in names {
        let same = symbols.functions.iter().filter(|(.., known)| known == name);
        let starts: Vec<u64> = same.map(|(start, ..)| *start).collect();
        let [start] = starts[..] else {
            let why = match starts.len() {
                0 => "the program has no such function".to_owned(),
                many => format!("the program has {many} functions of this name"),
            };
            return Err(wrong(name, &why, "choose one from the output of `nm -C`"));
        };
        order += &format!(",{}:{}:{start}", about.dev(), about.ino());
    }
    match missing_counters() {
        None => Ok(order),
        Some((why, fix)) => {
            Err(Failure::new(Status::Unsupported, format!("--count-at {first:?}"), why, fix))
        }
    }
}

/// Returns why threads cannot count their instructions on this machine, and how to change that.
pub(super) fn missing_counters() -> Option<(String, &'static str)> {
    match count::probe() {
        Ok(()) => None,
        Err(CountError::Open(error)) => {
            let why = io::Error::from_raw_os_error(error);
            Some(match error {
                libc::EACCES | libc::EPERM => (
                    format!("threads may not count instructions: {why}"),
                    "set kernel.perf_event_paranoid to 2 or less",
                ),
                _ => (
                    format!("this machine has no instruction counter (perf_event_open: {why})"),
                    "use a machine, or an instance type, with a visible PMU",
                ),
            })
        }
        Err(CountError::Read) => Some((
            "threads may not read their own counters (rdpmc)".to_owned(),
            "as root: `echo 1 > /sys/bus/event_source/devices/cpu/rdpmc`",
        )),
    }
}

/// Warns about functions and threads that were not counted.
pub(super) fn warn_uncounted(names: &[String], (counting, uncounted): (u64, u64)) {
    let silent = (names.len() as u64).saturating_sub(counting);
    if silent > 0 {
        output::warn(&format!(
            "{silent} of {} functions of --count-at were not counted: they have no room at their \
             entry, or the lower half of their address is that of another function",
            names.len()
        ));
    }
    if uncounted > 0 {
        output::warn(&format!("{uncounted} threads counted nothing: they could open no counters"));
    }
}
