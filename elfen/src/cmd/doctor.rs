//! `elfen doctor`: reports which parts of Elfen can run on this machine, and why others cannot.

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status as Exit};
use elfen_console::paragraph::wrap;
use elfen_instrument::{CheckMethod, Compiler, Reason, inspect};
use elfen_machine::doctor::{self, Check, Group, Machine, Status, Verdict};
use elfen_machine::lane_args::{LaneArgs, not_a_recording, source, topology};
use elfen_shim::cmd::{WatchableSignals, watchable_signals};
use serde::Serialize;

const COMMAND: &str = "elfen doctor";
const AFTER: &str = "\
The first line says whether borrow-idle can run on this machine. Problems follow, each with a fix. \
Each check is yes, no or warn; under conflicts, yes means that there is no conflict. Exit status: \
0 if borrow-idle can run, 3 if not.

Examples:
  elfen doctor                            for this user
  elfen doctor --all                      every check, with its reason
  sudo elfen doctor --lanes 0:1           for root, with a pair given by hand
  elfen doctor --json | jq -r '.checks[] | select(.status == \"no\") | .fix'
  elfen doctor --dump-machine > machine   record this machine, for a report
  sudo elfen doctor -- python3            the checks that a program would get";

/// Check which parts of Elfen can run on this machine, and what the other parts require
///
/// Tries each operation once and undoes it: attaches the sched_switch program and detaches it,
/// makes a segment of shared memory and removes it, opens a hardware counter and closes it.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    lanes: LaneArgs,

    /// Explain every check
    #[arg(long)]
    all: bool,

    /// Print one JSON object; `fix` is empty if nothing needs to be fixed
    #[arg(long)]
    json: bool,

    /// Print what was read and tried instead of the report, one `NAME: RESULT` a line
    #[arg(long, conflicts_with = "json")]
    dump_machine: bool,

    /// Read a machine that --dump-machine recorded instead of this one; for tests and reports
    #[arg(long, value_name = "FILE", env = "ELFEN_MACHINE", hide = true)]
    machine: Option<PathBuf>,

    /// A program: which checks `elfen run` would give it, why no cheaper ones, and which signals of
    /// it `elfen shim` could watch
    #[arg(last = true, value_name = "PROGRAM", conflicts_with = "dump_machine")]
    program: Option<OsString>,
}

pub(crate) fn run(args: &DoctorArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let source = source(args.machine.as_deref(), COMMAND)?;
    let topology = topology(&source)?;
    let lanes = args.lanes.resolve(&topology)?;
    let machine = Machine {
        source: &source,
        topology: &topology,
        lanes: &lanes,
        by_hand: args.lanes.by_hand(),
    };
    let checks = doctor::examine(&machine).map_err(|error| not_a_recording(COMMAND, &error))?;
    let verdict = Verdict::of(&checks);
    if args.dump_machine {
        out.write_all(source.recording().as_bytes()).map_err(Failure::output)?;
        return Ok(ExitCode::SUCCESS);
    }
    let colours = elfen_console::output::colours();
    let program =
        args.program.as_deref().map(|name| ProgramReport::of(name, &checks)).transpose()?;
    let program = program.as_ref();
    let report = DoctorReport { ok: verdict.ok(), verdict: &verdict, checks: &checks, program };
    elfen_console::output::print(out, args.json, &report, || {
        text(&checks, &verdict, args.all, colours)
            + &program.map(ProgramReport::text).unwrap_or_default()
    })?;
    Ok(ExitCode::from(if verdict.ok() { 0 } else { Exit::Unsupported as u8 }))
}

/// The content of `--json`. The table has the same content.
#[derive(Serialize)]
struct DoctorReport<'a> {
    ok: bool,
    #[serde(flatten)]
    verdict: &'a Verdict,
    checks: &'a [Check],
    /// The checks and signals of the program that the arguments name.
    #[serde(skip_serializing_if = "Option::is_none")]
    program: Option<&'a ProgramReport>,
}

/// The checks that `elfen run` would give a program.
#[derive(Serialize)]
struct ProgramReport {
    program: String,
    checks: &'static str,
    /// Cheaper checks, each with the reason why the program does not allow them.
    not: Vec<Not>,
    /// The code that live checks leave to the guard: code that the program generates.
    #[serde(skip_serializing_if = "Option::is_none")]
    left_to_guard: Option<&'static str>,
    /// The signals of the program that `elfen shim` could watch.
    #[serde(skip_serializing_if = "Option::is_none")]
    shim: Option<WatchableSignals>,
}

#[derive(Serialize)]
struct Not {
    checks: &'static str,
    why: String,
}

impl ProgramReport {
    fn of(name: &OsStr, checks: &[Check]) -> Result<Self, Failure> {
        let program = name.to_string_lossy().into_owned();
        let file = inspect(name).map_err(|reason| {
            let fix = "name a program in PATH, or its file";
            let why = match reason {
                Reason::NotFound => reason.to_string(),
                reason => format!("it {reason}"),
            };
            Failure::new(Exit::Failed, format!("program {program:?}"), why, fix)
        })?;
        let live = checks.iter().find(|check| check.name == "checks-live");
        let live = live.map(|check| &check.finding).filter(|live| live.status != Status::Yes);
        let mut report = Self {
            program,
            checks: CheckMethod::Guard.name(),
            not: Vec::new(),
            left_to_guard: None,
            shim: watchable_signals(name),
        };
        for checks in CheckMethod::BEST_FIRST {
            let why = match (file.allows(checks), live.filter(|_| checks == CheckMethod::Live)) {
                (Err(reason), _) => format!("it {reason}"),
                (Ok(_), Some(live)) => live.why.clone(),
                (Ok(_), None) => {
                    report.checks = checks.name();
                    let compiler = file.compiles().filter(|_| checks == CheckMethod::Live);
                    report.left_to_guard = compiler.map(left_of);
                    break;
                }
            };
            report.not.push(Not { checks: checks.name(), why });
        }
        Ok(report)
    }

    fn text(&self) -> String {
        let row = |label: &str, what: &str| {
            let beside = wrap(what, COLUMNS - 16).join(&format!("\n{:16}", ""));
            format!("  {label:12}  {beside}\n")
        };
        let not = |what: &str, why: &str| row(&format!("not {what}"), why);
        let mut text = format!("\nelfen run -- {}: checks {}\n", self.program, self.checks);
        text.extend(self.not.iter().map(|Not { checks, why }| not(checks, why)));
        text.extend(self.left_to_guard.map(|left| row("but", left)));
        if let Some(shim) = &self.shim {
            let seen = if shim.signals.is_empty() { "-".into() } else { shim.signals.join(", ") };
            text += &format!("\nelfen shim -- {}: {seen}\n", self.program);
            text.extend(shim.not.iter().map(|unavailable| not(unavailable.what, &unavailable.why)));
        }
        text
    }
}

fn left_of(compiler: Compiler) -> &'static str {
    match compiler {
        Compiler::HotSpot => {
            "what HotSpot interprets is left to the guard; methods that it has compiled get checks \
             as native code does"
        }
        Compiler::V8 => "the code that V8 makes of JavaScript is left to the guard",
    }
}

const COLUMNS: usize = 100;
const STATUS_COLUMNS: usize = 4;

/// The report as text: the verdict, and what a user has to know, or all checks.
fn text(checks: &[Check], verdict: &Verdict, all: bool, colours: bool) -> String {
    let is_shown = |check: &&Check| all || verdict.is_problem(check);
    let shown: Vec<&Check> = checks.iter().filter(is_shown).collect();
    let mut text = verdict_line(verdict, &shown);
    if !shown.is_empty() {
        text += "\n";
        text += &explained(&shown, colours);
    }
    if !all {
        text += "\n";
        text += &counts(checks, verdict);
    }
    text
}

/// A heading for each group, and reason and fix next to each name.
fn explained(checks: &[&Check], colours: bool) -> String {
    let names = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    let indent = 2 + STATUS_COLUMNS + 2 + names + 2;
    let mut text = String::new();
    let mut group = None;
    for Check { group: own, name, finding, .. } in checks {
        if group != Some(own) {
            let gap = if group.is_some() { "\n" } else { "" };
            text +=
                &format!("{gap}{}\n", painted(colours, "1", &format!("{own:?}").to_uppercase()));
            group = Some(own);
        }
        let status = painted_status(colours, finding.status);
        let mut beside = wrap(&finding.why, COLUMNS - indent);
        let fix = wrap(&finding.fix, COLUMNS - indent - 2).into_iter().zip(1..);
        beside.extend(fix.map(|(line, at)| format!("{} {line}", if at == 1 { ">" } else { " " })));
        let margin = format!("\n{:indent$}", "");
        text += &format!("  {status}  {name:names$}  {}\n", beside.join(&margin));
    }
    text
}

/// The names of the other checks that do not work, and how many checks work.
fn counts(checks: &[Check], verdict: &Verdict) -> String {
    let hidden = |check: &&Check| !verdict.is_problem(check);
    let absent = |check: &&Check| check.finding.status != Status::Yes;
    let absent: Vec<&str> =
        checks.iter().filter(hidden).filter(absent).map(|check| check.name).collect();
    let works = checks.iter().filter(|check| check.finding.status == Status::Yes).count();
    let mut text = String::new();
    if !absent.is_empty() {
        let lines = wrap(&absent.join(", "), COLUMNS - 16).join(&format!("\n{:15}", ""));
        text += &format!("not available: {lines}\n");
    }
    text + &format!("{works} of {} checks work; elfen doctor --all explains each\n", checks.len())
}

fn verdict_line(verdict: &Verdict, shown: &[&Check]) -> String {
    let Verdict { missing, next, only } = verdict;
    if !verdict.ok() {
        let missing = listed(missing);
        return format!("borrow-idle cannot run here: it requires {missing}; next: {next}\n");
    }
    let only: String = only.iter().map(|only| format!(", {only}")).collect();
    let warns = |check: &&&Check| {
        // A warning about an observer (Shim, Tailor, profiler) does not affect batches.
        let observes = matches!(check.group, Group::Shim | Group::Tailor | Group::Profile);
        check.finding.status == Status::Warn && !observes
    };
    let warnings = shown.iter().filter(warns).count();
    match warnings {
        0 => format!("borrow-idle can run here{only}\n"),
        _ => format!("borrow-idle can run here{only}; warnings: {warnings}\n"),
    }
}

/// Joins items as in `a, b and c`.
pub(super) fn listed(items: &[impl AsRef<str>]) -> String {
    let items: Vec<&str> = items.iter().map(AsRef::as_ref).collect();
    match items.as_slice() {
        [first @ .., before, last] => {
            [first, &[&format!("{before} and {last}")]].concat().join(", ")
        }
        items => items.concat(),
    }
}

/// The text in a colour, if colours are used.
fn painted(colours: bool, code: &str, text: &str) -> String {
    if colours { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_owned() }
}

fn painted_status(colours: bool, status: Status) -> String {
    let (code, word) = match status {
        Status::Yes => ("32", "yes"),
        Status::No => ("31", "no"),
        Status::Warn => ("33", "warn"),
    };
    painted(colours, code, &format!("{word:STATUS_COLUMNS$}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: without their escapes, coloured texts equal plain texts. Method: each status, coloured
    /// and plain.
    #[test]
    fn colours_leave_the_words_alone() {
        for status in [Status::Yes, Status::No, Status::Warn] {
            let [painted, plain] = [true, false].map(|colours| painted_status(colours, status));
            let (_, rest) = painted.split_once('m').expect("an escape before");
            assert_eq!(rest.strip_suffix("\u{1b}[0m"), Some(plain.as_str()));
            assert_eq!(plain.len(), STATUS_COLUMNS);
        }
    }
}
