//! Numbers in as few bytes as they need, seven bits a byte.

/// Bytes of the longest.
pub(super) const MOST: usize = 10;

/// Writes at the front of `to`; gives how many bytes that took. What does not fit is cut off: the
/// caller has seen to it that [`MOST`] bytes are there.
#[inline(always)]
pub(super) fn put(mut value: u64, to: &mut [u8]) -> usize {
    for (at, byte) in to.iter_mut().take(MOST).enumerate() {
        let low = (value & 0x7f) as u8;
        value >>= 7;
        if value == 0 {
            *byte = low;
            return at + 1;
        }
        *byte = low | 0x80;
    }
    MOST
}

/// The same at the end.
pub(super) fn put_one(number: u64, to: &mut Vec<u8>) {
    let mut bytes = [0; MOST];
    let count = put(number, &mut bytes);
    to.extend_from_slice(&bytes[..count]);
}

/// Takes a number from the front; `None` if there is none, or it has more than 64 bits.
pub(super) fn take(from: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..70).step_by(7) {
        let (&byte, rest) = from.split_first()?;
        *from = rest;
        let bits = u64::from(byte & 0x7f);
        if shift == 63 && bits > 1 {
            return None;
        }
        value |= bits << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// Small numbers of either sign as small ones.
#[inline(always)]
pub(super) fn zigzag(difference: u64) -> u64 {
    let signed = difference.cast_signed();
    (signed << 1 ^ signed >> 63).cast_unsigned()
}

pub(super) fn unzigzag(value: u64) -> u64 {
    (value >> 1) ^ (value & 1).wrapping_neg()
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #[test]
        fn numbers_come_back(value: u64, cut in 0usize..MOST) {
            let mut bytes = [0xff; MOST + 1];
            let count = put(value, &mut bytes);
            let mut from = &bytes[..];
            proptest::prop_assert_eq!(take(&mut from), Some(value));
            proptest::prop_assert_eq!(from.len(), bytes.len() - count);
            let mut short = &bytes[..cut.min(count - 1)];
            proptest::prop_assert_eq!(take(&mut short), None);
            proptest::prop_assert_eq!(unzigzag(zigzag(value)), value);
        }
    }

    #[test]
    fn small_numbers_are_one_byte_and_long_ones_are_refused() {
        let mut bytes = [0; MOST];
        assert_eq!((put(127, &mut bytes), put(128, &mut bytes)), (1, 2));
        assert_eq!((zigzag(0), zigzag(1), zigzag(u64::MAX)), (0, 2, 1));
        assert_eq!(take(&mut &[0xff; 20][..]), None);
        let too_much = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2];
        assert_eq!(take(&mut &too_much[..]), None);
    }
}
