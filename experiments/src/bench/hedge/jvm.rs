//! The same policies in front of two Lucene servers in Java. Each server collects its whole heap
//! now and then. In a second series of turns, the first server is restarted under load.
//!
//! Virtual machines start slowly and take even longer to warm up, so the same two servers are used
//! in all turns. The benchmark triggers their collections at the same points of every turn, and
//! never both at once. If both collected together, neither could replace the other, whatever the
//! policy. During a restart neither collects.

use std::fs;
use std::io;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use super::load::{Asked, Done, Plan, Proxy, connect, due, get, load};
use crate::bench::joined;
use crate::live::ladder::Rung;
use crate::live::lucene::{Java, Lucene};
use crate::live::scratch::Scratch;
use crate::live::{LiveError, check_interrupted};

const ARTICLES: u32 = 10_000;
const QUESTIONS: u32 = 1_000;
/// The JIT compiler compiles a method after some hundred calls.
const WARM_UP: Duration = Duration::from_secs(5);
/// Requests arrive during this time, and the proxy records them for its replay.
const BEFORE_RESTART: Duration = Duration::from_secs(2);
const AFTER_RESTART: Duration = Duration::from_secs(1);
const RESTART_AT_MOST: Duration = Duration::from_secs(120);

/// Two running servers that are warm.
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
        // Use the options that avoid the pauses that can be avoided.
        let options = Rung::PreTouch.options();
        let questions = fs::read_to_string(&lucene.questions)
            .map_err(LiveError::io(format!("reading {}", lucene.questions.display())))?;
        let questions = questions.lines().map(|line| line.replace(' ', "+")).collect();
        let [first, backup] = [(); 2].map(|()| lucene.serve(&options, ARTICLES, None, &scratch));
        let first = Some(first?);
        let servers = Self { scratch, lucene, options, questions, first, backup: backup? };
        let warm_up = Plan { time: WARM_UP, ..*plan };
        for at in servers.addresses() {
            servers.load(&due(&warm_up, 0)?, &at, &|| true)?;
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
        let goes_on = || goes_on() && check_interrupted().is_ok();
        let ask = |stream: &mut TcpStream, number| self.ask(stream, number);
        let asked = load(due, at, Instant::now(), &goes_on, &ask);
        check_interrupted()?;
        asked
    }

    /// Measures one policy while both servers collect from time to time.
    pub(super) fn collecting(
        &self,
        plan: &Plan,
        policy: &str,
        seed: u64,
    ) -> Result<(Vec<Asked>, Done), LiveError> {
        let [to, backup] = self.addresses();
        let proxy = Proxy::start(policy, [&to, &backup], &self.scratch)?;
        let due = due(plan, seed)?;
        let (asked, collected) = std::thread::scope(|scope| {
            let collects = scope.spawn(|| self.collect(plan, Instant::now()));
            (self.load(&due, &proxy.at, &|| true), joined(collects))
        });
        collected?;
        Ok((asked?, proxy.end()?))
    }

    /// Triggers `plan.pauses` collections of the first server. The backup collects halfway between
    /// two of them.
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

    /// Returns the latencies of the requests that were due in the first second after a restart.
    pub(super) fn restarted(
        &mut self,
        plan: &Plan,
        policy: &str,
        seed: u64,
    ) -> Result<Vec<f64>, LiveError> {
        let [to, backup] = self.addresses();
        let proxy = Proxy::start(policy, [&to, &backup], &self.scratch)?;
        // The load ends one second after the server has started to serve.
        let endless = Plan { time: RESTART_AT_MOST, ..*plan };
        let due = due(&endless, seed)?;
        let ends = AtomicBool::new(false);
        let began = Instant::now();
        let first = self.first.take();
        let (asked, started) = std::thread::scope(|scope| {
            // Relaxed: a flag that is polled; no other data depends on it.
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

    /// Restarts the server. Returns it, and the time from `began` until it served.
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

    /// Repeats the request on a new connection if the connection broke. The proxy cannot repair an
    /// answer whose server was killed in the middle of it, and it retries only some of the dropped
    /// requests.
    fn ask(&self, stream: &mut TcpStream, number: usize) -> io::Result<()> {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        // A connection that was reset has no peer address, so get the address first.
        let proxy = stream.peer_addr()?;
        let question = &self.questions[number % self.questions.len()];
        let path = format!("/search?q={question}");
        match get(stream, &path) {
            Err(error) if [BrokenPipe, ConnectionReset, UnexpectedEof].contains(&error.kind()) => {
                *stream = connect(proxy)?;
                get(stream, &path)
            }
            asked => asked,
        }
        .map(drop)
    }
}
