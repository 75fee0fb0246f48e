//! Reads the starts of functions from the search table of the unwind information (`.eh_frame_hdr`).
//!
//! The table is mapped with the program and survives `strip`; a symbol table does not. Only the
//! form that linkers write is supported: a sorted table of pairs of 32-bit offsets, relative to the
//! header's own address.

/// Version 1; a pointer in some encoding; a count of 4 bytes; pairs of signed 4 bytes, relative to
/// the header.
const VERSION: u8 = 1;
const COUNT_UDATA4: u8 = 0x03;
const TABLE_DATAREL_SDATA4: u8 = 0x3b;
/// After the version, three encodings and a pointer that is skipped comes the count.
const COUNT_AT: usize = 8;
const TABLE_AT: usize = 12;
const PAIR_BYTES: usize = 8;

/// The search table of one object.
#[derive(Clone, Copy, Debug)]
pub struct FunctionStarts<'a> {
    pairs: &'a [u8],
    header_address: u64,
}

impl<'a> FunctionStarts<'a> {
    /// Reads a `.eh_frame_hdr` that lies at `address`. `None` if it has another form.
    pub fn parse(header: &'a [u8], address: u64) -> Option<Self> {
        let [VERSION, pointer, COUNT_UDATA4, TABLE_DATAREL_SDATA4, ..] = *header else {
            return None;
        };
        // Linkers encode the pointer to .eh_frame as sdata4, with any base: it takes 4 bytes.
        if pointer & 0x0f != 0x0b {
            return None;
        }
        let count = header.get(COUNT_AT..TABLE_AT)?.try_into().map(u32::from_le_bytes).ok()?;
        let bytes = usize::try_from(count).ok()?.checked_mul(PAIR_BYTES)?;
        let pairs = header.get(TABLE_AT..TABLE_AT.checked_add(bytes)?)?;
        Some(Self { pairs, header_address: address })
    }

    pub fn count(&self) -> usize {
        self.pairs.len() / PAIR_BYTES
    }

    /// The start of the last function that starts at or before `address`.
    pub fn start_of(&self, address: u64) -> Option<u64> {
        self.start(self.index_of(address)?)
    }

    /// The address of the unwind information of that function.
    pub fn frame_of(&self, address: u64) -> Option<u64> {
        self.address(self.index_of(address)?.checked_mul(PAIR_BYTES)?.checked_add(4)?)
    }

    /// The start of every function, in order.
    pub fn all(&self) -> impl Iterator<Item = u64> {
        (0..self.count()).filter_map(|index| self.start(index))
    }

    fn index_of(&self, address: u64) -> Option<usize> {
        last_at_or_before(self.count(), address, |index| self.start(index))
    }

    fn start(&self, index: usize) -> Option<u64> {
        self.address(index.checked_mul(PAIR_BYTES)?)
    }

    /// The address that the table encodes at offset `at`.
    fn address(&self, at: usize) -> Option<u64> {
        let offset = self.pairs.get(at..at.checked_add(4)?)?;
        let offset = i32::from_le_bytes(offset.try_into().ok()?);
        self.header_address.checked_add_signed(offset.into())
    }
}

/// The index of the last of `count` ascending starts that is not after `address`. `None` also if a
/// start cannot be read.
pub(super) fn last_at_or_before(
    count: usize,
    address: u64,
    start: impl Fn(usize) -> Option<u64>,
) -> Option<usize> {
    let (mut low, mut high) = (0, count);
    while low < high {
        let middle = low + (high - low) / 2;
        if start(middle)? <= address { low = middle + 1 } else { high = middle }
    }
    low.checked_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    const ADDRESS: u64 = 0x40_0000;

    fn header(starts: &[u64]) -> Vec<u8> {
        let mut bytes = Vec::from([VERSION, 0x1b, COUNT_UDATA4, TABLE_DATAREL_SDATA4, 9, 9, 9, 9]);
        bytes.extend(u32::try_from(starts.len()).unwrap().to_le_bytes());
        for start in starts {
            let offset = i32::try_from(start.cast_signed() - ADDRESS.cast_signed()).unwrap();
            bytes.extend(offset.to_le_bytes());
            bytes.extend([7; 4]);
        }
        bytes
    }

    #[test]
    fn a_function_is_found_by_any_address_in_it() {
        let bytes = header(&[0x1000, 0x1040, 0x50_0000]);
        let starts = FunctionStarts::parse(&bytes, ADDRESS).unwrap();
        let cases = [
            (0xfff, None),
            (0x1000, Some(0x1000)),
            (0x103f, Some(0x1000)),
            (0x1040, Some(0x1040)),
            (0x50_0000, Some(0x50_0000)),
            (u64::MAX, Some(0x50_0000)),
        ];
        for (address, start) in cases {
            assert_eq!(starts.start_of(address), start, "{address:#x}");
            let frame = start.map(|_| ADDRESS + 0x0707_0707);
            assert_eq!(starts.frame_of(address), frame, "{address:#x}");
        }
        assert!(starts.all().eq([0x1000, 0x1040, 0x50_0000]));
        let none = header(&[]);
        assert_eq!(FunctionStarts::parse(&none, ADDRESS).unwrap().start_of(0x1000), None);
    }

    #[test]
    fn other_forms_and_cut_tables_are_rejected() {
        let whole = header(&[0x1000, 0x1040]);
        for (at, byte) in [(0, 2), (1, 0x1c), (2, 0x04), (3, 0x1b), (8, 3), (11, 1)] {
            let mut bytes = whole.clone();
            bytes[at] = byte;
            assert!(FunctionStarts::parse(&bytes, ADDRESS).is_none(), "byte {at} as {byte}");
        }
        assert!(FunctionStarts::parse(&whole[..whole.len() - 1], ADDRESS).is_none());
        assert!(FunctionStarts::parse(&[], ADDRESS).is_none());
    }

    proptest::proptest! {
        /// Compares the search with a walk over all entries.
        #[test]
        fn the_search_finds_what_a_walk_finds(
            mut starts in proptest::collection::vec(0u64..0x80_0000, 0..50),
            address in 0u64..0x90_0000,
        ) {
            starts.sort_unstable();
            let bytes = header(&starts);
            let found = FunctionStarts::parse(&bytes, ADDRESS).unwrap().start_of(address);
            let walked = starts.iter().copied().rfind(|&start| start <= address);
            proptest::prop_assert_eq!(found, walked);
        }
    }
}
