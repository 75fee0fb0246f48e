//! A chunk's runs in fewer bytes, as they are in a file: whoever writes it does that, and not the
//! observer.
//!
//! Lengths of runs and what the runs are of differ in what is frequent, so they stand apart, a byte
//! for each run, and are packed by what is frequent among them ([`super::huffman`]); numbers that
//! such a byte can't say stand in a third part. How many samples are foretold wrong goes by the
//! length: runs of one length are mostly off as the one before them was, and say nothing of it.

use super::form::{CHUNK_BYTES, Kind, SHORT, SHORT_DIFFERENCES, VALUE};
use super::huffman::{pack as pack_bytes, unpack as unpack_bytes};
use super::varint::{put_one, take};

/// The number stands in the third part.
const ELSEWHERE: u8 = u8::MAX;
/// Tags of which a short run has a byte: as it is foretold, and else.
const TAGS: u64 = 120;
const _: () = assert!(2 * TAGS < ELSEWHERE as u64);

/// By lengths of runs, as a byte says them: how far samples were off what a chunk's pace foretells.
struct Foretold([u64; 256]);

impl Foretold {
    fn new() -> Self {
        Self([0; 256])
    }

    /// From how far they are off to 0, if that is as before, or 1 or 2, and back.
    fn turn(&mut self, length: u8, off: u64) -> u64 {
        let before = std::mem::replace(&mut self.0[usize::from(length)], off);
        if off == before { 0 } else { off + u64::from(off < before) }
    }

    fn turn_back(&mut self, length: u8, turned: u64) -> u64 {
        let before = self.0[usize::from(length)];
        let off = if turned == 0 { before } else { turned - u64::from(turned <= before) };
        self.0[usize::from(length)] = off;
        off
    }
}

/// Packs a chunk as it is in memory; `None` of one that takes no less so, or was not written there.
pub(super) fn pack(kind: Kind, runs: u32, mut chunk: &[u8]) -> Option<Vec<u8>> {
    let whole = chunk.len();
    let (mut lengths, mut codes, mut others) = (Vec::new(), Vec::new(), Vec::new());
    let (mut foretold, mut tags) = (Foretold::new(), 0);
    // The pace of its runs.
    put_one(take(&mut chunk)?, &mut others);
    for _ in 0..runs {
        let length = byte_of(take(&mut chunk)?, &mut others);
        lengths.push(length);
        let coded = take(&mut chunk)?;
        if kind == Kind::Tags && coded & SHORT != 0 {
            let (tag, off) = short(coded);
            let turned = foretold.turn(length, off);
            let byte = u8::try_from(tag + TAGS * turned).ok();
            let byte = byte.filter(|_| tag < TAGS && turned < 2).unwrap_or(ELSEWHERE);
            if byte == ELSEWHERE {
                put_one(coded, &mut others);
            }
            codes.push(byte);
            continue;
        }
        codes.push(match kind {
            Kind::Values => byte_of(coded, &mut others),
            Kind::Tags => {
                put_one(coded, &mut others);
                ELSEWHERE
            }
        });
        for _ in 0..behind(kind, coded) {
            let number = take(&mut chunk)?;
            put_one(number, &mut others);
            if kind == Kind::Tags && number == tags {
                // Its value, the first time.
                tags += 1;
                put_one(take(&mut chunk)?, &mut others);
            }
        }
    }
    let mut packed = Vec::with_capacity(whole);
    for part in [lengths, codes, others] {
        pack_bytes(&part, &mut packed);
    }
    (chunk.is_empty() && packed.len() < whole).then_some(packed)
}

/// The chunk as it was in memory; of what [`pack`] did not make, perhaps why it is none.
pub(super) fn unpack(kind: Kind, runs: u32, mut bytes: &[u8]) -> Result<Vec<u8>, &'static str> {
    let mut part = || unpack_bytes(&mut bytes, CHUNK_BYTES);
    let (lengths, codes, others) = (part()?, part()?, part()?);
    if !bytes.is_empty() {
        return Err("it goes on behind its end");
    }
    let runs = usize::try_from(runs).unwrap_or(usize::MAX);
    if lengths.len() != runs || codes.len() != runs {
        return Err("it has another number of runs");
    }
    let mut others = &others[..];
    let mut other = || take(&mut others).ok_or("it ends inside of a run");
    let mut chunk = Vec::new();
    let (mut foretold, mut tags) = (Foretold::new(), 0);
    put_one(other()?, &mut chunk);
    for (length, code) in lengths.into_iter().zip(codes) {
        put_one(if length == ELSEWHERE { other()? } else { length.into() }, &mut chunk);
        let is_said = code != ELSEWHERE;
        let code = u64::from(code);
        let coded = match kind {
            _ if !is_said => other()?,
            Kind::Values => code,
            Kind::Tags => {
                let off = foretold.turn_back(length, code / TAGS);
                (code % TAGS * SHORT_DIFFERENCES + off) << 1 | SHORT
            }
        };
        put_one(coded, &mut chunk);
        if kind == Kind::Tags && coded & SHORT != 0 {
            if !is_said {
                foretold.turn(length, short(coded).1);
            }
            continue;
        }
        for _ in 0..behind(kind, coded) {
            let number = other()?;
            put_one(number, &mut chunk);
            if kind == Kind::Tags && number == tags {
                tags += 1;
                put_one(other()?, &mut chunk);
            }
        }
    }
    match others.is_empty() && chunk.len() <= CHUNK_BYTES {
        true => Ok(chunk),
        false => Err("it has other bytes than a chunk"),
    }
}

/// A short run's tag, and how far its samples are off.
fn short(coded: u64) -> (u64, u64) {
    let both = coded >> 1;
    (both / SHORT_DIFFERENCES, both % SHORT_DIFFERENCES)
}

/// How many numbers follow the code of a run that is not short.
fn behind(kind: Kind, coded: u64) -> usize {
    let state = coded >> u32::from(kind == Kind::Tags) & 3;
    usize::from(state == VALUE)
}

fn byte_of(number: u64, others: &mut Vec<u8>) -> u8 {
    let byte = u8::try_from(number).ok().filter(|&byte| byte != ELSEWHERE);
    byte.unwrap_or_else(|| {
        put_one(number, others);
        ELSEWHERE
    })
}

#[cfg(test)]
mod tests {
    use super::super::{Pool, Series, State};
    use super::*;
    use crate::random::Random;
    use proptest::prelude::*;

    /// One signal's states in chunks, as an observer writes them.
    fn chunks(kind: Kind, states: &[(u64, u8, u64)]) -> Pool {
        let mut pool = Pool::new(1 << 20, 1, false);
        let mut series = Series::new(0, kind, 8, 0);
        let mut at = 0;
        for &(length, which, value) in states {
            let state = match which {
                0 => State::NotRunning,
                1 => State::Other,
                _ => State::Value(value),
            };
            let samples = 1 + length / 90 + value % 2;
            (0..samples).for_each(|_| series.see(at, state, &mut pool).unwrap());
            at += 1 + length;
            if which == 9 {
                series.gap(at, at % 2 == 0, &mut pool).unwrap();
                at += 70;
            }
        }
        series.end(at + 50, &mut pool).unwrap();
        pool
    }

    fn check(kind: Kind, states: &[(u64, u8, u64)]) -> Result<usize, TestCaseError> {
        let mut packed_chunks = 0;
        for (head, bytes) in chunks(kind, states).chunks() {
            let Some(packed) = pack(kind, head.runs, bytes) else { continue };
            packed_chunks += 1;
            prop_assert!(packed.len() < bytes.len());
            prop_assert_eq!(unpack(kind, head.runs, &packed), Ok(bytes.to_vec()));
            prop_assert!(unpack(kind, head.runs + 1, &packed).is_err());
            prop_assert!(unpack(kind, head.runs, &packed[..packed.len() - 1]).is_err());
            prop_assert!(unpack(kind, head.runs, &[&packed[..], &[0]].concat()).is_err());
        }
        Ok(packed_chunks)
    }

    proptest! {
        /// Goal: chunks come back as they were. Method: states of each kind, of lengths that a byte
        /// can say and longer ones, of few tags and of more than a byte can say.
        #[test]
        fn chunks_come_back(
            few in proptest::collection::vec((0_u64..3000, 0_u8..10, 0_u64..9), 0..40),
            many in proptest::collection::vec((0_u64..300_000, 0_u8..10, any::<u64>()), 0..40),
            turns in 1_usize..30,
        ) {
            let mut states = few.repeat(turns);
            states.extend(many);
            for kind in [Kind::Tags, Kind::Values] {
                check(kind, &states)?;
            }
        }
    }

    /// Goal: a run of many different ones takes about as little as its entropy. Method: some sixty
    /// tags, of which some are frequent, for thirty different lengths, which tell the samples.
    #[test]
    fn runs_of_many_tags_take_less_than_two_bytes() {
        let mut random = Random::of(88_172_645_463_325_252);
        let mut draw = |count| random.below(count);
        let states: Vec<(u64, u8, u64)> = (0..60_000)
            .map(|_| {
                let tag = draw(13) * draw(13);
                (160 + draw(30) * 8, 2, 2 * tag)
            })
            .collect();
        assert!(check(Kind::Tags, &states).unwrap() > 3);
        let pool = chunks(Kind::Tags, &states);
        let (mut runs, mut bytes, mut before) = (0, 0, 0);
        for (head, chunk) in pool.chunks() {
            runs += head.runs as usize;
            before += chunk.len();
            bytes += pack(Kind::Tags, head.runs, chunk).unwrap().len();
        }
        assert!(before * 10 > runs * 21 && bytes * 10 < runs * 16, "{before} {bytes} of {runs}");
    }

    #[test]
    fn what_is_foretold_is_turned_back() {
        for before in 0..3 {
            for off in 0..3 {
                let (mut one, mut other) = (Foretold::new(), Foretold::new());
                let turned = [one.turn(7, before), one.turn(7, off), one.turn(8, off)];
                let back = turned.into_iter().zip([7, 7, 8]);
                let back: Vec<u64> = back.map(|(turned, at)| other.turn_back(at, turned)).collect();
                assert_eq!(back, [before, off, off]);
                assert!(
                    turned.iter().all(|&turned| turned < 3) && (turned[1] == 0) == (off == before)
                );
            }
        }
    }
}
