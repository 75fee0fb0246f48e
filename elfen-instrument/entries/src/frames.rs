//! Reads the bounds of functions from the unwind information (`.eh_frame`).
//!
//! The bytes may come from a hostile program. gimli checks every index and length against the bytes
//! at hand, and allocates nothing.

use gimli::{
    BaseAddresses, CieOrFde, EhFrame, EndianSlice, LittleEndian, PartialFrameDescriptionEntry,
    UnwindSection,
};

/// A function according to its unwind information.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Frame {
    pub start: u64,
    pub bytes: u64,
    /// The kernel calls it as a signal trampoline (`S`). It may start one byte before its code.
    pub is_signal: bool,
    /// Exceptions resume in the middle of it (`L`).
    pub has_landing_pads: bool,
}

/// Reads the entry at `address` of a `.eh_frame` that lies at `section_address`. `None` if there is
/// no entry, or if its encoding is one that current linkers do not write.
pub fn frame(section: &[u8], section_address: u64, address: u64) -> Option<Frame> {
    let offset = usize::try_from(address.checked_sub(section_address)?).ok()?;
    let bases = BaseAddresses::default().set_eh_frame(section_address);
    let section = EhFrame::new(section, LittleEndian);
    Frame::of(section.partial_fde_from_offset(&bases, offset.into()).ok()?)
}

/// Visits all functions of a `.eh_frame`, in the order of the section, up to the first entry with
/// an unsupported encoding. Needed for static programs, which have no search table.
pub fn visit_frames(section: &[u8], section_address: u64, mut visit: impl FnMut(Frame)) {
    let bases = BaseAddresses::default().set_eh_frame(section_address);
    let mut entries = EhFrame::new(section, LittleEndian).entries(&bases);
    while let Ok(Some(entry)) = entries.next() {
        let CieOrFde::Fde(entry) = entry else { continue };
        let Some(frame) = Frame::of(entry) else { return };
        visit(frame);
    }
}

type Section<'a> = EhFrame<EndianSlice<'a, LittleEndian>>;
type Entry<'a, 'bases> =
    PartialFrameDescriptionEntry<'bases, Section<'a>, EndianSlice<'a, LittleEndian>>;

impl Frame {
    fn of(entry: Entry<'_, '_>) -> Option<Self> {
        let entry = entry.parse(Section::cie_from_offset).ok()?;
        let start = entry.initial_address();
        let bytes = entry.len();
        start.checked_add(bytes)?;
        Some(Self {
            start,
            bytes,
            is_signal: entry.is_signal_trampoline(),
            has_landing_pads: entry.cie().has_lsda(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    const ADDRESS: u64 = 0x40_0000;

    /// A `.eh_frame` with one function, and the address of its entry.
    fn section(augmentation: &[u8], data: &[u8], start: [u8; 4], bytes: u32) -> (Vec<u8>, u64) {
        let mut common = Vec::from([0, 0, 0, 0, 1]);
        common.extend(augmentation);
        common.extend([0, 1, 0x78, 16]);
        common.extend(data);
        let mut section = Vec::from(u32::try_from(common.len()).unwrap().to_le_bytes());
        section.extend(&common);
        let entry = ADDRESS + section.len() as u64;
        section.extend(17u32.to_le_bytes());
        section.extend(u32::try_from(section.len()).unwrap().to_le_bytes());
        section.extend(start);
        section.extend(bytes.to_le_bytes());
        // Four more bytes: no table of landing pads.
        section.extend([4, 0, 0, 0, 0]);
        (section, entry)
    }

    #[test]
    fn entries_of_linkers_are_parsed() {
        // zR and zRS with pointers relative to themselves, zPLR with a personality routine between.
        let cases: [(&[u8], &[u8], bool); 3] = [
            (b"zR", &[1, 0x1b], false),
            (b"zRS", &[1, 0x1b], true),
            (b"zPLR", &[7, 0x9b, 1, 2, 3, 4, 0x1b, 0x1b], false),
        ];
        for (augmentation, data, is_signal) in cases {
            let (bytes, entry) = section(augmentation, data, (-0x1000i32).to_le_bytes(), 0x40);
            let found = frame(&bytes, ADDRESS, entry).unwrap();
            let start = entry + 8 - 0x1000;
            let has_landing_pads = augmentation.contains(&b'L');
            assert_eq!(found, Frame { start, bytes: 0x40, is_signal, has_landing_pads });
        }
    }

    #[test]
    fn every_function_of_a_section_is_found() {
        let (first, _) = section(b"zR", &[1, 0x1b], (-0x1000i32).to_le_bytes(), 0x40);
        let (second, entry) = section(b"zRS", &[1, 0x1b], (-0x800i32).to_le_bytes(), 7);
        let both = [first.as_slice(), &second, &[0; 8], &first].concat();
        let frames = |section: &[u8]| {
            let mut found = Vec::new();
            visit_frames(section, ADDRESS, |frame| found.push(frame));
            found
        };
        let found: Vec<(u64, bool)> =
            frames(&both).iter().map(|one| (one.bytes, one.is_signal)).collect();
        assert_eq!(found, [(0x40, false), (7, true)], "up to the end that a 0 marks");
        assert_eq!(frames(&second), [frame(&second, ADDRESS, entry).unwrap()]);
        assert_eq!(frames(&both[..both.len() / 4]), [], "cut");
    }

    #[test]
    fn other_forms_are_rejected() {
        let start = 0x1000i32.to_le_bytes();
        for (augmentation, data) in
            [(&b"zR"[..], &[1, 0x3b][..]), (b"zR", &[1, 0x1e]), (b"eh", &[0; 8]), (b"zX", &[1, 0])]
        {
            let (bytes, entry) = section(augmentation, data, start, 0x40);
            assert_eq!(frame(&bytes, ADDRESS, entry), None, "{augmentation:?} {data:?}");
        }
        // A common information entry is not a function.
        let (bytes, entry) = section(b"zR", &[1, 0x1b], start, 0x40);
        assert_eq!(frame(&bytes, ADDRESS, ADDRESS), None);
        assert!(frame(&bytes, ADDRESS, entry).is_some());
        assert_eq!(frame(&bytes, ADDRESS, entry - 1), None);
    }

    proptest::proptest! {
        /// Goal: any bytes give a result and no panic. Method: a valid section with some bytes
        /// changed, cut anywhere, and any address.
        #[test]
        fn hostile_bytes_do_not_panic(
            changes in proptest::collection::vec((0usize..60, proptest::num::u8::ANY), 0..8),
            cut in 0usize..60,
            distance in 0u64..64,
        ) {
            let room = [7, 0x9b, 1, 2, 3, 4, 0x1b, 0x1b];
            let (mut bytes, entry) = section(b"zPLR", &room, [9; 4], 7);
            for (at, byte) in changes {
                if let Some(changed) = bytes.get_mut(at) { *changed = byte }
            }
            bytes.truncate(cut);
            visit_frames(&bytes, ADDRESS, |_| ());
            let _any = frame(&bytes, ADDRESS, entry.wrapping_add(distance));
            let _any = frame(&bytes, u64::MAX - distance, u64::MAX);
        }
    }
}
