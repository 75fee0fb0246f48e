//! `elfen lab bench guard`: what a guard takes from a batch while the request lane idles, as the
//! share of the time in which the batch does not run. Baseline: the same batch without a guard.

use std::ffi::OsString;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use elfen_console::duration::{self, number};
use elfen_instrument::CheckMethod;
use elfen_machine::lane_args::LaneArgs;
use elfen_machine::placement::Placement;
use elfen_rt::clock::monotonic_ns;
use elfen_rt::service::Service;
use elfen_rt::signal::control::Settings;
use elfen_rt::signal::service::OpenError;
use elfen_run::Order;
use elfen_run::args::nap::NapName;
use elfen_run::args::poll_timing::PollTimingArgs;
use elfen_run::args::signals::refuse;
use elfen_run::channels::{self, Channels, Signals};
use elfen_run::guard::Guards;

use super::{
    BenchError, Column, Explain, Hear, Part, Report, Row, Scenario, Values, label, looked, metric,
    row, runs,
};

/// Two readings of the clock are nearer than this unless something came between them.
const PAUSE_NS: u64 = 200;
/// Notes are made in memory that is there already: so many pauses at most.
const PAUSES_MAX: usize = 2_000_000;
/// On a lane that has idled for a while, guards look less often.
const SETTLE: Duration = Duration::from_millis(300);

const EXAMPLE: &str = "\
Example:
  elfen lab bench guard --lanes 0:1 --poll-interval 200us";

/// Measure what a guard takes from a batch while the request lane idles
///
/// Needs no privileges: a service's page that says idle all the time.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Args {
    #[command(flatten)]
    lanes: LaneArgs,

    #[command(flatten)]
    looks: PollTimingArgs,

    /// Rounds, each with a guard and without
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = runs())]
    runs: usize,

    /// How long the batch is measured in each
    #[arg(short, long, value_name = "TIME", default_value = "200ms",
        value_parser = duration::parse)]
    duration: Duration,
}

pub(crate) fn run(args: &Args, hear: Hear<'_>) -> Result<Report, BenchError> {
    let name = format!("bench-guard-{}", std::process::id());
    let service = Service::open(&name, 1)?;
    let order = order(args)?;
    let worker = service.claim(0, order.pairs[0].request)?;
    let signals = Signals {
        tasks: None,
        service: Some(channels::Service::open(&name, None).map_err(|error| refuse(&error))?),
    };
    let channels = Arc::new(Channels::open(&order, signals).map_err(|error| refuse(&error))?);
    let about = looked(order.poll_timing);
    let mut guarded = Guarded { order, channels, lasting: args.duration };
    let table = guarded.table("lost", args.runs, hear);
    drop(worker);
    service.remove().map_err(OpenError::Memory)?;
    Ok(Report { about, tables: vec![table?], ..Report::default() })
}

/// A borrow-idle run whose batch is this process itself, by the page of a service.
fn order(args: &Args) -> Result<Order, BenchError> {
    let (nap, alarm) = NapName::Spin.open()?;
    Ok(Order {
        pairs: vec![args.lanes.first_pair()?],
        settings: Settings::BORROW_IDLE,
        slo: None,
        checks: CheckMethod::Guard,
        notes: None,
        library: None,
        nap: Arc::new(nap),
        alarm: alarm.map(Arc::new),
        poll_timing: args.looks.timing()?,
        user: None,
        program: OsString::from("bench"),
        arguments: Vec::new(),
    })
}

struct Guarded {
    order: Order,
    channels: Arc<Channels>,
    lasting: Duration,
}

impl Scenario for Guarded {
    const COLUMNS: &'static [Column] = &[
        label("guard", "guard"),
        metric("per_million", "lost", "%", 3).scaled(1e-4).lower(),
        metric("added_per_million", "added", "%", 3)
            .scaled(1e-4)
            .added_to("per_million")
            .lower()
            .show(&[Part::Median, Part::Interval, Part::P99, Part::Max]),
    ];

    fn cases(&self) -> Vec<Row> {
        ["without", "with"].map(|guard| row!["guard" => guard]).to_vec()
    }

    fn baseline(&self, case: usize) -> Option<usize> {
        (case == 1).then_some(0)
    }

    fn run(&mut self, case: usize, _: usize, values: &mut Values) -> Result<(), BenchError> {
        let Self { order, channels, lasting } = self;
        let guards = (case == 1).then(|| Guards::start(channels, &order.nap, order.poll_timing));
        let guards = guards.transpose()?;
        let lost = lost_per_million(channels.assigned()[0].0, *lasting);
        drop(guards);
        let fix = "allow this process both CPUs: see `elfen doctor`";
        values.add("per_million", lost.explain("running on the batch lane", fix)?);
        Ok(())
    }
}

fn lost_per_million(batch_cpu: u32, lasting: Duration) -> io::Result<f64> {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let borrower = scope.spawn(|| pauses(batch_cpu, &stop));
        thread::sleep(SETTLE);
        let start_ns = monotonic_ns();
        thread::sleep(lasting);
        stop.store(true, Relaxed);
        let pauses = super::joined(borrower)?;
        let counted = pauses.iter().filter(|&&(from, _)| from >= start_ns);
        let lost_ns: u64 = counted.map(|&(from, to)| to - from).sum();
        Ok(number(lost_ns) / number(monotonic_ns() - start_ns) * 1e6)
    })
}

/// A batch of nothing but readings of the clock: from when to when it did not run.
fn pauses(cpu: u32, stop: &AtomicBool) -> io::Result<Vec<(u64, u64)>> {
    Placement::new(&[cpu].into_iter().collect()).apply(0)?;
    let mut pauses = Vec::with_capacity(PAUSES_MAX);
    let mut last_ns = monotonic_ns();
    while !stop.load(Relaxed) && pauses.len() < PAUSES_MAX {
        let now_ns = monotonic_ns();
        if now_ns - last_ns > PAUSE_NS {
            pauses.push((last_ns, now_ns));
        }
        last_ns = now_ns;
    }
    Ok(pauses)
}
