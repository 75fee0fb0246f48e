//! Bytes in fewer bits, the more frequent the fewer (Huffman's codes, in the canonical order, so
//! that the number of bits of each byte says all). What is read back takes a bit a byte at least,
//! so a file says how much memory it can take.

use std::collections::BTreeSet;

use super::varint::{put_one, take};

/// Of a code, at most: so many of them are looked up at once.
const BITS: u32 = 12;
const CODES: usize = 1 << BITS;
/// Bits of each byte's code, two to a byte.
const TABLE_BYTES: usize = 128;

/// How many bytes, how many their codes take, the bits of each byte's code, and the codes; of bytes
/// that take no less so, no codes and themselves.
pub(super) fn pack(part: &[u8], packed: &mut Vec<u8>) {
    let mut counts = [0_u32; 256];
    part.iter().for_each(|&byte| counts[usize::from(byte)] += 1);
    let bits = bits_of(counts);
    let all: u64 = counts.iter().zip(bits).map(|(&n, bits)| u64::from(n) * u64::from(bits)).sum();
    let bytes = all.div_ceil(8);
    put_one(part.len() as u64, packed);
    if bytes + TABLE_BYTES as u64 >= part.len() as u64 {
        put_one(0, packed);
        packed.extend_from_slice(part);
        return;
    }
    put_one(bytes, packed);
    packed.extend(bits.chunks(2).map(|pair| pair[0] << 4 | pair[1]));
    let codes = codes_of(&bits);
    let (mut held, mut count) = (0_u64, 0);
    for &byte in part {
        let bits = u32::from(bits[usize::from(byte)]);
        held = held << bits | u64::from(codes[usize::from(byte)]);
        count += bits;
        while count >= 8 {
            count -= 8;
            packed.push((held >> count & 0xff) as u8);
        }
    }
    if count > 0 {
        packed.push((held << (8 - count) & 0xff) as u8);
    }
}

/// What [`pack`] made of at most so many bytes, from the front; of anything else, why it is not
/// that.
pub(super) fn unpack(bytes: &mut &[u8], most: usize) -> Result<Vec<u8>, &'static str> {
    let cut = "it ends before its codes";
    let mut number = || take(bytes).and_then(|number| usize::try_from(number).ok()).ok_or(cut);
    let (length, packed) = (number()?, number()?);
    if length > most {
        return Err("it is longer than a chunk");
    }
    if packed == 0 {
        let (part, after) = bytes.split_at_checked(length).ok_or(cut)?;
        *bytes = after;
        return Ok(part.to_vec());
    }
    let (table, after) = bytes.split_at_checked(TABLE_BYTES).ok_or(cut)?;
    let (mut codes, after) = after.split_at_checked(packed).ok_or(cut)?;
    *bytes = after;
    let mut bits = [0; 256];
    for (pair, &both) in bits.chunks_mut(2).zip(table) {
        pair.copy_from_slice(&[both >> 4, both & 15]);
    }
    let table = Table::of(&bits)?;
    let mut part = Vec::with_capacity(length);
    let (mut held, mut count, mut taken) = (0_u64, 0, 0);
    for _ in 0..length {
        while count < BITS {
            // Behind the last code there may be less than a longest one.
            let (next, left) = codes.split_first().map_or((0, codes), |(&next, left)| (next, left));
            (held, count, codes) = (held << 8 | u64::from(next), count + 8, left);
        }
        let at = usize::try_from(held >> (count - BITS) & (CODES as u64 - 1)).unwrap_or(0);
        let (byte, bits) = table.0[at];
        if bits == 0 {
            return Err("it has a code of no byte");
        }
        part.push(byte);
        count -= u32::from(bits);
        taken += usize::from(bits);
    }
    // Less than a byte is left over, and nothing of what was made up behind the end is taken.
    if taken.div_ceil(8) == packed { Ok(part) } else { Err("its codes are of another length") }
}

/// The byte and the bits of each code, by what begins with it.
struct Table(Vec<(u8, u8)>);

impl Table {
    fn of(bits: &[u8; 256]) -> Result<Self, &'static str> {
        let has_code = |bits: &&u8| **bits > 0;
        if bits.iter().any(|&bits| u32::from(bits) > BITS) {
            return Err("it has a code that is too long");
        }
        let taken: usize = bits.iter().filter(has_code).map(|&bits| CODES >> bits).sum();
        if taken > CODES {
            return Err("it has more codes than there are");
        }
        let mut table = vec![(0, 0); CODES];
        for ((byte, &bits), code) in (0..=u8::MAX).zip(bits).zip(codes_of(bits)) {
            if bits > 0 {
                let first = usize::from(code) << (BITS - u32::from(bits));
                table[first..first + (CODES >> bits)].fill((byte, bits));
            }
        }
        Ok(Self(table))
    }
}

/// The code of each byte, whose bits add up: shorter ones first, and then by the byte.
fn codes_of(bits: &[u8; 256]) -> [u16; 256] {
    let mut codes = [0; 256];
    let mut next = 0;
    for length in 1..=BITS {
        for (code, _) in codes.iter_mut().zip(bits).filter(|(_, bits)| u32::from(**bits) == length)
        {
            *code = next;
            next += 1;
        }
        next <<= 1;
    }
    codes
}

/// How many bits each byte's code has; none of a byte that is not there.
fn bits_of(mut counts: [u32; 256]) -> [u8; 256] {
    loop {
        let bits = unbounded(&counts);
        if bits.iter().all(|&bits| u32::from(bits) <= BITS) {
            return bits;
        }
        // Rare bytes are taken for less rare ones, until no code is too long.
        counts.iter_mut().filter(|count| **count > 0).for_each(|count| *count = *count / 2 + 1);
    }
}

/// Huffman's: the two rarest are put together, again and again.
fn unbounded(counts: &[u32; 256]) -> [u8; 256] {
    // How often, and which: a byte, or from 256 on what was put together.
    let there = counts.iter().enumerate().filter(|(_, count)| **count > 0);
    let mut rarest: BTreeSet<(u32, usize)> = there.map(|(byte, count)| (*count, byte)).collect();
    let is_one = rarest.len() == 1;
    let mut within = vec![None; 256];
    while rarest.len() > 1 {
        let pair = [rarest.pop_first(), rarest.pop_first()];
        let both = within.len();
        within.push(None);
        let mut sum = 0;
        for (count, which) in pair.into_iter().flatten() {
            within[which] = Some(both);
            sum += count;
        }
        rarest.insert((sum, both));
    }
    let mut bits = [0; 256];
    for (byte, bits) in bits.iter_mut().enumerate() {
        let outer = std::iter::successors(within[byte], |&which| within[which]);
        *bits = u8::try_from(outer.count()).unwrap_or(u8::MAX);
        // A byte that is alone has a code as well.
        *bits += u8::from(is_one && counts[byte] > 0);
    }
    bits
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MANY: usize = 1 << 14;

    fn check(part: &[u8]) -> Result<(), TestCaseError> {
        let mut packed = Vec::new();
        pack(part, &mut packed);
        prop_assert!(packed.len() <= part.len() + 4);
        let whole = packed.len();
        packed.push(77);
        let mut bytes = &packed[..];
        prop_assert_eq!(unpack(&mut bytes, MANY), Ok(part.to_vec()));
        prop_assert_eq!(bytes, [77]);
        for cut in [0, 1, whole / 2, whole - 1] {
            prop_assert!(unpack(&mut &packed[..cut], MANY).is_err());
        }
        prop_assert!(part.is_empty() || unpack(&mut &packed[..], part.len() - 1).is_err());
        Ok(())
    }

    proptest! {
        /// Goal: what is packed comes back. Method: bytes of which some are far more frequent than
        /// others, so that codes are of all lengths.
        #[test]
        fn what_is_packed_comes_back(
            seeds in proptest::collection::vec((any::<u8>(), 0_u32..12), 0..60),
            more in proptest::collection::vec(any::<u8>(), 0..40),
        ) {
            let often = |&(byte, power): &(u8, u32)| vec![byte; 1 << power];
            let mut part: Vec<u8> = seeds.iter().flat_map(often).chain(more).collect();
            part.truncate(MANY);
            check(&part)?;
        }

        /// With tables that are right now and then, so that what is behind them is reached.
        #[test]
        fn anything_is_unpacked_or_refused(
            head in (0_u64..3000, 0_u64..300),
            codes in proptest::collection::vec((any::<u8>(), 1_u8..14), 0..40),
            bytes in proptest::collection::vec(any::<u8>(), 0..400),
        ) {
            let mut packed = Vec::new();
            put_one(head.0, &mut packed);
            put_one(head.1, &mut packed);
            let mut table = [0; TABLE_BYTES];
            codes.iter().for_each(|(byte, bits)| table[usize::from(*byte) / 2] = *bits);
            packed.extend(table);
            packed.extend(bytes);
            if let Ok(part) = unpack(&mut &packed[..], MANY) {
                prop_assert!(part.len() <= packed.len() * 8);
            }
        }
    }

    /// Goal: frequent bytes take few bits, and rare ones no more than are looked up at once.
    /// Method: counts that each are the sum of the two before, which make the longest codes.
    #[test]
    fn codes_are_short_where_that_is_worth_it() {
        let mut counts = [0; 256];
        (counts[7], counts[8]) = (1, 1);
        (9..30).for_each(|at| counts[at] = counts[at - 1] + counts[at - 2]);
        assert!(unbounded(&counts).iter().any(|&bits| u32::from(bits) > BITS));
        let bits = bits_of(counts);
        assert!(bits.iter().all(|&bits| u32::from(bits) <= BITS) && bits[29] < 3);
        assert!((7..30).all(|at| bits[at] > 0) && Table::of(&bits).is_ok());
        let mut packed = Vec::new();
        pack(&[200; 4000], &mut packed);
        assert_eq!(packed.len(), 2 + 2 + TABLE_BYTES + 500);
        assert!(Table::of(&[1; 256]).is_err() && Table::of(&[13; 256]).is_err());
    }
}
