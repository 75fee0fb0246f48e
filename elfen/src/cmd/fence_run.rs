//! `elfen run --fence`: the program becomes one of a fence's, and elfend's guards hold its lanes.
//!
//! Nothing of a run is kept beside it: this process asks to be put into the fence, gives up what it
//! may, and becomes the program. So its signals, its terminal and its exit status are its own. A
//! program that has checks is told where elfend hands it their pages.

use std::ffi::{CStr, OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use clap::ArgMatches;
use clap::parser::ValueSource;
use elfen_console::failure::{Failure, Status, to_stderr};
use elfen_console::output::warn;
use elfen_instrument::preload;
use elfen_machine::fence::state::Folder;
use elfen_machine::fence::status::{self, Answer, FenceStatus, Request, Status as Known};
use elfen_rt::{inherit, pages};
use elfen_run::PRELOAD;
use elfen_run::User;
use elfen_run::batches::Level;
use nix::unistd::{setgid, setgroups, setuid};

use super::inject_args::InjectName;
use super::isolation::cut_off;
use super::user;

const WHAT: &str = "run --fence";

/// No fence's name: a run with guards of its own.
pub(super) const NONE: &str = "none";

/// What elfend's settings decide for all that is in a fence.
const NOT_FENCED: [&str; 12] = [
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

/// Refuses what was typed beside a fence that decides it. A variable says how other runs are.
pub(super) fn check(run: &ArgMatches) -> Result<(), Failure> {
    let named = run.get_one::<String>("fence").filter(|fence| *fence != NONE);
    let is_typed = |name: &&str| run.value_source(name) == Some(ValueSource::CommandLine);
    let Some(name) = NOT_FENCED.into_iter().find(is_typed).filter(|_| named.is_some()) else {
        return Ok(());
    };
    let option = name.replace('_', "-");
    let why = format!("the argument '--fence' cannot be used with '--{option}'");
    Err(Failure::new(Status::Usage, "arguments", why, "see `elfen run --help`"))
}

/// Root takes itself out of a fence by writing one file: so a program that root starts is another
/// user's, the one who asked `sudo`, unless root insists.
pub(super) fn user(named: Option<&str>) -> Result<Option<User>, Failure> {
    let user = user::chosen(named)?;
    if user.is_none() && nix::unistd::geteuid().is_root() {
        let why = "a program that runs as root can leave its fence";
        let fix = "name another user with --user; or --user root, and trust the program";
        return Err(Failure::new(Status::Usage, WHAT, why, fix));
    }
    if user.as_ref().is_some_and(|user| user.uid.is_root()) {
        warn("this program runs as root, and can leave its fence");
    }
    Ok(user)
}

/// The fence of a run that names no lanes: that of an elfend which holds one, for who may put a
/// program there.
pub(super) struct Usual {
    pub(super) fence: FenceStatus,
    pub(super) inside: bool,
    pub(super) user: Option<User>,
}

impl Usual {
    /// `None` where no elfend holds fences: the run has guards of its own. Where one does, a run
    /// that can be in none of them is refused, as it would take the lanes that are lent there with
    /// all others.
    pub(super) fn find(
        run_dir: &Path,
        named: Option<&str>,
        asks_guards: bool,
    ) -> Result<Option<Self>, Failure> {
        let asked = status::ask(&Folder::new(run_dir).socket(), &Request::Status);
        let Ok(Answer::Status(Known { asker, mut fences, .. })) = asked else { return Ok(None) };
        let inside = asker.inside.is_some();
        let at = match &asker.inside {
            Some(_) if asks_guards => None,
            Some(around) => fences.iter().position(|fence| fence.name == *around),
            None if fences.is_empty() => None,
            None => {
                Self::may_be(asks_guards, asker.may_enter, &fences)?;
                Some(0)
            }
        };
        let Some(at) = at else { return Ok(None) };
        let fence = fences.swap_remove(at);
        Ok(Some(Self { fence, inside, user: user(named)? }))
    }

    fn may_be(asks_guards: bool, may_enter: bool, fences: &[FenceStatus]) -> Result<(), Failure> {
        let names: Vec<&str> = fences.iter().map(|fence| fence.name.as_str()).collect();
        let names = names.join(", ");
        let (why, way_in) = if asks_guards {
            ("what this run asks for is of guards of its own".to_owned(), None)
        } else if !may_enter {
            let way_in = Some("join that group".to_owned());
            ("its fences are for root and group elfen".to_owned(), way_in)
        } else if fences.len() > 1 {
            (format!("it holds several fences: {names}"), Some("name one with --fence".to_owned()))
        } else {
            return Ok(());
        };
        let own = "name lanes for it with --lanes REQUEST:BATCH, or `--fence none` for all pairs";
        let fix = way_in.map_or_else(|| own.to_owned(), |way_in| format!("{way_in}; or {own}"));
        let why = format!("elfend lends lanes of this machine, and {why}");
        Err(Failure::new(Status::Usage, "lanes", why, fix))
    }
}

pub(super) struct Fenced<'a> {
    pub(super) fence: FenceStatus,
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
        let known = &self.fence;
        let line = format!(
            "fence {} on CPUs {}, level {}: elfend's guards hold them",
            known.name,
            known.lanes,
            Level::Fence.name()
        );
        if self.dry_run {
            return Ok(line);
        }
        to_stderr(&line);
        if let Some(why) = known.why() {
            warn(&format!("fence {} is frozen: {why}; the program waits there", known.name));
        }
        let asked = Request::Enter { fence: known.name.clone() };
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
            // Root leaves its fence without one.
            if !user.uid.is_root() {
                cut_off(user)?;
            }
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

/// The fence that is asked for by its name.
pub(super) fn named(run_dir: &Path, fence: &str) -> Result<FenceStatus, Failure> {
    let fences = match ask(run_dir, &Request::Status)? {
        Answer::Status(status) => status.fences,
        other => return Err(odd(&other)),
    };
    let names: Vec<String> = fences.iter().map(|fence| fence.name.clone()).collect();
    fences.into_iter().find(|known| known.name == fence).ok_or_else(|| {
        let fix = format!("name one of: {}", names.join(", "));
        let what = format!("fence {fence:?}");
        Failure::new(Status::Usage, what, "elfend holds none of that name", fix)
    })
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
        let fix = "start elfend, or restart it if it runs; or leave --fence out";
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
