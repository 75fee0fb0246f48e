//! `elfen serve`: a service on the request lanes, without its help.

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use elfen_rt::clock::nanos;
use serde::Serialize;

use super::failure::{Failure, Status, named, to_stderr};
use super::lane_args::LaneArgs;
use super::{duration, print, print_json, usage, warn};
use crate::host::cpulist::CpuSet;
use crate::host::pair::{self, Pair};
use crate::host::serve::{self, Figures, NeverIdle, Notice, Order, Refused, Service};

const EXAMPLES: &str = "\
Examples:
  elfen serve --lanes 0:1 -- redis-server --save ''     a new service on CPU 0
  sudo elfen serve --lanes 0:1 --pid $(pidof memcached)    moved, until Ctrl-C
  sudo elfen serve --cgroup system.slice/nginx.service     and across restarts
  sudo elfen run --lanes 0:1 -- xz -9 backup.tar           in what that leaves

A program started here replaces this command: process id, signals, input, output and exit status \
are its own; 126 if it cannot be run, 127 if it is not found. Keep it in the foreground (nginx -g \
'daemon off;'): who goes into the background stays on the lanes, but is not watched. Before anything \
is started: 2 for wrong arguments, 3 if this machine lacks what they ask for, 1 for other failures.

--pid and --cgroup move what runs already, until SIGINT, SIGTERM or SIGHUP; then every thread gets \
back what it had. After SIGKILL they stay on the lanes: `taskset -acp CPUS PID` frees them.

New threads and children inherit the lanes; one that chooses other CPUs itself is brought back at \
the next look, ever less often the more it insists, and is named. A choice among the request lanes \
is respected.";

/// Keep a service on the request lanes, as it is
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
#[command(group(clap::ArgGroup::new("service").required(true).args(["pid", "cgroup", "program"])))]
pub(crate) struct Args {
    #[command(flatten)]
    lanes: LaneArgs,

    /// A process that runs already, with its descendants; may be given several times
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pid: Vec<u32>,

    /// A cgroup whose processes run already, with those below it
    #[arg(long, value_name = "PATH")]
    cgroup: Option<PathBuf>,

    /// How often to look for threads that have left the request lanes
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration::parse)]
    look_every: Duration,

    /// Keep a file up to date with what is measured, as one JSON object
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,

    /// Say what would be done, and do nothing
    #[arg(long)]
    dry_run: bool,

    /// With --dry-run: print one JSON object
    #[arg(long, requires = "dry_run")]
    json: bool,

    /// The program and its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<OsString>,
}

const SHORTEST_LOOK: Duration = Duration::from_millis(10);
const LONGEST_LOOK: Duration = Duration::from_secs(3600);

#[derive(Serialize)]
struct Plan<'a> {
    service: &'a str,
    request_lanes: &'a CpuSet,
    batch_lanes: CpuSet,
    look_every_ns: u64,
    /// Of a service that runs already.
    processes: Option<usize>,
    threads: Option<usize>,
}

#[derive(Serialize)]
struct Report<'a> {
    service: &'a str,
    lanes: &'a str,
    request_lanes: &'a CpuSet,
    #[serde(flatten)]
    figures: &'a Figures,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    usage::check_program("serve", &args.program)?;
    let pairs = args.lanes.pairs()?;
    let order = Order {
        request_lanes: pairs.iter().map(|pair| pair.request).collect(),
        look_every: look_every(args.look_every)?,
    };
    let name = service_name(args);
    let existing = existing(args).map_err(|error| refuse(&name, &error))?;
    if args.dry_run {
        return preview(args, &order, &pairs, &name, existing, out);
    }
    let lanes = pair::list(&pairs);
    let report = report_path(args.report.as_deref())?;
    let teller = Teller { order: &order, lanes: &lanes, name: &name, report };
    teller.write_report(&Figures::default())?;
    let mut tell = |notice: Notice<'_>| teller.tell(&notice);
    match existing {
        Some(service) => {
            let kept = serve::keep_existing(&order, service, &mut tell);
            kept.map_err(|error| refuse(&name, &error))?;
            Ok(ExitCode::SUCCESS)
        }
        None => become_program(args, &order, &name, &mut tell),
    }
}

fn become_program(
    args: &Args,
    order: &Order,
    name: &str,
    tell: &mut dyn FnMut(Notice<'_>),
) -> Result<ExitCode, Failure> {
    let (program, arguments) =
        args.program.split_first().unwrap_or_else(|| unreachable!("one of the group is required"));
    to_stderr(&format!(
        "{name} on CPUs {}, looked after every {}",
        order.request_lanes,
        duration::show(nanos(order.look_every))
    ));
    let mut command = Command::new(program);
    command.args(arguments);
    let error = serve::become_program(order, &mut command, tell).map_err(|error| {
        Failure::new(Status::Failed, format!("starting {name}"), error, "see `ulimit -a`")
    })?;
    to_stderr(&format!("{name}: {error}; check its name and its permissions"));
    Ok(ExitCode::from(if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 }))
}

fn look_every(time: Duration) -> Result<Duration, Failure> {
    if (SHORTEST_LOOK..=LONGEST_LOOK).contains(&time) {
        return Ok(time);
    }
    let what = format!("--look-every {}", duration::show(nanos(time)));
    let why = "looks are 10ms to 3600s apart";
    Err(Failure::new(Status::Usage, what, why, "leave it out for 1s"))
}

/// The service that runs already; `None` if a program is to be started.
fn existing(args: &Args) -> Result<Option<Service>, Refused> {
    match &args.cgroup {
        Some(path) => Service::of_cgroup(path).map(Some),
        None if args.pid.is_empty() => Ok(None),
        None => Service::of_processes(&args.pid).map(Some),
    }
}

fn service_name(args: &Args) -> String {
    if let Some(path) = &args.cgroup {
        return named("cgroup", path);
    }
    match (args.pid.as_slice(), args.program.first()) {
        ([], Some(program)) => format!("program {:?}", program.to_string_lossy()),
        ([pid], _) => format!("process {pid}"),
        (pids, _) => {
            let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
            format!("processes {}", pids.join(", "))
        }
    }
}

fn preview(
    args: &Args,
    order: &Order,
    pairs: &[Pair],
    name: &str,
    existing: Option<Service>,
    out: &mut dyn Write,
) -> Result<ExitCode, Failure> {
    let counts = existing.map(|mut service| service.count()).transpose();
    let counts = counts.map_err(|error| refuse(name, &Refused::Unreadable(error)))?;
    let plan = Plan {
        service: name,
        request_lanes: &order.request_lanes,
        batch_lanes: pairs.iter().flat_map(|pair| pair.batch.iter()).collect(),
        look_every_ns: nanos(order.look_every),
        processes: counts.map(|(processes, _)| processes),
        threads: counts.map(|(_, threads)| threads),
    };
    print(out, args.json, &plan, || plan.text())?;
    Ok(ExitCode::SUCCESS)
}

impl Plan<'_> {
    fn text(&self) -> String {
        let Self { service, request_lanes, batch_lanes, .. } = self;
        let who = match (self.threads, self.processes) {
            (Some(threads), Some(processes)) => {
                format!("{service}, threads {threads}, processes {processes}: moves to")
            }
            _ => format!("{service} starts on"),
        };
        let every = duration::show(self.look_every_ns);
        format!(
            "{who} CPUs {request_lanes}; looked after every {every}; batch lanes {batch_lanes}\n"
        )
    }
}

fn refuse(name: &str, error: &Refused) -> Failure {
    let (status, fix) = match error {
        Refused::NoProcess(_) => (Status::Usage, "see `pgrep -a NAME` for those that run"),
        Refused::NoCgroup(_) => (Status::Usage, "see `systemd-cgls`, or /proc/PID/cgroup"),
        Refused::Root | Refused::HoldsUs => (Status::Usage, "name the service alone"),
        Refused::Immovable { error, .. } => (Status::Failed, immovable(error)),
        Refused::Unreadable(_) | Refused::Unwatchable(_) => {
            (Status::Failed, "run this as root, with /proc mounted")
        }
    };
    Failure::new(status, name, error, fix)
}

/// What to do about a thread that the kernel does not move.
fn immovable(error: &std::io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM) => "run this as root, or as the service's user",
        Some(libc::EINVAL) => {
            "let the cpuset of its cgroup have the request lanes; the kernel's threads never move"
        }
        _ => "see sched_setaffinity(2)",
    }
}

/// Turns notices into lines on stderr, and figures into the report.
struct Teller<'a> {
    order: &'a Order,
    lanes: &'a str,
    name: &'a str,
    report: Option<PathBuf>,
}

impl Teller<'_> {
    fn tell(&self, notice: &Notice<'_>) {
        match notice {
            Notice::Moved(figures) => to_stderr(&format!(
                "{}: moved to CPUs {}, with {}; Ctrl-C undoes it",
                self.name,
                self.order.request_lanes,
                count(figures.moved, "thread", "threads")
            )),
            Notice::BroughtBack { thread, name, cpus, times } => match times {
                1 => warn(&format!(
                    "thread {thread} ({name}) chose CPUs {cpus} itself, and was brought back to \
                     {}: configure the service to leave that",
                    self.order.request_lanes
                )),
                4 => warn(&format!(
                    "thread {thread} ({name}) insists on CPUs {cpus}: it is brought back ever less \
                     often"
                )),
                _ => {}
            },
            Notice::Refused { thread, name, error } => {
                warn(&format!(
                    "thread {thread} ({name}) stays outside: {error}; {}",
                    immovable(error)
                ));
            }
            Notice::NeverIdle(never) => warn(&never_idle(never)),
            Notice::CgroupGone => {
                to_stderr(&format!("{} is gone: waiting for it to come back", self.name));
            }
            Notice::Unwatched(error) => {
                warn(&format!("{}: nobody watches its threads: {error}", self.name));
            }
            Notice::LeftBehind(processes) => warn(&format!(
                "{}: {processes} of its processes go on, on CPUs {}, and are no longer watched",
                self.name, self.order.request_lanes
            )),
            Notice::Looked(figures) => self.keep_report(figures),
            Notice::Ended(figures) => {
                self.keep_report(figures);
                to_stderr(&self.summary(figures));
            }
        }
    }

    fn summary(&self, figures: &Figures) -> String {
        let Figures { moved, brought_back, refused, undone, wall_ns, idle, .. } = figures;
        let mut line = format!("{}: {}", self.name, duration::show(*wall_ns));
        let counts = [
            (moved, "moved"),
            (undone, "moved back"),
            (brought_back, "brought back"),
            (refused, "not moved"),
        ];
        for (number, what) in counts.into_iter().filter(|(number, _)| **number > 0) {
            line.push_str(&format!(", {} {what}", count(*number, "thread", "threads")));
        }
        for lane in idle {
            line.push_str(&format!(", CPU {} idled {:.1} %", lane.cpu, lane.idle_percent));
        }
        line
    }

    /// A report that can no longer be written is no reason to let go of the service.
    fn keep_report(&self, figures: &Figures) {
        if let Err(failure) = self.write_report(figures) {
            warn(&failure.to_string());
        }
    }

    /// Beside its place, and then there: whoever reads it meets a whole one.
    fn write_report(&self, figures: &Figures) -> Result<(), Failure> {
        let Some(path) = &self.report else { return Ok(()) };
        let Self { order, lanes, name: service, .. } = self;
        let report = Report { service, lanes, request_lanes: &order.request_lanes, figures };
        let mut text = Vec::new();
        print_json(&mut text, &report)?;
        let mut beside = path.as_os_str().to_owned();
        beside.push(".new");
        // Renaming over /dev/stdout, or a pipe that somebody reads, would take its place.
        if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
            let why = "it is not a regular file, which could be kept up to date";
            return Err(Failure::unwritable("report", path, why));
        }
        let written = fs::write(&beside, text).and_then(|()| fs::rename(&beside, path));
        written.map_err(|error| Failure::unwritable("report", path, error))
    }
}

/// Where the report goes, also from the watcher, which works in the root folder.
fn report_path(path: Option<&Path>) -> Result<Option<PathBuf>, Failure> {
    path.map(|path| {
        std::path::absolute(path).map_err(|error| Failure::unwritable("report", path, error))
    })
    .transpose()
}

fn never_idle(never: &NeverIdle) -> String {
    let NeverIdle { cpu, service_percent } = never;
    let whose = if *service_percent >= 90 {
        "the service polls, or has more work than it can do".to_owned()
    } else {
        format!("the service took {service_percent} % of the request lanes, the rest others did")
    };
    format!("CPU {cpu} does not idle, so there is nothing to borrow: {whose}; see `elfen doctor`")
}

fn count(number: u64, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}
