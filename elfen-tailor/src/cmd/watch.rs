//! `elfen tailor watch`: prints a line for each slow request soon after its end, and keeps no
//! trace.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::account::{Account, charges};
use crate::rank::SlowThreshold;
use crate::replay::quantile;
use crate::segment::ExplainedRequest;
use crate::trace::{Header, Trace};
use elfen_console::duration::{self, show};
use elfen_console::failure::{Failure, Status, to_stderr};
use elfen_console::output::Versioned;
use elfen_rt::clock::monotonic_ns;
use elfen_run::watches::Publisher;
use serde::Serialize;

use super::report::slow;
use super::target::{Target, describe};
use crate::last_minute::LastMinute;
use crate::recorder::POLL_INTERVAL;
use crate::signals::EndSignals;

const EXAMPLES: &str = "\
Examples:
  sudo elfen tailor watch --port 6379 --slow 10ms        all above 10 ms
  sudo elfen tailor watch --port 80 --slow p99.9 --json  a line of JSON each

While it runs, `elfen top` and `elfen metrics` show the last minute's tail by cause.";

/// Print why a request was slow, soon after it ended
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct WatchArgs {
    #[command(flatten)]
    target: Target,

    /// Which requests are slow: above a quantile of the last requests such as p99 or p99.9, or
    /// above a time
    #[arg(long, value_name = "LIMIT", default_value = "p99", value_parser = slow)]
    slow: SlowThreshold,

    /// How long to watch; without it, until Ctrl-C
    #[arg(short, long, value_name = "TIME", value_parser = duration::parse)]
    duration: Option<Duration>,

    /// Print a JSON object for each request, one a line
    #[arg(long)]
    json: bool,
}

/// How long events are kept. Requests that take longer are not printed.
const KEPT_NS: u64 = 5_000_000_000;
const EXPLAIN_EVERY: Duration = Duration::from_millis(400);
/// A request is explained only this long after its end, because the end of its answer may leave
/// late.
const SETTLED_NS: u64 = 200_000_000;
/// The number of latest latencies from which a quantile is computed.
const LATENCIES_MAX: usize = 10_000;
/// With fewer latencies, a quantile such as p99 is not meaningful.
const LATENCIES_MIN: usize = 100;
/// Interval of rankings for `elfen top` and `elfen metrics`. It is shorter than `KEPT_NS`, so each
/// request is ranked.
const RANK_EVERY: Duration = Duration::from_secs(4);

/// Removes events, and other entries, from before a time.
fn forget(trace: &mut Trace, before_ns: u64) {
    for events in &mut trace.events {
        let old = events.partition_point(|event| event.at_ns < before_ns);
        events.drain(..old);
    }
    for marks in trace.marks.values_mut() {
        let old = marks.partition_point(|mark| mark.at_ns < before_ns);
        marks.drain(..old);
    }
    trace.gaps.retain(|gap| gap.to_ns >= before_ns);
    trace.names.retain(|_, known| {
        // The latest entry may be the name of a thread that still runs.
        let old = known.partition_point(|(until_ns, _)| *until_ns < before_ns);
        known.drain(..old.min(known.len() - 1));
        known.last().is_some_and(|(until_ns, _)| *until_ns >= before_ns)
    });
    trace.batches.retain(|_, (until_ns, _)| *until_ns >= before_ns);
    // Before the next explanation, the recorder adds the processes that still run.
    trace.processes.clear();
    trace.head.began_ns = trace.head.began_ns.max(before_ns);
}

#[derive(Serialize)]
struct Line {
    ended_ns: u64,
    latency_ns: u64,
    threshold_ns: u64,
    charges: Vec<(String, u64)>,
}

pub(super) fn run(args: &WatchArgs, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let failed = |error: io::Error| {
        Failure::new(Status::Failed, "watching the service", error, "see `elfen doctor`")
    };
    let ending = EndSignals::new().map_err(failed)?;
    let mut recorder = args.target.attach()?;
    let mut window = Trace::new(recorder.head(args.target.detail()));
    to_stderr(&format!("watching {}", describe(&window.head)));
    let mut printed = Printed { until_ns: monotonic_ns(), latencies: VecDeque::new(), lost: 0 };
    let mut tail = TailPublisher::new(&window.head);
    let began = Instant::now();
    let mut explained = Instant::now();
    loop {
        let signal = ending.wait(recorder.next_poll_in().min(POLL_INTERVAL));
        recorder.poll(&mut window).map_err(failed)?;
        let over = args.duration.is_some_and(|time| began.elapsed() >= time);
        if explained.elapsed() >= EXPLAIN_EVERY || over || signal.is_some() {
            explained = Instant::now();
            // Looks up the names of new threads before they are printed.
            recorder.refresh(&mut window).map_err(failed)?;
            printed.print_new(args, &window, out)?;
            if let Some(threshold_ns) = printed.threshold_ns(args.slow) {
                tail.publish(&window, threshold_ns);
            }
            if recorder.lost > printed.lost {
                let lost = recorder.lost - printed.lost;
                to_stderr(&format!("{lost} events lost: requests of that time are left out"));
                printed.lost = recorder.lost;
            }
            forget(&mut window, monotonic_ns().saturating_sub(KEPT_NS));
        }
        if over {
            return Ok(ExitCode::SUCCESS);
        }
        if let Some(signal) = signal {
            return Ok(ExitCode::from(Status::of_signal(signal) as u8));
        }
    }
}

/// Publishes the causes of the tail, for `elfen top` and `elfen metrics`.
struct TailPublisher {
    /// `None` if the page could not be created: then only lines are printed.
    publisher: Option<Publisher>,
    minute: LastMinute,
    ranked: Instant,
    until_ns: u64,
}

impl TailPublisher {
    fn new(head: &Header) -> Self {
        let name = match head.port {
            0 => head.service.clone(),
            port => format!("{}:{port}", head.service),
        };
        let refused = |error| to_stderr(&format!("`elfen top` can't show the causes: {error}"));
        let publisher = Publisher::new(&name).map_err(refused).ok();
        let minute = LastMinute::default();
        let ranked = Instant::now();
        Self { publisher, minute, ranked, until_ns: monotonic_ns() }
    }

    fn publish(&mut self, trace: &Trace, threshold_ns: u64) {
        let Some(publisher) = &self.publisher else { return };
        if self.ranked.elapsed() < RANK_EVERY {
            return;
        }
        let now_ns = monotonic_ns();
        let settled_ns = now_ns.saturating_sub(SETTLED_NS);
        let new = Account::of_ended_in(trace, self.until_ns + 1..=settled_ns);
        self.ranked = Instant::now();
        self.until_ns = settled_ns;
        self.minute.add(&new.explained, trace, threshold_ns, now_ns);
        publisher.publish(&self.minute.tail());
    }
}

/// The progress of printing, and the latest latencies.
struct Printed {
    until_ns: u64,
    latencies: VecDeque<u64>,
    lost: u64,
}

impl Printed {
    /// Prints the slow requests that ended since the last call. So each request is printed once,
    /// although the kept events overlap between calls.
    fn print_new(
        &mut self,
        args: &WatchArgs,
        trace: &Trace,
        out: &mut dyn Write,
    ) -> Result<(), Failure> {
        let settled_ns = monotonic_ns().saturating_sub(SETTLED_NS);
        let new = Account::of_ended_in(trace, self.until_ns + 1..=settled_ns).explained;
        self.latencies.extend(new.iter().map(ExplainedRequest::latency_ns));
        self.latencies.drain(..self.latencies.len().saturating_sub(LATENCIES_MAX));
        self.until_ns = settled_ns;
        let Some(threshold_ns) = self.threshold_ns(args.slow) else { return Ok(()) };
        for one in new.iter().filter(|one| one.latency_ns() > threshold_ns) {
            let line = Line {
                ended_ns: one.ended_ns,
                latency_ns: one.latency_ns(),
                threshold_ns,
                charges: charges(one, trace),
            };
            write(&line, args.json, out)?;
        }
        out.flush().map_err(Failure::output)
    }

    fn threshold_ns(&self, slow: SlowThreshold) -> Option<u64> {
        match slow {
            SlowThreshold::AboveNs(ns) => Some(ns),
            SlowThreshold::Quantile(_) if self.latencies.len() < LATENCIES_MIN => None,
            SlowThreshold::Quantile(per_million) => {
                let mut sorted: Vec<u64> = self.latencies.iter().copied().collect();
                sorted.sort_unstable();
                Some(quantile(&sorted, per_million))
            }
        }
    }
}

fn write(line: &Line, json: bool, out: &mut dyn Write) -> Result<(), Failure> {
    if json {
        let text =
            serde_json::to_string(&Versioned::of(line)).map_err(|e| Failure::output(e.into()))?;
        return writeln!(out, "{text}").map_err(Failure::output);
    }
    let most = line.charges.iter().take(4);
    let charges: Vec<String> = most.map(|(cause, ns)| format!("{cause} {}", show(*ns))).collect();
    writeln!(out, "{:8}  {}", show(line.latency_ns), charges.join(", ")).map_err(Failure::output)
}
