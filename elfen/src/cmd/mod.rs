//! The subcommands: one file each, with its arguments, one call, and what it prints.
//!
//! A subcommand writes its result to `out` (and nothing else there, so that `--json` is one
//! object), warnings to stderr, and returns either an exit status or a [`Failure`].

mod bench;
mod calibrate;
mod config;
mod demo;
mod doctor;
pub(crate) mod duration;
mod experiment;
pub(crate) mod failure;
mod generate;
mod help;
mod inject_args;
mod lacking;
pub(crate) mod lane_args;
pub(crate) mod lanes;
mod live_args;
mod live_rows;
mod look_args;
mod meter;
mod metrics;
mod model_args;
mod model_file;
mod plan;
mod policy_args;
mod report;
mod run;
mod serve;
mod set;
pub(crate) mod settings;
mod shell;
mod signals;
mod simulate;
mod status;
mod table;
mod top;
pub(crate) mod usage;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use failure::Failure;

/// Lends the idle half of an SMT core to batch programs, and hands it back in microseconds.
#[derive(clap::Parser)]
#[command(name = "elfen", version, after_help = help::all())]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(clap::Subcommand)]
pub(crate) enum Command {
    Bench(bench::Args),
    Calibrate(calibrate::Args),
    Config(config::Args),
    Demo(demo::Args),
    Doctor(doctor::Args),
    Experiment(experiment::Args),
    #[command(hide = true)]
    Generate(generate::Args),
    Lanes(lanes::Args),
    Metrics(metrics::Args),
    Plan(plan::Args),
    Report(report::Args),
    Run(run::Args),
    Serve(serve::Args),
    Set(set::Args),
    Signals(signals::Args),
    Simulate(simulate::Args),
    Status(status::Args),
    Top(top::Args),
}

impl Command {
    pub(crate) fn run(self, out: &mut dyn Write) -> Result<ExitCode, Failure> {
        match self {
            Self::Bench(args) => bench::run(&args, out),
            Self::Calibrate(args) => calibrate::run(&args, out),
            Self::Config(args) => config::run(&args, out),
            Self::Demo(args) => demo::run(&args, out),
            Self::Doctor(args) => doctor::run(&args, out),
            Self::Experiment(args) => experiment::run(&args, out),
            Self::Generate(args) => generate::run(&args, out),
            Self::Lanes(args) => lanes::run(&args, out),
            Self::Metrics(args) => metrics::run(&args, out),
            Self::Plan(args) => plan::run(&args, out),
            Self::Report(args) => report::run(&args, out),
            Self::Run(args) => run::run(&args, out),
            Self::Serve(args) => serve::run(&args, out),
            Self::Set(args) => set::run(&args, out),
            Self::Signals(args) => signals::run(&args, out),
            Self::Simulate(args) => simulate::run(&args, out),
            Self::Status(args) => status::run(&args, out),
            Self::Top(args) => top::run(&args, out),
        }
    }
}

/// Prints a result: for scripts as one JSON object, for people as text.
pub(crate) fn print(
    out: &mut dyn Write,
    json: bool,
    result: &impl serde::Serialize,
    text: impl FnOnce() -> String,
) -> Result<(), Failure> {
    match json {
        true => print_json(out, result),
        false => out.write_all(text().as_bytes()).map_err(Failure::output),
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

/// Whether to colour: on a terminal, unless the user or the terminal does not want it.
pub(crate) fn colours() -> bool {
    let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    std::io::stdout().is_terminal() && !unwanted && !dumb
}
