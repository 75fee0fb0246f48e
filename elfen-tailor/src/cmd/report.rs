//! `elfen tailor report`: explains why the slowest requests of a trace were slow.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::draw;
use crate::rank::SlowThreshold;
use crate::report::report;
use crate::trace::{self, Trace};
use elfen_console::duration;
use elfen_console::failure::Failure;
use elfen_console::output::print;

use super::failure::{self, DEFAULT_TRACE};

const EXAMPLES: &str = "\
Examples:
  elfen tailor report elfen.trace              the slowest 1 %
  elfen tailor report web.trace --slow 10ms    all above 10 ms
  elfen tailor report web.trace --json | jq '.causes[0]'
  elfen tailor report web.trace --without preempted --without io:fsync
  elfen tailor report web.trace --html web.html --perfetto web.json

Shares are of the time that slow requests would have saved without their causes. If the service \
works on several requests at once, shares are of their whole time, and the tail without a cause is \
not predicted.";

/// Explain why the slowest requests of a trace were slow
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct ReportArgs {
    /// A file of `elfen tailor record`
    #[arg(value_name = "FILE", default_value = DEFAULT_TRACE)]
    trace: PathBuf,

    /// Which requests are slow: above a quantile such as p99 or p99.9, or above a time
    #[arg(long, value_name = "LIMIT", default_value = "p99", value_parser = slow)]
    slow: SlowThreshold,

    /// How many of the slowest requests to show in detail
    #[arg(short = 'k', long, value_name = "N", default_value_t = 10)]
    slowest: usize,

    /// Predict the latencies without this cause, or without all causes of a kind, as `preempted`;
    /// repeat it for several causes at once
    #[arg(long, value_name = "CAUSE")]
    without: Vec<String>,

    /// The file for a page with pictures of the slowest requests
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// The file for threads and the slowest requests as Chrome trace JSON, which ui.perfetto.dev
    /// opens
    #[arg(long, value_name = "FILE")]
    perfetto: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn slow(text: &str) -> Result<SlowThreshold, String> {
    let expected = || "it must be a quantile below p100, as p99.9, or a time, as 10ms".to_owned();
    let Some(percent) = text.strip_prefix('p') else {
        let time = duration::parse(text).map_err(|_| expected())?;
        let ns = u64::try_from(time.as_nanos()).map_err(|_| expected())?;
        return if ns > 0 { Ok(SlowThreshold::AboveNs(ns)) } else { Err(expected()) };
    };
    let (whole, part) = percent.split_once('.').unwrap_or((percent, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(part) || whole.len() > 2 || part.len() > 4 {
        return Err(expected());
    }
    let number: u64 = format!("{whole}{part:0<4}").parse().map_err(|_| expected())?;
    if number > 0 { Ok(SlowThreshold::Quantile(number)) } else { Err(expected()) }
}

pub(super) fn run(args: &ReportArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let unreadable = |error| failure::unreadable(&args.trace, &error);
    let file = File::open(&args.trace).map_err(|error| unreadable(trace::Error::Read(error)))?;
    let trace = Trace::read(file).map_err(unreadable)?;
    let what = elfen_console::failure::named("trace", &args.trace);
    let shown = report(&trace, args.slow, args.slowest, &args.without)
        .map_err(|nothing| failure::nothing(&what, &nothing))?;
    if let Some(path) = &args.html {
        write("page", path, |file| file.write_all(draw::page(&shown, &trace).as_bytes()))?;
    }
    if let Some(path) = &args.perfetto {
        write("Perfetto trace", path, |file| draw::write_perfetto(&shown, &trace, file))?;
    }
    print(out, args.json, &shown, || shown.text())?;
    Ok(ExitCode::SUCCESS)
}

fn write(
    what: &str,
    path: &Path,
    content: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<(), Failure> {
    let written = File::create(path).map(BufWriter::new).and_then(|mut file| {
        content(&mut file)?;
        file.flush()
    });
    written.map_err(|error| Failure::unwritable(what, path, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_quantiles_or_times() {
        assert_eq!(slow("p99"), Ok(SlowThreshold::Quantile(990_000)));
        assert_eq!(slow("p99.95"), Ok(SlowThreshold::Quantile(999_500)));
        assert_eq!(slow("10ms"), Ok(SlowThreshold::AboveNs(10_000_000)));
        for wrong in ["p100", "0", "p0", "0ms", "p", "p99.", "p.5", "99", "p-1", "", "p99.99999"] {
            assert!(slow(wrong).is_err(), "{wrong}");
        }
    }
}
