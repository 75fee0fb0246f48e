//! `elfen lab bench guard`: what a guard takes from a batch while the request lane idles.

use std::io::Write;
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status};
use elfen_console::table;
use elfen_machine::lane_args::LaneArgs;
use elfen_rt::service::Service;
use elfen_run::args::nap::NapName;
use elfen_run::args::poll_timing::PollTimingArgs;
use elfen_run::poll_timing::PollReport;
use serde::Serialize;

use super::here::run_here;
use crate::bench::distribution::Distribution;
use crate::bench::guard::{self, Taken};

const EXAMPLE: &str = "\
Example:
  elfen lab bench guard --lanes 0:1 --look-every 200us";

/// Measure what a guard takes from a batch while the request lane idles
///
/// Needs no privileges: a service's page that says idle all the time.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Args {
    #[command(flatten)]
    lanes: LaneArgs,

    #[command(flatten)]
    looks: PollTimingArgs,

    /// Pairs of rounds, of half a second each
    #[arg(short = 'n', long, default_value_t = 20,
        value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    looked: PollReport,
    lost_per_million: Lost,
}

#[derive(Serialize)]
struct Lost {
    with: Distribution,
    without: Distribution,
    added: Distribution,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let failed = |error: &dyn std::fmt::Display| {
        let fix = "allow this process both CPUs: see `elfen doctor`";
        Failure::new(Status::Failed, "measuring a guard", error, fix)
    };
    let looks = args.looks.timing()?;
    let name = format!("bench-guard-{}", std::process::id());
    let service = Service::open(&name, 1).map_err(|error| failed(&error))?;
    let request = args.lanes.first_pair()?.request;
    let worker = service.claim(0, request).map_err(|error| failed(&error))?;
    let measured =
        run_here(&args.lanes, NapName::Spin, looks, &name).and_then(|(order, channels)| {
            guard::measure(&order, &channels, args.rounds.into()).map_err(|error| failed(&error))
        });
    drop(worker);
    service.remove().map_err(|error| failed(&error))?;
    let Some(Taken { with, without, added }) = measured? else {
        return Err(failed(&"nothing was measured"));
    };
    let lost_per_million = Lost { with, without, added };
    let report = Report { looked: looks.into(), lost_per_million };
    if args.json {
        elfen_console::output::print_json(out, &report)?;
    } else {
        let Lost { with, without, added } = &report.lost_per_million;
        let rows = [("with", with), ("without", without), ("added", added)].map(|(what, lost)| {
            let figures = [lost.median, lost.p99, lost.max]
                .map(|millionths| format!("{:.3}", millionths / 1e4));
            [what.to_owned()].into_iter().chain(figures).chain([lost.n.to_string()]).collect()
        });
        let text = table::lines(&["guard", "% lost", "p99", "max", "n"], &rows);
        out.write_all(text.as_bytes()).map_err(Failure::output)?;
    }
    Ok(ExitCode::SUCCESS)
}
