//! The hot data streams of a profile.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::path::Path;

use serde::Serialize;

use crate::hot_streams::first_rotation;
use crate::lines::Lines;
use crate::profile::{DataReference, DataStream, Place, Profile, StreamCount};
use crate::sums::{error, grouped, share};
use crate::symbols::ProfileSymbols;

/// References of a stream that are printed.
const SHOWN: usize = 2;

#[derive(Serialize, Debug)]
pub(crate) struct StreamRow {
    /// References that it makes up: its length times its occurrences.
    heat: u64,
    /// Of all references, in percent.
    share_percent: f64,
    length: usize,
    /// Times that it occurred.
    count: u64,
    /// Bursts in which it occurred; 0 if everything was counted.
    bursts: u64,
    /// Its references, from the one that it began with when it was found.
    references: Vec<ReferenceRow>,
}

#[derive(Serialize, Debug)]
struct ReferenceRow {
    /// As `function+0x12`.
    instruction: String,
    /// As `/sources/list.c` and 12. Absent if it is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<u32>,
    /// As `[heap]+0x2a0`.
    data: String,
}

/// The streams with the most references, and how many references all streams make up.
#[derive(Serialize, Debug)]
pub(crate) struct StreamReport {
    references: u64,
    streams: usize,
    /// The part of all references that are in streams.
    covered_percent: f64,
    hottest: Vec<StreamRow>,
}

/// How many references a stream makes up.
pub(crate) fn heat(stream: &DataStream, count: &StreamCount) -> u64 {
    count.times.saturating_mul(stream.references.len() as u64)
}

/// The streams of a rule or of the whole program, the hottest first.
fn sorted(profile: &Profile, rule: Option<u32>) -> Vec<(&DataStream, &StreamCount)> {
    let mut sorted: Vec<_> =
        profile.streams.iter().filter(|(stream, _)| stream.rule == rule).collect();
    sorted.sort_by_key(|&(stream, count)| (Reverse(heat(stream, count)), stream));
    sorted
}

pub(crate) fn report(profile: &Profile, symbols: &ProfileSymbols, top: usize) -> StreamReport {
    let sorted = sorted(profile, None);
    let all = sorted.iter().fold(0, |all: u64, one| all.saturating_add(heat(one.0, one.1)));
    let mut lines = LineCache { profile, read: HashMap::new() };
    let rows = sorted.iter().take(top).map(|&(stream, count)| {
        let heat = heat(stream, count);
        StreamRow {
            heat,
            share_percent: share(heat, profile.references),
            length: stream.references.len(),
            count: count.times,
            bursts: count.bursts,
            references: in_order(stream, count)
                .map(|one| reference_row(one, profile, symbols, &mut lines))
                .collect(),
        }
    });
    let hottest = rows.collect();
    let covered_percent = share(all, profile.references);
    StreamReport { references: profile.references, streams: sorted.len(), covered_percent, hottest }
}

/// The first references of the hottest streams of a rule, with their counts.
pub(crate) fn of_rule(
    profile: &Profile,
    symbols: &ProfileSymbols,
    rule: u32,
    top: usize,
) -> Vec<(String, Place, u64, u64)> {
    let found = sorted(profile, Some(rule)).into_iter().take(top).filter_map(|(stream, count)| {
        let first = in_order(stream, count).next()?;
        let more = stream.references.len() - 1;
        let text = format!("{} {} > {more} more", symbols.place(first.at), data(first, profile));
        Some((text, first.at, heat(stream, count), count.bursts))
    });
    found.collect()
}

/// The references of a stream, from the one that it began with.
fn in_order<'a>(
    stream: &'a DataStream,
    count: &StreamCount,
) -> impl Iterator<Item = &'a DataReference> {
    let all = &stream.references;
    let (before, after) = all.split_at_checked(count.first as usize).unwrap_or((&[], all));
    after.iter().chain(before)
}

fn reference_row(
    one: &DataReference,
    profile: &Profile,
    symbols: &ProfileSymbols,
    lines: &mut LineCache<'_>,
) -> ReferenceRow {
    let found = lines.line(one.at, symbols);
    let (path, line) = found.map_or((None, None), |(path, line)| (Some(path), Some(line)));
    let instruction = symbols.place(one.at);
    ReferenceRow { instruction, path, line, data: data(one, profile) }
}

/// A place in memory, as `[heap]+0x2a0`.
fn data(one: &DataReference, profile: &Profile) -> String {
    let region = profile.regions.get(one.region as usize).map_or("?", String::as_str);
    let name = region.rsplit('/').next().unwrap_or(region);
    let sign = if one.distance < 0 { '-' } else { '+' };
    format!("{name}{sign}{:#x}", one.distance.unsigned_abs())
}

/// The lines of the files that are asked for.
struct LineCache<'a> {
    profile: &'a Profile,
    read: HashMap<u32, Option<Lines>>,
}

impl LineCache<'_> {
    fn line(&mut self, at: Place, symbols: &ProfileSymbols) -> Option<(String, u32)> {
        let address = symbols.table(at.file)?.address_of(at.offset)?;
        let file = self.profile.files.get(at.file as usize)?;
        let lines = self.read.entry(at.file).or_insert_with(|| Lines::read(Path::new(&file.path)));
        let lines = lines.as_ref()?;
        let row = lines.row_at(address)?;
        Some((lines.source(row)?.path.clone(), row.line))
    }
}

impl StreamReport {
    pub(crate) const HEADING: [&str; 6] =
        ["share %", "± %", "references", "length", "times", "begins with"];

    pub(crate) fn summary(&self) -> String {
        format!(
            "{} hot data streams with {:.1} % of {} memory accesses\n",
            grouped(self.streams as u64),
            self.covered_percent,
            grouped(self.references)
        )
    }

    pub(crate) fn cells(&self) -> Vec<Vec<String>> {
        self.hottest.iter().map(StreamRow::cells).collect()
    }
}

impl StreamRow {
    fn cells(&self) -> Vec<String> {
        let shown: Vec<String> =
            self.references.iter().take(SHOWN).map(ReferenceRow::shown).collect();
        vec![
            format!("{:.2}", self.share_percent),
            error(self.bursts),
            grouped(self.heat),
            self.length.to_string(),
            grouped(self.count),
            shown.join(" > "),
        ]
    }
}

impl ReferenceRow {
    fn shown(&self) -> String {
        let Self { instruction, path, line, data } = self;
        let name = path.as_deref().and_then(|path| path.rsplit('/').next());
        match name.zip(*line) {
            Some((name, line)) => format!("{instruction} ({name}:{line}) {data}"),
            None => format!("{instruction} {data}"),
        }
    }
}

/// The heat of each stream of a rule or of the whole program.
pub fn heats(profile: &Profile, rule: Option<u32>) -> HashMap<Vec<DataReference>, u64> {
    let own = sorted(profile, rule).into_iter();
    own.map(|(stream, count)| (stream.references.clone(), heat(stream, count))).collect()
}

/// The heat of each stream, with the files and regions of another profile. Streams in files that
/// the other profile lacks are added up as an empty sequence.
pub(crate) fn renamed_heats(
    profile: &Profile,
    rule: Option<u32>,
    files: &HashMap<u32, u32>,
    other: &Profile,
) -> HashMap<Vec<DataReference>, u64> {
    let regions: Vec<Option<u32>> = profile
        .regions
        .iter()
        .map(|name| {
            let found = other.regions.iter().position(|one| one == name)?;
            u32::try_from(found).ok()
        })
        .collect();
    let renamed = |one: &DataReference| {
        let file = *files.get(&one.at.file)?;
        let region = (*regions.get(one.region as usize)?)?;
        Some(DataReference { at: Place { file, ..one.at }, region, ..*one })
    };
    let mut heats: HashMap<Vec<DataReference>, u64> = HashMap::new();
    for (stream, count) in sorted(profile, rule) {
        let known: Option<Vec<DataReference>> = stream.references.iter().map(renamed).collect();
        // The order of the other names may make another rotation the first one.
        let mut known = known.unwrap_or_default();
        let first = first_rotation(&known);
        known.rotate_left(first);
        let sum = heats.entry(known).or_default();
        *sum = sum.saturating_add(heat(stream, count));
    }
    heats
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(files: &[&str], streams: &[(&[(u32, i64)], u64)]) -> Profile {
        let mut profile = Profile { references: 1000, ..Profile::default() };
        for path in files {
            profile.file(path);
        }
        profile.region("[heap]");
        for (references, times) in streams {
            let references = references.iter().map(|&(file, distance)| DataReference {
                at: Place { file, offset: 16 },
                region: 0,
                distance,
            });
            let mut references: Vec<DataReference> = references.collect();
            let from = first_rotation(&references);
            references.rotate_left(from);
            let first = u32::try_from((references.len() - from) % references.len()).unwrap();
            let count = StreamCount { times: *times, bursts: 4, first };
            profile.add_stream(DataStream { rule: None, references }, count);
        }
        profile
    }

    #[test]
    fn the_hottest_come_first_and_begin_where_they_were_found() {
        let profile =
            profile(&["/nowhere/a"], &[(&[(0, 9), (0, -8), (0, 1)], 10), (&[(0, 1), (0, 2)], 200)]);
        let (symbols, _) = ProfileSymbols::read(&profile);
        let report = report(&profile, &symbols, 2);
        assert_eq!(report.summary(), "2 hot data streams with 43.0 % of 1,000 memory accesses\n");
        let cells = report.cells();
        assert_eq!(cells[0][..5], ["40.00", "50", "400", "2", "200"]);
        let shown = "[no symbol]+0x10 [heap]+0x9 > [no symbol]+0x10 [heap]-0x8";
        assert_eq!(cells[1][2..], ["30", "3", "10", shown]);
    }

    /// Goal: streams are the same in two profiles whose files have other numbers.
    #[test]
    fn streams_are_compared_by_names() {
        let exact = profile(&["/a", "/b"], &[(&[(0, 1), (1, 2)], 3)]);
        let other = profile(&["/b", "/a"], &[(&[(1, 1), (0, 2)], 5), (&[(0, 7), (0, 8)], 5)]);
        let files = HashMap::from([(0, 1), (1, 0)]);
        let found = renamed_heats(&other, None, &files, &exact);
        let known = heats(&exact, None);
        assert_eq!(known.keys().filter(|key| found.contains_key(*key)).count(), 1);
        assert_eq!(found.values().sum::<u64>(), 20);
        // A file that the exact profile does not have.
        let found = renamed_heats(&other, None, &HashMap::from([(1, 0)]), &exact);
        assert_eq!(found, HashMap::from([(Vec::new(), 20)]));
    }
}
