//! `elfen lab bench overlap`: how long a batch runs next to requests, and how fast it is off its
//! lane and back, as two programs see it that know nothing of Elfen.
//!
//! One program is busy and idle in turns, with pauses drawn at random. The other reads the clock all
//! the time. The first notes when its lane was busy, and the second when it was off its own, by the
//! kernel's record of switches. Next to what their notes have in common stands what `elfen run`
//! reports of the same time.

mod notes;

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use elfen_console::duration;
use elfen_console::programs::find_program;
use elfen_host::affinity;
use elfen_host::args::lanes::LaneArgs;
use elfen_host::args::looks::LookArgs;
use elfen_host::args::nap::NapName;
use elfen_host::run::find::{Batch, runs as running};
use elfen_rt::clock::nanos;
use elfen_rt::signal::lane::LaneSlot;

use super::{
    BenchError, Column, Explain, Hear, Part, Report, Row, Scenario, Values, label, lanes, looked,
    metric, number, percent, row, runs,
};
use notes::Stretch;

const EXAMPLE: &str = "\
Examples:
  sudo elfen lab bench overlap --lanes 0:1
  sudo elfen lab bench overlap --lanes 0:1 --nice 19   as under `nice`
  sudo elfen lab bench overlap --lanes 0:1 --stranger  next to another program

What is seen and what is reported agree if they are no further apart than a fifth of what is seen, \
or a tenth of a percent of the busy time.";

/// Measure how long a batch runs next to requests under borrow-idle, and how fast it is off its
/// lane
///
/// Two small programs that know nothing of Elfen note when they had their CPU: one is busy and idle
/// in turns, with pauses drawn at random, and the other, under `elfen run`, reads the clock all the
/// time. For checks in its source, for a guard, and for what a run chooses for a stripped program
/// that works in a loop without a call, once a second of learning is over; next to it stands what
/// the run reports. Needs a C compiler, and root for the task map.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Args {
    #[command(flatten)]
    lanes: LaneArgs,

    /// How batch and guard nap
    #[arg(long, value_enum, default_value = "auto")]
    nap: NapName,

    #[command(flatten)]
    looks: LookArgs,

    /// How long a request keeps its lane busy
    #[arg(long, value_name = "TIMES", value_delimiter = ',', value_parser = duration::parse,
        default_value = "200us,1ms,10ms")]
    turns: Vec<Duration>,

    /// How long turns of one length are played
    #[arg(short, long, value_name = "TIME", default_value = "5s", value_parser = duration::parse)]
    duration: Duration,

    /// Rounds, each with every kind of checks and every length
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = runs())]
    runs: usize,

    /// Start `elfen run` at this niceness
    #[arg(long, value_name = "NICE", default_value_t = 0,
        value_parser = clap::value_parser!(i32).range(0..=19))]
    nice: i32,

    /// Have another program spin on the batch lane, at nice 0
    #[arg(long)]
    stranger: bool,
}

pub(crate) fn run(args: &Args, hear: Hear<'_>) -> Result<Report, BenchError> {
    let looks = args.looks.looks()?;
    let mut options = args.looks.words().to_vec();
    if let Some(nap) = args.nap.name() {
        options.extend(["--nap".to_owned(), nap.to_owned()]);
    }
    let of_inject = |inject| args.turns.iter().map(move |&turn| Case::new(inject, turn));
    let mut overlaps = Overlaps {
        lanes: lanes(&args.lanes)?,
        programs: Programs::build()?,
        args,
        options,
        cases: ["inline", "guard", "auto"].into_iter().flat_map(of_inject).collect(),
    };
    let table = overlaps.table("overlaps", args.runs, hear)?;
    let mut about = looked(looks);
    about.extend(row!["nice" => args.nice, "stranger" => args.stranger]);
    Ok(Report { about, tables: vec![table], ..Report::default() })
}

/// How the batch comes off its lane, beside turns of one length; and what was seen in all rounds.
#[derive(Clone, Debug)]
struct Case {
    /// `inline`: by checks in its source. `auto`: by what `elfen run` chooses for a program as it
    /// is, whose work is a loop without a call.
    inject: &'static str,
    turn: Duration,
    turns: usize,
    busy_ns: u64,
    seen_ns: u64,
    reported_ns: u64,
}

impl Case {
    fn new(inject: &'static str, turn: Duration) -> Self {
        Self { inject, turn, turns: 0, busy_ns: 0, seen_ns: 0, reported_ns: 0 }
    }
}

struct Overlaps<'a> {
    lanes: (u32, u32),
    programs: Programs,
    args: &'a Args,
    /// For `elfen run`: how to nap, how often to look.
    options: Vec<String>,
    cases: Vec<Case>,
}

impl Scenario for Overlaps<'_> {
    const COLUMNS: &'static [Column] = &[
        label("inject", "inject"),
        number("turn_ns", "turn", "us", 0).scaled(1e-3),
        number("turns", "turns", "", 0),
        number("seen_percent", "seen", "%", 3).lower(),
        number("reported_percent", "reported", "%", 3).lower(),
        label("agrees", "agree"),
        metric("stop_ns", "to stop", "us", 2).scaled(1e-3).lower().show(&[Part::Median, Part::P99]),
        metric("resume_ns", "to resume", "us", 2).scaled(1e-3).lower().show(&[Part::Median]),
    ];

    fn cases(&self) -> Vec<Row> {
        let row = |case: &Case| {
            let apart_ns = case.reported_ns.abs_diff(case.seen_ns);
            row![
                "inject" => case.inject,
                "turn_ns" => nanos(case.turn),
                "turns" => case.turns,
                "busy_ns" => case.busy_ns,
                "seen_ns" => case.seen_ns,
                "seen_percent" => super::rounded(percent(case.seen_ns, case.busy_ns)),
                "reported_ns" => case.reported_ns,
                "reported_percent" => super::rounded(percent(case.reported_ns, case.busy_ns)),
                "agrees" => apart_ns <= (case.seen_ns / 5).max(case.busy_ns / 1000),
            ]
        };
        self.cases.iter().map(row).collect()
    }

    fn run(&mut self, case: usize, _: usize, values: &mut Values) -> Result<(), BenchError> {
        let (request, batch) = self.lanes;
        let Case { inject, turn, .. } = self.cases[case];
        let programs = &self.programs;
        let notes = programs.path("pauses");
        let mut run = Run::start(self, inject, &notes)?;
        let stranger = self.args.stranger.then(|| programs.spin(batch)).transpose()?;
        // The first looks of the run, and the lane's first lease.
        thread::sleep(Duration::from_millis(300));
        if inject == "auto" {
            programs.play(request, turn, LEARN)?;
        }
        let before_ns = run.overlapped_ns()?;
        let (turns, others) = programs.play(request, turn, self.args.duration)?;
        // What the guard counts at its next look belongs to these turns.
        thread::sleep(Duration::from_millis(50));
        let reported_ns = run.overlapped_ns()?.saturating_sub(before_ns);
        drop(stranger);
        run.end()?;
        let pauses = notes::joined(notes::read(&notes)?);
        let seen = notes::compare(&turns, &others, &pauses);
        let sum = &mut self.cases[case];
        sum.turns += turns.len();
        sum.busy_ns += seen.busy_ns;
        sum.seen_ns += seen.overlapped_ns;
        sum.reported_ns += reported_ns;
        values.extend("stop_ns", seen.stops_ns);
        values.extend("resume_ns", seen.resumes_ns);
        Ok(())
    }
}

const TRY_RUN: &str = "try `elfen run` with the same options";

/// The programs, built into a folder that goes with this.
#[derive(Debug)]
struct Programs {
    folder: tempfile::TempDir,
}

/// How long what is not counted takes, of a program that is learned about.
const LEARN: Duration = Duration::from_secs(1);

const SOURCES: [(&str, &str); 5] = [
    ("switches.h", include_str!("switches.h")),
    ("request.c", include_str!("request.c")),
    ("batch.c", include_str!("batch.c")),
    ("elfen_abi.h", include_str!("../../../../elfen-rt/include/elfen_abi.h")),
    ("elfen_check.h", include_str!("../../../../elfen-rt/include/elfen_check.h")),
];

impl Programs {
    fn build() -> Result<Self, BenchError> {
        let folder = tempfile::tempdir()?;
        for (name, text) in SOURCES {
            fs::write(folder.path().join(name), text)?;
        }
        let programs = Self { folder };
        programs.compile("request.c", "request", &[])?;
        programs.compile("batch.c", "guard", &[])?;
        // elfen_check.h finds its slow path in the library that `elfen run` preloads.
        programs.compile("batch.c", "inline", &["-DCHECKS"])?;
        // Nothing says what is where in it. Not everybody has the libraries for a static one.
        let compiled = programs.compile("batch.c", "auto", &["-DLOOP", "-s", "-static"]);
        compiled.or_else(|_| programs.compile("batch.c", "auto", &["-DLOOP", "-s"]))?;
        Ok(programs)
    }

    fn compile(&self, source: &'static str, to: &str, flags: &[&str]) -> Result<(), BenchError> {
        let mut command = Command::new("cc");
        command.args(["-O2", "-o", to]).args(flags).arg(source).current_dir(self.folder.path());
        let refuses = |why: &dyn std::fmt::Display| {
            let why = format!("the C compiler, cc, on {source}: {why}");
            BenchError::unsupported(why, "install a C compiler (`cc`)")
        };
        let status = command.status().map_err(|error| refuses(&error))?;
        if status.success() { Ok(()) } else { Err(refuses(&status)) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The turns of the requests' program, and when the lane was busy with others.
    fn play(
        &self,
        request: u32,
        turn: Duration,
        lasting: Duration,
    ) -> Result<(Vec<Stretch>, Vec<Stretch>), BenchError> {
        let file = self.path("turns");
        let mut command = Command::new(self.path("request"));
        let arguments = [turn, lasting].map(|time| time.as_nanos().to_string());
        command.args(arguments).arg("7").stdout(File::create(&file)?);
        let mut player = Killed(on(command, request)?);
        let ended = player.0.wait()?;
        if !ended.success() {
            let why = format!(
                "the program of the requests: {ended}; 3 if the kernel notes no switches for it"
            );
            return Err(BenchError::unsupported(why, "let it ask perf_event_open(2): be root"));
        }
        let mut turns = notes::read(&file)?;
        let own = turns.iter().position(|turn| *turn == (0, 0)).unwrap_or(turns.len());
        let others = turns.split_off(own);
        Ok((turns, others.into_iter().skip(1).collect()))
    }

    /// A stranger: the batch program without a run of its own.
    fn spin(&self, cpu: u32) -> Result<Killed, BenchError> {
        let mut command = Command::new(self.path("guard"));
        command.arg(self.path("strangers-pauses")).stdout(Stdio::null());
        Ok(Killed(on(command, cpu)?))
    }
}

/// Starts a program on one CPU.
fn on(mut command: Command, cpu: u32) -> io::Result<Child> {
    // SAFETY: `pin` makes a system call on memory that it has on its stack or that the fork has
    // copied.
    unsafe { command.pre_exec(move || affinity::pin(cpu)) };
    command.spawn()
}

/// A child that does not outlive what it was started for.
#[derive(Debug)]
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _reaped = self.0.wait();
    }
}

/// An `elfen run` with the batch program.
struct Run {
    front: Killed,
    batch: Batch,
}

/// How long a batch may take to end: it writes down what it noted, on a lane that others may want.
const PATIENCE: Duration = Duration::from_secs(60);

/// Whatever fails, no batch goes on without us: the keeper outlives a front that is killed.
impl Drop for Run {
    fn drop(&mut self) {
        if matches!(self.front.0.try_wait(), Ok(None)) {
            // SAFETY: takes numbers; while the front is not reaped, this is its batch.
            unsafe { libc::kill(self.batch.pid.cast_signed(), libc::SIGKILL) };
        }
    }
}

impl Run {
    fn start(overlaps: &Overlaps<'_>, inject: &str, notes: &Path) -> Result<Self, BenchError> {
        let (request, batch) = overlaps.lanes;
        let mut command = Command::new(find_program("elfen")?);
        // Its files are of who runs the benchmark.
        command.env_remove("SUDO_UID");
        command.args(["run", "--lanes", &format!("{request}:{batch}"), "--signal", "tasks"]);
        command.args(["--inject", inject]).args(&overlaps.options).arg("--");
        command.arg(overlaps.programs.path(inject)).arg(notes);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let nice = overlaps.args.nice;
        // SAFETY: takes numbers.
        let step_back = move || match unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        };
        // SAFETY: between fork and exec, `step_back` makes one system call and reads errno.
        unsafe { command.pre_exec(step_back) };
        let mut front = Killed(command.spawn()?);
        let mut line = String::new();
        let output = front.0.stdout.take().map(BufReader::new);
        output.map(|mut output| output.read_line(&mut line));
        if line != "ready\n" {
            let said = front.0.stderr.take().map(io::read_to_string).transpose();
            let said = said.ok().flatten().unwrap_or_default();
            let said = said.lines().last().unwrap_or("it ended");
            let why = format!("`elfen run` did not start the batch: {said}");
            return Err(BenchError::failed(why, TRY_RUN));
        }
        let ours = |found: &Batch| {
            let lanes = found.lanes.slot(0).map(|slot| slot.batch_cpu.load(Relaxed));
            lanes == Some(u64::from(batch)) && parent_is(found, front.0.id())
        };
        let found = running().explain("looking for the run", TRY_RUN)?;
        let batch = found.into_iter().find(ours).ok_or_else(no_account)?;
        Ok(Self { front, batch })
    }

    fn overlapped_ns(&self) -> Result<u64, BenchError> {
        let slot = self.batch.lanes.slot(0).filter(|slot: &&LaneSlot| slot.is_counted());
        slot.map(|slot| slot.overlapped_ns.load(Relaxed)).ok_or_else(no_account)
    }

    fn end(&mut self) -> Result<(), BenchError> {
        // SAFETY: takes numbers; the front is our child, and not reaped yet.
        unsafe { libc::kill(self.front.0.id().cast_signed(), libc::SIGTERM) };
        let start = Instant::now();
        while self.front.0.try_wait()?.is_none() {
            if start.elapsed() > PATIENCE {
                return Err(BenchError::failed("`elfen run` does not end", TRY_RUN));
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

fn no_account() -> BenchError {
    let why = "the batch is not listed, or the kernel keeps no account of it";
    BenchError::unsupported(why, "the kernel's account takes eBPF: be root")
}

/// Whether a run's keeper is this front's child.
fn parent_is(batch: &Batch, front: u32) -> bool {
    let keeper = batch.keeper.pid().unsigned_abs();
    elfen_host::process::stat(keeper).is_some_and(|stat| stat.parent == front)
}
