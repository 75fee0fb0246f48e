//! The instructions of a profile whose results are nearly always the same.

use std::cmp::Reverse;
use std::collections::HashMap;

use serde::Serialize;

use crate::profile::{Place, Profile, ValueCount};
use crate::sums::{error, grouped, share};
use crate::symbols::ProfileSymbols;

/// Values that are printed for one instruction.
const SHOWN: usize = 3;

#[derive(Serialize, Debug)]
pub(crate) struct ValueRow {
    /// As `function+0x12`.
    instruction: String,
    /// Of all results, in percent.
    share_percent: f64,
    /// Times that it ran.
    count: u64,
    /// Bursts in which it ran; 0 if everything was counted.
    bursts: u64,
    /// How often the result was the most frequent one, in percent.
    invariance_percent: f64,
    /// The most frequent results first.
    values: Vec<ValueShare>,
}

#[derive(Serialize, Debug)]
struct ValueShare {
    value: u64,
    percent: f64,
}

/// The instructions whose most frequent result came most often.
pub(crate) fn hottest(profile: &Profile, symbols: &ProfileSymbols, top: usize) -> Vec<ValueRow> {
    let all = profile.values.values().fold(0, |all: u64, one| all.saturating_add(one.count));
    let mut sorted: Vec<(&Place, &ValueCount)> = profile.values.iter().collect();
    let first = |one: &ValueCount| one.top.first().map_or(0, |&(_, count)| count);
    sorted.sort_by_key(|(place, one)| (Reverse(first(one)), **place));
    sorted.truncate(top);
    let row = |(&place, one): (&Place, &ValueCount)| ValueRow {
        instruction: symbols.place(place),
        share_percent: share(one.count, all),
        count: one.count,
        bursts: one.bursts,
        invariance_percent: share(first(one), one.count),
        values: one
            .top
            .iter()
            .map(|&(value, count)| ValueShare { value, percent: share(count, one.count) })
            .collect(),
    };
    sorted.into_iter().map(row).collect()
}

impl ValueRow {
    pub(crate) const HEADING: [&str; 6] =
        ["share %", "± %", "times", "invariant %", "results", "instruction"];

    pub(crate) fn cells(&self) -> Vec<String> {
        let shown = self.values.iter().take(SHOWN).map(|one| {
            let ValueShare { value, percent } = one;
            if *value < 1 << 16 {
                format!("{value} ({percent:.0} %)")
            } else {
                format!("{value:#x} ({percent:.0} %)")
            }
        });
        vec![
            format!("{:.2}", self.share_percent),
            error(self.bursts),
            grouped(self.count),
            format!("{:.1}", self.invariance_percent),
            shown.collect::<Vec<_>>().join(", "),
            self.instruction.clone(),
        ]
    }
}

/// How far the invariance of instructions differs between two profiles, as Shadow Profiling
/// measures it (Diff-Top): the mean over the instructions that both have, weighted by the exact
/// counts. The values themselves may differ: addresses do, from run to run. Returns how many both
/// have, too.
pub(crate) fn difference(
    exact: &Profile,
    estimated: &Profile,
    files: &HashMap<u32, u32>,
) -> (usize, f64) {
    let (mut found, mut weight, mut sum) = (0, 0.0, 0.0);
    for (place, one) in &estimated.values {
        let Some(&file) = files.get(&place.file) else { continue };
        let Some(known) = exact.values.get(&Place { file, ..*place }) else { continue };
        let invariance = |one: &ValueCount| {
            share(one.top.first().map_or(0, |&(_, count)| count), one.count) / 100.0
        };
        let difference = (invariance(known) - invariance(one)).abs();
        let executions = share(known.count, 100);
        found += 1;
        weight += executions;
        sum += executions * difference;
    }
    (found, if weight > 0.0 { sum / weight } else { 0.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(rows: &[(u64, u64, u64, u64)]) -> Profile {
        let mut profile = Profile::default();
        let file = profile.file("/nowhere/a");
        for &(offset, count, value, times) in rows {
            let top = vec![(value, times)];
            profile
                .add_values(Place { file, offset }, ValueCount { bytes: 8, count, bursts: 1, top });
        }
        profile
    }

    /// Goal: the difference is that of the parts of the top values, weighted. Method: one
    /// instruction with the same part, one with another, and one that only one profile has.
    #[test]
    fn differences_are_weighted_by_exact_counts() {
        let exact = profile(&[(0, 300, 5, 150), (8, 100, 6, 100), (16, 900, 1, 1)]);
        let estimated = profile(&[(0, 10, 5, 5), (8, 10, 7, 0), (24, 9, 1, 9)]);
        let (found, difference) = difference(&exact, &estimated, &HashMap::from([(0, 0)]));
        assert_eq!(found, 2);
        assert!((difference - 0.25).abs() < 1e-9, "{difference}");
    }

    #[test]
    fn the_most_invariant_come_first() {
        let profile = profile(&[(0, 100, 5, 50), (8, 100, 0x1_2345, 90)]);
        let (symbols, _) = ProfileSymbols::read(&profile);
        let rows = hottest(&profile, &symbols, 1);
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0].cells()[2..5], ["100", "90.0", "0x12345 (90 %)"]);
    }
}
