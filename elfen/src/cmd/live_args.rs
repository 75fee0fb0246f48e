//! What `demo`, `experiment` and `calibrate` share: the machine as they see it, how they fail, what they show meanwhile,
//! and their table.

use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use experiments::live::experiment::Progress;
use experiments::live::plan::name_of;
use experiments::live::summary::{Figure, Row};
use experiments::live::{LiveError, Machine, Pair};
use experiments::record::Line;
use experiments::report::live;
use nix::unistd::{AccessFlags, access};

use super::failure::{Failure, Status};
use super::lane_args::{self, LaneArgs};
use super::{table, warn};
use crate::host::lanes;
use crate::host::run::channels::Wanted;
use crate::host::source::Source;
use crate::host::topology::Topology;

/// The pairs given by hand, all of them; or the machine's first; or two CPUs, where it has no pair.
pub(crate) fn machine(args: &LaneArgs, what: &str) -> Result<Machine, Failure> {
    let topology = lane_args::topology(&Source::live())?;
    let chosen = if args.by_hand() {
        let lanes = args.resolve(&topology)?;
        lanes.warnings.iter().for_each(|warning| warn(warning));
        lanes.pairs
    } else {
        let first = lanes::first_pair(&topology).ok_or_else(|| one_cpu(&topology, what))?;
        vec![first]
    };
    let shares = |pair: &crate::host::pair::Pair| {
        let core = topology.core_of(pair.request);
        core.is_some_and(|core| pair.batch.is_subset(&core.lanes))
    };
    let smt = chosen.iter().all(shares);
    if !smt && !args.by_hand() {
        let pair = &chosen[0];
        warn(&format!("no pair of lanes here: CPUs {pair} are taken, which are not hyperthreads"));
    }
    let in_a_pair = |cpu: &u32| chosen.iter().any(|pair| pair.lanes().any(|lane| lane == *cpu));
    let spare = topology.usable.iter().filter(|cpu| !in_a_pair(cpu)).collect();
    let pair = |pair: &crate::host::pair::Pair| Pair {
        request: pair.request,
        batch: pair.batch.iter().collect(),
    };
    let cpus = u32::try_from(topology.online.len()).unwrap_or(u32::MAX);
    Ok(Machine { pairs: chosen.iter().map(pair).collect(), spare, smt, cpus })
}

fn one_cpu(topology: &Topology, what: &str) -> Failure {
    let why = format!(
        "a service and a batch beside it take two CPUs, and this process may use CPU {} alone",
        topology.usable
    );
    let fix = "give it a second one; `elfen simulate --rps 100 --policy borrow-idle` needs none";
    Failure::new(Status::Unsupported, what, why, fix)
}

/// In the words of every other failure.
pub(crate) fn failure(what: &str, error: &LiveError) -> Failure {
    let fix = match error {
        LiveError::NotFound { .. } => {
            "build all of Elfen (`cargo build --release`), or name its folder in ELFEN_LIB"
        }
        LiveError::Io { error, .. } => match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                "make room, or name another folder in TMPDIR"
            }
            io::ErrorKind::PermissionDenied => "use files and folders that this user may write",
            _ => "see what the system says of it, and try again",
        },
        LiveError::Failed { status, .. } if is_unsupported(*status) => {
            let fix = "see `elfen doctor`, or leave out what asks for it";
            return Failure::new(Status::Unsupported, what, error, fix);
        }
        LiveError::Failed { .. } | LiveError::Stuck { .. } | LiveError::NotReady { .. } => {
            "see what it says, and whether the machine is busy with other things; then try again"
        }
        LiveError::Garbled { .. } => "use programs of the same version as this command",
        LiveError::Refused(_) => "change what is asked for",
        LiveError::Locked => "wait for it, or name another file",
        LiveError::Interrupted(_) => "nothing is left behind",
    };
    Failure::new(Status::Failed, what, error, fix)
}

/// Programs of ours say so by their status.
fn is_unsupported(status: ExitStatus) -> bool {
    status.code() == Some(Status::Unsupported as i32)
}

/// One line on a terminal's stderr, written over; nothing elsewhere.
#[derive(Debug)]
pub(crate) struct Meter {
    shown: bool,
    all: usize,
    missing: usize,
    begin: Instant,
}

impl Meter {
    pub(crate) fn new() -> Self {
        let shown = io::stderr().is_terminal();
        Self { shown, all: 0, missing: 0, begin: Instant::now() }
    }

    pub(crate) fn hear(&mut self, progress: &Progress<'_>) {
        match progress {
            Progress::Preparing(what) => self.show(what),
            Progress::Begin { missing, all } => {
                (self.all, self.missing, self.begin) = (*all, *missing, Instant::now());
            }
            Progress::Made { run, left } => {
                let made = self.all - left;
                let (company, load) = (name_of(run.company), run.load * 100.0);
                let p99 = run.p99_ms;
                let rest = self.time_left(self.missing - left, *left);
                self.show(&format!(
                    "{made}/{}: {company} at {load:.0} %: p99 {p99:.2} ms; {rest}",
                    self.all
                ));
            }
        }
    }

    /// Steps of equal length.
    pub(crate) fn step(&mut self, done: usize, all: usize) {
        let rest = self.time_left(done, all - done);
        self.show(&format!("{done}/{all}; {rest}"));
    }

    fn time_left(&self, made: usize, left: usize) -> String {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let each = self.begin.elapsed() / count(made).max(1);
        show_time(each.saturating_mul(count(left))) + " left"
    }

    fn show(&self, text: &str) {
        if self.shown {
            // With stderr closed there is nobody to tell.
            write!(io::stderr(), "\r\x1b[K{text}").ok();
        }
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.show("");
    }
}

fn show_time(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..=99 => format!("{seconds} s"),
        100..=5999 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        _ => format!("{} h {:02} min", seconds / 3600, seconds / 60 % 60),
    }
}

/// As `elfen run --signal` takes it.
pub(crate) fn signal_word(signal: Wanted) -> String {
    signal.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Refuses a file that could not be written after minutes of measuring.
pub(crate) fn writable(path: &Path) -> Result<(), Failure> {
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let existing = path.exists();
    let flags = if existing { AccessFlags::W_OK } else { AccessFlags::W_OK | AccessFlags::X_OK };
    let asked = if existing { path } else { folder };
    let refused = |why: String| {
        let what = format!("file {:?}", path.display().to_string());
        Failure::new(Status::Failed, what, why, "name a file that can be written")
    };
    if path.is_dir() {
        return Err(refused("it is a folder".to_owned()));
    }
    access(asked, flags).map_err(|errno| refused(errno.desc().to_owned()))
}

/// Renders the report of these lines.
pub(crate) fn write_report(path: &Path, title: &str, lines: &[Line]) -> Result<(), Failure> {
    let what = || format!("report {:?}", path.display().to_string());
    let unusable =
        |error: String| Failure::new(Status::Failed, what(), error, "see the results themselves");
    let mut report = live::report(lines).map_err(|error| unusable(error.to_string()))?;
    report.title = title.to_owned();
    let mut html = Vec::new();
    report.render(&mut html).map_err(|error| unusable(error.to_string()))?;
    fs::write(path, html).map_err(|error| {
        Failure::new(Status::Failed, what(), error, "name a file that can be written")
    })
}

/// The command line as it was given, for the results.
pub(crate) fn command_line() -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=:,./%+".contains(c);
    let word = |word: String| match word.chars().all(plain) && !word.is_empty() {
        true => word,
        false => format!("'{}'", word.replace('\'', "'\\''")),
    };
    let words = std::env::args_os().skip(1).map(|arg| word(arg.to_string_lossy().into_owned()));
    std::iter::once("elfen".to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}

const HEADING: [&str; 11] = [
    "load",
    "company",
    "batch",
    "p50 ms",
    "p99 ms",
    "p99 to none",
    "batch work",
    "request lane",
    "batch lane",
    "overlap",
    "reaction",
];

/// The rows as columns for people.
pub(crate) fn rows_text(rows: &[Row]) -> String {
    let cells: Vec<Vec<String>> = rows.iter().map(cells).collect();
    table::lines(&HEADING, &cells)
}

fn cells(row: &Row) -> Vec<String> {
    let dash = || "-".to_owned();
    let ratio = |figure: &Figure| match figure.ci95 {
        Some([low, high]) => format!("{:.3} [{low:.3}, {high:.3}]", figure.median),
        None => format!("{:.3}", figure.median),
    };
    let percent = |figure: &Figure| format!("{:.1} %", figure.median * 100.0);
    let work = |row: &Row| match (&row.batch_relative, row.batch_verified) {
        (Some(relative), Some(false)) => format!("{} WRONG", percent(relative)),
        (Some(relative), _) => percent(relative),
        (None, _) => dash(),
    };
    let has_batch = row.batch.is_some();
    vec![
        format!("{:.0} %", row.load * 100.0),
        row.asked.clone(),
        row.batch.clone().unwrap_or_else(dash),
        format!("{:.3}", row.p50_ms.median),
        format!("{:.3}", row.p99_ms.median),
        row.p99_ratio.as_ref().map_or_else(dash, ratio),
        work(row),
        percent(&row.request_lane_utilisation),
        if has_batch { percent(&row.batch_lane_utilisation) } else { dash() },
        row.overlapped
            .as_ref()
            .map_or_else(dash, |overlap| format!("{:.2} %", overlap.median * 100.0)),
        row.reaction_us.as_ref().map_or_else(dash, |us| format!("{:.1} us", us.median)),
    ]
}

/// What has to be known of these rows, a sentence each.
pub(crate) fn remarks(lines: &[Line], rows: &[Row]) -> Vec<String> {
    let mut remarks = Vec::new();
    let mechanisms: Vec<&str> = rows.iter().filter_map(|row| row.mechanisms.as_deref()).collect();
    for mechanism in &mechanisms {
        let remark = format!("ran with: {mechanism}");
        if !remarks.contains(&remark) {
            remarks.push(remark);
        }
    }
    if mechanisms.iter().any(|mechanism| mechanism.contains("service alone")) {
        remarks.push(
            "not shown: the overlap, and what others do on the request lane; that takes the task \
             map (root, or `elfen signals up` by root), while the service's page says no more than \
             when its requests run"
                .to_owned(),
        );
    }
    let limits = lines.iter().filter_map(|line| match line {
        Line::Setup(setup) => Some(&setup.limits),
        Line::Run(_) => None,
    });
    remarks.extend(limits.flatten().cloned());
    let starved = |line: &&Line| match line {
        Line::Run(run) => run.batch.is_some() && run.batch_per_second.is_none(),
        Line::Setup(_) => false,
    };
    let starved = lines.iter().filter(starved).count();
    if starved > 0 {
        remarks.push(format!(
            "in {starved} runs the batch got so little that it could not even end: others kept the \
             request lane busy, and it naps for them as well; with --signal service it naps for the \
             service alone"
        ));
    }
    remarks.extend(rows.iter().filter(|row| row.errors > 0).map(|row| {
        let Row { errors, requests, asked, load, .. } = row;
        let percent = load * 100.0;
        format!("{errors} of {requests} requests failed beside {asked} at {percent:.0} %: they count as 10 s")
    }));
    if rows.iter().any(|row| row.batch_verified == Some(false)) {
        remarks.push("a batch found a result wrong, or not the one that it has alone".to_owned());
    }
    remarks
}

/// Whether every batch found its results right.
pub(crate) fn all_right(rows: &[Row]) -> bool {
    rows.iter().all(|row| row.batch_verified != Some(false))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_left_are_short() {
        let shown = [7, 99, 100, 4000, 7260].map(|s| show_time(Duration::from_secs(s)));
        assert_eq!(shown, ["7 s", "99 s", "1 min 40 s", "66 min 40 s", "2 h 01 min"]);
    }

    /// Goal: minutes of measuring are not lost to a wrong name. Method: a folder, a folder that does not exist, one where
    /// a file could be made.
    #[test]
    fn files_that_cannot_be_written_are_refused_at_once() {
        assert!(writable(Path::new("/")).is_err());
        assert!(writable(Path::new("/no/such/folder/x.html")).is_err());
        assert!(writable(&std::env::temp_dir().join("not-there.html")).is_ok());
        assert!(writable(Path::new("not-there.html")).is_ok());
    }
}
