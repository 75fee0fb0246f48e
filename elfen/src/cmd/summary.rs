//! The lines at the end of `elfen run`.

use elfen_console::duration;
use elfen_run::figures::Figures;
use elfen_run::latency::Latency;
use elfen_run::live::page::Live;
use elfen_run::report::Report;

/// The line with the times and reactions of the run.
pub(super) fn summary(report: &Report) -> String {
    let Figures { borrowed_ns, overlapped_ns, naps, reaction_ns, wake_ns, .. } = &report.figures;
    let latency = |what: &str, latency: &Latency| match (latency.median, latency.p99) {
        (Some(median), Some(p99)) => {
            format!(", {what} median {} p99 {}", duration::show(median), duration::show(p99))
        }
        _ => String::new(),
    };
    let ran = match borrowed_ns.zip(*overlapped_ns) {
        Some((borrowed_ns, overlapped_ns)) => format!(
            "borrowed {}, overlapped {}{}",
            duration::show(borrowed_ns),
            duration::show(overlapped_ns),
            share_text(overlapped_ns, report.request_busy_ns)
        ),
        None => "borrowed and overlapped time was not measured".to_owned(),
    };
    format!(
        "{}: {ran}, {naps} naps{}{}",
        duration::show(report.wall_ns),
        latency("reaction", reaction_ns),
        latency("wake", wake_ns)
    )
}

/// The line about live checks.
pub(super) fn live_summary(live: &Live) -> String {
    let p99 = live.gap_ns.p99.map(|p99| format!(", probe p99 {}", duration::show(p99)));
    let all: u64 = live.missed_by.values().sum();
    let percent_of_all = |count: u64| count * 100 / all.max(1);
    let by =
        live.missed_by.iter().map(|(name, &count)| format!("{name} {}", percent_of_all(count)));
    let by = by.collect::<Vec<_>>().join(", ");
    let missed = live.missed * 1000 / live.drills.max(1);
    let why = if by.is_empty() { String::new() } else { format!(" ({by} % of these)") };
    let refused = live.refused.as_ref().map(|why| format!("; without checks: {why}"));
    format!(
        "live: checks at {} sites in {} processes{}, {}.{} % missed{why}, {} doorbells rung{}",
        live.places.on,
        live.processes,
        p99.unwrap_or_default(),
        missed / 10,
        missed % 10,
        live.bells,
        refused.unwrap_or_default()
    )
}

/// The overlapped time as a share of the time in which the request lanes were busy.
fn share_text(overlapped_ns: u64, busy_ns: Option<u64>) -> String {
    let Some(busy_ns) = busy_ns.filter(|&busy_ns| busy_ns > 0) else { return String::new() };
    let per_million = u128::from(overlapped_ns) * 1_000_000 / u128::from(busy_ns);
    let (percent, rest) = (per_million / 10_000, per_million / 100 % 100);
    format!(" ({percent}.{rest:02} % of the requests' time)")
}
