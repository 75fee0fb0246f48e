//! The file that a run can leave behind: every request as CSV.

use super::outcome::Timing;
use super::record::Sample;
use super::run::Invocation;
use crate::units::{Nanos, micros};
use std::io::{self, Write};

pub(crate) const HEADER: &str = "invocation,seed,query,connection,intended_us,sent_us,done_us,\
                              latency_us,late_us,queue_us,service_us,outcome,added_us";

/// One line a request, in the order of intended times; times count from the end of the warm-up.
pub(crate) fn write(out: &mut impl Write, number: usize, run: &Invocation) -> io::Result<()> {
    let start = run.recorder.keep().warmup_ns;
    for sample in &run.recorder.samples {
        write_sample(out, number, run.seed, start, sample)?;
    }
    Ok(())
}

fn write_sample(
    out: &mut impl Write,
    number: usize,
    seed: u64,
    start_ns: Nanos,
    sample: &Sample,
) -> io::Result<()> {
    let or_empty =
        |ns: Option<Nanos>| ns.map(|ns| format!("{:.3}", micros(ns))).unwrap_or_default();
    let since = |ns: Nanos| micros(ns - start_ns);
    write!(out, "{number},{seed},{},", sample.query)?;
    write!(out, "{},", sample.connection.map(|at| at.to_string()).unwrap_or_default())?;
    write!(out, "{:.3},", since(sample.intended_ns))?;
    write!(out, "{},", or_empty(sample.sent_ns.map(|sent| sent - start_ns)))?;
    write!(out, "{:.3},{:.3},", since(sample.done_ns), micros(sample.latency_ns()))?;
    write!(out, "{},", or_empty(sample.late_ns()))?;
    let Timing { queue_ns, service_ns, added_ns } = sample.timing;
    write!(out, "{},{},", or_empty(queue_ns), or_empty(service_ns))?;
    match sample.result {
        Ok(()) => write!(out, "ok,")?,
        Err(failure) => write!(out, "{failure},")?,
    }
    writeln!(out, "{}", or_empty(added_ns))
}
