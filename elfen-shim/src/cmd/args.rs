//! The arguments of `elfen shim`, and checks of them before anything is opened, started or stopped.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use elfen_console::duration;
use elfen_console::failure::{Failure, Status};
use elfen_machine::cpulist::CpuSet;

use super::count;
use crate::signal_spec::SignalSpec;

#[derive(clap::Args, Debug)]
#[group(skip)]
pub(super) struct ObserveArgs {
    /// CPUs to observe; a started program runs only on these [default: all but the observer's]
    #[arg(long, value_name = "CPUS")]
    pub(super) cpu: Option<CpuSet>,

    /// Observe all CPUs but the observer's
    #[arg(long, conflicts_with_all = ["cpu", "pid", "program"])]
    pub(super) all: bool,

    /// The observer's lane; each of several lanes gets an observer, and they divide the lanes of
    /// --cpu [default: a lane that shares no core with --cpu]
    #[arg(long, value_name = "CPUS")]
    pub(super) observer_cpu: Option<CpuSet>,

    /// Allow the observer a lane that shares a core with an observed lane
    #[arg(long)]
    pub(super) sibling: bool,

    /// Mean time between two samples, as in 300ns; max for as fast as possible; auto adapts it,
    /// from 1us up, so that observation costs the program 2 %
    #[arg(long, value_name = "TIME", default_value = "auto", value_parser = parse_period)]
    pub(super) period: PeriodChoice,

    /// A signal to watch; may be repeated [default: task, function and tag]
    #[arg(long, value_name = "SIGNAL", value_parser = SignalSpec::parse)]
    pub(super) watch: Vec<SignalSpec>,

    /// The rate of a counter, per time or per another counter: calls, instructions/cycles, or a
    /// SYMBOL; may be repeated
    #[arg(long, value_name = "WORD[/WORD]")]
    pub(super) rate: Vec<String>,

    /// A function that publishes its thread's counts of instructions and cycles at each entry; may
    /// be repeated; the default of --rate is then instructions/cycles
    #[arg(long, value_name = "FUNCTION", requires = "program")]
    pub(super) count_at: Vec<String>,

    /// End after this time
    #[arg(short, long, value_name = "TIME", value_parser = duration::parse)]
    pub(super) duration: Option<Duration>,

    /// Keep only this much of the end
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    pub(super) keep_last: Option<Duration>,

    /// End when a signal exceeds a number, as in 'queue_len > 20'; with --keep-last, the recording
    /// shows what happened before
    #[arg(long, value_name = "SIGNAL > N")]
    pub(super) until: Option<String>,

    /// What to keep: runs of equal samples; each sample by itself; or only total times and
    /// histograms of lengths, for runs of any duration
    #[arg(long, value_name = "WHAT", value_enum, default_value = "runs")]
    pub(super) keep: Keep,

    /// Join equal tags or numbers through gaps of at most this length, as if nothing had changed in
    /// them: timer interrupts of the observer take some microseconds each. Gaps in which provably
    /// nothing changed are joined anyway
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    pub(super) bridge: Option<Duration>,

    /// Memory for the recording
    #[arg(long, value_name = "SIZE", default_value = "64MB", value_parser = parse_size)]
    pub(super) memory: usize,

    /// Write the recording to this file
    #[arg(short, long, value_name = "FILE")]
    pub(super) output: Option<PathBuf>,

    /// Leave every tenth phase of 10 ms unobserved, and report the cost of observation by comparing
    /// the progress
    #[arg(long)]
    pub(super) measure_cost: bool,

    /// The counter of progress for --measure-cost [default: calls]
    #[arg(long, value_name = "SIGNAL", requires = "measure_cost", value_parser = SignalSpec::parse)]
    pub(super) progress: Option<SignalSpec>,

    /// Show what runs, once per second; on a terminal, q ends the run, and the program's output is
    /// printed after it
    #[arg(long, conflicts_with = "json")]
    pub(super) live: bool,

    /// With -p: share the pages of watched numbers during the run, instead of reading them every
    /// 100 us; this stops the process twice for about a millisecond and traces it in between, so
    /// that each signal to it costs two more context switches
    #[arg(long)]
    pub(super) share: bool,

    /// Observe forked children too, until they execute another program
    #[arg(long)]
    pub(super) follow: bool,

    /// Print one JSON object
    #[arg(long)]
    pub(super) json: bool,

    /// A running process
    #[arg(short, long, value_name = "PID", conflicts_with = "program")]
    pub(super) pid: Option<u32>,

    /// The program to start, and its arguments
    #[arg(last = true, value_name = "PROGRAM")]
    pub(super) program: Vec<OsString>,
}

impl ObserveArgs {
    /// The requested rates, or the default.
    pub(super) fn rates(&self) -> Vec<String> {
        match (&self.rate[..], &self.count_at[..]) {
            ([], [_, ..]) => vec!["instructions/cycles".to_owned()],
            (rates, _) => rates.to_vec(),
        }
    }

    /// Returns whether any requested signal or rate needs functions to report that they run.
    pub(super) fn wants_functions(&self) -> bool {
        self.watch.is_empty()
            || !self.count_at.is_empty()
            || self.watch.contains(&SignalSpec::Function)
            || self.rate.iter().any(|rate| rate.split('/').any(|word| word == "calls"))
    }
}

/// Which data of the samples a recording keeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(super) enum Keep {
    Runs,
    Samples,
    Histogram,
}

/// How often to take a sample.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PeriodChoice {
    Auto,
    Max,
    Every(Duration),
}

fn parse_period(text: &str) -> Result<PeriodChoice, String> {
    match text {
        "auto" => Ok(PeriodChoice::Auto),
        "max" => Ok(PeriodChoice::Max),
        text => match duration::parse(text)? {
            Duration::ZERO => Err("the period is 0: use max for as fast as possible".to_owned()),
            every => Ok(PeriodChoice::Every(every)),
        },
    }
}

fn parse_size(text: &str) -> Result<usize, String> {
    let say = || "expected a whole number with KB, MB or GB, as in 256MB".to_owned();
    let unit = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(say)?;
    let (number, unit) = text.split_at(unit);
    let scale: usize = match unit {
        "KB" => 1 << 10,
        "MB" => 1 << 20,
        "GB" => 1 << 30,
        _ => return Err(say()),
    };
    let bytes = number.parse::<usize>().ok().and_then(|number| number.checked_mul(scale));
    bytes.filter(|bytes| (1..=1 << 36).contains(bytes)).ok_or_else(say)
}

/// Refuses combinations of arguments that cannot work.
pub(super) fn check_args(args: &ObserveArgs) -> Result<(), Failure> {
    let wrong = |what: &str, why: &str, fix: &str| Err(Failure::new(Status::Usage, what, why, fix));
    let names_target = args.all || args.cpu.is_some() || args.pid.is_some();
    if !names_target && args.program.is_empty() {
        let why = "nothing to observe";
        let fix = "name a program after --, a process with -p, CPUs with --cpu, or --all";
        return wrong("arguments", why, fix);
    }
    if args.keep == Keep::Histogram && (args.output.is_some() || args.keep_last.is_some()) {
        let why = "it keeps no runs for -o or --keep-last";
        return wrong("--keep histogram", why, "leave out -o and --keep-last, and use --json");
    }
    if args.measure_cost && args.observer_cpu.as_ref().is_some_and(|from| from.len() > 1) {
        let why = "it needs a single observer: another one would observe in the unobserved phases";
        return wrong("--measure-cost", why, "leave it out, or name one lane with --observer-cpu");
    }
    if args.share && args.pid.is_none() {
        let why = "it needs a running process; a started program always shares its globals";
        return wrong("--share", why, "leave it out, or name a process with -p");
    }
    let mut watched = args.watch.iter();
    while let Some(spec) = watched.next() {
        if watched.as_slice().contains(spec) {
            let what = format!("--watch {:?}", spec.to_string());
            return wrong(&what, "it is named twice", "name it once");
        }
    }
    check_counters(args)?;
    check_memory(args.memory)
}

/// Refuses rates of instructions or cycles without `--count-at`, because no function would count
/// them.
fn check_counters(args: &ObserveArgs) -> Result<(), Failure> {
    let counted =
        |rate: &&String| rate.split('/').any(|word| matches!(word, "instructions" | "cycles"));
    let Some(rate) = args.rate.iter().find(counted).filter(|_| args.count_at.is_empty()) else {
        return Ok(());
    };
    let what = format!("--rate {rate:?}");
    Err(match count::missing_counters() {
        Some((why, fix)) => Failure::new(Status::Unsupported, what, why, fix),
        None => {
            let why = "no function publishes the counts of its thread";
            Failure::new(Status::Usage, what, why, "name functions with --count-at")
        }
    })
}

/// Refuses a recording that is larger than the memory that is available.
fn check_memory(bytes: usize) -> Result<(), Failure> {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let available = text.lines().find_map(|line| {
        let line = line.strip_prefix("MemAvailable:")?.trim_end_matches("kB");
        line.trim().parse::<usize>().ok()
    });
    let available = available.map_or(usize::MAX, |kib| kib << 10);
    if bytes <= available {
        return Ok(());
    }
    let why = format!("only {} MB are available", available >> 20);
    let fix = "use less, or keep only sums with --keep histogram";
    Err(Failure::new(Status::Failed, format!("--memory of {} MB", bytes >> 20), why, fix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn periods_and_sizes_are_checked() {
        assert_eq!(
            (parse_period("auto"), parse_period("max")),
            (Ok(PeriodChoice::Auto), Ok(PeriodChoice::Max))
        );
        assert_eq!(parse_period("300ns"), Ok(PeriodChoice::Every(Duration::from_nanos(300))));
        for wrong in ["0", "0us", "-5us", "1ps", "", "fast"] {
            assert!(parse_period(wrong).is_err(), "{wrong:?}");
        }
        assert_eq!((parse_size("256MB"), parse_size("1KB")), (Ok(256 << 20), Ok(1 << 10)));
        for wrong in ["", "0MB", "1", "1TB", "-1MB", "99999999999GB"] {
            assert!(parse_size(wrong).is_err(), "{wrong:?}");
        }
    }
}
