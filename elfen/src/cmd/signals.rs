//! `elfen signals`: the task map for users without privileges, and the processes that hold it.

use std::io::Write;
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status};
use elfen_console::output::warn;
use elfen_console::table;
use elfen_host::args::signals::failure;
use elfen_kernel::holders::{self, Attached, Holder};
use elfen_kernel::pins::{self, Up};
use elfen_kernel::task_map;
use elfen_rt::signal::task::PIN_DIR;
use nix::unistd::{Gid, Group};
use serde::Serialize;

const EXAMPLES: &str = "\
Examples:
  sudo elfen signals up --group batch   who runs on every CPU, for group batch
  elfen signals status                  whether it is up, and who holds it
  sudo elfen signals down               no longer; who reads it now may go on";

/// Let users without privileges read who runs on every CPU
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand, Debug)]
enum Action {
    /// Attach the sched_switch program and pin its map for a group (as root, once)
    #[command(after_help = "Example:\n  sudo elfen signals up --group batch")]
    Up {
        /// The group that may read the map, by name or number
        #[arg(long, default_value = "elfen", env = "ELFEN_GROUP")]
        group: String,
    },
    /// Remove the pins; the program stays until its last reader ends (as root)
    #[command(after_help = "Example:\n  sudo elfen signals down")]
    Down,
    /// Say whether the map is pinned, and which processes hold the program
    #[command(after_help = "Example:\n  elfen signals status --json | jq .group")]
    Status {
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let text = match &args.action {
        Action::Up { group } => up(group)?,
        Action::Down => down()?,
        Action::Status { json } => return status(*json, out),
    };
    writeln!(out, "{text}").map_err(Failure::output)?;
    Ok(ExitCode::SUCCESS)
}

fn up(group: &str) -> Result<String, Failure> {
    let gid = gid_of(group)?;
    let done = pins::up(gid.as_raw()).map_err(|error| as_root("pinning the task map", &error))?;
    Ok(match done {
        Up::Pinned => format!("up: group {group} can read the task map under {PIN_DIR}"),
        Up::Already => {
            format!("was up already; group {group} can read the task map under {PIN_DIR}")
        }
    })
}

fn gid_of(group: &str) -> Result<Gid, Failure> {
    if let Ok(number) = group.parse() {
        return Ok(Gid::from_raw(number));
    }
    let refuse = |why: String| {
        let fix = format!("name one with --group, or make it (as root: `groupadd {group}`)");
        Failure::new(Status::Usage, format!("group {group:?}"), why, fix)
    };
    match Group::from_name(group) {
        Ok(Some(group)) => Ok(group.gid),
        Ok(None) => Err(refuse("there is no such group".to_owned())),
        Err(error) => Err(refuse(error.to_string())),
    }
}

fn down() -> Result<String, Failure> {
    let was_up = pins::down().map_err(|error| as_root("removing the pins", &error))?;
    Ok(if was_up { "down".to_owned() } else { "was not up".to_owned() })
}

#[derive(Serialize)]
struct Report {
    up: bool,
    /// The group that may read the pinned map.
    group: Option<String>,
    /// Absent if no program is attached, or if we may not see it.
    program: Option<ProgramReport>,
    /// Why `program` is absent although one may be attached.
    program_hidden: Option<String>,
}

#[derive(Serialize)]
struct ProgramReport {
    id: u32,
    link: u32,
    holders: Vec<HolderReport>,
    /// Processes that do not let us see what they hold.
    processes_hidden: usize,
}

#[derive(Serialize)]
struct HolderReport {
    pid: u32,
    command: String,
}

fn status(json: bool, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let (program, program_hidden) = match holders::find() {
        Ok(found) => (found.map(ProgramReport::from), None),
        Err(task_map::Error::NotPermitted) => (None, Some("seeing it needs root".to_owned())),
        Err(error) => return Err(failure("looking for the program", &error)),
    };
    let group = pins::group().map(|gid| match Group::from_gid(Gid::from_raw(gid)) {
        Ok(Some(group)) => group.name,
        Ok(None) | Err(_) => gid.to_string(),
    });
    let report = Report { up: pins::are_up(), group, program, program_hidden };
    elfen_console::output::print(out, json, &report, || report.text())?;
    Ok(ExitCode::SUCCESS)
}

impl From<Attached> for ProgramReport {
    fn from(found: Attached) -> Self {
        let report = |Holder { pid, command }| HolderReport { pid, command };
        let holders = found.holders.into_iter().map(report).collect();
        Self { id: found.program, link: found.link, holders, processes_hidden: found.hidden }
    }
}

impl Report {
    fn text(&self) -> String {
        let mut text = match (&self.group, self.up) {
            (Some(group), true) => format!("up: pinned under {PIN_DIR} for group {group}\n"),
            (_, true) => format!("up: pinned under {PIN_DIR}\n"),
            (_, false) => "not up\n".to_owned(),
        };
        match (&self.program, &self.program_hidden) {
            (Some(program), _) => text += &program.text(),
            (None, Some(why)) => text += &format!("a program may be attached: {why}\n"),
            (None, None) => text += "no program attached\n",
        }
        text
    }
}

impl ProgramReport {
    fn text(&self) -> String {
        let mut text = format!("program {} attached by link {}\n", self.id, self.link);
        if self.holders.is_empty() {
            text += "held by no process\n";
        } else {
            let rows: Vec<Vec<String>> =
                self.holders.iter().map(|h| vec![h.pid.to_string(), h.command.clone()]).collect();
            text += &table::lines(&["pid", "held by"], &rows);
        }
        if self.processes_hidden > 0 {
            warn(&format!("processes that do not show what they hold: {}", self.processes_hidden));
        }
        text
    }
}

/// What a user can do where root alone will do.
fn as_root(what: &str, error: &task_map::Error) -> Failure {
    match error {
        task_map::Error::NotPermitted => {
            Failure::new(Status::Failed, what, "not permitted", "run it as root")
        }
        _ => failure(what, error),
    }
}
