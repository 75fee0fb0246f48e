//! `elfen lab bench check`: what a check costs, for each way to put it into a program. Baseline:
//! the same program without checks.
//!
//! The benchmark builds the programs on this machine, as users build theirs. They run as the batch
//! of a run whose request lane is always idle, according to the page of a service. No other process
//! knows that service. So this measures the fast path.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::Ordering::Relaxed;

use elfen_console::duration::number;
use elfen_console::failure::{Failure, Status};
use elfen_machine::affinity;
use elfen_rt::inherit::Inherited;
use elfen_rt::memory::Memory;
use elfen_rt::service::Service;
use elfen_rt::signal::control::{ControlSlot, Settings};
use elfen_rt::signal::lane::{LaneSlot, LaneState};
use elfen_rt::signal::page::{Page, SLOTS_MAX};

use super::program::Sources;
use super::{
    BenchError, BenchReport, Column, Explain, Part, Progress, case, label, measure, metric,
    number as figure, private_page, rounded, row, runs, with_baseline,
};

const EXAMPLES: &str = "\
Examples:
  elfen lab bench check              every kind, on the last CPU of this process
  elfen lab bench check --cpu 3 --json | jq '.checks[] | {program, kind}'

The benchmark builds its programs with cc and requires no privileges. A slowdown of 1.2 means 20 % \
more time than without checks. The hooks of a kind `X-return` return immediately, which shows the \
part of the call in the cost of `X`.";

/// Measure the cost of a check
///
/// Small C programs, built with each kind of check and without checks, run in turn on one CPU next
/// to an idle request lane.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct BenchCheckArgs {
    /// The CPU to measure on
    #[arg(long, value_name = "CPU")]
    cpu: Option<u32>,

    /// Number of rounds; each round runs every kind
    #[arg(long, value_name = "N", default_value_t = 25, value_parser = runs())]
    runs: usize,
}

pub(crate) fn run(
    args: &BenchCheckArgs,
    progress: Progress<'_>,
) -> Result<BenchReport, BenchError> {
    let cpu = cpu(args)?;
    let library = elfen_instrument::find_library()?;
    let sources = Sources::new(&FILES);
    let sources = sources.explain("a folder to build in", "set TMPDIR to another folder")?;
    let mut builds = vec![Build::new(&sources, &PLAIN)?];
    let mut report = BenchReport { about: row!["cpu" => cpu], ..BenchReport::default() };
    let counting = Build::new(&sources, &COUNTING)?;
    for kind in &KINDS {
        match Build::of(&sources, kind)? {
            Ok(build) => builds.push(build),
            Err(message) => report.left_out.push(format!("{}: {message}", kind.name)),
        }
    }
    let run = Run::new(cpu, library, build_returning(&sources)?)?;
    for program in PROGRAMS {
        let calls = counting.run(&run, program)?.checks;
        let expected = builds[0].run(&run, program)?.computed;
        let added = match program {
            COUNTED => added_instructions(&builds, &run, program, calls),
            _ => Ok(vec![None; builds.len()]),
        };
        let added = added.unwrap_or_else(|why| {
            report.left_out.push(format!("instructions: {why}"));
            vec![None; builds.len()]
        });
        let labels = |(build, added): (&Build, Option<f64>)| {
            case(row![
                "program" => program,
                "kind" => build.kind.name,
                "added_instructions_per_call" => added,
                "what" => build.kind.what,
            ])
        };
        let cases = with_baseline(builds.iter().zip(added).map(labels).collect());
        let mut table =
            measure(("checks", CHECKS), &cases, args.runs, progress, |case, _, values| {
                let printed = builds[case].run(&run, program)?;
                if printed.computed != expected {
                    let what = format!("it computed {:?}, not {expected:?}", printed.computed);
                    return Err(builds[case].failed(program, what));
                }
                values.add("ns_per_call", number(printed.best_ns) / number(calls));
                Ok(())
            })?;
        // The baseline has no comparison to print.
        table.rows.remove(0);
        report.add(table);
    }
    Ok(report)
}

const CHECKS: &[Column] = &[
    label("program", "program"),
    label("kind", "kind"),
    metric("ns_per_call", "time", "ns a call", 2).lower().show(&[Part::Median]),
    metric("added_ns_per_call", "added", "ns", 2).added_to("ns_per_call").lower(),
    metric("slowdown", "slowdown", "", 3)
        .ratio_of("ns_per_call")
        .lower()
        .show(&[Part::Median, Part::Interval]),
    // Exact numbers, if callgrind counted them.
    figure("added_instructions_per_call", "instructions", "", 1).lower(),
    label("what", "description"),
];

/// The instructions that each build adds to a call, or why they were not counted.
fn added_instructions(
    builds: &[Build],
    run: &Run,
    program: &'static str,
    calls: u64,
) -> Result<Vec<Option<f64>>, String> {
    let count = |build: &Build| build.instructions(run, program);
    let counts = builds.iter().map(count).collect::<Result<Vec<u64>, String>>()?;
    let added = |count: &u64| rounded((number(*count) - number(counts[0])) / number(calls));
    Ok(counts.iter().map(|count| Some(added(count))).collect())
}

/// Returns the CPU of `--cpu`, or the last CPU that this process may use. The first CPU gets most
/// interrupts.
fn cpu(args: &BenchCheckArgs) -> Result<u32, BenchError> {
    let allowed = affinity::allowed()?;
    let Some(cpu) = args.cpu else {
        let none = || BenchError::failed("this process may not use any CPU", "see `taskset -p $$`");
        return allowed.iter().last().ok_or_else(none);
    };
    if allowed.contains(cpu) {
        return Ok(cpu);
    }
    let why = format!("this process may use CPUs {allowed}, but not CPU {cpu}");
    let fix = "use one of these CPUs, or omit --cpu";
    Err(Failure::new(Status::Usage, "choosing a CPU", why, fix).into())
}

/// A way to put checks into a program, and the compiler flags that it needs.
#[derive(Debug)]
struct Kind {
    name: &'static str,
    flags: &'static [&'static str],
    library: Library,
    /// The number of batch lanes of the run. With one, patched functions need not know where they
    /// run.
    lanes: u32,
    what: &'static str,
}

/// The library that is preloaded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Library {
    None,
    Ours,
    /// Hooks that return at once, which show what the call alone costs.
    Returning,
}

static PLAIN: Kind = Kind { library: Library::None, ..ours("plain", &[], 1, "no checks") };
/// Counts the places where checks would be.
static COUNTING: Kind = Kind { library: Library::None, ..ours("counting", &["-DCOUNT"], 1, "") };

const FENTRY: &[&str] = &["-pg", "-mfentry"];
const MCOUNT: &[&str] = &["-pg"];
const CYG: &[&str] = &["-finstrument-functions"];

static KINDS: [Kind; 10] = [
    ours("inline", &["-DINLINE"], 2, "elfen_check() in the source"),
    ours("patch", &["-fpatchable-function-entry=43"], 2, "check written over 43 bytes of NOPs"),
    ours(
        "patch-pair",
        &["-fpatchable-function-entry=19"],
        1,
        "check over 19 bytes, for one batch lane",
    ),
    ours(
        "patch-jump",
        &["-fpatchable-function-entry=5"],
        2,
        "jump over 5 bytes to a check elsewhere",
    ),
    returning("fentry-return", FENTRY, "hook before the prologue, returns at once"),
    ours("fentry", FENTRY, 2, "hook before the prologue, with a check"),
    returning("mcount-return", MCOUNT, "hook after the prologue, returns at once"),
    ours("mcount", MCOUNT, 2, "hook after the prologue, with a check"),
    returning("cyg-return", CYG, "hooks at entry and exit, both return at once"),
    ours("cyg", CYG, 2, "hooks at entry and exit, check at entry"),
];

const fn ours(
    name: &'static str,
    flags: &'static [&'static str],
    lanes: u32,
    what: &'static str,
) -> Kind {
    Kind { name, flags, library: Library::Ours, lanes, what }
}

const fn returning(name: &'static str, flags: &'static [&'static str], what: &'static str) -> Kind {
    Kind { name, flags, library: Library::Returning, lanes: 1, what }
}

const PROGRAMS: [&str; 4] = ["calls", "fib", "matrix", "words"];

/// Only this program's instructions are counted, because a run under callgrind takes half a second.
const COUNTED: &str = "calls";

/// Repetitions in one process. The shortest one counts, because it was disturbed least.
const REPETITIONS: u32 = 10;

/// The files that the programs are built from.
const FILES: [(&str, &str); 2] =
    [("programs.c", include_str!("programs.c")), ("returning.c", include_str!("returning.c"))];

/// Builds the library whose hooks only return.
fn build_returning(sources: &Sources) -> Result<PathBuf, BenchError> {
    let words = ["-shared", "-fPIC", "returning.c", "-o", "returning.so"];
    sources.compile(&words)?.explain("the C compiler", COMPILER)?;
    Ok(sources.path("returning.so"))
}

const COMPILER: &str = "check that cc builds programs that run on this machine";

/// One build of the programs.
#[derive(Debug)]
struct Build {
    kind: &'static Kind,
    file: PathBuf,
}

/// What a program printed: `NANOSECONDS RESULT CHECKS`.
#[derive(Debug)]
struct Printed {
    best_ns: u64,
    computed: String,
    /// The number of checks in one repetition, if they were counted.
    checks: u64,
}

impl Build {
    /// Builds this kind, or returns the compiler's message if it cannot.
    fn of(sources: &Sources, kind: &'static Kind) -> Result<Result<Self, String>, BenchError> {
        let object = format!("{}.o", kind.name);
        // Compiling and linking are separate steps. If -pg were passed to the linker, the program
        // would profile itself.
        let flags = [&["-c", "programs.c", "-o", &object], kind.flags].concat();
        let compiled = match sources.compile(&flags)? {
            Ok(()) => sources.compile(&[&object, "-o", kind.name])?,
            refused => refused,
        };
        Ok(compiled.map(|()| Self { kind, file: sources.path(kind.name) }))
    }

    /// Builds a kind that every compiler supports.
    fn new(sources: &Sources, kind: &'static Kind) -> Result<Self, BenchError> {
        Self::of(sources, kind)?.explain("the C compiler", COMPILER)
    }

    fn failed(&self, program: &str, what: impl std::fmt::Display) -> BenchError {
        BenchError::failed(format!("{program} as {}: {what}", self.kind.name), COMPILER)
    }

    fn run(&self, run: &Run, program: &'static str) -> Result<Printed, BenchError> {
        let output = self.start(Command::new(&self.file), run, program, REPETITIONS);
        let output = output.map_err(|what| self.failed(program, what))?;
        let line = String::from_utf8_lossy(&output.stdout);
        let printed = match line.split_ascii_whitespace().collect::<Vec<_>>()[..] {
            [best_ns, computed, checks] => {
                best_ns.parse().ok().zip(checks.parse().ok()).map(|(best_ns, checks)| Printed {
                    best_ns,
                    computed: computed.to_owned(),
                    checks,
                })
            }
            _ => None,
        };
        printed.ok_or_else(|| self.failed(program, format!("it printed {line:?}")))
    }

    /// Counts the instructions of one repetition: half of what two more repetitions add.
    fn instructions(&self, run: &Run, program: &'static str) -> Result<u64, String> {
        let [few, many] = [1, 3].map(|repetitions| {
            let mut valgrind = Command::new("valgrind");
            valgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(&self.file);
            let output = self.start(valgrind, run, program, repetitions)?;
            let counted = collected(&String::from_utf8_lossy(&output.stderr));
            counted.ok_or_else(|| "callgrind printed no count".to_owned())
        });
        Ok(many?.saturating_sub(few?) / 2)
    }

    fn start(
        &self,
        mut command: Command,
        run: &Run,
        program: &'static str,
        repetitions: u32,
    ) -> Result<Output, String> {
        run.prepare(&mut command, self.kind);
        command.arg(program).arg(repetitions.to_string());
        let cpu = run.cpu;
        let pin = move || affinity::pin(cpu);
        // SAFETY: `pin` allocates a mask and makes one system call; this process has no other
        // thread that could hold the allocator's lock while we fork.
        unsafe { command.pre_exec(pin) };
        let name = command.get_program().to_string_lossy().into_owned();
        let output = command.output().map_err(|error| format!("{name}: {error}"))?;
        if !output.status.success() {
            return Err(format!("it ended with {}", output.status));
        }
        if !run.was_checked(self.kind) {
            return Err("it ran no check".to_owned());
        }
        Ok(output)
    }
}

/// Parses `Collected : 1731181` in the output of callgrind.
fn collected(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.split_once("Collected :"))?;
    line.1.trim().parse().ok()
}

/// CPU numbers that no machine has. These lanes exist only in our pages.
const NO_CPUS: [u32; 3] = [SLOTS_MAX - 1, SLOTS_MAX - 2, SLOTS_MAX - 3];

struct Run {
    /// Pages with one batch lane and with two. The second lane is on a CPU that does not exist.
    lanes: [Page<LaneSlot>; 2],
    control: Page<ControlSlot>,
    service: Service,
    cpu: u32,
    ours: PathBuf,
    returning: PathBuf,
}

impl Run {
    /// Creates a run whose batch lane is `cpu`.
    fn new(cpu: u32, ours: PathBuf, returning: PathBuf) -> Result<Self, BenchError> {
        let service = Service::open(&format!("bench-check-{}", std::process::id()), 2)?;
        for (slot, request) in (0..).zip([NO_CPUS[0], NO_CPUS[1]]) {
            // The claim must last as long as the page. A lane that no worker has claimed is polled
            // again and again.
            std::mem::forget(service.claim(slot, request)?);
        }
        let lanes = [private_page::<LaneSlot>(1)?, private_page::<LaneSlot>(2)?];
        for page in &lanes {
            let assigned = [(cpu, NO_CPUS[0]), (NO_CPUS[2], NO_CPUS[1])];
            for (slot, (batch, request)) in page.slots().zip(assigned) {
                slot.assign(batch, request);
            }
        }
        let control = private_page::<ControlSlot>(1)?;
        if let Some(slot) = control.slot(0) {
            slot.publish(&Settings::BORROW_IDLE);
        }
        Ok(Self { lanes, control, service, cpu, ours, returning })
    }

    /// Makes `command` start its program with this kind of checks.
    fn prepare(&self, command: &mut Command, kind: &Kind) {
        command.env_remove("ELFEN_RUN").env_remove("LD_PRELOAD");
        match kind.library {
            Library::None => {}
            Library::Returning => _ = command.env("LD_PRELOAD", &self.returning),
            Library::Ours => {
                let page = self.page(kind);
                // The program's first check changes this to `Running`, which shows that the program
                // has checks.
                page.slots().for_each(|slot| slot.enter(LaneState::Off, 0));
                let inherited = Inherited {
                    lanes: id(page.memory()),
                    control: id(self.control.memory()),
                    tasks: None,
                    service: self.service.page().memory().segment_id(),
                };
                command.env("LD_PRELOAD", &self.ours).env("ELFEN_RUN", inherited.to_string());
            }
        }
    }

    /// Whether the program has run a check since `prepare`. Also true for a program that has none.
    fn was_checked(&self, kind: &Kind) -> bool {
        let state = self.page(kind).slot(0).map(|slot| slot.state.load(Relaxed));
        kind.library != Library::Ours || state == Some(LaneState::Running as u64)
    }

    fn page(&self, kind: &Kind) -> &Page<LaneSlot> {
        if kind.lanes == 1 { &self.lanes[0] } else { &self.lanes[1] }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // No other process knows the name. If the removal fails, the page stays until the machine
        // restarts.
        let _removed = self.service.page().memory().remove_name();
    }
}

fn id(memory: &Memory) -> i32 {
    memory.segment_id().unwrap_or_else(|| unreachable!("made as a segment"))
}
