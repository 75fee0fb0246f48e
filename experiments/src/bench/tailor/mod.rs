//! `elfen lab bench tailor`: what recording for `elfen tailor` costs. Measured are a hand-over
//! between two threads, and a request over a socket; or a service that is under load.
//!
//! The reader sleeps while hand-overs are measured. Its own cost is measured apart, as its CPU time
//! for each event that it took.

mod counted;
mod served;

use std::hint::black_box;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use elfen_console::duration::{self, number};
use elfen_kernel::events::{Detail, Events, Watched};
use elfen_machine::affinity;
use elfen_machine::cpulist::CpuSet;
use elfen_rt::clock::monotonic_ns;
use elfen_rt::signal::event::{Event, Words};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use self::served::Served;
use super::signal::Turns;
use super::{
    BenchError, Column, Explain, Hear, Part, Report, Row, Scenario, Values, label, metric, pin,
    row, runs,
};
use crate::live::scratch::Scratch;

const TURNS_A_BATCH: u32 = 2_000;
/// Holds the events of a batch.
const RING: u32 = 65_536;

const EXAMPLE: &str = "\
Examples:
  sudo elfen lab bench tailor                    with and without its programs
  sudo elfen lab bench tailor --service search   CPU of a request of a service
                                             that is under load
  sudo elfen lab bench tailor --service search --runs 150 -d 200ms
                                             the same, by more and shorter
                                             times: a narrower interval
  sudo elfen lab bench tailor --redis 6379 --duty 10% -d 4s
                                             CPU of a command of a Redis
                                             that is under load, recorded
                                             for a tenth of each 4 s";

/// Measure what recording for `elfen tailor` costs
///
/// A hand-over between two threads through pipes, and a request between two threads over loopback,
/// interleaved with nothing attached; what `perf sched record` adds to the same hand-over, where
/// there is one; and what the reader takes for an event. With --service or --redis, the CPU time of
/// a request of a service that is under load, recorded and not, and that of the recorder.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Args {
    /// The name under which a service publishes its requests
    #[arg(long, value_name = "NAME", group = "served")]
    service: Option<String>,

    /// The port of a Redis on this machine, recorded by its sockets; it counts its commands itself
    #[arg(long, value_name = "PORT", group = "served",
        value_parser = clap::value_parser!(u16).range(1..))]
    redis: Option<u16>,

    /// Record only for so much of each time, as `elfen tailor record --duty` does of 4 s
    #[arg(long, value_name = "PERCENT", default_value = "100%", requires = "served",
        value_parser = duty)]
    duty: u32,

    /// Rounds, each with every detail and with none [default: 20 of a service, 12 of hand-overs]
    #[arg(long, value_name = "N", value_parser = runs())]
    runs: Option<usize>,

    /// How long the service is measured in each
    #[arg(short, long, value_name = "TIME", default_value = "1s", requires = "served",
        value_parser = duration::parse)]
    duration: Duration,
}

fn duty(text: &str) -> Result<u32, String> {
    let percent = text.strip_suffix('%').unwrap_or(text).parse().ok();
    let percent = percent.filter(|percent| (2..=100).contains(percent));
    percent.ok_or_else(|| "it is 2% to 100%".to_owned())
}

pub(crate) fn run(args: &Args, hear: Hear<'_>) -> Result<Report, BenchError> {
    let (mut served, mut words) = match (&args.service, args.redis) {
        (Some(name), _) => (Served::find(name)?, vec!["--service".to_owned(), name.clone()]),
        (None, Some(port)) => (Served::redis(port)?, vec!["--port".to_owned(), port.to_string()]),
        (None, None) => return hand_overs(args.runs.unwrap_or(12), hear),
    };
    served.time = args.duration;
    served.duty_percent = args.duty;
    let table = served.table("served", args.runs.unwrap_or(20), hear)?;
    if args.duty < 100 {
        words.extend(["--duty".to_owned(), format!("{}%", args.duty)]);
    }
    hear("the recorder, as a process");
    let tables = vec![table, served::recorder(&words)?];
    Ok(Report { about: row!["duty_percent" => args.duty], tables, ..Report::default() })
}

fn hand_overs(runs: usize, hear: Hear<'_>) -> Result<Report, BenchError> {
    let elsewhere = affinity::allowed()?;
    let cpu = elsewhere.iter().next().unwrap_or(0);
    pin(cpu)?;
    let ends = [Turns::pipe(), Turns::socket()];
    let [pipe, socket] = ends.map(|turns| turns.explain("handing bytes between threads", AGAIN));
    let mut all = HandOvers { cpu, elsewhere, pipe: pipe?, socket: socket?, no_perf: None };
    let mut table = all.table("costs", runs, hear)?;
    let mut left_out = Vec::new();
    if let Some(why) = all.no_perf {
        table.rows.remove(PERF);
        left_out.push(format!("perf sched record: {why}"));
    }
    Ok(Report { about: row!["cpu" => cpu], tables: vec![table], left_out, wrong: None })
}

const AGAIN: &str = "try again";
/// The case of `perf sched record`.
const PERF: usize = 2;

struct HandOvers {
    cpu: u32,
    /// `perf` may run wherever we might.
    elsewhere: CpuSet,
    pipe: Turns,
    socket: Turns,
    no_perf: Option<String>,
}

impl Scenario for HandOvers {
    const COLUMNS: &'static [Column] = &[
        label("case", "what"),
        metric("ns", "there and back", "ns", 1).lower(),
        metric("added_ns", "added", "ns", 1).added_to("ns").lower(),
        metric("reader_ns_an_event", "reader, for an event", "ns", 1).lower().show(&[Part::Median]),
    ];

    fn cases(&self) -> Vec<Row> {
        let cases = [
            "a hand-over through pipes, not recorded",
            "the same, recorded with --detail sched",
            "the same, by perf sched record",
            "a request over loopback, not recorded",
            "the same, recorded with --detail sched",
            "the same, recorded with --detail full",
        ];
        cases.map(|case| row!["case" => case]).to_vec()
    }

    fn baseline(&self, case: usize) -> Option<usize> {
        [None, Some(0), Some(0), None, Some(3), Some(3)][case]
    }

    fn run(&mut self, case: usize, _: usize, values: &mut Values) -> Result<(), BenchError> {
        let detail = match case {
            0 | 3 => None,
            PERF => {
                if self.no_perf.is_none() {
                    match self.next_to_perf()? {
                        Ok(ns) => values.add("ns", ns),
                        Err(why) => self.no_perf = Some(why),
                    }
                }
                return Ok(());
            }
            5 => Some(Detail::Full),
            _ => Some(Detail::Sched),
        };
        let turns = if case < PERF { &mut self.pipe } else { &mut self.socket };
        let watched =
            Watched { port: turns.port, processes: vec![std::process::id()], cpus: vec![self.cpu] };
        let events = detail.map(|detail| Events::attach(detail, RING, &watched)).transpose()?;
        values.add("ns", turns.ns_a_turn(TURNS_A_BATCH)?);
        if let Some(mut events) = events {
            values.add("reader_ns_an_event", ns_an_event(&mut events, self.cpu)?);
        }
        Ok(())
    }
}

impl HandOvers {
    /// A hand-over next to `perf sched record`; or why there is none.
    fn next_to_perf(&mut self) -> Result<Result<f64, Lacking>, BenchError> {
        let scratch = Scratch::new(1)?;
        let mut perf = match PerfSched::start(&scratch.path("perf.data"), &self.elsewhere) {
            Ok(perf) => perf,
            Err(why) => return Ok(Err(why)),
        };
        if let Err(why) = perf.begins(|| self.pipe.ns_a_turn(TURNS_A_BATCH).map(drop)) {
            return Ok(Err(why));
        }
        Ok(Ok(self.pipe.ns_a_turn(TURNS_A_BATCH)?))
    }
}

/// What taking the events of a batch costs, for each.
fn ns_an_event(events: &mut Events, cpu: u32) -> Result<f64, BenchError> {
    let mut words: Vec<Words> = Vec::new();
    let start = monotonic_ns();
    events.read(cpu, &mut words);
    for event in words.iter().filter_map(Event::decode) {
        black_box(event);
    }
    let took_ns = monotonic_ns() - start;
    if words.is_empty() {
        return Err(BenchError::failed("nothing was recorded", AGAIN));
    }
    Ok(number(took_ns) / number(words.len() as u64))
}

/// It writes what it has once some has come together.
const TO_RECORD: Duration = Duration::from_secs(10);
/// More than what the file begins with.
const HAS_EVENTS: u64 = 256 << 10;

/// One that records all CPUs; it ends with this, and its file goes.
#[derive(Debug)]
struct PerfSched {
    process: Child,
    file: PathBuf,
}

/// Why there is none, in a few words.
type Lacking = String;

impl PerfSched {
    /// Writes to `file`, on whichever of these CPUs.
    fn start(file: &Path, cpus: &CpuSet) -> Result<Self, Lacking> {
        let mut command = Command::new("perf");
        command.args(["sched", "record", "--no-buildid", "-o"]).arg(file);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let process = command.spawn().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => "there is no perf here".to_owned(),
            _ => error.to_string(),
        })?;
        affinity::set(process.id(), cpus).map_err(|error| error.to_string())?;
        Ok(Self { process, file: file.to_owned() })
    }

    /// Has `turn` go on until events are in the file.
    fn begins(&mut self, mut turn: impl FnMut() -> io::Result<()>) -> Result<(), Lacking> {
        let began = Instant::now();
        while self.file.metadata().map_or(0, |file| file.len()) < HAS_EVENTS {
            if let Ok(Some(status)) = self.process.try_wait() {
                return Err(format!("perf sched record ended with {status}"));
            }
            if began.elapsed() > TO_RECORD {
                return Err("perf sched record wrote nothing in 10 s".to_owned());
            }
            turn().map_err(|error| error.to_string())?;
        }
        Ok(())
    }
}

impl Drop for PerfSched {
    fn drop(&mut self) {
        let id = i32::try_from(self.process.id()).map(Pid::from_raw);
        // It has its children end as well; one that is gone needs no end.
        let _gone = id.map(|id| kill(id, Signal::SIGINT));
        let _ended = self.process.wait();
        // It may not have come to make it.
        let _none = std::fs::remove_file(&self.file);
    }
}
