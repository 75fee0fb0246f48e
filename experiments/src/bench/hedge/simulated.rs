//! The requests and pauses of a turn again, in simulated time: whether the simulator, by which
//! policies are judged that nobody has run, says what the proxy does.
//!
//! It knows the policies, queues and pauses, and nothing of networks and processes: what a request
//! takes that nothing disturbs is measured, and is the same for all. When the machine itself stood
//! still, as a virtual one does, requests tell that nobody stopped: both servers stand still then.

use std::io;
use std::time::Duration;

use elfen_console::duration::number;
use elfen_rt::clock::nanos;
use elfen_tailor::hedge::Policy;
use elfen_tailor::hedge::simulate::{Plan, Request, simulate};

use super::asked::Asked;

/// As the proxy has them, unless it is told otherwise.
const EXTRA_PER_MILLION: u64 = 50_000;
const LOOK_EVERY: Duration = Duration::from_micros(500);
/// The first of so many requests, by how long they took, met nothing.
const UNDISTURBED: usize = 10;
/// Requests that took so much longer met a pause of the machine's; queues are shorter.
const LATE_US: f64 = 1_000.0;

fn policy(name: &str) -> io::Result<Policy> {
    match name {
        "none" => Ok(Policy::None),
        "look" => Ok(Policy::Look),
        "hazard" => Ok(Policy::Hazard),
        "after=p95" => Ok(Policy::AfterP95),
        other => Err(io::Error::other(format!("{other} is no policy of the simulator"))),
    }
}

/// From when to when a server stands still.
type Pauses = Vec<(Duration, Duration)>;

/// Of a request that nothing disturbs.
fn undisturbed_us(asked: &[Asked]) -> f64 {
    let mut took: Vec<f64> = asked.iter().map(|asked| asked.took_us).collect();
    took.sort_unstable_by(f64::total_cmp);
    took.get(took.len() / UNDISTURBED).copied().unwrap_or(0.0)
}

/// When the machine stood still, by requests to servers that nobody stopped.
pub(super) fn pauses_of_machine(asked: &[Asked]) -> Pauses {
    let usual_us = undisturbed_us(asked);
    let late = asked.iter().filter(|asked| asked.took_us > usual_us + LATE_US);
    let late = late.map(|asked| {
        (asked.due, asked.due + Duration::from_secs_f64((asked.took_us - usual_us) / 1e6))
    });
    apart(late.collect())
}

/// Sorted, and those that meet as one.
fn apart(mut pauses: Pauses) -> Pauses {
    pauses.sort_unstable();
    pauses.dedup_by(|later, earlier| {
        let meet = later.0 <= earlier.1;
        earlier.1 = if meet { earlier.1.max(later.1) } else { earlier.1 };
        meet
    });
    pauses
}

/// How long each request would have taken, of those that were to be sent then, of which so many
/// microseconds were work, if the first server was stopped then and the machine stood still then.
pub(super) fn latencies_us(
    name: &str,
    asked: &[Asked],
    work_us: u32,
    stopped: &[(Duration, Duration)],
    machine: &[(Duration, Duration)],
) -> io::Result<Vec<f64>> {
    // What it takes beside its work, before its server has it and after.
    let around_us = (undisturbed_us(asked) - f64::from(work_us)).max(0.0);
    let mut comes: Vec<Duration> = asked.iter().map(|asked| asked.due).collect();
    comes.sort_unstable();
    let work_ns = u64::from(work_us) * 1_000;
    let request = |due: Duration| Request { comes_ns: nanos(due), work_ns, may_double: true };
    let first = apart([stopped, machine].concat());
    let of = |pauses: &[(Duration, Duration)]| {
        pauses.iter().map(|(from, to)| (nanos(*from), nanos(*to))).collect()
    };
    let plan = Plan {
        requests: comes.into_iter().map(request).collect(),
        pauses: [of(&first), of(machine)],
        look_every_ns: nanos(LOOK_EVERY),
    };
    let outcome = simulate(&plan, policy(name)?, EXTRA_PER_MILLION);
    let answered = outcome.latencies_ns.into_iter().flatten();
    Ok(answered.map(|ns| number(ns) / 1e3 + around_us).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn each_10_ms() -> Vec<Asked> {
        let asked = |at: u64| Asked { due: Duration::from_millis(at * 10), took_us: 700.0 };
        (0..100).map(asked).collect()
    }

    /// Goal: without a policy a pause is waited for, with one it is not, unless the machine itself
    /// stood still; what lies around the work is added. Method: a request each 10 ms, of which one
    /// meets a pause of 8 ms.
    #[test]
    fn a_pause_in_simulated_time() {
        let ms = Duration::from_millis;
        let (asked, pauses) = (each_10_ms(), [(ms(499), ms(507))]);
        let sorted = |name: &str, stopped: &[_], machine: &[_]| {
            let mut all = latencies_us(name, &asked, 500, stopped, machine).unwrap();
            all.sort_unstable_by(f64::total_cmp);
            all
        };
        let none = sorted("none", &pauses, &[]);
        assert_eq!((none.len(), none[50], none[99]), (100, 700.0, 7_700.0));
        let look = sorted("look", &pauses, &[]);
        assert!((700.0..2_500.0).contains(&look[99]), "{}", look[99]);
        assert!(sorted("look", &pauses, &pauses)[99] >= 7_700.0, "nobody runs");
        assert!(latencies_us("no-policy", &asked, 500, &pauses, &[]).is_err());
    }

    #[test]
    fn requests_tell_when_the_machine_stood_still() {
        let ms = Duration::from_millis;
        let mut asked = each_10_ms();
        (asked[20].took_us, asked[21].took_us, asked[50].took_us) = (15_700.0, 4_700.0, 2_700.0);
        // Others take as long as a queue does.
        asked[70].took_us = 1_600.0;
        assert_eq!(pauses_of_machine(&asked), [(ms(200), ms(215)), (ms(500), ms(502))]);
        assert_eq!(pauses_of_machine(&[]), []);
    }
}
