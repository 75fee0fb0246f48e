//! One process and its checks.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use elfen_rewrite::{self as rewrite, Function, Permitted, Place, Tactic};

use super::arena::{Arena, Pages, Room};
use super::change::{Change, Write};
use super::functions::Functions;
use super::hotspot::{Compiled, HotSpot};
use super::missed::Missed;
use super::notices::Notices;
use super::object::Objects;
use super::status::{FILTERED, Status, is_filtered};
use crate::remote::{Mapping, Memory, mappings};

/// Where a batch thread was interrupted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stood {
    pub thread: u32,
    pub ip: u64,
    pub sp: u64,
}

/// How far from where threads are met a check is still likely to be run by them.
pub(super) const BESIDE_BYTES: u64 = 256;
/// As long as a trampoline can be.
const TRAMPOLINE_BYTES: u64 = 192;
/// More would be a mebibyte of code.
const ARENAS_MAX: usize = 16;

/// A process that has been touched, or is about to be.
#[derive(Debug)]
pub struct Patched {
    pub(super) process: u32,
    pub(super) memory: Arc<Memory>,
    /// An address that is mapped as long as this memory is anybody's.
    probe: u64,
    pub(super) arenas: Vec<Used>,
    pub(super) places: BTreeMap<u64, OnePlace>,
    pub(super) objects: Objects,
    pub(super) machine: Machine,
    pub(super) thinned: Option<Thinned>,
    pub(super) functions: Functions,
    pub(super) notices: Notices,
    pub(super) dense_per_ms: u64,
}

/// Whether the process is a Java virtual machine that tells of its compiled methods.
#[derive(Clone, Debug)]
pub(super) enum Machine {
    /// Nobody stood in code without a file yet.
    Unknown,
    None,
    HotSpot(Box<HotSpot>),
}

/// An arena, and the places of its checks in the order of their counts.
#[derive(Clone, Debug)]
pub(super) struct Used {
    pub(super) arena: Arena,
    pub(super) checks: Vec<u64>,
}

#[derive(Clone, Debug)]
pub(super) struct OnePlace {
    pub(super) original: Vec<u8>,
    pub(super) jump: Vec<u8>,
    pub(super) tactic: Tactic,
    pub(super) state: State,
    pub(super) is_several: bool,
    /// Behind its check are rounds of its loop.
    pub(super) has_rounds: bool,
    /// The compiled method that it is in, by its number.
    pub(super) compiled: Option<u32>,
    /// How often it ran in a millisecond of the lane, when it was last looked at.
    pub(super) per_ms: u64,
    /// How often it was put back.
    pub(super) put_back: u8,
}

/// A check that is to have rounds behind it, until that is written or not.
#[derive(Debug)]
pub(super) struct Thinned {
    pub(super) at: u64,
    pub(super) place: OnePlace,
    /// Where it counts: of which arena, and which of its counts.
    pub(super) count: (usize, usize),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    On,
    /// It ran so often that it was taken out.
    TooDense,
    /// The same, and on again, as there is no other way.
    PutBack,
    /// Other bytes were there when it was to be written.
    Refused,
}

impl Patched {
    /// A process that has no check of ours yet. A check that runs too often may do so where it is
    /// the only way, but not above `dense_per_ms`.
    pub fn meet(process: u32, dense_per_ms: u64) -> Result<Self, Missed> {
        let status = Status::of(process).ok_or(Missed::Gone)?;
        let refuse = |why: &str| Err(Missed::Process(why.to_owned()));
        if status.traced {
            return Err(Missed::Traced("a debugger or tracer has it".to_owned()));
        }
        if is_filtered(process) {
            return refuse(FILTERED);
        }
        let memory = Memory::open(process).map_err(Missed::of_io)?;
        let mapped = mappings(process).map_err(|_| Missed::Gone)?;
        let first = mapped.first().ok_or(Missed::Gone)?;
        Ok(Self {
            process,
            memory: Arc::new(memory),
            probe: first.range.start,
            arenas: Vec::new(),
            places: BTreeMap::new(),
            objects: Objects::default(),
            machine: Machine::Unknown,
            thinned: None,
            functions: Functions::default(),
            notices: Notices::default(),
            dense_per_ms,
        })
    }

    /// The same program in a process that was forked from this one, with the checks that it had
    /// then; `None` if it is another program.
    pub fn of_fork(&self, process: u32) -> Option<Self> {
        let memory = Arc::new(Memory::open(process).ok()?);
        let arenas: Vec<Used> =
            self.arenas.iter().filter(|used| used.arena.is_in(&memory)).cloned().collect();
        if arenas.is_empty() {
            return None;
        }
        let is_there = |at: u64, place: &OnePlace| {
            let found = memory.read_vec(at, place.jump.len()).ok();
            found.is_some_and(|found| found == place.jump || found == place.original)
        };
        let places = self.places.iter().filter(|&(&at, place)| is_there(at, place));
        let places = places.map(|(&at, place)| (at, place.clone())).collect();
        let (probe, objects) = (self.probe, self.objects.clone());
        let machine = self.machine.clone();
        let (thinned, functions) = (None, self.functions.clone());
        let (notices, dense_per_ms) = (self.notices.clone(), self.dense_per_ms);
        Some(Self {
            process,
            memory,
            probe,
            arenas,
            places,
            objects,
            machine,
            thinned,
            functions,
            notices,
            dense_per_ms,
        })
    }

    /// Whether it is still the program that it was: an exec leaves its memory behind.
    pub fn is_same_program(&self) -> bool {
        let is_there = |used: &Used| used.arena.is_in(&self.memory);
        self.arenas.iter().all(is_there) && self.memory.read_vec(self.probe, 1).is_ok()
    }

    /// A check for the code in which a thread was interrupted; or, where that has no room for one
    /// or would run it too often, for the code that called it; or else one there that ran too
    /// often. Before the first check come notices, where a process has to say that it filters.
    pub fn propose(&mut self, stood: Stood, pages: &Pages) -> Result<Change, Missed> {
        if self.arenas.iter().any(|used| used.arena.contains(stood.ip)) {
            return Err(Missed::Ours);
        }
        if let Some(settled) = self.functions.settled(stood.ip) {
            return Err(settled);
        }
        let mapped = mappings(self.process).map_err(|_| Missed::Gone)?;
        if let Some(notice) = self.notice(stood.thread, &mapped, pages)? {
            return Ok(notice);
        }
        let proposed = self.propose_anew(stood, &mapped, pages);
        match &proposed {
            Ok(_) => self.functions.unsettle(),
            Err(missed) => self.functions.settle(stood.ip, missed),
        }
        proposed
    }

    fn propose_anew(
        &mut self,
        stood: Stood,
        mapped: &[Mapping],
        pages: &Pages,
    ) -> Result<Change, Missed> {
        let missed = match self.propose_at(stood.thread, stood.ip, true, mapped, pages) {
            // Stubs of a Java virtual machine copy and compare for compiled methods.
            Err(Missed::Jit) if self.hotspot(mapped).is_some() => Missed::Jit,
            Err(missed) if missed.may_be_for_a_caller() => missed,
            settled => return settled,
        };
        let sampled = self.function_around(mapped, stood.ip).map(|(range, _)| range).ok();
        let asked = sampled.as_ref().map_or(stood.ip, |range| range.start);
        if self.may_ask_callers(asked) {
            for caller in self.callers(mapped, stood.sp) {
                if let Ok(change) = self.propose_at(stood.thread, caller, false, mapped, pages) {
                    self.functions.hinted(asked, change.place);
                    return Ok(change);
                }
            }
        }
        sampled.and_then(|range| self.put_back(&range, stood.ip)).ok_or(missed)
    }

    /// `is_sampled`: a thread stood at `ip`. Else it is a hint.
    fn propose_at(
        &mut self,
        thread: u32,
        ip: u64,
        is_sampled: bool,
        mapped: &[Mapping],
        pages: &Pages,
    ) -> Result<Change, Missed> {
        let (range, compiled) = self.function_around(mapped, ip)?;
        self.forget_other_methods(&range, compiled.as_ref());
        let bytes = self.as_it_was(&range)?;
        let sample = is_sampled.then_some(ip);
        let function = self.functions.decoded(&bytes, range.start, sample)?;
        let permitted = self.permitted(compiled.as_ref())?;
        let several = self.several(&function, ip, &permitted, mapped, pages);
        let place = self.choose(&function, ip, &permitted, several.as_ref())?;
        let at = usize::try_from(place.at - range.start).map_err(|_| Missed::NoPlace)?;
        let original = bytes.get(at..at + place.bytes).ok_or(Missed::NoPlace)?.to_vec();
        let (index, room) = self.room(thread, place.at, TRAMPOLINE_BYTES, pages)?;
        self.change(&function, &place, original, index, &room, compiled.as_ref())
    }

    /// First and last address of the function around `ip`: of an object's, or of a Java method's
    /// compiled code.
    pub(super) fn function_around(
        &mut self,
        mapped: &[Mapping],
        ip: u64,
    ) -> Result<(Range<u64>, Option<Compiled>), Missed> {
        match code_at(mapped, ip) {
            Ok(code) => {
                let found = self.objects.function(self.process, &self.memory, mapped, code, ip);
                Ok((found?.range, None))
            }
            Err(Missed::Jit) => {
                let memory = self.memory.clone();
                let found = self.hotspot(mapped).and_then(|hotspot| hotspot.compiled(&memory, ip));
                let found = found.filter(|found| holds_code(mapped, &found.code));
                let found = found.ok_or(Missed::Jit)?;
                Ok((found.code.clone(), Some(found)))
            }
            Err(missed) => Err(missed),
        }
    }

    fn hotspot(&mut self, mapped: &[Mapping]) -> Option<&HotSpot> {
        if let Machine::Unknown = self.machine {
            let found = HotSpot::of(&self.memory, mapped);
            self.machine = found.map_or(Machine::None, |one| Machine::HotSpot(Box::new(one)));
        }
        match &self.machine {
            Machine::HotSpot(hotspot) => Some(hotspot),
            Machine::Unknown | Machine::None => None,
        }
    }

    /// Where a method is compiled, another one may have been before, with checks that went with it.
    fn forget_other_methods(&mut self, range: &Range<u64>, compiled: Option<&Compiled>) {
        let Some(Compiled { number, .. }) = compiled else { return };
        let others = self.places.range(range.clone());
        let others = others.filter(|(_, place)| place.compiled != Some(*number));
        for at in others.map(|(&at, _)| at).collect::<Vec<_>>() {
            self.places.remove(&at);
            // Their counts are nobody's from now on.
            let checks = self.arenas.iter_mut().flat_map(|used| &mut used.checks);
            checks.filter(|check| **check == at).for_each(|check| *check = 0);
        }
    }

    /// The code of a function as it was before us.
    pub(super) fn as_it_was(&self, range: &Range<u64>) -> Result<Vec<u8>, Missed> {
        let length = usize::try_from(range.end - range.start).map_err(|_| Missed::NoFunction)?;
        let mut bytes = self.memory.read_vec(range.start, length).map_err(|_| Missed::Gone)?;
        self.take_out_jumps(range.start, &mut bytes);
        Ok(bytes)
    }

    fn take_out_jumps(&self, start: u64, bytes: &mut [u8]) {
        for (at, place) in self.places.range(start..start + bytes.len() as u64) {
            let Ok(at) = usize::try_from(at - start) else { continue };
            if let Some(jump) = bytes.get_mut(at..at + place.jump.len())
                && jump == place.jump
            {
                jump.copy_from_slice(&place.original);
            }
        }
        self.notices.take_out_jumps(start, bytes);
    }

    /// Loops around the address, the outermost first, then the function's entry. A loop whose check
    /// is on already was passed by too seldom; of one whose check ran too often, all loops that are
    /// inside run more often still.
    fn choose(
        &self,
        function: &Function,
        ip: u64,
        permitted: &Permitted<'_>,
        several: Option<&Permitted<'_>>,
    ) -> Result<Place, Missed> {
        let mut is_dense = false;
        for one in function.loops_around(ip) {
            let place = function.place_in(&one, permitted);
            let place = place.or_else(|| function.place_in(&one, several?));
            let Some(place) = place else { continue };
            match self.places.get(&place.at).map(|known| known.state) {
                None => return Ok(place),
                Some(State::TooDense) => {
                    is_dense = true;
                    break;
                }
                Some(State::On | State::PutBack | State::Refused) => {}
            }
        }
        let entry = function.place_at_entry(permitted);
        let is_new = |place: &Place| !self.places.contains_key(&place.at);
        if let Some(entry) = entry.filter(is_new) {
            return Ok(entry);
        }
        // Of code that computes where it goes, as interpreters do, no place is on every way round:
        // one beside where threads are met is on many. All of one round run alike often.
        let is_compiled = permitted.hotspot.is_some();
        if is_dense && is_compiled || self.is_dense_around(function, ip, is_dense) {
            return Err(Missed::TooDense);
        }
        let beside = |place: &Place| place.at.abs_diff(ip) <= BESIDE_BYTES;
        let near = function.places(permitted).filter(|place| beside(place) && is_new(place));
        near.min_by_key(|place| place.at.abs_diff(ip)).ok_or(Missed::NoPlace)
    }

    pub(super) fn permitted(
        &self,
        compiled: Option<&Compiled>,
    ) -> Result<Permitted<'static>, Missed> {
        let status = Status::of(self.process).ok_or(Missed::Gone)?;
        if status.filtered {
            return Err(Missed::Process(FILTERED.to_owned()));
        }
        Ok(Permitted {
            memory: !status.catches_faults,
            flags: true,
            hotspot: compiled.map(|method| rewrite::HotSpot { entry: method.entry }),
            ..Permitted::default()
        })
    }

    /// Room for a check within reach of a place: in an arena that is there, or in another.
    pub(super) fn room(
        &mut self,
        thread: u32,
        place: u64,
        bytes: u64,
        pages: &Pages,
    ) -> Result<(usize, Room), Missed> {
        let room = |used: &Used| {
            let near = used.arena.reaches(place);
            near.then(|| used.arena.room(&self.memory, bytes, used.checks.len()))?
        };
        let found = self.arenas.iter().enumerate().find_map(|(at, used)| Some((at, room(used)?)));
        if let Some(found) = found {
            return Ok(found);
        }
        if self.arenas.len() == ARENAS_MAX {
            return Err(Missed::Process("it has as many checks as there is room for".to_owned()));
        }
        let whose = (self.process, thread);
        let arena = Arena::map(whose, &self.memory, place, pages, self.said())?;
        let room = arena.room(&self.memory, bytes, 0).ok_or(Missed::Gone)?;
        self.arenas.push(Used { arena, checks: Vec::new() });
        Ok((self.arenas.len() - 1, room))
    }

    fn change(
        &mut self,
        function: &Function,
        place: &Place,
        original: Vec<u8>,
        index: usize,
        room: &Room,
        compiled: Option<&Compiled>,
    ) -> Result<Change, Missed> {
        let trampoline = function.trampoline(place, room.at, &room.hooks).ok_or(Missed::NoPlace)?;
        let jump = place.jump(room.at).ok_or(Missed::NoPlace)?;
        let end = room.at + trampoline.bytes.len() as u64;
        let used = self.arenas.get_mut(index).ok_or(Missed::Gone)?;
        used.checks.push(place.at);
        let header = used.arena.header(end).to_vec();
        let known = OnePlace {
            original: original.clone(),
            jump: jump.bytes.clone(),
            tactic: place.tactic,
            state: State::On,
            is_several: place.is_several(),
            has_rounds: false,
            compiled: compiled.map(|method| method.number),
            per_ms: 0,
            put_back: 0,
        };
        self.places.insert(place.at, known);
        let ours = |at, bytes| Write { at, expected: None, bytes };
        // It is still the method that was decoded: nothing is written here.
        let holds = compiled.map(|method| {
            let expected = Some(method.number.to_le_bytes().to_vec());
            Write { at: method.number_at, expected, bytes: Vec::new() }
        });
        let mut writes: Vec<Write> = holds.into_iter().collect();
        writes.extend([
            ours(trampoline.at, trampoline.bytes),
            ours(used.arena.code, header),
            Write { at: jump.at, expected: Some(original), bytes: jump.bytes },
        ]);
        let method = compiled.and_then(|method| match &self.machine {
            Machine::HotSpot(hotspot) => hotspot.name(&self.memory, method),
            Machine::Unknown | Machine::None => None,
        });
        let last = place.at + place.bytes as u64;
        let inside = place.is_several().then_some(place.at + 1..last);
        Ok(Change { method, inside, ..self.change_of(place.at, writes) })
    }

    pub(super) fn change_of(&self, place: u64, writes: Vec<Write>) -> Change {
        let (process, memory) = (self.process, self.memory.clone());
        Change { process, place, method: None, memory, writes, inside: None }
    }

    /// A change was refused by what the memory held: the place is left alone from now on.
    pub fn was_refused(&mut self, place: u64) {
        if let Some(known) = self.places.get_mut(&place) {
            known.state = State::Refused;
        }
    }

    /// A place was not written, as there was no moment for it: it may be proposed again.
    pub fn was_late(&mut self, place: u64) {
        self.functions.unsettle();
        let known = self.places.get_mut(&place).filter(|known| known.state == State::PutBack);
        if let Some(known) = known {
            known.state = State::TooDense;
            return;
        }
        self.places.remove(&place);
        for used in &mut self.arenas {
            used.checks.pop_if(|last| *last == place);
        }
    }
}

/// Whether code that a program made as it ran lies in one mapping of its own.
fn holds_code(mapped: &[Mapping], code: &Range<u64>) -> bool {
    let holds = |one: &Mapping| one.range.start <= code.start && code.end <= one.range.end;
    let is_own = |one: &Mapping| one.executable && one.private && one.file.is_none();
    mapped.iter().any(|one| holds(one) && is_own(one))
}

/// The mapping that holds an address of a program's code.
pub(super) fn code_at(mapped: &[Mapping], ip: u64) -> Result<&Mapping, Missed> {
    let code = mapped.iter().find(|one| one.range.contains(&ip)).ok_or(Missed::Gone)?;
    let file = code.name.rsplit('/').next().unwrap_or_default();
    if code.name.starts_with('[') || file.starts_with("ld-") || file.starts_with("ld.so") {
        return Err(Missed::Loader);
    }
    if code.file.is_none() || code.writable || !code.private || !code.executable {
        return Err(Missed::Jit);
    }
    Ok(code)
}
