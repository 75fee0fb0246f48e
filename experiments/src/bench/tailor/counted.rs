//! What counts the requests that a service has finished: the service itself, in what it publishes,
//! or a Redis, which is asked for its own statistics.

use std::collections::BTreeSet;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use elfen_rt::process::Liveness;
use elfen_rt::signal::service::{OpenError, ServiceReader, Writer};

/// A Redis that does not answer for so long is none.
const PATIENCE: Duration = Duration::from_secs(5);

pub(super) trait Counted: std::fmt::Debug {
    /// Since it began.
    fn finished(&mut self) -> io::Result<u64>;
}

/// A service that publishes its requests.
#[derive(Debug)]
pub(super) struct Page(ServiceReader);

impl Page {
    /// And its processes.
    pub(super) fn find(name: &str) -> Result<(Self, Vec<u32>), OpenError> {
        let page = match ServiceReader::open(name) {
            Err(OpenError::Foreign(user)) => ServiceReader::open_of(name, Some(user))?,
            opened => opened?,
        };
        let writer = |lane| match page.writer(lane) {
            Writer::Process(of, Liveness::Alive) => Some(of.pid().unsigned_abs()),
            _ => None,
        };
        let processes: BTreeSet<u32> = (0..page.lanes()).filter_map(writer).collect();
        Ok((Self(page), processes.into_iter().collect()))
    }
}

impl Counted for Page {
    fn finished(&mut self) -> io::Result<u64> {
        let slots = (0..self.0.lanes()).filter_map(|lane| self.0.slot(lane));
        // Relaxed: a count, by which nothing else is read.
        Ok(slots.map(|slot| slot.finished_requests.load(Relaxed)).sum())
    }
}

/// A connection to a Redis.
#[derive(Debug)]
pub(super) struct Redis(BufReader<TcpStream>);

impl Redis {
    /// And its process.
    pub(super) fn find(port: u16) -> io::Result<(Self, u32)> {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        let mut redis = Self(BufReader::new(stream));
        let process = redis.says("server", "process_id")?;
        let process = u32::try_from(process).map_err(|_| not_understood("its process"))?;
        Ok((redis, process))
    }

    /// A number of a section of INFO.
    fn says(&mut self, section: &str, name: &str) -> io::Result<u64> {
        write!(self.0.get_mut(), "INFO {section}\r\n")?;
        let mut head = String::new();
        self.0.by_ref().take(64).read_line(&mut head)?;
        let length =
            head.strip_prefix('$').and_then(|length| length.trim_end().parse::<usize>().ok());
        let Some(length) = length.filter(|length| *length < 1 << 20) else {
            return Err(not_understood(head.trim_end()));
        };
        let mut text = vec![0; length + "\r\n".len()];
        self.0.read_exact(&mut text)?;
        number_in(&String::from_utf8_lossy(&text), name).ok_or_else(|| not_understood(name))
    }
}

impl Counted for Redis {
    fn finished(&mut self) -> io::Result<u64> {
        self.says("stats", "total_commands_processed")
    }
}

fn number_in(text: &str, name: &str) -> Option<u64> {
    let value = |line: &str| line.strip_prefix(name)?.strip_prefix(':')?.trim_end().parse().ok();
    text.lines().find_map(value)
}

fn not_understood(what: &str) -> io::Error {
    let why = format!("it does not answer INFO as a Redis does: {what:?}");
    io::Error::new(io::ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Goal: a Redis is asked for its process and its count, and something else on its port is an
    /// error. Method: a listener that answers with what it is given.
    #[test]
    fn a_redis_counts_its_requests() {
        let answers = |answers: Vec<String>| {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let port = listener.local_addr().unwrap().port();
            std::thread::spawn(move || {
                let mut lines = BufReader::new(listener.accept().unwrap().0);
                for answer in answers {
                    lines.read_line(&mut String::new()).unwrap();
                    lines.get_mut().write_all(answer.as_bytes()).unwrap();
                }
            });
            Redis::find(port)
        };
        let bulk = |text: &str| format!("${}\r\n{text}\r\n", text.len());
        let server = bulk("# Server\r\nport:6379\r\nprocess_id:4711\r\n");
        let stats = bulk("# Stats\r\ntotal_commands_processed:9\r\n");
        let (mut redis, process) = answers(vec![server, stats, "-NOAUTH\r\n".to_owned()]).unwrap();
        assert_eq!((process, redis.finished().unwrap()), (4711, 9));
        assert!(redis.finished().unwrap_err().to_string().contains("NOAUTH"));
        assert!(answers(vec!["HTTP/1.1 400 Bad Request\r\n\r\n".to_owned()]).is_err());
        assert!(answers(vec!["$99999999999\r\n".to_owned()]).is_err());
    }
}
