//! `elfen run`: a program on the batch lanes, out of the service's way.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use elfen_instrument::Inject;
use elfen_kernel::sleep::Alarm;
use elfen_kernel::task_map::Source;
use elfen_rt::clock::{monotonic_ns, nanos};
use elfen_rt::nap::{Kind, Nap};
use elfen_rt::signal::control::Settings;
use serde::Serialize;

use super::failure::{Failure, Status, to_stderr};
use super::inject_args::{Chosen, InjectName};
use super::lane_args::LaneArgs;
use super::look_args::{LookArgs, Looked};
use super::policy_args::PolicyArgs;
use super::{duration, lacking, signals, usage, warn};
use crate::host::pair;
use crate::host::run::Order;
use crate::host::run::channels::{Channels, Error, Wanted, Writer};
use crate::host::run::figures::{self, Figures};
use crate::host::run::front::{self, Ending};
use crate::host::run::ipc::Counts;

const EXAMPLES: &str = "\
Examples:
  sudo elfen run --lanes 0:1 -- xz -9 backup.tar          only while CPU 0 idles
  elfen run --signal service --service shop -- make -j8   without privileges
  elfen run --policy fixed-budget --budget 2ms --service shop -- ./batch

The exit status is the program's own; 126 if it cannot be run, 127 if it is not found. Before anything is started: \
2 for wrong arguments, 3 if this machine lacks what they ask for, 1 for other failures.

The program finds its channels in ELFEN_RUN.";

/// Run a program on the batch lanes while their request lanes idle
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    policy: PolicyArgs,

    #[command(flatten)]
    lanes: LaneArgs,

    /// Where to learn what the request lanes do
    #[arg(long, value_enum, default_value = "auto")]
    signal: Wanted,

    /// The service whose page to read, by the name it published under
    #[arg(long, value_name = "NAME")]
    service: Option<String>,

    /// How a guard waits on its lane
    #[arg(long, value_enum, default_value = "auto")]
    nap: NapName,

    /// How the program is checked, besides by its guard
    #[arg(long, value_enum, default_value = "auto")]
    inject: InjectName,

    #[command(flatten)]
    looks: LookArgs,

    /// Write what was measured to a file, as one JSON object
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,

    /// Say what would be done, and do nothing
    #[arg(long)]
    dry_run: bool,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<OsString>,
}

impl Args {
    /// What the machine lacks, of which the run has seen something.
    fn lacking(&self, seen: Failure) -> Failure {
        lacking::failure(&self.lanes, self.service.is_some(), seen)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(super) enum NapName {
    /// The first of these that this machine has
    Auto,
    /// MWAIT in the kernel, by the nanonap module
    Device,
    /// UMWAIT, on Intel CPUs with WAITPKG
    Umwait,
    /// MWAITX, on AMD CPUs
    Mwaitx,
    /// Asleep in the kernel, for programs with checks; others may have the lane meanwhile
    Block,
    /// PAUSE, which runs anywhere and yields the least
    Spin,
}

impl NapName {
    pub(super) fn of(kind: Kind) -> Self {
        match kind {
            Kind::Device => Self::Device,
            Kind::Umwait => Self::Umwait,
            Kind::Mwaitx => Self::Mwaitx,
            Kind::Block => Self::Block,
            Kind::Spin => Self::Spin,
        }
    }

    pub(super) fn open(self) -> Result<(Nap, Option<Alarm>), Failure> {
        let kind = match self {
            Self::Auto => return Ok((Nap::auto(), None)),
            Self::Block => {
                let alarm = Alarm::attach().map_err(|e| signals::failure("nap block", &e))?;
                return Ok((Nap::Block, Some(alarm)));
            }
            Self::Device => Kind::Device,
            Self::Umwait => Kind::Umwait,
            Self::Mwaitx => Kind::Mwaitx,
            Self::Spin => Kind::Spin,
        };
        Nap::open(kind).map(|nap| (nap, None)).map_err(|missing| {
            let fix = "use --nap auto for the first that works; `elfen doctor` lists them all";
            Failure::new(Status::Unsupported, format!("nap {}", kind.name()), missing, fix)
        })
    }
}

#[derive(Serialize)]
struct Report<'a> {
    policy: &'static str,
    budget_ns: u64,
    lanes: &'a str,
    signal: &'static str,
    nap: &'static str,
    /// Whose counters `dynamic-budget` goes by; absent under other policies.
    ipc: Option<&'static str>,
    inject: &'static str,
    #[serde(flatten)]
    looked: Looked,
    wall_ns: u64,
    #[serde(flatten)]
    figures: Figures,
    /// Absent without a task map.
    request_busy_ns: Option<u64>,
    /// As a shell sees it.
    exit_status: u8,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let order = order(args)?;
    let mut report = args.report.as_ref().map(create).transpose()?;
    let channels = Channels::open(&order, args.signal, args.service.as_deref());
    let channels = Arc::new(channels.map_err(|error| match error {
        Error::Nothing(_) => args.lacking(refuse(&error)),
        _ => refuse(&error),
    })?);
    require_a_service(&order, &channels)?;
    require_tasks_to_block(&order, &channels)?;
    let lanes = pair::list(&order.pairs);
    let signal = signal_name(&channels);
    let policy = args.policy.name();
    let nap = order.nap.kind().name();
    let inject = order.inject.name();
    let ipc = channels.counts.as_ref().map(Counts::name);
    let chosen = format!(
        "{policy} on lanes {lanes}; signal {signal}{}, nap {nap}, inject {inject}, guards look every {}",
        ipc.map(|ipc| format!(", ipc {ipc}")).unwrap_or_default(),
        duration::show(nanos(order.looks.every))
    );
    if args.dry_run {
        writeln!(out, "{chosen}").map_err(Failure::output)?;
        return Ok(ExitCode::SUCCESS);
    }
    to_stderr(&chosen);
    channels.renew_leases();
    let (start_ns, busy_ns) = (monotonic_ns(), figures::request_busy_ns(&channels));
    let failed = |error| Failure::new(Status::Failed, "running the batch", error, "try again");
    let inheritance = channels.inheritance().map_err(|error| refuse(&error))?;
    let ending = front::run(&order, &channels, &inheritance).map_err(failed)?;
    let busy_ns =
        figures::request_busy_ns(&channels).zip(busy_ns).map(|(after, before)| after - before);
    let measured = Report {
        policy,
        budget_ns: channels.control().budget_ns.load(Relaxed),
        lanes: &lanes,
        signal,
        nap,
        ipc,
        inject,
        looked: order.looks.into(),
        wall_ns: monotonic_ns() - start_ns,
        figures: Figures::of(channels.lanes()),
        request_busy_ns: busy_ns,
        exit_status: exit_status(ending),
    };
    if !matches!(ending, Ending::Refused { .. }) {
        to_stderr(&measured.summary());
    }
    if let (Some(file), Some(path)) = (&mut report, &args.report) {
        super::print_json(file, &measured)
            .map_err(|_| Failure::unwritable("report", path, "the disk is full"))?;
    }
    end(&order, ending)
}

fn order(args: &Args) -> Result<Order, Failure> {
    usage::check_program("run", &args.program)?;
    let (settings, slo) = args.policy.settings()?;
    let pairs = args.lanes.pairs().map_err(|seen| args.lacking(seen))?;
    let (program, arguments) =
        args.program.split_first().unwrap_or_else(|| unreachable!("required"));
    let looks = args.looks.looks()?;
    let (nap, alarm) = args.nap.open()?;
    let Chosen { inject, library } = args.inject.choose(program)?;
    if alarm.is_some() && inject == Inject::Guard {
        warn(
            "nap block: this program has no checks of its own, so its guard will hold the lane instead",
        );
    }
    Ok(Order {
        inject,
        library,
        nap: Arc::new(nap),
        alarm: alarm.map(Arc::new),
        pairs,
        settings,
        slo,
        looks,
        program: program.clone(),
        arguments: arguments.to_vec(),
    })
}

/// A budget is given to requests, and only a service can say which are which.
fn require_a_service(order: &Order, channels: &Channels) -> Result<(), Failure> {
    if order.settings.policy == Settings::BORROW_IDLE.policy || channels.service.is_some() {
        return Ok(());
    }
    let why = "only a service that publishes its requests can be given a budget";
    let fix = "name it with --service, or use --policy borrow-idle";
    Err(Failure::new(Status::Usage, "this policy", why, fix))
}

/// The kernel wakes who blocks when the lane idles, which the service's page need not agree with.
fn require_tasks_to_block(order: &Order, channels: &Channels) -> Result<(), Failure> {
    let Some(alarm) = &order.alarm else { return Ok(()) };
    if channels.tasks.is_some() {
        // What the wakers will do: a run whose sleepers nobody can wake is refused, and not run at half its speed.
        let open = |request| alarm.sleeper(request).map(drop);
        return (channels.requests().into_iter().try_for_each(open))
            .map_err(|error| signals::failure("nap block", &error));
    }
    let fix = "use --signal tasks, or another nap";
    Err(Failure::new(Status::Usage, "nap block", "it goes by the task map alone", fix))
}

fn create(path: &PathBuf) -> Result<File, Failure> {
    File::create(path).map_err(|error| Failure::unwritable("report", path, error))
}

pub(super) fn refuse(error: &Error) -> Failure {
    const WHAT: &str = "learning what the request lanes do";
    match error {
        Error::Tasks(error) => signals::failure(WHAT, error),
        Error::Module(missing) => Failure::new(Status::Unsupported, WHAT, missing, missing.fix()),
        Error::Nothing(_) => {
            let fix = "run it as root, have root run `elfen signals up`, or name a service with --service";
            Failure::new(Status::Unsupported, WHAT, error, fix)
        }
        Error::Service { .. } => {
            Failure::new(Status::Failed, WHAT, error, "start the service first, and check its name")
        }
        Error::Counts(error) => {
            let fix = "have the service publish its own (`elfen_service_count`), or use --policy refresh-budget";
            Failure::new(
                Status::Unsupported,
                "counting instructions of the request lanes",
                error,
                fix,
            )
        }
        Error::NoService => Failure::new(Status::Usage, WHAT, error, "name one with --service"),
        Error::Memory(_) | Error::Page(_) | Error::Descriptor(_) => Failure::new(
            Status::Failed,
            WHAT,
            error,
            "see `ipcs -l` and `ulimit -n` for the limits",
        ),
    }
}

fn signal_name(channels: &Channels) -> &'static str {
    let writer = channels.tasks.as_ref().map(|(_, writer)| *writer);
    match (writer, &channels.service) {
        (Some(Writer::Program(Source::Pinned)), None) => "tasks (pinned)",
        (Some(Writer::Program(Source::Shared)), None) => "tasks (shared)",
        (Some(Writer::Program(Source::Attached)), None) => "tasks (attached)",
        (Some(Writer::Module), None) => "module",
        (Some(Writer::Program(Source::Pinned)), Some(_)) => "tasks (pinned) and service",
        (Some(Writer::Program(Source::Shared)), Some(_)) => "tasks (shared) and service",
        (Some(Writer::Program(Source::Attached)), Some(_)) => "tasks (attached) and service",
        (Some(Writer::Module), Some(_)) => "module and service",
        (None, _) => "service alone",
    }
}

impl Report<'_> {
    fn summary(&self) -> String {
        let Figures { borrowed_ns, overlapped_ns, naps, reaction_ns, wake_ns, .. } = &self.figures;
        let share = self.request_busy_ns.filter(|&busy_ns| busy_ns > 0).map(|busy_ns| {
            let per_million = u128::from(*overlapped_ns) * 1_000_000 / u128::from(busy_ns);
            format!(
                " ({}.{:02} % of the requests' time)",
                per_million / 10_000,
                per_million / 100 % 100
            )
        });
        let latency = |what: &str, latency: &figures::Latency| match (latency.median, latency.p99) {
            (Some(median), Some(p99)) => {
                format!(", {what} median {} p99 {}", duration::show(median), duration::show(p99))
            }
            _ => String::new(),
        };
        format!(
            "{}: borrowed {}, overlapped {}{}, {naps} naps{}{}",
            duration::show(self.wall_ns),
            duration::show(*borrowed_ns),
            duration::show(*overlapped_ns),
            share.unwrap_or_default(),
            latency("reaction", reaction_ns),
            latency("wake", wake_ns)
        )
    }
}

fn exit_status(ending: Ending) -> u8 {
    match ending {
        Ending::Exited { code } => code,
        Ending::Killed { signal } => u8::try_from(128 + signal).unwrap_or(u8::MAX),
        Ending::Refused { errno: libc::ENOENT } => 127,
        Ending::Refused { .. } => 126,
    }
}

fn end(order: &Order, ending: Ending) -> Result<ExitCode, Failure> {
    match ending {
        Ending::Killed { signal } => front::die_of(signal),
        Ending::Exited { code } => Ok(ExitCode::from(code)),
        Ending::Refused { errno } => {
            let why = std::io::Error::from_raw_os_error(errno);
            let fix = "check its name and its permissions";
            let program = format!("program {:?}", order.program.to_string_lossy());
            to_stderr(&format!("{program}: {why}; {fix}"));
            Ok(ExitCode::from(exit_status(ending)))
        }
    }
}
