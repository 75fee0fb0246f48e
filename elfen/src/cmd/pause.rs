//! `elfen pause` and `elfen resume`: the kill switch of all fences.
//!
//! Pausing asks nobody: it writes what freezes each fence itself, whether the daemon runs, hangs or
//! is gone. Resuming asks the daemon, as only what is guarded may run.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use elfen_console::failure::{Failure, Status};
use elfen_machine::fence::state::{FOLDER, Folder, RecordedFence};
use elfen_machine::fence::status::{self, Answer, FenceStatus, Request};

/// How long the kernel may take to stop every task.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(clap::Args, Debug)]
pub(super) struct RunDir {
    /// Where fences are noted, and the daemon's socket is
    #[arg(long, value_name = "FOLDER", default_value = FOLDER, env = "ELFEN_RUN_DIR")]
    run_dir: PathBuf,
}

impl RunDir {
    pub(super) fn path(&self) -> &Path {
        &self.run_dir
    }

    pub(super) fn folder(&self) -> Folder {
        Folder::new(&self.run_dir)
    }
}

const AFTER_PAUSE: &str = "\
It works whether elfend runs, hangs or is gone. The pause stays until `elfen resume`: fences \
that come are frozen, and an elfend that starts keeps it.

Exit status: 0 once the kernel says that every process stands; 1 after 5 s, with the fences \
where one does not.

Examples:
  sudo elfen pause
  sudo elfen pause --why 'p99 of search, 14:05'";

/// Freeze all fences now
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_PAUSE)]
pub(crate) struct PauseArgs {
    #[command(flatten)]
    run_dir: RunDir,

    /// Why, for those who look; `elfen status` says it
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    why: String,

    /// Keep the reason of a pause that is there
    #[arg(long)]
    keep_why: bool,
}

const AFTER_RESUME: &str = "\
A fence runs only while elfend guards it: where elfend is gone, fences stay frozen.

Example:
  sudo elfen resume";

/// End a pause: fences whose promises hold run again
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_RESUME)]
pub(crate) struct ResumeArgs {
    #[command(flatten)]
    run_dir: RunDir,
}

/// What helps against an error of the folder's.
fn mend(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "run it as root",
        _ => "name the folder that elfend has, with --run-dir",
    }
}

fn failed(what: &str, why: &dyn std::fmt::Display, fix: &str) -> Failure {
    Failure::new(Status::Failed, what, why, fix)
}

pub(crate) fn pause(args: &PauseArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    const WHAT: &str = "pausing";
    let folder = args.run_dir.folder();
    let fails = |error: io::Error| failed(WHAT, &error, mend(&error));
    let before = folder.paused().map_err(fails)?;
    match before {
        Some(_) if args.keep_why => {}
        _ => folder.pause(&args.why).map_err(fails)?,
    }
    let fences = folder.recorded_fences().map_err(fails)?;
    let mut moving = Vec::new();
    let mut refused = Vec::new();
    for fence in &fences {
        match fence.freezer.freeze() {
            Ok(()) => moving.push(fence),
            // Nobody is in a cgroup that is not there.
            Err(error) if error.is_gone() => {}
            Err(error) => refused.push(format!("{}: {error}", fence.name)),
        }
    }
    let began = Instant::now();
    loop {
        moving.retain(|fence| !stands(fence));
        if moving.is_empty() || began.elapsed() >= PATIENCE {
            break;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    let names = moving.iter().map(|fence| format!("{}: not all of it stands", fence.name));
    let left: Vec<String> = refused.into_iter().chain(names).collect();
    if !left.is_empty() {
        return Err(failed(WHAT, &left.join("; "), "see the processes in it: `elfen status`"));
    }
    let line = match fences.as_slice() {
        [] => "paused; no fence is there, and one that comes is frozen".to_owned(),
        _ => format!("paused: {}", names_of(&fences)),
    };
    writeln!(out, "{line}").map_err(Failure::output)?;
    Ok(ExitCode::SUCCESS)
}

/// Whether the kernel says so, or nobody is left who could move.
fn stands(fence: &RecordedFence) -> bool {
    match fence.freezer.is_frozen() {
        Ok(frozen) => frozen,
        Err(error) => error.is_gone(),
    }
}

fn names_of(fences: &[RecordedFence]) -> String {
    fences.iter().map(|fence| fence.name.as_str()).collect::<Vec<_>>().join(", ")
}

pub(crate) fn resume(args: &ResumeArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    const WHAT: &str = "resuming";
    let folder = args.run_dir.folder();
    let fails = |error: io::Error| failed(WHAT, &error, mend(&error));
    let was_paused = folder.resume().map_err(fails)?;
    let fences = folder.recorded_fences().map_err(fails)?;
    if fences.is_empty() {
        let line = if was_paused { "resumed; no fence is there" } else { "nothing was paused" };
        writeln!(out, "{line}").map_err(Failure::output)?;
        return Ok(ExitCode::SUCCESS);
    }
    let began = Instant::now();
    let mut request = Request::Resume;
    let still = loop {
        let asked = std::mem::replace(&mut request, Request::Status);
        let still = still_frozen(&folder, &asked).map_err(|error| {
            let names = names_of(&fences);
            let (why, fix) = match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                    (format!("nobody guards {names}: no elfend answers"), "start elfend")
                }
                _ => (format!("elfend does not let {names} run: {error}"), "restart elfend"),
            };
            let why = format!("the pause is over, and {why}");
            failed(WHAT, &why, &format!("{fix}, or let them go with `elfend --release`"))
        })?;
        if still.is_empty() || began.elapsed() >= PATIENCE {
            break still;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    if !still.is_empty() {
        let why =
            still.iter().filter_map(|fence| Some(format!("{}: {}", fence.name, fence.why()?)));
        let why = why.collect::<Vec<_>>().join("; ");
        return Err(failed(WHAT, &why, "mend that; elfend lets it run when it holds"));
    }
    writeln!(out, "resumed: {}", names_of(&fences)).map_err(Failure::output)?;
    Ok(ExitCode::SUCCESS)
}

fn still_frozen(folder: &Folder, request: &Request) -> io::Result<Vec<FenceStatus>> {
    match status::ask(&folder.socket(), request)? {
        Answer::Status(status) => {
            Ok(status.fences.into_iter().filter(|fence| fence.frozen.is_some()).collect())
        }
        Answer::Refused { why, .. } => Err(io::Error::other(why)),
        other => Err(io::Error::other(format!("elfend answers {other:?}"))),
    }
}
