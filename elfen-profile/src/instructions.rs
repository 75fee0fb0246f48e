//! Counts by instruction.
//!
//! A profile has counts of blocks, and where they begin and end. The code between is in the file.

use std::collections::BTreeMap;

use elfen_instrument::symbols::FunctionTable;
use elfen_stream::INSTRUCTIONS_MAX;
use iced_x86::{Decoder, DecoderOptions};

use crate::profile::{Place, Profile};
use crate::sums::Sum;

/// How often the instructions of one file ran.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct InstructionCounts {
    /// By address.
    pub(crate) by_address: BTreeMap<u64, Sum>,
    /// Instructions whose address is not known, because the file cannot be read or has changed.
    pub(crate) unknown: Sum,
}

impl InstructionCounts {
    /// The counts of a file with these functions and bytes.
    pub(crate) fn of(profile: &Profile, file: u32, code: Option<(&FunctionTable, &[u8])>) -> Self {
        let mut counts = Self::default();
        let places = Place { file, offset: 0 }..=Place { file, offset: u64::MAX };
        for (start, block) in profile.blocks.range(places) {
            let mut left = block.instructions;
            let found = code.and_then(|(table, bytes)| {
                let bytes = bytes.get(usize::try_from(start.offset).ok()?..)?;
                let length = usize::try_from(block.bytes).ok()?.min(bytes.len());
                Some((table.address_of(start.offset)?, &bytes[..length]))
            });
            if let Some((address, bytes)) = found {
                let mut decoder = Decoder::with_ip(64, bytes, address, DecoderOptions::NONE);
                // No block is longer. A file that says so may be hostile.
                for _ in 0..INSTRUCTIONS_MAX {
                    let instruction = if left > 0 { decoder.decode() } else { break };
                    if instruction.is_invalid() {
                        break;
                    }
                    let sum = counts.by_address.entry(instruction.ip()).or_default();
                    sum.add(block.count, block.bursts);
                    left -= 1;
                }
            }
            if left > 0 {
                counts.unknown.add(block.count.saturating_mul(left.into()), block.bursts);
            }
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::BlockCount;

    /// Goal: each instruction has the sum of the blocks that it is in. Method: blocks in this test
    /// program, one of which begins within the other, and one with more instructions than bytes.
    #[test]
    fn blocks_that_overlap_add_up() {
        let path = std::env::current_exe().unwrap();
        let table = FunctionTable::read(&path).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        let address = table.functions().first().unwrap().address;
        let start = table.offset_of(address).unwrap();
        // nop; nop; push %rbp; mov %rsp,%rbp
        let at = usize::try_from(start).unwrap();
        bytes[at..at + 6].copy_from_slice(&[0x90, 0x90, 0x55, 0x48, 0x89, 0xe5]);
        let mut profile = Profile::default();
        let file = profile.file(&path.to_string_lossy());
        for (offset, bytes, instructions, count, bursts) in [(0, 6, 4, 10, 3), (2, 4, 3, 5, 4)] {
            let place = Place { file, offset: start + offset };
            profile.add_block(place, BlockCount { bytes, instructions, count, bursts });
        }
        let far = Place { file, offset: u64::MAX };
        profile.add_block(far, BlockCount { bytes: 9, instructions: 2, count: 7, bursts: 1 });
        let counts = InstructionCounts::of(&profile, file, Some((&table, &bytes)));
        let found: Vec<_> =
            counts.by_address.iter().map(|(&at, sum)| (at - address, *sum)).collect();
        let sum = |count, bursts| Sum { count, bursts };
        let expected = [(0, sum(10, 3)), (1, sum(10, 3)), (2, sum(15, 4)), (3, sum(15, 4))];
        assert_eq!(found, expected);
        assert_eq!(counts.unknown, sum(5 + 7 * 2, 4));
        let none = InstructionCounts::of(&profile, file, None);
        assert_eq!(none.unknown, sum(10 * 4 + 5 * 3 + 7 * 2, 4));
    }
}
