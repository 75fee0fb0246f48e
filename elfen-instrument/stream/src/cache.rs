//! The code cache of one address space: which blocks it holds, and how they are linked.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use elfen_rewrite::Code;

use crate::addresses::NotedAddress;
use crate::assembly::{Gs, INT3, Leaving, Noting, Word, push_leave, push_link};
use crate::block::{BY_CMP, BY_INC, Block, Exit, Indirect, Source, flags_are_dead};
use crate::emit::{Counter, Counters, Emission, Emitted, Operands, Point, PointKind, Returns};
use crate::layout::{COUNTERS_MAX, SAVED_RCX};
use crate::leave::push_leave_routine;
use crate::lookup::{MULTIPLIER, NO_SITE, Routine, TABLE_BYTES, TABLE_SHIFT, Table, push_routine};
use crate::results::Outcome;
use crate::site::{
    Bits, CHAIN_MAX, CHAINS, ChainTable, Site, SiteTarget, TARGETS_MAX, push_chain, push_choice,
    push_search, push_target,
};

/// Displacements reach 2 GiB; the rest is for the object and the cache themselves.
const REACH: u64 = (1 << 31) - (1 << 28);
/// Room that a block and its links certainly do not exceed.
const ROOM: u64 = 1 << 16;
/// A block that is overwritten by a jump to a trap.
const BLOCK_BYTES_MIN: u64 = 5;
const NOP: u8 = 0x90;

/// The memory of the cache, as the host writes it.
pub trait CodeMemory {
    /// Writes bytes that lie in a [`Cluster`] or in the table. An aligned write of 4 or 8 bytes is
    /// one store: threads may execute that code.
    fn write(&mut self, at: u64, bytes: &[u8]);
}

/// Two ranges of memory for code, within 2 GiB of some objects.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cluster {
    pub hot: Range<u64>,
    pub cold: Range<u64>,
}

/// Index of a block.
pub type BlockId = u32;

/// Why an address has no code in the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stop {
    /// It has no code of a file.
    NoCode,
    /// The instruction cannot be moved: the host lets the thread execute it where it is.
    Native,
    /// No cluster is within reach of this address.
    OutOfReach,
    /// The cluster, the table or the counters are used up.
    Full,
}

/// A trap that a thread of the program ran into.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trap {
    /// It is about to enter this block, which is not translated.
    Enter { target: u64 },
    /// A computed branch: `%rcx` holds the target, `%rdx` the site, or the number of no site for a
    /// return. Both have been saved.
    Unknown,
    /// The log is full. The thread can go on behind the trap.
    LogFull,
    /// The events are full. `%rcx`, which has been saved, holds the address to go on at.
    EventsFull,
    /// The addresses or results of a block do not fit. The thread can go on behind the trap.
    AddressesFull,
    /// A system call that the host must know of, at this address of the program.
    HostCall { at: u64, block: BlockId },
}

/// The state of a thread in the program, at an instruction boundary in the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Original {
    pub at: u64,
    pub block: BlockId,
    /// `%rcx` is in the thread's words.
    pub rcx_saved: bool,
    /// A fault here is the cache's own: the original instruction may not fault.
    pub own_fault: bool,
    /// The thread is in a system call, or has just left it.
    pub in_call: bool,
}

/// What a counter counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Counted {
    /// The block goes to the target of its direct branch.
    Direct { block: BlockId },
    /// The call of the block has returned.
    Returned { block: BlockId },
    /// A computed branch of the block goes to `target`.
    Computed { block: BlockId, target: u64 },
}

/// A block in the cache.
#[derive(Clone, Debug)]
pub struct Translated {
    pub start: u64,
    pub end: u64,
    pub object: u32,
    pub exit: Exit,
    pub instructions: u32,
    /// Addresses of its instructions, as distances from its start.
    pub offsets: Vec<u16>,
    /// Which of them read or write memory, one bit each.
    pub memory_mask: u64,
    /// The addresses that are appended, in their order; none without such a cache.
    pub addresses: Vec<NotedAddress>,
    /// The results that are appended, in their order; none without such a cache.
    pub results: Vec<Outcome>,
    /// Its code is gone from the program.
    pub is_retired: bool,
    /// Its direct branch has a counter.
    is_counted: bool,
    /// Its counter changes flags that nothing reads.
    pub changes_flags: bool,
    code: u64,
    points: Vec<Point>,
}

/// How edges are counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mode {
    Counters,
    Events,
    Bursts,
}

/// The code cache of one address space.
#[derive(Clone, Debug)]
pub struct Cache {
    neighbourhood: usize,
    mode: Mode,
    /// What threads append for each instruction.
    operands: Operands,
    clusters: Vec<Area>,
    table: Table,
    blocks: Vec<Translated>,
    by_start: HashMap<u64, BlockId>,
    sites: Vec<Site>,
    counters: Vec<Counted>,
    traps: HashMap<u64, Trap>,
    /// The trap for each block that is not translated, per cluster.
    exits: HashMap<(usize, u64), u64>,
    /// Jumps to these blocks that go to a trap.
    pending: HashMap<u64, Vec<u64>>,
    /// Where calls return to: they are entered by computed branches.
    returns: HashSet<u64>,
    /// Instructions within blocks at which a burst may begin.
    inner: HashMap<u64, BlockId>,
    /// The last block with a call, by where the call returns to.
    calls: HashMap<u64, BlockId>,
    /// Blocks that no thread can come to yet.
    unpublished: Vec<BlockId>,
    /// How often blocks were removed.
    removals: u64,
}

#[derive(Clone, Debug)]
struct Area {
    cluster: Cluster,
    hot_at: u64,
    cold_at: u64,
    routine: Option<Routine>,
    /// The blocks by their address in the hot part.
    blocks: Vec<(u64, BlockId)>,
}

impl Cache {
    /// A cache whose table of [`Cache::TABLE_BYTES`] bytes lies at an address of the program. It
    /// translates up to `neighbourhood` blocks at a time.
    pub fn new(table: u64, neighbourhood: usize) -> Self {
        Self {
            neighbourhood,
            mode: Mode::Counters,
            operands: Operands::Nothing,
            clusters: Vec::new(),
            table: Table::new(table),
            blocks: Vec::new(),
            by_start: HashMap::new(),
            sites: Vec::new(),
            counters: Vec::new(),
            traps: HashMap::new(),
            exits: HashMap::new(),
            pending: HashMap::new(),
            returns: HashSet::new(),
            inner: HashMap::new(),
            calls: HashMap::new(),
            unpublished: Vec::new(),
            removals: 0,
        }
    }

    /// A cache for bursts: threads come from the program at any instruction, append each edge to
    /// their events, and return to the program when these are full, at code that is not translated,
    /// and in front of system calls. It has no traps.
    pub fn for_bursts(table: u64, neighbourhood: usize) -> Self {
        Self { mode: Mode::Bursts, ..Self::new(table, neighbourhood) }
    }

    /// The same, and its threads append the addresses of the memory that their instructions use.
    pub fn for_bursts_with_addresses(table: u64, neighbourhood: usize) -> Self {
        Self { operands: Operands::Addresses, ..Self::for_bursts(table, neighbourhood) }
    }

    /// A cache whose threads append each edge to their events, and stop at a trap when these are
    /// full.
    pub fn with_events(table: u64, neighbourhood: usize) -> Self {
        Self { mode: Mode::Events, ..Self::new(table, neighbourhood) }
    }

    /// The same, and its threads append addresses, as above.
    pub fn with_addresses(table: u64, neighbourhood: usize) -> Self {
        Self { operands: Operands::Addresses, ..Self::with_events(table, neighbourhood) }
    }

    /// The same, but its threads append the results of their instructions.
    pub fn with_results(table: u64, neighbourhood: usize) -> Self {
        Self { operands: Operands::Results, ..Self::with_events(table, neighbourhood) }
    }

    pub const TABLE_BYTES: u64 = TABLE_BYTES;
    /// How an address is looked up in the table: the product with the multiplier, shifted right, is
    /// the first entry, of 16 bytes: the address, and its code. Free entries are 0.
    pub const TABLE_MULTIPLIER: u64 = MULTIPLIER;
    pub const TABLE_SHIFT: u64 = TABLE_SHIFT;
    pub const TABLE_MASK: u64 = TABLE_BYTES / 16 - 1;

    /// Adds memory for code, for objects near it. `table` is the address of the table.
    pub fn add_cluster(
        &mut self,
        cluster: Cluster,
        table: u64,
        memory: &mut impl CodeMemory,
    ) -> Option<()> {
        let mut cold = Code::at(cluster.cold.start);
        let noting = match self.mode {
            Mode::Counters => Noting::Counters,
            Mode::Events => {
                let leave = cold.end()?;
                cold.push(&[INT3]);
                self.traps.insert(leave, Trap::EventsFull);
                Noting::Events { leave, by: Leaving::Trap }
            }
            Mode::Bursts => {
                let leave = push_leave_routine(&mut cold)?;
                Noting::Events { leave, by: Leaving::Frame }
            }
        };
        let routine = push_routine(&mut cold, table, noting)?;
        if self.mode != Mode::Bursts {
            self.traps.insert(routine.missed, Trap::Unknown);
        }
        if let Some(full) = routine.full {
            self.traps.insert(full, Trap::LogFull);
        }
        let cold_at = cold.end()?;
        write(memory, cold);
        let (hot_at, routine) = (cluster.hot.start, Some(routine));
        self.clusters.push(Area { cluster, hot_at, cold_at, routine, blocks: Vec::new() });
        Some(())
    }

    /// The blocks, by their ids.
    pub fn blocks(&self) -> &[Translated] {
        &self.blocks
    }

    /// A block by its id.
    pub fn block(&self, id: BlockId) -> Option<&Translated> {
        self.blocks.get(usize::try_from(id).ok()?)
    }

    /// What each counter counts.
    pub fn counters(&self) -> &[Counted] {
        &self.counters
    }

    /// Whether the direct branch of a block has a counter.
    pub(crate) fn is_counted(&self, block: BlockId) -> bool {
        let found = usize::try_from(block).ok().and_then(|block| self.blocks.get(block));
        found.is_some_and(|one| one.is_counted)
    }

    /// The address that all entries of the table of returns hold at first. `None` before the first
    /// cluster is added.
    pub fn unexpected_return(&self) -> Option<u64> {
        Some(self.clusters.first()?.routine.as_ref()?.returns.on_stack)
    }

    /// Whether the number that the log holds is that of no site: a return.
    pub fn is_return(site: u64) -> bool {
        site == NO_SITE.into()
    }

    /// The block of a site, by the number that the log holds.
    pub fn block_of_site(&self, site: u64) -> Option<BlockId> {
        Some(self.sites.get(usize::try_from(site).ok()?)?.block)
    }

    pub fn trap(&self, at: u64) -> Option<Trap> {
        self.traps.get(&at).copied()
    }

    /// The ranges of the clusters that hold code.
    pub fn used(&self) -> Vec<Range<u64>> {
        let of = |area: &Area| {
            let Cluster { hot, cold } = &area.cluster;
            [hot.start..area.hot_at, cold.start..area.cold_at]
        };
        self.clusters.iter().flat_map(of).collect()
    }

    /// Whether an address lies in the cache.
    pub fn holds(&self, at: u64) -> bool {
        self.clusters
            .iter()
            .any(|area| area.cluster.hot.contains(&at) || area.cluster.cold.contains(&at))
    }

    /// The state in the program of a thread that is stopped at an address of the cache. `None` if
    /// it is between two instructions of the program: a few steps further it is not.
    pub fn original(&self, at: u64) -> Option<Original> {
        let area = self.clusters.iter().find(|area| area.cluster.hot.contains(&at))?;
        let after = area.blocks.partition_point(|&(start, _)| start <= at);
        let &(start, block) = area.blocks.get(after.checked_sub(1)?)?;
        let found = self.blocks.get(usize::try_from(block).ok()?)?;
        let code = u32::try_from(at.checked_sub(start)?).ok()?;
        // A jump without code and the block after it have the same address: the later one counts.
        let point = found.points.iter().rev().find(|point| point.code == code)?;
        Some(Original {
            at: found.start.checked_add(point.original.into())?,
            block,
            rcx_saved: matches!(point.kind, PointKind::RcxSaved | PointKind::Returns),
            own_fault: point.kind == PointKind::Returns,
            in_call: point.kind == PointKind::InCall,
        })
    }

    /// The address in the cache of the block at `start`, if it is translated.
    pub fn entry(&self, start: u64) -> Option<u64> {
        self.by_start.get(&start).map(|&block| self.code_of(block))
    }

    /// The block that begins at `start`, if it is translated.
    pub fn block_at(&self, start: u64) -> Option<BlockId> {
        self.by_start.get(&start).copied()
    }

    fn code_of(&self, block: BlockId) -> u64 {
        usize::try_from(block)
            .ok()
            .and_then(|block| self.blocks.get(block))
            .map_or(0, |one| one.code)
    }

    /// Translates the block at `start` and the blocks that direct branches lead to. Returns the
    /// address of the first one in the cache.
    pub fn translate(
        &mut self,
        start: u64,
        source: &mut impl Source,
        memory: &mut impl CodeMemory,
    ) -> Result<u64, Stop> {
        if let Some(code) = self.entry(start) {
            return Ok(code);
        }
        let number = self.cluster_for(start).ok_or(Stop::OutOfReach)?;
        let area = self.clusters.get(number).ok_or(Stop::OutOfReach)?;
        let noting = area.routine.as_ref().ok_or(Stop::OutOfReach)?.noting;
        let (hot, cold) = (Code::at(area.hot_at), Code::at(area.cold_at));
        let emission = Emission { hot, cold, noting, operands: self.operands };
        let mut run = Run::new(number, emission, start, self.neighbourhood);
        while let Some(at) = run.open.pop() {
            self.translate_along(at, &mut run, source);
            if let Some(stop) = run.stop {
                if self.entry(start).is_none() {
                    return Err(stop);
                }
                break;
            }
        }
        self.finish(run, memory).ok_or(Stop::Full)?;
        if self.mode != Mode::Bursts {
            self.publish(memory).ok_or(Stop::Full)?;
        }
        self.entry(start).ok_or(Stop::Native)
    }

    fn cluster_for(&self, at: u64) -> Option<usize> {
        self.clusters.iter().position(|area| {
            let Cluster { hot, cold } = &area.cluster;
            let (low, high) = (hot.start.min(cold.start), hot.end.max(cold.end));
            high.saturating_sub(at) < REACH && at.saturating_sub(low) < REACH
        })
    }

    /// Translates blocks in the order in which they run if no branch is taken.
    fn translate_along(&mut self, at: u64, run: &mut Run, source: &mut impl Source) {
        let mut at = at;
        let mut is_fall = false;
        loop {
            let is_known = self.by_start.contains_key(&at);
            if is_known && !is_fall {
                return;
            }
            let block = match Block::decode(source, at) {
                _ if is_known || run.left == 0 => None,
                Some(block) if block.instructions() > 0 => {
                    self.emit(&block, run, source).map(|()| block)
                }
                Some(_) => {
                    run.refuse(Stop::Native, is_fall);
                    None
                }
                None => {
                    run.refuse(Stop::NoCode, is_fall);
                    None
                }
            };
            let Some(block) = block else {
                if is_fall && run.link_to(at).is_none() {
                    run.stop = Some(Stop::Full);
                }
                return;
            };
            run.left -= 1;
            is_fall = true;
            at = match block.exit {
                Exit::Falls | Exit::Syscall | Exit::Native => block.end,
                Exit::Jump { to } => to,
                Exit::Branch { to } => {
                    run.open.push(to);
                    block.end
                }
                Exit::Call { to } => {
                    run.open.push(to);
                    self.returns.insert(block.end);
                    block.end
                }
                Exit::Indirect(Indirect::Call) => {
                    self.returns.insert(block.end);
                    block.end
                }
                Exit::Indirect(_) => return,
            };
            // Only what is in reach of this cluster follows.
            if self.cluster_for(at) != Some(run.cluster) {
                if run.link_to(at).is_none() {
                    run.stop = Some(Stop::Full);
                }
                return;
            }
        }
    }

    /// Appends one block. `None` if the run is over, or the block cannot be emitted.
    fn emit(&mut self, block: &Block, run: &mut Run, source: &mut impl Source) -> Option<()> {
        let area = self.clusters.get(run.cluster)?;
        let hot_left = area.cluster.hot.end.checked_sub(run.emission.hot.end()?)?;
        let cold_left = area.cluster.cold.end.checked_sub(run.emission.cold.end()?)?;
        let id = BlockId::try_from(self.blocks.len()).ok()?;
        let counters_full = i32::try_from(self.counters.len()).ok()? >= COUNTERS_MAX - 2;
        if hot_left < ROOM || cold_left < ROOM || counters_full {
            run.stop = Some(Stop::Full);
            return None;
        }
        let branch_at = block.last()?.ip();
        // The counts of jumps and calls that go forward follow from others: see `counts`.
        let counted = match block.exit {
            Exit::Jump { to } | Exit::Call { to } if to <= branch_at => Some(to),
            Exit::Branch { to } => Some(to),
            _ => None,
        };
        let first = u32::try_from(self.counters.len()).ok()?;
        let branch = counted.map_or(Counter::default(), |to| Counter {
            number: Some(first),
            flags_are_dead: flags_are_dead(source, to, BY_INC),
        });
        let is_call = matches!(block.exit, Exit::Call { .. } | Exit::Indirect(Indirect::Call));
        let counter = match is_call {
            true => Counter {
                number: Some(first + u32::from(branch.number.is_some())),
                flags_are_dead: flags_are_dead(source, block.end, BY_CMP),
            },
            false => Counter::default(),
        };
        let unexpected = self.clusters.get(run.cluster)?.routine.as_ref()?.returns;
        let counters = Counters { branch, returns: Returns { counter, unexpected } };
        let start = run.emission.hot.end()?;
        let before = [run.emission.hot.length(), run.emission.cold.length()];
        let Some(emitted) = run.emission.push_block(block, counters) else {
            // Something is out of reach: the host lets the thread execute the block where it is.
            run.emission.hot.truncate(before[0]);
            run.emission.cold.truncate(before[1]);
            run.refuse(Stop::Native, false);
            return None;
        };
        if branch.number.is_some() {
            self.counters.push(Counted::Direct { block: id });
        }
        if counter.number.is_some() {
            self.counters.push(Counted::Returned { block: id });
        }
        let end = run.emission.hot.end()?;
        for _ in end..start + BLOCK_BYTES_MIN {
            run.emission.hot.push(&[NOP]);
        }
        self.record(block, id, branch, start, emitted, run)
    }

    fn record(
        &mut self,
        block: &Block,
        id: BlockId,
        counter: Counter,
        code: u64,
        emitted: Emitted,
        run: &mut Run,
    ) -> Option<()> {
        if let Some(jump) = emitted.site {
            let site = u32::try_from(self.sites.len()).ok()?;
            let lookup = self.clusters.get(run.cluster)?.routine.as_ref()?.entry;
            let search = push_search(&mut run.emission.cold, site, lookup)?;
            run.sites.push((jump, search));
            self.sites.push(Site {
                block: id,
                jump,
                head: search,
                targets: Vec::new(),
                table: None,
            });
        }
        if let (Some(trap), Some(last)) = (emitted.host_call, block.last()) {
            self.traps.insert(trap, Trap::HostCall { at: last.ip(), block: id });
        }
        if let Some(trap) = emitted.addresses_full {
            self.traps.insert(trap, Trap::AddressesFull);
        }
        run.links.extend(emitted.links);
        let offsets =
            block.code.iter().filter_map(|one| u16::try_from(one.ip() - block.start).ok());
        self.blocks.push(Translated {
            start: block.start,
            end: block.end,
            object: block.object,
            exit: block.exit,
            instructions: u32::try_from(block.instructions()).ok()?,
            offsets: offsets.collect(),
            memory_mask: block.memory_mask(),
            addresses: match self.operands {
                Operands::Addresses => block.noted_addresses(),
                _ => Vec::new(),
            },
            results: match self.operands {
                Operands::Results => block.results(),
                _ => Vec::new(),
            },
            is_retired: false,
            is_counted: counter.number.is_some(),
            changes_flags: counter.number.is_some() && counter.flags_are_dead,
            code,
            points: emitted.points,
        });
        self.by_start.insert(block.start, id);
        if matches!(block.exit, Exit::Call { .. } | Exit::Indirect(Indirect::Call)) {
            self.calls.insert(block.end, id);
        }
        self.clusters.get_mut(run.cluster)?.blocks.push((code, id));
        run.blocks.push(id);
        Some(())
    }

    /// Writes what a run has appended, and links it.
    fn finish(&mut self, mut run: Run, memory: &mut impl CodeMemory) -> Option<()> {
        // Traps first: they are appended to the cold part.
        let mut patches = Vec::new();
        for (distance_at, target) in std::mem::take(&mut run.links) {
            let to = match self.entry(target) {
                Some(code) => self.near(code, distance_at, &mut run.emission.cold)?,
                None => {
                    self.pending.entry(target).or_default().push(distance_at);
                    self.exit(run.cluster, target, &mut run.emission.cold)?
                }
            };
            patches.push((distance_at, to));
        }
        patches.extend(std::mem::take(&mut run.sites));
        let area = self.clusters.get_mut(run.cluster)?;
        area.hot_at = run.emission.hot.end()?;
        area.cold_at = run.emission.cold.end()?;
        write(memory, run.emission.cold);
        write(memory, run.emission.hot);
        for (distance_at, to) in patches {
            write_distance(memory, distance_at, to)?;
        }
        self.unpublished.extend(run.blocks);
        Some(())
    }

    /// Lets threads come to the blocks that were translated last. In bursts, the host does that
    /// once it has noted their [`Cache::fault_points`].
    pub fn publish(&mut self, memory: &mut impl CodeMemory) -> Option<()> {
        for block in std::mem::take(&mut self.unpublished) {
            let one = self.blocks.get(usize::try_from(block).ok()?)?;
            let (start, code) = (one.start, one.code);
            if self.mode == Mode::Bursts {
                self.enter_points(block, memory);
            } else if self.returns.contains(&start) {
                self.enter_table(start, memory)?;
            }
            for distance_at in self.pending.remove(&start).unwrap_or_default() {
                self.patch(distance_at, code, memory)?;
            }
        }
        Some(())
    }

    /// Points a jump of any cluster to an address of any cluster.
    fn patch(&mut self, distance_at: u64, to: u64, memory: &mut impl CodeMemory) -> Option<()> {
        let number = self.clusters.iter().position(|area| {
            area.cluster.hot.contains(&distance_at) || area.cluster.cold.contains(&distance_at)
        })?;
        let mut cold = Code::at(self.clusters.get(number)?.cold_at);
        let to = self.near(to, distance_at, &mut cold)?;
        self.clusters.get_mut(number)?.cold_at = cold.end()?;
        write(memory, cold);
        write_distance(memory, distance_at, to)
    }

    /// An address within reach of a jump that leads to `to`.
    fn near(&self, to: u64, distance_at: u64, cold: &mut Code) -> Option<u64> {
        if i32::try_from(to.cast_signed().checked_sub(distance_at.cast_signed())? - 4).is_ok() {
            return Some(to);
        }
        // jmp *0(%rip); the address
        let at = cold.end()?;
        cold.push(&[0xff, 0x25, 0, 0, 0, 0]);
        cold.push(&to.to_le_bytes());
        Some(at)
    }

    /// The trap for a block that is not translated; in bursts, the way back to the program.
    fn exit(&mut self, cluster: usize, target: u64, cold: &mut Code) -> Option<u64> {
        if let Some(&trap) = self.exits.get(&(cluster, target)) {
            return Some(trap);
        }
        let trap = cold.end()?;
        match self.clusters.get(cluster)?.routine.as_ref()?.noting {
            Noting::Counters | Noting::Events { by: Leaving::Trap, .. } => {
                cold.push(&[INT3]);
                self.traps.insert(trap, Trap::Enter { target });
            }
            Noting::Events { leave, by: Leaving::Frame } => {
                cold.store(SAVED_RCX, Word::Rcx);
                push_leave(cold, target, leave)?;
            }
        }
        self.exits.insert((cluster, target), trap);
        Some(trap)
    }

    /// Where the table has its entry for a block that begins at `start`, if it has one.
    pub fn table_entry(&self, start: u64) -> Option<u64> {
        self.table.find(start)
    }

    /// Writes all entries of the table, to the memory of a copy of this cache.
    pub fn write_table(&self, memory: &mut impl CodeMemory) {
        for (entry, start) in self.table.entries() {
            // An entry without code leads to the trap that the code was replaced by.
            if let Some(code) = self.entry(start).or_else(|| self.retired_entry(start)) {
                memory.write(entry + 8, &code.to_le_bytes());
                memory.write(entry, &start.to_le_bytes());
            }
        }
    }

    fn retired_entry(&self, start: u64) -> Option<u64> {
        self.exits.iter().find(|&(&(_, target), _)| target == start).map(|(_, &trap)| trap)
    }

    /// Makes a translated block known to computed branches.
    pub fn enter_table(&mut self, start: u64, memory: &mut impl CodeMemory) -> Option<()> {
        let code = self.entry(start)?;
        let entry = self.table.entry(start)?;
        // The routine reads the key first.
        memory.write(entry + 8, &code.to_le_bytes());
        memory.write(entry, &start.to_le_bytes());
        Some(())
    }

    /// Makes the instructions of a block known to threads that begin a burst, as far as the table
    /// has room.
    fn enter_points(&mut self, block: BlockId, memory: &mut impl CodeMemory) -> Option<()> {
        let one = self.blocks.get(usize::try_from(block).ok()?)?;
        let (start, code) = (one.start, one.code);
        self.inner.remove(&start);
        let mut points: Vec<(u32, u32)> =
            one.points.iter().map(|point| (point.original, point.code)).collect();
        // At later points of an instruction, registers have been saved already.
        points.dedup_by_key(|point| point.0);
        for (original, point) in points {
            let at = start.checked_add(original.into())?;
            let is_start = at == start;
            if is_start || self.entry(at).is_none() {
                let entry = self.table.entry(at)?;
                memory.write(entry + 8, &code.checked_add(point.into())?.to_le_bytes());
                memory.write(entry, &at.to_le_bytes());
                if !is_start {
                    self.inner.insert(at, block);
                }
            }
        }
        Some(())
    }

    /// The block that a burst or a computed branch to an address continues in.
    pub fn block_with(&self, at: u64) -> Option<BlockId> {
        self.block_at(at).or_else(|| self.inner.get(&at).copied())
    }

    /// How often blocks were removed: others may lead elsewhere since.
    pub fn removals(&self) -> u64 {
        self.removals
    }

    /// The block whose call returns to an address.
    pub fn call_before(&self, at: u64) -> Option<BlockId> {
        self.calls.get(&at).copied()
    }

    /// The points at which a fault can have its cause in the program: their addresses in the cache
    /// and in the program, and whether `%rcx` is in the thread's words. In the order of addresses,
    /// from block `from` on.
    pub fn fault_points(&self, from: usize) -> impl Iterator<Item = (u64, u64, bool)> {
        let blocks = self.blocks.iter().skip(from);
        blocks.flat_map(|one| {
            one.points.iter().filter_map(|point| {
                let at = one.start.checked_add(point.original.into())?;
                let is_saved = point.kind != PointKind::Plain;
                Some((one.code.checked_add(point.code.into())?, at, is_saved))
            })
        })
    }

    /// Gives a computed branch code of its own for a target that it often goes to. The target must
    /// be translated. Returns whether it did.
    pub fn promote(&mut self, site: u64, target: u64, memory: &mut impl CodeMemory) -> bool {
        self.try_promote(site, target, memory).is_some()
    }

    fn try_promote(&mut self, site: u64, target: u64, memory: &mut impl CodeMemory) -> Option<()> {
        let index = usize::try_from(site).ok()?;
        let one = self.sites.get(index)?;
        let is_known = one.targets.iter().any(|known| known.target == target);
        let counters_full = i32::try_from(self.counters.len()).ok()? >= COUNTERS_MAX - 2;
        if is_known || one.targets.len() == TARGETS_MAX || counters_full {
            return None;
        }
        let code = self.entry(target)?;
        let number = self.cluster_of(one.jump)?;
        let area = self.clusters.get(number)?;
        if area.cluster.cold.end.checked_sub(area.cold_at)? < ROOM {
            return None;
        }
        if one.targets.len() == CHAIN_MAX {
            self.make_table(index, number, memory)?;
        }
        let one = self.sites.get(index)?;
        let counter = u32::try_from(self.counters.len()).ok()?;
        let new = SiteTarget { target, counter };
        let chain = one.table.as_ref().map(|table| (table.bits.chain(target), table.at));
        let next = match (&one.table, chain) {
            (Some(table), Some((chain, _))) => *table.heads.get(chain)?,
            _ => one.head,
        };
        let (jump, block) = (one.jump, one.block);
        let mut cold = Code::at(self.clusters.get(number)?.cold_at);
        let noting = self.clusters.get(number)?.routine.as_ref()?.noting;
        let (head, distance_at) = push_target(&mut cold, new, next, noting)?;
        let entry = match chain {
            Some(_) => push_chain(&mut cold, head)?,
            None => head,
        };
        let to = self.near(code, distance_at, &mut cold)?;
        self.clusters.get_mut(number)?.cold_at = cold.end()?;
        write(memory, cold);
        write_distance(memory, distance_at, to)?;
        self.counters.push(Counted::Computed { block, target });
        let one = self.sites.get_mut(index)?;
        one.targets.push(new);
        match (&mut one.table, chain) {
            (Some(table), Some((chain, at))) => {
                *table.heads.get_mut(chain)? = head;
                memory.write(at + 8 * u64::try_from(chain).ok()?, &entry.to_le_bytes());
            }
            _ => {
                one.head = head;
                write_distance(memory, jump, head)?;
            }
        }
        Some(())
    }

    /// Replaces a long chain by a table of chains.
    fn make_table(
        &mut self,
        index: usize,
        cluster: usize,
        memory: &mut impl CodeMemory,
    ) -> Option<()> {
        let site = self.sites.get(index)?;
        let bits = Bits::of(&site.targets);
        let mut cold = Code::at(self.clusters.get(cluster)?.cold_at);
        let padding = cold.end()?.wrapping_neg() % 64;
        cold.push(&vec![INT3; usize::try_from(padding).ok()?]);
        let at = cold.end()?;
        // The chain so far knows the targets so far, so each chain ends with it.
        let empty = at.checked_add(8 * u64::try_from(CHAINS).ok()?)?;
        for _ in 0..CHAINS {
            cold.push(&empty.to_le_bytes());
        }
        push_chain(&mut cold, site.head)?;
        let choice = push_choice(&mut cold, at, bits)?;
        self.clusters.get_mut(cluster)?.cold_at = cold.end()?;
        write(memory, cold);
        let site = self.sites.get_mut(index)?;
        site.table = Some(ChainTable { at, bits, heads: vec![site.head; CHAINS] });
        write_distance(memory, site.jump, choice)
    }

    fn cluster_of(&self, at: u64) -> Option<usize> {
        self.clusters
            .iter()
            .position(|area| area.cluster.hot.contains(&at) || area.cluster.cold.contains(&at))
    }

    /// Removes the blocks in a range of the program, whose code is gone. Threads that go there
    /// trap.
    pub fn retire(&mut self, range: &Range<u64>, memory: &mut impl CodeMemory) -> Option<()> {
        self.removals += 1;
        let gone: Vec<BlockId> = self
            .by_start
            .iter()
            .filter(|&(_, &block)| {
                usize::try_from(block)
                    .ok()
                    .and_then(|block| self.blocks.get(block))
                    .is_some_and(|one| one.start < range.end && range.start < one.end)
            })
            .map(|(_, &block)| block)
            .collect();
        let inner: Vec<u64> = self.inner.keys().copied().filter(|at| range.contains(at)).collect();
        for at in inner {
            // The way back to the program, at once.
            let number = self.cluster_for(at)?;
            let mut cold = Code::at(self.clusters.get(number)?.cold_at);
            let back = self.exit(number, at, &mut cold)?;
            self.clusters.get_mut(number)?.cold_at = cold.end()?;
            write(memory, cold);
            memory.write(self.table.find(at)? + 8, &back.to_le_bytes());
            self.inner.remove(&at);
        }
        for block in gone {
            let one = self.blocks.get_mut(usize::try_from(block).ok()?)?;
            one.is_retired = true;
            let (start, code) = (one.start, one.code);
            self.by_start.remove(&start);
            let number = self.cluster_of(code)?;
            let mut cold = Code::at(self.clusters.get(number)?.cold_at);
            let trap = self.exit(number, start, &mut cold)?;
            self.clusters.get_mut(number)?.cold_at = cold.end()?;
            write(memory, cold);
            let mut jump = Code::at(code);
            jump.push_relative(&[0xe9], trap, &[])?;
            write(memory, jump);
            // If new code comes to this address, old jumps lead there.
            self.pending.entry(start).or_default().push(code + 1);
        }
        Some(())
    }
}

/// One call of [`Cache::translate`].
#[derive(Debug)]
struct Run {
    cluster: usize,
    emission: Emission,
    open: Vec<u64>,
    links: Vec<(u64, u64)>,
    sites: Vec<(u64, u64)>,
    blocks: Vec<BlockId>,
    left: usize,
    stop: Option<Stop>,
}

impl Run {
    fn new(cluster: usize, emission: Emission, start: u64, left: usize) -> Self {
        let (links, sites, blocks) = (Vec::new(), Vec::new(), Vec::new());
        Self { cluster, emission, open: vec![start], links, sites, blocks, left, stop: None }
    }

    /// Appends a jump to a block.
    fn link_to(&mut self, target: u64) -> Option<()> {
        let distance_at = push_link(&mut self.emission.hot)?;
        self.links.push((distance_at, target));
        Some(())
    }

    /// Notes that a block has no code. Only the first block of a run must have some.
    fn refuse(&mut self, stop: Stop, is_fall: bool) {
        if self.blocks.is_empty() && !is_fall {
            self.stop = Some(stop);
        }
    }
}

fn write(memory: &mut impl CodeMemory, code: Code) {
    let patch = code.patch();
    if !patch.bytes.is_empty() {
        memory.write(patch.at, &patch.bytes);
    }
}

fn write_distance(memory: &mut impl CodeMemory, distance_at: u64, to: u64) -> Option<()> {
    let distance = to.cast_signed().checked_sub(distance_at.cast_signed())?.checked_sub(4)?;
    memory.write(distance_at, &i32::try_from(distance).ok()?.to_le_bytes());
    Some(())
}
