//! Entry points for the fuzzer: what is printed of a profile, and productions.

use crate::diff::{Diff, DiffKey};
use crate::export::{callgrind, firefox, folded, pprof};
use crate::instructions::InstructionCounts;
use crate::precise;
use crate::profile::Profile;
use crate::report::{ProfileReport, SortKey};
use crate::rules::{Engine, Executed, Kind, parse};
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
    let _instructions = ProfileReport::of(&profile, &symbols, SortKey::Instruction, ROWS)
        .text(SortKey::Instruction);
    let _rules = ProfileReport::of(&profile, &symbols, SortKey::Rule, ROWS).text(SortKey::Rule);
    let streams = ProfileReport::of(&profile, &symbols, SortKey::Stream, ROWS);
    let _streams = streams.text(SortKey::Stream);
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

/// Decodes records of perf_event_open(2), and samples of each processor.
pub fn samples(bytes: &[u8], position: u64) {
    precise::decode_any(bytes, position);
}

/// Parses productions, and applies them to instructions, of which each byte tells one.
pub fn rules(text: &str, instructions: &[u8]) {
    let rules = match parse(text) {
        Ok(rules) => rules,
        Err(error) => {
            let _text = (error.to_string(), error.excerpt());
            return;
        }
    };
    let mut engine = Engine::new(&rules);
    let mut collected = 0_u64;
    for &byte in instructions {
        let kind = Kind::ALL[usize::from(byte) % Kind::ALL.len()];
        let (pc, target) = (0x1000 + u64::from(byte & 0x70), 0x1000 + u64::from(byte >> 4));
        engine.execute(Executed { kind, pc, target }, |_, _, _| collected += 1);
    }
    assert!(collected <= engine.matched().iter().sum());
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
