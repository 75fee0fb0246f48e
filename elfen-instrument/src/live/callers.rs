//! Who may have called the code that a thread was met in.

use super::missed::Missed;
use super::patched::{Machine, Patched, code_at};
use crate::remote::Mapping;

/// How much of a stack is looked at for callers, and how many of these are tried.
const STACK_BYTES: usize = 1024;
const CALLERS_MAX: usize = 6;
/// How many checks of callers may never have run, and one more whenever threads have been met in a
/// function twice as often: what lies on a stack may be of calls that are long over.
const SILENT_MAX: u32 = 4;
/// `call rel32`, and `call *%reg` where it is two bytes long.
const CALL: u8 = 0xe8;
const CALL_INDIRECT: u8 = 0xff;

impl Patched {
    /// Whether callers of the function that begins at `start` are to be given checks.
    pub(super) fn may_ask_callers(&mut self, start: u64) -> bool {
        let (met, hinted) = self.functions.meet(start);
        let may_be_silent = SILENT_MAX + met.max(16).ilog2() - 4;
        let hinted: Vec<u64> = hinted.to_vec();
        let ran = self.counts();
        // One that was not written in the end is nobody's.
        let is_silent = |place: &&u64| {
            let runs = ran.iter().any(|&(at, count)| at == **place && count > 0);
            self.places.contains_key(*place) && !runs
        };
        u32::try_from(hinted.iter().filter(is_silent).count()).is_ok_and(|one| one < may_be_silent)
    }

    /// Where the functions go back to that a thread is in, by what lies on its stack: some of it
    /// has been left there by others.
    pub(super) fn callers(&self, mapped: &[Mapping], sp: u64) -> Vec<u64> {
        let stack = self.memory.read_vec(sp, STACK_BYTES).unwrap_or_default();
        let words = stack.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
        let is_code = |address: u64| match (code_at(mapped, address), &self.machine) {
            (Ok(_), _) => true,
            (Err(Missed::Jit), Machine::HotSpot(hotspot)) => {
                hotspot.compiled(&self.memory, address).is_some()
            }
            _ => false,
        };
        let is_return = |&address: &u64| {
            let before = || self.memory.read_vec(address.checked_sub(5)?, 5).ok();
            is_code(address)
                && before().is_some_and(|bytes| bytes[0] == CALL || bytes[3] == CALL_INDIRECT)
        };
        words.filter(is_return).take(CALLERS_MAX).collect()
    }
}
