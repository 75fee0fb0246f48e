//! Which ways of checking a program allows, and the reason against each of the others.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use elfen_entries::{CHECK_BYTES, JUMP_BYTES};

pub use crate::elf::Compiler;
use crate::elf::{self, Elf, Executable, SlowPath};
use crate::file::{self, Rights};

/// A way to check a batch program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CheckMethod {
    Guard,
    /// Checks are written into the program while it runs: see [`crate::live`].
    Live,
    Inline,
    Mcount,
    Fentry,
    Cyg,
    Patch,
}

impl CheckMethod {
    /// Ordered from the cheapest check to no check at all.
    pub const BEST_FIRST: [Self; 7] =
        [Self::Inline, Self::Patch, Self::Fentry, Self::Mcount, Self::Cyg, Self::Live, Self::Guard];

    pub fn name(self) -> &'static str {
        match self {
            Self::Guard => "guard",
            Self::Live => "live",
            Self::Inline => "inline",
            Self::Mcount => "mcount",
            Self::Fentry => "fentry",
            Self::Cyg => "cyg",
            Self::Patch => "patch",
        }
    }
}

/// Why a program does not allow a way of checking, or cannot be inspected.
#[derive(Debug, thiserror::Error)]
pub enum Reason {
    #[error("no such program in any folder of PATH")]
    NotFound,
    #[error("cannot be read: {0}")]
    Unreadable(io::Error),
    #[error("is not an executable file")]
    NotExecutable,
    #[error("is a script, and its interpreter {interpreter:?} {reason}")]
    Interpreter { interpreter: PathBuf, reason: Box<Self> },
    #[error("is a script, and the kernel does not follow that many nested interpreters")]
    TooDeep,
    #[error("is not an ELF program")]
    NotElf,
    #[error("is a damaged ELF file: {0}")]
    Corrupt(object::Error),
    #[error("is for another machine (ELF machine {0})")]
    Foreign(u16),
    #[error("is a 32-bit program, and the preload library has 64 bits")]
    ThirtyTwoBits,
    #[error("is statically linked: no loader loads the preload library")]
    Static,
    #[error("is set-user-ID or set-group-ID: the loader preloads nothing into it")]
    SetId,
    #[error("has file capabilities: the loader preloads nothing into it")]
    Capabilities,
    #[error("is built with AddressSanitizer, which refuses to start after a preloaded library")]
    Sanitizer,
    #[error("was not built for it: {0}")]
    NotBuiltFor(&'static str),
    #[error(
        "leaves {room} bytes at its function entries: a check takes {CHECK_BYTES}, a jump to one \
         {JUMP_BYTES}"
    )]
    NoRoom { room: usize },
}

/// What the inspector found in a program's file.
#[derive(Debug)]
pub struct Program {
    /// The file that the kernel maps: for a script, its interpreter.
    pub file: PathBuf,
    elf: Elf,
    rights: Option<Rights>,
}

/// How to start a program with one of the ways of checking.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Plan {
    pub checks: CheckMethod,
    /// Whether the preload library must be loaded into it.
    pub preload: bool,
}

/// The best way for the program `name`, which is searched for in PATH. Every program for this
/// machine allows [`CheckMethod::Live`], and every program allows [`CheckMethod::Guard`].
pub fn best(name: &OsStr) -> Result<CheckMethod, Reason> {
    Ok(inspect(name)?.best().checks)
}

/// Inspects the file that `name` stands for.
pub fn inspect(name: &OsStr) -> Result<Program, Reason> {
    let path = std::env::var_os("PATH");
    let file = file::find(name, path.as_deref()).ok_or(Reason::NotFound)?;
    inspect_file(&file, path.as_deref(), SCRIPTS_MAX)
}

/// Whether a file gives its process rights that a traced process would not get: it has a
/// set-user-ID bit, or capabilities.
pub fn gains_rights(file: &Path) -> bool {
    file::gains_rights(file).is_ok_and(|rights| rights.is_some())
}

/// The file that the program `name` is, which is searched for in PATH.
pub fn file_of(name: &OsStr) -> Option<PathBuf> {
    file::find(name, std::env::var_os("PATH").as_deref())
}

/// The kernel follows at most this many interpreters that are scripts themselves.
const SCRIPTS_MAX: u32 = 5;

fn inspect_file(file: &Path, path: Option<&OsStr>, scripts: u32) -> Result<Program, Reason> {
    if !file.exists() {
        return Err(Reason::Unreadable(io::ErrorKind::NotFound.into()));
    }
    if !file::is_executable(file) {
        return Err(Reason::NotExecutable);
    }
    if let Some((interpreter, argument)) = file::script(file).map_err(Reason::Unreadable)? {
        let started =
            program_of_env(&interpreter, argument.as_deref(), path).unwrap_or(interpreter);
        let scripts = scripts.checked_sub(1).ok_or(Reason::TooDeep)?;
        return inspect_file(&started, path, scripts).map_err(|reason| Reason::Interpreter {
            interpreter: started,
            reason: Box::new(reason),
        });
    }
    let bytes = fs::read(file).map_err(Reason::Unreadable)?;
    let elf = elf::read(&bytes).ok_or(Reason::NotElf)?.map_err(Reason::Corrupt)?;
    if elf == Elf::NotExecutable {
        return Err(Reason::NotExecutable);
    }
    let rights = file::gains_rights(file).map_err(Reason::Unreadable)?;
    Ok(Program { file: file.to_owned(), elf, rights })
}

/// The program that `env` starts for a line like `#!/usr/bin/env python3`.
fn program_of_env(
    interpreter: &Path,
    argument: Option<&OsStr>,
    path: Option<&OsStr>,
) -> Option<PathBuf> {
    let argument = argument?.to_str()?.trim_start_matches("-S").trim_start();
    let program = argument.split_ascii_whitespace().next()?;
    let plain = !program.starts_with('-') && !program.contains('=');
    (interpreter.file_name()? == "env" && plain).then(|| file::find(program.as_ref(), path))?
}

impl Program {
    /// The cheapest way of checking that this program allows.
    pub fn best(&self) -> Plan {
        let allowed = CheckMethod::BEST_FIRST.iter().find_map(|&checks| self.allows(checks).ok());
        allowed.unwrap_or(Plan { checks: CheckMethod::Guard, preload: false })
    }

    /// How to start the program with this way of checking, or why that is impossible.
    pub fn allows(&self, checks: CheckMethod) -> Result<Plan, Reason> {
        if checks == CheckMethod::Guard {
            return Ok(Plan { checks, preload: false });
        }
        let program = match &self.elf {
            Elf::X86_64(program) => program,
            Elf::ThirtyTwoBits => return Err(Reason::ThirtyTwoBits),
            Elf::Foreign(machine) => return Err(Reason::Foreign(*machine)),
            Elf::NotExecutable => return Err(Reason::NotExecutable),
        };
        if checks == CheckMethod::Live {
            return Ok(Plan { checks, preload: false });
        }
        check_built_for(program, checks)?;
        let preload =
            !(checks == CheckMethod::Inline && program.inline == Some(SlowPath::InProgram));
        // A program finds its run through its environment. Without it, inline checks do nothing
        // either.
        self.check_environment()?;
        if preload {
            check_preloadable(program)?;
        }
        Ok(Plan { checks, preload })
    }

    /// The compiler of a virtual machine in this program, if its file shows one. Programs that it
    /// starts and libraries that it opens later are not inspected.
    pub fn compiles(&self) -> Option<Compiler> {
        match &self.elf {
            Elf::X86_64(program) => program.compiles,
            _ => None,
        }
    }

    /// Whether the loader would load a library of ours into it.
    pub fn takes_a_library(&self) -> Result<(), Reason> {
        match &self.elf {
            Elf::X86_64(program) => {
                self.check_environment().and_then(|()| check_preloadable(program))
            }
            Elf::ThirtyTwoBits => Err(Reason::ThirtyTwoBits),
            Elf::Foreign(machine) => Err(Reason::Foreign(*machine)),
            Elf::NotExecutable => Err(Reason::NotExecutable),
        }
    }

    fn check_environment(&self) -> Result<(), Reason> {
        match self.rights {
            Some(Rights::SetId) => Err(Reason::SetId),
            Some(Rights::Capabilities) => Err(Reason::Capabilities),
            None => Ok(()),
        }
    }
}

fn check_preloadable(program: &Executable) -> Result<(), Reason> {
    match (program.dynamic, program.asan) {
        (false, _) => Err(Reason::Static),
        (true, true) => Err(Reason::Sanitizer),
        (true, false) => Ok(()),
    }
}

fn check_built_for(program: &Executable, checks: CheckMethod) -> Result<(), Reason> {
    let (has, flag) = match checks {
        CheckMethod::Guard | CheckMethod::Live => return Ok(()),
        CheckMethod::Inline => (program.inline.is_some(), "no check in its source"),
        CheckMethod::Mcount => (program.mcount, "-pg"),
        CheckMethod::Fentry => (program.fentry, "-pg -mfentry"),
        CheckMethod::Cyg => (program.cyg, "-finstrument-functions"),
        CheckMethod::Patch => (program.entries.is_some(), "-fpatchable-function-entry=43"),
    };
    if !has && !program.dynamic {
        return Err(Reason::Static);
    }
    if !has {
        return Err(Reason::NotBuiltFor(flag));
    }
    match program.entries {
        Some(entries) if checks == CheckMethod::Patch && entries.room < JUMP_BYTES => {
            Err(Reason::NoRoom { room: entries.room })
        }
        _ => Ok(()),
    }
}
