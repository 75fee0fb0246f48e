//! `elfen lab bench tailor`: what recording costs those who are recorded.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use elfen_console::failure::{Failure, Status};
use elfen_console::{duration, output, table};
use elfen_kernel::events;
use elfen_machine::affinity;
use serde::Serialize;

use super::rows::{print, row};
use crate::bench::distribution::Distribution;
use crate::bench::tailor::reader::{self, Reader};
use crate::bench::tailor::served::{CpuPerRequest, Served, Service, Windows};
use crate::bench::tailor::{self, Costs, Error};

const EXAMPLE: &str = "\
Examples:
  sudo elfen lab bench tailor                    with and without its programs
  sudo elfen lab bench tailor --service search   CPU of a request of a service
                                             that is under load
  sudo elfen lab bench tailor --service search --pairs 150 --for 200ms
                                             the same, by more and shorter
                                             times: a narrower interval
  sudo elfen lab bench tailor --redis 6379 --duty 10% --for 4s
                                             CPU of a command of a Redis
                                             that is under load, recorded
                                             for a tenth of each 4 s";

/// Measure what recording for `elfen tailor` costs
///
/// A hand-over between two threads through pipes, and a request between two threads over loopback,
/// alternating with nothing attached; what `perf sched record` adds to the same hand-over, where
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
        value_parser = percent)]
    duty: u32,

    /// How often each detail is held against nothing
    #[arg(long, value_name = "N", default_value_t = 20, requires = "served",
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=10_000))]
    pairs: usize,

    /// How long each time
    #[arg(long = "for", value_name = "TIME", default_value = "1s", requires = "served",
        value_parser = duration::parse)]
    time: Duration,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn percent(text: &str) -> Result<u32, String> {
    let percent = text.strip_suffix('%').unwrap_or(text).parse().ok();
    let percent = percent.filter(|percent| (2..=100).contains(percent));
    percent.ok_or_else(|| "it is 2% to 100%".to_owned())
}

#[derive(Serialize)]
struct Report {
    cpu: u32,
    roundtrip_ns: Distribution,
    roundtrip_added_ns: Distribution,
    roundtrip_added_perf_sched_ns: Option<Distribution>,
    #[serde(skip_serializing_if = "Option::is_none")]
    no_perf_sched: Option<String>,
    request_ns: Distribution,
    request_added_ns: Distribution,
    request_added_full_ns: Distribution,
    reader_ns_an_event: Distribution,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    if args.service.is_some() || args.redis.is_some() {
        return served(args, out);
    }
    let cpu = affinity::allowed().ok().and_then(|cpus| cpus.iter().next()).unwrap_or(0);
    let costs = tailor::measure(cpu).map_err(|error| failure(&error))?;
    let Costs { pipe, pipe_added, request, request_added, request_added_full, reader, .. } = costs;
    let (perf, no_perf) = match costs.pipe_added_perf {
        Ok(perf) => (Some(perf), None),
        Err(why) => (None, Some(why)),
    };
    if let Some(why) = &no_perf {
        output::warn(&format!("skipped: perf sched record: {why}"));
    }
    let mut rows = vec![
        row("a hand-over there and back, not recorded", "ns", &pipe),
        row("added by recording it", "ns", &pipe_added),
    ];
    rows.extend(perf.iter().map(|perf| row("added by perf sched record", "ns", perf)));
    rows.extend([
        row("a request over loopback, not recorded", "ns", &request),
        row("added by --detail sched", "ns", &request_added),
        row("added by --detail full", "ns", &request_added_full),
        row("the reader, for an event", "ns", &reader),
    ]);
    let report = Report {
        cpu,
        roundtrip_ns: pipe,
        roundtrip_added_ns: pipe_added,
        roundtrip_added_perf_sched_ns: perf,
        no_perf_sched: no_perf,
        request_ns: request,
        request_added_ns: request_added,
        request_added_full_ns: request_added_full,
        reader_ns_an_event: reader,
    };
    print(out, args.json, &report, &rows)
}

fn served(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let missing = |error: &dyn std::fmt::Display, fix: &str| {
        Failure::new(Status::Failed, "looking for the service", error, fix)
    };
    let (mut service, mut recorded) = match (&args.service, args.redis) {
        (Some(name), _) => {
            let fix = "start it first; `elfen top` lists those there are";
            let service = Service::find(name).map_err(|error| missing(&error, fix))?;
            (service, vec!["--service".to_owned(), name.clone()])
        }
        (None, port) => {
            let port = port.unwrap_or_default();
            let fix = "start it first, without a password";
            let service = Service::redis(port).map_err(|error| missing(&error, fix))?;
            (service, vec!["--port".to_owned(), port.to_string()])
        }
    };
    let windows = Windows { pairs: args.pairs, time: args.time, duty_percent: args.duty };
    let measured = service.measure(windows).map_err(|error| failure(&error))?;
    if args.duty < 100 {
        recorded.extend(["--duty".to_owned(), format!("{}%", args.duty)]);
    }
    let recorder =
        reader::measure(&recorded, READER_FOR).map_err(|error| failure(&error.into()))?;
    let measured = Recorded { served: measured, recorder };
    output::print(out, args.json, &measured, || text(&measured))?;
    Ok(ExitCode::SUCCESS)
}

/// The recorder's CPU is measured for so long.
const READER_FOR: Duration = Duration::from_secs(10);

#[derive(Serialize)]
struct Recorded {
    #[serde(flatten)]
    served: Served,
    recorder: Reader,
}

fn text(Recorded { served, recorder }: &Recorded) -> String {
    let row = |what: &str, cost: &CpuPerRequest| {
        let us = |ns: f64| format!("{:.1} us", ns / 1e3);
        let more = |ratio: f64| format!("{:+.2} %", (ratio - 1.0) * 100.0);
        let interval = cost.ratio_ci95.map_or_else(
            || "-".to_owned(),
            |[low, high]| format!("{} to {}", more(low), more(high)),
        );
        vec![
            what.to_owned(),
            us(cost.off_ns),
            us(cost.on_ns),
            more(cost.ratio),
            interval,
            cost.pairs.to_string(),
            format!("{:.0}", cost.events_a_second),
        ]
    };
    let rows = [row("sched", &served.sched), row("full", &served.full)];
    let heading = ["detail", "CPU of a request", "recorded", "more", "95 %", "pairs", "events/s"];
    let table = table::lines(&heading, &rows);
    let Reader { events_a_second, lost, cpu_share } = recorder;
    let duty = match served.duty_percent {
        100 => String::new(),
        duty => format!(", recorded for {duty} % of each time"),
    };
    format!(
        "{:.0} requests a second{duty}\n{table}\nthe recorder, as a process: {:.2} % of a CPU at \
         {events_a_second:.0} events/s, {lost} lost\n",
        served.requests_a_second,
        cpu_share * 100.0
    )
}

fn failure(error: &Error) -> Failure {
    let (status, fix) = match error {
        Error::Events(events::Error::NotPermitted) => {
            (Status::Failed, "run it as root, or with CAP_BPF and CAP_PERFMON")
        }
        Error::Events(_) => (Status::Unsupported, "use Linux 6.3 or newer"),
        Error::Idle => (Status::Failed, "put it under load"),
        Error::Io(_) | Error::Count(_) | Error::Nothing => (Status::Failed, "try again"),
    };
    Failure::new(status, "measuring what recording costs", error, fix)
}
