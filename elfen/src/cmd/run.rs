//! `elfen run`: a program on the batch lanes, out of the service's way.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use elfen_console::failure::{Failure, Status, to_stderr};
use elfen_console::output::warn;
use elfen_console::{duration, usage};
use elfen_instrument::Inject;
use elfen_kernel::preempted::Notes;
use elfen_kernel::task_map::Source;
use elfen_machine::lane_args::LaneArgs;
use elfen_machine::pair::Pair;
use elfen_machine::{pair, placement};
use elfen_rt::clock::{monotonic_ns, nanos};
use elfen_rt::nap::Kind;
use elfen_rt::signal::control::PolicyKind;
use elfen_run::Order;
use elfen_run::args::nap::NapName;
use elfen_run::args::poll_timing::PollTimingArgs;
use elfen_run::args::signals::{self as signal_args, refuse};
use elfen_run::batches::Level;
use elfen_run::channels::{Channels, Error, Service, Signals, SourceChoice, Writer};
use elfen_run::figures::{self, Figures};
use elfen_run::ipc::Counts;
use elfen_run::launcher::{self, Ended, Ending};
use elfen_run::live::page::LiveWords;
use elfen_run::report::Report;

use super::fence_run::{self, Fenced, NONE, Usual};
use super::inject_args::{self, Chosen, InjectName};
use super::pause::RunDir;
use super::policy_args::PolicyArgs;
use super::summary::{live_summary, summary};
use super::unsupported;
use super::user::{self, user_of};

const EXAMPLES: &str = "\
Examples:
  sudo elfen run --lanes 0:1 -- xz -9 backup.tar          only while CPU 0 idles
  elfen run --signal service --service shop -- make -j8   without privileges
  elfen run --policy refresh-budget -- ./batch   beside the only service here
  sudo elfen run --user build -- make -j8        as another user than who asks

The exit status is the program's own; 126 if it cannot be run, 127 if it is not found. Before \
anything is started: 2 for wrong arguments, 3 if this machine lacks what they ask for, 1 for other \
failures.

Processes that it leaves behind stay lent and guarded until they end, by an `elfen` that has them \
end at SIGTERM.

The program finds its channels in ELFEN_RUN, in a fence behind ELFEN_SOCKET.";

/// Run a program on the batch lanes while their request lanes idle
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    policy: PolicyArgs,

    #[command(flatten)]
    lanes: LaneArgs,

    /// Where to learn what the request lanes do
    #[arg(long, value_enum, default_value = "auto", env = "ELFEN_SIGNAL")]
    signal: SourceChoice,

    /// The service whose page to read, by the name it published under
    #[arg(long, value_name = "NAME", env = "ELFEN_SERVICE")]
    service: Option<String>,

    /// Trust the service's page of this user, and not only one's own and root's
    #[arg(long, value_name = "USER", env = "ELFEN_SERVICE_USER")]
    service_user: Option<String>,

    /// Run the program as this user; for root. By default who asked `sudo`, if that was it
    #[arg(long, value_name = "USER", env = "ELFEN_USER")]
    user: Option<String>,

    /// How a guard waits on its lane
    #[arg(long, value_enum, default_value = "auto", env = "ELFEN_NAP")]
    nap: NapName,

    /// How the program is checked, besides by its guard
    #[arg(long, value_enum, default_value = "auto", env = "ELFEN_INJECT")]
    inject: InjectName,

    #[command(flatten)]
    looks: PollTimingArgs,

    /// Put the program into this fence of elfend's, whose guards hold its lanes; `none` for guards
    /// of the run's own
    ///
    /// By default the fence that this command is in, or that of an elfend which holds one, where no
    /// lanes are named. Where elfend holds fences and this run can be in none, it takes `--lanes`
    /// or `none`. Where one is named here, options of guards are refused, and their variables are
    /// for other runs.
    #[arg(long, value_name = "NAME")]
    fence: Option<String>,

    #[command(flatten)]
    run_dir: RunDir,

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
    /// Whether an option, or its variable, asks for what elfend's settings decide in a fence.
    fn asks_guards(&self) -> bool {
        let named = [&self.service, &self.service_user].into_iter().any(Option::is_some);
        let usual = (self.signal, self.nap, self.inject)
            == (SourceChoice::Auto, NapName::Auto, InjectName::Auto);
        let looks = self.looks.is_usual();
        !self.policy.is_empty()
            || self.lanes.by_hand()
            || named
            || !usual
            || !looks
            || self.report.is_some()
    }

    /// The failure that says what the machine lacks; `seen` is the one that the run has met.
    fn lacking(&self, seen: Failure) -> Failure {
        unsupported::failure(&self.lanes, self.service.is_some(), seen)
    }
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    usage::check_program("run", &args.program)?;
    if let Some(line) = in_fence(args)? {
        writeln!(out, "{line}").map_err(Failure::output)?;
        return Ok(ExitCode::SUCCESS);
    }
    let signals = signals(args)?;
    let (order, said) = order(args, &signals)?;
    let mut report = args.report.as_ref().map(create).transpose()?;
    let channels = Arc::new(Channels::open(&order, signals).map_err(|error| refuse(&error))?);
    require_tasks_to_block(&order, &channels)?;
    let chosen = Announced::of(&order, &channels);
    let line = chosen.line(&order, &said);
    if args.dry_run {
        writeln!(out, "{line}").map_err(Failure::output)?;
        return Ok(ExitCode::SUCCESS);
    }
    to_stderr(&line);
    if let Some(user) = &order.user {
        let given = channels.give_to(user.uid.as_raw(), user.gid.as_raw());
        given.map_err(|error| refuse(&error))?;
    }
    channels.renew_leases();
    let (start_ns, busy_ns) = (monotonic_ns(), figures::request_busy_ns(&channels));
    let failed = |error| Failure::new(Status::Failed, "running the batch", error, "try again");
    let inheritance = channels.inheritance().map_err(|error| refuse(&error))?;
    let Ended { ending, beside_guards } =
        launcher::run(&order, &channels, &inheritance).map_err(failed)?;
    let request_busy_ns = figures::busy_between(busy_ns, figures::request_busy_ns(&channels));
    let holds = channels.settings().unwrap_or(order.settings);
    let measured = Report {
        policy: holds.policy.name().to_owned(),
        budget_ns: holds.budget_ns,
        policy_was_set: channels.requested().generation.load(Relaxed) != 0,
        wall_ns: monotonic_ns() - start_ns,
        figures: Figures::of(channels.lanes()),
        request_busy_ns,
        nap_of_checks: figures::nap_of_checks(channels.lanes()).map(str::to_owned),
        live: channels.live().map(LiveWords::live),
        beside_guards,
        exit_status: exit_status(ending),
        ..chosen.report(&order)
    };
    if !matches!(ending, Ending::Refused { .. }) {
        to_stderr(&summary(&measured));
        measured.live.as_ref().into_iter().for_each(|live| to_stderr(&live_summary(live)));
    }
    if let (Some(file), Some(path)) = (&mut report, &args.report) {
        elfen_console::output::print_json(file, &measured)
            .map_err(|_| Failure::unwritable("report", path, "the disk is full"))?;
    }
    end(&order, ending)
}

/// The program in a fence, where the run is for one: comes back with what a dry run says. `None` if
/// it has guards of its own.
fn in_fence(args: &Args) -> Result<Option<String>, Failure> {
    let (run_dir, program) = (args.run_dir.path(), args.program.as_slice());
    let dry_run = args.dry_run;
    let run = |fence, inside, user| {
        Fenced { fence, inside, run_dir, user, program, dry_run }.run().map(Some)
    };
    match args.fence.as_deref() {
        Some(NONE) => Ok(None),
        Some(fence) => {
            let user = fence_run::user(args.user.as_deref())?;
            run(fence_run::named(run_dir, fence)?, false, user)
        }
        None if args.lanes.by_hand() => Ok(None),
        None => match Usual::find(run_dir, args.user.as_deref(), args.asks_guards())? {
            Some(Usual { fence, inside, user }) => run(fence, inside, user),
            None => Ok(None),
        },
    }
}

/// The sources of signals that the user asked for.
fn signals(args: &Args) -> Result<Signals, Failure> {
    let trusted = args.service_user.as_deref().map(user_of).transpose()?;
    let trusted = trusted.map(|user| user.uid.as_raw());
    let service = match &args.service {
        Some(name) => Some(Service::open(name, trusted).map_err(|error| refuse(&error))?),
        None => only_service(args, trusted)?,
    };
    let published = service.is_some();
    Signals::open(args.signal, service).map_err(|error| match error {
        Error::Nothing(_) => unsupported::failure(&args.lanes, published, refuse(&error)),
        _ => refuse(&error),
    })
}

/// Budgets are given to requests. With one service on the machine there is no question whose
/// requests; `fixed-budget` can do without.
fn only_service(args: &Args, trusted: Option<u32>) -> Result<Option<Service>, Failure> {
    let policy = args.policy.policy();
    let asks = args.signal == SourceChoice::Service || policy != PolicyKind::BorrowIdle;
    if !asks {
        return Ok(None);
    }
    let names = match Service::only(trusted) {
        Ok(service) => return Ok(Some(service)),
        Err(names) => names,
    };
    let what = match policy {
        PolicyKind::BorrowIdle => "signal service".to_owned(),
        policy => format!("policy {}", policy.name()),
    };
    match names.as_slice() {
        [] if policy == PolicyKind::FixedBudget && args.signal != SourceChoice::Service => Ok(None),
        [] => {
            let why =
                "no service publishes its requests here, and only one that does can be heeded";
            let fix = "start it first, or use --policy borrow-idle, or fixed-budget with --budget";
            Err(Failure::new(Status::Failed, what, why, fix))
        }
        [name] => {
            let why = format!("service {name:?} publishes, and is another user's");
            let fix = "if that user runs the service, say so with --service-user";
            Err(Failure::new(Status::Failed, what, why, fix))
        }
        names => {
            let fix = format!("name one with --service: {}", names.join(", "));
            Err(Failure::new(Status::Usage, what, "several services publish here", fix))
        }
    }
}

/// What the first line says besides the order.
struct Said {
    /// Where the budget comes from, if the user gave none.
    taken: Option<String>,
    /// Why the program gets no live checks, if it might have had some.
    why_not_live: Option<String>,
}

/// All that is decided before anything is started.
fn order(args: &Args, signals: &Signals) -> Result<(Order, Said), Failure> {
    let chosen = args.policy.choose(signals.service.as_ref())?;
    let pairs = args.lanes.pairs().map_err(|seen| args.lacking(seen))?;
    let pairs = served(args, signals, pairs)?;
    let (program, arguments) =
        args.program.split_first().unwrap_or_else(|| unreachable!("required"));
    let poll_timing = args.looks.timing()?;
    placement::may_take_guard_rank().map_err(|error| {
        let why = format!("guards need nice 0 and the ordinary class to hold their lanes: {error}");
        let fix = "start it without `nice` or `chrt`; the batch has the lowest priority anyway";
        Failure::new(Status::Unsupported, "priority", why, fix)
    })?;
    let (nap, alarm) = args.nap.open_for(&pairs)?;
    let Injected { chosen: Chosen { inject, library }, notes, why_not } =
        inject(args, signals, &pairs, program)?;
    if alarm.is_some() && matches!(inject, Inject::Guard | Inject::Live) {
        warn(
            "nap block: this program has no checks of its own, so its guard will hold the lane \
             instead",
        );
    }
    let user = user::chosen(args.user.as_deref())?;
    let order = Order {
        inject,
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
    Ok((order, Said { taken: chosen.taken, why_not_live: why_not }))
}

/// How a program is checked, and why it has no live checks if it might have had some.
struct Injected {
    chosen: Chosen,
    notes: Option<Arc<Notes>>,
    why_not: Option<String>,
}

/// How the program is checked. Live checks take more than a program that allows them: without it,
/// `auto` leaves the program to its guard.
fn inject(
    args: &Args,
    signals: &Signals,
    pairs: &[Pair],
    program: &OsStr,
) -> Result<Injected, Failure> {
    let chosen = args.inject.choose(program)?;
    if chosen.inject != Inject::Live {
        return Ok(Injected { chosen, notes: None, why_not: None });
    }
    match inject_args::notes(signals, pairs) {
        Ok(notes) => Ok(Injected { chosen, notes: Some(notes), why_not: None }),
        Err(why) if args.inject == InjectName::Auto => {
            let chosen = inject_args::GUARD;
            Ok(Injected { chosen, notes: None, why_not: Some(why) })
        }
        Err(why) => {
            let fix = "use --inject guard, or --inject auto";
            Err(Failure::new(Status::Unsupported, "inject live", why, fix))
        }
    }
}

/// On a service's page alone, a lane that the service does not serve is a lane of which the run
/// learns nothing.
fn served(args: &Args, signals: &Signals, pairs: Vec<Pair>) -> Result<Vec<Pair>, Failure> {
    let (None, Some(service)) = (&signals.tasks, &signals.service) else { return Ok(pairs) };
    let serves = |pair: &Pair| service.living_slots(&[pair.request]).next().is_some();
    let (kept, left): (Vec<Pair>, Vec<Pair>) = pairs.into_iter().partition(serves);
    let what = format!("service {:?}", service.name);
    let why = || format!("it serves on none of the request lanes of {}", pair::list(&left));
    if args.lanes.by_hand() {
        if !left.is_empty() {
            warn(&format!("{what}: {}; until it does, they count as idle", why()));
        }
        return Ok([kept, left].concat());
    }
    if kept.is_empty() {
        let fix = "name the pairs that it will serve with --lanes, or use --signal tasks as root";
        return Err(Failure::new(Status::Failed, what, why(), fix));
    }
    if !left.is_empty() {
        warn(&format!("{what}: {}; they are left out", why()));
    }
    Ok(kept)
}

/// The choices of a run, as the first line and the report say them.
struct Announced {
    lanes: String,
    signal: &'static str,
    ipc: Option<&'static str>,
}

impl Announced {
    fn of(order: &Order, channels: &Channels) -> Self {
        let ipc = channels.counts.as_ref().map(Counts::name);
        Self { lanes: pair::list(&order.pairs), signal: signal_name(channels), ipc }
    }

    fn line(&self, order: &Order, said: &Said) -> String {
        let Self { lanes, signal, ipc } = self;
        let policy = order.settings.policy;
        let budget = match policy {
            PolicyKind::BorrowIdle | PolicyKind::SloBudget => String::new(),
            _ => {
                let from = said.taken.as_ref().map(|from| format!(" ({from})"));
                let from = from.unwrap_or_default();
                format!(" of {}{from}", duration::show(order.settings.budget_ns))
            }
        };
        let ipc = ipc.map(|ipc| format!(", ipc {ipc}")).unwrap_or_default();
        let nap = order.nap.kind();
        let not_live = said.why_not_live.as_ref().map(|why| format!(" (not live: {why})"));
        let not_live = match order.inject {
            Inject::Live => " (guard until learned)".to_owned(),
            _ => not_live.unwrap_or_default(),
        };
        // Thesis, section 5.2: PAUSE takes from the sibling what a program of IPC 0.01 takes.
        let costs =
            if nap == Kind::Spin { " (PAUSE, which slows requests on an SMT core)" } else { "" };
        format!(
            "{}{budget} on lanes {lanes}; signal {signal}{ipc}, nap {}{costs}, \
             inject {}{not_live}, guards look every {}, level {}",
            policy.name(),
            nap.name(),
            order.inject.name(),
            duration::show(nanos(order.poll_timing.interval)),
            Level::Affinity.name()
        )
    }

    fn report(self, order: &Order) -> Report {
        Report {
            lanes: self.lanes,
            signal: self.signal.to_owned(),
            nap: order.nap.kind().name().to_owned(),
            ipc: self.ipc.map(str::to_owned),
            inject: order.inject.name().to_owned(),
            level: Level::Affinity.name().to_owned(),
            looked: order.poll_timing.into(),
            ..Report::default()
        }
    }
}

/// The kernel wakes threads that block when the lane idles, which the service's page need not agree
/// with.
fn require_tasks_to_block(order: &Order, channels: &Channels) -> Result<(), Failure> {
    let Some(alarm) = &order.alarm else { return Ok(()) };
    if channels.tasks.is_some() {
        // The wakers will open the same: a run whose sleepers they cannot wake is refused, and not
        // run at half its speed.
        let open = |request| alarm.sleeper(request).map(drop);
        return (channels.requests().into_iter().try_for_each(open))
            .map_err(|error| signal_args::failure("nap block", &error));
    }
    let fix = "use --signal tasks, or another nap";
    Err(Failure::new(Status::Usage, "nap block", "it goes by the task map alone", fix))
}

fn create(path: &PathBuf) -> Result<File, Failure> {
    File::create(path).map_err(|error| Failure::unwritable("report", path, error))
}

fn signal_name(channels: &Channels) -> &'static str {
    let writer = channels.tasks.as_ref().map(|(_, writer)| *writer);
    match (writer, &channels.service) {
        (Some(Writer::Program(Source::Handed)), None) => "tasks (elfend)",
        (Some(Writer::Program(Source::Shared)), None) => "tasks (shared)",
        (Some(Writer::Program(Source::Attached)), None) => "tasks (attached)",
        (Some(Writer::Module), None) => "module",
        (Some(Writer::Program(Source::Handed)), Some(_)) => "tasks (elfend) and service",
        (Some(Writer::Program(Source::Shared)), Some(_)) => "tasks (shared) and service",
        (Some(Writer::Program(Source::Attached)), Some(_)) => "tasks (attached) and service",
        (Some(Writer::Module), Some(_)) => "module and service",
        (None, _) => "service alone",
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
        Ending::Killed { signal } => launcher::die_of(signal),
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
