//! `elfen lab inject`: injects faults into a process, to test whether a tool finds them.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use elfen_console::duration;
use elfen_console::failure::{Failure, Status, to_stderr};

use crate::faults::injectors::{Flood, Hog, PageOut, Stop};
use elfen_tailor::signals::EndSignals;

const EXAMPLES: &str = "\
Examples:
  sudo elfen lab inject stop -p 4711 --every 300ms --length 15ms
  sudo elfen lab inject hog -p 4711 --cpu 0 -d 10s --truth hog.json
  sudo elfen lab inject io -p 4711               evicts its files from memory
  sudo elfen lab inject softirq -p 4711 --cpu 0  packets on its CPU";

/// Inject faults into a process, and record their times
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct InjectArgs {
    /// The fault: `stop` sends SIGSTOP. `hog` runs a thread at a real-time priority. `io` evicts
    /// the data of the process's mapped files from memory. `softirq` sends datagrams that loopback
    /// steers to its CPU
    #[arg(value_enum)]
    kind: Kind,

    /// The process to inject faults into
    #[arg(short, long, value_name = "PID", value_parser = clap::value_parser!(u32).range(2..))]
    pid: u32,

    /// The CPU of the hog, or of the packets
    #[arg(long, value_name = "CPU", required_if_eq_any([("kind", "hog"), ("kind", "softirq")]))]
    cpu: Option<u32>,

    /// The time from one fault to the next
    #[arg(long, value_name = "TIME", default_value = "300ms", value_parser = duration::parse)]
    every: Duration,

    /// How long each fault lasts
    #[arg(long, value_name = "TIME", default_value = "15ms", value_parser = duration::parse)]
    length: Duration,

    /// How long to inject faults; by default until Ctrl-C
    #[arg(short, long, value_name = "TIME", value_parser = duration::parse)]
    duration: Option<Duration>,

    /// The file for the times of the faults, one line of JSON for each
    #[arg(long, value_name = "FILE")]
    truth: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Kind {
    Stop,
    Hog,
    Io,
    Softirq,
}

/// The longest fault. A longer one would be an outage.
const LONGEST: Duration = Duration::from_secs(1);

pub(super) fn run(args: &InjectArgs, _out: &mut dyn Write) -> Result<ExitCode, Failure> {
    if args.length > LONGEST || args.length.is_zero() || args.every <= args.length {
        let why = "--length must be above 0, at most 1s, and below --every";
        return Err(Failure::new(Status::Usage, "arguments", why, "choose other times"));
    }
    let what = format!("injecting into process {}", args.pid);
    let failed = |error: io::Error| {
        let fix = match error.raw_os_error() {
            Some(libc::ESRCH) => "name a running process with --pid",
            _ => "run this as root",
        };
        Failure::new(Status::Failed, &what, error, fix)
    };
    let mut truth = None;
    if let Some(path) = &args.truth {
        let file = OpenOptions::new().write(true).create(true).truncate(true).open(path);
        truth = Some(file.map_err(|error| Failure::unwritable("truth", path, error))?);
    }
    let ending = EndSignals::new().map_err(failed)?;
    let began = Instant::now();
    let mut count = 0_u32;
    loop {
        let signal = ending.wait(args.every.saturating_sub(args.length));
        if signal.is_some() || args.duration.is_some_and(|time| began.elapsed() >= time) {
            to_stderr(&format!("injected {count} times into process {}", args.pid));
            let code = signal.map_or(0, |signal| Status::of_signal(signal) as u8);
            return Ok(ExitCode::from(code));
        }
        let cpu = args.cpu.unwrap_or(0);
        let injections = match args.kind {
            Kind::Stop => Stop::new(args.pid).and_then(|stop| stop.inject(args.length)),
            Kind::Hog => Hog::new(cpu).inject(args.length),
            Kind::Io => PageOut::new(args.pid).and_then(|files| files.inject()),
            Kind::Softirq => Flood::new(cpu).and_then(|flood| flood.inject(args.length)),
        };
        let injections = injections.map_err(failed)?;
        count += 1;
        let Some(truth) = &mut truth else { continue };
        for injection in injections {
            let line = serde_json::to_string(&injection).map_err(|e| failed(e.into()))?;
            writeln!(truth, "{line}").map_err(|error| {
                Failure::unwritable("truth", args.truth.as_deref().unwrap_or("".as_ref()), error)
            })?;
        }
    }
}
