//! The subcommands: one file each, with its arguments, one call, and what it prints.
//!
//! A subcommand writes its result to `out` (and nothing else there, so that `--json` is one
//! object), warnings to stderr, and returns either an exit status or a [`Failure`].

mod bench;
mod doctor;
pub(crate) mod duration;
pub(crate) mod failure;
mod inject_args;
pub(crate) mod lane_args;
pub(crate) mod lanes;
mod model_args;
mod plan;
mod policy_args;
mod run;
mod set;
mod signals;
mod simulate;
mod status;
mod table;
pub(crate) mod usage;

use std::io::Write;
use std::process::ExitCode;

use failure::Failure;

#[derive(clap::Subcommand)]
pub(crate) enum Command {
    Bench(bench::Args),
    Doctor(doctor::Args),
    Lanes(lanes::Args),
    Plan(plan::Args),
    Run(run::Args),
    Set(set::Args),
    Signals(signals::Args),
    Simulate(simulate::Args),
    Status(status::Args),
    Top(status::TopArgs),
}

impl Command {
    pub(crate) fn run(self, out: &mut dyn Write) -> Result<ExitCode, Failure> {
        match self {
            Self::Bench(args) => bench::run(&args, out),
            Self::Doctor(args) => doctor::run(&args, out),
            Self::Lanes(args) => lanes::run(&args, out),
            Self::Plan(args) => plan::run(&args, out),
            Self::Run(args) => run::run(&args, out),
            Self::Set(args) => set::run(&args, out),
            Self::Signals(args) => signals::run(&args, out),
            Self::Simulate(args) => simulate::run(&args, out),
            Self::Status(args) => status::run(&args, out),
            Self::Top(args) => status::top(&args, out),
        }
    }
}

/// What `--json` prints: one object, and a line break.
pub(crate) fn print_json(
    out: &mut dyn Write,
    value: &impl serde::Serialize,
) -> Result<(), Failure> {
    serde_json::to_writer_pretty(&mut *out, value).map_err(|e| Failure::output(e.into()))?;
    writeln!(out).map_err(Failure::output)
}

/// A warning: one line on stderr, like a failure, and the command goes on.
pub(crate) fn warn(warning: &str) {
    failure::to_stderr(&format!("warning: {warning}"));
}
