//! The requests and pauses of a turn again, in simulated time: whether the simulator, by which
//! policies are judged that nobody has run, says what the proxy does.
//!
//! It knows the policies, queues and pauses, and nothing of networks and processes: what a request
//! takes that nothing disturbs is measured, and is the same for all.

use std::io;
use std::time::Duration;

use elfen_console::duration::number;
use elfen_rt::clock::nanos;
use elfen_tailor::hedge::Policy;
use elfen_tailor::hedge::simulate::{Plan, Request, simulate};

/// As the proxy has them, unless it is told otherwise.
const EXTRA_PER_MILLION: u64 = 50_000;
const LOOK_EVERY: Duration = Duration::from_micros(500);
/// The first of so many requests, by how long they took, met nothing.
const UNDISTURBED: usize = 10;

fn policy(name: &str) -> io::Result<Policy> {
    match name {
        "none" => Ok(Policy::None),
        "look" => Ok(Policy::Look),
        "hazard" => Ok(Policy::Hazard),
        "after=p95" => Ok(Policy::AfterP95),
        other => Err(io::Error::other(format!("{other} is no policy of the simulator"))),
    }
}

/// How long each request would have taken, of those that were to be sent then and took so many
/// microseconds, of which so many were work.
pub(super) fn latencies_us(
    name: &str,
    asked: &[(Duration, f64)],
    work_us: u32,
    pauses: &[(Duration, Duration)],
) -> io::Result<Vec<f64>> {
    let mut took: Vec<f64> = asked.iter().map(|(_, took_us)| *took_us).collect();
    took.sort_unstable_by(f64::total_cmp);
    let undisturbed_us = took.get(took.len() / UNDISTURBED).copied().unwrap_or(0.0);
    // What it takes beside its work, before its server has it and after.
    let around_us = (undisturbed_us - f64::from(work_us)).max(0.0);
    let mut comes: Vec<Duration> = asked.iter().map(|(due, _)| *due).collect();
    comes.sort_unstable();
    let work_ns = u64::from(work_us) * 1_000;
    let request = |due: Duration| Request { comes_ns: nanos(due), work_ns, may_double: true };
    let plan = Plan {
        requests: comes.into_iter().map(request).collect(),
        pauses: [pauses.iter().map(|(from, to)| (nanos(*from), nanos(*to))).collect(), Vec::new()],
        look_every_ns: nanos(LOOK_EVERY),
    };
    let outcome = simulate(&plan, policy(name)?, EXTRA_PER_MILLION);
    let answered = outcome.latencies_ns.into_iter().flatten();
    Ok(answered.map(|ns| number(ns) / 1e3 + around_us).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: without a policy a pause is waited for, with one it is not; what lies around the work
    /// is added. Method: a request each 10 ms, of which one meets a pause of 8 ms.
    #[test]
    fn a_pause_in_simulated_time() {
        let ms = Duration::from_millis;
        let asked: Vec<(Duration, f64)> = (0..100).map(|at| (ms(at * 10), 700.0)).collect();
        let pauses = [(ms(499), ms(507))];
        let sorted = |name: &str| {
            let mut all = latencies_us(name, &asked, 500, &pauses).unwrap();
            all.sort_unstable_by(f64::total_cmp);
            all
        };
        let (none, look) = (sorted("none"), sorted("look"));
        assert_eq!((none.len(), none[50], none[99]), (100, 700.0, 7_700.0));
        assert!((700.0..2_500.0).contains(&look[99]), "{}", look[99]);
        assert!(latencies_us("no-policy", &asked, 500, &pauses).is_err());
    }
}
