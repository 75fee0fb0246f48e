//! How long a batch runs next to requests, and how fast it is off its lane and back, as two
//! programs see it that know nothing of Elfen: one is busy and idle in turns, with pauses drawn at
//! random; the other reads the clock all the time. The first notes when its lane was busy, and the
//! second when it was off its own, by the kernel's record of switches. Beside what they have in
//! common stands what `elfen run` reports of the same time.

mod notes;

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use elfen_console::programs::{ProgramError, find_program};
use elfen_machine::affinity;
use elfen_rt::signal::lane::LaneSlot;
use elfen_run::batches::{Batch, runs};

pub(crate) use notes::{Seen, Stretch};

/// How the batch comes off its lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Inject {
    Guard,
    /// Checks in its source.
    Inline,
    /// What `elfen run` chooses for a program as it is, whose work is a loop without a call, and
    /// that has learned for a second.
    Auto,
}

impl Inject {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Guard => "guard",
            Self::Inline => "inline",
            Self::Auto => "auto",
        }
    }
}

/// One measurement.
#[derive(Clone, Debug)]
pub(crate) struct Case<'a> {
    pub(crate) inject: Inject,
    pub(crate) turn: Duration,
    pub(crate) seconds: u64,
    /// The niceness that `elfen run` was started with.
    pub(crate) nice: i32,
    /// Another program spins on the batch lane, at nice 0.
    pub(crate) stranger: bool,
    /// For `elfen run`: how to nap, how often to look.
    pub(crate) options: &'a [String],
}

/// What the two programs saw, and the overlap that `elfen run` reported of the same time.
#[derive(Debug)]
pub(crate) struct Measured {
    pub(crate) seen: Seen,
    pub(crate) reported_ns: u64,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{doing}: {error}")]
    Io { doing: &'static str, error: io::Error },
    #[error("the C compiler refuses {0}")]
    Compiler(&'static str),
    #[error(transparent)]
    Missing(#[from] ProgramError),
    #[error("`elfen run` did not start the batch: {0}")]
    Run(String),
    #[error("the program of the requests: {0}; 3 if the kernel notes no switches for it")]
    Requests(ExitStatus),
    #[error("the batch is not listed, or the kernel keeps no account of it")]
    NoAccount,
}

fn io_error(doing: &'static str) -> impl Fn(io::Error) -> Error {
    move |error| Error::Io { doing, error }
}

/// The programs, built into a folder that goes with this.
#[derive(Debug)]
pub(crate) struct Programs {
    folder: tempfile::TempDir,
}

/// How long what is not counted takes, of a program that is learned about.
const LEARN_SECONDS: u64 = 1;

const SOURCES: [(&str, &str); 5] = [
    ("switches.h", include_str!("switches.h")),
    ("request.c", include_str!("request.c")),
    ("batch.c", include_str!("batch.c")),
    ("elfen_abi.h", include_str!("../../../../elfen-rt/include/elfen_abi.h")),
    ("elfen_check.h", include_str!("../../../../elfen-rt/include/elfen_check.h")),
];

impl Programs {
    pub(crate) fn build() -> Result<Self, Error> {
        let folder = tempfile::tempdir().map_err(io_error("making a folder"))?;
        for (name, text) in SOURCES {
            fs::write(folder.path().join(name), text).map_err(io_error("writing a source"))?;
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

    fn compile(&self, source: &'static str, to: &str, flags: &[&str]) -> Result<(), Error> {
        let mut command = Command::new("cc");
        command.args(["-O2", "-o", to]).args(flags).arg(source).current_dir(self.folder.path());
        let status = command.status().map_err(io_error("starting the C compiler, cc"))?;
        if status.success() { Ok(()) } else { Err(Error::Compiler(source)) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Plays one case on the pair (request, batch).
    pub(crate) fn measure(&self, lanes: (u32, u32), case: &Case<'_>) -> Result<Measured, Error> {
        let (request, batch) = lanes;
        let notes = self.path("pauses");
        let mut run = Run::start(self, lanes, case, &notes)?;
        let stranger = case.stranger.then(|| self.spin(batch)).transpose()?;
        // The first looks of the run, and the lane's first lease.
        thread::sleep(Duration::from_millis(300));
        if case.inject == Inject::Auto {
            self.play(request, &Case { seconds: LEARN_SECONDS, ..case.clone() })?;
        }
        let before_ns = run.overlapped_ns()?;
        let (turns, others) = self.play(request, case)?;
        // What the guard counts at its next look belongs to these turns.
        thread::sleep(Duration::from_millis(50));
        let reported_ns = run.overlapped_ns()?.saturating_sub(before_ns);
        drop(stranger);
        run.end()?;
        let pauses = notes::read(&notes).map_err(io_error("reading the batch's notes"))?;
        let pauses = notes::joined(pauses);
        Ok(Measured { seen: notes::compare(&turns, &others, &pauses), reported_ns })
    }

    /// The turns of the requests' program, and when the lane was busy with others.
    fn play(&self, request: u32, case: &Case<'_>) -> Result<(Vec<Stretch>, Vec<Stretch>), Error> {
        let file = self.path("turns");
        let output = File::create(&file).map_err(io_error("making a file for the turns"))?;
        let mut command = Command::new(self.path("request"));
        let arguments = [case.turn.as_nanos().to_string(), case.seconds.to_string()];
        command.args(arguments).arg("7").stdout(output);
        let mut player = Killed(on(command, request)?);
        let ended = player.0.wait().map_err(io_error("waiting for the requests"))?;
        if !ended.success() {
            return Err(Error::Requests(ended));
        }
        let mut turns = notes::read(&file).map_err(io_error("reading the turns"))?;
        let own = turns.iter().position(|turn| *turn == (0, 0)).unwrap_or(turns.len());
        let others = turns.split_off(own);
        Ok((turns, others.into_iter().skip(1).collect()))
    }

    /// A stranger: the batch program without a run of its own.
    fn spin(&self, cpu: u32) -> Result<Killed, Error> {
        let mut command = Command::new(self.path("guard"));
        command.arg(self.path("strangers-pauses")).stdout(Stdio::null());
        on(command, cpu).map(Killed)
    }
}

/// Starts a program on one CPU.
fn on(mut command: Command, cpu: u32) -> Result<Child, Error> {
    // SAFETY: `pin` makes a system call on memory that it has on its stack or that the fork has
    // copied.
    unsafe { command.pre_exec(move || affinity::pin(cpu)) };
    command.spawn().map_err(io_error("starting a program"))
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
    fn start(
        programs: &Programs,
        (request, batch): (u32, u32),
        case: &Case<'_>,
        notes: &Path,
    ) -> Result<Self, Error> {
        let mut command = Command::new(find_program("elfen")?);
        // Its files are of who runs the benchmark.
        command.env_remove("SUDO_UID");
        command.args(["run", "--lanes", &format!("{request}:{batch}"), "--signal", "tasks"]);
        command.args(["--inject", case.inject.name()]).args(case.options).arg("--");
        command.arg(programs.path(case.inject.name())).arg(notes);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let nice = case.nice;
        // SAFETY: takes numbers.
        let step_back = move || match unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        };
        // SAFETY: between fork and exec, `step_back` makes one system call and reads errno.
        unsafe { command.pre_exec(step_back) };
        let mut front = Killed(command.spawn().map_err(io_error("starting elfen run"))?);
        let mut line = String::new();
        let output = front.0.stdout.take().map(BufReader::new);
        output.map(|mut output| output.read_line(&mut line));
        if line != "ready\n" {
            let said = front.0.stderr.take().map(io::read_to_string).transpose();
            let said = said.ok().flatten().unwrap_or_default();
            return Err(Error::Run(said.lines().last().unwrap_or("it ended").to_owned()));
        }
        let ours = |found: &Batch| {
            let lanes = found.lanes.slot(0).map(|slot| slot.batch_cpu.load(Relaxed));
            lanes == Some(u64::from(batch)) && parent_is(found, front.0.id())
        };
        let found = runs().map_err(io_error("looking for the run"))?;
        let batch = found.into_iter().find(ours).ok_or(Error::NoAccount)?;
        Ok(Self { front, batch })
    }

    fn overlapped_ns(&self) -> Result<u64, Error> {
        let slot = self.batch.lanes.slot(0).filter(|slot: &&LaneSlot| slot.is_counted());
        slot.map(|slot| slot.overlapped_ns.load(Relaxed)).ok_or(Error::NoAccount)
    }

    fn end(&mut self) -> Result<(), Error> {
        // SAFETY: takes numbers; the front is our child, and not reaped yet.
        unsafe { libc::kill(self.front.0.id().cast_signed(), libc::SIGTERM) };
        let start = Instant::now();
        while self.front.0.try_wait().map_err(io_error("waiting for elfen run"))?.is_none() {
            if start.elapsed() > PATIENCE {
                return Err(Error::Run("it does not end".to_owned()));
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

/// Whether a run's keeper is this front's child.
fn parent_is(batch: &Batch, front: u32) -> bool {
    let keeper = batch.keeper.pid().unsigned_abs();
    elfen_machine::process::stat(keeper).is_some_and(|stat| stat.parent == front)
}
