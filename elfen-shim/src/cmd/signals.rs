//! `elfen shim signals`: lists what can be watched of a program, and how.

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status};
use elfen_console::{output, table};
use elfen_instrument::inspect;
use elfen_kernel::task_map;
use serde::Serialize;

use super::count;
use super::numbers::globals_of;
use crate::reach;
use crate::symbols::{FunctionReporting, Global, GlobalKind, Layout, Symbols};

const EXAMPLES: &str = "\
Examples:
  elfen shim signals redis-server
  elfen shim signals redis-server --like stat
  sudo elfen shim signals -p 4242 --json | jq '.signals[].name'";

/// How to build a program whose functions report their entries and returns.
const FUNCTIONS: &str = "build it with -fpatchable-function-entry=43 and \
                         -mfunction-return=thunk-extern and link it with libelfen_return.a, or \
                         build it with -finstrument-functions";
/// How to make the functions report their returns too.
const RETURNS: &str = "build it with -mfunction-return=thunk-extern as well, and link it with \
                       libelfen_return.a";

/// The maximum number of rows of the table. JSON output has all rows.
const ROWS: usize = 40;

/// List what can be watched of a program, how it is read, and why the rest is not possible
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct SignalsArgs {
    /// A running process
    #[arg(short, long, value_name = "PID", conflicts_with = "program")]
    pid: Option<u32>,

    /// A program to start
    #[arg(required_unless_present = "pid")]
    program: Option<OsString>,

    /// Only signals whose name contains this; prints all of them
    #[arg(long, value_name = "TEXT")]
    like: Option<String>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct SignalList {
    signals: Vec<Row>,
    not: Vec<Unavailable>,
}

#[derive(Serialize)]
struct Row {
    name: String,
    source: &'static str,
    /// What a sample costs, or another remark.
    how: String,
}

/// A signal that cannot be watched.
#[derive(Debug, Serialize)]
pub struct Unavailable {
    pub what: &'static str,
    pub why: String,
}

pub(super) fn run(args: &SignalsArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let mut list = SignalList { signals: Vec::new(), not: Vec::new() };
    match task_map::open() {
        Ok(_) => list.add("task", "task-map", "the running task, in every sample"),
        Err(error) => list.add_unavailable("task", &error.to_string()),
    }
    match (args.pid, &args.program) {
        (Some(process), _) => list_process(process, &mut list)?,
        (None, Some(program)) => list_program(program, &mut list)?,
        (None, None) => unreachable!("clap requires one of them"),
    }
    if let Some(like) = &args.like {
        list.signals.retain(|row| row.name.contains(like));
    }
    let rows = if args.like.is_some() { usize::MAX } else { ROWS };
    output::print(out, args.json, &list, || list.text(rows))?;
    Ok(ExitCode::SUCCESS)
}

impl SignalList {
    fn add(&mut self, name: impl Into<String>, source: &'static str, how: &str) {
        self.signals.push(Row { name: name.into(), source, how: how.to_owned() });
    }

    fn add_unavailable(&mut self, what: &'static str, why: &str) {
        self.not.push(Unavailable { what, why: why.to_owned() });
    }

    fn text(&self, most: usize) -> String {
        let row = |row: &Row| vec![row.name.clone(), row.source.to_owned(), row.how.clone()];
        let rows: Vec<Vec<String>> = self.signals.iter().take(most).map(row).collect();
        let mut text = table::lines(&["signal", "source", "how"], &rows);
        if self.signals.len() > most {
            let more = self.signals.len() - most;
            text += &format!("and {more} more: --like TEXT filters them, --json lists all\n");
        }
        for Unavailable { what, why } in &self.not {
            text += &format!("not {what}: {why}\n");
        }
        text
    }

    fn add_globals(&mut self, globals: &[Global], source: &'static str, how: &str) {
        let writable = globals.iter().filter(|one| one.kind == GlobalKind::Writable);
        for global in writable {
            let fits = crate::signal_spec::Width::of_size(global.size).is_some();
            let bytes = if fits { String::new() } else { format!(", {} bytes", global.size) };
            self.add(global.name.clone(), source, &format!("{how}{bytes}"));
        }
    }

    fn add_build_features(&mut self, program: &Symbols) {
        match program.reporting {
            Some(FunctionReporting::Hooks) => {
                self.add("function", "entries+returns", "a hook call at each entry and return");
            }
            Some(FunctionReporting::EntriesAndReturns) => {
                self.add("function", "entries+returns", "some stores at each entry and return");
            }
            Some(FunctionReporting::Entries) => {
                let how = "some stores at each entry; callers' shares are too low";
                self.add("function", "entries", how);
                self.add_unavailable("returns of functions", RETURNS);
            }
            None => self.add_unavailable("function", FUNCTIONS),
        }
        if matches!(
            program.reporting,
            Some(FunctionReporting::Entries | FunctionReporting::EntriesAndReturns)
        ) {
            match count::missing_counters() {
                None => self.add("instructions, cycles", "entries", "of --count-at functions"),
                Some((why, _)) => self.add_unavailable("instructions, cycles", &why),
            }
        }
        if program.has_tags {
            self.add("tag", "source-tags", "one store per tag");
        } else {
            self.add_unavailable("tag", "call elfen_tag(\"parse\") of elfen_tag.h in its source");
        }
    }
}

/// A short list of the signals that can be watched of a program, for `elfen doctor`.
#[derive(Debug, Serialize)]
pub struct WatchableSignals {
    /// The names of signals. Globals are only counted.
    pub signals: Vec<String>,
    pub not: Vec<Unavailable>,
}

/// Lists the signals that can be watched of a program. `None` if the program is not found.
pub fn watchable_signals(name: &std::ffi::OsStr) -> Option<WatchableSignals> {
    let mut list = SignalList { signals: Vec::new(), not: Vec::new() };
    list_program(name, &mut list).ok()?;
    let (globals, others): (Vec<Row>, Vec<Row>) =
        list.signals.into_iter().partition(|row| row.source == "shared-at-start");
    let mut signals: Vec<String> = others.into_iter().map(|row| row.name).collect();
    if !globals.is_empty() {
        signals.push(format!("{} globals, by name", globals.len()));
    }
    Some(WatchableSignals { signals, not: list.not })
}

fn list_program(name: &std::ffi::OsStr, list: &mut SignalList) -> Result<(), Failure> {
    let file = reach::program_file(name).ok_or_else(|| {
        let fix = "name a program in PATH, or its file";
        Failure::new(Status::Failed, format!("program {name:?}"), "it is not found", fix)
    })?;
    let Some(symbols) = Symbols::read(&file, &file) else {
        let why = "it is not a 64-bit x86 program; if it is a script, name its interpreter";
        list.add_unavailable("globals", why);
        return Ok(());
    };
    list.add_build_features(&symbols);
    match inspect(name).and_then(|program| program.takes_a_library()) {
        Ok(()) => {
            let globals = reach::globals_of(&file);
            list.add_globals(&globals, "shared-at-start", "at most one cache line transfer");
        }
        Err(reason) => list.add_unavailable("globals", &format!("it {reason}")),
    }
    if symbols.globals.is_empty() {
        list.add_unavailable(
            "globals by name",
            "its symbols are stripped: install its debug symbols",
        );
    }
    Ok(())
}

fn list_process(process: u32, list: &mut SignalList) -> Result<(), Failure> {
    super::target::check_process(process)?;
    let mut layout = Layout::default();
    layout.update(process);
    if super::target::find_thread_page(process).is_some() {
        list.add("tag", "source-tags", "one store per tag");
        list.add("value", "source-tags", "one store per value");
    }
    if let Ok((_, counters)) = elfen_machine::hsperf::counters(process) {
        for counter in counters {
            list.add(format!("jvm:{}", counter.name), "mapped", "a load");
        }
    }
    for mapping in elfen_instrument::remote::mappings(process).unwrap_or_default() {
        if !mapping.private && mapping.writable && mapping.file.is_some() {
            let size = mapping.range.end - mapping.range.start;
            let how = format!("{size} bytes: {}", mapping.name);
            list.add(format!("map:{:#x}", mapping.range.start), "mapped", &how);
        }
    }
    let globals = globals_of(&layout);
    list.add_globals(&globals, "read", "a system call every 100 us");
    if globals.is_empty() {
        list.add_unavailable(
            "globals by name",
            "its symbols are stripped: install its debug symbols",
        );
    }
    Ok(())
}
