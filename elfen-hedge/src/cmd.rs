//! The command `elfen-hedge`: its arguments, one call, and what it prints.

use std::ffi::OsString;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, CommandFactory, FromArgMatches, Parser};
use elfen_console::duration;
use elfen_console::failure::{Failure, Status, to_stderr};
use elfen_console::generate;
use elfen_console::output::print;
use elfen_console::usage;
use elfen_hedge_policy::Policy;
use elfen_tailor::cmd::failure::no_events;
use elfen_tailor::service::NotFound;
use elfen_tailor::signals::EndSignals;
use hyper::Method;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::clients::Limits;
use crate::hazard::{AttachError, Hazards};
use crate::policy_driver::Observation;
use crate::proxy::Proxy;
use crate::shared::{Counts, Done, Plan};
use crate::test_server;
use crate::watch::WatchedServers;

const AFTER: &str = "\
Both servers must give equivalent answers. With `look`, the default, they must run on this \
machine, and you must be allowed to see their processes: as root, or as their user.

Ctrl-C or SIGTERM ends it, and it prints what it did.

Examples:
  elfen-hedge --listen :8080 --to :8081 --backup :8082
  elfen-hedge --listen 0.0.0.0:80 --public --to 10.0.0.1:80 \\
      --backup 10.0.0.2:80 --policy after=p95

Exit status: 0 after Ctrl-C or SIGTERM, 1 for failures, 2 for wrong arguments, 3 if this \
machine lacks what the policy needs.";

/// Send requests to a second server as well while the first one stands still
///
/// An HTTP/1.1 proxy in front of two servers. If a server has not run between two polls, its
/// requests in flight are sent to the backup too, unless the backup stands still as well. New
/// requests follow. The client gets the first answer, and no other.
#[derive(Parser, Debug)]
#[command(name = "elfen-hedge", version, after_help = AFTER)]
#[command(subcommand_negates_reqs = true, args_conflicts_with_subcommands = true)]
#[command(disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Hidden>,

    #[command(flatten)]
    serve: Option<Serve>,
}

#[derive(clap::Subcommand, Debug)]
enum Hidden {
    #[command(hide = true)]
    Answer(Answer),
    #[command(hide = true)]
    Completions(Completions),
}

#[derive(clap::Args, Debug)]
struct Serve {
    /// Where clients connect to; `:8080` is on loopback
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    listen: SocketAddr,

    /// Listen on an address that other machines may reach, without TLS or authentication
    #[arg(long)]
    public: bool,

    /// The server
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    to: SocketAddr,

    /// A second, equivalent server
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    backup: SocketAddr,

    /// `look`: poll whether the servers run; `hazard`: the kernel reports stops and collections as
    /// they happen; `after=TIME`, `after=p95` of the last requests, or `none`
    #[arg(long, value_name = "POLICY", default_value = "look", value_parser = policy)]
    policy: Policy,

    /// Interval of polls
    #[arg(long, value_name = "TIME", default_value = "500us", value_parser = duration::parse)]
    poll_interval: Duration,

    /// Largest part of all requests that is sent a second time, as a duplicate or as a retry
    #[arg(long, value_name = "PART", default_value = "5%", value_parser = part)]
    max_extra: u64,

    /// Methods whose requests may be sent a second time: only idempotent ones
    #[arg(long, value_name = "METHODS", default_value = "GET,HEAD", value_delimiter = ',',
        value_parser = method)]
    methods: Vec<Method>,

    /// Warm a restarted server with this many recorded GET and HEAD requests. Requests with
    /// credentials are not recorded
    #[arg(long, value_name = "N", default_value_t = 0,
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(0..=10_000))]
    replay: usize,

    /// Time limit for the beginning of an answer; then the client gets status 504
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration::parse)]
    give_up: Duration,

    /// Time limit for the head of a request
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration::parse)]
    head_timeout: Duration,

    /// Time limit for the body of a request, after its head
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration::parse)]
    body_timeout: Duration,

    /// Time limit of a client without a request, or of one that takes nothing of its answer
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration::parse)]
    idle_timeout: Duration,

    /// Limit of clients at once. A further client replaces the one that has waited longest without
    /// a request
    #[arg(long, value_name = "N", default_value_t = 1024,
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=100_000))]
    max_clients: usize,

    /// Trust clients, which are your own proxies: pass on their `Forwarded` and `X-Forwarded-*`
    #[arg(long)]
    trust_forwarded: bool,

    /// Print one JSON object at the end
    #[arg(long)]
    json: bool,
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

fn address(text: &str) -> Result<SocketAddr, String> {
    let full = match text.strip_prefix(':') {
        Some(port) => format!("{}:{port}", Ipv4Addr::LOCALHOST),
        None => text.to_owned(),
    };
    full.parse().map_err(|_| "it must be an IP address and a port, as 127.0.0.1:8080".to_owned())
}

fn policy(text: &str) -> Result<Policy, String> {
    let expected =
        || "it must be look, hazard, after=TIME as after=2ms, after=p95, or none".to_owned();
    match text.split_once('=') {
        None if text == "look" => Ok(Policy::Look),
        None if text == "hazard" => Ok(Policy::Hazard),
        None if text == "none" => Ok(Policy::None),
        Some(("after", "p95")) => Ok(Policy::AfterP95),
        Some(("after", time)) => {
            let time = duration::parse(time).map_err(|_| expected())?;
            u64::try_from(time.as_nanos()).map(Policy::After).map_err(|_| expected())
        }
        _ => Err(expected()),
    }
}

/// A percentage, as parts of a million.
fn part(text: &str) -> Result<u64, String> {
    let expected = || "it must be a percentage up to 100%, as 5% or 0.5%".to_owned();
    let number = text.strip_suffix('%').ok_or_else(expected)?;
    let (whole, rest) = number.split_once('.').unwrap_or((number, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(rest) || whole.len() > 3 || rest.len() > 4 {
        return Err(expected());
    }
    let part: u64 = format!("{whole}{rest:0<4}").parse().map_err(|_| expected())?;
    if part <= 1_000_000 { Ok(part) } else { Err(expected()) }
}

fn method(text: &str) -> Result<Method, String> {
    const IDEMPOTENT: [Method; 6] =
        [Method::GET, Method::HEAD, Method::OPTIONS, Method::TRACE, Method::PUT, Method::DELETE];
    let known = IDEMPOTENT.iter().find(|method| method.as_str() == text).cloned();
    known.ok_or_else(|| {
        let names = IDEMPOTENT.each_ref().map(Method::as_str);
        format!("only these methods may be sent twice: {}", names.join(", "))
    })
}

/// Whether an address is one of this machine: a socket can't be bound to any other.
fn is_here(server: SocketAddr) -> bool {
    UdpSocket::bind((server.ip(), 0)).is_ok()
}

/// Runs the command and returns its exit status.
pub fn main(words: &[OsString], out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let parsed = Cli::command().try_get_matches_from(words);
    match parsed.and_then(|typed| Cli::from_arg_matches(&typed)) {
        Ok(Cli { command: Some(Hidden::Answer(args)), .. }) => answer(&args),
        Ok(Cli { command: Some(Hidden::Completions(args)), .. }) => completions(&args, out),
        Ok(Cli { serve: Some(args), .. }) => serve(&args, out),
        Ok(Cli { serve: None, .. }) => {
            Err(Failure::new(Status::Usage, "arguments", "none", "see `elfen-hedge --help`"))
        }
        Err(error) => usage::report(&error, &Cli::command(), words, out),
    }
}

fn answer(args: &Answer) -> Result<ExitCode, Failure> {
    test_server::serve(&args.name, args.port).map_err(|error| {
        Failure::new(Status::Failed, "serving requests", error, "see `ulimit -n`")
    })?;
    Ok(ExitCode::SUCCESS)
}

fn completions(args: &Completions, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    // Without hidden subcommands.
    let mut command = Serve::augment_args(clap::Command::new("elfen-hedge"));
    generate::write_completions(&mut command, &args.folder, out)
}

impl Serve {
    /// Rejects arguments that would send requests back to the proxy or twice to one server, or
    /// expose them by accident.
    fn check(&self) -> Result<(), Failure> {
        let usage = |why: &str, fix: &str| Err(Failure::new(Status::Usage, "arguments", why, fix));
        let is_us = |server: SocketAddr| {
            let everywhere = self.listen.ip().is_unspecified() && is_here(server);
            let ours = self.listen.ip() == server.ip() || everywhere;
            self.listen.port() == server.port() && self.listen.port() != 0 && ours
        };
        if self.to == self.backup {
            return usage("--to and --backup are the same", "name two servers");
        }
        if is_us(self.to) || is_us(self.backup) {
            return usage("it would send requests to itself", "choose another --listen");
        }
        if !self.listen.ip().to_canonical().is_loopback() && !self.public {
            let why = format!("other machines may reach {}", self.listen.ip());
            let fix = "listen on 127.0.0.1, or say --public if that is meant";
            return Err(Failure::new(Status::Usage, "arguments", why, fix));
        }
        let times = [
            self.poll_interval,
            self.give_up,
            self.head_timeout,
            self.body_timeout,
            self.idle_timeout,
        ];
        if times.contains(&Duration::ZERO) {
            return usage("a time is 0", "choose a longer one");
        }
        let observes = matches!(self.policy, Policy::Look | Policy::Hazard);
        if observes && !(is_here(self.to) && is_here(self.backup)) {
            let why = "the policy observes the servers, and one is not on this machine";
            return usage(why, "use --policy after=p95");
        }
        if observes && self.to.port() == self.backup.port() {
            let why = "the policy has to tell the servers apart, and both are on one port";
            return usage(why, "move one to another port, or use --policy after=p95");
        }
        Ok(())
    }

    fn observation(&self) -> Result<Observation, Failure> {
        let ports = [self.to.port(), self.backup.port()];
        match self.policy {
            Policy::Look => WatchedServers::find(ports)
                .map(Observation::Polled)
                .map_err(|why| not_visible(&why)),
            Policy::Hazard => {
                Hazards::find(ports).map(Observation::Events).map_err(|why| match why {
                    AttachError::Server(why) => not_visible(&why),
                    AttachError::Events(error) => no_events(&error),
                })
            }
            _ => Ok(Observation::None),
        }
    }

    fn plan(&self) -> Plan {
        Plan {
            listen: self.listen,
            servers: [self.to, self.backup],
            policy: self.policy,
            extra_per_million: self.max_extra,
            poll_interval: self.poll_interval,
            repeatable: self.methods.clone(),
            give_up: self.give_up,
            limits: Limits {
                clients: self.max_clients,
                head: self.head_timeout,
                body: self.body_timeout,
                idle: self.idle_timeout,
            },
            replay: self.replay,
            trust_forwarded: self.trust_forwarded,
        }
    }
}

/// Reports a server that this user may not see. One that is not up yet is waited for instead.
fn not_visible(why: &NotFound) -> Failure {
    let why = match why {
        NotFound::Hidden(port) => format!("you may not see which process listens on port {port}"),
        other => format!("{other:?}"),
    };
    let fix = "run it as root or as the servers' user, or use --policy after=p95";
    Failure::new(Status::Failed, "finding the servers", why, fix)
}

/// Raises the limit of descriptors, usually 1,024: each client may take three.
fn raise_descriptors() {
    if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // With fewer, connections wait longer.
        let _fewer = setrlimit(Resource::RLIMIT_NOFILE, most, most);
    }
}

fn serve(args: &Serve, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    args.check()?;
    let failed = |error: std::io::Error| {
        let what = format!("serving on {}", args.listen);
        Failure::new(Status::Failed, what, error, "choose another --listen, or see `ulimit -n`")
    };
    raise_descriptors();
    // Before any thread starts, because threads inherit the blocked signals.
    let ending = EndSignals::new().map_err(failed)?;
    let proxy = Proxy::open(args.plan(), args.observation()?).map_err(failed)?;
    to_stderr(&format!("listening on {}", proxy.address().map_err(failed)?));
    let done = proxy.run(&ending).map_err(failed)?;
    print(out, args.json, &done, || text(&done))?;
    Ok(ExitCode::SUCCESS)
}

fn text(Done { policy, proxy }: &Done) -> String {
    let Counts { moved, unanswered, late, replayed, refused, timed_out, evicted } = proxy;
    format!(
        "{} requests; sent twice: {} duplicates, of which {} were answered first, and {} retries; \
         {} not for the budget\n\
         servers swapped {} times, {moved} requests moved from one that was down, {replayed} \
         recorded ones replayed\n\
         {unanswered} without an answer, {late} late answers, {refused} refused; clients: \
         {timed_out} timed out, {evicted} made room\n",
        policy.requests,
        policy.duplicates,
        policy.won_by_backup,
        policy.retries,
        policy.refused_by_budget,
        policy.swaps,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_and_percentages_are_parsed() {
        assert_eq!(policy("after=2ms"), Ok(Policy::After(2_000_000)));
        assert_eq!(policy("after=p95"), Ok(Policy::AfterP95));
        assert_eq!((policy("look"), policy("none")), (Ok(Policy::Look), Ok(Policy::None)));
        assert_eq!(policy("hazard"), Ok(Policy::Hazard));
        for wrong in ["after", "after=", "after=p99", "look=1", ""] {
            assert!(policy(wrong).is_err(), "{wrong}");
        }
        assert_eq!([part("5%"), part("0.5%"), part("100%")], [50_000, 5_000, 1_000_000].map(Ok));
        for wrong in ["5", "101%", "-1%", "%", "1.%", ".5%", "1e2%", "0.00001%"] {
            assert!(part(wrong).is_err(), "{wrong}");
        }
        assert!(method("POST").is_err() && method("get").is_err() && method("PUT").is_ok());
        assert_eq!(address(":80"), Ok(SocketAddr::from((Ipv4Addr::LOCALHOST, 80))));
    }
}
