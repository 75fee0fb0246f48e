//! `elfen lab bench signal`: the delay of the task map, and what its program adds to a context
//! switch.

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use elfen_console::duration::number;
use elfen_kernel::holders;
use elfen_kernel::task_map::{self, Loaded};
use elfen_machine::lane_args::LaneArgs;
use elfen_rt::clock::monotonic_ns;
use elfen_rt::signal::task::{TaskMap, TaskSlot};

use super::{
    BenchError, BenchReport, Case, Column, Explain, Part, Progress, Values, case, joined, label,
    lanes, measure, metric, pin, row, runs,
};

const DELAYS_A_ROUND: usize = 40;
/// The time between two wake-ups of the request lane. It is long enough for the lane to go idle, so
/// that switches to the idle task and from it are measured.
const WAKE_EVERY: Duration = Duration::from_micros(50);
const TURNS_A_ROUND: u32 = 250;

const EXAMPLE: &str = "\
Example:
  sudo elfen lab bench signal --lanes 0:1     switches on CPU 0, seen from CPU 1";

/// Measure the delay and the cost of the task map
///
/// The delay is the time from a context switch until a reader on another CPU sees the switch. The
/// cost is the time that the eBPF program adds to a context switch; rounds with the attached and
/// the detached program are interleaved.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLE)]
pub(crate) struct BenchSignalArgs {
    #[command(flatten)]
    lanes: LaneArgs,

    /// Number of rounds; each round measures every case
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = runs())]
    runs: usize,
}

pub(crate) fn run(
    args: &BenchSignalArgs,
    progress: Progress<'_>,
) -> Result<BenchReport, BenchError> {
    let (request, reader) = lanes(&args.lanes)?;
    refuse_if_attached()?;
    pin(request)?;
    let turns = Turns::pipe().explain(PIPE, LANES)?;
    let mut signal = Signal { request, reader, loaded: Loaded::load()?, turns };
    let costs = ("costs", COSTS);
    // The cases without a lease come first, because a lease outlives a round.
    let mut report = BenchReport::default();
    for kinds in [&[Detached, Unwatched][..], &[Detached, Watched, Delay]] {
        let cases: Vec<Case> = kinds.iter().map(Kind::case).collect();
        let run = |case: usize, _, values: &mut Values| signal.run(kinds[case], values);
        report.add(measure(costs, &cases, args.runs, progress, run)?);
    }
    Ok(report.about(row!["request_cpu" => request, "reader_cpu" => reader]))
}

const PIPE: &str = "passing a byte between two threads";
const LANES: &str = "see `elfen lanes` for CPUs to use";

/// The baseline cannot be measured if another process has attached the program.
fn refuse_if_attached() -> Result<(), BenchError> {
    // A process that may not query this may not attach the program either. Loading it then prints
    // the error.
    if task_map::is_attached() != Some(true) {
        return Ok(());
    }
    let holders = holders::find().ok().flatten().unwrap_or_default().into_iter();
    let named: Vec<_> = holders.map(|one| format!("{} ({})", one.pid, one.command)).collect();
    let why = format!(
        "the eBPF program is already attached, so switches without it cannot be measured; attached \
            by {}",
        named.join(", ")
    );
    Err(BenchError::failed(why, "end these processes"))
}

#[derive(Clone, Copy)]
enum Kind {
    /// Context switches without the program.
    Detached,
    /// Context switches on a CPU that no process watches.
    Unwatched,
    /// Context switches on a watched CPU, where each switch gets a time stamp.
    Watched,
    Delay,
}
use Kind::*;

impl Kind {
    fn case(&self) -> Case {
        let of = |name: &str| case(row!["case" => name]);
        match self {
            Detached => of("a context switch without the program"),
            Unwatched => of("with the program, on any CPU").against(0),
            Watched => of("with the program, on a watched CPU").against(0),
            Delay => of("delay until another CPU sees a switch"),
        }
    }
}

const COSTS: &[Column] = &[
    label("case", "what"),
    metric("ns", "time", "ns", 1).lower(),
    metric("added_ns", "added", "ns", 1).added_to("ns").lower().show(&[
        Part::Median,
        Part::Interval,
        Part::P99,
    ]),
];

struct Signal {
    /// The CPU on which the switches happen.
    request: u32,
    /// The CPU from which the switches are observed.
    reader: u32,
    loaded: Loaded,
    turns: Turns,
}

impl Signal {
    fn run(&mut self, kind: Kind, values: &mut Values) -> Result<(), BenchError> {
        let no_cpu =
            || BenchError::failed(format!("the task map has no CPU {}", self.request), LANES);
        let map = match kind {
            Detached => None,
            _ => Some(self.loaded.map()?),
        };
        if let (Delay, Some(map)) = (kind, &map) {
            let slot = map.slot(self.request).ok_or_else(no_cpu)?;
            values.extend("ns", self.delays(map, slot)?);
            return Ok(());
        }
        if matches!(kind, Watched) && !map.is_some_and(|map| map.renew(self.request)) {
            return Err(no_cpu());
        }
        pin(self.request)?;
        let ns = self.turns.ns_a_turn(TURNS_A_ROUND).explain(PIPE, LANES)?;
        // A round trip consists of two switches.
        values.add("ns", ns / 2.0);
        Ok(())
    }

    /// Measures delays: a thread on the request lane sleeps and wakes, and the calling thread
    /// watches it from the reader's CPU.
    fn delays(&self, map: &TaskMap, slot: &TaskSlot) -> Result<Vec<f64>, BenchError> {
        let stop = AtomicBool::new(false);
        let cpu = self.request;
        thread::scope(|scope| {
            let sleeper = scope.spawn(|| {
                pin(cpu)?;
                while !stop.load(Relaxed) {
                    map.renew(cpu);
                    thread::sleep(WAKE_EVERY);
                }
                Ok(())
            });
            let seen = pin(self.reader).map(|()| watch_switches(slot, || sleeper.is_finished()));
            stop.store(true, Relaxed);
            joined(sleeper).and(seen)
        })
    }
}

/// Returns the delays from a switch until it was seen. Switches that were missed are left out.
fn watch_switches(slot: &TaskSlot, gave_up: impl Fn() -> bool) -> Vec<f64> {
    let mut delays = Vec::with_capacity(DELAYS_A_ROUND);
    let mut last_task = slot.task.load(Relaxed);
    let mut last_count = slot.switches.load(Relaxed);
    while delays.len() < DELAYS_A_ROUND && !gave_up() {
        let task = slot.task.load(Relaxed);
        if task == last_task {
            continue;
        }
        let seen_ns = monotonic_ns();
        let Some(switch) = slot.snapshot() else { continue };
        if let (Some(at_ns), true) = (switch.at_ns, switch.count == last_count + 1) {
            delays.push(number(seen_ns.saturating_sub(at_ns)));
        }
        (last_task, last_count) = (task, switch.count);
    }
    delays
}

/// Two threads on one CPU that pass a byte back and forth. Each hand-over is a context switch. The
/// caller starts each round trip, and the second thread answers until this value is dropped.
pub(super) struct Turns {
    from: PipeReader,
    to: PipeWriter,
}

impl Turns {
    pub(super) fn pipe() -> io::Result<Self> {
        let (mut theirs_in, ours_out) = io::pipe()?;
        let (ours_in, mut theirs_out) = io::pipe()?;
        // The thread inherits the caller's affinity.
        thread::spawn(move || {
            let mut byte = [0];
            while theirs_in.read_exact(&mut byte).and_then(|()| theirs_out.write_all(&byte)).is_ok()
            {
            }
        });
        Ok(Self { from: ours_in, to: ours_out })
    }

    /// Returns the nanoseconds of a round trip, which is two context switches.
    pub(super) fn ns_a_turn(&mut self, turns: u32) -> io::Result<f64> {
        let mut byte = [0];
        let start = monotonic_ns();
        for _ in 0..turns {
            self.to.write_all(&byte)?;
            self.from.read_exact(&mut byte)?;
        }
        Ok(number(monotonic_ns() - start) / f64::from(turns))
    }
}
