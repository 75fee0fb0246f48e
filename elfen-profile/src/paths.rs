//! The paths of a profile that executed the most instructions.

use std::cmp::Reverse;

use serde::Serialize;

use crate::profile::{Place, Profile};
use crate::sums::{error, grouped, share};
use crate::symbols::ProfileSymbols;

/// More blocks than a path has.
const BLOCKS_MAX: usize = 100;

#[derive(Serialize, Debug)]
pub(crate) struct PathRow {
    instructions: u64,
    /// Of the instructions of all paths, in percent.
    share_percent: f64,
    /// Times that it was taken.
    count: u64,
    /// Bursts in which it was taken; 0 if everything was counted.
    bursts: u64,
    /// Its blocks, as `function+0x12`.
    blocks: Vec<String>,
    /// The functions that it leads through.
    #[serde(skip)]
    shown: String,
}

/// The blocks of a path, by the number of its last one.
pub(crate) fn blocks_of(profile: &Profile, last: u32) -> Vec<Place> {
    let mut blocks = Vec::new();
    let mut number = last;
    while blocks.len() < BLOCKS_MAX
        && let Some(one) = profile.path_block(number)
    {
        blocks.push(one.block);
        number = one.before;
    }
    blocks.reverse();
    blocks
}

pub(crate) fn hottest(profile: &Profile, symbols: &ProfileSymbols, top: usize) -> Vec<PathRow> {
    let all =
        profile.paths.values().fold(0, |all: u64, path| all.saturating_add(path.instructions));
    let mut sorted: Vec<_> = profile.paths.iter().collect();
    sorted.sort_by_key(|(last, path)| (Reverse(path.instructions), **last));
    sorted.truncate(top);
    let row = |(&last, path): (&u32, &crate::profile::PathCount)| {
        let places = blocks_of(profile, last);
        PathRow {
            instructions: path.instructions,
            share_percent: share(path.instructions, all),
            count: path.count,
            bursts: path.bursts,
            blocks: places.iter().map(|&place| symbols.place(place)).collect(),
            shown: shown(&places, symbols),
        }
    };
    sorted.into_iter().map(row).collect()
}

/// Where a path begins, and the functions that it goes on to.
fn shown(places: &[Place], symbols: &ProfileSymbols) -> String {
    let Some((&first, rest)) = places.split_first() else { return String::new() };
    let mut text = symbols.place(first);
    let mut before = symbols.function_of(first);
    for &place in rest {
        let function = symbols.function_of(place);
        if function != before {
            text += " > ";
            text += &symbols.name(&function);
            before = function;
        }
    }
    text
}

impl PathRow {
    pub(crate) fn cells(&self) -> Vec<String> {
        vec![
            format!("{:.2}", self.share_percent),
            error(self.bursts),
            grouped(self.instructions),
            grouped(self.count),
            self.blocks.len().to_string(),
            self.shown.clone(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{FIRST_PATH_BLOCK, NO_PATH_BLOCK, PathBlock, PathCount};

    #[test]
    fn a_path_has_its_blocks_in_order() {
        let mut profile = Profile::default();
        let file = profile.file("/nowhere/a");
        for (before, offset) in [(NO_PATH_BLOCK, 8), (FIRST_PATH_BLOCK, 4), (FIRST_PATH_BLOCK, 6)] {
            profile.path_blocks.push(PathBlock { before, block: Place { file, offset } });
        }
        profile.paths.insert(2, PathCount { count: 3, instructions: 30, bursts: 0 });
        profile.paths.insert(3, PathCount { count: 9, instructions: 90, bursts: 0 });
        let (symbols, _) = ProfileSymbols::read(&profile);
        let rows = hottest(&profile, &symbols, 1);
        assert_eq!((rows.len(), rows[0].count, rows[0].share_percent), (1, 9, 75.0));
        let offsets: Vec<u64> = blocks_of(&profile, 3).iter().map(|place| place.offset).collect();
        assert_eq!(offsets, [8, 6]);
    }
}
