//! Reads the bounds of functions of a Go program from Go's own table (`.gopclntab`). Go programs
//! have no `.eh_frame`.
//!
//! Go has written this form since 1.18: a header, then a sorted table of pairs of 32-bit offsets.
//! The first offset of a pair counts from the start of the code. A last offset marks the end.

use crate::functions::last_at_or_before;

/// Of Go 1.20 and later, and of Go 1.18 and 1.19.
const MAGICS: [u32; 2] = [0xffff_fff1, 0xffff_fff0];
/// Minimum instruction size on x86, and size of a pointer.
const STEP: u8 = 1;
const POINTER: u8 = 8;
const COUNT_AT: usize = 8;
const TEXT_AT: usize = 24;
const TABLE_AT: usize = 64;
const PAIR_BYTES: usize = 8;

/// The table of one program.
#[derive(Clone, Copy, Debug)]
pub struct GoFunctions<'a> {
    /// The pairs, and the offset of the end.
    offsets: &'a [u8],
    count: usize,
    text: u64,
}

impl<'a> GoFunctions<'a> {
    /// Reads a table at the start of `bytes`. `None` if it has another form.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let magic = u32::from_le_bytes(*bytes.first_chunk()?);
        let [.., 0, 0, STEP, POINTER] = *bytes.first_chunk::<8>()? else { return None };
        let word = |at: usize| {
            let word = bytes.get(at..at.checked_add(8)?)?;
            word.try_into().map(u64::from_le_bytes).ok()
        };
        let count = usize::try_from(word(COUNT_AT)?).ok()?;
        let text = word(TEXT_AT)?;
        let table = usize::try_from(word(TABLE_AT)?).ok()?;
        let length = count.checked_mul(PAIR_BYTES)?.checked_add(4)?;
        let offsets = bytes.get(table..table.checked_add(length)?)?;
        // A position-independent program has 0 there until it is loaded.
        (MAGICS.contains(&magic) && count > 0 && text != 0).then_some(Self { offsets, count, text })
    }

    pub fn count(&self) -> usize {
        self.count
    }

    /// The bounds of the function around `address`, with the padding after it.
    pub fn bounds_of(&self, address: u64) -> Option<(u64, u64)> {
        let index = last_at_or_before(self.count, address, |index| self.start(index))?;
        let found = (self.start(index)?, self.start(index + 1)?);
        (found.0 <= address && address < found.1).then_some(found)
    }

    /// The start of every function, in order.
    pub fn all(&self) -> impl Iterator<Item = u64> {
        (0..self.count).filter_map(|index| self.start(index))
    }

    /// The start of function `index`, or the end of the last function.
    fn start(&self, index: usize) -> Option<u64> {
        let at = index.checked_mul(PAIR_BYTES)?;
        let offset = self.offsets.get(at..at.checked_add(4)?)?;
        self.text.checked_add(u32::from_le_bytes(offset.try_into().ok()?).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    const TEXT: u64 = 0x40_1000;

    fn table(offsets: &[u32]) -> Vec<u8> {
        let mut bytes = Vec::from(MAGICS[0].to_le_bytes());
        bytes.extend([0, 0, STEP, POINTER]);
        let count = offsets.len() as u64 - 1;
        for word in [count, 0, TEXT, 0, 0, 0, 0, 80] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend([0; 8]);
        for offset in offsets {
            bytes.extend(offset.to_le_bytes());
            bytes.extend([7; 4]);
        }
        bytes
    }

    #[test]
    fn a_function_is_found_by_any_address_in_it() {
        let bytes = table(&[0, 0x40, 0x60, 0x100]);
        let functions = GoFunctions::parse(&bytes).unwrap();
        assert_eq!(functions.count(), 3);
        let cases = [
            (TEXT - 1, None),
            (TEXT, Some((0, 0x40))),
            (TEXT + 0x3f, Some((0, 0x40))),
            (TEXT + 0x40, Some((0x40, 0x60))),
            (TEXT + 0xff, Some((0x60, 0x100))),
            (TEXT + 0x100, None),
        ];
        for (address, expected) in cases {
            let expected = expected.map(|(start, end)| (TEXT + start, TEXT + end));
            assert_eq!(functions.bounds_of(address), expected, "{address:#x}");
        }
    }

    #[test]
    fn other_forms_and_cut_tables_are_rejected() {
        let whole = table(&[0, 0x40]);
        assert!(GoFunctions::parse(&whole).is_some());
        for (at, byte) in [(0, 0xfb), (4, 1), (6, 4), (7, 4), (15, 0x80), (71, 0x80)] {
            let mut bytes = whole.clone();
            bytes[at] = byte;
            assert!(GoFunctions::parse(&bytes).is_none(), "byte {at} as {byte}");
        }
        assert!(GoFunctions::parse(&whole[..whole.len() - 5]).is_none());
        assert!(GoFunctions::parse(&[]).is_none());
    }

    proptest::proptest! {
        /// Goal: any bytes give a result and no panic. Method: a valid table with some bytes
        /// changed, cut anywhere.
        #[test]
        fn hostile_bytes_do_not_panic(
            changes in proptest::collection::vec((0usize..96, proptest::num::u8::ANY), 0..8),
            cut in 0usize..120,
            address in proptest::num::u64::ANY,
        ) {
            let mut bytes = table(&[0, 0x40, 0x60]);
            for (at, byte) in changes {
                bytes[at] = byte;
            }
            bytes.truncate(cut);
            if let Some(functions) = GoFunctions::parse(&bytes) {
                let _any = (functions.bounds_of(address), functions.bounds_of(TEXT));
            }
        }
    }
}
