//! A binary range coder with adaptive probabilities: the entropy stage of `compress`.
//!
//! A model is one probability per context; coding a bit narrows a range by it and moves it towards
//! the bit. Coder and decoder do the same arithmetic on integers, so they never part.

const BITS: u32 = 11;
const HALF: u16 = 1 << (BITS - 1);
/// How fast a probability follows what it sees.
const RATE: u32 = 5;
const TOP: u32 = 1 << 24;

/// The probability of a zero, in units of `1 / 2^BITS`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bit(u16);

impl Default for Bit {
    fn default() -> Self {
        Self(HALF)
    }
}

impl Bit {
    fn bound(self, range: u32) -> u32 {
        (range >> BITS) * u32::from(self.0)
    }

    fn learn(&mut self, one: bool) {
        if one {
            self.0 -= self.0 >> RATE;
        } else {
            self.0 += ((1 << BITS) - self.0) >> RATE;
        }
    }
}

#[derive(Debug)]
pub(super) struct Encoder {
    low: u64,
    range: u32,
    /// The last byte that a carry may still change, and how many 0xff follow it.
    held: Option<u8>,
    ones: usize,
    out: Vec<u8>,
}

impl Encoder {
    pub(super) fn new() -> Self {
        Self { low: 0, range: u32::MAX, held: None, ones: 0, out: Vec::new() }
    }

    pub(super) fn bit(&mut self, model: &mut Bit, one: bool) {
        let bound = model.bound(self.range);
        if one {
            self.low += u64::from(bound);
            self.range -= bound;
        } else {
            self.range = bound;
        }
        model.learn(one);
        while self.range < TOP {
            self.range <<= 8;
            self.shift();
        }
    }

    /// The low `bits` of `value`, the highest first, each in the context of those before it.
    pub(super) fn tree(&mut self, models: &mut [Bit], bits: u32, value: u32) {
        let mut node = 1;
        for at in (0..bits).rev() {
            let one = value >> at & 1 == 1;
            self.bit(&mut models[node], one);
            node = node << 1 | usize::from(one);
        }
    }

    fn shift(&mut self) {
        let [.., carry, top, _, _, _] = self.low.to_be_bytes();
        if carry == 1 || top != 0xff {
            if let Some(held) = self.held {
                self.out.push(held.wrapping_add(carry));
            }
            let filler = 0xff_u8.wrapping_add(carry);
            self.out.extend(std::iter::repeat_n(filler, self.ones));
            (self.held, self.ones) = (Some(top), 0);
        } else {
            self.ones += 1;
        }
        self.low = (self.low & 0x00ff_ffff) << 8;
    }

    pub(super) fn finish(mut self) -> Vec<u8> {
        (0..5).for_each(|_| self.shift());
        self.out
    }
}

#[derive(Debug)]
pub(super) struct Decoder<'a> {
    code: u32,
    range: u32,
    rest: std::slice::Iter<'a, u8>,
}

impl<'a> Decoder<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        let mut decoder = Self { code: 0, range: u32::MAX, rest: bytes.iter() };
        (0..4).for_each(|_| decoder.take());
        decoder
    }

    /// Past the end there are zeros.
    fn take(&mut self) {
        self.code = self.code << 8 | u32::from(self.rest.next().copied().unwrap_or(0));
    }

    pub(super) fn bit(&mut self, model: &mut Bit) -> bool {
        let bound = model.bound(self.range);
        let one = self.code >= bound;
        if one {
            self.code -= bound;
            self.range -= bound;
        } else {
            self.range = bound;
        }
        model.learn(one);
        while self.range < TOP {
            self.range <<= 8;
            self.take();
        }
        one
    }

    pub(super) fn tree(&mut self, models: &mut [Bit], bits: u32) -> u32 {
        let mut node = 1;
        for _ in 0..bits {
            node = node << 1 | usize::from(self.bit(&mut models[node]));
        }
        u32::try_from(node - (1 << bits)).expect("a tree of at most 31 levels")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Goal: what was coded is decoded. Method: any bits, in any of four contexts, skewed so
        /// that probabilities reach their ends and carries ripple.
        #[test]
        fn bits_survive(bits in proptest::collection::vec((0usize..4, 0u8..20), 0..3_000)) {
            let bits: Vec<(usize, bool)> = bits.iter().map(|(at, n)| (*at, *n == 0)).collect();
            let mut encoder = Encoder::new();
            let mut models = [Bit::default(); 4];
            bits.iter().for_each(|(at, one)| encoder.bit(&mut models[*at], *one));
            let bytes = encoder.finish();
            let mut decoder = Decoder::new(&bytes);
            let mut models = [Bit::default(); 4];
            for (at, one) in bits {
                prop_assert_eq!(decoder.bit(&mut models[at]), one);
            }
        }
    }
}
