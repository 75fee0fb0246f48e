//! The thesis's ladder (section 4.4): a search service in Java whose causes of slow requests are
//! taken away one after the other, each rung with the cures of those before it.
//!
//! Every rung has a virtual machine of its own, which is new in its first iteration and is told to
//! collect in the last ones, and rungs take turns iteration by iteration: what the machine does
//! meanwhile befalls all of them. `elfen tailor` records each iteration, where it may, and says why
//! its slowest requests were slow.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use elfen_console::duration::number;
use elfen_console::programs::find_program;
use serde::{Deserialize, Serialize};

use super::latencies::{Latencies, TIMEOUT};
use super::lucene::{Java, Lucene, TEMPLATE};
use super::os::Place;
use super::os::Rank::Normal;
use super::process::{Process, TO_END, TO_START, wait_for};
use super::rungs::{Phase, Rung};
use super::scratch::Scratch;
use super::{LiveError, go_on};

/// In the last phase, a server collects so often.
const COLLECT_EVERY: Duration = Duration::from_secs(1);
/// A report of an iteration takes its time where there are many events.
const TO_REPORT: Duration = Duration::from_secs(60);
/// Requests by which the proxy warms a restarted server, and by which the backup is warmed.
const WARM_UP: u32 = 1_000;

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
    /// Which part of the requests of an iteration is slow: of few, the slowest hundredth is none.
    pub(crate) fn slow_percent(&self) -> u32 {
        if self.queries < 200 { 10 } else { 1 }
    }
}

/// One iteration of one rung.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct Iteration {
    pub(crate) rung: Rung,
    /// From 1.
    pub(crate) number: u32,
    pub(crate) phase: Phase,
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
    pub(crate) p999_ms: f64,
    pub(crate) max_ms: f64,
    /// Of the first server.
    pub(crate) page_faults: Option<u64>,
    /// What its slowest were charged for, in milliseconds; nothing where nothing was recorded.
    pub(crate) causes_ms: BTreeMap<String, f64>,
}

#[derive(Debug)]
pub(crate) struct Climbed {
    pub(crate) iterations: Vec<Iteration>,
    /// All requests of a rung.
    pub(crate) p999_ms: BTreeMap<Rung, f64>,
    /// How the proxy chose: it takes a privilege to be told of collections.
    pub(crate) policy: &'static str,
    pub(crate) not_recorded: Option<String>,
}

/// What serves a rung; servers end before the proxy that would miss them.
#[derive(Debug)]
struct Served {
    first: Java,
    backup: Option<Java>,
    proxy: Option<Process>,
    /// Where clients ask.
    port: u16,
}

struct Ladder<'a> {
    plan: &'a Plan,
    scratch: Scratch,
    lucene: Lucene,
    not_recorded: Option<String>,
    policy: &'static str,
}

/// Climbs it so many times; `made` hears of each iteration.
pub(crate) fn climb(plan: &Plan, mut made: impl FnMut(&Iteration)) -> Result<Climbed, LiveError> {
    let scratch = Scratch::new(1).map_err(LiveError::io("making a folder"))?;
    let lucene = Lucene::build(&scratch, plan.queries.max(WARM_UP))?;
    let policy = if nix::unistd::geteuid().is_root() { "hazard" } else { "look" };
    let mut ladder = Ladder { plan, scratch, lucene, not_recorded: None, policy };
    let mut served = BTreeMap::new();
    let mut latencies: BTreeMap<Rung, Latencies> = BTreeMap::new();
    let mut iterations = Vec::new();
    for number in 1..=plan.iterations {
        for rung in Rung::ALL {
            go_on()?;
            if number == 1 {
                served.insert(rung, ladder.serve(rung)?);
            }
            let serves = served.get_mut(&rung).expect("it was started in the first iteration");
            let (iteration, took) = ladder.iteration(rung, number, serves)?;
            made(&iteration);
            iterations.push(iteration);
            latencies.entry(rung).or_default().add(took);
        }
    }
    let p999_ms = latencies.iter().map(|(rung, all)| (*rung, all.at(999))).collect();
    let Ladder { not_recorded, policy, .. } = ladder;
    Ok(Climbed { iterations, p999_ms, policy, not_recorded })
}

impl Ladder<'_> {
    fn serve(&self, rung: Rung) -> Result<Served, LiveError> {
        let serve =
            |port| self.lucene.serve(&rung.options(), self.plan.articles, port, &self.scratch);
        if rung != Rung::Hedge {
            let first = serve(None)?;
            let port = first.port;
            return Ok(Served { first, backup: None, proxy: None, port });
        }
        let (first, backup) = (serve(None)?, serve(None)?);
        let (proxy, port) = self.proxy([first.port, backup.port])?;
        // The backup has served for a while, and the proxy has seen requests.
        for port in [backup.port, port] {
            self.load(port, WARM_UP, self.plan.seed)?;
        }
        // The first begins anew, as that of every other rung does.
        let at = first.port;
        drop(first);
        let first = serve(Some(at))?;
        Ok(Served { first, backup: Some(backup), proxy: Some(proxy), port })
    }

    fn proxy(&self, servers: [u16; 2]) -> Result<(Process, u16), LiveError> {
        let [to, backup] = servers.map(|port| format!("127.0.0.1:{port}"));
        let mut command = Command::new(find_program("elfen-hedge")?);
        command.args(["--listen", "127.0.0.1:0", "--to", &to, "--backup", &backup]);
        command.args(["--policy", self.policy, "--replay", &WARM_UP.to_string()]);
        let place = Place::anywhere(Normal);
        let mut proxy = Process::start("elfen-hedge", command, &place, &self.scratch)?;
        let port = wait_for(&mut proxy, TO_START, |proxy| {
            proxy.said().split_once('\n')?.0.rsplit_once(':')?.1.parse().ok()
        })?;
        Ok((proxy, port))
    }

    fn iteration(
        &mut self,
        rung: Rung,
        number: u32,
        served: &mut Served,
    ) -> Result<(Iteration, Latencies), LiveError> {
        let faults_before = served.first.page_faults();
        let phase = Phase::of(number, self.plan.iterations);
        let recorder = self.record(served.port, phase)?;
        let seed = self.plan.seed + u64::from(number);
        let latencies = match phase {
            Phase::Collecting => self.load_beside_collections(served, seed)?,
            _ => self.load(served.port, self.plan.queries, seed),
        };
        let causes_ms = recorder.map_or(Ok(BTreeMap::new()), |recorder| self.causes(recorder))?;
        // Who has died is the reason for what requests met.
        served.lives()?;
        let latencies = latencies?;
        let faults = served.first.page_faults().zip(faults_before);
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

    /// Collections come by the clock, the backup's between those of the first: two servers that
    /// collect in step are no help to each other.
    fn load_beside_collections(
        &self,
        served: &Served,
        seed: u64,
    ) -> Result<Result<Latencies, LiveError>, LiveError> {
        let Served { first, backup, port, .. } = served;
        // Its end is the end of collections; nothing is sent.
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
                what: "having servers collect".to_owned(),
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
        let place = Place::anywhere(Normal);
        let load = Process::start("elfen-load", command, &place, &self.scratch)?;
        let takes = Duration::from_secs_f64(f64::from(requests) / f64::from(*rps));
        load.finish(None, takes * 2 + TIMEOUT + TO_REPORT)?;
        Latencies::read(&csv)
    }

    /// Where it may not, once is enough to try. Page faults are seen in full detail alone, which
    /// would slow a new virtual machine for nothing.
    fn record(&mut self, port: u16, phase: Phase) -> Result<Option<Process>, LiveError> {
        if self.not_recorded.is_some() {
            return Ok(None);
        }
        let mut command = Command::new(find_program("elfen")?);
        let detail = if phase == Phase::Filling { "full" } else { "sched" };
        command.args(["tailor", "record", "--port", &port.to_string(), "--detail", detail]);
        command.arg("-o").arg(self.scratch.path("trace"));
        let place = Place::anywhere(Normal);
        let mut recorder = Process::start("elfen tailor", command, &place, &self.scratch)?;
        let begun = |recorder: &Process| is_recording(&recorder.said(), port).then_some(());
        match wait_for(&mut recorder, TO_START, begun) {
            Ok(()) => Ok(Some(recorder)),
            Err(LiveError::Failed { said, .. }) => {
                self.not_recorded = Some(said.trim_start_matches("elfen: ").to_owned());
                Ok(None)
            }
            Err(other) => Err(other),
        }
    }

    fn causes(&self, recorder: Process) -> Result<BTreeMap<String, f64>, LiveError> {
        /// Of `elfen tailor report --json`, as far as it is needed.
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
        recorder.finish(Some(libc::SIGINT), TO_END)?;
        let mut command = Command::new(find_program("elfen")?);
        let slow = format!("p{}", 100 - self.plan.slow_percent());
        command
            .args(["tailor", "report", "--json", "-k", "0", "--slow", &slow])
            .arg(self.scratch.path("trace"));
        let place = Place::anywhere(Normal);
        let report = Process::start("elfen tailor", command, &place, &self.scratch)?;
        let Report { slow_requests, causes } = report.finish_json(None, TO_REPORT)?;
        let ms =
            |cause: Cause| (cause.cause, number(cause.tail_ns) / 1e6 * f64::from(slow_requests));
        Ok(causes.into_iter().map(ms).collect())
    }
}

/// Its failures speak of recording as well.
fn is_recording(said: &str, port: u16) -> bool {
    let end = format!(", port {port}");
    said.lines().any(|line| line.starts_with("elfen: recording ") && line.ends_with(&end))
}

impl Served {
    fn lives(&mut self) -> Result<(), LiveError> {
        self.first.lives()?;
        self.backup.as_mut().map_or(Ok(()), Java::lives)?;
        self.proxy.as_mut().map_or(Ok(()), Process::lives)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recorder_that_may_not_is_none_that_began() {
        let begins = "elfen: process 7 is a JVM: by its probes\nelfen: recording java, port 80\n";
        assert!(is_recording(begins, 80) && !is_recording(begins, 8));
        let fails = "elfen: recording events of the kernel: not permitted; run it as root\n";
        assert!(!is_recording(fails, 80) && !is_recording("", 80));
    }
}
