//! `elfen run --fence`: runs a program in a fence of elfend, on lanes that elfend's guards protect.
//!
//! This process asks elfend to put it into the fence, drops its privileges, and executes the
//! program. So no other process of the run remains, and signals, terminal and exit status need no
//! forwarding. A program with checks finds elfend's socket in a variable, and requests its pages
//! there.

use std::ffi::{CStr, OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use clap::ArgMatches;
use clap::parser::ValueSource;
use elfen_console::failure::{Failure, Status, to_stderr};
use elfen_console::output::warn;
use elfen_instrument::preload;
use elfen_machine::accounts::Account;
use elfen_machine::fence::state::Folder;
use elfen_machine::fence::status::{self, Answer, FenceStatus, Request, Status as Known};
use elfen_rt::{inherit, pages};
use elfen_run::PRELOAD;
use elfen_run::batches::Level;
use nix::unistd::{setgid, setgroups, setuid};

use super::checks_args::ChecksName;
use super::isolation::isolate_user;
use super::user;

const WHAT: &str = "run --fence";

/// The value of `--fence` that gives a run guards of its own.
pub(super) const NONE: &str = "none";

/// Options that a run in a fence cannot have: elfend's settings decide them for all programs in it.
const NOT_WITH_FENCE: [&str; 12] = [
    "policy",
    "budget",
    "slo",
    "ref_ipc",
    "lanes",
    "source",
    "service",
    "nap",
    "checks",
    "poll_interval",
    "timer_slack",
    "json_out",
];

/// Rejects such options on the command line if a fence is named. Variables with defaults of these
/// options are ignored, because they apply to other runs.
pub(super) fn refuse_options(run: &ArgMatches) -> Result<(), Failure> {
    let named = run.get_one::<String>("fence").filter(|fence| *fence != NONE);
    let is_typed = |name: &&str| run.value_source(name) == Some(ValueSource::CommandLine);
    let Some(name) = NOT_WITH_FENCE.into_iter().find(is_typed).filter(|_| named.is_some()) else {
        return Ok(());
    };
    let option = name.replace('_', "-");
    let why = format!("the argument '--fence' cannot be used with '--{option}'");
    Err(Failure::new(Status::Usage, "arguments", why, "see `elfen run --help`"))
}

/// The user that runs the program: the named user, or the user that called `sudo`.
///
/// A process of root can leave a fence by writing one file. So root's program runs as root only
/// with `--user root`.
pub(super) fn choose_user(named: Option<&str>) -> Result<Option<Account>, Failure> {
    let user = user::choose_user(named)?;
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

/// The fence for a run that names neither a fence nor lanes.
pub(super) struct DefaultFence {
    pub(super) fence: FenceStatus,
    pub(super) inside: bool,
    pub(super) user: Option<Account>,
}

impl DefaultFence {
    /// Returns `None` if the run gets guards of its own. That is so if elfend does not run or holds
    /// no fence, or if a run inside of a fence has options of guards.
    ///
    /// Fails if elfend holds fences and the run can use none of them. With guards of its own, that
    /// run would take all lanes of the machine, including the lanes that elfend lends.
    pub(super) fn find(
        run_dir: &Path,
        named_user: Option<&str>,
        wants_guards: bool,
    ) -> Result<Option<Self>, Failure> {
        let answer = status::ask(&Folder::new(run_dir).socket(), &Request::Status);
        let Ok(Answer::Status(Known { asker, mut fences, .. })) = answer else { return Ok(None) };
        let inside = asker.inside.is_some();
        let index = match &asker.inside {
            Some(_) if wants_guards => None,
            Some(around) => fences.iter().position(|fence| fence.name == *around),
            None if fences.is_empty() => None,
            None => {
                Self::require_entry(wants_guards, asker.may_enter, &fences)?;
                Some(0)
            }
        };
        let Some(index) = index else { return Ok(None) };
        let fence = fences.swap_remove(index);
        Ok(Some(Self { fence, inside, user: choose_user(named_user)? }))
    }

    /// Fails if the run has options of guards, may not enter a fence, or can choose from several.
    fn require_entry(
        wants_guards: bool,
        may_enter: bool,
        fences: &[FenceStatus],
    ) -> Result<(), Failure> {
        let names: Vec<&str> = fences.iter().map(|fence| fence.name.as_str()).collect();
        let names = names.join(", ");
        let (why, way_in) = if wants_guards {
            ("the options of this run require guards of its own".to_owned(), None)
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

/// A run in a fence of elfend.
pub(super) struct FenceRun<'a> {
    pub(super) fence: FenceStatus,
    /// Whether this process is already in the fence.
    pub(super) inside: bool,
    pub(super) run_dir: &'a Path,
    pub(super) user: Option<Account>,
    pub(super) program: &'a [OsString],
    pub(super) dry_run: bool,
    pub(super) quiet: bool,
}

impl FenceRun<'_> {
    /// Replaces this process by the program. Returns only the line of a dry run, or a failure.
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
        if !self.quiet {
            to_stderr(&line);
        }
        if let Some(why) = known.why() {
            warn(&format!("fence {} is frozen: {why}; the program waits there", known.name));
        }
        let request = Request::Enter { fence: known.name.clone() };
        if !self.inside {
            // If the fence is frozen, this process stops here until the fence runs.
            match ask(self.run_dir, &request)? {
                Answer::Entered(_) => {}
                Answer::Refused { why, fix } => {
                    return Err(Failure::new(Status::Failed, WHAT, why, fix));
                }
                other => return Err(unexpected_answer(&other)),
            }
        }
        if let Some(user) = &self.user {
            // Isolating a program of root is useless: root can leave its fence without a service
            // manager.
            if !user.uid.is_root() {
                isolate_user(user)?;
            }
            become_user(user).map_err(|error| {
                let what = format!("becoming user {:?}", user.name);
                Failure::new(Status::Failed, what, error, "name a user of this machine")
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
            Failure::new(Status::Failed, "--run-dir", error, "give its absolute path")
        })?;
        command.env(variable_name(pages::VARIABLE), socket);
        // If a run started this command, the variable names that run, whose lanes may differ.
        command.env_remove(variable_name(inherit::VARIABLE));
        if let Some(library) = ChecksName::Auto.choose(program)?.library {
            let before = std::env::var_os(PRELOAD);
            command.env(PRELOAD, preload(&library, before.as_deref()));
        }
        if let Some(user) = &self.user {
            command.env("HOME", &user.home).env("USER", &user.name).env("LOGNAME", &user.name);
        }
        Ok(command)
    }
}

/// Finds the fence of this name.
pub(super) fn find_fence(run_dir: &Path, fence: &str) -> Result<FenceStatus, Failure> {
    let fences = match ask(run_dir, &Request::Status)? {
        Answer::Status(status) => status.fences,
        other => return Err(unexpected_answer(&other)),
    };
    let names: Vec<String> = fences.iter().map(|fence| fence.name.clone()).collect();
    fences.into_iter().find(|known| known.name == fence).ok_or_else(|| {
        let fix = format!("name one of: {}", names.join(", "));
        let what = format!("fence {fence:?}");
        Failure::new(Status::Usage, what, "elfend holds no fence of that name", fix)
    })
}

fn variable_name(variable: &'static CStr) -> &'static str {
    variable.to_str().unwrap_or_else(|_| unreachable!("ASCII"))
}

/// Sets groups and user. The groups come first, because only root may set them; the last call drops
/// root's capabilities.
fn become_user(user: &Account) -> nix::Result<()> {
    setgroups(&user.groups)?;
    setgid(user.gid)?;
    setuid(user.uid)
}

fn ask(run_dir: &Path, request: &Request) -> Result<Answer, Failure> {
    let socket = Folder::new(run_dir).socket();
    status::ask(&socket, request).map_err(|error| {
        let why = format!("elfend does not answer at {:?}: {error}", socket.display().to_string());
        let fix = "start elfend, or restart it if it runs; or omit --fence";
        Failure::new(Status::Failed, WHAT, why, fix)
    })
}

fn unexpected_answer(answer: &Answer) -> Failure {
    let why = format!("unexpected answer of elfend: {answer:?}");
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
