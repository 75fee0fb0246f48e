//! `elfen shim show`: prints the summary of a recording; and `elfen shim export`: converts it for
//! other tools.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use elfen_console::duration;
use elfen_console::failure::{Failure, Status, named};
use elfen_console::output;

use crate::export::{self, ExportFormat};
use crate::recording::{self, Recording};
use crate::summary::Summary;
use crate::text::text;

const SHOW_EXAMPLES: &str = "\
Examples:
  elfen shim show run.shim
  elfen shim show run.shim --between 1.2s..1.3s --json | jq .tags";

const EXPORT_EXAMPLES: &str = "\
Examples:
  elfen shim export run.shim --as csv > runs.csv
  elfen shim export run.shim --as perfetto --between 1.2s..1.3s > trace.json
  elfen shim export run.shim --as firefox > profile.json
  elfen shim export run.shim --as folded | flamegraph.pl > flame.svg
  elfen shim export run.shim --as folded --signal task";

/// A recording, or a part of it.
#[derive(clap::Args, Debug)]
#[group(skip)]
struct RecordingArgs {
    /// A recording that `elfen shim -o` wrote
    file: PathBuf,

    /// Only a part, between two times from the start, as in 1.2s..1.3s
    #[arg(long, value_name = "FROM..TO", value_parser = between)]
    between: Option<(u64, u64)>,

    /// Join equal tags or numbers through gaps of at most this length [default: as recorded]
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    bridge: Option<Duration>,
}

/// Print the summary of a recording
#[derive(clap::Args, Debug)]
#[command(after_help = SHOW_EXAMPLES)]
pub(super) struct ShowArgs {
    #[command(flatten)]
    recording: RecordingArgs,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Convert a recording for other tools
#[derive(clap::Args, Debug)]
#[command(after_help = EXPORT_EXAMPLES)]
pub(super) struct ExportArgs {
    /// csv; perfetto; firefox, for profiler.firefox.com; or folded stacks for flame graphs
    #[arg(long = "as", value_name = "FORM", value_enum, default_value = "csv")]
    format: ExportFormat,

    /// The signal of folded stacks, as in tag [default: function, else tag, else task]
    #[arg(long, value_name = "SIGNAL")]
    signal: Option<String>,

    #[command(flatten)]
    recording: RecordingArgs,
}

pub(super) fn show(args: &ShowArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let recording = open(&args.recording)?;
    let summary = Summary::of(&recording);
    output::print(out, args.json, &summary, || text(&summary, &[]))?;
    Ok(ExitCode::SUCCESS)
}

pub(super) fn export(args: &ExportArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let recording = open(&args.recording)?;
    let (events, most) = (export::events(&recording), args.format.events_max());
    if events > most {
        let why = format!("it has {events} events, and viewers open at most {most}");
        let fix = "export a part with --between";
        return Err(Failure::new(Status::Failed, "the export", why, fix));
    }
    let wanted = args.signal.as_deref();
    let wrong = |why: String, fix: &str| {
        let what = format!("--signal {:?}", wanted.unwrap_or_default());
        Failure::new(Status::Usage, what, why, fix)
    };
    if wanted.is_some() && args.format != ExportFormat::Folded {
        let fix = "leave it out, or use --as folded";
        return Err(wrong("other formats contain all signals".to_owned(), fix));
    }
    let signals = export::stacked(&recording, wanted).map_err(|names| {
        let why = format!("the recording's signals with names are {}", names.join(", "));
        wrong(why, "use one of them")
    })?;
    export::write(&recording, args.format, &signals, out).map_err(Failure::output)?;
    Ok(ExitCode::SUCCESS)
}

/// Reads a recording, or a part of it. Warns if the file is truncated.
fn open(args: &RecordingArgs) -> Result<Recording, Failure> {
    let file = &args.file;
    let mut recording = recording::open(file).map_err(|error| {
        let fix = "give a file that `elfen shim -o` wrote";
        Failure::new(Status::Failed, named("recording", file), error, fix)
    })?;
    if recording.cut {
        let what = named("recording", file);
        output::warn(&format!("{what}: it is truncated; read up to its last complete chunk"));
    }
    if let Some(bridge) = args.bridge {
        recording.head.bridge_ns = u64::try_from(bridge.as_nanos()).unwrap_or(u64::MAX);
    }
    if let Some((from, to)) = args.between {
        recording.cut_to(from, to);
    }
    Ok(recording)
}

/// The parser for clap: two times, in nanoseconds.
fn between(text: &str) -> Result<(u64, u64), String> {
    let say = || "expected two times from the start, as in 1.2s..1.3s".to_owned();
    let (from, to) = text.split_once("..").ok_or_else(say)?;
    let (from, to) = (time_ns(from).ok_or_else(say)?, time_ns(to).ok_or_else(say)?);
    if from < to { Ok((from, to)) } else { Err("the second time is not after the first".into()) }
}

fn time_ns(text: &str) -> Option<u64> {
    let unit = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (digits, unit) = text.split_at(unit);
    let scale: u64 = match unit {
        "ns" => 1,
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        _ => return None,
    };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let whole = whole.parse::<u64>().ok()?.checked_mul(scale)?;
    if fraction.is_empty() {
        return Some(whole);
    }
    let places = u32::try_from(fraction.len()).ok().filter(|&places| places <= 9)?;
    let part = fraction.parse::<u64>().ok()?.checked_mul(scale)? / 10_u64.pow(places);
    whole.checked_add(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_lies_between_two_times() {
        assert_eq!(between("1.2s..1.3s"), Ok((1_200_000_000, 1_300_000_000)));
        assert_eq!(between("0us..15ms"), Ok((0, 15_000_000)));
        for wrong in
            ["", "1s", "1s..", "..1s", "2s..1s", "1s..1s", "1..2", "x..y", "1.0000000001s..2s"]
        {
            assert!(between(wrong).is_err(), "{wrong:?}");
        }
    }
}
