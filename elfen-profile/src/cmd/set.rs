//! `elfen profile set`: changes a recording that runs.

use std::io::Write;
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status};
use elfen_console::output;

use super::record::{parse_cost, parse_count, parse_load};
use crate::control::{ControlError, EDGES_MAX, Settings, ask};
use crate::profile::Source;

const AFTER: &str = "\
Without a setting, prints what the recording has cost so far. `elfen top` lists all recordings.

Examples:
  elfen profile set \"$(pgrep -o redis-server)\" --cost 0.2%
  elfen profile set 4711 --edges 500 --json";

/// Change a recording of `elfen profile record` while it runs
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER)]
pub(super) struct SetArgs {
    /// The process that is recorded: the first one of the program
    #[arg(value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pid: u32,

    /// The part of the program's time that bursts or shadows may cost
    #[arg(long, value_name = "PERCENT", value_parser = parse_cost)]
    cost: Option<f64>,

    /// Bursts: the edges of one burst
    #[arg(long, value_name = "COUNT",
          value_parser = clap::value_parser!(u32).range(1..=i64::from(EDGES_MAX)))]
    edges: Option<u32>,

    /// Shadows: the CPUs that they may use, on average
    #[arg(long, value_name = "CPUS", value_parser = parse_load)]
    load: Option<f64>,

    /// Shadows: the instructions of one shadow
    #[arg(long, value_name = "COUNT", value_parser = parse_count)]
    sample: Option<u64>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &SetArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let &SetArgs { pid, cost, edges, load, sample, json } = args;
    let settings = Settings { cost, edges, load, sample };
    let failed = |error| {
        let fix = match error {
            ControlError::Nothing => "name the process that `elfen profile record` has started",
            ControlError::Forbidden => "run this as that user, or as root",
            ControlError::Silent(_) => "try again",
        };
        Failure::new(Status::Failed, format!("process {pid}"), error, fix)
    };
    let is_by_shadows = ask(pid, &Settings::default()).map_err(failed)?.by == Source::Shadows;
    let (unknown, known) = match is_by_shadows {
        true => (edges.is_some(), "--cost, --load and --sample"),
        false => (load.is_some() || sample.is_some(), "--cost and --edges"),
    };
    if unknown {
        let by = if is_by_shadows { "shadows" } else { "bursts" };
        let (why, fix) = (format!("it is recorded by {by}"), format!("use {known}"));
        return Err(Failure::new(Status::Usage, format!("process {pid}"), why, &fix));
    }
    let recording = ask(pid, &settings).map_err(failed)?;
    output::print(out, json, &recording, || {
        let by = if is_by_shadows { "shadows" } else { "bursts" };
        format!(
            "process {pid}: {} {by}, cost {:.2} % of at most {:.2} %, and {:.2} % of a CPU\n",
            recording.bursts,
            recording.cost_percent,
            recording.may_cost_percent,
            recording.own_percent
        )
    })?;
    Ok(ExitCode::SUCCESS)
}
