//! What is known of the functions that threads were met in.

use std::collections::HashMap;
use std::sync::Arc;

use elfen_rewrite::{Function, Refused};

/// How many are remembered decoded.
const DECODED_MAX: usize = 64;

/// Functions, by their first addresses.
#[derive(Clone, Default, Debug)]
pub(super) struct Functions {
    decoded: HashMap<u64, Decoded>,
    /// Whether something goes to the middle of them.
    pub(super) entered: HashMap<u64, bool>,
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
}
