//! The memory that is mapped into a process for its checks, within reach of its code.
//!
//! ```text
//! code    64 KiB, r-x, never writable     header, doorbell routine, trampolines
//! counts  4 KiB                           runs of each check; whether a filter was requested
//! lanes   the run's lane page             doorbell, probe, answers of the probe
//! tasks   the task map, read-only         whether the request lane is busy
//! filters one word per CPU, read-only     whether the thread on that CPU filters its system calls
//! ```
//!
//! A run with several lanes has one block of counts for each CPU. A block begins with the distances
//! to the words of its lane: see [`elfen_rewrite::CpuWords`]. Blocks of CPUs outside the run are
//! zero.
//!
//! A forked process inherits all of it. Therefore the header in the arena, and not this process,
//! records how much of the code is used. Two processes that share their memory also share an arena.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use elfen_rewrite::{BLOCK_BYTES, CpuWords, Doorbell, Hooks, LaneDoorbell, Patch, Words};

use super::missed::{FILTERED, Missed};
use crate::process::Status;
use crate::remote::{Mapping, Memory, Seized, TouchError, mappings};

const PARTS: usize = 5;
const CODE_BYTES: u64 = 1 << 16;
const COUNTS_BYTES: u64 = 4096;
const PAGE: u64 = 4096;
/// Jumps and operands reach 2 GiB. This limit leaves room for the object and the arena themselves.
const REACH: u64 = (1 << 31) - (1 << 28);
/// Distance to neighbouring mappings, so that neither grows into the other.
const MARGIN: u64 = 1 << 20;
/// Below this address nothing is mapped by default (vm.mmap_min_addr).
const LOWEST: u64 = 1 << 20;
/// Magic number, arena number, and the end of the used code.
const HEADER_BYTES: u64 = 32;
/// Bytes of distances at the start of the block of a CPU.
const DISTANCES_BYTES: u64 = 16;
const MAGIC: u64 = u64::from_le_bytes(*b"ELFARENA");
const CODE_ALIGNED: u64 = 16;

/// The pages of a run that checks read, and where their words lie in these pages.
#[derive(Clone, Debug)]
pub struct Pages {
    /// The lane page: the id of its segment, and its length.
    pub lanes_segment: i32,
    pub lanes_bytes: u64,
    /// The task map: a descriptor of this process that the batch inherits, and its length.
    pub tasks_fd: RawFd,
    pub tasks_bytes: u64,
    /// The filter map, which shows on which CPUs threads filter their system calls, and its length.
    /// `None` if the kernel has none; each process then reports filters itself
    /// ([`super::notices`]).
    pub filters: Option<(RawFd, u64)>,
    /// The lanes that a thread of the batch may run on; at least one.
    pub lanes: Vec<LaneAt>,
    /// One more than the highest possible CPU number.
    pub cpus: u64,
    /// Offsets of the words of checks in the slot of a lane.
    pub doorbell_at: u64,
    pub probe_at: u64,
    pub answer_tsc_at: u64,
    pub answer_place_at: u64,
}

/// One lane: its batch CPU, and two offsets: its slot in the lane page, and its request lane's word
/// in the task map.
#[derive(Clone, Copy, Debug)]
pub struct LaneAt {
    pub cpu: u32,
    pub lane_at: u64,
    pub task_at: u64,
}

impl Pages {
    fn sizes(&self) -> [u64; PARTS] {
        let whole = |bytes: u64| bytes.next_multiple_of(PAGE);
        let counts = if self.lanes.len() == 1 { COUNTS_BYTES } else { self.cpus * BLOCK_BYTES };
        let filters_bytes = self.filters.map_or(0, |(_, bytes)| bytes);
        let maps = [self.tasks_bytes, filters_bytes].map(whole);
        [CODE_BYTES, counts, whole(self.lanes_bytes), maps[0], maps[1]]
    }
}

/// One arena of a process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Arena {
    pub(super) code: u64,
    counts: u64,
    lanes: Lanes,
    ring: u64,
    /// The word that the process sets when it requests a system call filter. All arenas of a
    /// process share one such word.
    pub(super) filter_word: u64,
    /// Identifies the arena: it is in its header, and in no other arena of this run.
    number: u64,
}

/// Where checks find the two words that they test: the task of the request lane, and the probe.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Lanes {
    One([u64; 2]),
    /// The words are in the block of the CPU that the thread runs on.
    Several {
        cpu_at: i32,
        cpus: Vec<u32>,
    },
}

/// Free space in an arena for one more check.
pub(super) struct Room {
    pub(super) at: u64,
    pub(super) hooks: Hooks,
}

/// Shown in /proc/PID/maps as `[anon:elfen-checks]`.
const NAME: &[u8] = b"elfen-checks\0";
/// From linux/prctl.h.
const PR_SET_VMA: u64 = 0x5356_4d41;
const PR_SET_VMA_ANON_NAME: u64 = 0;

impl Arena {
    /// Maps an arena into a process, near an address of its code. `filter_word` is the word of the
    /// process's first arena.
    pub(super) fn map(
        (process, thread): (u32, u32),
        memory: &Memory,
        near: u64,
        pages: &Pages,
        filter_word: Option<u64>,
    ) -> Result<Self, Missed> {
        let sizes = pages.sizes();
        let bytes = sizes.iter().sum();
        let seized = Seized::attach(process, thread)?;
        // The thread is stopped from here on. It cannot install a filter before it makes our calls.
        if Status::is_filtered(thread) {
            return Err(Missed::Process(FILTERED.to_owned()));
        }
        // The other threads still run, and may map memory at the same address.
        let mapped = mappings(process).map_err(|_| Missed::Gone)?;
        if !mapped.iter().any(|mapping| mapping.range.contains(&near)) {
            // The process executed another program meanwhile.
            return Err(Missed::Gone);
        }
        let code = find_gap(&mapped, near, bytes).ok_or_else(|| {
            Missed::Process("there is no free address range near its code".to_owned())
        })?;
        let counts = code + sizes[0];
        let lanes = counts + sizes[1];
        let tasks = lanes + sizes[2];
        let filters = tasks + sizes[3];
        let in_counts = if pages.lanes.len() == 1 { 0 } else { DISTANCES_BYTES };
        let filter_word = filter_word.unwrap_or(counts + in_counts);
        let parts = Parts { lanes, tasks, filters, filter_word };
        let lanes_of_process = match pages.lanes.as_slice() {
            [lane] => Lanes::One([tasks + lane.task_at, lanes + lane.lane_at + pages.probe_at]),
            several => {
                let cpu_at = seized.cpu_at().ok_or_else(|| {
                    let why = "its threads do not let the kernel store their CPU (no rseq)";
                    Missed::Process(why.to_owned())
                })?;
                Lanes::Several { cpu_at, cpus: several.iter().map(|lane| lane.cpu).collect() }
            }
        };
        map_all(&seized, [code, counts, lanes, tasks, filters], sizes, pages).map_err(
            |missed| {
                let is_there = |mapping: &Mapping| {
                    mapping.range.start < code + bytes && code < mapping.range.end
                };
                let is_taken = mappings(process).is_ok_and(|mapped| mapped.iter().any(is_there));
                if is_taken { Missed::Busy } else { missed }
            },
        )?;
        let write = |at, bytes: &[u8]| memory.write(at, bytes).map_err(Missed::of_io);
        // The name appears in the maps of the process, for readers of backtraces. Kernels without
        // such names return EINVAL, and the arena works without a name.
        write(code, NAME)?;
        let named = [PR_SET_VMA, PR_SET_VMA_ANON_NAME, code, sizes[0], code, 0];
        let _unnamed = seized.call("naming", libc::SYS_prctl, named);
        drop(seized);
        if let Lanes::Several { .. } = lanes_of_process {
            for (block, distances) in blocks(pages, counts, parts) {
                write(block, distances.map(u64::to_le_bytes).as_flattened())?;
            }
        }
        let ring = code + HEADER_BYTES;
        let routine = routine(pages, ring, parts).ok_or(Missed::NoSite)?;
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        let number = u64::from(std::process::id()) << 32 | NUMBERS.fetch_add(1, Relaxed);
        let arena = Self { code, counts, lanes: lanes_of_process, ring, filter_word, number };
        let taken = ring + routine.bytes.len() as u64;
        write(ring, &routine.bytes)?;
        write(code, &header(number, taken))?;
        Ok(arena)
    }

    /// The end of the used code; `None` if the process does not have this arena, or no longer.
    fn used_end(&self, memory: &Memory) -> Option<u64> {
        let words = memory.read_vec(self.code, 24).ok()?;
        let word = |at: usize| words.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
        let (magic, number, taken) = (word(0)?, word(8)?, word(16)?);
        let inside = (self.ring..=self.code + CODE_BYTES).contains(&taken);
        (magic == MAGIC && number == self.number && inside).then_some(taken)
    }

    pub(super) fn is_in(&self, memory: &Memory) -> bool {
        self.used_end(memory).is_some()
    }

    pub(super) fn contains(&self, address: u64) -> bool {
        (self.code..self.code + CODE_BYTES).contains(&address)
    }

    pub(super) fn reaches(&self, address: u64) -> bool {
        self.code.abs_diff(address) < REACH
    }

    /// Room for a trampoline; `None` if the arena is full.
    pub(super) fn room(&self, memory: &Memory, bytes: u64, checks: usize) -> Option<Room> {
        let at = self.used_end(memory)?.next_multiple_of(CODE_ALIGNED);
        let count_at = self.first_count_offset() + u64::try_from(checks).ok()? * 8;
        let fits = at + bytes <= self.code + CODE_BYTES && count_at < COUNTS_BYTES;
        let words = match self.lanes {
            Lanes::One(words) => Words::Fixed { words, count: Some(self.counts + count_at) },
            Lanes::Several { cpu_at, .. } => {
                let count_at = i32::try_from(count_at).ok()?;
                Words::PerCpu(CpuWords { blocks: self.counts, cpu_at, count_at })
            }
        };
        fits.then_some(Room { at, hooks: Hooks { words, ring: self.ring } })
    }

    /// The header to write once the code up to `end` is used.
    pub(super) fn header(&self, end: u64) -> [u8; 24] {
        header(self.number, end)
    }

    /// How often each check has run so far, on all lanes together.
    pub(super) fn counts(&self, memory: &Memory, checks: usize) -> Vec<u64> {
        let mut sums = vec![0; checks];
        let block = |&cpu: &u32| self.counts + u64::from(cpu) * BLOCK_BYTES;
        let starts = match &self.lanes {
            Lanes::One(_) => vec![self.counts],
            Lanes::Several { cpus, .. } => cpus.iter().map(block).collect(),
        };
        for start in starts {
            let bytes = memory.read_vec(start + self.first_count_offset(), checks * 8);
            let bytes = bytes.unwrap_or_default();
            let counts = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
            for (sum, count) in sums.iter_mut().zip(counts) {
                *sum += count;
            }
        }
        sums
    }

    /// Where the counts begin: after the distances of a block and the filter word.
    fn first_count_offset(&self) -> u64 {
        match self.lanes {
            Lanes::One(_) => 8,
            Lanes::Several { .. } => DISTANCES_BYTES + 8,
        }
    }
}

/// Addresses of the parts that the processes of a run share, and of the filter word.
#[derive(Clone, Copy)]
struct Parts {
    lanes: u64,
    tasks: u64,
    filters: u64,
    filter_word: u64,
}

impl Parts {
    fn filters_of(&self, cpu: u32) -> u64 {
        self.filters + u64::from(cpu) * 8
    }
}

/// The block of each lane's CPU, and the two words at its start. They hold 32-bit distances from
/// the block to the task of the request lane, to the probe, and to the filter word of the CPU. The
/// distances fit, because all parts lie in one small arena.
fn blocks(pages: &Pages, counts: u64, parts: Parts) -> Vec<(u64, [u64; 2])> {
    let block_of = |lane: &LaneAt| {
        let block = counts + u64::from(lane.cpu) * BLOCK_BYTES;
        let task = parts.tasks + lane.task_at;
        let probe = parts.lanes + lane.lane_at + pages.probe_at;
        let first = (task - block) & 0xffff_ffff | (probe - block) << 32;
        (block, [first, (parts.filters_of(lane.cpu) - block) & 0xffff_ffff])
    };
    pages.lanes.iter().map(block_of).collect()
}

fn routine(pages: &Pages, at: u64, parts: Parts) -> Option<Patch> {
    let [lane] = pages.lanes.as_slice() else {
        let from_probe =
            |word: u64| i8::try_from(word.cast_signed() - pages.probe_at.cast_signed()).ok();
        let doorbell = LaneDoorbell {
            doorbell: from_probe(pages.doorbell_at)?,
            answer_tsc: from_probe(pages.answer_tsc_at)?,
            answer_place: from_probe(pages.answer_place_at)?,
            filters: pages.filters.is_none().then_some(parts.filter_word),
        };
        return doorbell.routine(at);
    };
    let slot = parts.lanes + lane.lane_at;
    let doorbell = Doorbell {
        task: parts.tasks + lane.task_at,
        doorbell: slot + pages.doorbell_at,
        filters: pages.filters.map_or(parts.filter_word, |_| parts.filters_of(lane.cpu)),
        probe: slot + pages.probe_at,
        answer_tsc: slot + pages.answer_tsc_at,
        answer_place: slot + pages.answer_place_at,
    };
    doorbell.routine(at)
}

fn header(number: u64, taken: u64) -> [u8; 24] {
    let mut bytes = [0; 24];
    let words = [MAGIC, number, taken].map(u64::to_le_bytes);
    bytes.copy_from_slice(words.as_flattened());
    bytes
}

/// Maps all parts, or none.
fn map_all(
    seized: &Seized,
    at: [u64; PARTS],
    sizes: [u64; PARTS],
    pages: &Pages,
) -> Result<(), Missed> {
    let mut done = 0;
    map_parts(seized, at, sizes, pages, &mut done).inspect_err(|_| {
        if done > 0 {
            // A part that cannot be unmapped does no harm.
            let _left = seized.call("unmapping", libc::SYS_munmap, [at[0], done, 0, 0, 0, 0]);
        }
    })
}

/// Maps the parts in order, and counts the mapped bytes in `done`.
fn map_parts(
    seized: &Seized,
    at: [u64; PARTS],
    sizes: [u64; PARTS],
    pages: &Pages,
    done: &mut u64,
) -> Result<(), Missed> {
    let flags = |flags: i32| u64::from((flags | libc::MAP_FIXED_NOREPLACE).unsigned_abs());
    let anonymous = flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let rights = |rights: i32| u64::from(rights.unsigned_abs());
    let map = |what, part: usize, rights, flags, fd: i64| {
        let arguments = [at[part], sizes[part], rights, flags, fd.cast_unsigned(), 0];
        seized.call(what, libc::SYS_mmap, arguments)
    };
    let code = rights(libc::PROT_READ | libc::PROT_EXEC);
    map("mapping an arena", 0, code, anonymous, -1)?;
    *done = sizes[0];
    map("mapping counts", 1, rights(libc::PROT_READ | libc::PROT_WRITE), anonymous, -1)?;
    *done += sizes[1];
    let segment = i64::from(pages.lanes_segment).cast_unsigned();
    seized.call("attaching the lane page", libc::SYS_shmat, [segment, at[2], 0, 0, 0, 0])?;
    *done += sizes[2];
    let tasks = ("mapping the task map", pages.tasks_fd);
    let filters = pages.filters.map(|(fd, _)| ("mapping the filter map", fd));
    for (part, (what, fd)) in (3..).zip([tasks].into_iter().chain(filters)) {
        let shared = |fd| map(what, part, rights(libc::PROT_READ), flags(libc::MAP_SHARED), fd);
        if shared(fd.into()).is_err() {
            map_copied_descriptor(seized, fd, shared)?;
        }
        *done += sizes[part];
    }
    Ok(())
}

/// Maps a descriptor of this process that the program has closed: the program first copies it.
fn map_copied_descriptor(
    seized: &Seized,
    fd: RawFd,
    map: impl Fn(i64) -> Result<u64, TouchError>,
) -> Result<(), Missed> {
    let own = u64::from(std::process::id());
    let supervisor =
        seized.call("opening a pidfd of elfen", libc::SYS_pidfd_open, [own, 0, 0, 0, 0, 0])?;
    let copy = [supervisor, i64::from(fd).cast_unsigned(), 0, 0, 0, 0];
    let copied = seized.call("copying a descriptor", libc::SYS_pidfd_getfd, copy);
    let close = |fd| seized.call("closing", libc::SYS_close, [fd, 0, 0, 0, 0, 0]);
    close(supervisor)?;
    let copied = copied?;
    let mapped = map(copied.cast_signed());
    close(copied)?;
    Ok(mapped.map(drop)?)
}

/// Finds a gap of `bytes` between mappings, as close to `near` as possible.
fn find_gap(mapped: &[Mapping], near: u64, bytes: u64) -> Option<u64> {
    let ends = mapped.iter().map(|mapping| (mapping.range.end, mapping.name.as_str()));
    let starts = mapped.iter().map(|mapping| (mapping.range.start, mapping.name.as_str()));
    let before = [(LOWEST, "")].into_iter().chain(ends);
    let after = starts.chain([(1 << 47, "")]);
    let fits = before.zip(after).flat_map(|((end, below), (start, above))| {
        let low = end.checked_add(MARGIN).map(|low| low.next_multiple_of(PAGE));
        let high = start.checked_sub(MARGIN + bytes).map(|high| high / PAGE * PAGE);
        // The heap grows upwards, and stacks grow downwards.
        let grows = [below == "[heap]", above == "[stack]"];
        let room = low.zip(high).filter(|(low, high)| low <= high);
        let [at_low, at_high] = [room.map(|(low, _)| low), room.map(|(_, high)| high)];
        [at_low.filter(|_| !grows[0]), at_high.filter(|_| !grows[1])]
    });
    let nearest = fits.flatten().min_by_key(|at| at.abs_diff(near))?;
    (nearest.abs_diff(near) < REACH).then_some(nearest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::ops::Range;
    use std::process::{Child, Command, Stdio};

    fn mapping(range: Range<u64>, name: &str) -> Mapping {
        Mapping {
            range,
            writable: false,
            executable: true,
            private: true,
            offset: 0,
            file: None,
            name: name.to_owned(),
        }
    }

    struct SpinningShell(Child);

    impl Drop for SpinningShell {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    /// Goal: a process keeps no part of an arena that cannot be mapped whole. Method: a shell that
    /// spins, and a lane page that does not exist.
    #[test]
    fn an_arena_is_mapped_whole_or_not_at_all() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo; while :; do :; done"]).stdout(Stdio::piped());
        let mut shell = SpinningShell(command.spawn().unwrap());
        // The shell prints a line once it runs.
        shell.0.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
        let process = shell.0.id();
        let memory = Memory::open(process).unwrap();
        let before: Vec<Range<u64>> = ranges(process);
        let lanes = vec![LaneAt { cpu: 0, lane_at: 0, task_at: 0 }];
        let pages = Pages {
            lanes_segment: -1,
            lanes_bytes: PAGE,
            tasks_fd: -1,
            tasks_bytes: PAGE,
            filters: None,
            lanes,
            cpus: 1,
            doorbell_at: 0,
            probe_at: 0,
            answer_tsc_at: 0,
            answer_place_at: 0,
        };
        // The shell may be in the kernel at some attempts.
        let missed = (0..1000).find_map(|_| {
            let mapped = Arena::map((process, process), &memory, before[0].start, &pages, None);
            mapped.err().filter(|missed| !matches!(missed, Missed::Busy))
        });
        let why = missed.unwrap().to_string();
        assert!(why.contains("attaching the lane page"), "{why}");
        assert_eq!(ranges(process), before);
    }

    fn ranges(process: u32) -> Vec<Range<u64>> {
        mappings(process).unwrap().into_iter().map(|mapping| mapping.range).collect()
    }

    #[test]
    fn an_arena_lies_near_the_code_and_leaves_room_for_heap_and_stack() {
        const MIB: u64 = 1 << 20;
        let program = mapping(0x5555_0000_0000..0x5555_0010_0000, "/bin/x");
        let heap = mapping(0x5555_0040_0000..0x5555_0050_0000, "[heap]");
        let mapped = [program.clone(), heap.clone()];
        let at = find_gap(&mapped, program.range.start, 2 * MIB).unwrap();
        assert_eq!(at, program.range.start - 3 * MIB, "below it");
        // The gap above the heap is closer, but stays free.
        let at = find_gap(&mapped, heap.range.end, 2 * MIB).unwrap();
        assert_eq!(at, program.range.start - 3 * MIB);
        let stack = mapping(0x7fff_0000_0000..0x7fff_0010_0000, "[stack]");
        let above = find_gap(std::slice::from_ref(&stack), stack.range.start, MIB);
        assert_eq!(above, Some(stack.range.end + MIB));
        let full = mapping(0x1000..1 << 47, "/bin/full");
        assert_eq!(find_gap(&[full], 1 << 40, MIB), None);
        // A static program at its usual address.
        let fixed = mapping(0x40_0000..0x50_0000, "/bin/static");
        assert!(find_gap(&[fixed], 0x40_1000, MIB).is_some_and(|at| at > 0x50_0000));
    }
}
