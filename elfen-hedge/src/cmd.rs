//! The command `elfen-hedge`: its arguments, its call of the proxy, and its output.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser};
use elfen_console::command;
use elfen_console::failure::{Failure, Status, to_stderr};
use elfen_console::generate;
use elfen_console::output::print;
use elfen_console::reference::commands_page;
use elfen_tailor::cmd::failure::no_events;
use elfen_tailor::service::NotFound;
use elfen_tailor::signals::EndSignals;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::observation::{Observation, ObservationError};
use crate::policy::{Policy, Server};
use crate::proxy::Proxy;
use crate::settings::Settings;
use crate::shared::{Counts, Done};
use crate::test_server;

const AFTER: &str = "\
Both servers must give equivalent answers. With `look`, the default, they must run on this \
machine, and you must be allowed to see their processes: as root, or as their user.

Ctrl-C or SIGTERM ends the proxy, which then prints its counts.

Examples:
  elfen-hedge --listen :8080 --to :8081 --backup :8082
  elfen-hedge --listen 0.0.0.0:80 --public --to 10.0.0.1:80 \\
      --backup 10.0.0.2:80 --policy after=p95

Exit status: 0 after Ctrl-C or SIGTERM, 1 for failures, 2 for wrong arguments, 3 if this machine \
lacks a requirement of the policy.";

/// Also send requests to a second server while the first one is stalled
///
/// An HTTP/1.1 proxy in front of two servers. If a server has not run between two polls, its
/// requests in flight are also sent to the backup, unless the backup is stalled too. New requests
/// then go to the backup. The client gets only the first answer.
#[derive(Parser, Debug)]
#[command(name = "elfen-hedge", version, after_help = AFTER)]
#[command(subcommand_negates_reqs = true, args_conflicts_with_subcommands = true)]
#[command(disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Hidden>,

    #[command(flatten)]
    serve: Option<Settings>,
}

#[derive(clap::Subcommand, Debug)]
enum Hidden {
    #[command(hide = true)]
    Answer(Answer),
    #[command(hide = true)]
    Completions(Completions),
    #[command(hide = true)]
    Reference(Reference),
}

/// Run a server for tests of `elfen-hedge`, until standard input ends
#[derive(clap::Args, Debug)]
#[command(after_help = "Example:\n  elfen-hedge answer first")]
struct Answer {
    /// The name in its answers
    name: String,

    /// The port to listen on; 0 picks a free one
    #[arg(long, value_name = "PORT", default_value = "0")]
    port: u16,
}

/// Write completions for bash, zsh and fish into a folder, for packages
#[derive(clap::Args, Debug)]
#[command(after_help = "Example:\n  elfen-hedge completions /tmp")]
struct Completions {
    /// The folder, which must exist
    folder: PathBuf,
}

/// Write the page of docs/reference into a folder
#[derive(clap::Args, Debug)]
#[command(after_help = "Example:\n  elfen-hedge reference docs/reference")]
struct Reference {
    /// The folder, which must exist
    folder: PathBuf,
}

/// Runs the command of this process.
pub fn main() -> ExitCode {
    command::main::<Cli>(
        |_| Ok(()),
        |cli, out| match cli {
            Cli { command: Some(Hidden::Answer(args)), .. } => answer(&args),
            Cli { command: Some(Hidden::Completions(args)), .. } => completions(&args, out),
            Cli { command: Some(Hidden::Reference(args)), .. } => reference(&args, out),
            Cli { serve: Some(settings), .. } => serve(settings, out),
            Cli { serve: None, .. } => {
                let fix = "see `elfen-hedge --help`";
                Err(Failure::new(Status::Usage, "arguments", "none", fix))
            }
        },
    )
}

fn answer(args: &Answer) -> Result<ExitCode, Failure> {
    test_server::serve(&args.name, args.port).map_err(|error| {
        Failure::new(Status::Failed, "serving requests", error, "see `ulimit -n`")
    })?;
    Ok(ExitCode::SUCCESS)
}

fn completions(args: &Completions, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    // A command without the hidden subcommands.
    let mut command = Settings::augment_args(clap::Command::new("elfen-hedge"));
    generate::write_completions(&mut command, &args.folder, out)
}

fn reference(args: &Reference, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let intro = "The proxy is a program of its own, apart from `elfen`.";
    let page = ("commands-hedge.md", commands_page(&Cli::command(), intro));
    generate::write_reference(&[page], &args.folder, out)
}

/// Starts the observation of the servers, if the policy needs it.
fn observe(settings: &Settings) -> Result<Option<Observation>, Failure> {
    let ports = Server::BOTH.map(|server| settings.address(server).port());
    let observed = match settings.policy {
        Policy::Look => Observation::by_clocks(ports),
        Policy::Hazard => Observation::by_events(ports),
        Policy::None | Policy::After(_) | Policy::AfterP95 => return Ok(None),
    };
    observed.map(Some).map_err(|error| match error {
        ObservationError::Server(why) => not_visible(&why),
        ObservationError::Events(error) => no_events(&error),
    })
}

/// Reports a server whose process this user may not see. A server that has not started is not an
/// error.
fn not_visible(why: &NotFound) -> Failure {
    let why = match why {
        NotFound::Hidden(port) => format!("you may not see which process listens on port {port}"),
        other => format!("{other:?}"),
    };
    let fix = "run it as root or as the servers' user, or use --policy after=p95";
    Failure::new(Status::Failed, "finding the servers", why, fix)
}

/// Raises the limit of open descriptors, usually 1,024. Each client may take three.
fn raise_descriptors() {
    if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // With fewer descriptors, connections wait longer.
        let _fewer = setrlimit(Resource::RLIMIT_NOFILE, most, most);
    }
}

fn serve(settings: Settings, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    settings.check()?;
    let (listen, json) = (settings.listen, settings.json);
    let failed = |error: std::io::Error| {
        let what = format!("serving on {listen}");
        Failure::new(Status::Failed, what, error, "choose another --listen, or see `ulimit -n`")
    };
    raise_descriptors();
    // This comes before any thread starts, because threads inherit the blocked signals.
    let ending = EndSignals::new().map_err(failed)?;
    let observation = observe(&settings)?;
    let proxy = Proxy::open(settings, observation).map_err(failed)?;
    to_stderr(&format!("listening on {}", proxy.address().map_err(failed)?));
    let done = proxy.run(&ending).map_err(failed)?;
    print(out, json, &done, || text(&done))?;
    Ok(ExitCode::SUCCESS)
}

fn text(Done { policy, proxy }: &Done) -> String {
    let Counts { moved, unanswered, late, replayed, refused, timed_out, evicted } = proxy;
    format!(
        "{} requests; sent twice: {} duplicates, of which {} were answered first, and {} retries; \
         {} not sent twice because of the budget\n\
         servers swapped {} times, {moved} requests moved from a server that was down, {replayed} \
         recorded requests replayed\n\
         {unanswered} without an answer, {late} late answers, {refused} refused; clients: \
         {timed_out} timed out, {evicted} replaced by new clients\n",
        policy.requests,
        policy.duplicates,
        policy.won_by_backup,
        policy.retries,
        policy.refused_by_budget,
        policy.swaps,
    )
}
