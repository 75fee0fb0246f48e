//! Checks that run too often, and how they are made to run less often: by rounds of their loop
//! behind them.

use elfen_rewrite::{Permitted, Place};

use super::arena::Pages;
use super::change::{Change, Write};
use super::patched::{Patched, State, Thinned};
use crate::remote::mappings;

/// As long as a trampoline with rounds can be.
const BYTES: u64 = 4096;

impl Patched {
    /// Puts so many rounds of its loop behind a place's check. `None` if that has been done, or
    /// can't be.
    pub fn thin_out(&mut self, place: u64, rounds: usize, pages: &Pages) -> Option<Change> {
        let known = self.places.get(&place)?;
        let may = known.state == State::On && !known.has_rounds && known.compiled.is_none();
        let known = may.then(|| known.clone())?;
        let mapped = mappings(self.process).ok()?;
        let (range, compiled) = self.function_around(&mapped, place).ok()?;
        let bytes = self.as_it_was(&range).ok()?;
        let function = self.functions.decoded(&bytes, range.start, Some(place)).ok()?;
        let permitted = self.permitted(compiled.as_ref()).ok()?;
        // It has been found safe, and is written.
        let same = Permitted { several: true, ..permitted };
        let is_it = |found: &Place| found.at == place && found.bytes == known.jump.len();
        let found = function.places(&same).find(is_it)?;
        let (index, room) = self.room(self.process, place, BYTES, pages).ok()?;
        let most = usize::try_from(BYTES).ok()?;
        let (at, hooks) = (room.at, &room.hooks);
        let trampoline =
            function.trampoline_of_rounds(&found, rounds, most, &permitted, at, hooks)?;
        let jump = found.jump(at)?;
        let used = self.arenas.get_mut(index)?;
        let count = (index, used.checks.len());
        used.checks.push(place);
        let header = used.arena.header(at + trampoline.bytes.len() as u64).to_vec();
        let ours = |at, bytes| Write { at, expected: None, bytes };
        let writes = vec![
            ours(at, trampoline.bytes),
            ours(used.arena.code, header),
            Write { at: place, expected: Some(known.jump.clone()), bytes: jump.bytes.clone() },
        ];
        let mut thinned = known;
        (thinned.jump, thinned.has_rounds) = (jump.bytes, true);
        self.thinned = Some(Thinned { at: place, place: thinned, count });
        Some(self.change_of(place, writes))
    }

    /// What became of the rounds of a place. If they were not written, its check stays.
    pub fn was_thinned(&mut self, is_written: bool) {
        let Some(Thinned { at, place, count }) = self.thinned.take() else { return };
        if is_written {
            self.places.insert(at, place);
        }
        // One of two checks is nobody's from now on, and so is what it counts.
        for (arena, used) in self.arenas.iter_mut().enumerate() {
            for (index, check) in used.checks.iter_mut().enumerate() {
                if *check == at && ((arena, index) == count) != is_written {
                    *check = 0;
                }
            }
        }
    }
}
