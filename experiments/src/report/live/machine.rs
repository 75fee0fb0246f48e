//! Where the runs were made, by which mechanisms, and what speaks against them.

use std::collections::BTreeSet;

use crate::live::summary::Row;
use crate::record::Setup;
use crate::report::scale::said;

/// Whether runs after `other` may be compared with those after `setup`: an experiment that went on
/// writes a second setup.
pub(super) fn is_same(setup: &Setup, other: &Setup) -> bool {
    let place = |s: &Setup| (s.kernel.clone(), s.cpu.clone(), s.cpus, s.smt, s.lanes.clone());
    place(setup) == place(other) && setup.documents == other.documents
}

/// One sentence on the machine and one on the service.
pub(super) fn description(setup: &Setup) -> String {
    let Setup { elfen, kernel, cpu, cpus, lanes, .. } = setup;
    let rate = said(setup.capacity_rps);
    let service = match setup.plan.as_ref().and_then(|plan| plan.service.as_ref()) {
        None => format!(
            "The service searches {} documents and serves {rate} requests a second at most",
            setup.documents
        ),
        Some(service) => {
            format!("The service is {}, and 100 % are {rate} requests a second", service.url)
        }
    };
    let smt = if setup.smt { "lanes of one core each" } else { "not known to share a core" };
    format!(
        "Measured on {cpu} with {cpus} CPUs, Linux {kernel}, elfen {elfen}, on {}. Lanes {lanes}, \
         {smt}. {service}; loads are parts of that. Seed {}.",
        date(setup.started_s),
        setup.seed,
    )
}

/// What the machine cannot show, and where the helpers ran.
pub(super) fn limits(setup: &Setup) -> Vec<String> {
    let mut limits: Vec<&str> = setup.limits.iter().map(String::as_str).collect();
    if limits.iter().all(|limit| !limit.contains(&setup.helpers)) {
        limits.push(&setup.helpers);
    }
    limits.into_iter().filter(|limit| !limit.is_empty()).map(sentence).collect()
}

/// With a capital and a full stop.
fn sentence(clause: &str) -> String {
    let clause = clause.trim_end_matches('.');
    let mut rest = clause.chars();
    rest.next().map_or_else(String::new, |first| {
        first.to_uppercase().chain(rest).collect::<String>() + "."
    })
}

/// What `elfen run` chose, once for each choice.
pub(super) fn mechanisms(rows: &[Row]) -> Option<String> {
    let chosen: BTreeSet<&str> = rows.iter().filter_map(|row| row.mechanisms.as_deref()).collect();
    let chosen: Vec<&str> = chosen.into_iter().collect();
    (!chosen.is_empty()).then(|| format!("Elfen ran with {}.", chosen.join("; and with ")))
}

/// The day of a time since 1970, in the calendar of today.
fn date(started_s: u64) -> String {
    let mut day = started_s / 86_400;
    let mut year = 1970;
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    // A damaged file must not keep us here: no run is later than this.
    while year < 9999 && day >= 365 + u64::from(leap(year)) {
        day -= 365 + u64::from(leap(year));
        year += 1;
    }
    let months = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in months {
        if day < length || month == 12 {
            break;
        }
        day -= length;
        month += 1;
    }
    format!("{year}-{month:02}-{:02}", day.min(30) + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: days are those of the calendar. Method: what `date -u -d @SECONDS +%F` prints.
    #[test]
    fn dates() {
        let cases = [
            (0, "1970-01-01"),
            (951_782_400, "2000-02-29"),
            (951_868_800, "2000-03-01"),
            (1_798_761_599, "2026-12-31"),
            (4_107_542_400, "2100-03-01"),
        ];
        for (seconds, expected) in cases {
            assert_eq!(date(seconds), expected);
        }
        assert!(date(u64::MAX).starts_with("9999-12-"));
    }
}
