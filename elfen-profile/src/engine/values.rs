//! Which values instructions left in their destination registers: for each of them a table of the
//! values that it had most often.
//!
//! A table has 50 entries. A value that finds no free one is counted, but not noted. From time to
//! time the rarer half makes room for new values.

use elfen_stream::{BlockId, Outcome, Translated};

use super::objects::Places;
use crate::profile::{Profile, ValueCount};

/// Values of one instruction.
const ENTRIES: usize = 50;
/// After this many values that were not noted, half of the entries are given up.
const FLUSH_AFTER: u32 = 1000;
/// Values of an instruction in a profile.
const KEPT: usize = 10;

#[derive(Clone, Debug, Default)]
struct Table {
    count: u64,
    /// The most frequent values first, about.
    values: Vec<(u64, u64)>,
    missed: u32,
}

impl Table {
    fn add(&mut self, value: u64) {
        self.count += 1;
        if let Some(at) = self.values.iter().position(|&(known, _)| known == value) {
            self.values[at].1 += 1;
            // Frequent values move to the front, where they are found sooner.
            if at > 0 && self.values[at].1 > self.values[at - 1].1 {
                self.values.swap(at, at - 1);
            }
        } else if self.values.len() < ENTRIES {
            self.values.push((value, 1));
        } else {
            self.missed += 1;
            if self.missed == FLUSH_AFTER {
                self.missed = 0;
                self.sort();
                self.values.truncate(ENTRIES / 2);
            }
        }
    }

    fn sort(&mut self) {
        self.values.sort_by(|a, b| (b.1, a.0).cmp(&(a.1, b.0)));
    }
}

/// The tables of a block.
#[derive(Clone, Debug, Default)]
struct BlockTables {
    tables: Vec<Table>,
    bursts: u64,
    is_touched: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Values {
    blocks: Vec<BlockTables>,
    touched: Vec<usize>,
}

impl Values {
    /// A block ran. Takes its results from the front of `words`; the last block that ran may have
    /// fewer.
    pub(crate) fn step(&mut self, id: BlockId, results: &[Outcome], words: &mut &[u64]) {
        let Ok(number) = usize::try_from(id) else { return };
        if number >= self.blocks.len() {
            self.blocks.resize_with(number + 1, BlockTables::default);
        }
        let block = &mut self.blocks[number];
        block.tables.resize_with(results.len(), Table::default);
        if !block.is_touched {
            block.is_touched = true;
            self.touched.push(number);
        }
        let (own, rest) = words.split_at(results.len().min(words.len()));
        *words = rest;
        for ((table, result), &word) in block.tables.iter_mut().zip(results).zip(own) {
            table.add(result.value(word));
        }
    }

    /// What was seen since the last call belongs together.
    pub(crate) fn end(&mut self, bursts: u64) {
        for number in self.touched.drain(..) {
            let block = &mut self.blocks[number];
            block.bursts += bursts;
            block.is_touched = false;
        }
    }

    /// Adds all tables to a profile.
    pub(crate) fn add_to(
        &mut self,
        profile: &mut Profile,
        places: &Places<'_>,
        blocks: &[Translated],
    ) {
        for (tables, block) in self.blocks.iter_mut().zip(blocks) {
            for (table, result) in tables.tables.iter_mut().zip(&block.results) {
                let place = places.of(block, block.start + u64::from(result.offset));
                let Some(place) = place.filter(|_| table.count > 0) else { continue };
                table.sort();
                let top = table.values.iter().take(KEPT).copied().collect();
                let (bytes, count, bursts) = (result.bytes, table.count, tables.bursts);
                profile.add_values(place, ValueCount { bytes, count, bursts, top });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequent_values_stay_and_rare_ones_make_room() {
        let mut table = Table::default();
        for round in 0..20_000_u64 {
            // 7 is half of all; the others come once each.
            table.add(if round % 2 == 0 { 7 } else { 1000 + round });
        }
        table.sort();
        assert_eq!((table.count, table.values[0]), (20_000, (7, 10_000)));
        assert!(table.values.len() <= ENTRIES);
        // A value that becomes frequent late finds a place.
        for _ in 0..5000 {
            table.add(8);
        }
        table.sort();
        assert_eq!(table.values[1].0, 8);
        assert!(table.values[1].1 > 3000, "{:?}", table.values[1]);
    }
}
