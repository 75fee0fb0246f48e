//! One address space of the program: its code cache, and what was counted in it.

use std::collections::HashMap;
use std::io;
use std::ops::Range;

use elfen_instrument::remote::{Memory, Tracee, descriptor, find_syscall};
use elfen_stream::counts::{ComputedBranch, Counts, Observed, derive};
use elfen_stream::{BlockId, Cache, Counted, Stop, layout};

use super::near::{MARGIN, free_near};
use super::objects::{Image, Objects};
use super::region::{
    CLUSTER_BYTES, CLUSTERS_MAX, CONTEXTS_AT, CONTEXTS_BYTES, CONTEXTS_MAX, Region,
};
use super::thread::{Borrowed, borrow_thread};
use super::trace::{self, Code, Noted, Trace};
use super::trace_recorder::TraceLimits;
use crate::profile::What;

/// Blocks that are translated at a time.
const NEIGHBOURHOOD: usize = 60;
/// A target that fills this many entries of a log gets code of its own.
const PROMOTED_FROM: u32 = 4;
/// Below a thread's stack pointer, past its red zone.
const ROOM_BELOW: u64 = 512;
/// Where libraries are, and not the program itself.
const HIGH: u64 = 0x7000_0000_0000;

/// System calls that the host must know of.
const HOST_CALLS: [libc::c_long; 10] = [
    libc::SYS_rt_sigreturn,
    libc::SYS_clone,
    libc::SYS_fork,
    libc::SYS_vfork,
    libc::SYS_execve,
    libc::SYS_exit,
    libc::SYS_arch_prctl,
    libc::SYS_exit_group,
    libc::SYS_execveat,
    libc::SYS_clone3,
];
/// System calls that change mappings in a range.
pub(crate) const RANGE_CALLS: [libc::c_long; 5] = [
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_pkey_mprotect,
];

/// What the threads of an address space note.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Notes {
    Counters,
    Events,
    /// Events, and the addresses of the memory that instructions use.
    Addresses,
    /// Events, and the results of instructions.
    Results,
}

impl Notes {
    /// Events, and what a profile needs besides them.
    pub(crate) fn events_of(what: What) -> Self {
        match what {
            _ if what.needs_addresses() => Self::Addresses,
            _ if what.values => Self::Results,
            _ => Self::Events,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Space {
    pub(crate) region: Region,
    pub(crate) cache: Cache,
    pub(crate) objects: Objects,
    pub(crate) observed: Observed,
    /// The parts of counters that are in `observed` already.
    settled: HashMap<i32, u64>,
    /// Events of threads, if they are recorded instead of counters.
    pub(crate) trace: Option<Trace>,
    /// Addresses that threads have appended, and that were taken when there was no room for more.
    addresses: HashMap<u32, Vec<u64>>,
    syscall: u64,
    clusters: u64,
    table: u64,
    contexts: u64,
    /// Contexts that no thread has.
    free: Vec<u32>,
    pub(crate) threads: u32,
    /// All code in the cache lies in these ranges: that of the first images.
    covered: usize,
    code: [Range<u64>; 2],
    /// Instructions that threads executed outside the cache, and those in memory of no file.
    pub(crate) steps: u64,
    pub(crate) generated: u64,
}

impl Space {
    /// Maps the shared memory into a program that has just begun.
    pub(crate) fn begin(
        thread: Tracee,
        process: u32,
        what: What,
        limits: Option<TraceLimits>,
    ) -> io::Result<Self> {
        let counts_events = what != What::default();
        let recording = limits.map(Trace::recording);
        let notes = match (limits, counts_events) {
            (Some(_), _) => Notes::Addresses,
            (None, true) => Notes::events_of(what),
            (None, false) => Notes::Counters,
        };
        let trace = recording.or_else(|| counts_events.then(|| Trace::new(what)));
        Ok(Self { trace, ..Self::set_up(thread, process, notes)? })
    }

    /// Maps the shared memory into a process.
    pub(crate) fn set_up(thread: Tracee, process: u32, notes: Notes) -> io::Result<Self> {
        let memory = Memory::open(process)?;
        let syscall = find_syscall(process, &memory).ok_or(io::ErrorKind::Unsupported)?;
        let mut region = Region::new()?;
        let objects = Objects::new(process, memory);
        let registers = thread.registers()?;
        let mapped = objects.mappings();
        let first = mapped.iter().find(|one| one.range.contains(&registers.rip));
        let first = first.ok_or(io::ErrorKind::NotFound)?;
        let near = first.range.start;
        let at = free_near(&mapped, near, CLUSTER_BYTES).ok_or(io::ErrorKind::AddrNotAvailable)?;
        // Not next to the libraries to come, but out of their way.
        let contexts = at.saturating_sub(CONTEXTS_BYTES + MARGIN);
        let [table, contexts] = borrow_thread(thread, |borrowed| {
            let fd = give(borrowed, syscall, process, objects.memory(), &region)?;
            let read = u64::from(libc::PROT_READ.unsigned_abs());
            let write = read | u64::from(libc::PROT_WRITE.unsigned_abs());
            let table = [contexts.saturating_sub(Cache::TABLE_BYTES), Cache::TABLE_BYTES, read];
            let table = map(borrowed, syscall, table, fd, 0)?;
            let contexts = [contexts, CONTEXTS_BYTES, write];
            let contexts = map(borrowed, syscall, contexts, fd, CONTEXTS_AT)?;
            close(borrowed, syscall, fd)?;
            Ok([table, contexts])
        })?;
        region.add_part(table, Cache::TABLE_BYTES, 0);
        region.add_part(contexts, CONTEXTS_BYTES, CONTEXTS_AT);
        let mut space = Self {
            region,
            cache: match notes {
                Notes::Addresses => Cache::with_addresses(table, NEIGHBOURHOOD),
                Notes::Results => Cache::with_results(table, NEIGHBOURHOOD),
                Notes::Events => Cache::with_events(table, NEIGHBOURHOOD),
                Notes::Counters => Cache::new(table, NEIGHBOURHOOD),
            },
            objects,
            observed: Observed::default(),
            settled: HashMap::new(),
            trace: None,
            addresses: HashMap::new(),
            syscall,
            clusters: 0,
            table,
            contexts,
            free: (0..CONTEXTS_MAX).rev().collect(),
            threads: 0,
            covered: 0,
            code: [0..0, 0..0],
            steps: 0,
            generated: 0,
        };
        space.add_cluster(thread, at)?;
        Ok(space)
    }

    /// A copy for a process that `thread` of this space has just forked.
    pub(crate) fn fork(&self, thread: Tracee, process: u32) -> io::Result<Self> {
        let mut region = self.region.copy(&self.cache.used())?;
        self.cache.write_table(&mut region);
        let objects = self.objects.copy(process, Memory::open(process)?);
        self.map_again(thread, process, objects.memory(), &region, libc::MAP_FIXED)?;
        Ok(Self {
            region,
            cache: self.cache.clone(),
            objects,
            observed: Observed::default(),
            settled: HashMap::new(),
            trace: self.trace.as_ref().map(Trace::for_child),
            addresses: HashMap::new(),
            free: (0..CONTEXTS_MAX).rev().collect(),
            threads: 0,
            code: self.code.clone(),
            steps: 0,
            generated: 0,
            ..*self
        })
    }

    /// Moves to a process that `thread` of the same program has just begun: its memory is a copy of
    /// that of a process that has never had our mappings.
    pub(crate) fn move_to(&mut self, thread: Tracee, process: u32) -> io::Result<()> {
        let memory = Memory::open(process)?;
        self.map_again(thread, process, &memory, &self.region, libc::MAP_FIXED_NOREPLACE)?;
        self.objects.move_to(process, memory);
        Ok(())
    }

    /// Maps a region into a process, where this space has it.
    fn map_again(
        &self,
        thread: Tracee,
        process: u32,
        memory: &Memory,
        region: &Region,
        fixed: i32,
    ) -> io::Result<()> {
        borrow_thread(thread, |borrowed| {
            let fd = give(borrowed, self.syscall, process, memory, region)?;
            for (range, offset) in region.parts() {
                let read = libc::PROT_READ.unsigned_abs();
                let rights = match range.start {
                    at if at == self.table => read,
                    at if at == self.contexts => read | libc::PROT_WRITE.unsigned_abs(),
                    _ => read | libc::PROT_EXEC.unsigned_abs(),
                };
                let bytes = range.end - range.start;
                let flags = (libc::MAP_SHARED | fixed).unsigned_abs();
                let arguments = [range.start, bytes, rights.into(), flags.into(), fd, *offset];
                borrowed.call(self.syscall, libc::SYS_mmap, arguments)?;
                leave_out_of_cores(borrowed, self.syscall, range.start, bytes)?;
            }
            close(borrowed, self.syscall, fd)
        })
    }

    /// Adds memory for code near an address.
    pub(crate) fn add_cluster_near(&mut self, thread: Tracee, at: u64) -> io::Result<()> {
        let mapped = self.objects.mappings();
        let near = mapped.iter().find(|one| one.range.contains(&at));
        let near = near.ok_or(io::ErrorKind::NotFound)?.range.start;
        let place = free_near(&mapped, near, CLUSTER_BYTES);
        self.add_cluster(thread, place.ok_or(io::ErrorKind::StorageFull)?)
    }

    fn add_cluster(&mut self, thread: Tracee, at: u64) -> io::Result<()> {
        if self.clusters == CLUSTERS_MAX {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let (offset, cluster) = Region::cluster(self.clusters, at);
        borrow_thread(thread, |borrowed| {
            let (process, memory) = (self.objects.process(), self.objects.memory());
            let fd = give(borrowed, self.syscall, process, memory, &self.region)?;
            let rights = u64::from((libc::PROT_READ | libc::PROT_EXEC).unsigned_abs());
            let mapped = map(borrowed, self.syscall, [at, CLUSTER_BYTES, rights], fd, offset)?;
            close(borrowed, self.syscall, fd)?;
            if mapped == at { Ok(()) } else { Err(io::ErrorKind::AddrInUse.into()) }
        })?;
        self.clusters += 1;
        self.region.add_part(at, CLUSTER_BYTES, offset);
        let added = self.cache.add_cluster(cluster, self.table, &mut self.region);
        added.ok_or_else(|| io::ErrorKind::StorageFull.into())
    }

    /// The address in the cache of the block at `at`, which is translated if it was not yet.
    pub(crate) fn code(&mut self, thread: Tracee, at: u64) -> Result<u64, Stop> {
        if let Some(code) = self.cache.entry(at) {
            return Ok(code);
        }
        let mut found = self.cache.translate(at, &mut self.objects, &mut self.region);
        if found == Err(Stop::OutOfReach) {
            let mapped = self.objects.mappings();
            let near = mapped.iter().find(|one| one.range.contains(&at)).ok_or(Stop::NoCode)?;
            let is_code = near.executable && !near.writable && !near.name.is_empty();
            if !is_code {
                return Err(Stop::NoCode);
            }
            self.add_cluster_near(thread, at).map_err(|_| Stop::Full)?;
            found = self.cache.translate(at, &mut self.objects, &mut self.region);
        }
        self.cover_new_code();
        found
    }

    /// The same, without more memory for code.
    pub(crate) fn code_within(&mut self, at: u64) -> Result<u64, Stop> {
        if let Some(code) = self.cache.entry(at) {
            return Ok(code);
        }
        let found = self.cache.translate(at, &mut self.objects, &mut self.region);
        self.cover_new_code();
        found
    }

    fn cover_new_code(&mut self) {
        let images = self.objects.images().len();
        if images > self.covered {
            self.cover_code(self.covered);
            self.covered = images;
        }
    }

    /// Extends the ranges of code by new images.
    fn cover_code(&mut self, from: usize) {
        for Image { range, .. } in self.objects.images().iter().skip(from) {
            let part = &mut self.code[usize::from(range.start >= HIGH)];
            if part.is_empty() {
                *part = range.clone();
            }
            *part = part.start.min(range.start)..part.end.max(range.end);
        }
        for context in 0..CONTEXTS_MAX {
            if !self.free.contains(&context) {
                self.set_ranges(context);
            }
        }
    }

    fn set_ranges(&self, context: u32) {
        for ([first, end], range) in layout::CODE_RANGES.into_iter().zip(&self.code) {
            self.region.set_word(self.word_at(context, first), range.start);
            self.region.set_word(self.word_at(context, end), range.end);
        }
    }

    /// Address of a `syscall` instruction in the program.
    pub(crate) fn syscall(&self) -> u64 {
        self.syscall
    }

    /// Where the program has a word of a context.
    pub(crate) fn word_at(&self, context: u32, word: i32) -> u64 {
        self.base(context).wrapping_add_signed(word.into())
    }

    pub(crate) fn word(&self, context: u32, word: i32) -> u64 {
        self.region.word(self.word_at(context, word))
    }

    /// The base of `%gs` of a thread with this context.
    pub(crate) fn base(&self, context: u32) -> u64 {
        self.contexts + u64::from(context) * layout::BYTES
    }

    /// Words for one more thread. `None` if there are too many threads.
    pub(crate) fn take_context(&mut self) -> Option<u32> {
        let context = self.free.pop()?;
        self.threads += 1;
        self.region.set_word(self.word_at(context, layout::LOG_AT), log_start());
        self.region.set_word(self.word_at(context, layout::EVENTS_LEFT), trace::EVENTS);
        self.region.set_word(self.word_at(context, layout::ADDRESSES_LEFT), trace::ADDRESSES);
        for (table, calls) in
            [(layout::HOST_CALLS, &HOST_CALLS[..]), (layout::RANGE_CALLS, &RANGE_CALLS[..])]
        {
            for &call in calls {
                let Ok(call) = i32::try_from(call) else { continue };
                let at = self.word_at(context, table + call / 64 * 8);
                self.region.set_word(at, self.region.word(at) | 1 << (call % 64));
            }
        }
        let returns = self.cache.unexpected_return()?;
        let at = self.word_at(context, layout::RETURNS);
        self.region.fill(at, returns, layout::RETURNS_ENTRIES.unsigned_abs());
        self.set_ranges(context);
        Some(context)
    }

    /// The words of a thread that has ended. Its counters keep their values.
    pub(crate) fn give_context_back(&mut self, context: u32) {
        if self.trace.is_some() {
            let noted = self.take_noted(context, trace::EVENTS);
            let code = Code { cache: &self.cache, objects: &self.objects };
            if let Some(trace) = &mut self.trace {
                trace.kill(context, noted, code);
            }
        }
        self.drain_log(context);
        self.threads = self.threads.saturating_sub(1);
        self.free.push(context);
    }

    /// Counts what the log of a context holds, and empties it.
    pub(crate) fn drain_log(&mut self, context: u32) {
        let end = self.word(context, layout::LOG_AT);
        let entries =
            end.saturating_sub(log_start()) / u64::from(layout::LOG_ENTRY_BYTES.unsigned_abs());
        let mut found: HashMap<(u64, u64), u32> = HashMap::new();
        let mut at = self.word_at(context, layout::LOG);
        for _ in 0..entries.min(u64::from(layout::LOG_ENTRIES.unsigned_abs())) {
            let entry = (self.region.word(at), self.region.word(at + 8));
            *found.entry(entry).or_default() += 1;
            at += u64::from(layout::LOG_ENTRY_BYTES.unsigned_abs());
        }
        self.region.set_word(self.word_at(context, layout::LOG_AT), log_start());
        for ((site, target), count) in found {
            self.count_computed(site, target, count.into());
            if count >= PROMOTED_FROM {
                self.cache.promote(site, target, &mut self.region);
            }
        }
    }

    /// The events of a thread since it entered the cache, of which there could be `given`.
    fn take_events(&self, context: u32, given: u64) -> Vec<u64> {
        let left = self.word(context, layout::EVENTS_LEFT).min(given);
        let first = self.word_at(context, layout::EVENTS) + 8 * (left + 1);
        let count = usize::try_from(given - left).unwrap_or(0);
        let mut events = self.region.words(first, count);
        events.reverse();
        self.give_events(context, given);
        events
    }

    /// Sets how many events a thread may have.
    pub(crate) fn give_events(&self, context: u32, given: u64) {
        let given = given.min(trace::EVENTS);
        self.region.set_word(self.word_at(context, layout::EVENTS_LEFT), given);
    }

    /// Makes each system call of a thread stop at a trap.
    pub(crate) fn stop_at_calls(&self, context: u32) {
        let words = layout::CALLS.unsigned_abs() / 64;
        self.region.fill(self.word_at(context, layout::HOST_CALLS), u64::MAX, words);
    }

    /// Takes the addresses that a thread has appended, so that there is room for more.
    pub(crate) fn take_addresses(&mut self, context: u32) {
        let left = self.word(context, layout::ADDRESSES_LEFT).min(trace::ADDRESSES);
        let first = self.word_at(context, layout::ADDRESSES) + 8 * (left + 1);
        let count = usize::try_from(trace::ADDRESSES - left).unwrap_or(0);
        let addresses = self.region.words(first, count);
        self.addresses.entry(context).or_default().extend(addresses.iter().rev());
        self.region.set_word(self.word_at(context, layout::ADDRESSES_LEFT), trace::ADDRESSES);
    }

    /// What a thread has noted since it entered the cache, with `given` events at most.
    pub(crate) fn take_noted(&mut self, context: u32, given: u64) -> Noted {
        self.take_addresses(context);
        let addresses = self.addresses.remove(&context).unwrap_or_default();
        Noted { events: self.take_events(context, given), addresses }
    }

    /// Notes that a thread enters the cache. `counts` says whether no edge of the cache has led
    /// there.
    pub(crate) fn note_entry(
        &mut self,
        context: u32,
        registers: &libc::user_regs_struct,
        counts: bool,
    ) {
        if let Some(trace) = &mut self.trace {
            trace.enter(context, registers, &mut self.objects);
        } else if counts && let Some(block) = self.cache.block_at(registers.rip) {
            *self.observed.entries.entry(block).or_default() += 1;
        }
    }

    /// Notes that a thread has left the cache, inside a block or at its end.
    pub(crate) fn note_left(&mut self, context: u32, block: BlockId, at: u64) {
        if self.trace.is_some() {
            self.note_left_at(context, at);
        } else {
            *self.observed.left.entry(block).or_default().entry(at).or_default() += 1;
        }
    }

    /// Notes that a thread has left the cache by a computed branch.
    pub(crate) fn note_computed(&mut self, context: u32, site: u64, target: u64) {
        if self.trace.is_some() {
            self.note_left_at(context, target);
        } else {
            self.count_computed(site, target, 1);
        }
    }

    /// Notes that a thread has left the cache by an edge, which was counted.
    pub(crate) fn note_left_at(&mut self, context: u32, at: u64) {
        if self.trace.is_some() {
            let noted = self.take_noted(context, trace::EVENTS);
            let code = Code { cache: &self.cache, objects: &self.objects };
            if let Some(trace) = &mut self.trace {
                trace.leave(context, at, noted, code);
            }
        }
    }

    fn count_computed(&mut self, site: u64, target: u64, count: u64) {
        if Cache::is_return(site) {
            *self.observed.returned.entry(target).or_default() += count;
        } else if let Some(from) = self.cache.block_of_site(site) {
            let block = self.cache.block_at(target);
            let branch = ComputedBranch { from, to: target, block };
            *self.observed.computed.entry(branch).or_default() += count;
        }
    }

    /// Removes code whose mapping has changed.
    pub(crate) fn retire(&mut self, range: &Range<u64>) {
        let gone = self.objects.retire(range);
        if gone.is_empty() {
            return;
        }
        // What was counted so far led to this code; from now on the addresses are of other code.
        self.drain_logs();
        let counters = self.cache.counters().to_vec();
        for (number, counted) in (0..).zip(counters) {
            let Counted::Computed { block: from, target: to } = counted else { continue };
            if gone.iter().any(|range| range.contains(&to)) {
                let count = self.counter(number) - self.settled.get(&number).unwrap_or(&0);
                *self.settled.entry(number).or_default() += count;
                let branch = ComputedBranch { from, to, block: self.cache.block_at(to) };
                *self.observed.computed.entry(branch).or_default() += count;
            }
        }
        for gone in gone {
            self.cache.retire(&gone, &mut self.region);
        }
    }

    fn drain_logs(&mut self) {
        for context in self.used_contexts() {
            self.drain_log(context);
        }
    }

    /// The contexts that a thread has or had.
    fn used_contexts(&self) -> Vec<u32> {
        (0..CONTEXTS_MAX).filter(|&one| self.word(one, layout::LOG_AT) != 0).collect()
    }

    /// The value of a counter in all contexts.
    fn counter(&self, number: i32) -> u64 {
        let at = layout::COUNTERS + number * layout::COUNTER_BYTES;
        self.used_contexts().into_iter().map(|context| self.word(context, at)).sum()
    }

    /// All counts, once no thread runs in this space.
    pub(crate) fn counts(&mut self) -> Counts {
        self.drain_logs();
        let mut sums = vec![0; self.cache.counters().len()];
        for context in self.used_contexts() {
            for (number, sum) in (0..).zip(&mut sums) {
                let at = layout::COUNTERS + number * layout::COUNTER_BYTES;
                *sum += self.word(context, at);
            }
        }
        for (&number, &settled) in &self.settled {
            let sum = usize::try_from(number).ok().and_then(|number| sums.get_mut(number));
            if let Some(sum) = sum {
                *sum -= settled;
            }
        }
        self.observed.counters = sums;
        derive(&self.cache, &self.observed)
    }
}

fn log_start() -> u64 {
    u64::from(layout::LOG.unsigned_abs())
}

/// Gives the process the region's file, and returns the descriptor there.
fn give(
    borrowed: &Borrowed,
    syscall: u64,
    process: u32,
    memory: &Memory,
    region: &Region,
) -> io::Result<u64> {
    let at = (borrowed.stack() - ROOM_BELOW) & !0xf;
    let before = memory.read_vec(at, descriptor::ROOM_BYTES);
    let call = |_, number, arguments| borrowed.call(syscall, number, arguments);
    let given = descriptor::give(process, memory, at, region.file(), call, |_, error| error);
    if let Ok(before) = before {
        memory.write(at, &before)?;
    }
    given
}

fn close(borrowed: &Borrowed, syscall: u64, fd: u64) -> io::Result<()> {
    borrowed.call(syscall, libc::SYS_close, [fd, 0, 0, 0, 0, 0]).map(drop)
}

/// Maps a part of a file at an address, or elsewhere if that is taken.
fn map(
    borrowed: &Borrowed,
    syscall: u64,
    [at, bytes, rights]: [u64; 3],
    fd: u64,
    offset: u64,
) -> io::Result<u64> {
    // A hint: without MAP_FIXED the kernel takes this address if it is free.
    let flags = u64::from(libc::MAP_SHARED.unsigned_abs());
    let at = borrowed.call(syscall, libc::SYS_mmap, [at, bytes, rights, flags, fd, offset])?;
    leave_out_of_cores(borrowed, syscall, at, bytes).map(|()| at)
}

/// A core file would have all of it, with its empty pages.
fn leave_out_of_cores(borrowed: &Borrowed, syscall: u64, at: u64, bytes: u64) -> io::Result<()> {
    let advice = u64::from(libc::MADV_DONTDUMP.unsigned_abs());
    borrowed.call(syscall, libc::SYS_madvise, [at, bytes, advice, 0, 0, 0]).map(drop)
}
