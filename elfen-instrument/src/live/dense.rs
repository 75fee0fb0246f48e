//! Checks that run too often: they are taken out, and put back where nothing else answers.

use std::ops::Range;

use elfen_rewrite::Function;

use super::change::{Change, Write};
use super::patched::{BESIDE_BYTES, OnePlace, Patched, State};

/// How many checks beside each other may have run too often, until no further one is tried there:
/// where one can be put back, and where none can.
const ENOUGH: usize = 3;
const AT_MOST: usize = 8;
/// How often a check is put back until it is given up.
const PUT_BACK_MAX: u8 = 3;

impl Patched {
    /// Takes a place's check out again, as it runs too often.
    pub fn drop_dense(&mut self, place: u64) -> Option<Change> {
        let known = self.places.get_mut(&place).filter(|known| known.is_on())?;
        known.state = State::TooDense;
        self.functions.unsettle();
        let (expected, bytes) = (Some(known.jump.clone()), known.original.clone());
        Some(self.change_of(place, vec![Write { at: place, expected, bytes }]))
    }

    /// It was not taken out, as there was no moment for it.
    pub fn was_not_dropped(&mut self, place: u64) {
        if let Some(known) = self.places.get_mut(&place) {
            known.state = if known.put_back == 0 { State::On } else { State::PutBack };
        }
    }

    /// Of the checks that ran too often where a thread was met, the one that ran the least. A
    /// second one on the same round would run as often again.
    pub(super) fn put_back(&mut self, range: &Range<u64>, ip: u64) -> Option<Change> {
        let bytes = self.as_it_was(range).ok()?;
        let function = self.functions.decoded(&bytes, range.start, None).ok()?;
        let around = self.around(&function, ip);
        if around.iter().any(|(_, known)| known.state == State::PutBack && known.per_ms > 0) {
            return None;
        }
        let found = around.into_iter().filter(|(_, known)| self.may_be_put_back(known));
        let (at, _) = found.min_by_key(|(at, known)| (known.per_ms, at.abs_diff(ip)))?;
        let known = self.places.get_mut(&at)?;
        known.state = State::PutBack;
        known.put_back += 1;
        let (expected, bytes) = (Some(known.original.clone()), known.jump.clone());
        let inside = known.is_several.then_some(at + 1..at + bytes.len() as u64);
        let writes = vec![Write { at, expected, bytes }];
        Some(Change { inside, ..self.change_of(at, writes) })
    }

    /// Whether all that is around an address is likely to run too often, or enough is known of it;
    /// `is_loop`: of a loop around it that is known already. Of what an interpreter's loop chooses
    /// among, each runs less often than the loop.
    pub(super) fn is_dense_around(&self, function: &Function, ip: u64, is_loop: bool) -> bool {
        let around = self.around(function, ip);
        let dense = around.iter().filter(|(_, known)| known.is_dense());
        let dense: Vec<bool> = dense.map(|(_, known)| self.may_be_put_back(known)).collect();
        let enough = if is_loop { 1 } else { ENOUGH };
        dense.len() >= AT_MOST || dense.len() >= enough && dense.contains(&true)
    }

    fn may_be_put_back(&self, known: &OnePlace) -> bool {
        known.is_dense() && known.per_ms <= self.dense_per_ms && known.put_back < PUT_BACK_MAX
    }

    /// The places beside an address, and in loops around it.
    fn around(&self, function: &Function, ip: u64) -> Vec<(u64, &OnePlace)> {
        let loops = function.loops_around(ip);
        let is_around =
            |at: u64| at.abs_diff(ip) <= BESIDE_BYTES || loops.iter().any(|one| one.contains(at));
        let places = self.places.range(function.range()).map(|(&at, known)| (at, known));
        places.filter(|&(at, _)| is_around(at)).collect()
    }
}

impl OnePlace {
    pub(super) fn is_on(&self) -> bool {
        matches!(self.state, State::On | State::PutBack)
    }

    /// A compiled method may have become another one since.
    fn is_dense(&self) -> bool {
        self.state == State::TooDense && self.compiled.is_none()
    }
}
