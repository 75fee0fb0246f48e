//! Numbers in the program's memory: their locations, and how their pages are shared.

use std::io;
use std::path::Path;

use elfen_console::failure::{Failure, Status};
use elfen_machine::cpulist::CpuSet;

use super::args::ObserveArgs;
use super::wait::block_signals;
use crate::followed_lane::ThreadWord;
use crate::reach::{self, NumberLocation, PageSupervisor, ReachError, SharedGlobals};
use crate::signal_spec::{SignalSpec, Width};
use crate::symbols::{Global, Layout, Symbols};

pub(super) fn refuse(name: &str, error: &ReachError) -> Failure {
    let (status, fix) = match error {
        ReachError::Invalid(_) => (Status::Usage, "choose one of `elfen shim signals`"),
        ReachError::Failed(_) | ReachError::Io(_) => {
            (Status::Failed, "see `elfen doctor` for what this user may observe")
        }
    };
    Failure::new(status, format!("watching {name:?}"), error, fix)
}

/// Lists the globals of a running process.
pub(super) fn globals_of(layout: &Layout) -> Vec<Global> {
    let symbols = layout
        .objects
        .iter()
        .filter_map(|loaded| Symbols::read(&layout.file_of(loaded), &loaded.path));
    symbols.flat_map(|symbols| symbols.globals).collect()
}

/// Finds the address of a file's global in the process.
pub(super) fn address_of(layout: &Layout, global: &Global) -> Option<u64> {
    let loaded = layout.objects.iter().find(|loaded| loaded.path == global.path)?;
    let symbols = Symbols::read(&layout.file_of(loaded), &loaded.path)?;
    Some(loaded.start.wrapping_add(global.address).wrapping_sub(symbols.base))
}

/// Locations of numbers, by the names of their signals.
pub(super) type Globals = Vec<(String, NumberLocation)>;

/// Prepares to share all requested symbols with a program from its start.
pub(super) fn share_at_start(
    args: &ObserveArgs,
    program: &Path,
) -> Result<(Globals, Option<SharedGlobals>), Failure> {
    let mut wanted = watched_numbers(args);
    wanted.retain(|spec| matches!(spec, SignalSpec::Symbol { .. }));
    if wanted.is_empty() {
        return Ok((Vec::new(), None));
    }
    if Symbols::read(program, program).is_none() {
        let why = "it is not a 64-bit x86 program; if it is a script, name its interpreter";
        let why = ReachError::Invalid(why.to_owned());
        return Err(refuse(&program.display().to_string(), &why));
    }
    let all = reach::globals_of(program);
    let io = |error: io::Error| refuse("globals", &ReachError::Io(error));
    let mut shared = SharedGlobals::new().map_err(io)?;
    let mut places = Vec::new();
    for spec in wanted {
        let SignalSpec::Symbol { name, offset, width } = &spec else { continue };
        let found = reach::find_global(&all, name, *offset, *width);
        let place = found.and_then(|(global, width)| shared.share(global, *offset, width));
        places.push((spec.to_string(), place.map_err(|error| refuse(name, &error))?));
    }
    Ok((places, Some(shared)))
}

/// Shares all requested symbols and addresses of a running process.
pub(super) fn share_running(
    args: &ObserveArgs,
    process: u32,
    layout: &Layout,
    lanes: &CpuSet,
) -> Result<(Globals, PageSupervisor), Failure> {
    let all = globals_of(layout);
    let mut found = Vec::new();
    for spec in watched_numbers(args) {
        let at = match &spec {
            SignalSpec::Address { at, width } => (*at, *width),
            SignalSpec::Symbol { name, offset, width } => {
                let global = reach::find_global(&all, name, *offset, *width);
                let (global, width) = global.map_err(|error| refuse(name, &error))?;
                let at = address_of(layout, global).ok_or_else(|| {
                    refuse(name, &ReachError::Failed("its file is not mapped".to_owned()))
                })?;
                (at + offset, width)
            }
            _ => continue,
        };
        found.push((spec.to_string(), at));
    }
    if found.is_empty() {
        let why = "no watched signal is a number in the process's memory";
        let fix = "watch a SYMBOL or 0xADDRESS";
        return Err(Failure::new(Status::Usage, "--share", why, fix));
    }
    let addresses: Vec<u64> = found.iter().map(|(_, (at, _))| *at).collect();
    let refused = |error| refuse("its pages, shared", &error);
    block_signals()?;
    let supervisor = PageSupervisor::share(process, &addresses, lanes).map_err(refused)?;
    let place = |(name, (at, width)): (String, (u64, Width))| {
        Ok((name, supervisor.place(at, width).map_err(refused)?))
    };
    let places: Result<Globals, Failure> = found.into_iter().map(place).collect();
    Ok((places?, supervisor))
}

/// Lists the signals that the user named, and the symbols in rates.
fn watched_numbers(args: &ObserveArgs) -> Vec<SignalSpec> {
    let of_rates = args.rate.iter().flat_map(|rate| rate.split('/')).filter_map(|word| {
        let spec: SignalSpec = word.parse().ok()?;
        (thread_word(word).is_none() && matches!(spec, SignalSpec::Symbol { .. })).then_some(spec)
    });
    args.watch.iter().cloned().chain(of_rates).collect()
}

/// The thread word that a counter's name in a rate stands for.
pub(super) fn thread_word(name: &str) -> Option<ThreadWord> {
    match name {
        "calls" => Some(ThreadWord::Calls),
        "instructions" => Some(ThreadWord::Instructions),
        "cycles" => Some(ThreadWord::Cycles),
        "value" => Some(ThreadWord::Value),
        _ => None,
    }
}
