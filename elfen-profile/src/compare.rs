//! How well an estimated profile fits an exact one, by the measures of two papers.
//!
//! - Overlap (HPS): the sum, over all members, of the smaller of their two shares.
//! - Of rules and data streams, the hottest members that make 90 % are compared, as in the paper.
//! - Weight match (Shadow Profiling, after Wall): the share that the estimated profile's hottest
//!   members have of the weight of the exact profile's hottest ones, at the same number of members.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;

use elfen_console::table;
use serde::Serialize;

use crate::overlap::{float, hot_part, overlap};
use crate::paths::blocks_of;
use crate::profile::{Edge, Place, Profile, ProfiledFile};
use crate::report::{CallPair, ProfileSums};
use crate::rule_sums;
use crate::rules::Handler;
use crate::streams;
use crate::sums::Sum;
use crate::symbols::{FunctionId, ProfileSymbols};
use crate::values;

/// The hottest members, by number, that the weight match looks at.
const HOTTEST: f64 = 0.05;

#[derive(Serialize, Debug)]
pub(crate) struct Comparison {
    exact: Vec<String>,
    estimated: Vec<String>,
    rows: Vec<Row>,
    /// Of results of instructions, if both have them.
    #[serde(skip_serializing_if = "Option::is_none")]
    values: Option<Values>,
}

#[derive(Serialize, Debug)]
struct Values {
    /// Instructions of the exact profile, and those of them that the other one has.
    members: usize,
    found: usize,
    /// The mean difference in how often the most frequent result came (Diff-Top).
    difference: f64,
}

#[derive(Serialize, Debug)]
struct Row {
    what: String,
    /// Members of the exact profile, and those of them that the other one has.
    members: usize,
    found: usize,
    overlap: f64,
    weight_match: f64,
}

impl Comparison {
    pub(crate) fn of(
        exact: (&Profile, &ProfileSymbols),
        estimated: (&Profile, &ProfileSymbols),
    ) -> Self {
        let files = common_files(exact.0, estimated.0);
        let sums = [ProfileSums::of(exact.0, exact.1), ProfileSums::of(estimated.0, estimated.1)];
        let function =
            |one: &FunctionId| Some(FunctionId { file: *files.get(&one.file)?, start: one.start });
        let [known, found] = sums;
        let functions = renamed(&totals(&found.instructions), function);
        let calls = renamed(&totals(&found.calls), |(from, to): &CallPair| {
            Some((function(from)?, function(to)?))
        });
        let edges = renamed(&counts(estimated.0), |edge: &Edge| {
            let (mut from, mut to) = (edge.from, edge.to);
            (from.file, to.file) = (*files.get(&from.file)?, *files.get(&to.file)?);
            Some(Edge { from, to, ..*edge })
        });
        let mut rows = vec![
            Row::of("functions, by instructions", &totals(&known.instructions), &functions),
            Row::of("edges", &counts(exact.0), &edges),
            Row::of("call pairs", &totals(&known.calls), &calls),
        ];
        if !exact.0.paths.is_empty() && !estimated.0.paths.is_empty() {
            let known = paths(exact.0, Some);
            let found = paths(estimated.0, |place: Place| {
                Some(Place { file: *files.get(&place.file)?, ..place })
            });
            rows.push(Row::of("paths", &known, &found));
        }
        for (rule, found) in estimated.0.rules.iter().zip(rule_sums::counts(estimated.0)) {
            let known = rule
                .handler
                .and_then(|handler| rule_sums::exactly(&rule.text, handler, exact.0, exact.1));
            let Some(known) = known else { continue };
            let found = renamed(&found, |method: &rule_sums::Method| method.renamed(&files));
            let what = format!("rule {}, hottest 90 %", rule.name);
            rows.push(Row::of(&what, &hot_part(&known), &hot_part(&found)));
        }
        let heats = |rule| {
            let found = streams::renamed_heats(estimated.0, rule, &files, exact.0);
            (hot_part(&streams::heats(exact.0, None)), hot_part(&found))
        };
        let has_streams = exact.0.streams.keys().any(|one| one.rule.is_none());
        if has_streams && estimated.0.references > 0 {
            let (known, found) = heats(None);
            rows.push(Row::of("data streams, hottest 90 %", &known, &found));
        }
        for (number, rule) in (0..).zip(&estimated.0.rules) {
            if has_streams && rule.handler == Some(Handler::DataStream) {
                let (known, found) = heats(Some(number));
                let what = format!("rule {}, hottest 90 %", rule.name);
                rows.push(Row::of(&what, &known, &found));
            }
        }
        let have_values = !exact.0.values.is_empty() && !estimated.0.values.is_empty();
        let values = have_values.then(|| {
            let (found, difference) = values::difference(exact.0, estimated.0, &files);
            Values { members: exact.0.values.len(), found, difference }
        });
        let (exact, estimated) = (exact.0.program.clone(), estimated.0.program.clone());
        Self { exact, estimated, rows, values }
    }

    pub(crate) fn text(&self) -> String {
        let rows: Vec<Vec<String>> = self.rows.iter().map(Row::cells).collect();
        let head = ["", "members", "found", "overlap", "weight match"];
        let mut text = table::lines(&head, &rows);
        if let Some(Values { members, found, difference }) = &self.values {
            text += &format!(
                "\nResults of {found} of {members} instructions: the most frequent one differs by \
                 {:.2} % (Diff-Top)\n",
                100.0 * difference
            );
        }
        text
    }
}

impl Row {
    fn of<K: Eq + Hash + Ord>(
        what: &str,
        exact: &HashMap<K, u64>,
        estimated: &HashMap<K, u64>,
    ) -> Self {
        let total: f64 = exact.values().map(|&count| float(count)).sum();
        let known = |key: &K| exact.get(key).map_or(0.0, |&count| float(count) / total.max(1.0));
        let hot = hottest(exact);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it is a small part of a length"
        )]
        let most = ((float(exact.len() as u64) * HOTTEST).ceil() as usize).max(1);
        let hot = &hot[..most.min(hot.len())];
        let weight: f64 = hot.iter().map(|key| known(key)).sum();
        let hottest_found = hottest(estimated);
        let hot_ones: HashSet<&K> = hot.iter().copied().collect();
        let matched = hottest_found.iter().take(hot.len()).filter(|key| hot_ones.contains(*key));
        // Not `sum`, whose sum of nothing is a negative zero.
        let matched = matched.fold(0.0, |sum, key| sum + known(key));
        Self {
            what: what.to_owned(),
            members: exact.len(),
            found: exact.keys().filter(|key| estimated.contains_key(key)).count(),
            overlap: overlap(exact, estimated),
            weight_match: matched / weight.max(f64::MIN_POSITIVE),
        }
    }

    fn cells(&self) -> Vec<String> {
        let three = |number: f64| format!("{number:.3}");
        vec![
            self.what.clone(),
            self.members.to_string(),
            self.found.to_string(),
            three(self.overlap),
            three(self.weight_match),
        ]
    }
}

/// The members with the largest counts first.
fn hottest<K: Ord>(all: &HashMap<K, u64>) -> Vec<&K> {
    let mut sorted: Vec<(&K, u64)> = all.iter().map(|(key, &count)| (key, count)).collect();
    sorted.sort_by(|a, b| (b.1, a.0).cmp(&(a.1, b.0)));
    sorted.into_iter().map(|(key, _)| key).collect()
}

/// How often each path was taken, by its blocks.
fn paths(profile: &Profile, renamed: impl Fn(Place) -> Option<Place>) -> HashMap<Vec<Place>, u64> {
    let paths = profile.paths.iter().filter_map(|(&last, path)| {
        let blocks = blocks_of(profile, last).into_iter().map(&renamed);
        Some((blocks.collect::<Option<_>>()?, path.count))
    });
    paths.collect()
}

fn counts(profile: &Profile) -> HashMap<Edge, u64> {
    profile.edges.iter().map(|(&edge, count)| (edge, count.count)).collect()
}

fn totals<K: Clone + Eq + Hash>(sums: &HashMap<K, Sum>) -> HashMap<K, u64> {
    sums.iter().map(|(key, sum)| (key.clone(), sum.count)).collect()
}

fn renamed<K, N: Eq + Hash>(
    all: &HashMap<K, u64>,
    name: impl Fn(&K) -> Option<N>,
) -> HashMap<N, u64> {
    all.iter().filter_map(|(key, &count)| Some((name(key)?, count))).collect()
}

/// The indices of files of the estimated profile, and of the same files in the exact one.
pub(crate) fn common_files(exact: &Profile, estimated: &Profile) -> HashMap<u32, u32> {
    let mut known: HashMap<&ProfiledFile, u32> = HashMap::new();
    for (index, file) in (0..).zip(&exact.files) {
        known.entry(file).or_insert(index);
    }
    let found = (0..).zip(&estimated.files);
    found.filter_map(|(index, file)| Some((index, *known.get(file)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(exact: &[(u32, u64)], estimated: &[(u32, u64)]) -> Row {
        let map = |all: &[(u32, u64)]| all.iter().copied().collect();
        Row::of("", &map(exact), &map(estimated))
    }

    #[test]
    fn equal_shares_overlap_whatever_the_totals() {
        let one = row(&[(1, 30), (2, 70)], &[(1, 3), (2, 7)]);
        assert!((one.overlap - 1.0).abs() < 1e-9 && (one.weight_match - 1.0).abs() < 1e-9);
    }

    #[test]
    fn what_is_missing_or_too_much_does_not_overlap() {
        let one = row(&[(1, 50), (2, 50)], &[(1, 10), (3, 30)]);
        assert!((one.overlap - 0.25).abs() < 1e-9);
        assert_eq!((one.members, one.found), (2, 1));
    }

    /// Goal: the weight match looks at the hottest members only. Method: the hottest of twenty is
    /// right, or is another one.
    #[test]
    fn the_weight_match_is_that_of_the_hottest() {
        let exact: Vec<(u32, u64)> =
            (0..20).map(|number| (number, 100 - u64::from(number))).collect();
        assert!((row(&exact, &[(0, 9), (7, 3)]).weight_match - 1.0).abs() < 1e-9);
        assert!(row(&exact, &[(1, 9), (0, 3)]).weight_match < 1e-9);
    }
}
