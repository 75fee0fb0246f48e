//! The observed program of a run: a process that this command starts, or one that already runs.
//! Also opens or creates the page in which the program's threads publish their state.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::process::Child;

use elfen_console::failure::{Failure, Status};
use elfen_console::terminal::Screen;
use elfen_instrument::inspect;
use elfen_instrument::process::name_of;
use elfen_instrument::remote::mappings;
use elfen_kernel::task_map;
use elfen_rt::memory::{Access, Memory};
use elfen_rt::process::pid_namespace;
use elfen_rt::signal::page::Page;
use elfen_rt::signal::task::TaskMap;
use elfen_rt::signal::thread::{THREADS, ThreadSlot};

use super::args::ObserveArgs;
use super::count;
use super::lane_choice::LaneChoice;
use super::numbers::{Globals, share_at_start, share_running};
use super::recording_file::RecordingFile;
use super::suggestions::own_globals;
use super::wait::block_signals;
use crate::clock::Clock;
use crate::program::{self, PendingProgram, StartError, StartOptions};
use crate::reach::PageSupervisor;
use crate::signal_spec::SignalSpec;
use crate::symbols::{FunctionReporting, Layout, Symbols};

/// A run of the command, from its preparation to its end.
pub(super) struct Run<'a> {
    pub(super) args: &'a ObserveArgs,
    pub(super) file: Option<RecordingFile<'a>>,
    pub(super) lanes: LaneChoice,
    pub(super) clock: Clock,
    /// The round trip of a line in ticks, if it could be measured.
    pub(super) round_trip: Option<u64>,
    /// The task map, or the reason why it is missing.
    pub(super) map: Result<&'static TaskMap, String>,
    pub(super) layout: Layout,
    pub(super) target: Target,
    pub(super) screen: Option<Screen>,
    /// The program's output, if this command draws on the terminal.
    pub(super) output: Option<File>,
}

/// The observed program, and what is known about it.
#[derive(Default)]
pub(super) struct Target {
    /// Its process, which waits until the observers run.
    pub(super) pending: Option<PendingProgram>,
    pub(super) child: Option<Child>,
    /// The supervisor of pages that are shared during the run.
    pub(super) supervisor: Option<PageSupervisor>,
    pub(super) process: u32,
    pub(super) page: Option<&'static Page<ThreadSlot>>,
    /// Numbers whose pages are shared.
    pub(super) globals: Globals,
    /// The number of pages of globals that the program shares from its start.
    pub(super) shared_pages: u64,
    pub(super) name: String,
    /// Names of some of its globals.
    pub(super) own_globals: Vec<String>,
    /// How its functions report that they run.
    pub(super) reporting: Option<FunctionReporting>,
}

/// Creates a file without a name for the program's output, which is printed at the end.
pub(super) fn create_output_file() -> Result<File, Failure> {
    let mut options = File::options();
    let options = options.read(true).write(true).custom_flags(libc::O_TMPFILE | libc::O_APPEND);
    options.mode(0o600).open(std::env::temp_dir()).map_err(|error| {
        let fix = "set TMPDIR to a folder that this user can write to";
        Failure::new(Status::Failed, "a file for the program's output", error, fix)
    })
}

/// Prepares the program to start, or finds the running process. `output` is a file for the output
/// of a program without a terminal.
pub(super) fn prepare_target(
    args: &ObserveArgs,
    chosen: &LaneChoice,
    layout: &mut Layout,
    output: Option<&File>,
    signals: nix::sys::signal::SigSet,
) -> Result<Target, Failure> {
    if args.program.is_empty() {
        let process = args.pid.unwrap_or(0);
        if process != 0 {
            layout.update(process);
        }
        let page = find_thread_page(process);
        let name = match args.pid {
            Some(process) => name_of(process).unwrap_or_default(),
            None => "all tasks".to_owned(),
        };
        let (globals, supervisor) = if args.share {
            let lanes = chosen.on.iter().chain(chosen.from.iter()).collect();
            let (globals, supervisor) = share_running(args, process, layout, &lanes)?;
            (globals, Some(supervisor))
        } else {
            (Vec::new(), None)
        };
        return Ok(Target { supervisor, process, page, globals, name, ..Target::default() });
    }
    let page = create_thread_page()?;
    let file = crate::reach::program_file(&args.program[0]);
    let symbols = file.as_deref().and_then(|file| Symbols::read(file, file));
    let (places, shared) = match &file {
        Some(file) => share_at_start(args, file)?,
        None => (Vec::new(), None),
    };
    let counted = match &file {
        Some(file) => count::preload_argument(&args.count_at, file, symbols.as_ref())?,
        None => String::new(),
    };
    let own_globals = own_globals(symbols.as_ref());
    let shares = shared.as_ref().filter(|shared| !shared.is_empty());
    let reporting =
        symbols.and_then(|symbols| symbols.reporting).filter(|_| args.wants_functions());
    let library = check_preload(&args.program[0]);
    // If the preload library cannot be loaded, functions that the user did not name are left out.
    let reporting = match (&library, reporting) {
        (Err(_), Some(_)) if !args.watch.contains(&SignalSpec::Function) && counted.is_empty() => {
            None
        }
        (_, reporting) => reporting,
    };
    if reporting.is_some() || shares.is_some() {
        library?;
    }
    let functions = match reporting {
        None => "-",
        Some(FunctionReporting::Hooks) => "hooks",
        Some(FunctionReporting::Entries | FunctionReporting::EntriesAndReturns) => "entries",
    };
    let preload = (reporting.is_some() || shares.is_some()).then(|| {
        let globals = shares.map(crate::reach::SharedGlobals::preload_argument);
        format!("{functions}{counted} {}", globals.as_deref().unwrap_or("-"))
    });
    let order = StartOptions {
        words: &args.program,
        on: &chosen.on,
        segment: page.memory().segment_id().unwrap_or(-1),
        preload,
        output: match output {
            Some(file) => program::Output::File(file),
            None if args.json => program::Output::Errors,
            None => program::Output::Ours,
        },
        signals,
    };
    block_signals()?;
    let pending =
        program::spawn_pending(&order).map_err(|error| start_failure(&args.program[0], &error))?;
    let (process, name) = (pending.process, args.program[0].to_string_lossy().into_owned());
    let shared_pages = shares.map_or(0, crate::reach::SharedGlobals::pages);
    Ok(Target {
        pending: Some(pending),
        process,
        page: Some(page),
        globals: places,
        shared_pages,
        name,
        own_globals,
        reporting,
        ..Target::default()
    })
}

/// Refuses a program that loads no preload library. That library reports functions and shares
/// globals.
fn check_preload(program: &OsString) -> Result<(), Failure> {
    let reason = inspect(program).and_then(|program| program.takes_a_library()).err();
    reason.map_or(Ok(()), |reason| {
        let fix = "watch tag or task, or name it with -p when it runs";
        let what = format!("program {program:?}");
        Err(Failure::new(Status::Failed, what, format!("it {reason}"), fix))
    })
}

pub(super) fn start_failure(program: &OsString, error: &StartError) -> Failure {
    let what = format!("program {:?}", program.to_string_lossy());
    let fix = match error {
        StartError::NotFound | StartError::NoProgram => "name a program in PATH, or its file",
        StartError::Library(_) => "build all of Elfen, or set ELFEN_LIB to the library's folder",
        StartError::NotExecutable(_) | StartError::Io(_) => "check its file",
    };
    Failure::new(Status::Failed, what, error, fix)
}

/// Refuses a process that cannot be observed.
pub(super) fn check_process(process: u32) -> Result<(), Failure> {
    let what = format!("process {process}");
    let fail = |status, why: &str, fix: &str| Err(Failure::new(status, &what, why, fix));
    if process == std::process::id() {
        return fail(Status::Usage, "it is this command itself", "name another process");
    }
    if process == 0 || elfen_machine::process::stat(process).is_none() {
        return fail(Status::Failed, "it does not exist", "find its id with `ps`");
    }
    if program::is_of_kernel(process) {
        return fail(Status::Failed, "it is a kernel thread", "name the process of a program");
    }
    match mappings(process) {
        Ok(_) => Ok(()),
        Err(error) => {
            let why = format!("this user may not read its memory: {error}");
            // SAFETY: geteuid takes no arguments.
            let fix = match unsafe { libc::geteuid() } {
                0 => "give this container CAP_SYS_PTRACE, or run it outside",
                _ => "run this as the user of the process, or as root",
            };
            fail(Status::Failed, &why, fix)
        }
    }
}

/// Finds the page that a running process has created for its threads.
pub(super) fn find_thread_page(process: u32) -> Option<&'static Page<ThreadSlot>> {
    let all = mappings(process).ok()?;
    let segments = all.iter().filter(|mapping| mapping.name.starts_with("/SYSV"));
    let mut pages = segments.filter_map(|mapping| {
        let id = i32::try_from(mapping.file.as_ref()?.1).ok()?;
        Page::<ThreadSlot>::open(Memory::attach_id(id, Access::Read).ok()?).ok()
    });
    pages.next().map(|page| &*Box::leak(Box::new(page)))
}

/// Creates the page for the threads of a program to start. Its segment has no name, so it is freed
/// with the last process that maps it.
fn create_thread_page() -> Result<&'static Page<ThreadSlot>, Failure> {
    let failed = |error: &dyn std::fmt::Display| {
        Failure::new(Status::Failed, "memory for threads", error, "see `ipcs -l` for the limits")
    };
    let bytes = Page::<ThreadSlot>::bytes(THREADS);
    let memory = Memory::create_segment(libc::IPC_PRIVATE, bytes, 0o600);
    let memory = memory.map_err(|error| failed(&error))?;
    memory.remove_name().map_err(|error| failed(&error))?;
    let page = Page::format(memory, THREADS, pid_namespace(), &[0; 32]);
    Ok(Box::leak(Box::new(page.map_err(|error| failed(&error))?)))
}

/// Opens the task map, if this user may.
pub(super) fn open_task_map() -> Result<&'static TaskMap, String> {
    match task_map::open() {
        Ok((map, _)) => Ok(Box::leak(Box::new(map))),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_that_cannot_be_observed_are_refused() {
        let why = |process| check_process(process).unwrap_err().to_string();
        assert!(why(std::process::id()).contains("this command itself"));
        assert!(why(u32::MAX >> 2).contains("does not exist"));
    }
}
