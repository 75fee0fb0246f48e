//! What is known of the functions that threads were met in.

use std::collections::HashMap;
use std::sync::Arc;

use elfen_rewrite::{DecodeError, Function};

use super::missed::Missed;

/// How many are remembered decoded.
const DECODED_MAX: usize = 64;
/// Of how many addresses it is remembered that there is nothing to be done, and for how many
/// threads that are met there: another one may have been called by somebody else.
const MISSES_MAX: usize = 4096;
const MISS_ANSWERS: u32 = 32;

/// Functions, by their first addresses.
#[derive(Clone, Default, Debug)]
pub(super) struct Functions {
    decoded: HashMap<u64, Decoded>,
    /// Whether something goes to the middle of them.
    pub(super) entered: HashMap<u64, bool>,
    misses: HashMap<u64, (Missed, u32)>,
    callers: HashMap<u64, Callers>,
}

/// How often threads were met in a function without a check for it, and the checks that those who
/// may have called it were given.
#[derive(Clone, Default, Debug)]
struct Callers {
    samples: u32,
    hints: Vec<u64>,
}

#[derive(Clone, Debug)]
struct Decoded {
    /// What it was read from.
    bytes: Box<[u8]>,
    function: Arc<Function>,
}

impl Functions {
    /// The function of these bytes, in which a thread stood at `sample`. A long one takes
    /// milliseconds to decode, and threads are met in the same ones again and again.
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

    /// Why there is no check for a thread that was met at `ip`, if that has been found out.
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

    /// A check has come or gone.
    pub(super) fn forget_misses(&mut self) {
        self.misses.clear();
    }

    /// A thread was met in the function that begins at `start`, and it is left to callers: how
    /// often that was, and which checks they have.
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

    /// jmp over a nop; nop; ret: that the first nop is code, only a thread there tells.
    const BYTES: [u8; 5] = [0xeb, 0x01, 0x90, 0x90, 0xc3];

    fn remembered(functions: &mut Functions, bytes: &[u8], sample: Option<u64>) -> String {
        format!("{:?}", functions.decode(bytes, 0x1000, sample).unwrap())
    }

    /// Goal: a function that is remembered is what it would be if it were decoded anew. Method: the
    /// same bytes with and without a thread, and others at the same address.
    #[test]
    fn what_is_remembered_is_what_would_be_decoded() {
        let mut functions = Functions::default();
        let anew = |bytes: &[u8], sample| {
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
                remembered(&mut functions, bytes, sample),
                anew(bytes, sample),
                "{sample:?}"
            );
        }
        assert_ne!(anew(&BYTES, None), anew(&BYTES, Some(0x1002)), "a thread says something");
        let inside = functions.decode(&BYTES, 0x1000, Some(0x1001));
        assert!(matches!(inside, Err(DecodeError::SampleInside(0x1001))), "{inside:?}");
    }

    #[test]
    fn not_all_are_remembered() {
        let mut functions = Functions::default();
        for start in 0..1000 {
            functions.decode(&BYTES, 0x1000 * (start + 1), None).unwrap();
            assert!(functions.decoded.len() <= DECODED_MAX);
        }
    }

    /// Goal: what has been found out is not asked at each miss, but again now and then, and at once
    /// when a check has come or gone; what is of the process and not of the code is asked always.
    #[test]
    fn what_is_settled_is_so_for_a_while() {
        let mut functions = Functions::default();
        functions.remember_miss(0x1000, &Missed::Gone);
        assert!(functions.known_miss(0x1000).is_none());
        functions.remember_miss(0x1000, &Missed::NoSite);
        let asked = (0..100).take_while(|_| functions.known_miss(0x1000).is_some()).count();
        assert_eq!(asked, MISS_ANSWERS as usize);
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
