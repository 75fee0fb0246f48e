//! What is known of the functions that threads were met in.

use std::collections::HashMap;
use std::sync::Arc;

use elfen_rewrite::{Function, Refused};

use super::missed::Missed;

/// How many are remembered decoded.
const DECODED_MAX: usize = 64;
/// Of how many addresses it is remembered that there is nothing to be done, and for how many
/// threads that are met there: another one may have been called by somebody else.
const SETTLED_MAX: usize = 4096;
const SETTLED_FOR: u32 = 32;

/// Functions, by their first addresses.
#[derive(Clone, Default, Debug)]
pub(super) struct Functions {
    decoded: HashMap<u64, Decoded>,
    /// Whether something goes to the middle of them.
    pub(super) entered: HashMap<u64, bool>,
    settled: HashMap<u64, (Missed, u32)>,
    callers: HashMap<u64, Callers>,
}

/// How often threads were met in a function without a check for it, and the checks that those who
/// may have called it were given.
#[derive(Clone, Default, Debug)]
struct Callers {
    met: u32,
    hinted: Vec<u64>,
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
    pub(super) fn decoded(
        &mut self,
        bytes: &[u8],
        start: u64,
        sample: Option<u64>,
    ) -> Result<Arc<Function>, Refused> {
        if self.decoded.get(&start).is_none_or(|known| *known.bytes != *bytes) {
            let function = Arc::new(Function::decode(bytes, start, sample)?);
            if self.decoded.len() >= DECODED_MAX {
                self.decoded.clear();
            }
            let known = Decoded { bytes: bytes.into(), function: function.clone() };
            self.decoded.insert(start, known);
            return Ok(function);
        }
        let known = self.decoded.get_mut(&start).ok_or(Refused::Length)?;
        Arc::make_mut(&mut known.function).meet(sample)?;
        Ok(known.function.clone())
    }

    /// Why there is no check for a thread that was met at `ip`, if that has been found out.
    pub(super) fn settled(&mut self, ip: u64) -> Option<Missed> {
        let (missed, left) = self.settled.get_mut(&ip)?;
        *left = left.checked_sub(1)?;
        Some(missed.clone())
    }

    pub(super) fn settle(&mut self, ip: u64, missed: &Missed) {
        if !missed.is_of_code() {
            return;
        }
        if self.settled.len() >= SETTLED_MAX {
            self.settled.clear();
        }
        self.settled.insert(ip, (missed.clone(), SETTLED_FOR));
    }

    /// A check has come or gone.
    pub(super) fn unsettle(&mut self) {
        self.settled.clear();
    }

    /// A thread was met in the function that begins at `start`, and it is left to callers: how
    /// often that was, and which checks they have.
    pub(super) fn meet(&mut self, start: u64) -> (u32, &[u64]) {
        let known = self.callers.entry(start).or_default();
        known.met = known.met.saturating_add(1);
        (known.met, &known.hinted)
    }

    pub(super) fn hinted(&mut self, start: u64, place: u64) {
        let hinted = &mut self.callers.entry(start).or_default().hinted;
        if !hinted.contains(&place) {
            hinted.push(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// jmp over a nop; nop; ret: that the first nop is code, only a thread there tells.
    const BYTES: [u8; 5] = [0xeb, 0x01, 0x90, 0x90, 0xc3];

    fn remembered(functions: &mut Functions, bytes: &[u8], sample: Option<u64>) -> String {
        format!("{:?}", functions.decoded(bytes, 0x1000, sample).unwrap())
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
        let inside = functions.decoded(&BYTES, 0x1000, Some(0x1001));
        assert!(matches!(inside, Err(Refused::SampleInside(0x1001))), "{inside:?}");
    }

    #[test]
    fn not_all_are_remembered() {
        let mut functions = Functions::default();
        for start in 0..1000 {
            functions.decoded(&BYTES, 0x1000 * (start + 1), None).unwrap();
            assert!(functions.decoded.len() <= DECODED_MAX);
        }
    }

    /// Goal: what has been found out is not asked at each miss, but again now and then, and at once
    /// when a check has come or gone; what is of the process and not of the code is asked always.
    #[test]
    fn what_is_settled_is_so_for_a_while() {
        let mut functions = Functions::default();
        functions.settle(0x1000, &Missed::Gone);
        assert!(functions.settled(0x1000).is_none());
        functions.settle(0x1000, &Missed::NoPlace);
        let asked = (0..100).take_while(|_| functions.settled(0x1000).is_some()).count();
        assert_eq!(asked, SETTLED_FOR as usize);
        assert!(functions.settled(0x1001).is_none());
        functions.settle(0x1000, &Missed::TooDense);
        functions.unsettle();
        assert!(functions.settled(0x1000).is_none());
        for ip in 0..20_000 {
            functions.settle(ip, &Missed::NoPlace);
            assert!(functions.settled.len() <= SETTLED_MAX);
        }
    }
}
