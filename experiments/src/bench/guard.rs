//! `elfen lab bench guard`: what a guard costs a batch while the request lane idles. It is the
//! share of the time in which the batch does not run. Baseline: the same batch without a guard.

use std::ffi::OsString;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use elfen_console::duration::{self, number};
use elfen_instrument::CheckMethod;
use elfen_machine::lane_args::LaneArgs;
use elfen_machine::placement::Placement;
use elfen_rt::clock::{monotonic_ns, nanos};
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
    BenchError, BenchReport, Column, Explain, Part, Progress, cases, label, measure, metric,
    poll_timing_row, runs, with_baseline,
};

/// Two consecutive readings of the clock are closer than this, unless the batch was interrupted.
const PAUSE_NS: u64 = 200;
/// Guards poll less often once their lane has idled for a while.
const SETTLE_NS: u64 = 300_000_000;

const EXAMPLE: &str = "\
Example:
  elfen lab bench guard --lanes 0:1 --poll-interval 200us";

/// Measure how much CPU time a guard takes from a batch while the request lane idles
///
/// Requires no privileges: the source is a service's page that always reports an idle lane.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLE)]
pub(crate) struct BenchGuardArgs {
    #[command(flatten)]
    lanes: LaneArgs,

    #[command(flatten)]
    poll_timing: PollTimingArgs,

    /// Number of rounds; each round measures with and without a guard
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = runs())]
    runs: usize,

    /// How long the batch is measured in each round
    #[arg(short, long, value_name = "TIME", default_value = "200ms",
        value_parser = duration::parse)]
    duration: Duration,
}

pub(crate) fn run(
    args: &BenchGuardArgs,
    progress: Progress<'_>,
) -> Result<BenchReport, BenchError> {
    let name = format!("bench-guard-{}", std::process::id());
    let service = Service::open(&name, 1)?;
    let order = order(args)?;
    let worker = service.claim(0, order.pairs[0].request)?;
    let signals = Signals {
        tasks: None,
        service: Some(channels::Service::open(&name, None).map_err(|error| refuse(&error))?),
    };
    let channels = Arc::new(Channels::open(&order, signals).map_err(|error| refuse(&error))?);
    let cases = with_baseline(cases("guard", ["without", "with"]));
    let table = measure(("lost", LOST), &cases, args.runs, progress, |case, _, values| {
        let guards = (case == 1).then(|| Guards::start(&channels, &order.nap, order.poll_timing));
        let guards = guards.transpose()?;
        let lost = lost_per_million(channels.assigned()[0].0, args.duration);
        drop(guards);
        let fix = "allow this process both CPUs: see `elfen doctor`";
        values.add("per_million", lost.explain("running on the batch lane", fix)?);
        Ok(())
    });
    drop(worker);
    service.remove().map_err(OpenError::Memory)?;
    Ok(BenchReport::from(table?).about(poll_timing_row(order.poll_timing)))
}

/// A borrow-idle run whose batch is this process itself. The signal is the page of a service.
fn order(args: &BenchGuardArgs) -> Result<Order, BenchError> {
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
        poll_timing: args.poll_timing.timing()?,
        user: None,
        program: OsString::from("bench"),
        arguments: Vec::new(),
    })
}

const LOST: &[Column] = &[
    label("guard", "guard"),
    metric("per_million", "lost", "%", 3).scaled(1e-4).lower(),
    metric("added_per_million", "added", "%", 3)
        .scaled(1e-4)
        .added_to("per_million")
        .lower()
        .show(&[Part::Median, Part::Interval, Part::P99, Part::Max]),
];

/// The batch only reads the clock. Returns the part of the time in which it does not run, in
/// millionths.
fn lost_per_million(cpu: u32, lasting: Duration) -> io::Result<f64> {
    let batch = || -> io::Result<f64> {
        Placement::new(&[cpu].into_iter().collect()).apply(0)?;
        let start_ns = monotonic_ns() + SETTLE_NS;
        let end_ns = start_ns + nanos(lasting);
        let (mut last_ns, mut lost_ns) = (monotonic_ns(), 0);
        while last_ns < end_ns {
            let now_ns = monotonic_ns();
            if last_ns >= start_ns && now_ns - last_ns > PAUSE_NS {
                lost_ns += now_ns - last_ns;
            }
            last_ns = now_ns;
        }
        Ok(number(lost_ns) / number(last_ns - start_ns) * 1e6)
    };
    // The batch gets a thread of its own, because that thread keeps the batch's scheduling class.
    thread::scope(|scope| super::joined(scope.spawn(batch)))
}
