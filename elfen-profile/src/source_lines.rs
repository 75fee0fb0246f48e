//! The source lines of a profile, by the instructions that were executed for them.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use elfen_instrument::symbols::{demangled, read_regular};
use serde::Serialize;

use crate::instructions::InstructionCounts;
use crate::lines::{Lines, SourceFile};
use crate::profile::Profile;
use crate::sums::{Sum, error, grouped, share};
use crate::symbols::ProfileSymbols;

/// A source line, or all instructions of a file that have no line.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub(crate) struct LineRow {
    instructions: u64,
    /// Of all instructions, in percent.
    share_percent: f64,
    /// Bursts in which it ran; 0 if everything was counted.
    bursts: u64,
    /// The source file, with its folder, and the line in it.
    path: Option<String>,
    line: Option<u32>,
    /// The function that the line is in. If it is in several, the one with the most instructions.
    function: Option<String>,
    /// The program or library with the most instructions of the line.
    file: String,
    /// The line as the table shows it.
    #[serde(skip)]
    shown: String,
}

/// What ran of one line.
#[derive(Default)]
struct LineSum {
    sum: Sum,
    /// By program or library, and function.
    within: BTreeMap<(u32, String), u64>,
}

/// The `top` lines with the most instructions. `None` if no instruction has a line.
pub(crate) fn hottest(
    profile: &Profile,
    symbols: &ProfileSymbols,
    top: usize,
) -> Option<Vec<LineRow>> {
    let mut lines: HashMap<(SourceFile, u32), LineSum> = HashMap::new();
    let mut without: BTreeMap<u32, Sum> = BTreeMap::new();
    for (number, file) in (0..).zip(&profile.files) {
        add_file(profile, symbols, (number, &file.path), &mut lines, &mut without);
    }
    if lines.is_empty() {
        return None;
    }
    let all = lines.values().map(|line| line.sum).chain(without.values().copied());
    let all = all.fold(0_u64, |all, sum| all.saturating_add(sum.count));
    let names = short_paths(lines.keys().map(|(source, _)| source));
    let with_line = lines.iter().map(|((source, line), LineSum { sum, within })| {
        let hottest = within.iter().max_by_key(|&(_, &count)| count);
        let (file, function) = hottest.map_or((0, ""), |((file, name), _)| (*file, name));
        let name = names.get(source.path.as_str()).copied().unwrap_or(&source.path);
        LineRow {
            instructions: sum.count,
            share_percent: share(sum.count, all),
            bursts: sum.bursts,
            path: Some(source.path.clone()),
            line: Some(*line),
            function: (!function.is_empty()).then(|| function.to_owned()),
            file: symbols.file_name(file).to_owned(),
            shown: format!("{name}:{line}"),
        }
    });
    let without = without.iter().map(|(&file, sum)| LineRow {
        instructions: sum.count,
        share_percent: share(sum.count, all),
        bursts: sum.bursts,
        path: None,
        line: None,
        function: None,
        file: symbols.file_name(file).to_owned(),
        shown: format!("[no line] {}", symbols.file_name(file)),
    });
    let mut rows: Vec<LineRow> = with_line.chain(without).collect();
    rows.sort_by(|a, b| {
        (b.instructions, &a.path, a.line, &a.file).cmp(&(a.instructions, &b.path, b.line, &b.file))
    });
    rows.truncate(top);
    Some(rows)
}

/// Adds the instructions of one file of a profile.
fn add_file(
    profile: &Profile,
    symbols: &ProfileSymbols,
    (number, path): (u32, &str),
    sums: &mut HashMap<(SourceFile, u32), LineSum>,
    without: &mut BTreeMap<u32, Sum>,
) {
    let table = symbols.table(number);
    let found = table.and_then(|table| {
        let lines = Lines::read(Path::new(path))?;
        Some((table, read_regular(Path::new(path))?, lines))
    });
    let code = found.as_ref().map(|(table, bytes, _)| (*table, &**bytes));
    let counts = InstructionCounts::of(profile, number, code);
    let mut no_line = counts.unknown;
    let mut names: HashMap<&str, String> = HashMap::new();
    for (&address, sum) in &counts.by_address {
        let line = found.as_ref().and_then(|(table, _, lines)| {
            let row = lines.row_at(address)?;
            Some((table, lines, lines.source(row)?, row.line))
        });
        let Some((table, lines, source, line)) = line else {
            no_line.add(sum.count, sum.bursts);
            continue;
        };
        let function = match lines.innermost(address) {
            Some(name) => names.entry(name).or_insert_with(|| demangled(name)).clone(),
            None => table.at(address).map(|one| one.name.clone()).unwrap_or_default(),
        };
        let known = sums.entry((source.clone(), line)).or_default();
        known.sum.add(sum.count, sum.bursts);
        let within = known.within.entry((number, function)).or_default();
        *within = within.saturating_add(sum.count);
    }
    if no_line.count > 0 {
        without.insert(number, no_line);
    }
}

impl LineRow {
    pub(crate) fn cells(&self) -> Vec<String> {
        vec![
            format!("{:.2}", self.share_percent),
            error(self.bursts),
            grouped(self.instructions),
            self.shown.clone(),
            self.function.clone().unwrap_or_default(),
        ]
    }
}

/// A name for each source file, by its path: the path from the folder that the compiler ran in, or
/// as few last parts as no other of these files has.
pub(crate) fn short_paths<'a>(
    files: impl Iterator<Item = &'a SourceFile>,
) -> HashMap<&'a str, &'a str> {
    let files: BTreeMap<&str, Option<&str>> =
        files.map(|file| (&*file.path, file.in_folder.as_deref())).collect();
    let mut ends: HashMap<&str, u32> = HashMap::new();
    for path in files.keys() {
        for end in ends_of(path) {
            *ends.entry(end).or_default() += 1;
        }
    }
    let is_only = |name: &&str| ends.get(name).is_none_or(|&times| times == 1);
    let names = files.iter().map(|(&path, &in_folder)| {
        let name = match in_folder {
            Some(name) => Some(name).filter(is_only),
            None => ends_of(path).find(is_only),
        };
        (path, name.unwrap_or(path))
    });
    names.collect()
}

/// The last parts of a path, the shortest first.
fn ends_of(path: &str) -> impl Iterator<Item = &str> {
    path.rmatch_indices('/').map(|(at, _)| &path[at + 1..]).chain([path])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_as_short_as_they_are_unambiguous() {
        let file = |path: &str, in_folder: Option<&str>| SourceFile {
            path: path.to_owned(),
            in_folder: in_folder.map(str::to_owned),
        };
        let files = [
            file("/sources/src/a.c", Some("src/a.c")),
            file("/usr/include/stdio.h", None),
            file("/usr/include/sys/stat.h", None),
            file("/usr/include/bits/stat.h", None),
            file("/other/src/b.c", Some("src/b.c")),
            file("/more/src/b.c", Some("src/b.c")),
        ];
        let names = short_paths(files.iter());
        let found: Vec<&str> = files.iter().map(|file| names[&*file.path]).collect();
        let expected =
            ["src/a.c", "stdio.h", "sys/stat.h", "bits/stat.h", "/other/src/b.c", "/more/src/b.c"];
        assert_eq!(found, expected);
    }
}
