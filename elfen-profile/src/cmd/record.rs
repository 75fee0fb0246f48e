//! `elfen profile record`: runs a program and writes its profile.

use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

use elfen_console::duration;
use elfen_console::failure::{Failure, Status, to_stderr};
use elfen_console::output::{self, ResultFile};
use elfen_instrument::process::stat;
use elfen_machine::source::Source as Machine;

use super::rules_file;
use crate::bursts::{self, Attempt, BurstError};
use crate::control::EDGES_MAX;
use crate::elfprof;
use crate::everything::{self, Ended, StartError, TraceError};
use crate::precise::{PreciseError, Sampling};
use crate::profile::{Profile, Source as ProfileSource, What};
use crate::recording::{ProgramRecording, Recorded, RecordingError, Subject, percent};
use crate::report::{ProfileReport, SortKey};
use crate::rules::RuleSet;
use crate::shadows::{self, ShadowError, Shadows, continue_by_shadows};
use crate::signals;
use crate::symbols::{ProfileSymbols, note_build_ids};

const AFTER: &str = "\
By bursts, a thread goes through a code cache for some thousand edges, at random times of its CPU \
time. The program runs as ever between them; it is stopped for a moment at the beginning and at \
the end. Counts are \
what the bursts have seen; ± is the relative error. A process that has no bursts is \
named, with the reason. docs/safety.md says which programs may notice bursts.

By shadows, copies of the program are forked at random times. They run in the code cache, on an \
idle CPU, and change nothing: their output is dropped, and shared memory is read-only. A shadow is \
much longer than a burst, and costs the program only its fork. It ends where the program would \
wait for input.

By everything, the program runs in the code cache from start to end, under ptrace, and so do its \
threads and children. Counts are exact, and the program takes about three times as long; a \
hundred times with stacks or paths.

By samples, the processor follows single instructions: IBS of AMD, PEBS of Intel, or SPE of Arm. \
It reports their latencies, and whether they miss caches or are predicted wrongly. Intervals are \
random. Nothing of the program changes. Virtual machines rarely show these devices: `elfen doctor` \
names those of a machine.

A path is what runs from the target of a backward branch to the next one, also through calls.

A hot data stream is a sequence of memory accesses that repeats: the same instructions with the \
same addresses.

With --rules, each executed instruction goes through the productions of a file, as in HPS: \
counters decide which instructions are profiled. A handler counts functions (HotMethod) or calls \
(CallPair), or finds streams (DataStream). workloads/profile/hps.rules has the productions of \
the paper, and docs/design/rules.md the grammar.

Code that the program generates itself, as Java and JavaScript do, is not counted.

Exit status: that of the program; 128 + N if signal N ended it; 126 and 127 if it cannot be run or \
was not found; 1 if the profile cannot be written, or the rules cannot be read; 2 for invalid \
rules; 3 if it may not be traced, or the machine has no samples.

Examples:
  elfen profile record -- ./program
  elfen profile record -o run.elfprof -- lua5.4 script.lua
  elfen profile record -p \"$(pgrep -o redis-server)\" -d 30s
  elfen profile record --what stacks,paths -o run.elfprof -- ./program
  elfen profile record --by shadows --what paths -o run.elfprof -- ./program
  elfen profile record --by samples --every 1M -o run.elfprof -- ./program
  elfen profile record --by shadows --what streams -o run.elfprof -- ./program
  elfen profile record --by everything -o exact.elfprof -- ./program
  elfen profile record --until 5% -o run.elfprof -p \"$(pgrep -o nginx)\"
  elfen profile record --rules hps.rules -o run.elfprof -- ./program
  elfen profile report run.elfprof --sort rule";

/// Rows that are printed if no file is named.
const ROWS: usize = 15;

/// How a profile comes about.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Mechanism {
    /// Bursts where they are possible, else shadows; samples for `--what instructions`
    Auto,
    /// Count each edge of each block, exactly; about three times as slow
    Everything,
    /// Estimate the counts from random parts of the run, at about one per cent
    Bursts,
    /// Estimate the counts from long parts of the run, in forked copies on another CPU
    Shadows,
    /// Let the processor sample single instructions, with their latencies and misses
    Samples,
}

/// What a profile can hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Kind {
    /// Blocks and edges, with calls and their targets; always recorded
    Edges,
    /// Which calls lead to a block
    Stacks,
    /// Which blocks run between two backward branches
    Paths,
    /// What instructions leave in registers; not by bursts
    Values,
    /// Latencies and misses of single instructions; only by samples
    Instructions,
    /// Sequences of memory accesses that repeat (hot data streams); not with values
    Streams,
}

/// Run a program, or watch one that runs, and count which of its code runs
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER)]
pub(super) struct RecordArgs {
    /// How to count
    #[arg(long, value_name = "MECHANISM", default_value = "auto")]
    by: Mechanism,

    /// What to record besides edges, as in `stacks,paths` [default: stacks; none by everything]
    #[arg(long, value_name = "KINDS", value_delimiter = ',')]
    what: Option<Vec<Kind>>,

    /// Productions that choose instructions, and collect functions, calls or streams at these
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,

    /// Streams: cut each sequence after this many accesses [default: where a burst or shadow
    /// ends]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(2..))]
    burst: Option<u64>,

    /// The part of the program's time that bursts or shadows may cost
    #[arg(long, value_name = "PERCENT", value_parser = parse_cost, default_value = "1%")]
    cost: f64,

    /// The edges of one burst
    #[arg(long, value_name = "COUNT", default_value_t = 2000,
          value_parser = clap::value_parser!(u32).range(1..=EVENTS_MAX))]
    edges: u32,

    /// Shadows: the CPUs that they may use, on average
    #[arg(long, value_name = "CPUS", default_value_t = 0.25, value_parser = parse_load)]
    load: f64,

    /// Shadows: the instructions of one shadow
    #[arg(long, value_name = "COUNT", default_value = "10M", value_parser = parse_count)]
    sample: u64,

    /// Shadows: none begins that would stop the program for longer, by estimate
    #[arg(long, value_name = "TIME", default_value = "2ms", value_parser = duration::parse)]
    max_stall: Duration,

    /// Shadows: the CPU that they run on [default: the lanes of `elfen run`, else any]
    #[arg(long, value_name = "CPU")]
    cpu: Option<u32>,

    /// Samples: the mean number of instructions or operations between two
    #[arg(long, value_name = "COUNT", default_value = "500K", value_parser = parse_count)]
    every: u64,

    /// Write the profile to a file [default: print the hottest functions]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Stop after this time [default: when the program ends]
    #[arg(short, long, value_name = "TIME", value_parser = duration::parse)]
    duration: Option<Duration>,

    /// Stop when the share of each block of 1 % or more is known to this error; of each path, if
    /// paths are recorded
    #[arg(long, value_name = "PERCENT", value_parser = parse_cost)]
    until: Option<f64>,

    /// Print only what the program prints, and failures
    #[arg(short, long)]
    quiet: bool,

    /// A running process; Ctrl-C ends the recording
    #[arg(short, long, value_name = "PID", conflicts_with = "program",
          value_parser = clap::value_parser!(u32).range(1..))]
    pid: Option<u32>,

    /// The program and its arguments
    #[arg(last = true, required_unless_present = "pid", value_name = "PROGRAM")]
    program: Vec<OsString>,
}

impl RecordArgs {
    fn what(&self, rules: &'static [RuleSet]) -> What {
        match &self.what {
            Some(kinds) => What {
                stacks: kinds.contains(&Kind::Stacks),
                paths: kinds.contains(&Kind::Paths),
                values: kinds.contains(&Kind::Values),
                streams: kinds.contains(&Kind::Streams),
                stream_burst: self.burst.unwrap_or(0),
                rules,
            },
            None => What { stacks: self.by != Mechanism::Everything, rules, ..What::default() },
        }
    }

    fn subject(&self) -> Subject {
        let program = self.program.clone();
        Subject { program, process: self.pid, duration: self.duration }
    }

    fn has_instructions(&self) -> bool {
        self.what.as_ref().is_some_and(|kinds| kinds.contains(&Kind::Instructions))
    }
}

const EVENTS_MAX: i64 = EDGES_MAX as i64;

/// Parses a part, such as `1%` or `0.5%`.
pub(super) fn parse_cost(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').unwrap_or(text).trim();
    let percent: f64 = number.parse().map_err(|_| "it is not a number, as in 1%".to_owned())?;
    if (0.01..=50.0).contains(&percent) {
        Ok(percent / 100.0)
    } else {
        Err("it must be from 0.01% to 50%".to_owned())
    }
}

/// Parses a number of CPUs, such as `0.25`.
pub(super) fn parse_load(text: &str) -> Result<f64, String> {
    let load: f64 = text.parse().map_err(|_| "it is not a number, as in 0.25".to_owned())?;
    if (0.01..=2.0).contains(&load) {
        Ok(load)
    } else {
        Err("it must be from 0.01 to 2".to_owned())
    }
}

/// Parses a count, such as `10M`.
pub(super) fn parse_count(text: &str) -> Result<u64, String> {
    let (digits, times) = match text.as_bytes().last() {
        Some(b'K') => (&text[..text.len() - 1], 1_000),
        Some(b'M') => (&text[..text.len() - 1], 1_000_000),
        _ => (text, 1),
    };
    let count = digits.parse().ok().and_then(|count: u64| count.checked_mul(times));
    let count = count.ok_or_else(|| "it is not a count, as in 500K or 10M".to_owned())?;
    let range = SAMPLE_MIN..=SAMPLE_MAX;
    if range.contains(&count) { Ok(count) } else { Err("it must be from 10K to 1000M".to_owned()) }
}

const SAMPLE_MIN: u64 = 10_000;
const SAMPLE_MAX: u64 = 1_000_000_000;

pub(super) fn run(args: &RecordArgs) -> Result<ExitCode, Failure> {
    let ends_early = args.pid.is_some() || args.duration.is_some() || args.until.is_some();
    if args.by == Mechanism::Everything && ends_early {
        let why = "--by everything counts a program from its start to its end";
        let fix = "leave --pid, --duration and --until out, or use --by bursts";
        return Err(Failure::new(Status::Usage, "the recording", why, fix));
    }
    let rules: &'static [RuleSet] = match &args.rules {
        // They are used until this process ends.
        Some(path) => std::slice::from_ref(Box::leak(Box::new(rules_file::read(path)?))),
        None => &[],
    };
    let what = args.what(rules);
    if args.by == Mechanism::Bursts && what.values {
        let why = "bursts are too short for values";
        let fix = "use --by shadows, or --by everything";
        return Err(Failure::new(Status::Usage, "the recording", why, fix));
    }
    if let Some(pid) = args.pid {
        check_process(pid).map_err(|(why, fix)| {
            Failure::new(Status::Failed, process(args), why, fix.replace("PID", &pid.to_string()))
        })?;
    }
    check_mechanism(args)?;
    check_samples(args)?;
    check_addresses(args, what)?;
    // A file that cannot be written is found before the program runs.
    let unwritable = |path, error| Failure::unwritable("the profile", path, error);
    let open = |path| ResultFile::open(path).map_err(|error| unwritable(path, error));
    let file = args.output.as_deref().map(open).transpose()?;
    let passed = if args.pid.is_some() { signals::stop_on() } else { signals::pass_on() };
    passed.map_err(|error| Failure::new(Status::Failed, "signals", error, "try again"))?;
    let (mut profile, status) = match args.by {
        Mechanism::Everything => {
            say(args, "everything", "each edge is counted, in a code cache, under ptrace");
            let recorded = everything::record(&args.program, what, signals::set_program)
                .map_err(|error| failed(&error, args))?;
            let status = match recorded.ended {
                Ended::Exited(status) => u8::try_from(status).unwrap_or(1),
                Ended::Killed(signal) => u8::try_from(128 + signal).unwrap_or(1),
            };
            (recorded.profile, status)
        }
        Mechanism::Bursts => {
            say(args, "bursts", BURSTS);
            by_bursts(args, what).map_err(|error| burst_failed(&error, args))?
        }
        Mechanism::Shadows => {
            say(args, "shadows", SHADOWS);
            by_shadows(args, what)?
        }
        Mechanism::Samples => by_samples(args)?,
        Mechanism::Auto if args.has_instructions() => by_samples(args)?,
        Mechanism::Auto if what.values || what.needs_addresses() => {
            let why = match what.values {
                true => "bursts are too short for values",
                false => "bursts are too short for long streams",
            };
            say(args, "shadows", why);
            by_shadows(args, what)?
        }
        Mechanism::Auto => {
            say(args, "bursts", BURSTS);
            by_bursts_or_shadows(args, what)?
        }
    };
    profile.program = args.program.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    if let Some(process) = args.pid {
        profile.program = vec![format!("process {process}")];
    }
    note_build_ids(&mut profile);
    if let (Some(file), Some(path)) = (file, args.output.as_deref()) {
        let written = file.write(|file| elfprof::write(&profile, file));
        written.map_err(|error| unwritable(path, error))?;
    }
    if args.output.is_none() && !args.quiet {
        let (symbols, _) = ProfileSymbols::read(&profile);
        let sort = match rules.is_empty() {
            _ if args.has_instructions() => SortKey::Instruction,
            true => SortKey::Function,
            false => SortKey::Rule,
        };
        let report = ProfileReport::of(&profile, &symbols, sort, ROWS);
        let _closed = io::stderr().write_all(report.text(sort).as_bytes());
    } else {
        for left in &profile.left {
            output::warn(&format!("not counted: {left}"));
        }
    }
    Ok(ExitCode::from(status))
}

/// Whether a process runs a program. Returns what it does else, and a remedy.
fn check_process(pid: u32) -> Result<(), (&'static str, &'static str)> {
    let another = "name a running process; `pgrep NAME` finds one";
    let is_kernel = || {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"));
        maps.is_ok_and(|maps| maps.is_empty())
    };
    match stat(pid).map(|stat| stat.state) {
        Some('T') => Err(("it is stopped", "let it continue: kill -CONT PID")),
        Some('Z' | 'X') => Err(("it has ended, and its parent has not waited for it", another)),
        Some(_) if is_kernel() => Err(("it is a thread of the kernel", another)),
        _ => Ok(()),
    }
}

/// Whether the options are for the mechanism.
fn check_mechanism(args: &RecordArgs) -> Result<(), Failure> {
    let refused = |why, fix| Err(Failure::new(Status::Usage, "the recording", why, fix));
    let Some(cpu) = args.cpu else { return Ok(()) };
    if !matches!(args.by, Mechanism::Shadows | Mechanism::Auto) {
        return refused("--cpu is for shadows", "leave it out, or use --by shadows");
    }
    if !Path::new(&format!("/sys/devices/system/cpu/cpu{cpu}")).exists() {
        return refused("--cpu names a CPU that this machine does not have", "see `elfen lanes`");
    }
    Ok(())
}

/// Samples are of instructions, and nothing else is.
fn check_samples(args: &RecordArgs) -> Result<(), Failure> {
    let by_samples =
        args.by == Mechanism::Samples || args.by == Mechanism::Auto && args.has_instructions();
    let is_other = |kind: &Kind| *kind != Kind::Instructions;
    let has_others = args.what.as_ref().is_some_and(|kinds| kinds.iter().any(is_other));
    let (why, fix) = if by_samples && (has_others || args.rules.is_some() || args.until.is_some()) {
        (
            "samples show single instructions only",
            "leave out --rules, --until, and other kinds of --what",
        )
    } else if !by_samples && args.has_instructions() {
        ("only samples show single instructions", "use --by samples")
    } else {
        return Ok(());
    };
    Err(Failure::new(Status::Usage, "the recording", why, fix))
}

/// Returns the profile, and the exit status of the program.
fn by_samples(args: &RecordArgs) -> Result<(Profile, u8), Failure> {
    let sampling = Sampling::of(&Machine::live(), args.every)
        .map_err(|error| sampling_failed(&error, args))?;
    say(args, "samples", &sampling.how());
    let mut recorded = sampling
        .record(&args.subject(), signals::set_program)
        .map_err(|error| sampling_failed(&error, args))?;
    let samples: u64 = recorded.profile.sampled_events.iter().map(|one| one.samples).sum();
    if samples == 0 {
        recorded.profile.left.push("no thread ran long enough for a sample".to_owned());
    } else if !args.quiet {
        to_stderr(&format!(
            "profile: {samples} samples in {} of CPU time; {:.2} % of a CPU to read them",
            duration::show(recorded.profile.ran_ns),
            percent(recorded.own, recorded.elapsed),
        ));
    }
    Ok((recorded.profile, recorded.ended.map_or(0, status_of)))
}

fn sampling_failed(error: &PreciseError, args: &RecordArgs) -> Failure {
    let none_needed = "use --by bursts, which needs none";
    match error {
        PreciseError::Recording(error) => recording_failed(error, args),
        PreciseError::NoSource(_) => {
            Failure::new(Status::Unsupported, "samples", error, none_needed)
        }
        PreciseError::Refused { .. } => {
            let fix = format!("use a newer kernel (IBS of a process needs 6.2), or {none_needed}");
            Failure::new(Status::Unsupported, "samples", error, fix)
        }
        PreciseError::Forbidden => {
            let fix = "run as root, or set the sysctl kernel.perf_event_paranoid to 2 (1 for IBS); \
                       a container needs --cap-add=PERFMON; `--by bursts` needs less";
            Failure::new(Status::Unsupported, "samples", error, fix)
        }
        PreciseError::Closed(_) => {
            let fix = "run as root, or as the user of the process";
            Failure::new(Status::Unsupported, process(args), error, fix)
        }
        PreciseError::Machine(_) => Failure::new(Status::Failed, "samples", error, "mount /sys"),
    }
}

/// What needs the addresses of memory accesses cannot go with everything.
fn check_addresses(args: &RecordArgs, what: What) -> Result<(), Failure> {
    let refused = |why, fix| Err(Failure::new(Status::Usage, "the recording", why, fix));
    if args.burst.is_some() && !what.streams {
        return refused("--burst is for streams only", "add `--what streams`");
    }
    if !what.needs_addresses() {
        return Ok(());
    }
    if what.values {
        let why = "streams need the addresses of accesses, and values take the same memory";
        return refused(why, "record the values by themselves");
    }
    Ok(())
}

/// The clock of user times has steps of 10 ms.
const USER_TIME_LEAST: Duration = Duration::from_millis(50);
const BURSTS: &str = "edges are counted at random times, in a code cache";
const SHADOWS: &str = "copies of the program run in a code cache, at random times";

/// Prints the mechanism and its reason.
fn say(args: &RecordArgs, by: &str, why: &str) {
    if !args.quiet {
        to_stderr(&format!("profile by {by}: {why}"));
    }
}

fn burst_order(args: &RecordArgs, what: What) -> bursts::Order {
    bursts::Order { cost: args.cost, events: args.edges, what, until: args.until }
}

/// Returns the profile, and the exit status of the program.
fn by_bursts(args: &RecordArgs, what: What) -> Result<(Profile, u8), BurstError> {
    let order = burst_order(args, what);
    let recorded = bursts::record(&args.subject(), &order, signals::set_program)?;
    Ok(of_bursts(recorded, args))
}

/// Records by shadows if the program can have no bursts.
fn by_bursts_or_shadows(args: &RecordArgs, what: What) -> Result<(Profile, u8), Failure> {
    let instead = |why: &dyn Display| {
        say(args, "shadows", &format!("bursts are not possible: {why}"));
    };
    if let Err(error) = bursts::check() {
        instead(&error);
        return by_shadows(args, what);
    }
    let begun =
        ProgramRecording::begin(&args.subject(), ProfileSource::Bursts, &signals::set_program)
            .map_err(|error| recording_failed(&error, args))?;
    match bursts::attempt(begun, &burst_order(args, what)) {
        Ok(Attempt::Recorded(recorded)) => Ok(of_bursts(recorded, args)),
        Ok(Attempt::Refused(why, recording)) => {
            instead(&why);
            let (recorded, shadows) = continue_by_shadows(recording, &shadow_order(args, what))
                .map_err(|error| shadow_failed(&error, args))?;
            Ok(of_shadows(recorded, &shadows, args))
        }
        Err(error) => Err(burst_failed(&error, args)),
    }
}

/// Says what bursts have cost.
fn of_bursts(mut recorded: Recorded, args: &RecordArgs) -> (Profile, u8) {
    if recorded.profile.bursts == 0 && recorded.profile.left.is_empty() {
        recorded.profile.left.push(too_short("a burst", args));
    } else if !args.quiet {
        let Profile { bursts, ran_ns, cost_ns, .. } = recorded.profile;
        to_stderr(&format!(
            "profile: {bursts} bursts in {} of user time; cost {}, and {:.2} % of a CPU to read \
             them",
            duration::show(ran_ns),
            cost(cost_ns, ran_ns),
            percent(recorded.own, recorded.elapsed),
        ));
        say_known(recorded.is_known, args);
    }
    (recorded.profile, recorded.ended.map_or(0, status_of))
}

fn too_short(what: &str, args: &RecordArgs) -> String {
    match args.pid {
        Some(_) => format!("it did not run long enough for {what}; see `--duration`"),
        None => format!("no process ran one program long enough for {what}; see `--by everything`"),
    }
}

fn say_known(is_known: bool, args: &RecordArgs) {
    if let Some(until) = args.until.filter(|_| is_known) {
        let part = if args.what(&[]).paths { "path" } else { "block" };
        let error = until * 100.0;
        to_stderr(&format!("profile: each {part} of 1 % or more is known to {error} % or better"));
    }
}

fn status_of(ended: ExitStatus) -> u8 {
    let code = ended.code().or_else(|| ended.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

/// Returns the profile, and the exit status of the program.
fn by_shadows(args: &RecordArgs, what: What) -> Result<(Profile, u8), Failure> {
    let order = shadow_order(args, what);
    let (recorded, shadows) = shadows::record(&args.subject(), &order, signals::set_program)
        .map_err(|error| shadow_failed(&error, args))?;
    Ok(of_shadows(recorded, &shadows, args))
}

fn shadow_order(args: &RecordArgs, what: What) -> shadows::Order {
    shadows::Order {
        cost: args.cost,
        load: args.load,
        sample: args.sample,
        stall_max: args.max_stall,
        cpu: args.cpu,
        what,
        until: args.until,
    }
}

/// Says what shadows have cost, and how they ended.
fn of_shadows(mut recorded: Recorded, shadows: &Shadows, args: &RecordArgs) -> (Profile, u8) {
    for warning in &shadows.warnings {
        output::warn(warning);
    }
    if recorded.profile.bursts == 0 && recorded.profile.left.is_empty() {
        recorded.profile.left.push(too_short("a shadow", args));
    } else if !args.quiet {
        let Profile { bursts, ran_ns, cost_ns, instructions, .. } = recorded.profile;
        let elapsed =
            duration::show(u64::try_from(recorded.elapsed.as_nanos()).unwrap_or(u64::MAX));
        to_stderr(&format!(
            "profile: {bursts} shadows with {instructions} instructions in {elapsed}; cost {}, and \
             {:.2} % of a CPU; longest stop {}",
            cost(cost_ns, ran_ns),
            percent(recorded.own, recorded.elapsed),
            duration::show(u64::try_from(shadows.stall.as_nanos()).unwrap_or(u64::MAX)),
        ));
        if shadows.on_lent > 0 {
            to_stderr(&format!(
                "profile: {} shadows ran on lanes that `elfen run` has lent to a batch",
                shadows.on_lent
            ));
        }
        say_known(recorded.is_known, args);
        let ended = |why| shadows.ends.get(why).copied().unwrap_or(0);
        if ended(shadows::INPUT) * 2 > bursts {
            to_stderr(
                "profile: most shadows ended where the program waits for input; `--by bursts` sees \
                 all of such a program",
            );
        }
        let mut ends: Vec<_> = shadows.ends.iter().collect();
        ends.sort_by_key(|&(why, count)| (u64::MAX - count, why));
        let ends: Vec<String> = ends.iter().map(|(why, count)| format!("{count} {why}")).collect();
        if !ends.is_empty() {
            to_stderr(&format!("profile: ends of shadows: {}", ends.join(", ")));
        }
    }
    (recorded.profile, recorded.ended.map_or(0, status_of))
}

fn shadow_failed(error: &ShadowError, args: &RecordArgs) -> Failure {
    match error {
        ShadowError::Recording(error) => recording_failed(error, args),
        ShadowError::Refused(_) => {
            let fix = "run as root, or start the program by `elfen profile record -- PROGRAM`";
            Failure::new(Status::Unsupported, process(args), error, fix)
        }
    }
}

/// What a recording has cost the program. Its user time may be too short for the clock of stat.
fn cost(cost_ns: u64, ran_ns: u64) -> String {
    let (cost, ran) = (Duration::from_nanos(cost_ns), Duration::from_nanos(ran_ns));
    if ran < USER_TIME_LEAST {
        return format!("{} by estimate", duration::show(cost_ns));
    }
    format!("{:.2} % by estimate", percent(cost, ran))
}

fn burst_failed(error: &BurstError, args: &RecordArgs) -> Failure {
    match error {
        BurstError::Recording(error) => recording_failed(error, args),
        BurstError::Forbidden => {
            let fix = "run as root, or set the sysctl kernel.perf_event_paranoid to 2; a container \
                       needs --cap-add=PERFMON";
            Failure::new(Status::Unsupported, "bursts", error, fix)
        }
        BurstError::Closed(_) => {
            let fix = "run as root, end its debugger, or start the program by `elfen profile \
                       record -- PROGRAM`";
            Failure::new(Status::Unsupported, process(args), error, fix)
        }
        BurstError::Refused(_) => {
            let fix = "use --by shadows, or --by everything with a program that you start";
            Failure::new(Status::Unsupported, process(args), error, fix)
        }
    }
}

fn recording_failed(error: &RecordingError, args: &RecordArgs) -> Failure {
    match error {
        RecordingError::Program(error) => not_started(error, args),
        RecordingError::Gone => {
            let fix = "name a running process; `pgrep NAME` finds one";
            Failure::new(Status::Failed, process(args), error, fix)
        }
        RecordingError::Wait(_) => {
            Failure::new(Status::Failed, "waiting for the program", error, "try again")
        }
    }
}

fn failed(error: &TraceError, args: &RecordArgs) -> Failure {
    match error {
        TraceError::Start(StartError::Program(error)) => not_started(error, args),
        TraceError::Start(StartError::Rights) => {
            let fix = "run as root, or use --by bursts";
            Failure::new(Status::Unsupported, running(args), error, fix)
        }
        TraceError::Start(StartError::Trace(_)) => {
            let fix = "allow ptrace, as with --cap-add=SYS_PTRACE in a container";
            Failure::new(Status::Unsupported, running(args), error, fix)
        }
        TraceError::Wait(_) => Failure::new(Status::Failed, running(args), error, "try again"),
    }
}

fn not_started(error: &io::Error, args: &RecordArgs) -> Failure {
    let (status, fix) = match error.kind() {
        io::ErrorKind::NotFound => (Status::NotFound, "name a program in PATH, or a path"),
        io::ErrorKind::PermissionDenied => (Status::NotStarted, "name an executable file"),
        _ => (Status::NotStarted, "name a program that runs"),
    };
    Failure::new(status, running(args), error, fix)
}

fn process(args: &RecordArgs) -> String {
    format!("process {}", args.pid.unwrap_or(0))
}

fn running(args: &RecordArgs) -> String {
    let name = args.program.first().map(|word| word.to_string_lossy().into_owned());
    format!("running {}", name.unwrap_or_default())
}
