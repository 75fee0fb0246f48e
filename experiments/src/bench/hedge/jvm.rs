//! The same policies in front of two Lucene servers in Java, each of which collects its whole heap
//! now and then, and of which the first is restarted under load.
//!
//! Virtual machines take long to start and longer to get warm, so the same two serve all turns.
//! They are told when to collect, the same in all turns and never both at once: two that collect in
//! step are no help to each other, whatever the policy. During a restart neither collects.

use std::fs;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use super::load::{Asked, Done, Load, Plan, Proxy, connect, due, load};
use crate::bench::joined;
use crate::live::ladder::Rung;
use crate::live::lucene::{Java, Lucene};
use crate::live::scratch::Scratch;
use crate::live::{LiveError, check_interrupted};

const ARTICLES: u32 = 10_000;
const QUESTIONS: u32 = 1_000;
/// A compiler takes what was called some hundred times.
const WARM_UP: Duration = Duration::from_secs(5);
/// Requests come meanwhile, which the proxy remembers.
const BEFORE_RESTART: Duration = Duration::from_secs(2);
const AFTER_RESTART: Duration = Duration::from_secs(1);
const RESTART_AT_MOST: Duration = Duration::from_secs(120);

/// Servers that stand ready, and are warm.
pub(super) struct Servers {
    scratch: Scratch,
    lucene: Lucene,
    options: Vec<String>,
    questions: Vec<String>,
    first: Option<Java>,
    backup: Java,
}

impl Servers {
    pub(super) fn start(plan: &Plan) -> Result<Self, LiveError> {
        let scratch = Scratch::new(1).map_err(LiveError::io("making a folder"))?;
        let lucene = Lucene::build(&scratch, QUESTIONS)?;
        // What can be cured in them is.
        let options = Rung::PreTouch.options();
        let questions = fs::read_to_string(&lucene.questions)
            .map_err(LiveError::io(format!("reading {}", lucene.questions.display())))?;
        let questions = questions.lines().map(|line| line.replace(' ', "+")).collect();
        let [first, backup] = [(); 2].map(|()| lucene.serve(&options, ARTICLES, None, &scratch));
        let first = Some(first?);
        let servers = Self { scratch, lucene, options, questions, first, backup: backup? };
        let warm_up = Plan { time: WARM_UP, ..*plan };
        for at in servers.addresses() {
            let due = due(&warm_up, 0).map_err(LiveError::io("choosing times"))?;
            servers.load(&due, &at, &|| true)?;
        }
        Ok(servers)
    }

    fn addresses(&self) -> [String; 2] {
        let first = self.first.as_ref().map_or(0, |java| java.port);
        [first, self.backup.port].map(|port| format!("127.0.0.1:{port}"))
    }

    fn load(
        &self,
        due: &[Duration],
        at: &str,
        goes_on: &(impl Fn() -> bool + Sync),
    ) -> Result<Vec<Asked>, LiveError> {
        let load_of = Load { due, at, began: Instant::now() };
        let goes_on = || goes_on() && check_interrupted().is_ok();
        let asked = load(&load_of, &goes_on, &|stream, number| self.ask(stream, number));
        check_interrupted()?;
        asked.map_err(LiveError::io(format!("asking {at}")))
    }

    /// One policy, while both collect.
    pub(super) fn collecting(
        &self,
        plan: &Plan,
        policy: &str,
        seed: u64,
    ) -> Result<(Vec<Asked>, Done), LiveError> {
        let [to, backup] = self.addresses();
        let failed = || LiveError::io("starting the proxy");
        let proxy = Proxy::start(policy, &to, &backup).map_err(failed())?;
        let due = due(plan, seed).map_err(failed())?;
        let (asked, collected) = std::thread::scope(|scope| {
            let collects = scope.spawn(|| self.collect(plan, Instant::now()));
            (self.load(&due, &proxy.at, &|| true), joined(collects))
        });
        collected?;
        let asked = asked?;
        Ok((asked, proxy.end().map_err(LiveError::io("ending the proxy"))?))
    }

    /// Has both collect as often as the plan has pauses, the backup between two of the first's.
    fn collect(&self, plan: &Plan, began: Instant) -> Result<(), LiveError> {
        let half = plan.time / (plan.pauses + 1) / 2;
        for turn in 2..2 * (plan.pauses + 1) {
            std::thread::sleep((half * turn).saturating_sub(began.elapsed()));
            check_interrupted()?;
            let server = if turn % 2 == 0 { self.first.as_ref() } else { Some(&self.backup) };
            server.map_or(Ok(()), Java::collect)?;
        }
        Ok(())
    }

    /// How long requests took that came in the first second of a restarted server.
    pub(super) fn restarted(
        &mut self,
        plan: &Plan,
        policy: &str,
        seed: u64,
    ) -> Result<Vec<f64>, LiveError> {
        let [to, backup] = self.addresses();
        let proxy = Proxy::start(policy, &to, &backup).map_err(LiveError::io("the proxy"))?;
        // It ends when the server has served for a second.
        let endless = Plan { time: RESTART_AT_MOST, ..*plan };
        let due = due(&endless, seed).map_err(LiveError::io("choosing times"))?;
        let ends = AtomicBool::new(false);
        let began = Instant::now();
        let first = self.first.take();
        let (asked, started) = std::thread::scope(|scope| {
            // Relaxed: a flag that is polled; nothing is published through it.
            let load = scope.spawn(|| self.load(&due, &proxy.at, &|| !ends.load(Relaxed)));
            let started = self.start_anew(first, began);
            ends.store(true, Relaxed);
            (joined(load), started)
        });
        let (java, served) = started?;
        self.first = Some(java);
        let within = |asked: &Asked| (served..served + AFTER_RESTART).contains(&asked.due);
        Ok(asked?.into_iter().filter(within).map(|asked| asked.took_us).collect())
    }

    /// When it began to serve, since `began`.
    fn start_anew(
        &self,
        first: Option<Java>,
        began: Instant,
    ) -> Result<(Java, Duration), LiveError> {
        std::thread::sleep(BEFORE_RESTART);
        let port = first.as_ref().map(|java| java.port);
        drop(first);
        let java = self.lucene.serve(&self.options, ARTICLES, port, &self.scratch)?;
        let served = began.elapsed();
        std::thread::sleep(AFTER_RESTART);
        Ok((java, served))
    }

    /// Asks again on a new connection if the answer breaks off, or there is none. A proxy can't
    /// mend one whose server was killed in its middle, and tries again only some that were dropped.
    fn ask(&self, stream: &mut TcpStream, number: usize) -> io::Result<()> {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        // One that was reset has none.
        let proxy = stream.peer_addr()?;
        match self.ask_once(stream, number) {
            Err(error) if [BrokenPipe, ConnectionReset, UnexpectedEof].contains(&error.kind()) => {
                *stream = connect(proxy)?;
                self.ask_once(stream, number)
            }
            asked => asked,
        }
    }

    /// Asks, and takes the whole answer.
    fn ask_once(&self, stream: &mut TcpStream, number: usize) -> io::Result<()> {
        let question = &self.questions[number % self.questions.len()];
        let request = format!("GET /search?q={question} HTTP/1.1\r\nHost: bench\r\n\r\n");
        stream.write_all(request.as_bytes())?;
        let (mut bytes, mut answer) = ([0; 4096], Vec::new());
        while !is_whole(&answer)? {
            match stream.read(&mut bytes)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => answer.extend_from_slice(&bytes[..count]),
            }
        }
        Ok(())
    }
}

/// Whether an answer has come to its end; any but a good one is an error.
fn is_whole(answer: &[u8]) -> io::Result<bool> {
    let text = String::from_utf8_lossy(answer);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return Ok(false) };
    let mut lines = head.lines();
    let status = lines.next().unwrap_or_default();
    let length = lines
        .filter_map(|line| line.split_once(": "))
        .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        .and_then(|(_, length)| length.parse::<usize>().ok());
    match length {
        Some(length) if status.starts_with("HTTP/1.1 200 ") => Ok(body.len() >= length),
        _ if status.starts_with("HTTP/1.1 502 ") => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Err(io::Error::other(format!("the answer was {status:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_whole_or_wrong() {
        let head = "HTTP/1.1 200 OK\r\nContent-length: 3\r\n\r\n";
        for (answer, whole) in [
            (head[..30].to_owned(), false),
            (format!("{head}12"), false),
            (format!("{head}123"), true),
        ] {
            assert_eq!(is_whole(answer.as_bytes()).unwrap(), whole, "{answer}");
        }
        assert!(is_whole(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n").is_err());
        assert!(is_whole(b"HTTP/1.1 200 OK\r\n\r\n").is_err());
    }
}
