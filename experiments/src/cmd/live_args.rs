//! What `demo`, `experiment`, `calibrate` and `ladder` share: the choice of lanes, the texts of
//! failures, and the output files.

use std::path::Path;
use std::process::ExitStatus;
use std::{fs, io};

use clap::ValueEnum;
use elfen_console::failure::{Failure, Status, named};
use elfen_console::output::{Versioned, warn};
use elfen_machine::lane_args::{LaneArgs, topology};
use elfen_machine::lanes;
use elfen_machine::source::Source;
use elfen_machine::topology::Topology;
use elfen_run::channels::SourceChoice;
use nix::unistd::{AccessFlags, access};
use serde::Serialize;

use crate::live::{LiveError, Machine};
use crate::record::Line;
use crate::report::live;
use crate::report::text::sentence;

/// Returns the machine to measure on, with all pairs of `--lanes`. Without `--lanes`, it has the
/// machine's first pair, or two CPUs if no CPUs share a core.
pub(crate) fn machine(args: &LaneArgs, what: &str) -> Result<Machine, Failure> {
    let topology = topology(&Source::live())?;
    let chosen = if args.by_hand() {
        let lanes = args.resolve(&topology)?;
        lanes.warnings.iter().for_each(|warning| warn(warning));
        lanes.pairs
    } else {
        let first = lanes::first_pair(&topology).ok_or_else(|| one_cpu(&topology, what))?;
        vec![first]
    };
    let shares = |pair: &elfen_machine::pair::Pair| {
        let core = topology.core_of(pair.request);
        core.is_some_and(|core| pair.batch.is_subset(&core.lanes))
    };
    let smt = chosen.iter().all(shares);
    if !smt && !args.by_hand() {
        let pair = &chosen[0];
        warn(&format!(
            "this machine shows no pair of lanes: using CPUs {pair}, which are not \
            hyperthreads of one core"
        ));
    }
    let in_a_pair = |cpu: &u32| chosen.iter().any(|pair| pair.lanes().any(|lane| lane == *cpu));
    let spare = topology.usable.iter().filter(|cpu| !in_a_pair(cpu)).collect();
    let cpus = u32::try_from(topology.online.len()).unwrap_or(u32::MAX);
    Ok(Machine { pairs: chosen, spare, smt, cpus, emulated: None })
}

fn one_cpu(topology: &Topology, what: &str) -> Failure {
    let why = format!(
        "a service and a batch require two CPUs, and this process may use only CPU {}",
        topology.usable
    );
    let fix = "allow a second CPU; or simulate instead: `elfen lab simulate --rps 100 --policy \
        borrow-idle`";
    Failure::new(Status::Unsupported, what, why, fix)
}

/// Returns the failure that the command reports, with a fix for each kind of error.
pub(crate) fn failure(what: &str, error: &LiveError) -> Failure {
    let fix = match error {
        LiveError::Program(_) => {
            "build all of Elfen (`cargo build --release`), or name its folder in ELFEN_LIB"
        }
        LiveError::Io { error, .. } => match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                "free some disk space, or set TMPDIR to another folder"
            }
            io::ErrorKind::PermissionDenied => "use files and folders that this user may write",
            _ => "correct this, and try again",
        },
        LiveError::Failed { status, .. } if is_unsupported(*status) => {
            let fix = "see `elfen doctor`, or omit the option that requires it";
            return Failure::new(Status::Unsupported, what, error, fix);
        }
        LiveError::Failed { .. } | LiveError::Stuck { .. } | LiveError::NotReady { .. } => {
            "read its message, check whether other programs keep the machine busy, and try again"
        }
        LiveError::OwnFailed { .. } => {
            "choose a program that ends with status 0, so that it can be restarted"
        }
        LiveError::Garbled { .. } => "use programs of the same version as this command",
        LiveError::Refused { fix, .. } => fix,
        LiveError::Misplaced { fix, .. } => fix,
        LiveError::NoResults(_) => {
            let fix = "choose another file with --output, or remove that line";
            return Failure::new(Status::Failed, what, error, fix);
        }
        LiveError::Locked => "wait until it ends, or choose another file with --output",
        LiveError::Interrupted(signal) => {
            return Failure::new(
                Status::of_signal(*signal),
                what,
                error,
                "temporary files and processes were removed",
            );
        }
    };
    Failure::new(Status::Failed, what, error, fix)
}

/// Whether the machine lacks a feature: Elfen's own programs report this by their exit status.
fn is_unsupported(status: ExitStatus) -> bool {
    status.code() == Some(Status::Unsupported as i32)
}

/// Returns the value for `elfen run --source`.
pub(crate) fn signal_word(signal: SourceChoice) -> String {
    signal.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Refuses a file that cannot be written, before a measurement of several minutes begins.
pub(crate) fn writable(path: &Path) -> Result<(), Failure> {
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let existing = path.exists();
    let flags = if existing { AccessFlags::W_OK } else { AccessFlags::W_OK | AccessFlags::X_OK };
    let checked = if existing { path } else { folder };
    if path.is_dir() {
        return Err(Failure::unwritable("file", path, "it is a folder"));
    }
    access(checked, flags).map_err(|errno| Failure::unwritable("file", path, errno.desc()))
}

/// Writes the JSON object of `--json` to the file of `--json-out`.
pub(crate) fn write_report(path: &Path, report: &impl Serialize) -> Result<(), Failure> {
    let unwritable = |why: String| Failure::unwritable("report", path, why);
    let mut json = serde_json::to_vec(&Versioned::of(report))
        .map_err(|error| unwritable(error.to_string()))?;
    json.push(b'\n');
    fs::write(path, json).map_err(|error| unwritable(error.to_string()))
}

/// Writes the page of `--html`, with figures of the results, below these notes.
pub(crate) fn write_page(
    path: &Path,
    title: &str,
    notes: &[&str],
    lines: &[Line],
) -> Result<(), Failure> {
    let unusable = |error: String| {
        Failure::new(Status::Failed, named("page", path), error, "see the results file")
    };
    let mut report = live::report(lines).map_err(|error| unusable(error.to_string()))?;
    report.title = title.to_owned();
    report.notes.splice(0..0, notes.iter().map(|note| sentence(note)));
    let html = report.html().map_err(|error| unusable(error.to_string()))?;
    fs::write(path, html).map_err(|error| Failure::unwritable("page", path, error))
}
