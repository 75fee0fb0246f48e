//! `elfen pause` and `elfen resume`: the emergency stop of all fences.
//!
//! `pause` works without the daemon: it writes to the freezer of each fence itself. `resume`
//! requires the daemon, because a fence may run only while elfend guards it.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use elfen_console::failure::{Failure, Status};
use elfen_console::output::warn;
use elfen_machine::fence::state::{FOLDER, Folder, RecordedFence};
use elfen_machine::fence::status::{self, Answer, FenceStatus, Request};

/// How long `pause` waits for the kernel to stop every task.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(clap::Args, Debug)]
pub(super) struct RunDir {
    /// The folder with the records of fences and the socket of elfend
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
`pause` works whether elfend runs, hangs or has ended. The pause lasts until `elfen resume`: new \
fences are frozen too, and an elfend that starts keeps the pause.

Exit status: 0 once the kernel reports that every process is frozen; 1 after 5 s, with the names \
of the fences whose processes are not.

Examples:
  sudo elfen pause
  sudo elfen pause --why 'p99 of search, 14:05'";

/// Freeze all fences now
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_PAUSE)]
pub(crate) struct PauseArgs {
    #[command(flatten)]
    run_dir: RunDir,

    /// The reason, for `elfen status` to print
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    why: String,

    /// If there is a pause already, keep its reason
    #[arg(long)]
    keep_why: bool,
}

const AFTER_RESUME: &str = "\
A fence runs only while elfend guards it. Without elfend, fences stay frozen.

Example:
  sudo elfen resume";

/// End a pause: fences whose guarantees hold run again
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_RESUME)]
pub(crate) struct ResumeArgs {
    #[command(flatten)]
    run_dir: RunDir,
}

/// The fix for an error of the run folder.
fn folder_fix(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "run it as root",
        _ => "name the folder of elfend with --run-dir",
    }
}

fn failed(what: &str, why: &dyn std::fmt::Display, fix: &str) -> Failure {
    Failure::new(Status::Failed, what, why, fix)
}

pub(crate) fn pause(args: &PauseArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    const WHAT: &str = "pausing";
    let folder = args.run_dir.folder();
    let fails = |error: io::Error| failed(WHAT, &error, folder_fix(&error));
    let before = folder.paused().map_err(fails)?;
    if before.is_none() || !args.keep_why {
        folder.pause(&args.why).map_err(fails)?;
    }
    let fences = folder.recorded_fences().map_err(fails)?;
    let mut running = Vec::new();
    let mut errors = Vec::new();
    for fence in &fences {
        match fence.freezer.freeze() {
            Ok(()) => running.push(fence),
            // A cgroup that no longer exists has no processes.
            Err(error) if error.is_gone() => {}
            Err(error) => errors.push(format!("{}: {error}", fence.name)),
        }
    }
    let began = Instant::now();
    loop {
        running.retain(|fence| !is_frozen(fence));
        if running.is_empty() || began.elapsed() >= PATIENCE {
            break;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    errors.extend(
        running.iter().map(|fence| format!("{}: some processes are not frozen", fence.name)),
    );
    if !errors.is_empty() {
        return Err(failed(WHAT, &errors.join("; "), "see the processes in it: `elfen status`"));
    }
    if status::ask(&folder.socket(), &Request::Status).is_err() {
        warn("no elfend answers; the pause is recorded, and an elfend that starts will keep it");
    }
    let line = if fences.is_empty() {
        "paused; there is no fence now, and new fences will be frozen".to_owned()
    } else {
        format!("paused: {}", names_of(&fences))
    };
    writeln!(out, "{line}").map_err(Failure::output)?;
    Ok(ExitCode::SUCCESS)
}

/// Whether the kernel reports the fence as frozen, or its cgroup no longer exists.
fn is_frozen(fence: &RecordedFence) -> bool {
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
    let fails = |error: io::Error| failed(WHAT, &error, folder_fix(&error));
    let was_paused = folder.resume().map_err(fails)?;
    let fences = folder.recorded_fences().map_err(fails)?;
    if fences.is_empty() {
        let line = if was_paused { "resumed; there is no fence" } else { "there was no pause" };
        writeln!(out, "{line}").map_err(Failure::output)?;
        return Ok(ExitCode::SUCCESS);
    }
    let began = Instant::now();
    let mut request = Request::Resume;
    let still = loop {
        let this_request = std::mem::replace(&mut request, Request::Status);
        let still = still_frozen(&folder, &this_request).map_err(|error| {
            let names = names_of(&fences);
            let (why, fix) = match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                    (format!("no guards protect {names}: no elfend answers"), "start elfend")
                }
                _ => (format!("elfend does not let {names} run: {error}"), "restart elfend"),
            };
            let why = format!("the pause is over, but {why}");
            let fix = format!("{fix}, or turn them into ordinary cgroups with `elfend --release`");
            failed(WHAT, &why, &fix)
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
        return Err(failed(WHAT, &why, "correct this; elfend then lets the fence run"));
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
