//! Caches what is known about the functions in which threads were sampled.

use std::collections::HashMap;
use std::sync::Arc;

use elfen_rewrite::{DecodeError, Function};

use super::missed::Missed;

/// How many decoded functions are kept.
const DECODED_MAX: usize = 64;
/// For how many addresses a failure is remembered, and for how many samples at each. It is retried
/// after that, because a later thread may have another caller.
const MISSES_MAX: usize = 4096;
const MISS_ANSWERS: u32 = 32;

/// Functions, by their start addresses.
#[derive(Clone, Default, Debug)]
pub(super) struct Functions {
    decoded: HashMap<u64, Decoded>,
    /// Whether code or data outside of the function refers to its inside.
    pub(super) entered: HashMap<u64, bool>,
    misses: HashMap<u64, (Missed, u32)>,
    callers: HashMap<u64, Callers>,
}

/// How many samples hit a function without a check, and which checks its possible callers got.
#[derive(Clone, Default, Debug)]
struct Callers {
    samples: u32,
    hints: Vec<u64>,
}

#[derive(Clone, Debug)]
struct Decoded {
    /// The bytes that the function was decoded from.
    bytes: Box<[u8]>,
    function: Arc<Function>,
}

impl Functions {
    /// Decodes a function; a thread was interrupted at `sample`. A long function takes milliseconds
    /// to decode, and samples hit the same functions again and again.
    pub(super) fn decode(
        &mut self,
        bytes: &[u8],
        start: u64,
        sample: Option<u64>,
    ) -> Result<Arc<Function>, DecodeError> {
        if self.decoded.get(&start).is_none_or(|known| *known.bytes != *bytes) {
            let function = Arc::new(Function::decode(bytes, start, sample)?);
            if self.decoded.len() >= DECODED_MAX {
                self.decoded.clear();
            }
            let known = Decoded { bytes: bytes.into(), function: function.clone() };
            self.decoded.insert(start, known);
            return Ok(function);
        }
        let known = self.decoded.get_mut(&start).ok_or(DecodeError::Length)?;
        Arc::make_mut(&mut known.function).set_sample(sample)?;
        Ok(known.function.clone())
    }

    /// Why a thread at `ip` has no check, if that is remembered.
    pub(super) fn known_miss(&mut self, ip: u64) -> Option<Missed> {
        let (missed, left) = self.misses.get_mut(&ip)?;
        *left = left.checked_sub(1)?;
        Some(missed.clone())
    }

    pub(super) fn remember_miss(&mut self, ip: u64, missed: &Missed) {
        if !missed.depends_on_code_only() {
            return;
        }
        if self.misses.len() >= MISSES_MAX {
            self.misses.clear();
        }
        self.misses.insert(ip, (missed.clone(), MISS_ANSWERS));
    }

    /// Must be called whenever a check was added or removed.
    pub(super) fn forget_misses(&mut self) {
        self.misses.clear();
    }

    /// Counts a sample in the function that begins at `start`, which is left to checks in its
    /// callers. Returns the number of samples, and the checks of its callers.
    pub(super) fn count_sample(&mut self, start: u64) -> (u32, &[u64]) {
        let known = self.callers.entry(start).or_default();
        known.samples = known.samples.saturating_add(1);
        (known.samples, &known.hints)
    }

    pub(super) fn remember_hint(&mut self, start: u64, site: u64) {
        let hints = &mut self.callers.entry(start).or_default().hints;
        if !hints.contains(&site) {
            hints.push(site);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `jmp` over a nop; nop; ret. Only a sample shows that the first nop is code.
    const BYTES: [u8; 5] = [0xeb, 0x01, 0x90, 0x90, 0xc3];

    fn decode_remembering(functions: &mut Functions, bytes: &[u8], sample: Option<u64>) -> String {
        format!("{:?}", functions.decode(bytes, 0x1000, sample).unwrap())
    }

    /// Goal: a remembered function equals a freshly decoded one. Method: the same bytes with and
    /// without a sample, and other bytes at the same address.
    #[test]
    fn a_remembered_function_equals_a_decoded_one() {
        let mut functions = Functions::default();
        let decode = |bytes: &[u8], sample| {
            format!("{:?}", Arc::new(Function::decode(bytes, 0x1000, sample).unwrap()))
        };
        let other = [0x90, 0x90, 0x90, 0x90, 0xc3];
        for (bytes, sample) in [
            (&BYTES, None),
            (&BYTES, Some(0x1002)),
            (&BYTES, None),
            (&other, None),
            (&BYTES, Some(0x1002)),
        ] {
            assert_eq!(
                decode_remembering(&mut functions, bytes, sample),
                decode(bytes, sample),
                "{sample:?}"
            );
        }
        assert_ne!(
            decode(&BYTES, None),
            decode(&BYTES, Some(0x1002)),
            "a sample makes a difference"
        );
        let inside = functions.decode(&BYTES, 0x1000, Some(0x1001));
        assert!(matches!(inside, Err(DecodeError::SampleInside(0x1001))), "{inside:?}");
    }

    #[test]
    fn few_functions_are_remembered() {
        let mut functions = Functions::default();
        for start in 0..1000 {
            functions.decode(&BYTES, 0x1000 * (start + 1), None).unwrap();
            assert!(functions.decoded.len() <= DECODED_MAX);
        }
    }

    /// Goal: a failure is remembered for some samples, and forgotten at once when a check was added
    /// or removed. Failures of the process, not of the code, are never remembered.
    #[test]
    fn misses_are_remembered_for_a_while() {
        let mut functions = Functions::default();
        functions.remember_miss(0x1000, &Missed::Gone);
        assert!(functions.known_miss(0x1000).is_none());
        functions.remember_miss(0x1000, &Missed::NoSite);
        let answers = (0..100).take_while(|_| functions.known_miss(0x1000).is_some()).count();
        assert_eq!(answers, MISS_ANSWERS as usize);
        assert!(functions.known_miss(0x1001).is_none());
        functions.remember_miss(0x1000, &Missed::TooDense);
        functions.forget_misses();
        assert!(functions.known_miss(0x1000).is_none());
        for ip in 0..20_000 {
            functions.remember_miss(ip, &Missed::NoSite);
            assert!(functions.misses.len() <= MISSES_MAX);
        }
    }
}
