//! The subcommands of `elfen`. Each file parses arguments, calls a library, and prints the result.
//!
//! The subcommands of Shim, Tailor and the profiler are in the crates `elfen-shim`, `elfen-tailor`
//! and `elfen-profile`. `lab` starts `elfen-lab`.

mod checks_args;
mod doctor;
mod fence_run;
mod help;
mod isolation;
mod lab;
mod lanes;
mod metrics;
mod pause;
mod policy_args;
mod reference;
mod run;
mod set;
mod status;
mod top;
mod unsupported;
mod user;

use std::io::Write;

use clap::CommandFactory;
use elfen_console::command::Outcome;
use elfen_console::failure::Failure;
use elfen_console::generate;

/// Run batch programs on the idle hyperthreads of latency-critical services
#[derive(clap::Parser)]
#[command(name = "elfen", version, help_template = help::TEMPLATE, after_help = help::EXAMPLES)]
#[command(after_long_help = help::all())]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(clap::Subcommand)]
pub(crate) enum Command {
    Demo(lab::DemoArgs),
    Doctor(doctor::DoctorArgs),
    #[command(hide = true)]
    Generate(generate::GenerateArgs),
    Lab(lab::LabArgs),
    Lanes(lanes::LanesArgs),
    Metrics(metrics::MetricsArgs),
    Pause(pause::PauseArgs),
    Profile(elfen_profile::cmd::ProfileArgs),
    Resume(pause::ResumeArgs),
    Run(Box<run::RunArgs>),
    Set(set::SetArgs),
    Shim(Box<elfen_shim::cmd::ShimArgs>),
    Status(status::StatusArgs),
    Tailor(Box<elfen_tailor::cmd::TailorArgs>),
    Top(top::TopArgs),
}

/// Rejects combinations of arguments that clap cannot reject.
pub(crate) fn refuse(typed: &clap::ArgMatches) -> Result<(), Failure> {
    match typed.subcommand() {
        Some(("run", run)) => fence_run::refuse_options(run),
        _ => Ok(()),
    }
}

impl Command {
    pub(crate) fn run(self, out: &mut dyn Write) -> Outcome {
        match self {
            Self::Demo(args) => lab::demo(&args),
            Self::Doctor(args) => doctor::run(&args, out),
            Self::Generate(args) => generate::run(&args, &Cli::command(), reference::pages, out),
            Self::Lab(args) => lab::run(&args),
            Self::Lanes(args) => lanes::run(&args, out),
            Self::Metrics(args) => metrics::run(&args, out),
            Self::Pause(args) => pause::pause(&args, out),
            Self::Profile(args) => elfen_profile::cmd::run(&args, out),
            Self::Resume(args) => pause::resume(&args, out),
            Self::Run(args) => run::run(&args, out),
            Self::Set(args) => set::run(&args, out),
            Self::Shim(args) => elfen_shim::cmd::run(&args, out),
            Self::Status(args) => status::run(&args, out),
            Self::Tailor(args) => elfen_tailor::cmd::run(&args, out),
            Self::Top(args) => top::run(&args, out),
        }
    }
}
