//! What a run is asked for, checked before anything is opened, started or stopped.

use elfen_console::failure::{Failure, Status};

use super::args::{Args, Keep};
use super::count;

pub(super) fn check_wanted(args: &Args) -> Result<(), Failure> {
    let wrong = |what: &str, why: &str, fix: &str| Err(Failure::new(Status::Usage, what, why, fix));
    if args.keep == Keep::Histogram && (args.output.is_some() || args.last.is_some()) {
        let why = "it keeps no runs that could be written or cut";
        return wrong("--keep histogram", why, "leave out -o and --last, and use --json");
    }
    if args.measure_cost && args.from.as_ref().is_some_and(|from| from.len() > 1) {
        let why = "what one observer leaves alone, another looks at";
        return wrong("--measure-cost", why, "leave it out, or name one lane with --from");
    }
    if args.share && args.process.is_none() {
        let why = "it is for a process that runs; a program that is started shares its globals";
        return wrong("--share", why, "leave it out, or name a process with -p");
    }
    let mut watched = args.watch.iter();
    while let Some(ask) = watched.next() {
        if watched.as_slice().contains(ask) {
            let what = format!("--watch {:?}", ask.to_string());
            return wrong(&what, "it is named twice", "name it once");
        }
    }
    check_counters(args)?;
    check_memory(args.memory)
}

/// Nothing counts what a thread executes unless functions of it are told to.
fn check_counters(args: &Args) -> Result<(), Failure> {
    let counted =
        |rate: &&String| rate.split('/').any(|word| matches!(word, "instructions" | "cycles"));
    let Some(rate) = args.rate.iter().find(counted).filter(|_| args.count_at.is_empty()) else {
        return Ok(());
    };
    let what = format!("--rate {rate:?}");
    Err(match count::lacking() {
        Some((why, fix)) => Failure::new(Status::Unsupported, what, why, fix),
        None => {
            let why = "no function says what its thread has executed";
            Failure::new(Status::Usage, what, why, "name some with --count-at")
        }
    })
}

/// Refuses a recording that is larger than the memory that is available.
fn check_memory(bytes: usize) -> Result<(), Failure> {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let available = text.lines().find_map(|line| {
        let line = line.strip_prefix("MemAvailable:")?.trim_end_matches("kB");
        line.trim().parse::<usize>().ok()
    });
    let available = available.map_or(usize::MAX, |kib| kib << 10);
    if bytes <= available {
        return Ok(());
    }
    let why = format!("only {} MB are available", available >> 20);
    let fix = "name less, or keep sums with --keep histogram";
    Err(Failure::new(Status::Failed, format!("--memory of {} MB", bytes >> 20), why, fix))
}
