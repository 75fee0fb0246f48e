//! `elfen lab bench tailor`: what recording for `elfen tailor` costs a hand-over between two
//! threads, or a service under load.
//!
//! No process reads the events while hand-overs are measured. The cost of reading is measured with
//! a service.

mod served;

use std::process::Command;
use std::time::Duration;

use elfen_console::duration;
use elfen_kernel::events::{Detail, Events, Watched};
use elfen_machine::affinity;
use elfen_machine::cpulist::CpuSet;

use self::served::Served;
use super::signal::Turns;
use super::{
    BenchError, BenchReport, Column, Explain, Progress, cases, label, measure, metric, pin, row,
    runs, with_baseline,
};
use crate::live::os::{ChildSetup, Rank};
use crate::live::process::Process;
use crate::live::scratch::Scratch;

const TURNS_A_BATCH: u32 = 2_000;
/// The ring buffer has room for all events of a batch.
const RING: u32 = 65_536;

const EXAMPLE: &str = "\
Examples:
  sudo elfen lab bench tailor                    a hand-over of threads
  sudo elfen lab bench tailor --service search   CPU of a request of a service
                                             that is under load
  sudo elfen lab bench tailor --service search --runs 150 -d 200ms
                                             the same, by more and shorter
                                             times: a narrower interval
  sudo elfen lab bench tailor --redis 6379 --duty 10% -d 4s
                                             CPU of a command of a Redis
                                             that is under load, recorded
                                             for a tenth of each 4 s";

/// Measure the cost of recording for `elfen tailor`
///
/// By default, the benchmark measures a hand-over between two threads through pipes, with and
/// without recording, and under `perf sched record` if perf is installed. With --service or
/// --redis, it measures the CPU time of a request of a service under load, with and without
/// recording, and the CPU time of the recorder.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLE)]
pub(crate) struct BenchTailorArgs {
    /// The name under which a service publishes its requests
    #[arg(long, value_name = "NAME", group = "served")]
    service: Option<String>,

    /// The port of a Redis on this machine. Its sockets are recorded, and `redis-cli` reads its
    /// count of commands
    #[arg(long, value_name = "PORT", group = "served",
        value_parser = clap::value_parser!(u16).range(1..))]
    redis: Option<u16>,

    /// Record only for this part of each --duration, as `elfen tailor record --duty` does with 4 s
    #[arg(long, value_name = "PERCENT", default_value = "100%", requires = "served",
        value_parser = duty)]
    duty: u32,

    /// Number of rounds; each round measures every level of detail and no recording [default: 20
    /// with a service, 12 with hand-overs]
    #[arg(long, value_name = "N", value_parser = runs())]
    runs: Option<usize>,

    /// How long the service is measured in each round
    #[arg(short, long, value_name = "TIME", default_value = "1s", requires = "served",
        value_parser = duration::parse)]
    duration: Duration,
}

fn duty(text: &str) -> Result<u32, String> {
    let percent = text.strip_suffix('%').unwrap_or(text).parse().ok();
    let percent = percent.filter(|percent| (2..=100).contains(percent));
    percent.ok_or_else(|| "it must be from 2% to 100%".to_owned())
}

pub(crate) fn run(
    args: &BenchTailorArgs,
    progress: Progress<'_>,
) -> Result<BenchReport, BenchError> {
    let (served, mut words) = match (&args.service, args.redis) {
        (Some(name), _) => (Served::find(name)?, vec!["--service".to_owned(), name.clone()]),
        (None, Some(port)) => (Served::redis(port)?, vec!["--port".to_owned(), port.to_string()]),
        (None, None) => return hand_overs(args.runs.unwrap_or(12), progress),
    };
    let mut report = BenchReport::default();
    report.add(served.measure(args.duration, args.duty, args.runs.unwrap_or(20), progress)?);
    if args.duty < 100 {
        words.extend(["--duty".to_owned(), format!("{}%", args.duty)]);
    }
    progress("the recorder's process");
    report.add(served::recorder(&words)?);
    Ok(report.about(row!["duty_percent" => args.duty]))
}

fn hand_overs(runs: usize, progress: Progress<'_>) -> Result<BenchReport, BenchError> {
    let elsewhere = affinity::allowed()?;
    let cpu = elsewhere.iter().next().unwrap_or(0);
    pin(cpu)?;
    let mut pipe = Turns::pipe().explain("passing bytes between threads", "try again")?;
    let mut no_perf = None;
    let cases = with_baseline(cases(
        "case",
        [
            "a hand-over through pipes, not recorded",
            "the same, recorded with --detail sched",
            "the same, by perf sched record",
        ],
    ));
    let mut table = measure(("costs", COSTS), &cases, runs, progress, |case, _, values| {
        if case == PERF {
            if no_perf.is_none() {
                match next_to_perf(&mut pipe, &elsewhere) {
                    Ok(ns) => values.add("ns", ns),
                    Err(why) => no_perf = Some(why),
                }
            }
            return Ok(());
        }
        let watched = Watched { port: 0, processes: vec![std::process::id()], cpus: vec![cpu] };
        let events = (case == 1).then(|| Events::attach(Detail::Sched, RING, &watched));
        let _attached = events.transpose()?;
        values.add("ns", pipe.ns_a_turn(TURNS_A_BATCH)?);
        Ok(())
    })?;
    let mut left_out = Vec::new();
    if let Some(why) = no_perf {
        table.rows.remove(PERF);
        left_out.push(format!("perf sched record: {why}"));
    }
    Ok(BenchReport { about: row!["cpu" => cpu], tables: vec![table], left_out, wrong: None })
}

/// The index of the `perf sched record` case.
const PERF: usize = 2;
const COSTS: &[Column] = &[
    label("case", "what"),
    metric("ns", "round trip", "ns", 1).lower(),
    metric("added_ns", "added", "ns", 1).added_to("ns").lower(),
];

/// How long perf may take until it has written events. It writes them in blocks.
const TO_RECORD: Duration = Duration::from_secs(10);
/// More bytes than the header of perf's file.
const HAS_EVENTS: u64 = 256 << 10;

/// Measures a hand-over while `perf sched record` records all CPUs. perf itself may run on any of
/// `cpus`.
fn next_to_perf(pipe: &mut Turns, cpus: &CpuSet) -> Result<f64, BenchError> {
    let scratch = Scratch::new(1)?;
    let file = scratch.path("perf.data");
    let mut command = Command::new("perf");
    command.args(["sched", "record", "--no-buildid", "-o"]).arg(&file);
    let setup = ChildSetup { cpus: cpus.iter().collect(), ..ChildSetup::anywhere(Rank::Normal) };
    let mut perf = Process::start("perf sched record", command, &setup, &scratch)?;
    perf.wait_for(TO_RECORD, |_| {
        pipe.ns_a_turn(TURNS_A_BATCH).ok()?;
        (file.metadata().ok()?.len() >= HAS_EVENTS).then_some(())
    })?;
    Ok(pipe.ns_a_turn(TURNS_A_BATCH)?)
}
