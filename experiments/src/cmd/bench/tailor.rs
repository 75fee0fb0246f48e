//! `elfen bench tailor`: what recording costs those who are recorded.

use std::io::Write;
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status};
use elfen_host::affinity;
use elfen_kernel::events;
use serde::Serialize;

use super::rows::{print, row};
use crate::bench::distribution::Distribution;
use crate::bench::tailor::{self, Costs, Error};

const EXAMPLE: &str = "\
Example:
  sudo elfen bench tailor     with and without its programs, by turns";

/// Measure what recording for `elfen tailor` costs
///
/// A hand-over between two threads through pipes, and a request between two threads over loopback,
/// alternating with nothing attached; and what the reader takes for an event.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Args {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    cpu: u32,
    roundtrip_ns: Distribution,
    roundtrip_added_ns: Distribution,
    request_ns: Distribution,
    request_added_ns: Distribution,
    request_added_full_ns: Distribution,
    reader_ns_an_event: Distribution,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let cpu = affinity::allowed().ok().and_then(|cpus| cpus.iter().next()).unwrap_or(0);
    let costs = tailor::measure(cpu).map_err(|error| failure(&error))?;
    let Costs { pipe, pipe_added, request, request_added, request_added_full, reader } = costs;
    let rows = [
        row("a hand-over there and back, not recorded", "ns", &pipe),
        row("added by recording it", "ns", &pipe_added),
        row("a request over loopback, not recorded", "ns", &request),
        row("added by --detail sched", "ns", &request_added),
        row("added by --detail full", "ns", &request_added_full),
        row("the reader, for an event", "ns", &reader),
    ];
    let report = Report {
        cpu,
        roundtrip_ns: pipe,
        roundtrip_added_ns: pipe_added,
        request_ns: request,
        request_added_ns: request_added,
        request_added_full_ns: request_added_full,
        reader_ns_an_event: reader,
    };
    print(out, args.json, &report, &rows)
}

fn failure(error: &Error) -> Failure {
    let (status, fix) = match error {
        Error::Events(events::Error::NotPermitted) => {
            (Status::Failed, "run it as root, or with CAP_BPF and CAP_PERFMON")
        }
        Error::Events(_) => (Status::Unsupported, "use Linux 6.3 or newer"),
        Error::Io(_) | Error::Nothing => (Status::Failed, "try again"),
    };
    Failure::new(status, "measuring what recording costs", error, fix)
}
