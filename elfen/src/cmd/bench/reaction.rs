//! `elfen bench reaction`: from request start to batch stopped, from request end to batch running.

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use elfen_rt::nap::{Kind, Nap};
use elfen_rt::signal::control::Settings;
use serde::Serialize;

use crate::bench::distribution::Distribution;
use crate::bench::reaction::{self, Inject, Reaction};
use crate::cmd::failure::{Failure, Status};
use crate::cmd::lane_args::LaneArgs;
use crate::cmd::run::refuse;
use crate::cmd::{duration, table, warn};
use crate::host::run::Order;
use crate::host::run::channels::{Channels, VARIABLE, Wanted};

const EXAMPLE: &str = "\
Example:
  sudo elfen bench reaction --lanes 0:1 --look-every 200us";

/// Measure how fast a batch leaves its lane, and how fast it is back
///
/// For guards, by each nap that this machine has, and for checks in the source. Two pinned threads, timed from outside
/// the runtime.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Args {
    #[command(flatten)]
    lanes: LaneArgs,

    /// How often a guard looks
    #[arg(long, value_name = "TIME", default_value = "500us", value_parser = duration::parse)]
    look_every: Duration,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    look_every_ns: u128,
    reactions: Vec<ReactionReport>,
}

#[derive(Serialize)]
struct ReactionReport {
    inject: &'static str,
    nap: &'static str,
    stop_ns: Distribution,
    resume_ns: Distribution,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let pair = args.lanes.first_pair()?;
    let mut reactions = Vec::new();
    for kind in Kind::ALL {
        match Nap::open(kind) {
            Ok(nap) => reactions.push(one(args, &pair, Inject::Guard, nap)?),
            Err(missing) => warn(&format!("nap {} left out: {missing}", kind.name())),
        }
    }
    reactions.push(one(args, &pair, Inject::Inline, Nap::auto())?);
    let report = Report { look_every_ns: args.look_every.as_nanos(), reactions };
    if args.json {
        crate::cmd::print_json(out, &report)?;
    } else {
        out.write_all(report.text().as_bytes()).map_err(Failure::output)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn one(
    args: &Args,
    pair: &crate::host::pair::Pair,
    inject: Inject,
    nap: Nap,
) -> Result<ReactionReport, Failure> {
    let nap_name = nap.kind().name();
    let nap = Arc::new(nap);
    let order = Order {
        pairs: vec![pair.clone()],
        settings: Settings::BORROW_IDLE,
        slo: None,
        inject: elfen_instrument::Inject::Guard,
        library: None,
        nap: nap.clone(),
        look_every: args.look_every,
        program: OsString::from("bench"),
        arguments: Vec::new(),
    };
    let channels = Channels::open(&order, Wanted::Tasks, None).map_err(|error| refuse(&error))?;
    let inheritance = channels.inheritance().map_err(|error| refuse(&error))?;
    // SAFETY: between two measurements this process has one thread.
    unsafe { std::env::set_var(VARIABLE, inheritance) };
    let measured = reaction::measure(&order, &Arc::new(channels), &nap, inject);
    let Reaction { stop, resume } = measured.map_err(|error| {
        let fix = "make sure that the request lane idles now and then: see `elfen doctor`";
        Failure::new(Status::Failed, "measuring the reaction", error, fix)
    })?;
    Ok(ReactionReport { inject: inject.name(), nap: nap_name, stop_ns: stop, resume_ns: resume })
}

impl Report {
    fn text(&self) -> String {
        let cells = |what: &str, reaction: &ReactionReport, times: &Distribution| {
            let Distribution { median, p99, max, n } = times;
            let mut row =
                vec![reaction.inject.to_owned(), reaction.nap.to_owned(), what.to_owned()];
            row.extend([median, p99, max].map(|ns| format!("{:.2}", ns / 1000.0)));
            row.push(n.to_string());
            row
        };
        let both = |reaction: &ReactionReport| {
            [
                cells("stop", reaction, &reaction.stop_ns),
                cells("resume", reaction, &reaction.resume_ns),
            ]
        };
        let rows: Vec<Vec<String>> = self.reactions.iter().flat_map(both).collect();
        let heading = ["inject", "nap", "us until", "median", "p99", "max", "n"];
        table::lines(&heading, &rows)
    }
}
