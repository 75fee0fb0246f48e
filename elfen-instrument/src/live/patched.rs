//! One process and its checks: chooses patch sites, and prepares the changes that write checks
//! there.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use elfen_rewrite::{
    self as rewrite, Function, NOTICE_BYTES, PatchSite, Permitted, Tactic, notice,
};

use super::arena::{Arena, Pages, Room};
use super::change::{Change, Write};
use super::functions::Functions;
use super::hotspot::{CompiledMethod, HotSpot};
use super::missed::{FILTERED, Missed};
use super::notices::Notices;
use super::object::Objects;
use crate::process::{Status, is_filtered};
use crate::remote::{Mapping, Memory, mappings};

/// Where a batch thread was interrupted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoppedAt {
    pub thread: u32,
    pub ip: u64,
    pub sp: u64,
}

/// A check within this distance of a sampled address is likely to be run by the sampled thread.
pub(super) const NEAR_BYTES: u64 = 256;
/// The longest trampoline.
const TRAMPOLINE_BYTES: u64 = 192;
/// More arenas would hold over a mebibyte of code.
const ARENAS_MAX: usize = 16;

/// How many bytes of a stack are searched for callers, and how many callers are tried.
const STACK_BYTES: usize = 1024;
const CALLERS_MAX: usize = 6;
/// How many checks in callers may never have run. One more is allowed each time the number of
/// samples in a function has doubled. A return address on a stack may belong to a call that is long
/// over.
const SILENT_MAX: u32 = 4;
/// `call rel32`, and the first byte of a two-byte `call *%reg`.
const CALL: u8 = 0xe8;
const CALL_INDIRECT: u8 = 0xff;

/// A process that has checks, or is about to get its first one.
#[derive(Debug)]
pub struct Patched {
    pub(super) process: u32,
    pub(super) memory: Arc<Memory>,
    /// An address that is mapped as long as this address space exists.
    mapped_address: u64,
    pub(super) arenas: Vec<UsedArena>,
    pub(super) sites: BTreeMap<u64, KnownSite>,
    pub(super) objects: Objects,
    pub(super) machine: Machine,
    pub(super) pending_rounds: Option<SiteWithRounds>,
    pub(super) functions: Functions,
    pub(super) notices: Notices,
    pub(super) dense_per_ms: u64,
}

/// Whether the process is a Java virtual machine that describes its compiled methods.
#[derive(Clone, Debug)]
pub(super) enum Machine {
    /// No sample hit code without a file yet.
    Unknown,
    None,
    HotSpot(Box<HotSpot>),
}

/// An arena, and the addresses of its patch sites in the order of their counts.
#[derive(Clone, Debug)]
pub(super) struct UsedArena {
    pub(super) arena: Arena,
    pub(super) checks: Vec<u64>,
}

#[derive(Clone, Debug)]
pub(super) struct KnownSite {
    pub(super) original: Vec<u8>,
    pub(super) jump: Vec<u8>,
    pub(super) tactic: Tactic,
    pub(super) state: State,
    pub(super) is_several: bool,
    /// Rounds of its loop follow its check.
    pub(super) has_rounds: bool,
    /// The number of the compiled Java method that contains it.
    pub(super) compiled: Option<u32>,
    /// Runs per millisecond of the lane, at the last measurement.
    pub(super) per_ms: u64,
    /// How often it was put back after it had run too often.
    pub(super) put_back: u8,
}

/// A check that gets rounds of its loop, until it is known whether they were written.
#[derive(Debug)]
pub(super) struct SiteWithRounds {
    pub(super) at: u64,
    pub(super) site: KnownSite,
    /// Index of the arena, and of the count in that arena.
    pub(super) count: (usize, usize),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    On,
    /// It ran too often and was taken out.
    TooDense,
    /// It ran too often, but is on again, because no other check is possible.
    PutBack,
    /// The memory did not hold the expected bytes when it was to be written.
    Refused,
}

impl Patched {
    /// Opens a process that has no check yet. Where no other check is possible, a check may run too
    /// often, but at most `dense_per_ms` times per millisecond.
    pub fn open(process: u32, dense_per_ms: u64) -> Result<Self, Missed> {
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
            mapped_address: first.range.start,
            arenas: Vec::new(),
            sites: BTreeMap::new(),
            objects: Objects::default(),
            machine: Machine::Unknown,
            pending_rounds: None,
            functions: Functions::default(),
            notices: Notices::default(),
            dense_per_ms,
        })
    }

    /// The same program in a forked process, with the checks that it had at the fork. `None` if the
    /// process runs another program.
    pub fn of_fork(&self, process: u32) -> Option<Self> {
        let memory = Arc::new(Memory::open(process).ok()?);
        let arenas: Vec<UsedArena> =
            self.arenas.iter().filter(|used| used.arena.is_in(&memory)).cloned().collect();
        if arenas.is_empty() {
            return None;
        }
        let is_there = |at: u64, site: &KnownSite| {
            let found = memory.read_vec(at, site.jump.len()).ok();
            found.is_some_and(|found| found == site.jump || found == site.original)
        };
        let sites = self.sites.iter().filter(|&(&at, site)| is_there(at, site));
        let sites = sites.map(|(&at, site)| (at, site.clone())).collect();
        Some(Self {
            process,
            memory,
            mapped_address: self.mapped_address,
            arenas,
            sites,
            objects: self.objects.clone(),
            machine: self.machine.clone(),
            pending_rounds: None,
            functions: self.functions.clone(),
            notices: self.notices.clone(),
            dense_per_ms: self.dense_per_ms,
        })
    }

    /// Whether the process still runs the same program. An execve(2) replaces its address space.
    pub fn is_same_program(&self) -> bool {
        let is_there = |used: &UsedArena| used.arena.is_in(&self.memory);
        self.arenas.iter().all(is_there) && self.memory.read_vec(self.mapped_address, 1).is_ok()
    }

    /// Proposes a change that adds a check for an interrupted thread. In this order it tries:
    ///
    /// 1. the code where the thread was interrupted,
    /// 2. the code that called it, if the code itself has no site or would run its check too often,
    /// 3. a check there that was taken out because it ran too often.
    ///
    /// Where the process must report filters itself, notices are proposed before the first check.
    pub fn propose(&mut self, stopped_at: StoppedAt, pages: &Pages) -> Result<Change, Missed> {
        if self.arenas.iter().any(|used| used.arena.contains(stopped_at.ip)) {
            return Err(Missed::Ours);
        }
        if let Some(missed) = self.functions.known_miss(stopped_at.ip) {
            return Err(missed);
        }
        let mapped = mappings(self.process).map_err(|_| Missed::Gone)?;
        if let Some(notice) = self.propose_notice(stopped_at.thread, &mapped, pages)? {
            return Ok(notice);
        }
        let proposed = self.find_change(stopped_at, &mapped, pages);
        match &proposed {
            Ok(_) => self.functions.forget_misses(),
            Err(missed) => self.functions.remember_miss(stopped_at.ip, missed),
        }
        proposed
    }

    fn find_change(
        &mut self,
        stopped_at: StoppedAt,
        mapped: &[Mapping],
        pages: &Pages,
    ) -> Result<Change, Missed> {
        let missed = match self.propose_at(stopped_at.thread, stopped_at.ip, true, mapped, pages) {
            // Stubs of the virtual machine copy and compare on behalf of compiled methods.
            Err(Missed::Jit) if self.hotspot(mapped).is_some() => Missed::Jit,
            Err(missed) if missed.callers_may_help() => missed,
            decided => return decided,
        };
        let sampled = self.function_around(mapped, stopped_at.ip).map(|(range, _)| range).ok();
        let start = sampled.as_ref().map_or(stopped_at.ip, |range| range.start);
        if self.may_patch_callers(start) {
            for caller in self.callers(mapped, stopped_at.sp) {
                if let Ok(change) = self.propose_at(stopped_at.thread, caller, false, mapped, pages)
                {
                    self.functions.remember_hint(start, change.site);
                    return Ok(change);
                }
            }
        }
        sampled.and_then(|range| self.put_back(&range, stopped_at.ip)).ok_or(missed)
    }

    /// Proposes a check near `ip`. `is_sampled` says that a thread was interrupted at `ip`;
    /// otherwise `ip` is only a guess.
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
        let bytes = self.original_code(&range)?;
        let sample = is_sampled.then_some(ip);
        let function = self.functions.decode(&bytes, range.start, sample)?;
        let permitted = self.permissions(compiled.as_ref())?;
        let several = self.permit_several(&function, ip, &permitted, mapped, pages);
        let site = self.choose_site(&function, ip, &permitted, several.as_ref())?;
        let at = usize::try_from(site.at - range.start).map_err(|_| Missed::NoSite)?;
        let original = bytes.get(at..at + site.bytes).ok_or(Missed::NoSite)?.to_vec();
        let (index, room) = self.find_room(thread, site.at, TRAMPOLINE_BYTES, pages)?;
        self.insert_check(&function, &site, original, index, &room, compiled.as_ref())
    }

    /// The bounds of the function around `ip`, in an object or in compiled Java code.
    pub(super) fn function_around(
        &mut self,
        mapped: &[Mapping],
        ip: u64,
    ) -> Result<(Range<u64>, Option<CompiledMethod>), Missed> {
        match code_at(mapped, ip) {
            Ok(code) => {
                let found =
                    self.objects.function_around(self.process, &self.memory, mapped, code, ip);
                Ok((found?.range, None))
            }
            Err(Missed::Jit) => {
                let memory = self.memory.clone();
                let found =
                    self.hotspot(mapped).and_then(|hotspot| hotspot.method_around(&memory, ip));
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
            self.machine =
                found.map_or(Machine::None, |hotspot| Machine::HotSpot(Box::new(hotspot)));
        }
        match &self.machine {
            Machine::HotSpot(hotspot) => Some(hotspot),
            Machine::Unknown | Machine::None => None,
        }
    }

    /// Forgets the sites of methods that were compiled to the same addresses before. Their checks
    /// were discarded with them.
    fn forget_other_methods(&mut self, range: &Range<u64>, compiled: Option<&CompiledMethod>) {
        let Some(CompiledMethod { number, .. }) = compiled else { return };
        let others = self.sites.range(range.clone());
        let others = others.filter(|(_, site)| site.compiled != Some(*number));
        for at in others.map(|(&at, _)| at).collect::<Vec<_>>() {
            self.sites.remove(&at);
            // Their counts no longer belong to a site.
            for check in self.arenas.iter_mut().flat_map(|used| &mut used.checks) {
                if *check == at {
                    *check = 0;
                }
            }
        }
    }

    /// The code of a function without our changes.
    pub(super) fn original_code(&self, range: &Range<u64>) -> Result<Vec<u8>, Missed> {
        let length = usize::try_from(range.end - range.start).map_err(|_| Missed::NoFunction)?;
        let mut bytes = self.memory.read_vec(range.start, length).map_err(|_| Missed::Gone)?;
        self.restore_original(range.start, &mut bytes);
        Ok(bytes)
    }

    fn restore_original(&self, start: u64, bytes: &mut [u8]) {
        for (at, site) in self.sites.range(start..start + bytes.len() as u64) {
            let Ok(at) = usize::try_from(at - start) else { continue };
            if let Some(jump) = bytes.get_mut(at..at + site.jump.len())
                && jump == site.jump
            {
                jump.copy_from_slice(&site.original);
            }
        }
        self.notices.restore_original(start, bytes);
    }

    /// Chooses a site: in a loop around `ip`, from the outermost inwards, then at the function's
    /// entry. A loop whose check is on is skipped, because threads reach that check too rarely. If
    /// a loop's check ran too often, checks in the loops inside it would run more often still.
    fn choose_site(
        &self,
        function: &Function,
        ip: u64,
        permitted: &Permitted<'_>,
        several: Option<&Permitted<'_>>,
    ) -> Result<PatchSite, Missed> {
        let mut is_dense = false;
        for around in function.loops_around(ip) {
            let site = function.site_in_loop(&around, permitted);
            let site = site.or_else(|| function.site_in_loop(&around, several?));
            let Some(site) = site else { continue };
            match self.sites.get(&site.at).map(|known| known.state) {
                None => return Ok(site),
                Some(State::TooDense) => {
                    is_dense = true;
                    break;
                }
                Some(State::On | State::PutBack | State::Refused) => {}
            }
        }
        let entry = function.site_at_entry(permitted);
        let is_new = |site: &PatchSite| !self.sites.contains_key(&site.at);
        if let Some(entry) = entry.filter(is_new) {
            return Ok(entry);
        }
        // Interpreters compute where they branch to, so no site is on every round of their loop. A
        // site close to the sample is on many rounds. All sites of one round run equally often.
        let is_compiled = permitted.hotspot.is_some();
        if is_dense && is_compiled || self.is_dense_around(function, ip, is_dense) {
            return Err(Missed::TooDense);
        }
        let is_near = |site: &PatchSite| site.at.abs_diff(ip) <= NEAR_BYTES;
        let near = function.sites(permitted).filter(|site| is_near(site) && is_new(site));
        near.min_by_key(|site| site.at.abs_diff(ip)).ok_or(Missed::NoSite)
    }

    pub(super) fn permissions(
        &self,
        compiled: Option<&CompiledMethod>,
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

    /// Finds room for a check within reach of a site, in an existing arena or in a new one.
    pub(super) fn find_room(
        &mut self,
        thread: u32,
        site: u64,
        bytes: u64,
        pages: &Pages,
    ) -> Result<(usize, Room), Missed> {
        let room_in = |used: &UsedArena| {
            let near = used.arena.reaches(site);
            near.then(|| used.arena.room(&self.memory, bytes, used.checks.len()))?
        };
        let found =
            self.arenas.iter().enumerate().find_map(|(at, used)| Some((at, room_in(used)?)));
        if let Some(found) = found {
            return Ok(found);
        }
        if self.arenas.len() == ARENAS_MAX {
            return Err(Missed::Process("it has no room for more checks".to_owned()));
        }
        let target = (self.process, thread);
        let arena = Arena::map(target, &self.memory, site, pages, self.filter_word())?;
        let room = arena.room(&self.memory, bytes, 0).ok_or(Missed::Gone)?;
        self.arenas.push(UsedArena { arena, checks: Vec::new() });
        Ok((self.arenas.len() - 1, room))
    }

    fn insert_check(
        &mut self,
        function: &Function,
        site: &PatchSite,
        original: Vec<u8>,
        index: usize,
        room: &Room,
        compiled: Option<&CompiledMethod>,
    ) -> Result<Change, Missed> {
        let trampoline = function.trampoline(site, room.at, &room.hooks).ok_or(Missed::NoSite)?;
        let jump = site.jump(room.at).ok_or(Missed::NoSite)?;
        let end = room.at + trampoline.bytes.len() as u64;
        let used = self.arenas.get_mut(index).ok_or(Missed::Gone)?;
        used.checks.push(site.at);
        let header = used.arena.header(end).to_vec();
        let known = KnownSite {
            original: original.clone(),
            jump: jump.bytes.clone(),
            tactic: site.tactic,
            state: State::On,
            is_several: site.is_several(),
            has_rounds: false,
            compiled: compiled.map(|method| method.number),
            per_ms: 0,
            put_back: 0,
        };
        self.sites.insert(site.at, known);
        let ours = |at, bytes| Write { at, expected: None, bytes };
        // An empty write, which only verifies that the method is still the one that was decoded.
        let verify = compiled.map(|method| {
            let expected = Some(method.number.to_le_bytes().to_vec());
            Write { at: method.number_at, expected, bytes: Vec::new() }
        });
        let mut writes: Vec<Write> = verify.into_iter().collect();
        writes.extend([
            ours(trampoline.at, trampoline.bytes),
            ours(used.arena.code, header),
            Write { at: jump.at, expected: Some(original), bytes: jump.bytes },
        ]);
        let method = compiled.and_then(|method| match &self.machine {
            Machine::HotSpot(hotspot) => hotspot.name(&self.memory, method),
            Machine::Unknown | Machine::None => None,
        });
        let last = site.at + site.bytes as u64;
        let inside = site.is_several().then_some(site.at + 1..last);
        Ok(Change { method, inside, ..self.change_of(site.at, writes) })
    }

    pub(super) fn change_of(&self, site: u64, writes: Vec<Write>) -> Change {
        let (process, memory) = (self.process, self.memory.clone());
        Change { process, site, method: None, memory, writes, inside: None }
    }

    /// Records that the memory did not hold the expected bytes. The site is left alone from now on.
    pub fn was_refused(&mut self, site: u64) {
        if let Some(known) = self.sites.get_mut(&site) {
            known.state = State::Refused;
        }
    }

    /// Records that a site could not be written in time. It may be proposed again.
    pub fn was_late(&mut self, site: u64) {
        self.functions.forget_misses();
        let known = self.sites.get_mut(&site).filter(|known| known.state == State::PutBack);
        if let Some(known) = known {
            known.state = State::TooDense;
            return;
        }
        self.sites.remove(&site);
        for used in &mut self.arenas {
            used.checks.pop_if(|last| *last == site);
        }
    }

    /// Whether callers of the function that begins at `start` may get checks.
    pub(super) fn may_patch_callers(&mut self, start: u64) -> bool {
        let (samples, hints) = self.functions.count_sample(start);
        let may_be_silent = SILENT_MAX + samples.max(16).ilog2() - 4;
        let hints: Vec<u64> = hints.to_vec();
        let counts = self.counts();
        // Sites that were never written do not count.
        let is_silent = |site: &&u64| {
            let runs = counts.iter().any(|&(at, count)| at == **site && count > 0);
            self.sites.contains_key(*site) && !runs
        };
        let silent = u32::try_from(hints.iter().filter(is_silent).count());
        silent.is_ok_and(|silent| silent < may_be_silent)
    }

    /// Return addresses on the stack of a thread. Some may be left over from calls that have
    /// returned.
    pub(super) fn callers(&self, mapped: &[Mapping], sp: u64) -> Vec<u64> {
        let stack = self.memory.read_vec(sp, STACK_BYTES).unwrap_or_default();
        let words = stack.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
        let is_code = |address: u64| match (code_at(mapped, address), &self.machine) {
            (Ok(_), _) => true,
            (Err(Missed::Jit), Machine::HotSpot(hotspot)) => {
                hotspot.method_around(&self.memory, address).is_some()
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

    /// The next notice to write before any check; `None` if all are written.
    pub(super) fn propose_notice(
        &mut self,
        thread: u32,
        mapped: &[Mapping],
        pages: &Pages,
    ) -> Result<Option<Change>, Missed> {
        if pages.filters.is_some() {
            return Ok(None);
        }
        self.notices.search_new(&self.memory, mapped);
        let Some((index, site)) = self.notices.next(&self.memory)? else { return Ok(None) };
        let (arena, room) = self.find_room(thread, site.at, NOTICE_BYTES, pages)?;
        let word = self.filter_word().ok_or(Missed::Gone)?;
        let patches = notice(site.at, &site.original, room.at, word);
        let ([jump, code], Some(used)) = (patches.ok_or(Missed::NoSite)?, self.arenas.get(arena))
        else {
            return Err(Missed::Gone);
        };
        let header = used.arena.header(code.at + code.bytes.len() as u64).to_vec();
        let at = used.arena.code;
        self.notices.set_jump(index, &jump.bytes);
        let ours = |at, bytes| Write { at, expected: None, bytes };
        let writes = vec![
            ours(code.at, code.bytes),
            ours(at, header),
            Write { at: site.at, expected: Some(site.original), bytes: jump.bytes },
        ];
        Ok(Some(self.change_of(site.at, writes)))
    }

    /// The word that the process sets when it requests a filter: it lies in its first arena.
    pub(super) fn filter_word(&self) -> Option<u64> {
        self.arenas.first().map(|used| used.arena.filter_word)
    }

    /// Whether the process has requested a filter since it was opened.
    pub fn requested_filter(&self) -> bool {
        let word = self.filter_word().and_then(|at| self.memory.read_vec(at, 8).ok());
        word.is_some_and(|word| word.iter().any(|&byte| byte != 0))
    }
}

/// Whether code that the program generated lies in one private mapping.
fn holds_code(mapped: &[Mapping], code: &Range<u64>) -> bool {
    mapped.iter().any(|mapping| {
        let holds = mapping.range.start <= code.start && code.end <= mapping.range.end;
        holds && mapping.executable && mapping.private && mapping.file.is_none()
    })
}

/// The mapping that holds an address of the program's code.
pub(super) fn code_at(mapped: &[Mapping], ip: u64) -> Result<&Mapping, Missed> {
    let code = mapped.iter().find(|mapping| mapping.range.contains(&ip)).ok_or(Missed::Gone)?;
    let file = code.name.rsplit('/').next().unwrap_or_default();
    if code.name.starts_with('[') || file.starts_with("ld-") || file.starts_with("ld.so") {
        return Err(Missed::Loader);
    }
    if code.file.is_none() || code.writable || !code.private || !code.executable {
        return Err(Missed::Jit);
    }
    Ok(code)
}
