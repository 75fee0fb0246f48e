//! The subcommands of `elfen-lab`. Each file has the arguments of one subcommand, the call that
//! runs it, and its output.

mod batch_args;
mod bench;
mod calibrate;
mod check;
mod demo;
mod experiment;
mod experiment_args;
mod hps;
mod inject;
mod laboratory;
mod ladder;
mod live_args;
mod live_rows;
mod meter;
mod model_args;
mod model_file;
mod own_args;
mod plan;
mod profileme;
mod report;
mod shadow;
mod simulate;
mod thesis;

use std::io::Write;

use clap::CommandFactory;
use elfen_console::command::Outcome;
use elfen_console::generate;
use elfen_console::reference::{Page, commands_page};

/// The laboratory of Elfen: measures, simulates, plans and reports what `elfen run` does.
///
/// `elfen lab COMMAND` and `elfen-lab COMMAND` are the same.
#[derive(clap::Parser, Debug)]
#[command(name = "elfen-lab", bin_name = "elfen lab", version)]
#[command(after_help = "Example:\n  elfen lab experiment --load 50 --scenario none,borrow-idle")]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    Bench(bench::BenchArgs),
    Calibrate(calibrate::CalibrateArgs),
    Check(check::CheckArgs),
    Demo(demo::DemoArgs),
    Experiment(Box<experiment_args::ExperimentArgs>),
    #[command(hide = true)]
    Generate(generate::GenerateArgs),
    Hps(hps::HpsArgs),
    Inject(inject::InjectArgs),
    Ladder(ladder::LadderArgs),
    Plan(Box<plan::PlanArgs>),
    Profileme(profileme::ProfileMeArgs),
    Report(report::LabReportArgs),
    #[command(hide = true)]
    Serve(check::ServeArgs),
    Shadow(shadow::ShadowArgs),
    Simulate(Box<simulate::SimulateArgs>),
    Thesis(thesis::ThesisArgs),
}

impl Cli {
    /// Runs the subcommand and prints its result to `out`.
    pub fn run(self, out: &mut dyn Write) -> Outcome {
        match self.command {
            Command::Bench(args) => bench::run(&args, out),
            Command::Calibrate(args) => calibrate::run(&args, out),
            Command::Check(args) => check::run(&args, out),
            Command::Demo(args) => demo::run(&args, out),
            Command::Experiment(args) => experiment::run(&args, out),
            Command::Generate(args) => generate::run(&args, &Self::command(), pages, out),
            Command::Hps(args) => hps::run(&args, out),
            Command::Inject(args) => inject::run(&args, out),
            Command::Ladder(args) => ladder::run(&args, out),
            Command::Plan(args) => plan::run(&args, out),
            Command::Profileme(args) => profileme::run(&args, out),
            Command::Report(args) => report::run(&args, out),
            Command::Serve(args) => check::serve(&args),
            Command::Shadow(args) => shadow::run(&args, out),
            Command::Simulate(args) => simulate::run(&args, out),
            Command::Thesis(args) => thesis::run(&args, out),
        }
    }
}

/// The pages of docs/reference that belong to `elfen-lab`.
fn pages(cli: &clap::Command) -> Vec<Page> {
    let intro = "`elfen lab COMMAND` starts `elfen-lab COMMAND`, and `elfen demo` starts \
                 `elfen-lab demo`.";
    vec![("commands-lab.md", commands_page(cli, intro))]
}

#[cfg(test)]
mod tests {
    use elfen_console::usage::help_faults;

    use super::*;

    #[test]
    fn every_command_has_an_example() {
        assert_eq!(help_faults(&Cli::command()), Vec::<String>::new());
    }
}
