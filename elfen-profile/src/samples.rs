//! A profile by lines, as LLVM's compilers read it (`-fprofile-sample-use`): for each function its
//! lines, and within them the functions that were inlined there.

use std::collections::BTreeMap;
use std::fmt::Write;

use elfen_instrument::symbols::FunctionTable;
use elfen_stream::counts::EdgeKind;

use crate::lines::{Frame, Lines, Location};
use crate::profile::{EdgeCount, Profile};

/// The counts of a function, or of a function where it was inlined.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
struct Samples {
    /// Times that it was called.
    head: u64,
    lines: BTreeMap<Location, LineCount>,
    inlined: BTreeMap<(Location, String), Samples>,
}

#[derive(Clone, PartialEq, Eq, Default, Debug)]
struct LineCount {
    count: u64,
    calls: BTreeMap<String, u64>,
}

impl Samples {
    fn total(&self) -> u64 {
        let lines = self.lines.values().map(|line| line.count);
        lines.chain(self.inlined.values().map(Self::total)).fold(0, u64::saturating_add)
    }

    fn write(&self, depth: usize, text: &mut String) {
        for (at, line) in &self.lines {
            let _written = write!(text, "{:depth$}{}: {}", "", shown(*at), line.count);
            for (name, count) in &line.calls {
                let _written = write!(text, " {name}:{count}");
            }
            text.push('\n');
        }
        for ((at, name), inlined) in &self.inlined {
            let at = shown(*at);
            let _written = writeln!(text, "{:depth$}{at}: {name}:{}", "", inlined.total());
            inlined.write(depth + 1, text);
        }
    }
}

fn shown(at: Location) -> String {
    match at.discriminator {
        0 => at.line.to_string(),
        discriminator => format!("{}.{discriminator}", at.line),
    }
}

/// The profile of one file by lines.
pub(crate) fn llvm(profile: &Profile, file: u32, table: &FunctionTable, lines: &Lines) -> String {
    let mut functions: BTreeMap<String, Samples> = BTreeMap::new();
    let counts = Counts::of(profile, file, table);
    for row in lines.rows() {
        let count = counts.most(row.range.start, row.range.end);
        if count > 0
            && let Some(line) = line_of(&mut functions, &lines.frames(row))
        {
            line.count = line.count.max(count.saturating_mul(row.copies()));
        }
    }
    for (edge, &EdgeCount { count, .. }) in &profile.edges {
        let [from, to] = [edge.from, edge.to]
            .map(|place| table.address_of(place.offset).filter(|_| place.file == file));
        let Some(name) = to.and_then(|to| lines.function_from(to)) else { continue };
        let is_call = matches!(edge.kind, EdgeKind::Call | EdgeKind::ComputedCall);
        let is_jump =
            matches!(edge.kind, EdgeKind::Jump | EdgeKind::ComputedJump | EdgeKind::Taken);
        let row = from.and_then(|from| lines.row_at(from));
        let frames = row.map(|row| lines.frames(row)).unwrap_or_default();
        let is_other = frames.first().is_none_or(|outer| outer.function != name);
        if is_call || is_jump && is_other {
            let head = &mut functions.entry(name.to_owned()).or_default().head;
            *head = head.saturating_add(count);
        }
        if is_call && let Some(line) = line_of(&mut functions, &frames) {
            let calls = line.calls.entry(name.to_owned()).or_default();
            *calls = calls.saturating_add(count);
        }
    }
    functions.retain(|_, samples| samples.total() > 0);
    let mut sorted: Vec<(&String, &Samples)> = functions.iter().collect();
    sorted.sort_by_key(|&(name, samples)| (u64::MAX - samples.total(), name));
    let mut text = String::new();
    for (name, samples) in sorted {
        let _written = writeln!(text, "{name}:{}:{}", samples.total(), samples.head);
        samples.write(1, &mut text);
    }
    text
}

/// The line that some frames end at.
fn line_of<'a>(
    functions: &'a mut BTreeMap<String, Samples>,
    frames: &[Frame<'_>],
) -> Option<&'a mut LineCount> {
    let (first, inlined) = frames.split_first()?;
    let mut samples = functions.entry(first.function.to_owned()).or_default();
    let mut at = first.at;
    for frame in inlined {
        samples = samples.inlined.entry((at, frame.function.to_owned())).or_default();
        at = frame.at;
    }
    Some(samples.lines.entry(at).or_default())
}

/// How often each address of a file ran.
struct Counts {
    /// Addresses from which on a count holds.
    from: Vec<(u64, u64)>,
}

impl Counts {
    fn of(profile: &Profile, file: u32, table: &FunctionTable) -> Self {
        // Blocks overlap: each adds its count at its start, and takes it back at its end.
        let mut changes: BTreeMap<u64, i128> = BTreeMap::new();
        for (start, block) in profile.blocks.iter().filter(|(start, _)| start.file == file) {
            if let Some(address) = table.address_of(start.offset) {
                *changes.entry(address).or_default() += i128::from(block.count);
                let end = address.saturating_add(block.bytes.into());
                *changes.entry(end).or_default() -= i128::from(block.count);
            }
        }
        let mut sum = 0;
        let from = changes.into_iter().map(|(address, change)| {
            sum += change;
            (address, u64::try_from(sum).unwrap_or(u64::MAX))
        });
        Self { from: from.collect() }
    }

    /// The largest count in a range.
    fn most(&self, start: u64, end: u64) -> u64 {
        let after = self.from.partition_point(|&(address, _)| address <= start);
        let before = after.checked_sub(1).and_then(|at| self.from.get(at));
        let within = self.from[after..].iter().take_while(|&&(address, _)| address < end);
        before.into_iter().chain(within).map(|&(_, count)| count).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{BlockCount, Place};

    #[test]
    fn inlined_functions_are_nested_in_their_line() {
        let mut functions = BTreeMap::new();
        let at = |line, discriminator| Location { line, discriminator };
        let outer = Frame { function: "main", at: at(3, 0) };
        line_of(&mut functions, std::slice::from_ref(&outer)).unwrap().count = 7;
        let inner = Frame { function: "twice", at: at(1, 2) };
        let line = line_of(&mut functions, &[outer, inner]).unwrap();
        line.count = 5;
        line.calls.insert("callee".to_owned(), 4);
        let mut text = String::new();
        functions["main"].write(1, &mut text);
        assert_eq!(text, " 3: 7\n 3: twice:5\n  1.2: 5 callee:4\n");
        assert_eq!(functions["main"].total(), 12);
    }

    #[test]
    fn counts_of_overlapping_blocks_add_up() {
        let mut profile = Profile::default();
        let file = profile.file("/bin/true");
        let table = FunctionTable::read(std::path::Path::new("/bin/true")).unwrap();
        // Where the file has its code, addresses and offsets are the same, or differ by a constant.
        let code = table.functions().first().map_or(0x2000, |one| one.address);
        let base = (0..code).rev().find(|&at| table.address_of(at) == Some(code)).unwrap_or(code);
        for (offset, bytes, count) in [(0, 16, 5), (8, 8, 2)] {
            let place = Place { file, offset: base + offset };
            profile.add_block(place, BlockCount { bytes, instructions: 1, count, bursts: 0 });
        }
        let counts = Counts::of(&profile, file, &table);
        let most = |from, to| counts.most(code + from, code + to);
        assert_eq!([most(0, 4), most(4, 12), most(12, 14), most(16, 20)], [5, 7, 7, 0]);
    }
}
