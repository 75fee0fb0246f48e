//! The subcommands that measure, simulate and plan: one file each, with its arguments, one call,
//! and what it prints. `elfen` mounts them beside its own.

mod batch_args;
mod bench;
mod calibrate;
mod check_thesis;
mod demo;
mod expected;
mod experiment;
mod experiment_args;
mod ladder;
mod live_args;
mod live_rows;
mod meter;
mod model_args;
mod model_file;
mod own_args;
mod plan;
mod report;
mod service_args;
mod simulate;

use std::io::Write;
use std::process::ExitCode;

use elfen_console::failure::Failure;

#[derive(clap::Subcommand, Debug)]
pub enum Command {
    Bench(bench::Args),
    Calibrate(calibrate::Args),
    Demo(demo::Args),
    Experiment(Box<experiment_args::Args>),
    Plan(Box<plan::Args>),
    Report(report::Args),
    Simulate(Box<simulate::Args>),
}

impl Command {
    /// Does what was asked for, and prints it to `out`.
    pub fn run(self, out: &mut dyn Write) -> Result<ExitCode, Failure> {
        match self {
            Self::Bench(args) => bench::run(&args, out),
            Self::Calibrate(args) => calibrate::run(&args, out),
            Self::Demo(args) => demo::run(&args, out),
            Self::Experiment(args) => experiment::run(&args, out),
            Self::Plan(args) => plan::run(&args, out),
            Self::Report(args) => report::run(&args, out),
            Self::Simulate(args) => simulate::run(&args, out),
        }
    }
}
