//! What changed between two profiles: functions, calls or edges, by their shares.
//!
//! Each share has an error, which follows from the number of bursts that it was seen in. A change
//! counts if it is larger than twice the error of both shares.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;

use serde::Serialize;

use crate::compare::common_files;
use crate::profile::{Place, Profile, Source};
use crate::report::ProfileSums;
use crate::sums::{Sum, grouped, relative_error, share, total, without_columns};
use crate::symbols::{FunctionId, NO_SYMBOL, ProfileSymbols};

/// A change counts if it is larger than this many of its errors.
const ERRORS: f64 = 2.0;

/// What is compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DiffKey {
    /// Functions, by their share of the instructions
    Function,
    /// Pairs of calling and called function, by their share of the calls
    Call,
    /// Edges, by their share of all edges; only of files that have not changed
    Edge,
}

/// A profile with the symbols of its files.
pub(crate) type Side<'a> = (&'a Profile, &'a ProfileSymbols);

#[derive(Serialize, Debug)]
pub(crate) struct Diff {
    /// The command lines.
    before: Vec<String>,
    after: Vec<String>,
    sort: DiffKey,
    rows: Vec<DiffRow>,
    /// Rows that are left out because their changes are within twice their errors.
    left_out: usize,
    #[serde(skip)]
    is_exact: bool,
}

#[derive(Clone, PartialEq, Serialize, Debug)]
struct DiffRow {
    #[serde(flatten)]
    change: Change,
    #[serde(flatten)]
    what: Changed,
}

/// Two shares and their difference, in percent and percentage points.
#[derive(Clone, Copy, PartialEq, Default, Serialize, Debug)]
struct Change {
    before_percent: f64,
    after_percent: f64,
    change_points: f64,
    /// Of both shares; 0 if everything was counted.
    error_points: f64,
}

/// What a row is about.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Debug)]
#[serde(untagged)]
enum Changed {
    Function { function: String, file: String },
    Pair { from: String, from_file: String, to: String, to_file: String },
}

/// The name of a function, or of a place in one, and the name of its file without the folder.
type Name = (String, String);

impl Diff {
    /// The `top` largest changes, of all changes or of those larger than twice their errors.
    pub(crate) fn of(
        before: Side<'_>,
        after: Side<'_>,
        sort: DiffKey,
        top: usize,
        all: bool,
    ) -> Self {
        let bursts = [before, after]
            .map(|(profile, _)| (profile.by != Source::Everything).then_some(profile.bursts));
        let same = same_files(before.0, after.0);
        let sides = [(before, &same[0]), (after, &same[1])];
        let pair = |(from, from_file): Name, (to, to_file): Name| Changed::Pair {
            from,
            from_file,
            to,
            to_file,
        };
        let mut rows: Vec<DiffRow> = match sort {
            DiffKey::Function => {
                let sums = sides.map(|((profile, symbols), same)| {
                    let sums = ProfileSums::of(profile, symbols).instructions;
                    let of_all = total(sums.values());
                    (by_name(sums, |id| Some(function_name(symbols, id, same))), of_all)
                });
                let function = |(function, file): Name| Changed::Function { function, file };
                rows(sums, bursts, function)
            }
            DiffKey::Call => {
                let sums = sides.map(|((profile, symbols), same)| {
                    let sums = ProfileSums::of(profile, symbols).calls;
                    let of_all = total(sums.values());
                    let name = |id: &FunctionId| function_name(symbols, id, same);
                    (by_name(sums, |(from, to)| Some((name(from), name(to)))), of_all)
                });
                rows(sums, bursts, |(from, to)| pair(from, to))
            }
            DiffKey::Edge => {
                let common = common_files(after.0, before.0);
                let moved = |place: Place| {
                    Some(Place { file: *common.get(&place.file)?, offset: place.offset })
                };
                let old = edges(before.0);
                let new = edges(after.0);
                let totals = [&old, &new].map(|sums| total(sums.values()));
                let old = by_name(old, |&(from, to)| Some((moved(from)?, moved(to)?)));
                let new = by_name(new, |&(from, to)| {
                    [from, to].iter().all(|one| same[1].contains(&one.file)).then_some((from, to))
                });
                let place = |place: Place| place_name(after.1, place);
                let sums = [(old, totals[0]), (new, totals[1])];
                rows(sums, bursts, |(from, to)| pair(place(from), place(to)))
            }
        };
        let found = rows.len();
        rows.retain(|row| all || row.change.is_significant());
        let left_out = found - rows.len();
        rows.sort_by(|a, b| {
            let [size, other] = [a, b].map(|row| row.change.change_points.abs());
            other.total_cmp(&size).then_with(|| a.what.cmp(&b.what))
        });
        rows.truncate(top);
        Self {
            before: before.0.program.clone(),
            after: after.0.program.clone(),
            sort,
            rows,
            left_out,
            is_exact: bursts == [None; 2],
        }
    }

    pub(crate) fn text(&self) -> String {
        let names: &[&str] = match self.sort {
            DiffKey::Function => &["function"],
            DiffKey::Call | DiffKey::Edge => &["from", "to"],
        };
        let head = [&["before %", "after %", "change", "±"], names].concat();
        let shared = shared_names(self.rows.iter().map(|row| &row.what));
        let cells =
            self.rows.iter().map(|row| [row.change.cells(), row.what.cells(&shared)].concat());
        // Exact shares have no error.
        let mut text =
            without_columns(&head, cells.collect(), if self.is_exact { &[3] } else { &[] });
        if self.left_out > 0 {
            let (one, many) = match self.sort {
                DiffKey::Function => ("function is", "functions are"),
                DiffKey::Call => ("call pair is", "call pairs are"),
                DiffKey::Edge => ("edge is", "edges are"),
            };
            let what = if self.left_out == 1 { one } else { many };
            let why = if self.is_exact { "without a change" } else { "within twice the error" };
            let number = grouped(self.left_out as u64);
            text += &format!("\n{number} {what} left out: {why}; see --all\n");
        }
        text
    }
}

impl Change {
    /// Of sums, of the sums of all rows, and of the bursts of estimated profiles.
    fn of(sums: [Sum; 2], totals: [u64; 2], bursts: [Option<u64>; 2]) -> Self {
        let [before, after] = [0, 1].map(|at| share(sums[at].count, totals[at]));
        let error = |at: usize, share: f64, other: f64| match bursts[at] {
            None => 0.0,
            // What was never seen may have as large a share as on the other side.
            Some(all) if sums[at].bursts == 0 => (100.0 * other).sqrt() * relative_error(all),
            Some(_) => share * relative_error(sums[at].bursts),
        };
        let (before_error, after_error) = (error(0, before, after), error(1, after, before));
        Self {
            before_percent: before,
            after_percent: after,
            change_points: after - before,
            error_points: before_error.hypot(after_error),
        }
    }

    fn is_significant(&self) -> bool {
        self.change_points.abs() > ERRORS * self.error_points
    }

    fn cells(&self) -> Vec<String> {
        vec![
            format!("{:.2}", self.before_percent),
            format!("{:.2}", self.after_percent),
            format!("{:+.2}", self.change_points),
            format!("{:.2}", self.error_points),
        ]
    }
}

impl Changed {
    fn names(&self) -> Vec<(&str, &str)> {
        match self {
            Self::Function { function, file } => vec![(function, file)],
            Self::Pair { from, from_file, to, to_file } => vec![(from, from_file), (to, to_file)],
        }
    }

    /// Names, and files of shared names.
    fn cells(&self, shared: &BTreeSet<&str>) -> Vec<String> {
        let cell = |(name, file): (&str, &str)| {
            if shared.contains(name) { format!("{name} ({file})") } else { name.to_owned() }
        };
        self.names().into_iter().map(cell).collect()
    }
}

/// Names that occur in several files, and names that say nothing without a file.
fn shared_names<'a>(all: impl Iterator<Item = &'a Changed>) -> BTreeSet<&'a str> {
    let mut files: HashMap<&str, &str> = HashMap::new();
    let mut shared = BTreeSet::new();
    for (name, file) in all.flat_map(Changed::names) {
        let is_shared = *files.entry(name).or_insert(file) != file;
        if is_shared || name.starts_with(NO_SYMBOL) {
            shared.insert(name);
        }
    }
    shared
}

/// The indices, in each profile, of the files that are the same in both.
fn same_files(before: &Profile, after: &Profile) -> [BTreeSet<u32>; 2] {
    let common = common_files(after, before);
    [common.keys().copied().collect(), common.into_values().collect()]
}

/// The files whose edges cannot be compared.
pub(crate) fn other_files<'a>(before: &'a Profile, after: &'a Profile) -> BTreeSet<&'a str> {
    let same = same_files(before, after);
    let mut others = BTreeSet::new();
    for (profile, same) in [before, after].into_iter().zip(&same) {
        for (number, file) in (0..).zip(&profile.files) {
            if !same.contains(&number) {
                others.insert(&*file.path);
            }
        }
    }
    others
}

/// The name of a function that both profiles know it by.
fn function_name(symbols: &ProfileSymbols, id: &FunctionId, same: &BTreeSet<u32>) -> Name {
    let found = id.start.and_then(|start| symbols.table(id.file)?.at(start));
    // Functions without a symbol are named by their addresses, which a build changes.
    let is_named = found.is_some_and(|one| !one.symbol.is_empty() || same.contains(&id.file));
    let name = if is_named { symbols.name(id) } else { NO_SYMBOL.to_owned() };
    (name, symbols.file_name(id.file).to_owned())
}

fn place_name(symbols: &ProfileSymbols, place: Place) -> Name {
    (symbols.place(place), symbols.file_name(place.file).to_owned())
}

/// A row for each member of at least one side.
fn rows<K: Eq + Hash>(
    sums: [(HashMap<K, Sum>, u64); 2],
    bursts: [Option<u64>; 2],
    named: impl Fn(K) -> Changed,
) -> Vec<DiffRow> {
    let [(before, before_total), (after, after_total)] = sums;
    let mut both: HashMap<K, [Sum; 2]> = HashMap::new();
    for (side, sums) in [before, after].into_iter().enumerate() {
        for (key, sum) in sums {
            both.entry(key).or_default()[side] = sum;
        }
    }
    let totals = [before_total, after_total];
    let row = |(key, sums)| DiffRow { change: Change::of(sums, totals, bursts), what: named(key) };
    both.into_iter().map(row).collect()
}

/// Sums by other names; members without one are left out.
fn by_name<K, N: Eq + Hash>(
    sums: HashMap<K, Sum>,
    name: impl Fn(&K) -> Option<N>,
) -> HashMap<N, Sum> {
    let mut named: HashMap<N, Sum> = HashMap::new();
    for (key, sum) in sums {
        if let Some(name) = name(&key) {
            named.entry(name).or_default().add(sum.count, sum.bursts);
        }
    }
    named
}

fn edges(profile: &Profile) -> HashMap<(Place, Place), Sum> {
    let mut sums: HashMap<(Place, Place), Sum> = HashMap::new();
    for (edge, one) in &profile.edges {
        sums.entry((edge.from, edge.to)).or_default().add(one.count, one.bursts);
    }
    sums
}

#[cfg(test)]
mod tests {
    use elfen_stream::counts::EdgeKind;

    use super::*;
    use crate::profile::{BlockCount, Edge, EdgeCount};

    fn sum(count: u64, bursts: u64) -> Sum {
        Sum { count, bursts }
    }

    /// Goal: only changes beyond twice the error of both shares count. Method: shares of 20 and
    /// 30 %, seen in 100 bursts each: errors of 2 and 3 points.
    #[test]
    fn a_change_counts_beyond_twice_its_error() {
        let of = |bursts| Change::of([sum(20, 100), sum(30, 100)], [100, 100], bursts);
        let many = Some(1_000_000);
        let both = of([many, many]);
        assert!((both.change_points - 10.0).abs() < 1e-9);
        assert!((both.error_points - 13_f64.sqrt()).abs() < 1e-9);
        assert!(both.is_significant());
        assert_eq!(both.cells(), ["20.00", "30.00", "+10.00", "3.61"]);
        assert!((of([None, many]).error_points - 3.0).abs() < 1e-9);
        assert!(of([None, None]).error_points.abs() < 1e-9);
        let few = Change::of([sum(20, 9), sum(30, 9)], [100, 100], [many, many]);
        assert!(!few.is_significant());
        // What is new is certain if it was seen often enough.
        let new = |bursts| Change::of([sum(0, 0), sum(1, bursts)], [100, 100], [many, many]);
        assert!(!new(4).is_significant() && new(5).is_significant());
        // What few bursts have not seen may have been there.
        let unseen = |all| Change::of([sum(0, 0), sum(1, 0)], [100, 100], [Some(all), None]);
        assert!(!unseen(400).is_significant() && unseen(401).is_significant());
        let same = Change::of([sum(1, 0), sum(3, 0)], [100, 300], [None, None]);
        assert!(!same.is_significant());
        assert_eq!(Change::of([sum(0, 0); 2], [0, 0], [many, many]), Change::default());
    }

    #[test]
    fn names_in_several_files_have_their_file() {
        let of = |function: &str, file: &str| Changed::Function {
            function: function.to_owned(),
            file: file.to_owned(),
        };
        let all = [of("free", "libc"), of("free", "ld"), of("main", "a"), of(NO_SYMBOL, "a")];
        let shared = shared_names(all.iter());
        let cells: Vec<String> = all.iter().flat_map(|one| one.cells(&shared)).collect();
        assert_eq!(cells, ["free (libc)", "free (ld)", "main", "[no symbol] (a)"]);
    }

    /// Two files, of which `lib` has another build id in the second profile.
    fn profile(build: &str, counts: [u64; 2]) -> Profile {
        let mut profile = Profile { by: Source::Everything, ..Profile::default() };
        for (path, count) in ["/no/such/lib", "/no/such/program"].into_iter().zip(counts) {
            let file = profile.file(path);
            let place = |offset| Place { file, offset };
            let block = BlockCount { bytes: 4, instructions: 2, count, bursts: 0 };
            profile.add_block(place(16), block);
            let edge = Edge { from: place(19), to: place(16), kind: EdgeKind::Jump };
            profile.add_edge(edge, EdgeCount { count, bursts: 0 });
        }
        profile.files[0].build_id = build.to_owned();
        profile
    }

    #[test]
    fn functions_match_by_file_and_edges_by_build() {
        let (before, after) = (profile("1", [30, 10]), profile("2", [10, 30]));
        let [old, new] = [&before, &after].map(|profile| ProfileSymbols::read(profile).0);
        let diff = |sort, top, all| Diff::of((&before, &old), (&after, &new), sort, top, all);
        let functions = diff(DiffKey::Function, 9, false);
        let expected = "\
before %  after %  change  function
75.00     25.00    -50.00  [no symbol] (lib)
25.00     75.00    +50.00  [no symbol] (program)
";
        assert_eq!(functions.text(), expected);
        assert_eq!(diff(DiffKey::Function, 1, false).rows.len(), 1);
        let edges = diff(DiffKey::Edge, 9, false);
        let expected = "\
before %  after %  change  from                        to
25.00     75.00    +50.00  [no symbol]+0x13 (program)  [no symbol]+0x10 (program)
";
        assert_eq!(edges.text(), expected);
        assert_eq!(other_files(&before, &after).into_iter().collect::<Vec<_>>(), ["/no/such/lib"]);
        let same = Diff::of((&before, &old), (&before, &old), DiffKey::Edge, 9, false);
        assert!(same.text().ends_with("2 edges are left out: without a change; see --all\n"));
        let all = Diff::of((&before, &old), (&before, &old), DiffKey::Edge, 9, true);
        assert_eq!((all.rows.len(), all.left_out), (2, 0));
    }
}
