//! `elfen lab bench batch`: what a program of the user's own is like as a batch.

mod table;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use elfen_console::failure::{Failure, Status};
use elfen_console::output::{print, warn};
use elfen_console::{duration, usage};
use elfen_machine::lane_args::LaneArgs;
use elfen_run::args::nap::NapName;
use elfen_run::args::poll_timing::PollTimingArgs;

use crate::bench::batch::{self, Error, Order};
use crate::bench::trace::buffer;
use crate::cmd::meter::Meter;
use crate::cmd::{live_args, own_args};
use crate::live;
use table::Report;

const EXAMPLES: &str = "\
Examples:
  sudo elfen lab bench batch --lanes 0:1 -- xz -6 -k -c big.tar
  sudo elfen lab bench batch --inject patch --turns 200us -- ./batch
  sudo elfen lab bench batch --rounds 0 -- ./does-not-end     turns alone

Overlap and reaction are the scheduler's own account, in its trace. Overlap is the time in which a \
task of the program was on the batch lane, in % of the time in which the request was on its own: \
traced once the program has been learned, of whole runs, and reported by the runs. A reaction is \
the time from a turn's beginning until the program is off its lane, if it was there; all of a turn \
that ends first.

A program that prints something else than alone, or ends otherwise, is a failure (exit status 1).";

const WHAT: &str = "measuring the batch";

/// Measure a program of your own as a batch: overlap, reaction, slowdown, output
///
/// A thread plays requests: busy for a turn, then asleep for a time drawn at random. Meanwhile the
/// program runs under `elfen run`, again and again. Then it runs on an idle lane, by turns with
/// `--inject guard`; naps beside others that come by there are left out. Needs root, and tracefs.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    lanes: LaneArgs,

    /// How the program is checked, besides by its guard; `guard` is always measured as well
    #[arg(long, value_name = "HOW", default_value = own_args::AUTO, env = "ELFEN_INJECT",
        value_parser = own_args::inject_parser())]
    inject: String,

    /// How long a request keeps its lane busy, from 50us to 1s
    #[arg(long, value_name = "TIMES", value_delimiter = ',', value_parser = turn,
        default_value = "200us,1ms,10ms")]
    turns: Vec<Duration>,

    /// For how many seconds turns of one length are counted
    #[arg(long, value_name = "SECONDS", default_value_t = 5,
        value_parser = clap::value_parser!(u64).range(1..=60))]
    seconds: u64,

    /// How much of each run is not counted, as the program is learned meanwhile
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration::parse)]
    learn: Duration,

    /// Pairs of whole runs on an idle lane; 0 for none, and for no comparison of what it prints
    #[arg(short = 'n', long, value_name = "N", default_value_t = 5,
        value_parser = clap::value_parser!(u16).range(0..=1000))]
    rounds: u16,

    /// How batch and guard nap
    #[arg(long, value_enum, default_value = "auto", env = "ELFEN_NAP")]
    nap: NapName,

    #[command(flatten)]
    looks: PollTimingArgs,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<OsString>,
}

/// For clap.
fn turn(text: &str) -> Result<Duration, String> {
    let turn = duration::parse(text)?;
    let fits = (Duration::from_micros(50)..=Duration::from_secs(1)).contains(&turn);
    if fits { Ok(turn) } else { Err("a turn takes between 50us and 1s".to_owned()) }
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    usage::check_program("bench batch", &args.program)?;
    let looks = args.looks.timing()?;
    args.program.first().map_or(Ok(()), |program| own_args::check_program(program))?;
    let pair = args.lanes.first_pair()?;
    let Some(batch) = pair.batch.iter().next() else { unreachable!("a pair has a batch lane") };
    let mut options = args.looks.words().to_vec();
    if let Some(nap) = args.nap.name() {
        options.extend(["--nap".to_owned(), nap.to_owned()]);
    }
    let order = Order {
        lanes: (pair.request, batch),
        words: &args.program,
        inject: &args.inject,
        options: &options,
        turns: &args.turns,
        seconds: args.seconds,
        learn: args.learn,
        rounds: args.rounds.into(),
    };
    live::install_signal_handlers().map_err(|error| live_args::failure(WHAT, &error))?;
    let meter = Meter::new();
    let measured = batch::measure(&order, &mut |what| meter.show(what));
    drop(meter);
    let report = Report::of(&order, looks.into(), &measured.map_err(failure)?);
    report.doubts().iter().for_each(|doubt| warn(doubt));
    print(out, args.json, &report, || report.text())?;
    report.different().map_or(Ok(ExitCode::SUCCESS), |why| {
        let fix = "use --inject guard for it, and report this";
        Err(Failure::new(Status::Failed, "comparing with runs alone", why, fix))
    })
}

fn failure(error: Error) -> Failure {
    let error = match error {
        Error::Live(error) => return live_args::failure(WHAT, &error),
        Error::Trace(error) => error,
    };
    let (status, fix) = match &error {
        buffer::Error::NotMounted => {
            (Status::Unsupported, "be root, and `mount -t tracefs nodev /sys/kernel/tracing`")
        }
        buffer::Error::Io(_) => (Status::Unsupported, "be root, and see that memory is free"),
        buffer::Error::Strangers => (Status::Unsupported, "measure outside of containers"),
        buffer::Error::Unreadable(_) => (Status::Failed, "give fewer --seconds"),
    };
    Failure::new(status, "the scheduler's trace", error, fix)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_neither_shorter_nor_longer_than_can_be_played() {
        for fits in ["50us", "1ms", "1s"] {
            assert!(turn(fits).is_ok(), "{fits}");
        }
        for wrong in ["49us", "0ms", "1001ms", "1", "", "long"] {
            assert!(turn(wrong).is_err(), "{wrong}");
        }
    }
}
