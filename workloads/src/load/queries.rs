//! The requests and their destination: the target, and the query set.

use super::protocol::Protocol;
use elfen_console::failure::{Failure, Status};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use std::fmt;
use std::fs;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::str::FromStr;

/// `http://host:port/path` or `redis://host:port`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) protocol: Protocol,
    /// The host as given, for the Host header and for messages.
    host: String,
    port: u16,
    /// Everything from the first `/` on, or empty.
    path: String,
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let example = "write one as http://127.0.0.1:8080/search?q=a";
        let (scheme, rest) = text
            .split_once("://")
            .ok_or_else(|| format!("`{text}` has no protocol before `://`: {example}"))?;
        let (protocol, default_port) = match scheme {
            "http" => (Protocol::Http, 80),
            "redis" => (Protocol::Redis, 6_379),
            "https" => {
                return Err(
                    "https is not supported: use the address of the service behind the TLS proxy"
                        .into(),
                );
            }
            _ => return Err(format!("`{scheme}` is neither http nor redis")),
        };
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => {
                (host, port.parse().map_err(|_| format!("`{port}` is not a port: {example}"))?)
            }
            _ => (authority, default_port),
        };
        if host.is_empty() {
            return Err(format!("`{text}` names no host: {example}"));
        }
        Ok(Self { protocol, host: host.into(), port, path: path.into() })
    }
}

impl Target {
    pub(crate) fn resolve(&self) -> Result<SocketAddr, Failure> {
        let host = self.host.trim_start_matches('[').trim_end_matches(']');
        let failed = |why: String| {
            Failure::new(
                Status::Failed,
                format!("resolving {}", self.host),
                why,
                "name a host that exists",
            )
        };
        let addresses = (host, self.port).to_socket_addrs();
        let mut addresses = addresses.map_err(|error| failed(error.to_string()))?;
        addresses.next().ok_or_else(|| failed("the name has no address".into()))
    }

    pub(crate) fn url(&self) -> String {
        format!("{}://{}{}", self.protocol.name(), self.authority(), self.path)
    }

    fn authority(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    /// Encodes one line of a query file as a request.
    fn encode(&self, line: &str) -> Result<Vec<u8>, String> {
        match self.protocol {
            Protocol::Http => encode_http(line, &self.authority()),
            Protocol::Redis => encode_redis(line),
        }
    }
}

pub(crate) fn usage(problem: impl fmt::Display) -> Failure {
    Failure::new(Status::Usage, "arguments", problem, "see `elfen-load --help`")
}

/// All requests that can be sent. They are encoded before the run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QuerySet {
    requests: Vec<Vec<u8>>,
    /// The number of task-file lines that are not text queries, such as sorts, ranges and facets.
    pub(crate) skipped: usize,
}

/// Encodes all characters except the unreserved characters of RFC 3986.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// The meaning of the lines of a query file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lines<'a> {
    /// Each line is a request of the protocol.
    Requests,
    /// Each line is percent-encoded into `{}` of the template.
    Template(&'a str),
    /// Each line is a luceneutil task, `Category: query # freq=...`. The query is percent-encoded
    /// into `{}` of the template.
    Tasks(&'a str),
}

impl QuerySet {
    /// The single request that the target itself specifies.
    pub(crate) fn of_target(target: &Target) -> Result<Self, Failure> {
        let line = match target.protocol {
            Protocol::Http if target.path.is_empty() => "/",
            Protocol::Http => &target.path,
            Protocol::Redis => "PING",
        };
        let request = target.encode(line).map_err(usage)?;
        Ok(Self { requests: vec![request], skipped: 0 })
    }

    pub(crate) fn read(path: &Path, lines: Lines<'_>, target: &Target) -> Result<Self, Failure> {
        let shown = path.display().to_string();
        match fs::read_to_string(path) {
            Ok(text) => Self::parse(&text, &shown, lines, target).map_err(usage),
            Err(error) => {
                let (what, fix) =
                    (format!("reading queries from {shown}"), "name a readable text file");
                Err(Failure::new(Status::Failed, what, error, fix))
            }
        }
    }

    fn parse(text: &str, path: &str, lines: Lines<'_>, target: &Target) -> Result<Self, String> {
        let mut set = Self { requests: Vec::new(), skipped: 0 };
        for (line, number) in text.lines().map(str::trim).zip(1..) {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let request = match lines {
                Lines::Requests => line.to_owned(),
                Lines::Template(template) => {
                    template.replace("{}", &utf8_percent_encode(line, ENCODED).to_string())
                }
                Lines::Tasks(template) => match task_query(line) {
                    Some(query) => {
                        template.replace("{}", &utf8_percent_encode(query, ENCODED).to_string())
                    }
                    None => {
                        set.skipped += 1;
                        continue;
                    }
                },
            };
            let encoded = target.encode(&request);
            set.requests.push(encoded.map_err(|error| format!("{path}, line {number}: {error}"))?);
        }
        match set.requests.len() {
            0 => Err(format!("{path} holds no query; write one a line")),
            count if u32::try_from(count).is_err() => {
                Err(format!("{path} holds {count} queries; the maximum is 2^32"))
            }
            _ => Ok(set),
        }
    }

    pub(crate) fn len(&self) -> u32 {
        u32::try_from(self.requests.len()).expect("`parse` refuses more")
    }

    pub(crate) fn request(&self, query: u32) -> &[u8] {
        &self.requests[query as usize]
    }
}

/// Encodes a line: a target (`/search?q=a`), or a method, a target and a body (`POST /x body`).
fn encode_http(line: &str, host: &str) -> Result<Vec<u8>, String> {
    let mut words = line.splitn(3, ' ');
    let first = words.next().unwrap_or_default();
    let (method, target, body) = if first.starts_with('/') {
        ("GET", line, None)
    } else {
        (first, words.next().unwrap_or_default(), words.next())
    };
    let is_method = !method.is_empty() && method.bytes().all(|byte| byte.is_ascii_uppercase());
    // An answer to HEAD has a length but no body, so the answer does not show where it ends.
    if method == "HEAD" || method == "CONNECT" {
        return Err(no_answer(line));
    }
    if !is_method || !target.starts_with('/') || target.contains(' ') {
        let expected = "write a target that begins with `/`, or METHOD /target [body]";
        return Err(format!("`{line}` is not an HTTP request: {expected}"));
    }
    if target.bytes().any(|byte| byte.is_ascii_control()) {
        let advice = "percent-encode it, or leave it out";
        return Err(format!("`{line}` has a control character in it: {advice}"));
    }
    let length = body.map(|body| format!("Content-Length: {}\r\n", body.len())).unwrap_or_default();
    let head = format!("{method} {target} HTTP/1.1\r\nHost: {host}\r\n{length}\r\n");
    Ok([head.as_bytes(), body.unwrap_or_default().as_bytes()].concat())
}

/// Encodes a line: a command with its arguments, as in redis-cli.
fn encode_redis(line: &str) -> Result<Vec<u8>, String> {
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let command = words.first().copied().unwrap_or_default().to_ascii_uppercase();
    // These commands turn the connection into a stream of messages, or end it.
    let streams =
        ["SUBSCRIBE", "PSUBSCRIBE", "SSUBSCRIBE", "MONITOR", "QUIT", "SHUTDOWN", "SYNC", "PSYNC"];
    if streams.contains(&command.as_str()) || line.to_ascii_uppercase().starts_with("CLIENT REPLY")
    {
        return Err(no_answer(line));
    }
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend(format!("${}\r\n{word}\r\n", word.len()).bytes());
    }
    Ok(bytes)
}

fn no_answer(line: &str) -> String {
    format!("the answer to `{line}` cannot be matched to the command: omit it")
}

/// The query of a luceneutil task line; `None` for tasks that are not text queries.
pub(crate) fn task_query(line: &str) -> Option<&str> {
    let (_, task) = line.split_once(": ")?;
    let query = task.split(" # ").next().unwrap_or(task).trim();
    // `nrq//` and `datetimesort//` name a field or an operation, and `+filter=` a filter.
    (!query.is_empty() && !query.contains("//") && !query.contains("+filter=")).then_some(query)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(text: &str) -> Target {
        text.parse().expect("a good target")
    }

    /// Goal: targets are parsed as URLs. Method: each protocol, with and without port, and IPv6.
    #[test]
    fn targets_are_read() {
        let http = target("http://localhost:8080/search?q=a/b");
        assert_eq!(
            (http.host.as_str(), http.port, http.path.as_str()),
            ("localhost", 8080, "/search?q=a/b")
        );
        let redis = target("redis://[::1]");
        assert_eq!((redis.host.as_str(), redis.port), ("[::1]", 6_379));
        assert_eq!(redis.resolve().expect("an address").to_string(), "[::1]:6379");
        for text in
            ["localhost:80", "https://x/", "ftp://x", "http://:80/", "http://x:99999/", "http:///a"]
        {
            assert!(text.parse::<Target>().is_err(), "{text}");
        }
    }

    /// Goal: requests follow the specification of their protocol. A line is refused if its answer
    /// could not be matched to it, or if it would contain a second request. Method: one example of
    /// each request, and of each refused line.
    #[test]
    fn requests_are_written() {
        let (http, redis) = (target("http://h:1"), target("redis://h"));
        for (target, line, request) in [
            (&http, "/s?q=a", "GET /s?q=a HTTP/1.1\r\nHost: h:1\r\n\r\n"),
            (&http, "POST /p a b", "POST /p HTTP/1.1\r\nHost: h:1\r\nContent-Length: 3\r\n\r\na b"),
            (&redis, "SET k  v", "*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\nv\r\n"),
        ] {
            assert_eq!(target.encode(line), Ok(request.as_bytes().to_vec()));
        }
        for line in ["", "search", "get /x", "/a b", "GET http://x/", "HEAD /x", "/a\r\nX: y"] {
            assert!(http.encode(line).is_err(), "{line}");
        }
        for line in ["subscribe x", "client reply off", "QUIT"] {
            assert!(redis.encode(line).is_err(), "{line}");
        }
    }

    fn parse(text: &str, lines: Lines<'_>) -> Result<QuerySet, String> {
        QuerySet::parse(text, "file", lines, &target("http://h:1/"))
    }

    fn targets_of(set: &QuerySet) -> Vec<String> {
        let word = |request: &Vec<u8>| {
            String::from_utf8_lossy(request).split(' ').nth(1).expect("a target").to_owned()
        };
        set.requests.iter().map(word).collect()
    }

    /// Goal: query files, with and without template, become requests in file order. For luceneutil
    /// task files, category and comment are removed, and tasks that are not queries are counted.
    /// Method: a small file of each kind.
    #[test]
    fn query_files_are_read() {
        let set = parse("# comment\n/a\n\n/b?x=1\n", Lines::Requests).expect("good");
        assert_eq!(targets_of(&set), ["/a", "/b?x=1"]);
        let set = parse("new york\n\"a b\"~2\n", Lines::Template("/s?q={}")).expect("good");
        assert_eq!(targets_of(&set), ["/s?q=new%20york", "/s?q=%22a%20b%22~2"]);
        let tasks = "HighTerm: ref # freq=3 # x\nAndHighHigh: +of +the # freq=1\nFuzzy1: mark~1\n\
                     IntNRQ: nrq//timesecnum 1 2\nHighTermMonthSort: datetimesort//x\nnonsense\n";
        let set = parse(tasks, Lines::Tasks("/s?q={}")).expect("good");
        assert_eq!(targets_of(&set), ["/s?q=ref", "/s?q=%2Bof%20%2Bthe", "/s?q=mark~1"]);
        assert_eq!(set.skipped, 3);
    }

    /// Goal: an error names the invalid line. Method: a file with an invalid line, and a file
    /// without queries.
    #[test]
    fn bad_files_name_the_line() {
        let error = parse("/a\nb\n", Lines::Requests).expect_err("no target");
        assert!(error.starts_with("file, line 2: `b`"), "{error}");
        let error = parse("\n# x\n", Lines::Requests).expect_err("nothing");
        assert!(error.contains("holds no query"), "{error}");
    }
}
