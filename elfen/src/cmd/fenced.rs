//! `elfen run --fence`: the program becomes one of a fence's, and elfend's guards hold its lanes.
//!
//! Nothing of a run is kept beside it: this process asks to be put into the fence, gives up what it
//! may, and becomes the program. So its signals, its terminal and its exit status are its own. A
//! program that has checks is told where elfend hands it their pages.

use std::ffi::{CStr, OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use elfen_console::failure::{Failure, Status, to_stderr};
use elfen_console::output::warn;
use elfen_host::cgroup::{Group, Hierarchies};
use elfen_host::fence::state::Folder;
use elfen_host::fence::status::{self, Answer, FenceStatus, Request};
use elfen_host::run::User;
use elfen_host::run::launch::PRELOAD;
use elfen_instrument::preload;
use elfen_rt::memory::Access;
use elfen_rt::{inherit, pages};
use nix::unistd::{setgid, setgroups, setuid};

use super::inject_args::InjectName;
use super::user::user_of;

const WHAT: &str = "run --fence";

/// What elfend's settings decide for all that is in a fence.
pub(super) const NOT_FENCED: [&str; 12] = [
    "policy",
    "budget",
    "slo",
    "ref_ipc",
    "lanes",
    "signal",
    "service",
    "nap",
    "inject",
    "look_every",
    "look_slack",
    "report",
];

/// Root takes itself out of a fence by writing one file: so a program that root starts is another
/// user's, the one who asked `sudo`, unless root insists.
pub(super) fn user(named: Option<&str>) -> Result<Option<User>, Failure> {
    if !nix::unistd::geteuid().is_root() {
        let (why, fix) = ("only root can become another", "use sudo, or leave --user out");
        return match named {
            Some(_) => Err(Failure::new(Status::Usage, "--user", why, fix)),
            None => Ok(None),
        };
    }
    let by_sudo = std::env::var("SUDO_UID").ok().filter(|uid| uid != "0");
    let Some(name) = named.map(str::to_owned).or(by_sudo) else {
        let why = "a program that runs as root can leave its fence";
        let fix = "name another user with --user; or --user root, and trust the program";
        return Err(Failure::new(Status::Usage, WHAT, why, fix));
    };
    let user = user_of(&name)?;
    if user.uid.is_root() {
        warn("this program runs as root, and can leave its fence");
    }
    Ok(Some(user))
}

/// The fence of a run that asks for nothing of its own: that of an elfend which holds one, for who
/// may put a program there. Otherwise the run has guards of its own.
pub(super) struct Usual {
    pub(super) fence: String,
    pub(super) inside: bool,
    pub(super) user: Option<User>,
}

impl Usual {
    pub(super) fn find(run_dir: &Path, named: Option<&str>) -> Option<Self> {
        // Whom elfend gives its pages is in a fence, or may enter one.
        let socket = Folder::new(run_dir).socket();
        pages::ask(socket.as_os_str().as_bytes(), Access::Read)?;
        let Ok(Answer::Status(status)) = status::ask(&socket, &Request::Status) else {
            return None;
        };
        let hierarchies = Hierarchies::read().ok()?;
        let holds_us = |fence: &&FenceStatus| {
            let group = Group::new(&hierarchies, fence.path.clone());
            group.holds(std::process::id()).unwrap_or(false)
        };
        let around = status.fences.iter().find(holds_us);
        let only = || status.fences.first().filter(|_| status.fences.len() == 1);
        let fence = around.or_else(only)?.name.clone();
        // Root that names no user would be refused.
        Some(Self { fence, inside: around.is_some(), user: user(named).ok()? })
    }
}

pub(super) struct Fenced<'a> {
    pub(super) fence: &'a str,
    /// Whether this process is there already.
    pub(super) inside: bool,
    pub(super) run_dir: &'a Path,
    pub(super) user: Option<User>,
    pub(super) program: &'a [OsString],
    pub(super) dry_run: bool,
}

impl Fenced<'_> {
    /// Becomes the program; comes back where it cannot, or is not to.
    pub(super) fn run(self) -> Result<String, Failure> {
        let known = self.known()?;
        let line = format!(
            "fence {} on CPUs {}, level fence: elfend's guards hold them",
            known.name, known.lanes
        );
        if self.dry_run {
            return Ok(line);
        }
        to_stderr(&line);
        if let Some(why) = known.why() {
            warn(&format!("fence {} is frozen: {why}; the program waits there", known.name));
        }
        let asked = Request::Enter { fence: self.fence.to_owned() };
        if !self.inside {
            // In a fence that is frozen this process stands here until the fence runs.
            match ask(self.run_dir, &asked)? {
                Answer::Entered(_) => {}
                Answer::Refused { why, fix } => {
                    return Err(Failure::new(Status::Failed, WHAT, why, fix));
                }
                other => return Err(odd(&other)),
            }
        }
        if let Some(user) = &self.user {
            become_user(user).map_err(|error| {
                let what = format!("becoming user {:?}", user.name);
                Failure::new(Status::Failed, what, error, "use a user of this machine")
            })?;
        }
        let (program, arguments) =
            self.program.split_first().unwrap_or_else(|| unreachable!("required"));
        let error = self.command(program)?.args(arguments).exec();
        Err(not_started(program, &error))
    }

    fn known(&self) -> Result<FenceStatus, Failure> {
        let status = match ask(self.run_dir, &Request::Status)? {
            Answer::Status(status) => status,
            other => return Err(odd(&other)),
        };
        let names: Vec<String> = status.fences.iter().map(|fence| fence.name.clone()).collect();
        status.fences.into_iter().find(|fence| fence.name == self.fence).ok_or_else(|| {
            let what = format!("fence {:?}", self.fence);
            let fix = format!("name one of: {}", names.join(", "));
            Failure::new(Status::Usage, what, "elfend holds none of that name", fix)
        })
    }

    fn command(&self, program: &OsStr) -> Result<Command, Failure> {
        let mut command = Command::new(program);
        let socket = std::path::absolute(Folder::new(self.run_dir).socket()).map_err(|error| {
            Failure::new(Status::Failed, "--run-dir", error, "name its whole path")
        })?;
        command.env(name_of(pages::VARIABLE), socket);
        // Of a run that it was started from, whose lanes may be others.
        command.env_remove(name_of(inherit::VARIABLE));
        if let Some(library) = InjectName::Auto.choose(program)?.library {
            let before = std::env::var_os(PRELOAD);
            command.env(PRELOAD, preload(&library, before.as_deref()));
        }
        if let Some(user) = &self.user {
            command.env("HOME", &user.home).env("USER", &user.name).env("LOGNAME", &user.name);
        }
        Ok(command)
    }
}

fn name_of(variable: &'static CStr) -> &'static str {
    variable.to_str().unwrap_or_else(|_| unreachable!("ASCII"))
}

/// The groups first, as only root may set them; with its last id root's capabilities go.
fn become_user(user: &User) -> nix::Result<()> {
    setgroups(&user.groups)?;
    setgid(user.gid)?;
    setuid(user.uid)
}

fn ask(run_dir: &Path, request: &Request) -> Result<Answer, Failure> {
    let socket = Folder::new(run_dir).socket();
    status::ask(&socket, request).map_err(|error| {
        let why = format!("elfend does not answer at {:?}: {error}", socket.display().to_string());
        let fix = "start elfend, or leave --fence out";
        Failure::new(Status::Failed, WHAT, why, fix)
    })
}

fn odd(answer: &Answer) -> Failure {
    let why = format!("elfend answers what was not asked: {answer:?}");
    Failure::new(Status::Failed, WHAT, why, "use elfen and elfend of the same version")
}

fn not_started(program: &OsStr, error: &std::io::Error) -> Failure {
    let status = match error.kind() {
        std::io::ErrorKind::NotFound => Status::NotFound,
        _ => Status::NotStarted,
    };
    let program = format!("program {:?}", program.to_string_lossy());
    Failure::new(status, program, error, "check its name and its permissions")
}
