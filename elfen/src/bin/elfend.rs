//! `elfend`, the daemon that holds fences: parses arguments, calls `elfen-fence`, and prints the
//! result.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use elfen_console::command::parse_and_run;
use elfen_console::failure::{Failure, Status};
use elfen_console::generate;
use elfen_console::reference::commands_page;
use elfen_fence::release::{freeze, release};
use elfen_fence::settings;
use elfen_fence::settings::{FILE, Settings};
use elfen_machine::cpulist::CpuSet;
use elfen_machine::fence::state::{FOLDER, Folder};
use elfen_machine::pair;

const AFTER: &str = "\
A fence is a cgroup whose processes run only on batch lanes, at the lowest priority. Guards \
occupy these lanes while requests run. Once a second elfend compares the guarantees of each fence \
with the state of the kernel. A fence whose guarantees do not hold is frozen, and `elfen status` \
prints the reason.

On SIGHUP elfend reads its settings again; invalid settings change nothing. When elfend ends, its \
fences stay frozen until it runs again. `elfend --release` turns them into ordinary cgroups, and \
lets services that were confined to their request lanes use all CPUs.

Members of group elfen may put programs into a fence. elfend also passes them the task map over \
its socket, so they need no privileges to lend lanes with `elfen run`.

Examples:
  elfend check                       check the settings file, and print its effects
  sudo elfend                        hold the fences until a signal ends elfend
  sudo elfend --release              after a stop: turn all fences into ordinary cgroups

Exit status: 0 after SIGTERM or Ctrl-C, 1 for failures, 2 for invalid settings or arguments, 3 \
if this machine cannot hold a fence.";

/// Hold fences: cgroups that batch programs cannot leave, on lanes that guards protect
#[derive(Parser, Debug)]
#[command(name = "elfend", version, after_help = AFTER)]
struct ElfendArgs {
    /// The settings file
    #[arg(long, value_name = "FILE", default_value = FILE, env = "ELFEN_SETTINGS")]
    settings: PathBuf,

    /// The folder with the records of fences and the socket
    #[arg(long, value_name = "FOLDER", default_value = FOLDER, env = "ELFEN_RUN_DIR")]
    run_dir: PathBuf,

    /// First move elfend to this cgroup, and create the cgroup if it is missing: for containers.
    /// The path is from the root of the hierarchy
    #[arg(long, value_name = "PATH", conflicts_with_all = ["freeze", "release"])]
    cgroup: Option<String>,

    /// Freeze all recorded fences and end: for use after elfend and its guards were killed
    #[arg(long, conflicts_with = "release")]
    freeze: bool,

    /// Turn all recorded fences into ordinary cgroups, and end
    #[arg(long)]
    release: bool,

    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Check a settings file and print its effects; change nothing
    Check {
        /// The file [default: that of --settings]
        file: Option<PathBuf>,
    },
    /// Write the page of docs/reference into a folder
    #[command(hide = true)]
    Reference {
        /// The folder, which must exist
        folder: PathBuf,
    },
}

fn main() -> ExitCode {
    // Standard output is not locked, because the daemon would keep the lock until its end.
    let mut out = io::stdout();
    parse_and_run(|_| Ok(()), |args: ElfendArgs, out| run(&args, out), &mut out)
        .unwrap_or_else(|failure| failure.report())
}

fn run(args: &ElfendArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    if let Some(Command::Reference { folder }) = &args.command {
        let intro =
            "The daemon that holds fences. Its settings are in [elfend.toml](elfend-toml.md).";
        let page = ("commands-elfend.md", commands_page(&ElfendArgs::command(), intro));
        return generate::write_reference(&[page], folder, out);
    }
    let folder = Folder::new(&args.run_dir);
    if args.command.is_some() && (args.freeze || args.release) {
        let why = "--freeze and --release change fences, and `check` changes nothing";
        return Err(Failure::new(Status::Usage, "check", why, "give one of them"));
    }
    let checked = match &args.command {
        Some(Command::Check { file }) => Some(file.as_ref()),
        Some(Command::Reference { .. }) | None => None,
    };
    let text = if args.release {
        release_text(&folder)?
    } else if args.freeze {
        freeze_text(&folder)?
    } else {
        let file = checked.flatten().unwrap_or(&args.settings);
        let settings = Settings::open(file).map_err(|error| {
            let fix = if file.exists() {
                "correct the file; `elfend check` reads it and changes nothing"
            } else {
                "write it, or name another with --settings"
            };
            Failure::new(Status::Usage, "elfend", error, fix)
        })?;
        if checked.is_none() {
            require_root()?;
            args.cgroup.as_deref().map_or(Ok(()), elfen_fence::enter_cgroup)?;
            return elfen_fence::run(settings, file, &folder).map(|()| ExitCode::SUCCESS);
        }
        let (_, home) = elfen_fence::require(&settings)?;
        plan_text(&settings, home.as_str())
    };
    out.write_all(text.as_bytes()).map_err(Failure::output)?;
    Ok(ExitCode::SUCCESS)
}

fn release_text(folder: &Folder) -> Result<String, Failure> {
    require_root()?;
    let released = release(folder)?;
    if released.fences.is_empty() && released.services.is_empty() {
        return Ok(no_fence_line(folder));
    }
    let fences = released.fences.iter();
    let fences =
        fences.map(|it| format!("fence {:?}: {} is an ordinary cgroup\n", it.name, it.path));
    let services = released.services.iter();
    let services =
        services.map(|it| format!("service {:?}: {} may run on all CPUs\n", it.service, it.path));
    Ok(fences.chain(services).collect())
}

fn freeze_text(folder: &Folder) -> Result<String, Failure> {
    require_root()?;
    let frozen = freeze(folder)?;
    if frozen.is_empty() {
        return Ok(no_fence_line(folder));
    }
    Ok(frozen.iter().map(|fence| format!("fence {:?}: frozen\n", fence.name)).collect())
}

fn no_fence_line(folder: &Folder) -> String {
    format!("no fence of {:?} exists\n", folder.path().display().to_string())
}

fn require_root() -> Result<(), Failure> {
    if nix::unistd::geteuid().is_root() {
        return Ok(());
    }
    let why = "only root may fence cgroups";
    Err(Failure::new(Status::Failed, "elfend", why, "start it as root, or start its unit"))
}

/// The effects of the settings as text: a line for each group of lanes, each cgroup of a service
/// and each fence.
fn plan_text(settings: &Settings, home: &str) -> String {
    let mut text = format!("guards run in cgroup {home}\n");
    if let Some(offline) = elfen_fence::offline(settings) {
        text += &format!("{offline}\n");
    }
    for lent in &settings.lent {
        let settings::Lent { service, pairs, policy, places, confine, .. } = lent;
        let service =
            service.as_ref().map_or("no service".to_owned(), |name| format!("service {name:?}"));
        let (lanes, policy) = (pair::list(pairs), policy.policy.name());
        text += &format!("lanes {lanes}: {service}, {policy}\n");
        let requests: CpuSet = pairs.iter().map(|pair| pair.request).collect();
        for place in places {
            text += &format!("{place}: {service}");
            if *confine {
                text += &format!(", limited to CPUs {requests}");
            }
            text += "\n";
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
