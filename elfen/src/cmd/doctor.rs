//! `elfen doctor`: reports which parts of Elfen can run on this machine, and why others cannot.
//!
//! `elfen_machine::doctor` does the checks; this file prints them, and adds how a named program
//! would be checked.

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use elfen_console::failure::{Failure, Status as Exit};
use elfen_console::paragraph::wrap;
use elfen_instrument::{Compiler, Inject, Reason, inspect};
use elfen_machine::doctor::answers::Answers;
use elfen_machine::doctor::probe::{self, Trial};
use elfen_machine::doctor::verdict::Verdict;
use elfen_machine::doctor::{self, Check, Group, Machine, Status};
use elfen_machine::lane_args::{LaneArgs, not_a_recording, source, topology};
use elfen_machine::lanes::Lanes;
use elfen_machine::topology::Topology;
use elfen_shim::cmd::{WatchableSignals, watchable_signals};
use serde::Serialize;

const COMMAND: &str = "elfen doctor";
const AFTER: &str = "\
Each line says yes, no or warn. Under conflicts, yes means that there is no conflict. The last \
line says whether borrow-idle can run here. Exit status: 0 if it can, 3 if not.

Examples:
  elfen doctor                      what can run here, as this user
  sudo elfen doctor --lanes 0:1     as root, with a pair given by hand
  elfen doctor --json | jq -r '.checks[] | select(.status == \"no\") | .fix'
  elfen doctor --record > machine   what was read and tried, for a bug report
  sudo elfen doctor -- python3      how a program would be checked";

/// Report which parts of Elfen can run on this machine, and how to enable the others
///
/// Where possible it tries the mechanism: it attaches the sched_switch program and detaches it,
/// makes a segment of shared memory and removes it, opens a hardware counter and closes it.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    #[command(flatten)]
    lanes: LaneArgs,

    /// Print one JSON object; `fix` is empty where there is nothing to fix
    #[arg(long)]
    json: bool,

    /// Instead of the report, print what was read and what the kernel answered, as lines
    /// `PATH: CONTENT`
    #[arg(long, conflicts_with = "json")]
    record: bool,

    /// Examine a machine that --record wrote instead of this one; for tests and bug reports
    #[arg(long, value_name = "FILE", env = "ELFEN_MACHINE", hide = true)]
    machine: Option<PathBuf>,

    /// Also report how `elfen run` would check this program, why not in a cheaper way, and what
    /// `elfen shim` could observe of it
    #[arg(last = true, value_name = "PROGRAM", conflicts_with = "record")]
    program: Option<OsString>,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let source = source(args.machine.as_deref(), COMMAND)?;
    let topology = topology(&source)?;
    let lanes = args.lanes.resolve(&topology)?;
    let answers = match args.machine {
        Some(_) => Answers::recorded(&source).map_err(|error| not_a_recording(COMMAND, &error))?,
        None => query_kernel(&lanes, &topology),
    };
    let by_hand = args.lanes.by_hand();
    let (source, topology, lanes) = (&source, &topology, &lanes);
    let machine = Machine { source, topology, lanes, by_hand, answers: &answers };
    let checks = doctor::examine(&machine);
    let verdict = Verdict::of(&checks);
    if args.record {
        let answers = answers.recording().map_err(|error| Failure::output(error.into()))?;
        let read = source.recording();
        // A recording already contains the answers among its lines.
        let text = if args.machine.is_some() { read } else { read + &answers };
        out.write_all(text.as_bytes()).map_err(Failure::output)?;
        return Ok(ExitCode::SUCCESS);
    }
    let paint = Paint { on: elfen_console::output::colours() };
    let program =
        args.program.as_deref().map(|name| ProgramReport::new(name, &checks)).transpose()?;
    let program = program.as_ref();
    let report = Report { ok: verdict.ok(), verdict: &verdict, checks: &checks, program };
    elfen_console::output::print(out, args.json, &report, || {
        text(&checks, &verdict, paint) + &program.map(ProgramReport::text).unwrap_or_default()
    })?;
    Ok(ExitCode::from(if verdict.ok() { 0 } else { Exit::Unsupported as u8 }))
}

/// Tries on this kernel what cannot be read from files.
pub(super) fn query_kernel(lanes: &Lanes, topology: &Topology) -> Answers {
    probe::query_kernel(choose_trial(lanes, topology))
}

/// Without a pair, the trial uses any CPU.
fn choose_trial(lanes: &Lanes, topology: &Topology) -> Trial {
    let first = lanes.pairs.first().map(|pair| pair.request);
    let cpu = first.or_else(|| topology.usable.iter().next()).unwrap_or(0);
    let request_lanes = u32::try_from(lanes.pairs.len()).unwrap_or(u32::MAX).max(1);
    Trial { cpu, request_lanes }
}

/// The content of `--json`, and of the text.
#[derive(Serialize)]
struct Report<'a> {
    ok: bool,
    #[serde(flatten)]
    verdict: &'a Verdict,
    checks: &'a [Check],
    /// Only if the command line names a program.
    #[serde(skip_serializing_if = "Option::is_none")]
    program: Option<&'a ProgramReport>,
}

/// How a program would be checked.
#[derive(Serialize)]
struct ProgramReport {
    program: String,
    inject: &'static str,
    /// Cheaper injections that the program does not allow.
    not: Vec<RuledOut>,
    /// Code without live checks: the code that the program itself generates.
    #[serde(skip_serializing_if = "Option::is_none")]
    left_to_guard: Option<&'static str>,
    /// What `elfen shim` could observe of the program.
    #[serde(skip_serializing_if = "Option::is_none")]
    shim: Option<WatchableSignals>,
}

#[derive(Serialize)]
struct RuledOut {
    inject: &'static str,
    why: String,
}

impl ProgramReport {
    fn new(name: &OsStr, checks: &[Check]) -> Result<Self, Failure> {
        let program = name.to_string_lossy().into_owned();
        let file = inspect(name).map_err(|reason| {
            let fix = "name a program in PATH, or its file";
            let why = match reason {
                Reason::NotFound => reason.to_string(),
                reason => format!("it {reason}"),
            };
            Failure::new(Exit::Usage, format!("program {program:?}"), why, fix)
        })?;
        let live = checks.iter().find(|check| check.name == "inject-live");
        let no_live = live.map(|check| &check.finding).filter(|live| live.status != Status::Yes);
        let mut not = Vec::new();
        for inject in Inject::BEST_FIRST {
            let why = match file.allows(inject) {
                Err(reason) => format!("it {reason}"),
                Ok(_) => match no_live.filter(|_| inject == Inject::Live) {
                    Some(live) => live.why.clone(),
                    None => {
                        let left_to_guard = match (inject, file.compiles()) {
                            (Inject::Live, Some(compiler)) => Some(left_to_guard(compiler)),
                            _ => None,
                        };
                        let (inject, shim) = (inject.name(), watchable_signals(name));
                        return Ok(Self { program, inject, not, left_to_guard, shim });
                    }
                },
            };
            not.push(RuledOut { inject: inject.name(), why });
        }
        let (inject, shim) = (Inject::Guard.name(), watchable_signals(name));
        Ok(Self { program, inject, not, left_to_guard: None, shim })
    }

    fn text(&self) -> String {
        let mut text = format!("\nelfen run -- {}: inject {}\n", self.program, self.inject);
        let indented = |why: &str| wrap(why, COLUMNS - 16).join(&format!("\n{:16}", ""));
        for RuledOut { inject, why } in &self.not {
            text += &format!("  not {inject:8}  {}\n", indented(why));
        }
        if let Some(left) = self.left_to_guard {
            text += &format!("  but           {}\n", indented(left));
        }
        let Some(shim) = &self.shim else { return text };
        let seen = if shim.signals.is_empty() { "-".into() } else { shim.signals.join(", ") };
        text += &format!("\nelfen shim -- {}: {seen}\n", self.program);
        for elfen_shim::cmd::Unavailable { what, why } in &shim.not {
            text += &format!("  not {what:8}  {}\n", indented(why));
        }
        text
    }
}

fn left_to_guard(compiler: Compiler) -> &'static str {
    match compiler {
        Compiler::HotSpot => {
            "methods that HotSpot interprets are left to the guard; methods that it has compiled \
             get checks as native code does"
        }
        Compiler::V8 => "the code that V8 generates from JavaScript is left to the guard",
    }
}

const COLUMNS: usize = 100;
const STATUS_COLUMNS: usize = 4;

/// The report as text: a heading for each group; for each check its name, reason and fix.
fn text(checks: &[Check], verdict: &Verdict, paint: Paint) -> String {
    let names = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    let indent = 2 + STATUS_COLUMNS + 2 + names + 2;
    let mut text = String::new();
    let mut group = None;
    for Check { group: own, name, finding, .. } in checks {
        if group != Some(own) {
            let gap = if group.is_some() { "\n" } else { "" };
            text += &format!("{gap}{}\n", paint.heading(heading(*own)));
            group = Some(own);
        }
        let status = paint.status(finding.status);
        let why = wrap(&finding.why, COLUMNS - indent);
        let fix = if finding.fix.is_empty() { Vec::new() } else { fix_lines(finding, indent) };
        let lines = why.into_iter().chain(fix).collect::<Vec<_>>();
        let margin = format!("\n{:indent$}", "");
        text += &format!("  {status}  {name:names$}  {}\n", lines.join(&margin));
    }
    text + "\n" + &last_line(verdict, checks)
}

fn fix_lines(finding: &doctor::Finding, indent: usize) -> Vec<String> {
    let mut lines = wrap(&finding.fix, COLUMNS - indent - 2);
    for (number, line) in lines.iter_mut().enumerate() {
        line.insert_str(0, if number == 0 { "> " } else { "  " });
    }
    lines
}

fn last_line(verdict: &Verdict, checks: &[Check]) -> String {
    let Verdict { missing, next, only } = verdict;
    if !verdict.ok() {
        return format!(
            "borrow-idle cannot run here without {}; next: {next}\n",
            join_words(missing)
        );
    }
    let only: String = only.iter().map(|only| format!(", {only}")).collect();
    let warns = |check: &&Check| {
        // A batch needs nothing of `elfen shim` and `elfen tailor`.
        check.finding.status == Status::Warn && !matches!(check.group, Group::Shim | Group::Tailor)
    };
    let warnings = checks.iter().filter(warns).count();
    match warnings {
        0 => format!("borrow-idle can run here{only}\n"),
        _ => format!("borrow-idle can run here{only}; warnings: {warnings}\n"),
    }
}

/// Joins words as in `a, b and c`.
pub(super) fn join_words(items: &[&str]) -> String {
    match items {
        [] => String::new(),
        [only] => (*only).to_owned(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}

fn heading(group: Group) -> &'static str {
    match group {
        Group::Lanes => "LANES",
        Group::Signals => "SIGNALS",
        Group::Naps => "NAPS",
        Group::Injection => "INJECTION",
        Group::Fences => "FENCES",
        Group::Shim => "SHIM",
        Group::Tailor => "TAILOR",
        Group::Conflicts => "CONFLICTS",
    }
}

#[derive(Clone, Copy)]
struct Paint {
    on: bool,
}

impl Paint {
    fn heading(self, text: &str) -> String {
        self.with("1", text)
    }

    fn status(self, status: Status) -> String {
        let (code, word) = match status {
            Status::Yes => ("32", "yes"),
            Status::No => ("31", "no"),
            Status::Warn => ("33", "warn"),
        };
        self.with(code, &format!("{word:STATUS_COLUMNS$}"))
    }

    fn with(self, code: &str, text: &str) -> String {
        if self.on { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: colours do not change the text. Method: the same words painted and plain, without the
    /// escapes.
    #[test]
    fn colours_leave_the_text_unchanged() {
        for status in [Status::Yes, Status::No, Status::Warn] {
            let [painted, plain] = [true, false].map(|on| Paint { on }.status(status));
            let (_, rest) = painted.split_once('m').expect("an escape before");
            assert_eq!(rest.strip_suffix("\u{1b}[0m"), Some(plain.as_str()));
            assert_eq!(plain.len(), STATUS_COLUMNS);
        }
    }
}
