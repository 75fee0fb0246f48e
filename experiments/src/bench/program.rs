//! Programs that a benchmark measures.
//!
//! This file builds C sources, and runs a program alone on a lane or under `elfen run`. It also
//! compares the output and the exit status of two runs.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::thread;
use std::time::Duration;

use elfen_console::duration;
use elfen_console::programs::find_program;
use elfen_machine::lane_args::LaneArgs;
use elfen_rt::clock::nanos;
use elfen_run::args::nap::NapName;
use elfen_run::args::poll_timing::PollTimingArgs;
use elfen_run::report::RunReport;
use tempfile::TempDir;

use super::{BenchError, Case, case, row};
use crate::live::batches::read_report;
use crate::live::os::{self, ChildSetup, Rank};
use crate::live::process::Process;
use crate::live::usage::Descendants;
use crate::live::{LiveError, check_interrupted};

/// This process may wake up on the request lane, where a wake-up is a moment of overlap. So it
/// polls rarely.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long `elfen run` may take to write its report after its batch was killed.
const TO_REPORT: Duration = Duration::from_secs(2);
/// More output than this would fill a disk that other programs use as well.
const OUTPUT_MAX: u64 = 1 << 30;

const ELFEN_RUN: &str = "elfen run";
/// The prefix of the lines that `elfen run` itself prints.
const ELFEN_SAYS: &str = "elfen: ";

/// How a program runs next to requests. Shared by the benchmarks that play requests.
#[derive(clap::Args, Debug)]
pub(crate) struct NextToArgs {
    #[command(flatten)]
    pub(super) lanes: LaneArgs,

    /// How long a request keeps its lane busy, from 50us to 1s
    #[arg(long, value_name = "TIMES", value_delimiter = ',', value_parser = turn,
        default_value = "200us,1ms,10ms")]
    pub(super) turns: Vec<Duration>,

    /// How long turns of each length are measured, from 1s to 60s
    #[arg(short, long, value_name = "TIME", value_parser = counted, default_value = "5s")]
    pub(super) duration: Duration,

    /// How the batch and the guard nap
    #[arg(long, value_enum, default_value = "auto", env = "ELFEN_NAP")]
    nap: NapName,

    #[command(flatten)]
    pub(super) poll_timing: PollTimingArgs,
}

impl NextToArgs {
    /// Returns the equivalent options of `elfen run`.
    pub(super) fn options(&self) -> Vec<String> {
        let mut options = self.poll_timing.words().to_vec();
        if let Some(nap) = self.nap.name() {
            options.extend(["--nap".to_owned(), nap.to_owned()]);
        }
        options
    }

    /// Combines each kind of checks with each length of a turn. Returns the combinations and their
    /// cases.
    pub(super) fn cases<'a>(
        &self,
        checks: impl IntoIterator<Item = &'a str>,
    ) -> (Vec<(&'a str, Duration)>, Vec<Case>) {
        let of_method = |checks| self.turns.iter().map(move |&turn| (checks, turn));
        let kinds: Vec<_> = checks.into_iter().flat_map(of_method).collect();
        let labels = |(checks, turn): &(&str, Duration)| {
            case(row!["checks" => checks, "turn_ns" => nanos(*turn)])
        };
        let cases = kinds.iter().map(labels).collect();
        (kinds, cases)
    }
}

fn within(text: &str, least: Duration, most: Duration, else_say: &str) -> Result<Duration, String> {
    let time = duration::parse(text)?;
    if (least..=most).contains(&time) { Ok(time) } else { Err(else_say.to_owned()) }
}

fn turn(text: &str) -> Result<Duration, String> {
    let (least, most) = (Duration::from_micros(50), Duration::from_secs(1));
    within(text, least, most, "a turn must last from 50us to 1s")
}

fn counted(text: &str) -> Result<Duration, String> {
    let (least, most) = (Duration::from_secs(1), Duration::from_secs(60));
    within(text, least, most, "the duration must be from 1s to 60s")
}

/// C sources in a temporary folder, and the programs that are built from them. Dropping this
/// removes the folder.
pub(super) struct Sources(TempDir);

/// `Err` is the compiler's message about a source that it cannot compile.
pub(super) type Compiled = Result<(), String>;

impl Sources {
    pub(super) fn new(files: &[(&str, &str)]) -> io::Result<Self> {
        let folder = tempfile::tempdir()?;
        for (name, content) in files.iter().chain(&HEADERS) {
            fs::write(folder.path().join(name), content)?;
        }
        Ok(Self(folder))
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(super) fn compile<S: AsRef<OsStr>>(&self, words: &[S]) -> Result<Compiled, BenchError> {
        let mut command = Command::new("cc");
        // Functions and loops are aligned, so that the result does not depend on where the compiler
        // placed a loop.
        command.args(["-O2", "-falign-functions=64", "-falign-loops=32", "-I."]);
        let output = command.args(words).current_dir(self.0.path()).output().map_err(|error| {
            let why = format!("the C compiler `cc` cannot be started: {error}");
            BenchError::unsupported(why, "install a C compiler, such as gcc")
        })?;
        if output.status.success() {
            return Ok(Ok(()));
        }
        let message = String::from_utf8_lossy(&output.stderr);
        let first = message.lines().find(|line| line.contains("error")).or(message.lines().next());
        Ok(Err(format!("cc: {}", first.unwrap_or("it printed no message"))))
    }
}

const HEADERS: [(&str, &str); 2] = [
    ("elfen_abi.h", include_str!("../../../elfen-rt/include/elfen_abi.h")),
    ("elfen_check.h", include_str!("../../../elfen-rt/include/elfen_check.h")),
];

/// How a program is started.
#[derive(Clone, Debug)]
pub(super) struct Starts<'a> {
    pub(super) lanes: (u32, u32),
    /// More options for `elfen run`.
    pub(super) options: &'a [String],
    pub(super) folder: &'a Path,
    /// Whether the output of the program is kept.
    pub(super) keeps_output: bool,
}

#[derive(Debug)]
pub(super) struct Running {
    process: Process,
    output: Option<PathBuf>,
    /// The file of the report, if the process is an `elfen run`.
    report: Option<PathBuf>,
    /// Whether `stop` sent SIGTERM to the process.
    stopped: bool,
}

impl Starts<'_> {
    /// Starts a program on a CPU, without `elfen run`. The first word is the program.
    pub(super) fn alone(
        &self,
        cpu: u32,
        words: &[OsString],
        output: &str,
    ) -> Result<Running, LiveError> {
        let program = words.first().map_or_else(|| OsStr::new(""), OsString::as_os_str);
        let mut command = Command::new(program);
        command.args(words.iter().skip(1));
        let place = ChildSetup::on(cpu, Rank::Normal);
        self.start(&program.to_string_lossy(), command, &place, output, None)
    }

    pub(super) fn under(&self, checks: &str, words: &[OsString]) -> Result<Running, LiveError> {
        let report = self.folder.join("report.json");
        let mut command = self.elfen_run(checks)?;
        command.arg("--json-out").arg(&report).arg("--").args(words);
        // `elfen run` forwards SIGTERM to its batch. If it were killed, its batch would survive.
        let anywhere = ChildSetup::anywhere(Rank::Nice(0));
        let place = ChildSetup { death_signal: libc::SIGTERM, ..anywhere };
        self.start(ELFEN_RUN, command, &place, "output", Some(report))
    }

    /// Fails with the message of `elfen run` if `elfen run` would refuse the program.
    pub(super) fn check(&self, checks: &str, words: &[OsString]) -> Result<(), LiveError> {
        let mut command = self.elfen_run(checks)?;
        command.args(["--dry-run", "--"]).args(words);
        let place = ChildSetup::anywhere(Rank::Normal);
        let mut running = self.start(ELFEN_RUN, command, &place, "output", None)?;
        let status = running.wait_until(|| false)?;
        match status {
            Some(status) if !status.success() => Err(running.refusal(status)),
            _ => Ok(()),
        }
    }

    fn elfen_run(&self, checks: &str) -> Result<Command, LiveError> {
        let (request, batch) = self.lanes;
        let mut command = Command::new(find_program("elfen")?);
        command.args(["run", "--policy", "borrow-idle", "--source", "tasks", "--checks", checks]);
        command.args(["--lanes", &format!("{request}:{batch}")]).args(self.options);
        Ok(command)
    }

    fn start(
        &self,
        name: &str,
        command: Command,
        place: &ChildSetup,
        output: &str,
        report: Option<PathBuf>,
    ) -> Result<Running, LiveError> {
        if let Some(report) = &report {
            // Removes the previous report, so that a file that exists after the run belongs to this
            // run.
            fs::remove_file(report).ok();
        }
        let output = self.keeps_output.then(|| self.folder.join(output));
        let out = output.clone().unwrap_or_else(|| PathBuf::from("/dev/null"));
        let files = [out, self.folder.join("errors")];
        let process = Process::spawn(name, command, place, files)?;
        Ok(Running { process, output, report, stopped: false })
    }
}

impl Running {
    pub(super) fn id(&self) -> i32 {
        self.process.id().cast_signed()
    }

    /// Waits for the process, and returns its exit status. Returns `None` if `enough` returns true
    /// first.
    pub(super) fn wait_until(
        &mut self,
        mut enough: impl FnMut() -> bool,
    ) -> Result<Option<ExitStatus>, LiveError> {
        loop {
            if let Some(status) = self.process.try_wait()? {
                return Ok(Some(status));
            }
            check_interrupted()?;
            self.refuse_much_output()?;
            self.process.truncate_stderr()?;
            if enough() {
                return Ok(None);
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    fn refuse_much_output(&self) -> Result<(), LiveError> {
        let Some(output) = &self.output else { return Ok(()) };
        let length = fs::metadata(output).map_or(0, |data| data.len());
        if length <= OUTPUT_MAX {
            return Ok(());
        }
        Err(LiveError::Refused {
            why: "the program prints more than 1 GiB, which is too much to keep for the comparison"
                .to_owned(),
            fix: "redirect its output (`sh -c 'PROGRAM > FILE'`), or use --runs 0",
        })
    }

    /// Ends the process and its descendants, within about this time.
    pub(super) fn stop(&mut self, patience: Duration) {
        self.stopped = true;
        let pid = self.process.id();
        let family = Descendants::of(pid);
        os::send(pid, libc::SIGTERM);
        self.process.wait(patience);
        // Some processes ignore SIGTERM, and a shell that obeyed it may leave children. They would
        // run next to the next measurement. A waiting `elfen run` still has to write its report.
        family.kill();
        self.process.wait(TO_REPORT);
    }

    /// The report of an `elfen run` that has ended. Without a report, `elfen run` either did not
    /// start the program, which is an error, or was stopped too early, which is not.
    pub(super) fn report(&mut self) -> Result<Option<RunReport>, LiveError> {
        let Some(file) = &self.report else { return Ok(None) };
        let written = fs::metadata(file).is_ok_and(|data| data.len() > 0);
        match self.process.try_wait()? {
            Some(status) if !written && self.stopped && status.signal().is_some() => Ok(None),
            Some(status) if !written => Err(self.refusal(status)),
            _ => read_report(file).map(Some),
        }
    }

    /// The error of an `elfen run`. Its message may come before other output, such as a full-screen
    /// view.
    pub(super) fn refusal(&self, status: ExitStatus) -> LiveError {
        let message = self.process.stderr_text();
        let line = message.lines().rev().find_map(|line| line.strip_prefix(ELFEN_SAYS));
        let message = line.unwrap_or("it printed no message").to_owned();
        LiveError::Failed { name: ELFEN_RUN.to_owned(), status, message }
    }

    /// The result of a process that ended by itself, or `None` if its output was not kept.
    pub(super) fn ended(&self, status: ExitStatus) -> Option<Ended> {
        Some(Ended { status: as_shell(status), output: self.output.clone()? })
    }
}

fn as_shell(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}

/// The result of one run of the program.
#[derive(Clone, Debug)]
pub(super) struct Ended {
    /// The exit status, as a shell prints it.
    pub(super) status: u8,
    /// The file with its output.
    pub(super) output: PathBuf,
}

impl Ended {
    /// Returns how another run differs, or `None` if it does not.
    pub(super) fn unlike(&self, other: &Self) -> io::Result<Option<String>> {
        if self.status != other.status {
            let (this, that) = (self.status, other.status);
            return Ok(Some(format!("exit status {that} instead of {this}")));
        }
        let at = first_difference(&self.output, &other.output)?;
        Ok(at.map(|at| format!("its output differs at byte {at}")))
    }
}

/// Counts bytes from 1, as `cmp` does.
fn first_difference(one: &Path, other: &Path) -> io::Result<Option<u64>> {
    let [mut one, mut other] =
        [File::open(one)?, File::open(other)?].map(|file| BufReader::new(file).bytes());
    let mut at = 1;
    loop {
        match (one.next().transpose()?, other.next().transpose()?) {
            (None, None) => return Ok(None),
            (byte, same) if byte == same => at += 1,
            _ => return Ok(Some(at)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::process::STOP_TIMEOUT;
    use elfen_machine::process::below;
    use std::time::Instant;

    fn started(folder: &Path, script: &str) -> Running {
        let starts = Starts { lanes: (0, 1), options: &[], folder, keeps_output: false };
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let place = ChildSetup::anywhere(Rank::Normal);
        let report = starts.folder.join("report.json");
        starts.start(ELFEN_RUN, command, &place, "output", Some(report)).unwrap()
    }

    /// Goal: the children of a stopped program end with it, so that they disturb no other
    /// measurement. Method: a shell whose child outlives it.
    #[test]
    fn what_a_stopped_program_leaves_behind_ends() {
        let folder = tempfile::tempdir().unwrap();
        let mut shell = started(folder.path(), "sleep 600 & wait");
        let pid = shell.process.id();
        shell.wait_until(|| !below(pid).is_empty()).unwrap();
        let left = below(pid);
        shell.stop(STOP_TIMEOUT);
        let lives = |pid: &u32| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
            stat.is_ok_and(|stat| stat.contains("(sleep)") && !stat.contains(") Z"))
        };
        let begin = Instant::now();
        while left.iter().any(lives) {
            assert!(begin.elapsed() < Duration::from_secs(60), "{left:?} live on");
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Goal: a run that is stopped before it has begun has no report, and that is not an error. If
    /// it is killed by another process, that is an error. Method: shells that write no report.
    #[test]
    fn a_run_that_is_stopped_early_is_no_failure() {
        let folder = tempfile::tempdir().unwrap();
        let mut stopped = started(folder.path(), "exec sleep 60");
        stopped.stop(STOP_TIMEOUT);
        assert!(stopped.report().unwrap().is_none());
        let mut killed = started(folder.path(), "kill -TERM $$");
        killed.wait_until(|| false).unwrap();
        assert!(matches!(killed.report(), Err(LiveError::Failed { .. })));
    }

    /// Goal: a difference is found wherever it is, and equal outputs are equal. Method: outputs of
    /// several lengths, with a byte changed, added or removed.
    #[test]
    fn differences_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let ended = |name: &str, bytes: &[u8], status| {
            let output = folder.path().join(name);
            fs::write(&output, bytes).unwrap();
            Ended { status, output }
        };
        for length in [0, 1, 8191, 8192, 8193] {
            let bytes = vec![7; length];
            let one = ended("one", &bytes, 0);
            assert_eq!(one.unlike(&ended("same", &bytes, 0)).unwrap(), None, "{length}");
            let longer = one.unlike(&ended("longer", &[&bytes[..], &[7]].concat(), 0)).unwrap();
            let from = format!("its output differs at byte {}", length + 1);
            assert_eq!(longer.as_deref(), Some(&*from));
            let Some(last) = length.checked_sub(1) else { continue };
            assert!(one.unlike(&ended("shorter", &bytes[..last], 0)).unwrap().is_some());
            let mut changed = bytes.clone();
            changed[last] = 8;
            let found = one.unlike(&ended("changed", &changed, 0)).unwrap();
            assert_eq!(found, Some(format!("its output differs at byte {length}")));
        }
        let other = ended("a", b"", 0).unlike(&ended("b", b"", 137)).unwrap();
        assert_eq!(other.as_deref(), Some("exit status 137 instead of 0"));
    }

    #[test]
    fn times_are_neither_shorter_nor_longer_than_can_be_played() {
        for fits in ["50us", "1ms", "1s"] {
            assert!(turn(fits).is_ok(), "{fits}");
        }
        for wrong in ["49us", "0ms", "1001ms", "1", "", "long"] {
            assert!(turn(wrong).is_err(), "{wrong}");
        }
        assert!(counted("1s").is_ok() && counted("60s").is_ok());
        assert!(counted("999ms").is_err() && counted("61s").is_err());
    }
}
