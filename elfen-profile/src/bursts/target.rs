//! One process in which bursts run: the memory that it shares with the host, and what the host has
//! changed in it.

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::path::Path;

use elfen_instrument::process::{ProgramId, status_field, status_mask};
use elfen_instrument::remote::{Group, Mapping, Memory, TouchError, descriptor, mappings};
use elfen_instrument::symbols::address_of_symbol;
use elfen_machine::mapped;
use elfen_stream::{Cache, Cluster, CodeMemory, Stop, layout};

use super::inside::{Header, Inside};
use super::refusal::Refusal;
use super::removal::{self, ACTION_BYTES, ACTION_WORDS, FAULTS, Found, List, Patch};
use super::sites;
use crate::engine::near::{MARGIN, free_near};
use crate::engine::objects::Objects;
use crate::engine::region::{
    CLUSTER_BYTES, CLUSTER_POINTS_BYTES, CONTEXTS_AT, CONTEXTS_BYTES, HEADER_AT, HEADER_BYTES,
    INSIDE_AT, INSIDE_BYTES, POINTS_AT, POINTS_BYTES, Region,
};
use crate::engine::thread::seize;

/// Blocks that are translated at a time.
const NEIGHBOURHOOD: usize = 200;
const PAGE: u64 = 4096;
const POINT_BYTES: u64 = 16;
/// More points than the blocks that are translated at a time have.
const POINTS_ROOM: u64 = 1 << 15;
/// Marks a point at which `%rcx` is in the thread's words.
const RCX_SAVED: u64 = 1 << 63;
/// Where the shared memory goes for programs at low addresses: far from their heap and libraries.
const FAR: u64 = 1 << 36;
const SA_RESTORER: u64 = 0x0400_0000;
const FAULT_FLAGS: u64 = libc::SA_SIGINFO as u64 | libc::SA_ONSTACK as u64 | SA_RESTORER;
const TICK_FLAGS: u64 = FAULT_FLAGS | libc::SA_RESTART as u64;
/// What the flags of a program's handler get and lose for ours.
const FLAGS_ADDED: u64 = libc::SA_SIGINFO as u64 | SA_RESTORER;
const FLAGS_REMOVED: u64 = 0x8000_0000;
/// With [`FAULTS`], what no handler of ours blocks.
const NEVER_BLOCKED: [i32; 2] = [libc::SIGTRAP, libc::SIGSYS];
/// What a forked child gets a copy of, and a page that is zero in children.
const OWN_BYTES: u64 = 2 * PAGE;
/// From asm-generic/mman-common.h: forked children get a page of zeros.
const MADV_WIPEONFORK: u64 = 18;
/// The function of the dynamic loader that does nothing: debuggers stop there to learn of changes.
const CHANGE_FUNCTION: &str = "_dl_debug_state";
/// What the loader says of its list of libraries, and where its state is in there.
const LOADER_STATE: &str = "_r_debug";
/// `jmp *0(%rip)`, before an address.
const FAR_JUMP: [u8; 6] = [0xff, 0x25, 0, 0, 0, 0];
const FAR_JUMP_BYTES: usize = 14;
const RET: u8 = 0xc3;
/// Bytes of `nop` instructions of all lengths.
const PADDING: [u8; 10] = [0x66, 0x2e, 0x0f, 0x1f, 0x84, 0x00, 0x40, 0x44, 0x80, 0x90];
const ENDBR: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];
/// The signals that a process has handlers for.
const CAUGHT: &str = "SigCgt";
const HANDLES_URGENT: Refusal = Refusal::Unfit("it handles SIGURG itself, as Go does");
/// SIG_IGN; greater ones are handlers.
const IGNORED: u64 = libc::SIG_IGN as u64;
/// Dynamic loaders have less than a megabyte.
const LOADER_BYTES_MAX: u64 = 16 << 20;
/// How often a process is looked at again that was not at rest.
const PLANS: u32 = 5;
/// The end of a stack whose place is not known yet.
const STACK_UNKNOWN: u64 = 1;

type Call<'a> = &'a dyn Fn(&'static str, i64, [u64; 6]) -> Result<u64, TouchError>;

/// The process, from when the host has prepared it.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) process: u32,
    program: ProgramId,
    pub(super) region: Region,
    pub(super) cache: Cache,
    pub(super) objects: Objects,
    header: Header,
    list: List,
    contexts: u64,
    clusters: Vec<Cluster>,
    points: u64,
    points_used: Vec<u64>,
    /// The blocks whose points the header names.
    blocks_noted: usize,
    loader_state: Option<u64>,
    /// Pages that have no code of a file.
    refused: HashSet<u64>,
}

impl Target {
    /// Prepares a process. All its threads are stopped meanwhile. `recorded` are the inodes of the
    /// regions of other processes: a forked child has what its parent had.
    pub(super) fn attach(
        process: u32,
        needs_addresses: bool,
        recorded: &[u64],
    ) -> Result<Self, Refusal> {
        let mut tries = 0..PLANS;
        loop {
            Self::clean(process, recorded)?;
            check(process)?;
            tries.next();
            match Self::try_to_attach(process, needs_addresses) {
                Err(Refusal::Touch(TouchError::Busy)) if !tries.is_empty() => {}
                // It has just mapped something where our memory should go.
                Err(Refusal::Touch(TouchError::Call { error, .. }))
                    if error.kind() == io::ErrorKind::AddrInUse && !tries.is_empty() => {}
                made => return made,
            }
        }
    }

    /// Takes out what an earlier recording has left.
    fn clean(process: u32, recorded: &[u64]) -> Result<(), Refusal> {
        if let Some(found) = Found::of(process) {
            if recorded.contains(&found.inode) && !found.is_copy(process) {
                return Err(Refusal::Unfit("it shares its memory with a process that is recorded"));
            }
            if !recorded.contains(&found.inode) && found.is_recorded(process) {
                return Err(Refusal::Unfit("another recording watches it"));
            }
            removal::remove(process)?;
        }
        Ok(())
    }

    fn try_to_attach(process: u32, needs_addresses: bool) -> Result<Self, Refusal> {
        let plan = Plan::of(process)?;
        let mut group = seize(process)?;
        let stopped = group.stop_all(Group::keep_threads);
        if Found::of(process).is_some() {
            // Another recording was faster.
            group.release();
            return Err(TouchError::Busy.into());
        }
        let made = stopped
            .map_err(Refusal::from)
            .and_then(|thread| Self::prepare(process, plan, &group, thread, needs_addresses));
        group.release();
        if made.is_err() {
            removal::remove(process)?;
        }
        made
    }

    fn prepare(
        process: u32,
        plan: Plan,
        group: &Group,
        thread: i32,
        needs_addresses: bool,
    ) -> Result<Self, Refusal> {
        let Plan { program, memory, mut region, places, inside, loader, sites } = plan;
        if ProgramId::of(process) != Some(program) {
            return Err(Refusal::Unfit("it has just executed another program"));
        }
        let made =
            group.calls(thread, |call| map_all(&places, &mut region, process, &memory, call))??;
        let Made { mapped, contexts, table, header, points, own } = made;
        let header = Header { at: header };
        header.set_up(&region, contexts, table);
        let is_origin = own + PAGE;
        header.set_own(&region, own, is_origin);
        memory.write(is_origin, &1_u64.to_le_bytes())?;
        let code_at = header.at + HEADER_BYTES;
        let list = List {
            on_tick: code_at + inside.on_tick,
            on_fault: code_at + inside.on_fault,
            actions: own,
            is_origin,
            mapped,
            patches: Vec::new(),
        };
        // From here on, whatever fails can be undone.
        list.write(&region, header.at)?;
        region.write(code_at, &inside.code);
        region.set_word(code_at + inside.header, header.at);
        let mut cache = match needs_addresses {
            true => Cache::for_bursts_with_addresses(table, NEIGHBOURHOOD),
            false => Cache::for_bursts(table, NEIGHBOURHOOD),
        };
        for cluster in &places.clusters {
            let added = cache.add_cluster(cluster.clone(), table, &mut region);
            added.ok_or(Refusal::Unfit("its code cache is full"))?;
        }
        let mut target = Self {
            process,
            program,
            region,
            cache,
            objects: Objects::new(process, memory),
            header,
            list,
            contexts,
            points_used: vec![0; places.clusters.len()],
            clusters: places.clusters,
            points,
            blocks_noted: 0,
            loader_state: loader.as_ref().and_then(|loader| loader.state),
            refused: HashSet::new(),
        };
        target.note_points();
        target.patch(group, &inside, loader.as_ref(), &sites)?;
        target.install(group, thread, &inside)?;
        Ok(target)
    }

    /// Makes the dynamic loader count its changes, and the program keep its handlers with us.
    fn patch(
        &mut self,
        group: &Group,
        inside: &Inside,
        loader: Option<&Loader>,
        sites: &[u64],
    ) -> Result<(), Refusal> {
        let code = self.header.at + HEADER_BYTES;
        if let Some(loader) = loader {
            let mut new = FAR_JUMP.to_vec();
            new.extend((code + inside.on_change).to_le_bytes());
            self.list.patches.push(Patch { at: loader.function, old: loader.bytes.clone(), new });
        }
        let detours = sites::detours(sites, &self.clusters, code + inside.on_sigaction);
        for detour in detours.ok_or(Refusal::Unfit("its libraries lie too far apart"))? {
            self.region.write(detour.at, &detour.code);
            let (old, new) = (detour.old.to_vec(), detour.new.to_vec());
            self.list.patches.push(Patch { at: detour.site, old, new });
        }
        let is_in = |at: &u64| self.list.patches.iter().any(|patch| patch.holds(*at));
        if group.instructions().iter().any(is_in) {
            // It is about to set a handler.
            return Err(TouchError::Busy.into());
        }
        self.list.write(&self.region, self.header.at)?;
        for Patch { at, old, new } in &self.list.patches {
            if !self.objects.memory().replace(*at, old, new)? {
                return Err(Refusal::Unfit("its code has just changed"));
            }
        }
        Ok(())
    }

    /// Installs the handlers of faults and of the clocks' signal.
    fn install(&mut self, group: &Group, thread: i32, inside: &Inside) -> Result<(), Refusal> {
        let bit = |signal: i32| 1_u64 << (signal - 1);
        let blocked = !FAULTS.into_iter().chain(NEVER_BLOCKED).map(bit).sum::<u64>();
        let restore = self.header.at + HEADER_BYTES + inside.restore;
        let (at, found_at) = (self.header.scratch(), self.header.scratch() + 32);
        group.calls(thread, |call| {
            let ask = |signal: i32, act, old| {
                let number = signal.unsigned_abs().into();
                call("rt_sigaction", libc::SYS_rt_sigaction, [number, act, old, 8, 0, 0])
            };
            for signal in [libc::SIGURG].into_iter().chain(FAULTS) {
                let is_tick = signal == libc::SIGURG;
                ask(signal, 0, found_at)?;
                let found = self.words(found_at);
                let [handler, flags, restorer, _] = found;
                let is_caught = handler > IGNORED;
                let mut ours = match is_tick {
                    true => [self.list.on_tick, TICK_FLAGS, restore, blocked],
                    false => [self.list.on_fault, FAULT_FLAGS, restore, blocked],
                };
                if is_tick {
                    if is_caught {
                        return Err(HANDLES_URGENT);
                    }
                    // A blocked signal of an earlier recording may be pending. This drops it.
                    self.set_words(at, &[0; ACTION_WORDS]);
                    ask(signal, at, 0)?;
                } else if is_caught {
                    ours[1] = (flags | FLAGS_ADDED) & !FLAGS_REMOVED;
                    if flags & SA_RESTORER != 0 {
                        ours[2] = restorer;
                    }
                }
                let kept_at = self.list.actions + u64::from(signal.unsigned_abs()) * ACTION_BYTES;
                let found = found.map(u64::to_le_bytes);
                self.objects.memory().write(kept_at, found.as_flattened())?;
                self.set_words(at, &ours);
                ask(signal, at, 0)?;
            }
            Ok::<_, Refusal>(())
        })??;
        Ok(())
    }

    fn words(&self, at: u64) -> [u64; ACTION_WORDS] {
        [0, 1, 2, 3].map(|number| self.region.word(at + 8 * number))
    }

    fn set_words(&self, at: u64, words: &[u64; ACTION_WORDS]) {
        for (number, &word) in (0..).zip(words) {
            self.region.set_word(at + 8 * number, word);
        }
    }

    /// Notes that the recording is looking at the process.
    pub(super) fn beat(&self) {
        removal::beat(&self.region, self.header.at);
    }

    /// Whether the process still runs the program that was prepared.
    pub(super) fn is_there(&self) -> bool {
        ProgramId::of(self.process) == Some(self.program)
    }

    /// Where the process has a word of a slot.
    pub(super) fn word_at(&self, slot: u32, word: i32) -> u64 {
        (self.contexts + u64::from(slot) * layout::BYTES).wrapping_add_signed(word.into())
    }

    pub(super) fn word(&self, slot: u32, word: i32) -> u64 {
        self.region.word(self.word_at(slot, word))
    }

    pub(super) fn set_word(&self, slot: u32, word: i32, value: u64) {
        self.region.set_word(self.word_at(slot, word), value);
    }

    /// Prepares the words of a slot for a thread.
    pub(super) fn set_up_slot(&self, slot: u32, fs_base: u64, has_stacks: bool) {
        self.set_word(slot, layout::THREAD, fs_base);
        let limit = if has_stacks { STACK_UNKNOWN } else { 0 };
        self.set_word(slot, layout::STACK_LIMIT, limit);
        let at = |word| self.word_at(slot, word);
        self.set_word(slot, layout::FRAME_AT, at(layout::FRAME));
        self.set_word(slot, layout::STACK_AT, at(layout::STACK_END));
        let returns = self.cache.unexpected_return().unwrap_or(0);
        self.region.fill(at(layout::RETURNS), returns, layout::RETURNS_ENTRIES.unsigned_abs());
    }

    /// Names the stack that a pointer is on, for copies.
    pub(super) fn name_stack(&self, slot: u32, pointer: u64) {
        let mapped = self.objects.mappings();
        let stack = mapped.iter().find(|one| one.range.contains(&pointer) && one.writable);
        let range = stack.map_or(0..0, |one| one.range.clone());
        // The end last: with it, the range is used.
        self.set_word(slot, layout::STACK_LIMIT, STACK_UNKNOWN);
        self.set_word(slot, layout::STACK_START, range.start);
        self.set_word(slot, layout::STACK_LIMIT, range.end.max(STACK_UNKNOWN));
    }

    /// Whether an address of the program may have code, but is not translated yet.
    pub(super) fn is_new(&self, at: u64) -> bool {
        self.cache.block_at(at).is_none() && !self.has_no_code(at)
    }

    /// Whether no code of a file was found around an address.
    pub(super) fn has_no_code(&self, at: u64) -> bool {
        self.refused.contains(&(at / PAGE))
    }

    /// Translates the code at an address of the program, if there is some.
    pub(super) fn translate(&mut self, at: u64) {
        // Without points, a fault could not be moved back.
        let has_room = |used: &u64| (used + POINTS_ROOM) * POINT_BYTES <= CLUSTER_POINTS_BYTES;
        let is_full = !self.points_used.iter().all(has_room);
        if !self.is_new(at) || is_full || !self.has_no_changes() {
            return;
        }
        let images = self.objects.images().len();
        match self.cache.translate(at, &mut self.objects, &mut self.region) {
            Err(Stop::NoCode | Stop::OutOfReach) => {
                self.refused.insert(at / PAGE);
            }
            Err(Stop::Native | Stop::Full) | Ok(_) => {}
        }
        self.note_points();
        self.check_new_images(images);
    }

    /// Whether the host knows of all changes of the program's libraries.
    pub(super) fn has_no_changes(&self) -> bool {
        self.header.changes(&self.region) == self.header.changes_known(&self.region)
    }

    /// Forgets the images from a number on, if a library may have been replaced while its code was
    /// read.
    pub(super) fn check_new_images(&mut self, from: usize) {
        if self.has_no_changes() {
            return;
        }
        let new = self.objects.images().iter().skip(from);
        let new: Vec<Range<u64>> = new.map(|image| image.range.clone()).collect();
        for range in new {
            self.objects.retire(&range);
            self.cache.retire(&range, &mut self.region);
        }
    }

    /// Names the points of faults of new blocks in the header.
    fn note_points(&mut self) {
        let new: Vec<(u64, u64, bool)> = self.cache.fault_points(self.blocks_noted).collect();
        self.blocks_noted = self.cache.blocks().len();
        for (code, original, is_rcx_saved) in new {
            let holds = |cluster: &Cluster| cluster.hot.contains(&code);
            let Some(cluster) = self.clusters.iter().position(holds) else { continue };
            let used = self.points_used[cluster];
            let at = self.points + cluster as u64 * CLUSTER_POINTS_BYTES + used * POINT_BYTES;
            let flag = if is_rcx_saved { RCX_SAVED } else { 0 };
            self.region.set_word(at, code | flag);
            self.region.set_word(at + 8, original);
            self.points_used[cluster] = used + 1;
        }
        for (number, cluster) in (0..).zip(&self.clusters) {
            let at = self.points + number * CLUSTER_POINTS_BYTES;
            let used = usize::try_from(number).map_or(0, |number| self.points_used[number]);
            let words = [cluster.hot.start, cluster.cold.end, at, used];
            self.header.set_points(&self.region, number, words);
        }
        // If a part of the cache is full, its last blocks stay unknown.
        let _full = self.cache.publish(&mut self.region);
    }

    /// Takes note of libraries that the program has loaded or unloaded. Bursts begin again once the
    /// loader is done. Returns whether there are any.
    pub(super) fn follow_changes(&mut self) -> bool {
        let changes = self.header.changes(&self.region);
        if changes == self.header.changes_known(&self.region) || self.is_loading() {
            return false;
        }
        for gone in self.objects.gone() {
            self.objects.retire(&gone);
            self.cache.retire(&gone, &mut self.region);
        }
        self.refused.clear();
        self.header.set_changes_known(&self.region, changes);
        true
    }

    fn is_loading(&self) -> bool {
        let Some(at) = self.loader_state else { return false };
        self.objects.memory().read_vec(at, 4).is_ok_and(|state| state != [0; 4])
    }

    /// Takes everything of ours out of the process. No slot may be armed.
    pub(super) fn detach(self) -> Result<(), Refusal> {
        if self.is_there() { removal::remove(self.process) } else { Ok(()) }
    }
}

/// What can be found out about a process before it is stopped.
struct Plan {
    program: ProgramId,
    memory: Memory,
    region: Region,
    places: Places,
    inside: Inside,
    loader: Option<Loader>,
    sites: Vec<u64>,
}

impl Plan {
    fn of(process: u32) -> Result<Self, Refusal> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let program = ProgramId::of(process).ok_or_else(gone)?;
        let all = mappings(process)?;
        let memory = Memory::open(process)?;
        let exe = std::fs::read_link(format!("/proc/{process}/exe"))?;
        let places = Places::find(&all, &exe)?;
        let loader = Loader::find(process, &all, &memory)?;
        let sites = sites::find(process, &all, &exe, &memory)?.ok_or(Refusal::NoLibrary)?;
        let (region, inside) = (Region::new()?, Inside::new());
        Ok(Self { program, memory, region, places, inside, loader, sites })
    }
}

/// Whether bursts can run in a process at all.
fn check(process: u32) -> Result<(), Refusal> {
    let status = |process: u32, name: &str| status_field(process, name);
    if status_mask(process, CAUGHT) & 1 << (libc::SIGURG - 1) != 0 {
        return Err(HANDLES_URGENT);
    }
    if elfen_instrument::process::is_filtered(process) {
        return Err(Refusal::Unfit("it filters its system calls (seccomp)"));
    }
    if status(process, "VmLck").is_some_and(|text| !text.starts_with("0 ")) {
        return Err(Refusal::Unfit("it locks its memory, which would grow by gigabytes"));
    }
    if status(process, "x86_Thread_features").is_some_and(|text| text.contains("shstk")) {
        return Err(Refusal::Unfit("it has a shadow stack"));
    }
    // SAFETY: takes a number.
    let has_gs = unsafe { libc::getauxval(libc::AT_HWCAP2) } & 2 != 0;
    if !has_gs {
        return Err(Refusal::Unfit("the kernel does not enable FSGSBASE; Linux 5.9 does"));
    }
    Ok(())
}

/// Where the shared memory goes.
struct Places {
    clusters: Vec<Cluster>,
    shared: u64,
}

impl Places {
    fn find(all: &[Mapping], exe: &Path) -> Result<Self, Refusal> {
        let code = || all.iter().filter(|one| one.executable && one.file.is_some());
        let own = code().find(|one| Path::new(&one.name) == exe).or_else(|| code().next());
        let own = own.ok_or(Refusal::Unfit("it has no code of a file"))?;
        let full = Refusal::Unfit("its address space is full");
        let first = free_near(all, own.range.start, CLUSTER_BYTES).ok_or(full)?;
        let mut clusters = vec![first];
        // The libraries lie together, below the stack or far from it.
        let mut far = code().filter(|one| one.range.start.abs_diff(first) > 1 << 31);
        if let Some(last) = far.next_back()
            && let Some(second) = free_near(all, last.range.start, CLUSTER_BYTES)
        {
            clusters.push(second);
        }
        let size = CONTEXTS_BYTES + POINTS_BYTES + Cache::TABLE_BYTES + 4 * MARGIN;
        let shared = if first > 2 * size { first - size } else { FAR };
        let clusters = (0..).zip(clusters).map(|(number, at)| Region::cluster(number, at).1);
        Ok(Self { clusters: clusters.collect(), shared })
    }
}

/// The mappings that were made, and where their parts are.
struct Made {
    mapped: Vec<Range<u64>>,
    contexts: u64,
    table: u64,
    header: u64,
    points: u64,
    own: u64,
}

/// Maps all parts.
fn map_all(
    places: &Places,
    region: &mut Region,
    process: u32,
    memory: &Memory,
    call: Call<'_>,
) -> Result<Made, TouchError> {
    let fd = give(region, process, memory, call)?;
    let mut mapped = Vec::new();
    let made = map_parts(places, region, fd, &mut mapped, call);
    let made = made.and_then(|parts| Ok((parts, map_own(&mut mapped, call)?)));
    call("close", libc::SYS_close, [fd, 0, 0, 0, 0, 0])?;
    if made.is_err() {
        for range in &mapped {
            let length = range.end - range.start;
            call("munmap", libc::SYS_munmap, [range.start, length, 0, 0, 0, 0])?;
        }
    }
    let ([table, contexts, header, points], own) = made?;
    Ok(Made { mapped, contexts, table, header, points, own })
}

/// Maps the memory that forked children get a copy of, and the page that is zero in them.
fn map_own(mapped: &mut Vec<Range<u64>>, call: Call<'_>) -> Result<u64, TouchError> {
    let rights = u64::from((libc::PROT_READ | libc::PROT_WRITE).unsigned_abs());
    let flags = u64::from((libc::MAP_PRIVATE | libc::MAP_ANONYMOUS).unsigned_abs());
    let at = call("mmap", libc::SYS_mmap, [0, OWN_BYTES, rights, flags, u64::MAX, 0])?;
    mapped.push(at..at + OWN_BYTES);
    call("madvise", libc::SYS_madvise, [at + PAGE, PAGE, MADV_WIPEONFORK, 0, 0, 0])?;
    Ok(at)
}

/// A core file would have all of it, with its empty pages.
fn leave_out_of_cores(at: u64, bytes: u64, call: Call<'_>) -> Result<(), TouchError> {
    let advice = u64::from(libc::MADV_DONTDUMP.unsigned_abs());
    call("madvise", libc::SYS_madvise, [at, bytes, advice, 0, 0, 0]).map(drop)
}

/// Maps the parts of the region's file, and adds them to `mapped`. Returns where table, contexts,
/// header and points are.
fn map_parts(
    places: &Places,
    region: &mut Region,
    fd: u64,
    mapped: &mut Vec<Range<u64>>,
    call: Call<'_>,
) -> Result<[u64; 4], TouchError> {
    let mut hint = places.shared;
    let read = libc::PROT_READ.unsigned_abs();
    let write = read | libc::PROT_WRITE.unsigned_abs();
    let execute = read | libc::PROT_EXEC.unsigned_abs();
    let shared = u64::from(libc::MAP_SHARED.unsigned_abs());
    let header_and_code = HEADER_BYTES + INSIDE_BYTES;
    let parts = [
        (Cache::TABLE_BYTES, 0, read),
        (CONTEXTS_BYTES, CONTEXTS_AT, write),
        (header_and_code, HEADER_AT, write),
        (POINTS_BYTES, POINTS_AT, read),
    ];
    let mut places_of = [0; 4];
    for (place, (bytes, offset, rights)) in places_of.iter_mut().zip(parts) {
        let at = call("mmap", libc::SYS_mmap, [hint, bytes, rights.into(), shared, fd, offset])?;
        mapped.push(at..at + bytes);
        leave_out_of_cores(at, bytes, call)?;
        *place = at;
        region.add_part(at, bytes, offset);
        hint = at + bytes + PAGE;
    }
    let [_, _, header, _] = places_of;
    let code = [header + HEADER_BYTES, INSIDE_BYTES, execute.into(), 0, 0, 0];
    call("mprotect", libc::SYS_mprotect, code)?;
    for (number, cluster) in (0..).zip(&places.clusters) {
        let (at, offset) = (cluster.hot.start, Region::cluster(number, 0).0);
        let arguments = [at, CLUSTER_BYTES, execute.into(), shared, fd, offset];
        let found = call("mmap", libc::SYS_mmap, arguments)?;
        mapped.push(found..found + CLUSTER_BYTES);
        leave_out_of_cores(found, CLUSTER_BYTES, call)?;
        region.add_part(found, CLUSTER_BYTES, offset);
        if found != at {
            let error = io::ErrorKind::AddrInUse.into();
            return Err(TouchError::Call { what: "mmap", error });
        }
    }
    Ok(places_of)
}

/// Gives the process the region's file, and returns the descriptor there. What that needs lies in a
/// page of its own meanwhile.
fn give(region: &Region, process: u32, memory: &Memory, call: Call<'_>) -> Result<u64, TouchError> {
    let rights = u64::from((libc::PROT_READ | libc::PROT_WRITE).unsigned_abs());
    let flags = u64::from((libc::MAP_PRIVATE | libc::MAP_ANONYMOUS).unsigned_abs());
    let at = call("mmap", libc::SYS_mmap, [0, PAGE, rights, flags, u64::MAX, 0])?;
    let fail = |what, error| TouchError::Call { what, error };
    let given = descriptor::give(process, memory, at, region.file(), call, fail);
    call("munmap", libc::SYS_munmap, [at, PAGE, 0, 0, 0, 0])?;
    given
}

/// The dynamic loader of a process.
struct Loader {
    /// The function that it calls at each change, and its bytes.
    function: u64,
    bytes: Vec<u8>,
    state: Option<u64>,
}

/// Where the kernel has mapped the dynamic loader; 0 for nowhere.
fn interpreter_at(process: u32) -> Option<u64> {
    let bytes = std::fs::read(format!("/proc/{process}/auxv")).ok()?;
    let words: Vec<u64> =
        bytes.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_ne_bytes)).collect();
    words.chunks_exact(2).find(|pair| pair[0] == libc::AT_BASE).map(|pair| pair[1])
}

impl Loader {
    /// `None` if the program has none, or one that never unloads a library.
    fn find(process: u32, all: &[Mapping], memory: &Memory) -> Result<Option<Self>, Refusal> {
        let base = interpreter_at(process).unwrap_or(0);
        let Some(first) = all.iter().find(|one| one.range.contains(&base)) else { return Ok(None) };
        if first.name.contains("musl") {
            return Ok(None);
        }
        let unknown = || Refusal::Unfit("its dynamic loader is of an unknown kind");
        let file = mapped::read(&mapped::open(process, first)?, LOADER_BYTES_MAX)?;
        let address = |name| address_of_symbol(&file, name).map(|at| base.wrapping_add(at));
        let function = address(CHANGE_FUNCTION).ok_or_else(unknown)?;
        let bytes = memory.read_vec(function, FAR_JUMP_BYTES)?;
        let body = bytes.strip_prefix(&ENDBR).unwrap_or(&bytes);
        let is_empty = body.split_first().is_some_and(|(&first, rest)| {
            first == RET && rest.iter().all(|byte| PADDING.contains(byte))
        });
        if !is_empty || !function.is_multiple_of(16) {
            return Err(unknown());
        }
        let state = address(LOADER_STATE).map(|at| at.wrapping_add(24));
        Ok(Some(Self { function, bytes, state }))
    }
}

const _: () = assert!(INSIDE_AT == HEADER_AT + HEADER_BYTES);
