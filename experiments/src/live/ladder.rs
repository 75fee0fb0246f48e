//! The thesis's ladder (section 4.4): removes the causes of slow requests of a search service in
//! Java, one after the other. Each rung has its own change and the changes of all rungs below it.
//!
//! A new virtual machine loads classes. Then it uses memory for the first time. Once the memory is
//! used up, it collects garbage. So the iterations of a rung have three [`Phase`]s, and each of the
//! thesis's causes ([`ROWS`]) is expected in one of them.
//!
//! Every rung has its own virtual machine. It is new in the first iteration, and collects garbage
//! in the last ones. Rungs are interleaved iteration by iteration, so that a disturbance of the
//! machine affects all of them. If this is permitted, `elfen tailor` records each iteration and
//! reports the causes of its slowest requests.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use elfen_console::duration::number;
use elfen_console::programs::find_program;
use serde::{Deserialize, Serialize};

use super::latencies::{self, Latencies, TIMEOUT};
use super::lucene::{Java, Lucene, TEMPLATE};
use super::process::{Process, START_TIMEOUT, STOP_TIMEOUT};
use super::scratch::Scratch;
use super::{LiveError, check_interrupted};

/// The interval between two collections of a server in the last phase.
const COLLECT_EVERY: Duration = Duration::from_secs(1);
/// The time limit for the report of an iteration with many events.
const REPORT_TIMEOUT: Duration = Duration::from_secs(60);
/// The number of requests that warm up the backup and a restarted server.
const WARM_UP: u32 = 1_000;

/// The options of every virtual machine.
///
/// As in the thesis, only one compiler is used: a second would work in the background of some
/// iterations. The thesis's JDK 9 had no archive of loaded classes, and its Linux used huge pages.
/// The heap has room for all new objects until the last phase.
const OPTIONS: [&str; 7] = [
    "-Xms1152m",
    "-Xmx1152m",
    "-Xmn1g",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseTransparentHugePages",
    "-Xshare:off",
];
/// The last iteration of the second phase. In the fourth iteration, new objects are collected for
/// the first time. This collection takes longer than all page faults.
const MOST_FILLING: u32 = 3;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Rung {
    AsIs,
    Nodelay,
    PreTouch,
    Hedge,
}

impl Rung {
    pub(crate) const ALL: [Self; 4] = [Self::AsIs, Self::Nodelay, Self::PreTouch, Self::Hedge];

    /// Returns the name of the rung, its change in addition to those of the rungs below, and the
    /// thesis's maximum. The maximum is the client's in one iteration, in milliseconds: the lowest
    /// and the highest of 20 (section 4.4, Figures 4.11 to 4.14).
    pub(crate) fn facts(self) -> (&'static str, &'static str, (f64, f64)) {
        match self {
            Self::AsIs => ("as is", "nothing", (40.0, 46.0)),
            Self::Nodelay => ("nodelay", "answers do not wait for acknowledgements", (3.0, 40.0)),
            Self::PreTouch => ("pre-touch", "the heap is touched at the start", (2.5, 41.0)),
            Self::Hedge => {
                ("hedge", "a backup answers while the first restarts or collects", (3.0, 5.0))
            }
        }
    }

    pub(crate) fn name(self) -> &'static str {
        self.facts().0
    }

    pub(crate) fn options(self) -> Vec<String> {
        let nodelay = (self >= Self::Nodelay).then_some("-Dsun.net.httpserver.nodelay=true");
        let touched = (self >= Self::PreTouch).then_some("-XX:+AlwaysPreTouch");
        OPTIONS.into_iter().chain(nodelay).chain(touched).map(str::to_owned).collect()
    }
}

/// The state of a virtual machine's memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Phase {
    /// The virtual machine has just started.
    New,
    /// New objects use memory for the first time.
    Filling,
    /// The heap is collected from time to time.
    Collecting,
}

impl Phase {
    pub(crate) const ALL: [Self; 3] = [Self::New, Self::Filling, Self::Collecting];

    /// Returns the phase of an iteration, from 1, of `iterations`.
    pub(crate) fn of(iteration: u32, iterations: u32) -> Self {
        match iteration {
            ..=1 => Self::New,
            number if number <= MOST_FILLING.min(iterations.div_ceil(2)) => Self::Filling,
            _ => Self::Collecting,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Filling => "filling",
            Self::Collecting => "collecting",
        }
    }
}

/// A cause in the thesis, its name in `elfen tailor`, and the rung and the phase where it is
/// expected.
pub(crate) type CauseRow = (&'static str, &'static str, Rung, Phase);

/// The causes of the thesis. The next rung removes each of them.
pub(crate) const ROWS: [CauseRow; 4] = [
    ("Nagle and delayed ACK", "tcp-out", Rung::AsIs, Phase::Filling),
    ("page faults", "fault", Rung::Nodelay, Phase::Filling),
    ("class loading", "classload", Rung::PreTouch, Phase::New),
    ("garbage collection", "gc", Rung::PreTouch, Phase::Collecting),
];

#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct Plan {
    pub(crate) iterations: u32,
    pub(crate) queries: u32,
    pub(crate) rps: u32,
    pub(crate) connections: u32,
    pub(crate) articles: u32,
    pub(crate) seed: u64,
}

impl Plan {
    /// Returns the percentage of requests that count as slow. With fewer than 200 requests, one
    /// percent would be at most one request.
    pub(crate) fn slow_percent(&self) -> u32 {
        if self.queries < 200 { 10 } else { 1 }
    }
}

/// One iteration of one rung.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct Iteration {
    pub(crate) rung: Rung,
    /// The number of the iteration, from 1.
    pub(crate) number: u32,
    pub(crate) phase: Phase,
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
    pub(crate) p999_ms: f64,
    pub(crate) max_ms: f64,
    /// The page faults of the first server in this iteration.
    pub(crate) page_faults: Option<u64>,
    /// The time of each cause in the slowest requests, in milliseconds; empty without a recording.
    pub(crate) causes_ms: BTreeMap<String, f64>,
}

#[derive(Debug)]
pub(crate) struct LadderResults {
    pub(crate) iterations: Vec<Iteration>,
    /// The p99.9 over all requests of each rung.
    pub(crate) p999_ms: BTreeMap<Rung, f64>,
    /// The policy of the proxy. Events of collections require root, so other users get another
    /// policy.
    pub(crate) policy: &'static str,
    pub(crate) not_recorded: Option<String>,
}

/// The servers of a rung. The fields are dropped in this order, so the servers end before the
/// proxy.
#[derive(Debug)]
struct RungServers {
    first: Java,
    backup: Option<Java>,
    proxy: Option<Process>,
    /// The port for clients.
    port: u16,
}

struct Ladder<'a> {
    plan: &'a Plan,
    scratch: Scratch,
    lucene: Lucene,
    not_recorded: Option<String>,
    policy: &'static str,
}

/// Measures all rungs in each iteration of the plan, and calls `on_iteration` after each
/// measurement.
pub(crate) fn run_ladder(
    plan: &Plan,
    mut on_iteration: impl FnMut(&Iteration),
) -> Result<LadderResults, LiveError> {
    let scratch = Scratch::new(1).map_err(LiveError::io("creating a temporary folder"))?;
    let lucene = Lucene::build(&scratch, plan.queries.max(WARM_UP))?;
    let policy = if nix::unistd::geteuid().is_root() { "hazard" } else { "look" };
    let mut ladder = Ladder { plan, scratch, lucene, not_recorded: None, policy };
    let mut servers = BTreeMap::new();
    let mut latencies: BTreeMap<Rung, Latencies> = BTreeMap::new();
    let mut iterations = Vec::new();
    for number in 1..=plan.iterations {
        for rung in Rung::ALL {
            check_interrupted()?;
            if number == 1 {
                servers.insert(rung, ladder.start_servers(rung)?);
            }
            let servers_of_rung =
                servers.get_mut(&rung).expect("it was started in the first iteration");
            let (iteration, took) = ladder.iteration(rung, number, servers_of_rung)?;
            on_iteration(&iteration);
            iterations.push(iteration);
            latencies.entry(rung).or_default().add(took);
        }
    }
    let p999_ms = latencies.iter().map(|(rung, all)| (*rung, all.at(999))).collect();
    let Ladder { not_recorded, policy, .. } = ladder;
    Ok(LadderResults { iterations, p999_ms, policy, not_recorded })
}

impl Ladder<'_> {
    fn start_servers(&self, rung: Rung) -> Result<RungServers, LiveError> {
        let serve =
            |port| self.lucene.serve(&rung.options(), self.plan.articles, port, &self.scratch);
        if rung != Rung::Hedge {
            let first = serve(None)?;
            let port = first.port;
            return Ok(RungServers { first, backup: None, proxy: None, port });
        }
        let (first, backup) = (serve(None)?, serve(None)?);
        let (proxy, port) = self.proxy([first.port, backup.port])?;
        // The backup and the proxy are warmed up by requests.
        for port in [backup.port, port] {
            self.load(port, WARM_UP, self.plan.seed)?;
        }
        // The first server is restarted, so that it is new in the first iteration like on every
        // other rung.
        let at = first.port;
        drop(first);
        let first = serve(Some(at))?;
        Ok(RungServers { first, backup: Some(backup), proxy: Some(proxy), port })
    }

    fn proxy(&self, servers: [u16; 2]) -> Result<(Process, u16), LiveError> {
        let [to, backup] = servers.map(|port| format!("127.0.0.1:{port}"));
        let mut command = Command::new(find_program("elfen-hedge")?);
        command.args(["--listen", "127.0.0.1:0", "--to", &to, "--backup", &backup]);
        command.args(["--policy", self.policy, "--replay", &WARM_UP.to_string()]);
        let mut proxy = Process::start_anywhere("elfen-hedge", command, &self.scratch)?;
        let port = proxy.wait_for(START_TIMEOUT, |proxy| {
            proxy.stderr_text().split_once('\n')?.0.rsplit_once(':')?.1.parse().ok()
        })?;
        Ok((proxy, port))
    }

    fn iteration(
        &mut self,
        rung: Rung,
        number: u32,
        servers: &mut RungServers,
    ) -> Result<(Iteration, Latencies), LiveError> {
        let faults_before = servers.first.page_faults();
        let phase = Phase::of(number, self.plan.iterations);
        let recorder = self.record(servers.port, phase)?;
        let seed = self.plan.seed + u64::from(number);
        let latencies = match phase {
            Phase::Collecting => self.load_during_collections(servers, seed)?,
            _ => self.load(servers.port, self.plan.queries, seed),
        };
        let causes_ms = recorder.map_or(Ok(BTreeMap::new()), |recorder| self.causes(recorder))?;
        // A dead server makes requests fail, so it is reported before the failed requests are.
        servers.check_alive()?;
        let latencies = latencies?;
        let faults = servers.first.page_faults().zip(faults_before);
        let [p50_ms, p99_ms, p999_ms, max_ms] = [500, 990, 999, 1000].map(|at| latencies.at(at));
        let iteration = Iteration {
            rung,
            number,
            phase,
            p50_ms,
            p99_ms,
            p999_ms,
            max_ms,
            page_faults: faults.map(|(after, before)| after.saturating_sub(before)),
            causes_ms,
        };
        Ok((iteration, latencies))
    }

    /// Sends the load while the servers collect at fixed times. The backup collects between two
    /// collections of the first server, because servers that collect at the same time could not
    /// help each other.
    fn load_during_collections(
        &self,
        servers: &RungServers,
        seed: u64,
    ) -> Result<Result<Latencies, LiveError>, LiveError> {
        let RungServers { first, backup, port, .. } = servers;
        // Dropping the sender ends the collections. Nothing is sent.
        let (over, ends) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let collects = scope.spawn(move || -> Result<(), LiveError> {
                let next = || ends.recv_timeout(COLLECT_EVERY / 2);
                while next() == Err(RecvTimeoutError::Timeout) {
                    first.collect()?;
                    if next() != Err(RecvTimeoutError::Timeout) {
                        break;
                    }
                    backup.as_ref().map_or(Ok(()), Java::collect)?;
                }
                Ok(())
            });
            let latencies = self.load(*port, self.plan.queries, seed);
            drop(over);
            collects.join().map_err(|_| LiveError::Io {
                what: "requesting garbage collections".to_owned(),
                error: std::io::Error::other("a thread failed"),
            })??;
            Ok(latencies)
        })
    }

    fn load(&self, port: u16, requests: u32, seed: u64) -> Result<Latencies, LiveError> {
        let Plan { rps, connections, .. } = self.plan;
        let csv = self.scratch.path("requests.csv");
        let mut command = Command::new(find_program("elfen-load")?);
        let numbers = [
            ("--rps", rps.to_string()),
            ("--connections", connections.to_string()),
            ("--requests", requests.to_string()),
            ("--seed", seed.to_string()),
            ("--timeout", format!("{}s", TIMEOUT.as_secs())),
        ];
        for (option, value) in numbers {
            command.args([option, &value]);
        }
        command.args(["--allow-late", "--json", "--template", TEMPLATE]);
        command.arg("--queries").arg(&self.lucene.questions).arg("--csv").arg(&csv);
        command.arg(format!("http://127.0.0.1:{port}"));
        let mut load = Process::start_anywhere("elfen-load", command, &self.scratch)?;
        let takes = Duration::from_secs_f64(f64::from(requests) / f64::from(*rps));
        load.finish(None, takes * 2 + TIMEOUT + REPORT_TIMEOUT)?;
        latencies::read(&csv).map(|requests| requests.latencies)
    }

    /// Starts a recording. If recording is not permitted, it is not tried again. Page faults need
    /// full detail. The other phases use less detail, because full detail would slow down a new
    /// virtual machine.
    fn record(&mut self, port: u16, phase: Phase) -> Result<Option<Process>, LiveError> {
        if self.not_recorded.is_some() {
            return Ok(None);
        }
        let mut command = Command::new(find_program("elfen")?);
        let detail = if phase == Phase::Filling { "full" } else { "sched" };
        command.args(["tailor", "record", "--port", &port.to_string(), "--detail", detail]);
        command.arg("-o").arg(self.scratch.path("trace"));
        let mut recorder = Process::start_anywhere("elfen tailor", command, &self.scratch)?;
        let begun = |recorder: &Process| is_recording(&recorder.stderr_text(), port).then_some(());
        match recorder.wait_for(START_TIMEOUT, begun) {
            Ok(()) => Ok(Some(recorder)),
            Err(LiveError::Failed { message, .. }) => {
                self.not_recorded = Some(message.trim_start_matches("elfen: ").to_owned());
                Ok(None)
            }
            Err(other) => Err(other),
        }
    }

    fn causes(&self, mut recorder: Process) -> Result<BTreeMap<String, f64>, LiveError> {
        /// The fields of `elfen tailor report --json` that are used here.
        #[derive(Deserialize)]
        struct Report {
            slow_requests: u32,
            causes: Vec<Cause>,
        }
        #[derive(Deserialize)]
        struct Cause {
            cause: String,
            tail_ns: u64,
        }
        recorder.finish(Some(libc::SIGINT), STOP_TIMEOUT)?;
        let mut command = Command::new(find_program("elfen")?);
        let slow = format!("p{}", 100 - self.plan.slow_percent());
        command
            .args(["tailor", "report", "--json", "-k", "0", "--slow", &slow])
            .arg(self.scratch.path("trace"));
        let mut report = Process::start_anywhere("elfen tailor", command, &self.scratch)?;
        let Report { slow_requests, causes } = report.finish_json(None, REPORT_TIMEOUT)?;
        let ms =
            |cause: Cause| (cause.cause, number(cause.tail_ns) / 1e6 * f64::from(slow_requests));
        Ok(causes.into_iter().map(ms).collect())
    }
}

/// Whether the recorder has begun. Its error messages contain the word "recording" too.
fn is_recording(message: &str, port: u16) -> bool {
    let end = format!(", port {port}");
    message.lines().any(|line| line.starts_with("elfen: recording ") && line.ends_with(&end))
}

impl RungServers {
    fn check_alive(&mut self) -> Result<(), LiveError> {
        self.first.check_alive()?;
        self.backup.as_mut().map_or(Ok(()), Java::check_alive)?;
        self.proxy.as_mut().map_or(Ok(()), Process::check_alive)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_recorder_has_not_begun() {
        let begins = "elfen: process 7 is a JVM: by its probes\nelfen: recording java, port 80\n";
        assert!(is_recording(begins, 80) && !is_recording(begins, 8));
        let fails = "elfen: recording events of the kernel: not permitted; run it as root\n";
        assert!(!is_recording(fails, 80) && !is_recording("", 80));
    }

    #[test]
    fn each_rung_has_the_options_of_those_below() {
        for pair in Rung::ALL.windows(2) {
            let [below, above] = [pair[0], pair[1]].map(Rung::options);
            assert!(above.starts_with(&below), "{below:?}, {above:?}");
        }
        assert_eq!(Rung::Hedge.options().len(), OPTIONS.len() + 2);
    }

    #[test]
    fn phases_depend_on_the_number_of_iterations() {
        let phases = |iterations| {
            let all: Vec<_> = (1..=iterations).map(|at| Phase::of(at, iterations)).collect();
            Phase::ALL.map(|phase| all.iter().filter(|of| **of == phase).count())
        };
        let expected = [[1, 0, 0], [1, 0, 1], [1, 1, 1], [1, 1, 2], [1, 2, 17]];
        assert_eq!([1, 2, 3, 4, 20].map(phases), expected);
    }
}
