//! Entry point for the fuzzer: what is printed of a profile.

use crate::diff::{Diff, DiffKey};
use crate::export::{callgrind, firefox, folded, pprof};
use crate::instructions::InstructionCounts;
use crate::profile::Profile;
use crate::report::{ProfileReport, SortKey};
use crate::source_lines;
use crate::stacks::Sources;
use crate::symbols::ProfileSymbols;

/// Prints reports of a profile whose files do not exist.
pub fn report(profile: &Profile) {
    const ROWS: usize = 9;
    let mut profile = profile.clone();
    for file in &mut profile.files {
        file.path.insert_str(0, "/nonexistent/");
    }
    let (symbols, _) = ProfileSymbols::read(&profile);
    let report = ProfileReport::of(&profile, &symbols, SortKey::Path, ROWS);
    let _text = [SortKey::Function, SortKey::Call, SortKey::Path].map(|sort| report.text(sort));
    let _lines = source_lines::hottest(&profile, &symbols, ROWS);
    let _counts = InstructionCounts::of(&profile, 0, None);
    let sources = Sources::read(&profile);
    let _exported = folded::stacks(&profile, &symbols, &sources);
    let _exported = callgrind::costs(&profile, &symbols, &sources);
    let _exported = firefox::profile(&profile, &symbols, &sources);
    let _exported = pprof::profile(&profile, &symbols, &sources);
    let side = (&profile, &symbols);
    for sort in [DiffKey::Function, DiffKey::Call, DiffKey::Edge] {
        let _text = Diff::of(side, side, sort, ROWS, true).text();
    }
}

#[cfg(test)]
mod tests {
    use elfen_stream::counts::EdgeKind;

    use super::*;
    use crate::profile::{
        BlockCount, Caller, Edge, EdgeCount, NO_CALLER, Place, Source, StackCount, StackEnd,
    };

    /// Goal: counts that are too large to add, and blocks without end, print without a panic.
    #[test]
    fn hostile_counts_are_printed() {
        let mut profile = Profile { by: Source::Bursts, ..Profile::default() };
        let file = profile.file("/a");
        for offset in [0, 1, u64::MAX] {
            let place = Place { file, offset };
            let most = u64::MAX;
            let block =
                BlockCount { bytes: u32::MAX, instructions: u32::MAX, count: most, bursts: most };
            profile.blocks.insert(place, block);
            for kind in [EdgeKind::Call, EdgeKind::Jump] {
                let edge = Edge { from: place, to: Place { file, offset: 0 }, kind };
                profile.edges.insert(edge, EdgeCount { count: most, bursts: most });
            }
        }
        for (offset, caller) in [(0, 0), (u64::MAX, 2), (1, 3)] {
            profile.callers.push(Caller { caller, call: Place { file, offset } });
            let end = StackEnd { caller: NO_CALLER + caller, block: Place { file, offset } };
            let count = StackCount { instructions: u64::MAX, bursts: u64::MAX };
            profile.stacks.insert(end, count);
        }
        report(&profile);
    }
}
