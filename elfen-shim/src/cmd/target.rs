//! The program of a run: started and held, or found.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::process::Child;

use elfen_console::failure::{Failure, Status};
use elfen_instrument::inspect;
use elfen_rt::signal::page::Page;
use elfen_rt::signal::thread::ThreadSlot;

use super::args::Args;
use super::count;
use super::gather::{share, share_running};
use super::lane_choice::Chosen;
use super::suggestions::globals;
use super::process::{new_page, page_of};
use super::wait::take_signals;
use crate::program::{self, Held, Start, StartError};
use crate::reach::Keeper;
use crate::signal_spec::Ask;
use crate::symbols::{Layout, Saying, Symbols};

/// A program that was started, and what is known of it.
#[derive(Default)]
pub(super) struct Started {
    /// It waits to be let go, until somebody looks.
    pub(super) held: Option<Held>,
    pub(super) child: Option<Child>,
    /// Of pages that are shared while it runs.
    pub(super) keeper: Option<Keeper>,
    pub(super) process: u32,
    pub(super) page: Option<&'static Page<ThreadSlot>>,
    pub(super) globals: Vec<(String, crate::reach::Place)>,
    pub(super) shared_pages: u64,
    pub(super) name: String,
    /// Names of some of its globals.
    pub(super) own_globals: Vec<String>,
    /// How its functions say that they run.
    pub(super) saying: Option<Saying>,
}

/// A file without a name.
pub(super) fn behind() -> Result<File, Failure> {
    let mut options = File::options();
    let options = options.read(true).write(true).custom_flags(libc::O_TMPFILE | libc::O_APPEND);
    options.mode(0o600).open(std::env::temp_dir()).map_err(|error| {
        let fix = "name a folder that can be written in TMPDIR";
        Failure::new(Status::Failed, "a file for what the program prints", error, fix)
    })
}

/// Starts the program, with what it prints in a file if it has no terminal, or looks at the one
/// that runs.
pub(super) fn start(
    args: &Args,
    chosen: &Chosen,
    layout: &mut Layout,
    behind: Option<&File>,
    signals: nix::sys::signal::SigSet,
) -> Result<Started, Failure> {
    if args.program.is_empty() {
        let process = args.process.unwrap_or(0);
        if process != 0 {
            layout.look(process);
        }
        let page = page_of(process);
        let name = match args.process {
            Some(process) => program::name_of(process).unwrap_or_default(),
            None => "who runs".to_owned(),
        };
        let (globals, keeper) = match args.share {
            false => (Vec::new(), None),
            true => {
                let Chosen { on, from } = chosen;
                let lanes = &on.iter().chain(from.iter()).collect();
                let (watch, rate) = (&args.watch, &args.rate);
                let shared = share_running(watch, rate, process, layout, lanes)?;
                (shared.0, Some(shared.1))
            }
        };
        return Ok(Started { keeper, process, page, globals, name, ..Started::default() });
    }
    let page = new_page()?;
    let file = crate::reach::program_file(&args.program[0]);
    let symbols = file.as_deref().and_then(|file| Symbols::read(file, file));
    let (places, shared) = match &file {
        Some(file) => share(&args.watch, &args.rate, file)?,
        None => (Vec::new(), None),
    };
    let counted = match &file {
        Some(file) => count::order(&args.count_at, file, symbols.as_ref())?,
        None => String::new(),
    };
    let own_globals = globals(symbols.as_ref());
    let shares = shared.as_ref().filter(|shared| !shared.is_empty());
    let saying = symbols.and_then(|symbols| symbols.saying).filter(|_| args.wants_functions());
    let library = takes_a_library(&args.program[0]);
    // What nobody asked for by name is no reason to look at nothing.
    let saying = match (&library, saying) {
        (Err(_), Some(_)) if !args.watch.contains(&Ask::Function) && counted.is_empty() => None,
        (_, saying) => saying,
    };
    if saying.is_some() || shares.is_some() {
        library?;
    }
    let functions = match saying {
        None => "-",
        Some(Saying::Hooks) => "hooks",
        Some(Saying::Entries | Saying::EntriesAndReturns) => "entries",
    };
    let preload = (saying.is_some() || shares.is_some()).then(|| {
        let globals = shares.map(crate::reach::SharedGlobals::order);
        format!("{functions}{counted} {}", globals.as_deref().unwrap_or("-"))
    });
    let order = Start {
        words: &args.program,
        on: &chosen.on,
        segment: page.memory().segment_id().unwrap_or(-1),
        preload,
        output: match behind {
            Some(file) => program::Output::File(file),
            None if args.json => program::Output::Errors,
            None => program::Output::Ours,
        },
        signals,
    };
    take_signals()?;
    let held = program::start(&order).map_err(|error| not_started(&args.program[0], &error))?;
    let (process, name) = (held.process, args.program[0].to_string_lossy().into_owned());
    let shared_pages = shares.map_or(0, crate::reach::SharedGlobals::pages);
    Ok(Started {
        held: Some(held),
        process,
        page: Some(page),
        globals: places,
        shared_pages,
        name,
        own_globals,
        saying,
        ..Started::default()
    })
}

/// Functions, and globals from the start, are seen by a library inside of the program.
fn takes_a_library(program: &OsString) -> Result<(), Failure> {
    let reason = inspect(program).and_then(|program| program.takes_a_library()).err();
    reason.map_or(Ok(()), |reason| {
        let (what, fix) = (format!("program {program:?}"), "watch tag or task, or -p when it runs");
        Err(Failure::new(Status::Failed, what, format!("it {reason}"), fix))
    })
}

pub(super) fn not_started(program: &OsString, error: &StartError) -> Failure {
    let what = format!("program {:?}", program.to_string_lossy());
    let fix = match error {
        StartError::NotFound | StartError::NoProgram => "name one that PATH has, or its file",
        StartError::Library(_) => "build all of Elfen, or name the folder in ELFEN_LIB",
        StartError::NotExecutable(_) | StartError::Io(_) => "check its file",
    };
    Failure::new(Status::Failed, what, error, fix)
}
