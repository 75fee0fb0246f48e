//! `elfen bench reaction`: from request start to batch stopped, from request end to batch running.

use std::io::Write;
use std::process::{Command, ExitCode};
use std::str::FromStr;

use elfen_rt::nap::Kind;
use serde::{Deserialize, Serialize};

use crate::bench::borrower::Inject;
use crate::bench::distribution::Distribution;
use crate::bench::reaction::{self, Reaction};
use crate::cmd::bench::{Signals, run_here};
use crate::cmd::failure::{Failure, Status};
use crate::cmd::lane_args::LaneArgs;
use crate::cmd::look_args::{LookArgs, Looked};
use crate::cmd::run::NapName;
use crate::cmd::{table, warn};
use crate::host::pair::Pair;

const EXAMPLE: &str = "\
Example:
  sudo elfen bench reaction --lanes 0:1 --look-every 200us";

/// Measure how fast a batch leaves its lane, and how fast it is back
///
/// For guards and for checks in the source, by each nap that this machine has. Two pinned threads, timed from outside
/// the runtime.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Args {
    #[command(flatten)]
    lanes: LaneArgs,

    #[command(flatten)]
    looks: LookArgs,

    /// Measure one combination alone, as in inline:spin
    #[arg(long, value_name = "INJECT:NAP")]
    only: Option<Only>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// One way of stopping a batch.
#[derive(Clone, Copy, Debug)]
struct Only {
    inject: Inject,
    kind: Kind,
}

impl FromStr for Only {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let named = |only: &Only| text == format!("{}:{}", only.inject.name(), only.kind.name());
        combinations().find(named).ok_or_else(|| {
            let all =
                combinations().map(|only| format!("{}:{}", only.inject.name(), only.kind.name()));
            format!("choose one of {}", all.collect::<Vec<_>>().join(", "))
        })
    }
}

#[derive(Deserialize, Serialize)]
struct Report {
    #[serde(flatten)]
    looked: Looked,
    reactions: Vec<ReactionReport>,
}

#[derive(Deserialize, Serialize)]
struct ReactionReport {
    inject: String,
    nap: String,
    stop_ns: Distribution,
    resume_ns: Distribution,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let mut reactions = Vec::new();
    match args.only {
        Some(only) => reactions.push(one(args, only)?),
        None => {
            let pair = args.lanes.first_pair()?;
            for only in combinations() {
                reactions.extend(apart(args, &pair, only)?);
            }
        }
    }
    let report = Report { looked: args.looks.looks()?.into(), reactions };
    crate::cmd::print(out, args.json, &report, || report.text())?;
    Ok(ExitCode::SUCCESS)
}

fn combinations() -> impl Iterator<Item = Only> {
    let naps = |inject: Inject| {
        let can = Kind::ALL.into_iter().filter(move |&kind| inject.can_nap(kind));
        can.map(move |kind| Only { inject, kind })
    };
    [Inject::Guard, Inject::Inline].into_iter().flat_map(naps)
}

/// One combination in a process of its own: what checks know of their run is made once in a process.
fn apart(args: &Args, pair: &Pair, only: Only) -> Result<Vec<ReactionReport>, Failure> {
    let what = format!("measuring {}:{}", only.inject.name(), only.kind.name());
    let fix = "try it alone with --only";
    let failed = |why: &dyn std::fmt::Display| Failure::new(Status::Failed, what.clone(), why, fix);
    let mut command = Command::new("/proc/self/exe");
    command.args(["bench", "reaction", "--json", "--only"]);
    command.arg(format!("{}:{}", only.inject.name(), only.kind.name()));
    command.args(args.looks.words());
    command.arg("--lanes").arg(pair.to_string());
    let output = command.output().map_err(|error| failed(&error))?;
    // Its warnings were ours as well.
    let message = String::from_utf8_lossy(&output.stderr);
    let why = message.lines().last().unwrap_or_default().trim_start_matches("elfen: ");
    if output.status.code() == Some(Status::Unsupported as i32) {
        warn(&format!("{}:{} left out: {why}", only.inject.name(), only.kind.name()));
        return Ok(Vec::new());
    }
    if !output.status.success() {
        return Err(failed(&why));
    }
    let report: Report = serde_json::from_slice(&output.stdout).map_err(|error| failed(&error))?;
    Ok(report.reactions)
}

fn one(args: &Args, Only { inject, kind }: Only) -> Result<ReactionReport, Failure> {
    let (order, channels) =
        run_here(&args.lanes, NapName::of(kind), args.looks.looks()?, Signals::Tasks)?;
    let measured = reaction::measure(&order, &channels, inject);
    let Reaction { stop, resume } = measured.map_err(|error| {
        let fix = "make sure that the request lane idles now and then: see `elfen doctor`";
        Failure::new(Status::Failed, "measuring the reaction", error, fix)
    })?;
    let [inject, nap] = [inject.name(), kind.name()].map(str::to_owned);
    Ok(ReactionReport { inject, nap, stop_ns: stop, resume_ns: resume })
}

impl Report {
    fn text(&self) -> String {
        let cells = |what: &str, reaction: &ReactionReport, times: &Distribution| {
            let Distribution { median, p99, max, n } = times;
            let mut row = vec![reaction.inject.clone(), reaction.nap.clone(), what.to_owned()];
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
