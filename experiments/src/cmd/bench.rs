//! `elfen lab bench`: measures what Elfen's parts cost on this machine.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status};
use elfen_console::{output, usage};

use super::meter::Meter;
use super::{live_args, own_args};
use crate::bench::{
    BenchError, batch, check, fdo, guard, hedge, nap, overlap, profile, service, shim, signal,
    tailor,
};

const EXAMPLES: &str = "\
Examples:
  sudo elfen lab bench batch -- xz -6 -k -c a.tar  any program, next to requests
  elfen lab bench check               what each kind of check adds to a call
  elfen lab bench fdo --compile '...'  a program, compiled by its profile
  elfen lab bench hedge               how a hedging proxy hides pauses
  elfen lab bench nap                 how long a lane takes to sleep and to wake
  sudo elfen lab bench overlap        how long a batch runs next to requests
  elfen lab bench profile -- gzip -c f  a program under elfen profile
  sudo elfen lab bench signal         how late the task map is, and its cost
  elfen lab bench service --json      what publishing a request costs
  elfen lab bench shim                what elfen shim observes, and its cost

Rounds are interleaved: each round runs every case once, and each case is compared with the \
baseline of the same round. An arrow shows which direction is better; `95 %` is the interval of \
the median. JSON has a `schema` number, the name of the benchmark, and a list of rows for each \
table; statistics are median, ci95, p90, p99, p999, min, max and n.";

/// Measure the costs of Elfen's parts on this machine
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct BenchArgs {
    #[command(subcommand)]
    benchmark: Benchmark,

    /// Print one JSON object
    #[arg(long, global = true)]
    json: bool,

    /// Write the result to this file
    #[arg(short, long, value_name = "FILE", global = true)]
    output: Option<PathBuf>,
}

#[derive(clap::Subcommand, Debug)]
enum Benchmark {
    Batch(batch::BenchBatchArgs),
    Check(check::BenchCheckArgs),
    Fdo(fdo::BenchFdoArgs),
    Guard(guard::BenchGuardArgs),
    Hedge(hedge::BenchHedgeArgs),
    Nap(nap::BenchNapArgs),
    Overlap(overlap::BenchOverlapArgs),
    Profile(profile::BenchProfileArgs),
    Service(service::BenchServiceArgs),
    Shim(shim::BenchShimArgs),
    Signal(signal::BenchSignalArgs),
    Tailor(tailor::BenchTailorArgs),
}

pub(crate) fn run(args: &BenchArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    if let Benchmark::Batch(batch) = &args.benchmark {
        usage::check_program::<batch::BenchBatchArgs>("lab bench batch", &batch.program)?;
        batch.program.first().map_or(Ok(()), |program| own_args::check_program(program))?;
    }
    if let Benchmark::Profile(profile) = &args.benchmark {
        profile.program.first().map_or(Ok(()), |program| own_args::check_program(program))?;
    }
    if let Some(file) = &args.output {
        live_args::writable(file)?;
    }
    let meter = Meter::new();
    let progress = &mut |what: &str| meter.show(what);
    let (name, report) = match &args.benchmark {
        Benchmark::Batch(args) => ("batch", batch::run(args, progress)),
        Benchmark::Check(args) => ("check", check::run(args, progress)),
        Benchmark::Fdo(args) => ("fdo", fdo::run(args, progress)),
        Benchmark::Guard(args) => ("guard", guard::run(args, progress)),
        Benchmark::Hedge(args) => ("hedge", hedge::run(args, progress)),
        Benchmark::Nap(args) => ("nap", nap::run(args, progress)),
        Benchmark::Overlap(args) => ("overlap", overlap::run(args, progress)),
        Benchmark::Profile(args) => ("profile", profile::run(args, progress)),
        Benchmark::Service(args) => ("service", service::run(args, progress)),
        Benchmark::Shim(args) => ("shim", shim::run(args, progress)),
        Benchmark::Signal(args) => ("signal", signal::run(args, progress)),
        Benchmark::Tailor(args) => ("tailor", tailor::run(args, progress)),
    };
    drop(meter);
    let report = report.map_err(|error| failure(&format!("elfen lab bench {name}"), error))?;
    let print =
        |out: &mut dyn Write| output::print(out, args.json, &report.json(name), || report.text());
    match &args.output {
        None => print(out)?,
        Some(file) => {
            let made = File::create(file);
            print(&mut made.map_err(|error| Failure::unwritable("result", file, error))?)?;
        }
    }
    report.wrong.map_or(Ok(ExitCode::SUCCESS), |why| {
        let fix = "use --checks guard for this program, and report this error";
        Err(Failure::new(Status::Failed, "comparing with runs without Elfen", why, fix))
    })
}

/// Why a command measured nothing.
pub(super) fn failure(what: &str, error: BenchError) -> Failure {
    match error {
        BenchError::Known(failure) => failure,
        BenchError::Live(error) => live_args::failure(what, &error),
        BenchError::Other { status, why, fix } => Failure::new(status, what, why, fix),
    }
}
