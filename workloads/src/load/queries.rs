//! Where the requests go and what they ask: the target, and the query set.

use super::protocol::{Protocol, RequestError};
use std::fmt::Write;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::str::FromStr;
use std::{fs, io};
use thiserror::Error;

/// `http://host:port/path` or `redis://host:port`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) protocol: Protocol,
    /// As given, for the Host header and for messages.
    pub(crate) host: String,
    pub(crate) port: u16,
    /// From the first `/` on; empty if there is none.
    pub(crate) path: String,
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let example = "write one as http://127.0.0.1:8080/search?q=a";
        let (scheme, rest) = text
            .split_once("://")
            .ok_or_else(|| format!("`{text}` has no protocol before `://`: {example}"))?;
        let protocol = match scheme {
            "http" => Protocol::Http,
            "redis" => Protocol::Redis,
            "https" => {
                return Err("https is not spoken here: load the service behind its TLS".into());
            }
            _ => return Err(format!("`{scheme}` is neither http nor redis")),
        };
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => {
                (host, port.parse().map_err(|_| format!("`{port}` is no port: {example}"))?)
            }
            _ => (authority, protocol.default_port()),
        };
        if host.is_empty() {
            return Err(format!("`{text}` names no host: {example}"));
        }
        Ok(Self { protocol, host: host.into(), port, path: path.into() })
    }
}

impl Target {
    pub(crate) fn resolve(&self) -> io::Result<SocketAddr> {
        let host = self.host.trim_start_matches('[').trim_end_matches(']');
        let mut addresses = (host, self.port).to_socket_addrs()?;
        addresses.next().ok_or_else(|| io::Error::other("the name has no address"))
    }

    fn host_header(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }
}

#[derive(Debug, Error)]
pub(crate) enum QueryError {
    #[error("reading queries from {path}: {error}; name a readable text file")]
    Read { path: String, error: io::Error },
    #[error("{path}, line {line}: {error}")]
    Line { path: String, line: usize, error: RequestError },
    #[error("{path} holds no query; write one a line")]
    Empty { path: String },
    #[error("{path} holds {count} queries; the most is 2^32")]
    TooMany { path: String, count: usize },
    #[error("{0}")]
    Target(RequestError),
}

/// Every request that can be sent, encoded beforehand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QuerySet {
    requests: Vec<Vec<u8>>,
    /// Task-file lines of a kind that no text query can ask (sorts, ranges, facets).
    pub(crate) skipped: usize,
}

/// How the lines of a query file are to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lines<'a> {
    /// Each line is a request of the protocol.
    Requests,
    /// Each line is percent-encoded into `{}` of the template.
    Template(&'a str),
    /// Each line is a luceneutil task, `Category: query # freq=...`; the query goes into the
    /// template.
    Tasks(&'a str),
}

impl QuerySet {
    /// The one request that the target itself names.
    pub(crate) fn of_target(target: &Target) -> Result<Self, QueryError> {
        let line = match target.protocol {
            Protocol::Http if target.path.is_empty() => "/",
            Protocol::Http => &target.path,
            Protocol::Redis => "PING",
        };
        let request =
            target.protocol.encode(line, &target.host_header()).map_err(QueryError::Target)?;
        Ok(Self { requests: vec![request], skipped: 0 })
    }

    pub(crate) fn read(path: &Path, lines: Lines<'_>, target: &Target) -> Result<Self, QueryError> {
        let shown = path.display().to_string();
        match fs::read_to_string(path) {
            Ok(text) => Self::parse(&text, &shown, lines, target),
            Err(error) => Err(QueryError::Read { path: shown, error }),
        }
    }

    fn parse(
        text: &str,
        path: &str,
        lines: Lines<'_>,
        target: &Target,
    ) -> Result<Self, QueryError> {
        let host = target.host_header();
        let mut set = Self { requests: Vec::new(), skipped: 0 };
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let request = match lines {
                Lines::Requests => line.to_owned(),
                Lines::Template(template) => template.replace("{}", &percent_encode(line)),
                Lines::Tasks(template) => match task_query(line) {
                    Some(query) => template.replace("{}", &percent_encode(query)),
                    None => {
                        set.skipped += 1;
                        continue;
                    }
                },
            };
            let encoded = target.protocol.encode(&request, &host).map_err(|error| {
                QueryError::Line { path: path.to_owned(), line: number + 1, error }
            })?;
            set.requests.push(encoded);
        }
        match set.requests.len() {
            0 => Err(QueryError::Empty { path: path.to_owned() }),
            count if u32::try_from(count).is_err() => {
                Err(QueryError::TooMany { path: path.to_owned(), count })
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

/// The query of a luceneutil task line; `None` for tasks that are no text query.
pub(crate) fn task_query(line: &str) -> Option<&str> {
    let (_, task) = line.split_once(": ")?;
    let query = task.split(" # ").next().unwrap_or(task).trim();
    // `nrq//`, `datetimesort//` and their like name a field or an operation, a `+filter=` a filter.
    (!query.is_empty() && !query.contains("//") && !query.contains("+filter=")).then_some(query)
}

fn percent_encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                encoded.push(char::from(byte));
            }
            _ => write!(encoded, "%{byte:02X}").expect("a String takes everything"),
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(text: &str) -> Target {
        text.parse().expect("a good target")
    }

    /// Goal: targets are taken apart as URLs are. Method: each protocol, with and without port, and
    /// IPv6.
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

    fn parse(text: &str, lines: Lines<'_>) -> Result<QuerySet, QueryError> {
        QuerySet::parse(text, "file", lines, &target("http://h:1/"))
    }

    fn targets_of(set: &QuerySet) -> Vec<String> {
        let word = |request: &Vec<u8>| {
            String::from_utf8_lossy(request).split(' ').nth(1).expect("a target").to_owned()
        };
        set.requests.iter().map(word).collect()
    }

    /// Goal: query files, with and without template, become requests in file order. Method: a small
    /// one.
    #[test]
    fn query_files_are_read() {
        let set = parse("# comment\n/a\n\n/b?x=1\n", Lines::Requests).expect("good");
        assert_eq!(targets_of(&set), ["/a", "/b?x=1"]);
        let set = parse("new york\n\"a b\"~2\n", Lines::Template("/s?q={}")).expect("good");
        assert_eq!(targets_of(&set), ["/s?q=new%20york", "/s?q=%22a%20b%22~2"]);
    }

    /// Goal: luceneutil task files lose their category and comment; tasks that are no query are
    /// counted. Method: one line of each kind.
    #[test]
    fn task_files_are_read() {
        let tasks = "HighTerm: ref # freq=3 # x\nAndHighHigh: +of +the # freq=1\nFuzzy1: mark~1\n\
                     IntNRQ: nrq//timesecnum 1 2\nHighTermMonthSort: datetimesort//x\nnonsense\n";
        let set = parse(tasks, Lines::Tasks("/s?q={}")).expect("good");
        assert_eq!(targets_of(&set), ["/s?q=ref", "/s?q=%2Bof%20%2Bthe", "/s?q=mark~1"]);
        assert_eq!(set.skipped, 3);
    }

    /// Goal: a bad file says which line. Method: one bad line, and none at all.
    #[test]
    fn bad_files_name_the_line() {
        let error = parse("/a\nb\n", Lines::Requests).expect_err("no target").to_string();
        assert!(error.starts_with("file, line 2: `b`"), "{error}");
        assert!(matches!(parse("\n# x\n", Lines::Requests), Err(QueryError::Empty { .. })));
    }
}
