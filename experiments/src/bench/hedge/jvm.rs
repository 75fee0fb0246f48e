//! The same policies in front of two Lucene servers in Java, each of which collects its whole heap
//! now and then, and of which the first is restarted under load.
//!
//! Virtual machines take long to start and longer to get warm, so the same two serve all turns.
//! They are told when to collect, the same in all turns and never both at once: two that collect in
//! step are no help to each other, whatever the policy. During a restart neither collects.

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

    /// One policy, while both collect.
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
        let proxy = Proxy::start(policy, [&to, &backup], &self.scratch)?;
        // It ends when the server has served for a second.
        let endless = Plan { time: RESTART_AT_MOST, ..*plan };
        let due = due(&endless, seed)?;
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
