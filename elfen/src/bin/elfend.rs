//! `elfend`: the daemon that holds fences. Arguments, one call, exit status; the work is in
//! `elfen-fence/src`.

use std::env;
use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use elfen_console::failure::{Failure, Status};
use elfen_console::usage;
use elfen_fence::release::{freeze, release};
use elfen_fence::settings;
use elfen_fence::settings::{FILE, Settings};
use elfen_machine::cpulist::CpuSet;
use elfen_machine::fence::state::{FOLDER, Folder};
use elfen_machine::pair;

const AFTER: &str = "\
A fence is a cgroup whose processes run on batch lanes alone, below everything else, while \
guards hold those lanes against them. Once a second its promises are held against what the \
kernel says; a fence that cannot be held is frozen, and `elfen status` says why.

SIGHUP has it read its settings anew; those that are wrong change nothing. When it ends, its \
fences stay frozen until it is back. `elfend --release` makes them ordinary cgroups again, and \
lets services run anywhere that were kept to their request lanes.

Members of group elfen may put programs into a fence, and are handed the task map over the \
socket, so that they need no privilege to lend lanes by `elfen run` either.

Examples:
  elfend --check                     is the settings file right, and what follows
  sudo elfend                        hold its fences, until a signal ends it
  sudo elfend --release              after a stop: let all of them go

Exit status: 0 after SIGTERM or Ctrl-C, 1 for failures, 2 for wrong settings or arguments, 3 \
where this machine cannot hold a fence.";

/// Holds fences: cgroups that batch programs cannot leave, on lanes that guards hold
#[derive(Parser, Debug)]
#[command(name = "elfend", version, after_help = AFTER)]
struct Args {
    /// The settings file
    #[arg(long, value_name = "FILE", default_value = FILE, env = "ELFEN_SETTINGS")]
    settings: PathBuf,

    /// Where fences are noted, and the socket is
    #[arg(long, value_name = "FOLDER", default_value = FOLDER, env = "ELFEN_RUN_DIR")]
    run_dir: PathBuf,

    /// Check the settings, or those of this file, and say what follows from them; change nothing
    #[arg(long, value_name = "FILE", num_args = 0..=1, conflicts_with_all = ["release", "freeze"])]
    check: Option<Option<PathBuf>>,

    /// Freeze all fences that are noted, and end: for when elfend and its guards were killed
    #[arg(long, conflicts_with = "release")]
    freeze: bool,

    /// Make all fences that are noted ordinary cgroups again, and end
    #[arg(long)]
    release: bool,
}

fn main() -> ExitCode {
    let words: Vec<OsString> = env::args_os().collect();
    let outcome = match Args::try_parse_from(&words) {
        Ok(args) => run(&args),
        Err(error) => usage::report(&error, &Args::command(), &words, &mut io::stdout()),
    };
    outcome.unwrap_or_else(|failure| failure.report())
}

fn run(args: &Args) -> Result<ExitCode, Failure> {
    let folder = Folder::new(&args.run_dir);
    if args.release {
        require_root()?;
        let mut text = String::new();
        let released = release(&folder)?;
        if released.fences.is_empty() && released.services.is_empty() {
            text = none_left(&folder);
        }
        for fence in released.fences {
            text += &format!("fence {:?}: {} is an ordinary cgroup\n", fence.name, fence.path);
        }
        for one in released.services {
            text += &format!("service {:?}: {} may run anywhere\n", one.service, one.path);
        }
        io::stdout().write_all(text.as_bytes()).map_err(Failure::output)?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.freeze {
        require_root()?;
        let frozen = freeze(&folder)?.into_iter();
        let mut text: String =
            frozen.map(|fence| format!("fence {:?}: frozen\n", fence.name)).collect();
        if text.is_empty() {
            text = none_left(&folder);
        }
        io::stdout().write_all(text.as_bytes()).map_err(Failure::output)?;
        return Ok(ExitCode::SUCCESS);
    }
    let checked = args.check.iter().flatten().next();
    let file = checked.unwrap_or(&args.settings);
    let settings = Settings::open(file).map_err(|error| {
        let fix = match file.exists() {
            true => "correct the file; `elfend --check` reads it and changes nothing",
            false => "write it, or name another with --settings",
        };
        Failure::new(Status::Usage, "elfend", error, fix)
    })?;
    if args.check.is_some() {
        let (_, home) = elfen_fence::require(&settings)?;
        io::stdout()
            .write_all(plan(&settings, home.as_str()).as_bytes())
            .map_err(Failure::output)?;
        return Ok(ExitCode::SUCCESS);
    }
    require_root()?;
    elfen_fence::run(settings, file, &folder).map(|()| ExitCode::SUCCESS)
}

fn none_left(folder: &Folder) -> String {
    format!("no fence of {:?} is there\n", folder.path().display().to_string())
}

fn require_root() -> Result<(), Failure> {
    if nix::unistd::geteuid().is_root() {
        return Ok(());
    }
    let why = "only root may fence cgroups";
    Err(Failure::new(Status::Failed, "elfend", why, "start it as root, or by its unit"))
}

/// What it would do, a line a lane and a fence.
fn plan(settings: &Settings, home: &str) -> String {
    let mut text = format!("guards at home in {home}\n");
    if let Some(gone) = elfen_fence::offline(settings) {
        text += &format!("{gone}\n");
    }
    for lent in &settings.lent {
        let settings::Lent { service, pairs, policy, places, confine, .. } = lent;
        let whose = service.as_ref().map_or("nobody's".to_owned(), |name| format!("{name:?}'s"));
        let (lanes, policy) = (pair::list(pairs), policy.policy.name());
        text += &format!("lanes {lanes}: {whose}, {policy}\n");
        let requests: CpuSet = pairs.iter().map(|pair| pair.request).collect();
        for place in places {
            text += &match confine {
                true => format!("{place}: {whose}, kept to CPUs {requests}\n"),
                false => format!("{place}: {whose}\n"),
            };
        }
    }
    if let Some(address) = settings.metrics {
        text += &format!("metrics at http://{address}/metrics\n");
    }
    for fence in &settings.fences {
        text += &format!("fence {:?}: {} on CPUs {}\n", fence.name, fence.which, fence.lanes);
    }
    text
}
