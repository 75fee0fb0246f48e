//! `elfen run`: runs a program on the batch lanes while their request lanes idle.
//!
//! This file chooses the parts of the run (lanes, policy, source of signals, nap, checks, user),
//! and prints the first and the last lines. `elfen-run` starts and supervises the program. For a
//! run in a fence, `fence_run` does.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use elfen_console::failure::{Failure, Status, to_stderr};
use elfen_console::output::warn;
use elfen_console::{duration, usage};
use elfen_instrument::{CheckMethod, Reason, inspect};
use elfen_kernel::preempted::Notes;
use elfen_kernel::task_map::Source;
use elfen_machine::lane_args::LaneArgs;
use elfen_machine::pair::Pair;
use elfen_machine::{pair, placement};
use elfen_rt::clock::{monotonic_ns, nanos};
use elfen_rt::nap::NapKind;
use elfen_rt::signal::control::PolicyKind;
use elfen_run::Order;
use elfen_run::args::nap::NapName;
use elfen_run::args::poll_timing::PollTimingArgs;
use elfen_run::args::signals::{self as signal_args, refuse};
use elfen_run::batches::Level;
use elfen_run::channels::{Channels, Error, Service, Signals, SourceChoice, Writer};
use elfen_run::figures::{self, Figures};
use elfen_run::ipc::Counts;
use elfen_run::latency::Latency;
use elfen_run::launcher::{self, Ended, Ending};
use elfen_run::live::page::{Live, LiveWords};
use elfen_run::report::RunReport;

use super::checks_args::{self, ChecksName, ChosenChecks};
use super::fence_run::{self, DefaultFence, FenceRun, NONE};
use super::pause::RunDir;
use super::policy_args::PolicyArgs;
use super::unsupported;
use super::user::{choose_user, find_user};

const EXAMPLES: &str = "\
Examples:
  sudo elfen run --lanes 0:1 -- xz -9 backup.tar          only while CPU 0 idles
  elfen run --source service --service shop -- make -j8   without privileges
  elfen run --policy refresh-budget -- ./batch   next to the only service here
  sudo elfen run --user build -- make -j8        as user build

The exit status is that of the program; 126 if it cannot be run, 127 if it is not found. Before \
the program starts: 2 for invalid arguments, 3 if this machine lacks a requirement, 1 for other \
failures.

Processes that the program leaves behind stay on the batch lanes, with guards, until they end. A \
supervising `elfen` process remains for them; SIGTERM to it ends them.

The program finds its channels in ELFEN_RUN; in a fence, at ELFEN_SOCKET.";

/// Run a program on the batch lanes while their request lanes idle
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    policy: PolicyArgs,

    #[command(flatten)]
    lanes: LaneArgs,

    /// The source that says whether a request lane is busy
    #[arg(help_heading = "Expert", long, value_enum, default_value = "auto", env = "ELFEN_SOURCE")]
    source: SourceChoice,

    /// The service whose page to read, by its published name
    #[arg(long, value_name = "NAME", env = "ELFEN_SERVICE")]
    service: Option<String>,

    /// Trust pages of this user too; by default only your own and those of root
    #[arg(help_heading = "Expert", long, value_name = "USER", env = "ELFEN_SERVICE_USER")]
    service_user: Option<String>,

    /// Run the program as this user; only for root. Default: the user that called `sudo`, if any
    #[arg(help_heading = "Confinement", long, value_name = "USER", env = "ELFEN_USER")]
    user: Option<String>,

    /// How a guard waits on its lane
    #[arg(help_heading = "Expert", long, value_enum, default_value = "auto", env = "ELFEN_NAP")]
    nap: NapName,

    /// Where the program gets its checks; a guard always polls, too
    #[arg(help_heading = "Expert", long, value_enum, default_value = "auto", env = "ELFEN_CHECKS")]
    checks: ChecksName,

    #[command(flatten)]
    looks: PollTimingArgs,

    /// Put the program into this fence of elfend; `none`: give the run guards of its own
    ///
    /// Without --fence and --lanes: the fence that this command runs in, or else the only fence of
    /// elfend. If elfend holds fences and this run can enter none of them, give `--lanes` or
    /// `--fence none`. With a fence, options of guards are refused, and their variables are
    /// ignored.
    #[arg(help_heading = "Confinement", long, value_name = "NAME")]
    fence: Option<String>,

    #[command(flatten)]
    run_dir: RunDir,

    /// Write the measurements to a file, as one JSON object
    #[arg(long, value_name = "FILE")]
    json_out: Option<PathBuf>,

    /// Probe this machine, print what the run would use, and start nothing
    #[arg(short = 'n', long)]
    dry_run: bool,

    /// Print only warnings and errors
    #[arg(short, long)]
    quiet: bool,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<OsString>,
}

impl RunArgs {
    /// Whether the user chose something, by option or variable, that elfend's settings decide in a
    /// fence.
    fn wants_guards(&self) -> bool {
        let names_service = self.service.is_some() || self.service_user.is_some();
        let is_default = self.source == SourceChoice::Auto
            && self.nap == NapName::Auto
            && self.checks == ChecksName::Auto
            && self.looks.is_usual();
        !self.policy.is_empty()
            || self.lanes.by_hand()
            || names_service
            || !is_default
            || self.json_out.is_some()
    }
}

pub(crate) fn run(args: &RunArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    usage::check_program::<RunArgs>("run", &args.program)?;
    require_program(&args.program)?;
    if let Some(line) = run_in_fence(args)? {
        writeln!(out, "{line}").map_err(Failure::output)?;
        return Ok(ExitCode::SUCCESS);
    }
    let signals = open_signals(args)?;
    let (order, remarks) = plan_run(args, &signals)?;
    let mut report = args.json_out.as_ref().map(create_report).transpose()?;
    let channels = Arc::new(Channels::open(&order, signals).map_err(|error| refuse(&error))?);
    require_tasks_to_block(&order, &channels)?;
    let chosen = Announcement::new(&order, &channels);
    let rows = chosen.rows(&order, &remarks);
    if args.dry_run {
        for row in rows {
            writeln!(out, "{}", row.text()).map_err(Failure::output)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let print = |row: Row| {
        if !args.quiet {
            to_stderr(&row.text())
        }
    };
    rows.into_iter().for_each(print);
    if let Some(user) = &order.user {
        let given = channels.give_to(user.uid.as_raw(), user.gid.as_raw());
        given.map_err(|error| refuse(&error))?;
    }
    channels.renew_leases();
    let start_ns = monotonic_ns();
    let busy_ns = figures::request_busy_ns(&channels);
    let failed = |error| Failure::new(Status::Failed, "running the batch", error, "try again");
    let inheritance = channels.inheritance().map_err(|error| refuse(&error))?;
    let Ended { ending, beside_guards } =
        launcher::run(&order, &channels, &inheritance).map_err(failed)?;
    let request_busy_ns = figures::busy_between(busy_ns, figures::request_busy_ns(&channels));
    let holds = channels.settings().unwrap_or(order.settings);
    let measured = RunReport {
        policy: holds.policy.name().to_owned(),
        budget_ns: holds.budget_ns,
        policy_was_set: channels.requested().generation.load(Relaxed) != 0,
        wall_ns: monotonic_ns() - start_ns,
        figures: Figures::of(channels.lanes()),
        request_busy_ns,
        nap_of_checks: figures::nap_of_checks(channels.lanes()).map(str::to_owned),
        live: channels.live().map(|words: &LiveWords| words.live(start_ns)),
        beside_guards,
        exit_status: exit_status(ending),
        ..chosen.report(&order)
    };
    if !matches!(ending, Ending::Refused { .. }) {
        summary(&measured).into_iter().for_each(print);
    }
    if let (Some(file), Some(path)) = (&mut report, &args.json_out) {
        elfen_console::output::print_json(file, &measured)
            .map_err(|_| Failure::unwritable("report", path, "the disk is full"))?;
    }
    finish(&order, ending)
}

/// Runs the program in a fence, if the run uses a fence. Returns the line of a dry run, or `None`
/// if the run has guards of its own.
fn run_in_fence(args: &RunArgs) -> Result<Option<String>, Failure> {
    let (run_dir, program) = (args.run_dir.path(), args.program.as_slice());
    let RunArgs { dry_run, quiet, .. } = *args;
    let run = |fence, inside, user| {
        FenceRun { fence, inside, run_dir, user, program, dry_run, quiet }.run().map(Some)
    };
    match args.fence.as_deref() {
        Some(NONE) => Ok(None),
        Some(fence) => {
            let fence = fence_run::find_fence(run_dir, fence)?;
            run(fence, false, fence_run::choose_user(args.user.as_deref())?)
        }
        None if args.lanes.by_hand() => Ok(None),
        None => match DefaultFence::find(run_dir, args.user.as_deref(), args.wants_guards())? {
            Some(DefaultFence { fence, inside, user }) => run(fence, inside, user),
            None => Ok(None),
        },
    }
}

/// Opens the sources of signals that the options select.
fn open_signals(args: &RunArgs) -> Result<Signals, Failure> {
    let trusted = args.service_user.as_deref().map(find_user).transpose()?;
    let trusted = trusted.map(|user| user.uid.as_raw());
    let service = match &args.service {
        Some(name) => Some(Service::open(name, trusted).map_err(|error| refuse(&error))?),
        None => find_only_service(args, trusted)?,
    };
    let published = service.is_some();
    Signals::open(args.source, service).map_err(|error| match error {
        Error::Nothing(_) => unsupported::explain(&args.lanes, published, refuse(&error)),
        _ => refuse(&error),
    })
}

/// Finds the only service of this machine, for a run that names no service and needs one.
///
/// Budgets are for requests, so policies with budgets need the page of a service. Only
/// `fixed-budget` also works without a service.
fn find_only_service(args: &RunArgs, trusted: Option<u32>) -> Result<Option<Service>, Failure> {
    let policy = args.policy.policy();
    let needs_service = args.source == SourceChoice::Service || policy != PolicyKind::BorrowIdle;
    if !needs_service {
        return Ok(None);
    }
    let names = match Service::only(trusted) {
        Ok(service) => return Ok(Some(service)),
        Err(names) => names,
    };
    let what = match policy {
        PolicyKind::BorrowIdle => "source service".to_owned(),
        policy => format!("policy {}", policy.name()),
    };
    match names.as_slice() {
        [] if policy == PolicyKind::FixedBudget && args.source != SourceChoice::Service => Ok(None),
        [] => {
            let why = "no service publishes its requests on this machine";
            let fix = "start it first, or use --policy borrow-idle, or fixed-budget with --budget";
            Err(Failure::new(Status::Failed, what, why, fix))
        }
        [name] => {
            let why = format!("the page of service {name:?} belongs to another user");
            let fix = "if that user runs the service, name the user with --service-user";
            Err(Failure::new(Status::Failed, what, why, fix))
        }
        names => {
            let fix = format!("name one with --service: {}", names.join(", "));
            Err(Failure::new(Status::Usage, what, "several services publish here", fix))
        }
    }
}

/// Fails before anything is attached if the program does not exist.
fn require_program(program: &[OsString]) -> Result<(), Failure> {
    let [name, ..] = program else { return Ok(()) };
    let why = match inspect(name) {
        Err(Reason::NotFound) => "it is not found in PATH",
        Err(Reason::Unreadable(error)) if error.kind() == io::ErrorKind::NotFound => {
            "there is no such file"
        }
        _ => return Ok(()),
    };
    let what = format!("program {:?}", name.to_string_lossy());
    Err(Failure::new(Status::NotFound, what, why, "check its name"))
}

/// A labelled line on stderr. All labels have the same width.
struct Row(&'static str, String);

impl Row {
    fn text(&self) -> String {
        format!("{:8}  {}", self.0, self.1)
    }
}

/// Texts for the first lines that are not part of the order.
struct Remarks {
    /// How the budget was derived, if the user gave none.
    budget_origin: Option<String>,
    /// Why the program gets no live checks, if `--checks` would allow them.
    why_not_live: Option<String>,
}

/// Chooses everything that a run needs before its processes start.
fn plan_run(args: &RunArgs, signals: &Signals) -> Result<(Order, Remarks), Failure> {
    let chosen = args.policy.choose(signals.service.as_ref())?;
    let pairs = args
        .lanes
        .pairs()
        .map_err(|failure| unsupported::explain(&args.lanes, args.service.is_some(), failure))?;
    let pairs = select_served(args, signals, pairs)?;
    let (program, arguments) =
        args.program.split_first().unwrap_or_else(|| unreachable!("required"));
    let poll_timing = args.looks.timing()?;
    placement::may_take_guard_rank().map_err(|error| {
        let why = format!("guards need nice 0 and the ordinary class to hold their lanes: {error}");
        let fix = "start it without `nice` or `chrt`; the batch has the lowest priority anyway";
        Failure::new(Status::Unsupported, "priority", why, fix)
    })?;
    let (nap, alarm) = args.nap.open_for(&pairs)?;
    let Checks { chosen: ChosenChecks { checks, library }, notes, why_not_live } =
        choose_checks(args, signals, &pairs, program)?;
    if alarm.is_some() && matches!(checks, CheckMethod::Guard | CheckMethod::Live) {
        warn(
            "nap block: this program has no checks of its own, so its guard will hold the lane \
             instead",
        );
    }
    let user = choose_user(args.user.as_deref())?;
    let order = Order {
        checks,
        library,
        notes,
        nap: Arc::new(nap),
        alarm: alarm.map(Arc::new),
        pairs,
        settings: chosen.settings,
        slo: chosen.slo,
        poll_timing,
        user,
        program: program.clone(),
        arguments: arguments.to_vec(),
    };
    Ok((order, Remarks { budget_origin: chosen.budget_origin, why_not_live }))
}

/// The chosen checks of the program, and what they require.
struct Checks {
    chosen: ChosenChecks,
    notes: Option<Arc<Notes>>,
    why_not_live: Option<String>,
}

/// Chooses the checks of the program.
///
/// Live checks also require reports of the kernel. Without them, `auto` uses only the guard.
fn choose_checks(
    args: &RunArgs,
    signals: &Signals,
    pairs: &[Pair],
    program: &OsStr,
) -> Result<Checks, Failure> {
    let chosen = args.checks.choose(program)?;
    if chosen.checks != CheckMethod::Live {
        return Ok(Checks { chosen, notes: None, why_not_live: None });
    }
    match checks_args::attach_notes(signals, pairs) {
        Ok(notes) => Ok(Checks { chosen, notes: Some(notes), why_not_live: None }),
        Err(why) if args.checks == ChecksName::Auto => {
            let chosen = checks_args::GUARD;
            Ok(Checks { chosen, notes: None, why_not_live: Some(why) })
        }
        Err(why) => {
            let fix = "use --checks guard, or --checks auto";
            Err(Failure::new(Status::Unsupported, "checks live", why, fix))
        }
    }
}

/// Drops pairs that the service does not serve, if the service's page is the only source of
/// signals. The run would never learn whether the request lanes of these pairs idle. Pairs of
/// `--lanes` are kept.
fn select_served(
    args: &RunArgs,
    signals: &Signals,
    pairs: Vec<Pair>,
) -> Result<Vec<Pair>, Failure> {
    let (None, Some(service)) = (&signals.tasks, &signals.service) else { return Ok(pairs) };
    let serves = |pair: &Pair| service.living_slots(&[pair.request]).next().is_some();
    let (kept, left): (Vec<Pair>, Vec<Pair>) = pairs.into_iter().partition(serves);
    let what = format!("service {:?}", service.name);
    let why = || format!("it serves on none of the request lanes of {}", pair::list(&left));
    if args.lanes.by_hand() {
        if !left.is_empty() {
            warn(&format!("{what}: {}; these lanes count as idle until it does", why()));
        }
        return Ok([kept, left].concat());
    }
    if kept.is_empty() {
        let fix = "name the pairs that it will serve with --lanes, or use --source tasks as root";
        return Err(Failure::new(Status::Failed, what, why(), fix));
    }
    if !left.is_empty() {
        warn(&format!("{what}: {}; this run does not use these lanes", why()));
    }
    Ok(kept)
}

/// The choices of a run, as its first lines and the report print them.
struct Announcement {
    lanes: String,
    source: String,
    ipc: Option<&'static str>,
}

impl Announcement {
    fn new(order: &Order, channels: &Channels) -> Self {
        let ipc = channels.counts.as_ref().map(Counts::name);
        Self { lanes: pair::list(&order.pairs), source: source_name(channels), ipc }
    }

    fn rows(&self, order: &Order, remarks: &Remarks) -> [Row; 4] {
        let Self { lanes, source, ipc } = self;
        let policy = order.settings.policy;
        let budget = match policy {
            PolicyKind::BorrowIdle | PolicyKind::SloBudget => String::new(),
            _ => {
                let origin = remarks.budget_origin.as_ref().map(|origin| format!(" ({origin})"));
                let origin = origin.unwrap_or_default();
                format!(" of {}{origin}", duration::show(order.settings.budget_ns))
            }
        };
        let ipc = ipc.map(|ipc| format!(", ipc {ipc}")).unwrap_or_default();
        let nap = order.nap.kind();
        let not_live = remarks.why_not_live.as_ref().map(|why| format!(" (not live: {why})"));
        let not_live = match order.checks {
            CheckMethod::Live => " (only the guard until the program is known)".to_owned(),
            _ => not_live.unwrap_or_default(),
        };
        // Thesis, section 5.2: a loop of PAUSE slows the sibling as much as a program with an IPC
        // of 0.01.
        let costs =
            if nap == NapKind::Spin { " (PAUSE, which slows requests on an SMT core)" } else { "" };
        let poll = duration::show(nanos(order.poll_timing.interval));
        let level = Level::Affinity.name();
        [
            Row("lanes", format!("{lanes}, {}{budget}, level {level}", policy.name())),
            Row("source", format!("{source}{ipc}, guards poll every {poll}")),
            Row("checks", format!("{}{not_live}", order.checks.name())),
            Row("nap", format!("{}{costs}", nap.name())),
        ]
    }

    fn report(self, order: &Order) -> RunReport {
        RunReport {
            lanes: self.lanes,
            source: self.source,
            nap: order.nap.kind().name().to_owned(),
            ipc: self.ipc.map(str::to_owned),
            checks: order.checks.name().to_owned(),
            level: Level::Affinity.name().to_owned(),
            poll_timing: order.poll_timing.into(),
            ..RunReport::default()
        }
    }
}

/// Rejects `--nap block` without the task map. The kernel wakes blocked threads when it switches
/// the request lane to idle. The service's page may disagree with that.
fn require_tasks_to_block(order: &Order, channels: &Channels) -> Result<(), Failure> {
    let Some(alarm) = &order.alarm else { return Ok(()) };
    if channels.tasks.is_some() {
        // The wakers will open the same alarms, so try to open each of them now. Without working
        // alarms, the sleepers could not be woken, and the run would have half its speed.
        let open = |request| alarm.sleeper(request).map(drop);
        return (channels.requests().into_iter().try_for_each(open))
            .map_err(|error| signal_args::failure("nap block", &error));
    }
    let fix = "use --source tasks, or another nap";
    Err(Failure::new(Status::Usage, "nap block", "it requires the task map", fix))
}

fn create_report(path: &PathBuf) -> Result<File, Failure> {
    File::create(path).map_err(|error| Failure::unwritable("report", path, error))
}

fn source_name(channels: &Channels) -> String {
    let tasks = match channels.tasks.as_ref().map(|(_, writer)| *writer) {
        Some(Writer::Program(Source::Handed)) => "tasks (elfend)",
        Some(Writer::Program(Source::Shared)) => "tasks (shared)",
        Some(Writer::Program(Source::Attached)) => "tasks (attached)",
        Some(Writer::Module) => "module",
        None => return "service alone".to_owned(),
    };
    let service = if channels.service.is_some() { " and service" } else { "" };
    format!("{tasks}{service}")
}

fn exit_status(ending: Ending) -> u8 {
    match ending {
        Ending::Exited { code } => code,
        Ending::Killed { signal } => u8::try_from(128 + signal).unwrap_or(u8::MAX),
        Ending::Refused { errno: libc::ENOENT } => 127,
        Ending::Refused { .. } => 126,
    }
}

/// Ends this process in the way the program ended.
fn finish(order: &Order, ending: Ending) -> Result<ExitCode, Failure> {
    match ending {
        Ending::Killed { signal } => launcher::die_of(signal),
        Ending::Exited { code } => Ok(ExitCode::from(code)),
        Ending::Refused { errno } => {
            let why = io::Error::from_raw_os_error(errno);
            let fix = "check its name and its permissions";
            let program = format!("program {:?}", order.program.to_string_lossy());
            to_stderr(&format!("{program}: {why}; {fix}"));
            Ok(ExitCode::from(exit_status(ending)))
        }
    }
}

/// The lines with what the run measured.
fn summary(report: &RunReport) -> Vec<Row> {
    let Figures { borrowed_ns, overlapped_ns, naps, reaction_ns, wake_ns, .. } = &report.figures;
    let wall = duration::show(report.wall_ns);
    let mut rows = match borrowed_ns.zip(*overlapped_ns) {
        Some((borrowed_ns, overlapped_ns)) => vec![
            Row("ran", format!("{wall}, borrowed {}, {naps} naps", duration::show(borrowed_ns))),
            Row(
                "overlap",
                duration::show(overlapped_ns) + &share_text(overlapped_ns, report.request_busy_ns),
            ),
        ],
        None => vec![
            Row("ran", format!("{wall}, {naps} naps")),
            Row("overlap", "not measured: this requires the task map".to_owned()),
        ],
    };
    let latency = |what: &str, latency: &Latency| {
        let (median, p99) = latency.median.zip(latency.p99)?;
        Some(format!("{what}median {}, p99 {}", duration::show(median), duration::show(p99)))
    };
    let latencies = [latency("", reaction_ns), latency("wake ", wake_ns)];
    let latencies: Vec<String> = latencies.into_iter().flatten().collect();
    if !latencies.is_empty() {
        rows.push(Row("reaction", latencies.join("; ")));
    }
    rows.extend(report.live.as_ref().map(live_summary));
    rows
}

/// The line with the results of live checks.
fn live_summary(live: &Live) -> Row {
    let all: u64 = live.missed_by.values().sum();
    let percent_of_all = |count: u64| count * 100 / all.max(1);
    let by =
        live.missed_by.iter().map(|(name, &count)| format!("{name} {}", percent_of_all(count)));
    let by = by.collect::<Vec<_>>().join(", ");
    let missed = live.missed * 1000 / live.probes.max(1);
    let why = if by.is_empty() { String::new() } else { format!(" ({by} % of these)") };
    let learned = live.first_check_after_ns.zip(live.last_check_after_ns).map(|(first, last)| {
        format!(", added {} to {} after the start", duration::show(first), duration::show(last))
    });
    let p99 = live.gap_ns.p99.map(|p99| format!(", p99 {}", duration::show(p99)));
    let refused = live.refused.as_ref().map(|why| format!("; without checks: {why}"));
    Row(
        "live",
        format!(
            "checks at {} sites in {} {}{}; {} probes{}, {}.{} % missed{why}{}",
            live.sites.on,
            live.processes,
            if live.processes == 1 { "process" } else { "processes" },
            learned.unwrap_or_default(),
            live.probes,
            p99.unwrap_or_default(),
            missed / 10,
            missed % 10,
            refused.unwrap_or_default()
        ),
    )
}

/// The least busy time of the request lanes for which a share of it says something.
const BUSY_MIN_NS: u64 = 5_000_000;

/// The overlapped time as a share of the time during which the request lanes were busy.
fn share_text(overlapped_ns: u64, busy_ns: Option<u64>) -> String {
    match busy_ns {
        None => String::new(),
        Some(busy_ns) if busy_ns < BUSY_MIN_NS => {
            format!(" (requests ran for {} only)", duration::show(busy_ns))
        }
        Some(busy_ns) => {
            let per_million = u128::from(overlapped_ns) * 1_000_000 / u128::from(busy_ns);
            let (percent, rest) = (per_million / 10_000, per_million / 100 % 100);
            format!(" ({percent}.{rest:02} % of the requests' time)")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a share of a few busy milliseconds is not printed. Method: busy times on both sides of
    /// the limit.
    #[test]
    fn a_share_needs_busy_time() {
        assert_eq!(share_text(50_000, Some(5_000_000)), " (1.00 % of the requests' time)");
        assert_eq!(share_text(50_000, Some(4_000_000)), " (requests ran for 4.00 ms only)");
        assert_eq!(share_text(50_000, None), "");
    }
}
