//! The operators' subcommands: one file each, with its arguments, one call, and what it prints.
//! Those of performance engineers and researchers are in `experiments` and `elfen-shim`.

mod cut_off;
mod doctor;
mod fenced;
mod generate;
mod help;
mod inject_args;
mod lacking;
mod lanes;
mod metrics;
mod pause;
mod policy_args;
mod run;
mod set;
mod status;
mod summary;
mod top;
mod user;

use std::io::Write;
use std::process::ExitCode;

use clap::CommandFactory;
use elfen_console::failure::Failure;

/// Lends the idle half of an SMT core to batch programs, and takes it back when a request comes.
#[derive(clap::Parser)]
#[command(name = "elfen", version, after_help = help::all())]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(clap::Subcommand)]
pub(crate) enum Command {
    Doctor(doctor::Args),
    #[command(hide = true)]
    Generate(generate::Args),
    Lanes(lanes::Args),
    Metrics(metrics::Args),
    Pause(pause::PauseArgs),
    Resume(pause::ResumeArgs),
    Run(Box<run::Args>),
    Set(set::Args),
    Shim(Box<elfen_shim::cmd::Args>),
    Status(status::Args),
    Tailor(Box<elfen_recorder::cmd::Args>),
    Top(top::Args),
    #[command(flatten)]
    Experiments(Box<experiments::cmd::Command>),
}

/// What clap cannot know of the words that were typed.
pub(crate) fn check(typed: &clap::ArgMatches) -> Result<(), Failure> {
    match typed.subcommand() {
        Some(("run", run)) => fenced::check(run),
        _ => Ok(()),
    }
}

impl Command {
    pub(crate) fn run(self, out: &mut dyn Write) -> Result<ExitCode, Failure> {
        match self {
            Self::Doctor(args) => doctor::run(&args, out),
            Self::Generate(args) => generate::run(&args, &Cli::command(), out),
            Self::Lanes(args) => lanes::run(&args, out),
            Self::Metrics(args) => metrics::run(&args, out),
            Self::Pause(args) => pause::pause(&args, out),
            Self::Resume(args) => pause::resume(&args, out),
            Self::Run(args) => run::run(&args, out),
            Self::Set(args) => set::run(&args, out),
            Self::Shim(args) => elfen_shim::cmd::run(&args, out),
            Self::Status(args) => status::run(&args, out),
            Self::Tailor(args) => elfen_recorder::cmd::run(&args, out),
            Self::Top(args) => top::run(&args, out),
            Self::Experiments(command) => command.run(out),
        }
    }
}
