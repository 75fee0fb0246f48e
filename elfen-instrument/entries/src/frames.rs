//! Reads the bounds of functions from the unwind information (`.eh_frame`).
//!
//! The bytes may come from a hostile program. No index or length is used before it was checked
//! against the bytes at hand.

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
    let mut entry = Bytes::at(section, section_address, address)?.record()?;
    let pointer_at = entry.address;
    // The distance back to the common information entry; 0 in such an entry itself.
    let back = entry.u32().filter(|&back| back != 0)?;
    let common = Bytes::at(section, section_address, pointer_at.checked_sub(back.into())?)?;
    let common = Common::read(common.record()?)?;
    let start_at = entry.address;
    let start = entry.pointer(common.pointers)?;
    let start = match common.pointers & APPLICATION {
        ABSOLUTE => start,
        PC_RELATIVE => start_at.checked_add_signed(start.cast_signed())?,
        _ => return None,
    };
    let bytes = entry.pointer(common.pointers)?;
    start.checked_add(bytes)?;
    let Common { is_signal, has_landing_pads, .. } = common;
    Some(Frame { start, bytes, is_signal, has_landing_pads })
}

/// All functions of a `.eh_frame`, in the order of the section, up to the first entry with an
/// unsupported encoding. Needed for static programs, which have no search table.
pub fn frames(section: &[u8], section_address: u64) -> impl Iterator<Item = Frame> {
    let mut at = 0;
    core::iter::from_fn(move || {
        loop {
            let length =
                section.get(at..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))?;
            let record = section_address.checked_add(u64::try_from(at).ok()?)?;
            let next = at.checked_add(4)?.checked_add(usize::try_from(length).ok()?)?;
            let id = section.get(at.checked_add(4)?..)?.first_chunk::<4>()?;
            if length == 0 || next > section.len() {
                return None;
            }
            at = next;
            // An id of 0 marks a common information entry.
            if *id != [0; 4] {
                return frame(section, section_address, record);
            }
        }
    })
}

/// The encoding of a pointer: its format, and what it is relative to.
const FORM: u8 = 0x0f;
const APPLICATION: u8 = 0x70;
const ABSOLUTE: u8 = 0x00;
const PC_RELATIVE: u8 = 0x10;

/// The parts of a common information entry that matter here.
struct Common {
    pointers: u8,
    is_signal: bool,
    has_landing_pads: bool,
}

impl Common {
    fn read(mut bytes: Bytes<'_>) -> Option<Self> {
        let id = bytes.u32()?;
        let version = bytes.u8()?;
        if id != 0 || !matches!(version, 1 | 3) {
            return None;
        }
        let mut augmentation = bytes;
        while bytes.u8()? != 0 {}
        bytes.leb128()?;
        bytes.leb128()?;
        // The register of the return address.
        if version == 1 { bytes.u8().map(u64::from) } else { bytes.leb128() }?;
        let mut common = Self { pointers: 0, is_signal: false, has_landing_pads: false };
        loop {
            match augmentation.u8()? {
                0 => return Some(common),
                b'z' => _ = bytes.leb128()?,
                b'R' => common.pointers = bytes.u8()?,
                b'L' => {
                    bytes.u8()?;
                    common.has_landing_pads = true;
                }
                b'P' => {
                    let form = bytes.u8()?;
                    bytes.pointer(form)?;
                }
                b'S' => common.is_signal = true,
                b'B' => {}
                _ => return None,
            }
        }
    }
}

/// A reader of bytes, from the front.
#[derive(Clone, Copy)]
struct Bytes<'a> {
    left: &'a [u8],
    address: u64,
}

impl<'a> Bytes<'a> {
    fn at(section: &'a [u8], section_address: u64, address: u64) -> Option<Self> {
        let offset = usize::try_from(address.checked_sub(section_address)?).ok()?;
        Some(Self { left: section.get(offset..)?, address })
    }

    /// The record at this position, without its length.
    fn record(mut self) -> Option<Self> {
        let bytes = usize::try_from(self.u32()?).ok()?;
        Some(Self { left: self.left.get(..bytes)?, ..self })
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, left) = self.left.split_first_chunk::<N>()?;
        self.left = left;
        self.address = self.address.checked_add(N as u64)?;
        Some(*taken)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take::<1>().map(|[byte]| byte)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    /// Reads a variable-length number. Callers only skip it.
    fn leb128(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..63).step_by(7) {
            let byte = self.u8()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    /// Reads the number of an encoded pointer, without adding its base.
    fn pointer(&mut self, encoding: u8) -> Option<u64> {
        match encoding & FORM {
            0x00 | 0x04 | 0x0c => self.take().map(u64::from_le_bytes),
            0x03 => self.u32().map(u64::from),
            0x0b => self.take().map(|four| i64::from(i32::from_le_bytes(four)).cast_unsigned()),
            _ => None,
        }
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
        section.extend(12u32.to_le_bytes());
        section.extend(u32::try_from(section.len()).unwrap().to_le_bytes());
        section.extend(start);
        section.extend(bytes.to_le_bytes());
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
        let found: Vec<(u64, bool)> =
            frames(&both, ADDRESS).map(|one| (one.bytes, one.is_signal)).collect();
        assert_eq!(found, [(0x40, false), (7, true)], "up to the end that a 0 marks");
        assert_eq!(frames(&second, ADDRESS).next(), frame(&second, ADDRESS, entry));
        assert_eq!(frames(&both[..both.len() / 4], ADDRESS).next(), None, "cut");
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
            let _any = frames(&bytes, ADDRESS).count();
            let _any = frame(&bytes, ADDRESS, entry.wrapping_add(distance));
            let _any = frame(&bytes, u64::MAX - distance, u64::MAX);
        }
    }
}
