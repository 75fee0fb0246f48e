//! The settings of the proxy, as the command line gives them.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use elfen_console::duration;
use elfen_console::failure::{Failure, Status};
use hyper::Method;

use crate::policy::{Policy, Server};

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Settings {
    /// The address for clients; `:8080` is on loopback
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    pub(crate) listen: SocketAddr,

    /// Listen on an address that other machines may reach, without TLS or authentication
    #[arg(long)]
    public: bool,

    /// The server
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    to: SocketAddr,

    /// A second, equivalent server
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    backup: SocketAddr,

    /// `look`: poll whether the servers run; `hazard`: the kernel reports stops and garbage
    /// collections as they happen; `after=TIME`, `after=p95` of the last requests, or `none`
    #[arg(long, value_name = "POLICY", default_value = "look")]
    pub(crate) policy: Policy,

    /// Interval between polls
    #[arg(long, value_name = "TIME", default_value = "500us", value_parser = time)]
    pub(crate) poll_interval: Duration,

    /// Maximum share of requests that are sent a second time, as a duplicate or as a retry
    #[arg(long, value_name = "PART", default_value = "5%", value_parser = part)]
    pub(crate) max_extra: u64,

    /// Methods whose requests may be sent a second time; only idempotent methods are allowed
    #[arg(long, value_name = "METHODS", default_value = "GET,HEAD", value_delimiter = ',',
        value_parser = method)]
    pub(crate) methods: Vec<Method>,

    /// Warm a restarted server with this many recorded GET and HEAD requests. Requests with
    /// credentials are not recorded
    #[arg(long, value_name = "N", default_value_t = 0,
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(0..=10_000))]
    pub(crate) replay: usize,

    /// Time limit for the beginning of an answer; after it, the client gets status 504
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time)]
    pub(crate) give_up: Duration,

    /// Time limit for the head of a request
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = time)]
    pub(crate) head_timeout: Duration,

    /// Time limit for the body of a request, after its head
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time)]
    pub(crate) body_timeout: Duration,

    /// Time limit for a client without a request, or for a client that accepts nothing of its
    /// answer
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time)]
    pub(crate) idle_timeout: Duration,

    /// Maximum number of simultaneous clients. A further client replaces the client that has waited
    /// longest without a request
    #[arg(long, value_name = "N", default_value_t = 1024,
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=100_000))]
    pub(crate) max_clients: usize,

    /// Trust clients, which are your own proxies: pass on their `Forwarded` and `X-Forwarded-*`
    #[arg(long)]
    pub(crate) trust_forwarded: bool,

    /// Print one JSON object at the end
    #[arg(long)]
    pub(crate) json: bool,
}

impl Settings {
    pub(crate) fn address(&self, server: Server) -> SocketAddr {
        match server {
            Server::Primary => self.to,
            Server::Backup => self.backup,
        }
    }

    /// Refuses arguments that would send requests back to the proxy or twice to one server, or
    /// would expose the servers by accident.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        let is_us = |server: SocketAddr| {
            let everywhere = self.listen.ip().is_unspecified() && is_here(server);
            let ours = self.listen.ip() == server.ip() || everywhere;
            self.listen.port() == server.port() && self.listen.port() != 0 && ours
        };
        let is_exposed = !self.listen.ip().to_canonical().is_loopback() && !self.public;
        let exposed = format!("other machines may reach {}", self.listen.ip());
        let observes = matches!(self.policy, Policy::Look | Policy::Hazard);
        let is_local = is_here(self.to) && is_here(self.backup);
        let has_one_port = self.to.port() == self.backup.port();
        let mistakes = [
            (self.to == self.backup, "--to and --backup are the same", "name two servers"),
            (
                is_us(self.to) || is_us(self.backup),
                "it would send requests to itself",
                "choose another --listen",
            ),
            (is_exposed, &exposed, "listen on 127.0.0.1, or add --public if this is intended"),
            (
                observes && !is_local,
                "the policy observes the servers, and one is not on this machine",
                "use --policy after=p95",
            ),
            (
                observes && has_one_port,
                "the policy cannot distinguish the servers, because both are on one port",
                "move one to another port, or use --policy after=p95",
            ),
        ];
        match mistakes.into_iter().find(|(is_made, ..)| *is_made) {
            Some((_, why, fix)) => Err(Failure::new(Status::Usage, "arguments", why, fix)),
            None => Ok(()),
        }
    }
}

fn address(text: &str) -> Result<SocketAddr, String> {
    let full = match text.strip_prefix(':') {
        Some(port) => format!("{}:{port}", Ipv4Addr::LOCALHOST),
        None => text.to_owned(),
    };
    full.parse().map_err(|_| "it must be an IP address and a port, as 127.0.0.1:8080".to_owned())
}

fn time(text: &str) -> Result<Duration, String> {
    let time = duration::parse(text)?;
    if time.is_zero() { Err("a time must not be 0".to_owned()) } else { Ok(time) }
}

/// Parses a percentage, as parts per million.
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

/// Whether an address belongs to this machine. A socket cannot be bound to any other address.
fn is_here(server: SocketAddr) -> bool {
    UdpSocket::bind((server.ip(), 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_and_percentages_are_parsed() {
        let policy = |text: &str| text.parse::<Policy>();
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
