//! Functions that publish what their thread has executed: `--count-at`.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use elfen_console::failure::{Failure, Status};
use elfen_console::output;
use elfen_rt::count::{self, CountError};

use crate::symbols::{Saying, Symbols};

/// What the preload library is told, behind how functions say that they run: of which file, and
/// where in it. Nothing if nothing is asked for.
pub(super) fn order(
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
    let can = [Some(Saying::Entries), Some(Saying::EntriesAndReturns)];
    let Some(symbols) = symbols.filter(|symbols| can.contains(&symbols.saying)) else {
        let why = "the program's functions leave no room at their entries";
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
            return Err(wrong(name, &why, "see `nm -C` for what there is"));
        };
        order += &format!(",{}:{}:{start}", about.dev(), about.ino());
    }
    match lacking() {
        None => Ok(order),
        Some((why, fix)) => {
            Err(Failure::new(Status::Unsupported, format!("--count-at {first:?}"), why, fix))
        }
    }
}

/// Why threads cannot count here what they execute, and what can be done.
pub(super) fn lacking() -> Option<(String, &'static str)> {
    match count::probe() {
        Ok(()) => None,
        Err(CountError::Open(error)) => {
            let why = io::Error::from_raw_os_error(error);
            Some(match error {
                libc::EACCES | libc::EPERM => (
                    format!("its threads may not count what they execute: {why}"),
                    "set kernel.perf_event_paranoid to 2 or less",
                ),
                _ => (
                    format!("no hardware counts instructions here (perf_event_open: {why})"),
                    "use a machine, or an instance type, that shows its PMU",
                ),
            })
        }
        Err(CountError::Read) => Some((
            "counters may not be read by the thread itself (rdpmc)".to_owned(),
            "as root: `echo 1 > /sys/bus/event_source/devices/cpu/rdpmc`",
        )),
    }
}

/// Says what was not counted although that was asked for.
pub(super) fn warn_of(names: &[String], (counting, uncounted): (u64, u64)) {
    let silent = (names.len() as u64).saturating_sub(counting);
    if silent > 0 {
        output::warn(&format!(
            "{silent} of {} functions of --count-at have no room at their entry, or cannot be told \
             from others",
            names.len()
        ));
    }
    if uncounted > 0 {
        output::warn(&format!("{uncounted} threads have no counters, and counted nothing"));
    }
}
