//! `elfen shim export`: converts a recording for other tools.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use elfen_console::duration;
use elfen_console::failure::{Failure, Status};

use super::show::{between, open};
use crate::export::{self, ExportFormat};

const EXAMPLES: &str = "\
Examples:
  elfen shim export run.shim --as csv > runs.csv
  elfen shim export run.shim --as perfetto --between 1.2s..1.3s > trace.json
  elfen shim export run.shim --as firefox > profile.json
  elfen shim export run.shim --as folded | flamegraph.pl > flame.svg
  elfen shim export run.shim --as folded --signal task";

/// Convert a recording for other tools
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// A recording that `elfen shim -o` wrote
    file: PathBuf,

    /// csv; perfetto; firefox, for profiler.firefox.com; or folded stacks for flame graphs
    #[arg(long = "as", value_name = "FORM", value_enum, default_value = "csv")]
    format: ExportFormat,

    /// The signal of folded stacks, as in tag [default: function, else tag, else task]
    #[arg(long, value_name = "SIGNAL")]
    signal: Option<String>,

    /// Only a part, between two times from the start, as in 1.2s..1.3s
    #[arg(long, value_name = "FROM..TO", value_parser = between)]
    between: Option<(u64, u64)>,

    /// Join equal tags or numbers through gaps of at most this length [default: as recorded]
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    bridge: Option<Duration>,
}

pub(super) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let recording = open(&args.file, args.between, args.bridge)?;
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
