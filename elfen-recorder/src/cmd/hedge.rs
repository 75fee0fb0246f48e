//! `elfen hedge`: a proxy that sends a request again where its server stands still.

use std::io::Write;
use std::net::{SocketAddr, UdpSocket};
use std::process::ExitCode;
use std::time::Duration;

use elfen_console::duration;
use elfen_console::failure::{Failure, Status, to_stderr};
use elfen_console::output::print;
use elfen_hedge_policy::Policy;

use super::failure;
use crate::hedge::hazard::{Hazards, Missing};
use crate::hedge::proxy::{Done, Plan, Proxy};
use crate::hedge::served;
use crate::hedge::watch::Looks;
use crate::signals::Ending;

const EXAMPLES: &str = "\
Examples:
  elfen hedge --listen :8080 --to 127.0.0.1:8081 --backup 127.0.0.1:8082
  elfen hedge --listen :80 --to 10.0.0.1:80 --backup 10.0.0.2:80 \\
      --policy after=p95

Both servers have to answer alike. With `look`, the default, they have to run on this machine, and \
you have to be allowed to see whose ports these are: as root, or as their user.";

/// Send a request again, to a backup, while its server stands still
///
/// An HTTP/1.1 proxy in front of two servers. A request in flight whose server has not run between
/// two looks is sent to the backup too, if that is free of the same, and new requests follow. The
/// first answer goes to the client, and no other. Ends by Ctrl-C, and says what it did.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Where clients connect to
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    listen: SocketAddr,

    /// The server
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    to: SocketAddr,

    /// A second server that answers alike
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    backup: SocketAddr,

    /// `look` at whether the servers run, `hazard` (collections and stops, told as they happen),
    /// `after=TIME`, `after=p95` of the last requests, or `none`
    #[arg(long, value_name = "POLICY", default_value = "look", value_parser = policy)]
    policy: Policy,

    /// Between two looks
    #[arg(long, value_name = "TIME", default_value = "500us", value_parser = duration::parse)]
    look_every: Duration,

    /// At most this part of all requests is sent twice
    #[arg(long, value_name = "PART", default_value = "5%", value_parser = part)]
    max_extra: u64,

    /// Methods whose requests may be sent twice, of those that HTTP calls idempotent
    #[arg(long, value_name = "METHODS", default_value = "GET,HEAD", value_delimiter = ',',
        value_parser = method)]
    methods: Vec<String>,

    /// A client whose answer has not begun by then gets an error
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration::parse)]
    give_up: Duration,

    /// Print one JSON object at the end
    #[arg(long)]
    json: bool,
}

/// Be a server to try `elfen hedge` on, until standard input ends
#[derive(clap::Args, Debug)]
#[command(after_help = "Example:\n  elfen tailor answer first")]
pub(super) struct AnswerArgs {
    /// What it calls itself
    name: String,

    /// A free one, if none is named
    #[arg(long, value_name = "PORT", default_value = "0")]
    port: u16,
}

pub(super) fn answer(args: &AnswerArgs) -> Result<ExitCode, Failure> {
    served::serve(&args.name, args.port).map_err(|error| {
        Failure::new(Status::Failed, "serving requests", error, "see `ulimit -n`")
    })?;
    Ok(ExitCode::SUCCESS)
}

fn address(text: &str) -> Result<SocketAddr, String> {
    let full = if text.starts_with(':') { format!("0.0.0.0{text}") } else { text.to_owned() };
    full.parse().map_err(|_| "it is an IP address and a port, as 127.0.0.1:8080".to_owned())
}

fn policy(text: &str) -> Result<Policy, String> {
    let say = || "it is look, hazard, after=TIME as after=2ms, after=p95, or none".to_owned();
    match text.split_once('=') {
        None if text == "look" => Ok(Policy::Look),
        None if text == "hazard" => Ok(Policy::Hazard),
        None if text == "none" => Ok(Policy::None),
        Some(("after", "p95")) => Ok(Policy::AfterP95),
        Some(("after", time)) => {
            let time = duration::parse(time).map_err(|_| say())?;
            u64::try_from(time.as_nanos()).map(Policy::After).map_err(|_| say())
        }
        _ => Err(say()),
    }
}

/// A percentage, as parts of a million.
fn part(text: &str) -> Result<u64, String> {
    let say = || "it is a percentage up to 100%, as 5% or 0.5%".to_owned();
    let number = text.strip_suffix('%').ok_or_else(say)?;
    let (whole, rest) = number.split_once('.').unwrap_or((number, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(rest) || whole.len() > 3 || rest.len() > 4 {
        return Err(say());
    }
    let part: u64 = format!("{whole}{rest:0<4}").parse().map_err(|_| say())?;
    if part <= 1_000_000 { Ok(part) } else { Err(say()) }
}

fn method(text: &str) -> Result<String, String> {
    const IDEMPOTENT: [&str; 6] = ["GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"];
    match IDEMPOTENT.contains(&text) {
        true => Ok(text.to_owned()),
        false => Err(format!("a request may be sent twice if it is {}", IDEMPOTENT.join(", "))),
    }
}

/// Whether an address is one of this machine: of no other could a socket be bound.
fn is_here(server: SocketAddr) -> bool {
    UdpSocket::bind((server.ip(), 0)).is_ok()
}

impl Args {
    /// Whose requests would come back to it, or to one server only.
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
        if self.look_every.is_zero() || self.give_up.is_zero() {
            return usage("a time is 0", "choose a longer one");
        }
        let sees = matches!(self.policy, Policy::Look | Policy::Hazard);
        if sees && !(is_here(self.to) && is_here(self.backup)) {
            let why = "the policy needs to see the servers, and one is not on this machine";
            return usage(why, "use --policy after=p95");
        }
        if sees && self.to.port() == self.backup.port() {
            let why = "servers on one port can't be told apart, which the policy needs";
            return usage(why, "give one another port, or use --policy after=p95");
        }
        Ok(())
    }

    fn watched(&self) -> Result<Option<Looks>, Failure> {
        if self.policy != Policy::Look {
            return Ok(None);
        }
        let found = Looks::find([self.to.port(), self.backup.port()]);
        found.map(Some).map_err(|missing| failure::not_found(&missing))
    }

    fn hazards(&self) -> Result<Option<Hazards>, Failure> {
        if self.policy != Policy::Hazard {
            return Ok(None);
        }
        let found = Hazards::find([self.to.port(), self.backup.port()]);
        found.map(Some).map_err(|missing| match missing {
            Missing::Server(missing) => failure::not_found(&missing),
            Missing::Events(error) => failure::no_events(&error),
        })
    }
}

pub fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    args.check()?;
    let failed = |error: std::io::Error| {
        let what = format!("serving on {}", args.listen);
        Failure::new(Status::Failed, what, error, "choose another --listen, or see `ulimit -n`")
    };
    // Before any thread is started: it has the signals blocked that we do.
    let ending = Ending::new().map_err(failed)?;
    let (watched, hazards) = (args.watched()?, args.hazards()?);
    let plan = Plan {
        listen: args.listen,
        servers: [args.to, args.backup],
        policy: args.policy,
        extra_per_million: args.max_extra,
        look_every: args.look_every,
        repeatable: args.methods.clone(),
        give_up: args.give_up,
    };
    let mut proxy = Proxy::open(plan, watched, hazards).map_err(failed)?;
    to_stderr(&format!("listening on {}", proxy.address().map_err(failed)?));
    let (_, done) = proxy.run(&ending).map_err(failed)?;
    print(out, args.json, &done, || text(&done))?;
    // A signal is how it ends.
    Ok(ExitCode::SUCCESS)
}

fn text(Done { decided, met }: &Done) -> String {
    format!(
        "{} requests; {} sent twice, {} of them answered by the second first; {} not for the \
         budget\nservers swapped {} times, {} requests moved from a dead one, {} without an \
         answer, {} late answers\n",
        decided.requests,
        decided.duplicates,
        decided.won_by_backup,
        decided.refused_by_budget,
        decided.swaps,
        met.moved,
        met.unanswered,
        met.late
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_and_parts() {
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
        assert_eq!(address(":80"), Ok(SocketAddr::from(([0, 0, 0, 0], 80))));
    }
}
