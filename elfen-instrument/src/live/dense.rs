//! Checks that run too often: they are taken out, put back where no other check is possible, or
//! thinned out by rounds of their loop.

use std::ops::Range;

use elfen_rewrite::{Function, PatchSite, Permitted};

use super::arena::Pages;
use super::change::{Change, Write};
use super::patched::{KnownSite, NEAR_BYTES, Patched, SiteWithRounds, State};
use crate::remote::mappings;

/// How many checks around an address may have run too often before no further one is tried there.
/// The first limit holds where one of them can be put back, the second where none can.
const DENSE_ENOUGH: usize = 3;
const DENSE_MAX: usize = 8;
/// How often a check is put back before it stays out.
const PUT_BACK_MAX: u8 = 3;
/// The longest trampoline with rounds.
const ROUNDS_BYTES: u64 = 4096;

impl Patched {
    /// Takes out the check of a site, because it runs too often.
    pub fn drop_dense(&mut self, site: u64) -> Option<Change> {
        let known = self.sites.get_mut(&site).filter(|known| known.is_on())?;
        known.state = State::TooDense;
        self.functions.forget_misses();
        let (expected, bytes) = (Some(known.jump.clone()), known.original.clone());
        Some(self.change_of(site, vec![Write { at: site, expected, bytes }]))
    }

    /// Records that a check could not be taken out in time, so it is still on.
    pub fn was_not_dropped(&mut self, site: u64) {
        if let Some(known) = self.sites.get_mut(&site) {
            known.state = if known.put_back == 0 { State::On } else { State::PutBack };
        }
    }

    /// Puts back the check around `ip` that ran least often of those taken out. `None` if such a
    /// check is back already and runs: a second one on the same round would run equally often.
    pub(super) fn put_back(&mut self, range: &Range<u64>, ip: u64) -> Option<Change> {
        let bytes = self.original_code(range).ok()?;
        let function = self.functions.decode(&bytes, range.start, None).ok()?;
        let sites_around = self.sites_around(&function, ip);
        if sites_around.iter().any(|(_, known)| known.state == State::PutBack && known.per_ms > 0) {
            return None;
        }
        let found = sites_around.into_iter().filter(|(_, known)| self.may_be_put_back(known));
        let (at, _) = found.min_by_key(|(at, known)| (known.per_ms, at.abs_diff(ip)))?;
        let known = self.sites.get_mut(&at)?;
        known.state = State::PutBack;
        known.put_back += 1;
        let (expected, bytes) = (Some(known.original.clone()), known.jump.clone());
        let inside = known.is_several.then_some(at + 1..at + bytes.len() as u64);
        let writes = vec![Write { at, expected, bytes }];
        Some(Change { inside, ..self.change_of(at, writes) })
    }

    /// Whether further checks around `ip` would probably run too often too, or enough were tried.
    /// `is_loop` says that the check of a loop around `ip` ran too often. Then one check that can
    /// be put back is enough: the cases of an interpreter loop each run less often than the loop.
    pub(super) fn is_dense_around(&self, function: &Function, ip: u64, is_loop: bool) -> bool {
        let sites_around = self.sites_around(function, ip);
        let dense = sites_around.iter().filter(|(_, known)| known.is_dense());
        let dense: Vec<bool> = dense.map(|(_, known)| self.may_be_put_back(known)).collect();
        let enough = if is_loop { 1 } else { DENSE_ENOUGH };
        dense.len() >= DENSE_MAX || dense.len() >= enough && dense.contains(&true)
    }

    fn may_be_put_back(&self, known: &KnownSite) -> bool {
        known.is_dense() && known.per_ms <= self.dense_per_ms && known.put_back < PUT_BACK_MAX
    }

    /// The sites close to an address, and in loops around it.
    fn sites_around(&self, function: &Function, ip: u64) -> Vec<(u64, &KnownSite)> {
        let loops = function.loops_around(ip);
        let is_around = |at: u64| {
            at.abs_diff(ip) <= NEAR_BYTES || loops.iter().any(|around| around.contains(at))
        };
        let sites = self.sites.range(function.range()).map(|(&at, known)| (at, known));
        sites.filter(|&(at, _)| is_around(at)).collect()
    }

    /// Adds up to `rounds` rounds of its loop after the check of a site. `None` if it has rounds
    /// already, or cannot have them.
    pub fn thin_out(&mut self, site: u64, rounds: usize, pages: &Pages) -> Option<Change> {
        let known = self.sites.get(&site)?;
        let can_have_rounds =
            known.state == State::On && !known.has_rounds && known.compiled.is_none();
        let known = can_have_rounds.then(|| known.clone())?;
        let mapped = mappings(self.process).ok()?;
        let (range, compiled) = self.function_around(&mapped, site).ok()?;
        let bytes = self.original_code(&range).ok()?;
        let function = self.functions.decode(&bytes, range.start, Some(site)).ok()?;
        let permitted = self.permissions(compiled.as_ref()).ok()?;
        // Several instructions are fine here: the site was found safe when it was written.
        let same = Permitted { several: true, ..permitted };
        let is_same = |found: &PatchSite| found.at == site && found.bytes == known.jump.len();
        let found = function.sites(&same).find(is_same)?;
        let (index, room) = self.find_room(self.process, site, ROUNDS_BYTES, pages).ok()?;
        let most = usize::try_from(ROUNDS_BYTES).ok()?;
        let (at, hooks) = (room.at, &room.hooks);
        let trampoline =
            function.trampoline_of_rounds(&found, rounds, most, &permitted, at, hooks)?;
        let jump = found.jump(at)?;
        let used = self.arenas.get_mut(index)?;
        let count = (index, used.checks.len());
        used.checks.push(site);
        let header = used.arena.header(at + trampoline.bytes.len() as u64).to_vec();
        let ours = |at, bytes| Write { at, expected: None, bytes };
        let writes = vec![
            ours(at, trampoline.bytes),
            ours(used.arena.code, header),
            Write { at: site, expected: Some(known.jump.clone()), bytes: jump.bytes.clone() },
        ];
        let with_rounds = KnownSite { jump: jump.bytes, has_rounds: true, ..known };
        self.pending_rounds = Some(SiteWithRounds { at: site, site: with_rounds, count });
        Some(self.change_of(site, writes))
    }

    /// Records whether the rounds of a site were written. If they were not, its plain check stays.
    pub fn was_thinned(&mut self, is_written: bool) {
        let Some(SiteWithRounds { at, site, count }) = self.pending_rounds.take() else { return };
        if is_written {
            self.sites.insert(at, site);
        }
        // One of the two checks of the site is unused from now on, so its count no longer belongs
        // to a site.
        for (arena, used) in self.arenas.iter_mut().enumerate() {
            for (index, check) in used.checks.iter_mut().enumerate() {
                if *check == at && ((arena, index) == count) != is_written {
                    *check = 0;
                }
            }
        }
    }
}

impl KnownSite {
    pub(super) fn is_on(&self) -> bool {
        matches!(self.state, State::On | State::PutBack)
    }

    /// False for Java methods: another one may have been compiled to this address since.
    fn is_dense(&self) -> bool {
        self.state == State::TooDense && self.compiled.is_none()
    }
}
