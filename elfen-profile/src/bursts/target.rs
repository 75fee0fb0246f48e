//! One process in which bursts run: the memory that it shares with the host, and what the host has
//! changed in it.

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use elfen_instrument::process::{ProgramId, status_field};
use elfen_instrument::remote::{Group, Mapping, Memory, TouchError, descriptor, mappings};
use elfen_instrument::symbols::address_of_symbol;
use elfen_stream::{Cache, Cluster, CodeMemory, Stop, layout};

use super::inside::{Header, Inside, SCRATCH};
use crate::engine::near::{MARGIN, free_near};
use crate::engine::objects::Objects;
use crate::engine::region::{
    CLUSTER_BYTES, CLUSTER_POINTS_BYTES, CONTEXTS_AT, CONTEXTS_BYTES, HEADER_AT, HEADER_BYTES,
    INSIDE_AT, INSIDE_BYTES, POINTS_AT, POINTS_BYTES, Region,
};

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
const SA_FLAGS: i32 = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK | SA_RESTORER;
const SA_RESTORER: i32 = 0x0400_0000;
/// The signals of faults, which no handler of ours blocks.
const FAULTS: [i32; 4] = [libc::SIGILL, libc::SIGBUS, libc::SIGFPE, libc::SIGSEGV];
const NEVER_BLOCKED: [i32; 2] = [libc::SIGTRAP, libc::SIGSYS];
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
const PADDING_NOP: u8 = 0x90;
const ENDBR: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];
const TRIES: u32 = 5;
/// The end of a stack whose place is not known yet.
const STACK_UNKNOWN: u64 = 1;

/// Why no bursts run in a process.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error("{0}")]
    Touch(#[from] TouchError),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Unfit(&'static str),
}

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
    inside: Inside,
    /// The mappings that were made in the process.
    mapped: Vec<Range<u64>>,
    contexts: u64,
    clusters: Vec<Cluster>,
    points: u64,
    points_used: Vec<u64>,
    /// The blocks whose points the header names.
    blocks_noted: usize,
    patched: Option<(u64, Vec<u8>)>,
    loader_state: Option<u64>,
    /// Pages that have no code of a file.
    refused: HashSet<u64>,
    /// What the process did about the signal of the clock: ignored it, or nothing.
    tick_action: u64,
}

impl Target {
    /// Prepares a process. All its threads are stopped meanwhile.
    pub(super) fn attach(process: u32, needs_addresses: bool) -> Result<Self, Refusal> {
        check(process)?;
        let plan = Plan::of(process)?;
        let mut group = Group::seize(process)?;
        let made = group
            .stop_all(Group::keep_threads)
            .map_err(Refusal::from)
            .and_then(|thread| Self::prepare(process, plan, &group, thread, needs_addresses));
        group.release();
        made
    }

    fn prepare(
        process: u32,
        plan: Plan,
        group: &Group,
        thread: i32,
        needs_addresses: bool,
    ) -> Result<Self, Refusal> {
        let Plan { program, memory, mut region, places, inside, loader } = plan;
        if ProgramId::of(process) != Some(program) {
            return Err(Refusal::Unfit("it has just executed another program"));
        }
        let (mapped, contexts, table, header, points) =
            group.calls(thread, |call| map_all(&places, &mut region, process, &memory, call))??;
        let header = Header { at: header };
        header.set_up(&region, contexts, table);
        let code_at = header.at + HEADER_BYTES;
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
            inside,
            mapped,
            contexts,
            points_used: vec![0; places.clusters.len()],
            clusters: places.clusters,
            points,
            blocks_noted: 0,
            patched: None,
            loader_state: loader.as_ref().and_then(|loader| loader.state),
            refused: HashSet::new(),
            tick_action: 0,
        };
        target.note_points();
        if let Some(loader) = loader {
            target.patch(&loader)?;
        }
        target.install(group, thread)?;
        Ok(target)
    }

    fn code_at(&self) -> u64 {
        self.header.at + HEADER_BYTES
    }

    /// Makes the dynamic loader count its changes.
    fn patch(&mut self, loader: &Loader) -> io::Result<()> {
        let mut jump = FAR_JUMP.to_vec();
        jump.extend((self.code_at() + self.inside.on_change).to_le_bytes());
        self.objects.memory().write(loader.function, &jump)?;
        self.patched = Some((loader.function, loader.bytes.clone()));
        Ok(())
    }

    /// Installs the handler of the clocks' signal.
    fn install(&mut self, group: &Group, thread: i32) -> Result<(), Refusal> {
        let bit = |signal: i32| 1_u64 << (signal - 1);
        let unblocked = FAULTS.into_iter().chain(NEVER_BLOCKED).map(bit).sum::<u64>();
        let at = self.header.scratch();
        let flags = u64::from(SA_FLAGS.unsigned_abs());
        let code = self.code_at();
        let action = [code + self.inside.on_tick, flags, code + self.inside.restore, !unblocked];
        for (number, word) in (0..).zip(action) {
            self.region.set_word(at + 8 * number, word);
        }
        let signal = u64::from(libc::SIGURG.unsigned_abs());
        let arguments = [signal, at, at + 32, 8, 0, 0];
        group.calls(thread, |call| call("rt_sigaction", libc::SYS_rt_sigaction, arguments))??;
        self.tick_action = self.region.word(at + 32);
        Ok(())
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
    pub(super) fn set_up_slot(&self, slot: u32, thread: u32, has_stacks: bool) {
        // Its last id is that in the innermost namespace.
        let ids = status_field(thread, "NSpid").unwrap_or_default();
        let own = ids.split_whitespace().next_back().and_then(|id| id.parse().ok());
        self.set_word(slot, layout::THREAD, own.unwrap_or(0));
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
        if !self.is_there() {
            return Ok(());
        }
        let mut group = Group::seize(self.process)?;
        let done = self.stop_outside(&mut group).map_err(Refusal::from).and_then(|thread| {
            if let Some((at, bytes)) = &self.patched {
                self.objects.memory().write(*at, bytes)?;
            }
            Ok(group.calls(thread, |call| self.take_out(call))??)
        });
        group.release();
        done
    }

    /// Stops all threads at places outside of our code.
    fn stop_outside(&self, group: &mut Group) -> Result<i32, TouchError> {
        for _ in 0..TRIES {
            let thread = group.stop_all(Group::keep_threads)?;
            let is_inside = |at: &u64| self.mapped.iter().any(|range| range.contains(at));
            if !group.instructions().iter().any(is_inside) {
                return Ok(thread);
            }
            group.go_on();
            std::thread::yield_now();
        }
        Err(TouchError::Busy)
    }

    fn take_out(&self, call: Call<'_>) -> Result<(), TouchError> {
        let at = self.header.scratch();
        let on_fault = self.code_at() + self.inside.on_fault;
        let action = |signal: i32, action: [u64; 4]| {
            for (number, word) in (0..).zip(action) {
                self.region.set_word(at + 8 * number, word);
            }
            let arguments = [signal.unsigned_abs().into(), at, 0, 8, 0, 0];
            call("rt_sigaction", libc::SYS_rt_sigaction, arguments)
        };
        action(libc::SIGURG, [self.tick_action, 0, 0, 0])?;
        for signal in FAULTS {
            let number = u64::from(signal.unsigned_abs());
            call("rt_sigaction", libc::SYS_rt_sigaction, [number, 0, at + 32, 8, 0, 0])?;
            if self.region.word(at + 32) == on_fault {
                action(signal, self.header.action(&self.region, number))?;
            }
        }
        for range in &self.mapped {
            let length = range.end - range.start;
            call("munmap", libc::SYS_munmap, [range.start, length, 0, 0, 0, 0])?;
        }
        Ok(())
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
        let (region, inside) = (Region::new()?, Inside::new());
        Ok(Self { program, memory, region, places, inside, loader })
    }
}

/// Whether bursts can run in a process at all.
fn check(process: u32) -> Result<(), Refusal> {
    let status = |process: u32, name: &str| status_field(process, name);
    let caught = status(process, "SigCgt").and_then(|text| u64::from_str_radix(&text, 16).ok());
    if caught.unwrap_or(0) & 1 << (libc::SIGURG - 1) != 0 {
        return Err(Refusal::Unfit("it handles SIGURG itself, as Go does"));
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
        // The libraries lie together, below the stack; more come below them.
        if let Some(last) = code().next_back()
            && last.range.start.abs_diff(first) > 1 << 31
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

type Made = (Vec<Range<u64>>, u64, u64, u64, u64);

/// Maps all parts. Returns the mappings, and where contexts, table, header and points are.
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
    call("close", libc::SYS_close, [fd, 0, 0, 0, 0, 0])?;
    if made.is_err() {
        for range in &mapped {
            let length = range.end - range.start;
            call("munmap", libc::SYS_munmap, [range.start, length, 0, 0, 0, 0])?;
        }
    }
    let [table, contexts, header, points] = made?;
    Ok((mapped, contexts, table, header, points))
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

/// Whether a function jumps to code of ours.
fn is_ours(function: &[u8], all: &[Mapping]) -> bool {
    let Some(to) = function.strip_prefix(&FAR_JUMP).and_then(|to| to.try_into().ok()) else {
        return false;
    };
    let to = u64::from_le_bytes(to);
    let name = |one: &Mapping| one.name.starts_with("/memfd:elfen-profile");
    all.iter().any(|one| one.range.contains(&to) && name(one))
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
        // As the process sees it, which may be in a container.
        let file = PathBuf::from(format!("/proc/{process}/root{}", first.name));
        let function = base + address_of_symbol(&file, CHANGE_FUNCTION).ok_or_else(unknown)?;
        let mut bytes = memory.read_vec(function, FAR_JUMP_BYTES)?;
        if is_ours(&bytes, all) {
            // The process is a copy of one that was prepared, or its recording was killed.
            bytes.fill(PADDING_NOP);
            bytes[0] = RET;
        }
        let body = bytes.strip_prefix(&ENDBR).unwrap_or(&bytes);
        let is_empty = body.split_first().is_some_and(|(&first, rest)| {
            first == RET && rest.iter().all(|byte| PADDING.contains(byte))
        });
        if !is_empty || !function.is_multiple_of(16) {
            return Err(unknown());
        }
        let state = address_of_symbol(&file, LOADER_STATE);
        Ok(Some(Self { function, bytes, state: state.map(|at| base + at + 24) }))
    }
}

const _: () = assert!(SCRATCH + 64 <= HEADER_BYTES && INSIDE_AT == HEADER_AT + HEADER_BYTES);
