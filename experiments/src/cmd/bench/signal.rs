//! `elfen lab bench signal`: how late the task map is, and what it costs.

use std::io::Write;
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status};
use elfen_kernel::{holders, task_map};
use elfen_machine::lane_args::LaneArgs;
use elfen_run::args::signals;
use serde::Serialize;

use super::rows::{print, row};
use crate::bench::distribution::Distribution;
use crate::bench::signal::{self, Costs, Cpus, Error};

const EXAMPLE: &str = "\
Example:
  sudo elfen lab bench signal --lanes 0:1     switches on CPU 0, seen from CPU 1";

/// Measure how late the task map is, and what it costs
///
/// The delay from a context switch to a reader on another CPU, what the program adds to a switch
/// (alternating with the program detached), and the cost of one sample.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Args {
    #[command(flatten)]
    lanes: LaneArgs,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    request_cpu: u32,
    reader_cpu: u32,
    delay_ns: Distribution,
    /// On a watched CPU, where each switch is timed.
    added_per_switch_ns: Distribution,
    added_per_unwatched_switch_ns: Distribution,
    switch_ns: Distribution,
    sample_ns: Distribution,
    empty_loop_ns: Distribution,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let pair = args.lanes.first_pair()?;
    let reader =
        pair.batch.iter().next().unwrap_or_else(|| unreachable!("a pair has a batch lane"));
    let cpus = Cpus { request: pair.request, reader };
    refuse_if_attached()?;
    let Costs { delay, switch, added_watched, added_unwatched, sample, empty_loop } =
        signal::measure(cpus).map_err(|error| failure(&error))?;
    let rows = [
        row("from a switch until another CPU sees it", "ns", &delay),
        row("a context switch without the program", "ns", &switch),
        row("added on a watched CPU", "ns", &added_watched),
        row("added on any other CPU", "ns", &added_unwatched),
        row("one sample", "ns", &sample),
        row("the same loop without it", "ns", &empty_loop),
    ];
    let report = Report {
        request_cpu: cpus.request,
        reader_cpu: cpus.reader,
        delay_ns: delay,
        added_per_switch_ns: added_watched,
        added_per_unwatched_switch_ns: added_unwatched,
        switch_ns: switch,
        sample_ns: sample,
        empty_loop_ns: empty_loop,
    };
    print(out, args.json, &report, &rows)
}

/// With a program attached by another process there is no baseline.
fn refuse_if_attached() -> Result<(), Failure> {
    // Who may not look may not attach either, which is said then.
    if task_map::is_attached() != Some(true) {
        return Ok(());
    }
    let holders = holders::find().ok().flatten().unwrap_or_default().into_iter();
    let named: Vec<_> = holders.map(|one| format!("{} ({})", one.pid, one.command)).collect();
    let why = format!(
        "the program is attached already, so there is nothing to compare with; held by {}",
        named.join(", ")
    );
    Err(Failure::new(Status::Failed, "measuring the task map", why, "end these processes"))
}

fn failure(error: &Error) -> Failure {
    match error {
        Error::Map(error) => signals::failure("measuring the task map", error),
        _ => {
            let fix = "see `elfen lanes` for CPUs that can be used";
            Failure::new(Status::Failed, "measuring the task map", error, fix)
        }
    }
}
