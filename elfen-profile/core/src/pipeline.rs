//! The times of each instruction, calculated in one pass in the order of fetch.
//!
//! Among instructions that are ready, the oldest issues first. So no instruction is delayed by a
//! younger one, and an older one has taken its slots before a younger one is looked at. The same
//! holds for all queues, which are entered in order. Therefore one pass gives the same times as a
//! simulation cycle by cycle (`tests/cycle_by_cycle`).
//!
//! The rules, with times as numbers of cycles:
//!
//! - **Fetch** takes up to `fetch.width` instructions of one aligned block per cycle, until a
//!   branch that is predicted taken. The queue holds what is not mapped yet.
//! - **Map** is in order, `map.delay` after fetch. It needs a free entry in the reorder buffer, in
//!   the window, and in the queues of loads and stores. An entry is free in the cycle after the
//!   instruction has left it: by issue for windows, by retirement for the others.
//! - **Ready** is the cycle after map, or when the last source is there. A load waits for an older
//!   store to the same eight bytes, if it is among the last that the store queue can hold.
//! - **Issue** needs a slot and units. A divider takes its divisions in order.
//! - **Completion** is the latency after issue. A load from a line that is on its way completes
//!   when the line is there.
//! - **Retire** is in order, from the cycle after retire-ready on.
//!
//! After a wrong prediction, fetch follows the predicted way until the branch completes. These
//! instructions take slots and entries, and read the instruction cache. Their addresses are not
//! known, so they do not change the data cache. The right way begins in the next cycle.
//!
//! Caches and predictors see instructions in the order of fetch, and change at once.

use std::collections::HashMap;

use crate::cache::{Caches, Lookup};
use crate::instruction::{ACCESSES_MAX, Branch, Class, Instruction, REGISTERS};
use crate::machine::Machine;
use crate::predictor::{History, Predictor, ReturnStack};
use crate::trace::{BlockNumber, Trace, falls};

/// The time of a stage that an instruction does not reach.
pub const NEVER: u64 = u64::MAX;

/// The cycle of each stage; [`NEVER`] from the first stage on that was not reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Times {
    pub fetch: u64,
    pub map: u64,
    pub ready: u64,
    pub issue: u64,
    pub completion: u64,
    pub retire_ready: u64,
    pub retire: u64,
}

/// What happened to an instruction.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Events {
    pub icache_miss: bool,
    pub itlb_miss: bool,
    pub dcache_miss: bool,
    pub dtlb_miss: bool,
    /// A branch went to its target; on a wrong path, it was predicted to.
    pub taken: bool,
    pub mispredicted: bool,
    /// It was ready, and waited for a unit or an issue slot.
    pub conflict: bool,
    /// It stopped fetch until it had retired: a system call.
    pub trap: bool,
}

/// Which wrong prediction aborted an instruction.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AbortReason {
    Direction,
    Return,
    Target,
}

/// An instruction that was fetched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fetched {
    /// Its number in the order of fetch.
    pub number: u64,
    /// Its number in [`Trace::instructions`], and its block.
    pub instruction: u32,
    pub block: BlockNumber,
    pub pc: u64,
    /// The first address of memory that it uses, or the target of a computed branch.
    pub address: Option<u64>,
    pub times: Times,
    /// Its place among the instructions that are fetched in the same cycle.
    pub slot: u32,
    pub events: Events,
    /// Branches before it.
    pub history: History,
    /// Why it aborts, and when. `None` if it retires.
    pub abort: Option<(AbortReason, u64)>,
}

impl Fetched {
    /// When it is not in progress any more: it is ready to retire, or was aborted.
    pub fn end(&self) -> u64 {
        self.abort.map_or(self.times.retire_ready, |(_, at)| at)
    }
}

/// Sums over a run.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, serde::Serialize)]
pub struct Totals {
    pub cycles: u64,
    pub retired: u64,
    pub aborted: u64,
    pub branches: u64,
    pub mispredicted: u64,
    pub icache_misses: u64,
    pub itlb_misses: u64,
    /// Instructions that use memory at known addresses.
    pub data_accesses: u64,
    pub dcache_misses: u64,
    pub dtlb_misses: u64,
}

/// Values by increasing positions, of which the last ones are kept.
#[derive(Clone, Debug)]
struct Ring {
    values: Vec<u64>,
    limit: u64,
}

impl Ring {
    /// A queue of `limit` entries. Up to `ahead` values are pushed, and taken back.
    fn new(limit: u32, ahead: u32) -> Self {
        let all = (u64::from(limit) + u64::from(ahead) + 1).next_power_of_two();
        Self { values: vec![0; index(all)], limit: limit.into() }
    }

    fn at(&self, position: u64) -> usize {
        index(position) & (self.values.len() - 1)
    }

    fn push(&mut self, position: u64, value: u64) {
        let at = self.at(position);
        if let Some(entry) = self.values.get_mut(at) {
            *entry = value;
        }
    }

    /// When there is room for the value at a position: behind the one that must leave first.
    fn free_from(&self, position: u64) -> u64 {
        let Some(before) = position.checked_sub(self.limit) else { return 0 };
        self.values.get(self.at(before)).map_or(0, |value| value.saturating_add(1))
    }
}

fn index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

const INTEGER: usize = 0;
const MULTIPLY: usize = 1;
const FLOAT_ADD: usize = 2;
const FLOAT_MULTIPLY: usize = 3;
const VECTOR: usize = 4;
const BRANCH: usize = 5;
const LOAD: usize = 6;
const STORE: usize = 7;
const UNITS: usize = 8;
const THREADS_MAX: usize = 2;

/// What issues in one cycle.
#[derive(Clone, Copy, Default, Debug)]
struct Cycle {
    number: u64,
    issued: u8,
    units: [u8; UNITS],
    /// Instructions that leave the two windows of each thread.
    leaves: [[u8; 2]; THREADS_MAX],
}

/// What all threads share.
#[derive(Debug)]
struct Shared<'a> {
    machine: &'a Machine,
    caches: Caches,
    predictor: Predictor,
    cycles: Vec<Cycle>,
    units: [u8; UNITS],
    issue_width: u8,
    threads: u64,
}

impl<'a> Shared<'a> {
    fn new(machine: &'a Machine, threads: u64) -> Self {
        let size = machine.span().next_power_of_two();
        let number = |number: u32| u8::try_from(number).unwrap_or(u8::MAX);
        let units = &machine.units;
        Self {
            machine,
            caches: Caches::new(machine),
            predictor: Predictor::new(&machine.predictor),
            cycles: vec![Cycle::default(); index(size)],
            units: [
                units.integer,
                units.multiply,
                units.float_add,
                units.float_multiply,
                units.vector,
                units.branch,
                units.load,
                units.store,
            ]
            .map(number),
            issue_width: number(machine.issue.width),
            threads,
        }
    }

    fn cycle(&mut self, number: u64) -> &mut Cycle {
        let at = index(number) & (self.cycles.len() - 1);
        let cycle = &mut self.cycles[at];
        if cycle.number != number {
            *cycle = Cycle { number, ..Cycle::default() };
        }
        cycle
    }

    /// The first cycle from `from` on with a slot and the units, which are taken.
    fn take_slot(&mut self, from: u64, needs: &Needs, until: u64) -> u64 {
        let (units, width) = (self.units, self.issue_width);
        let mut at = from;
        while at <= until {
            let cycle = self.cycle(at);
            let has = |unit: u8| {
                let unit = usize::from(unit);
                unit >= UNITS || cycle.units[unit] < units[unit]
            };
            if cycle.issued < width && needs.units.iter().all(|&unit| has(unit)) {
                cycle.issued += 1;
                for unit in needs.units {
                    if let Some(taken) = cycle.units.get_mut(usize::from(unit)) {
                        *taken += 1;
                    }
                }
                return at;
            }
            at += 1;
        }
        NEVER
    }
}

/// No unit.
const NONE: u8 = 0xff;

/// What an instruction needs, prepared for speed.
#[derive(Clone, Copy, Debug)]
struct Needs {
    units: [u8; 3],
    /// Number of its divider.
    divider: Option<u8>,
    window: u8,
    latency: u32,
    reads: bool,
    writes: bool,
    accesses: u8,
    class: Class,
    length: u8,
    sources: u64,
    late: u64,
    early: u64,
}

impl Needs {
    fn of(one: &Instruction, machine: &Machine) -> Self {
        let latency = &machine.latency;
        let unit = |unit: usize| u8::try_from(unit).unwrap_or(NONE);
        let (own, latency, divider) = match one.class {
            Class::Integer => (unit(INTEGER), latency.integer, None),
            Class::Multiply => (unit(MULTIPLY), latency.multiply, None),
            Class::Divide => (NONE, latency.divide, Some(0)),
            Class::FloatAdd => (unit(FLOAT_ADD), latency.float_add, None),
            Class::FloatMultiply => (unit(FLOAT_MULTIPLY), latency.float_multiply, None),
            Class::FloatDivide => (NONE, latency.float_divide, Some(1)),
            Class::Vector => (unit(VECTOR), latency.vector, None),
            Class::Load => (NONE, 0, None),
            Class::Store => (NONE, latency.store, None),
            Class::Branch(_) => (unit(BRANCH), latency.branch, None),
            Class::Fence | Class::SystemCall | Class::Other => (NONE, 1, None),
        };
        let (reads, writes) = (one.reads_memory(), one.writes_memory());
        let load = if reads { unit(LOAD) } else { NONE };
        let store = if writes { unit(STORE) } else { NONE };
        Self {
            units: [own, load, store],
            divider,
            window: one.class.is_float().into(),
            latency,
            reads,
            writes,
            accesses: u8::try_from(one.addresses()).unwrap_or(0),
            class: one.class,
            length: one.length,
            sources: one.sources.0,
            late: one.destinations.without(one.early).0,
            early: one.early.0,
        }
    }
}

/// The code of a trace, prepared for speed.
#[derive(Debug)]
struct Code<'a> {
    trace: &'a Trace,
    needs: Vec<Needs>,
    blocks: Vec<Place>,
    starts: HashMap<u64, BlockNumber>,
}

/// Where a block is, and what fetch finds behind it.
#[derive(Clone, Copy, Debug)]
struct Place {
    end: u64,
    falls_to: Option<BlockNumber>,
    branches_to: Option<BlockNumber>,
}

impl<'a> Code<'a> {
    fn new(trace: &'a Trace, machine: &Machine) -> Self {
        let starts = trace.by_start();
        let find = |at: u64| starts.get(&at).copied();
        let place = |block| {
            let end = trace.end(block);
            let falls_to = trace.code(block).last().filter(|last| falls(last.class));
            Place {
                end,
                falls_to: falls_to.and_then(|_| find(end)),
                branches_to: block.target.and_then(find),
            }
        };
        let blocks = trace.blocks.iter().map(place).collect();
        let needs = trace.instructions.iter().map(|one| Needs::of(one, machine)).collect();
        Self { trace, needs, blocks, starts }
    }

    fn at(&self, address: u64) -> Option<BlockNumber> {
        self.starts.get(&address).copied()
    }
}

/// State that a wrong prediction takes back.
#[derive(Clone, Copy, Debug)]
struct Speculative {
    registers: [u64; REGISTERS as usize],
    fetched: u64,
    mapped: u64,
    loads: u64,
    stores: u64,
    /// When each divider takes its next division.
    dividers: [u64; 2],
    last_issue: u64,
    /// When all instructions so far are complete, and when the last fence was.
    all_complete: u64,
    fence: u64,
    map_is_stopped: bool,
}

impl Default for Speculative {
    fn default() -> Self {
        Self {
            registers: [0; REGISTERS as usize],
            fetched: 0,
            mapped: 0,
            loads: 0,
            stores: 0,
            dividers: [0; 2],
            last_issue: 0,
            all_complete: 0,
            fence: 0,
            map_is_stopped: false,
        }
    }
}

/// The last stores, by the eight bytes that they write.
#[derive(Debug)]
struct Stores {
    heads: Vec<u64>,
    /// Address of the eight bytes, completion, and the number of the store before it with the same
    /// head, plus 1.
    entries: Vec<(u64, u64, u64)>,
    limit: u64,
}

impl Stores {
    fn new(limit: u32) -> Self {
        let entries = u64::from(limit).next_power_of_two();
        Self {
            heads: vec![0; index(entries * 4)],
            entries: vec![(0, 0, 0); index(entries)],
            limit: limit.into(),
        }
    }

    fn head(&self, word: u64) -> usize {
        index(word ^ word >> 9) & (self.heads.len() - 1)
    }

    fn push(&mut self, number: u64, address: u64, completion: u64) {
        let word = address >> 3;
        let (head, at) = (self.head(word), index(number) & (self.entries.len() - 1));
        let before = std::mem::replace(&mut self.heads[head], number + 1);
        self.entries[at] = (word, completion, before);
    }

    /// When the last store to an address is complete; `stores` is the number of the next one.
    fn completion(&self, stores: u64, address: u64) -> u64 {
        let word = address >> 3;
        let mut next = self.heads[self.head(word)];
        while next > 0 && next + self.limit > stores {
            let (found, completion, before) =
                self.entries[index(next - 1) & (self.entries.len() - 1)];
            if found == word {
                return completion;
            }
            next = before;
        }
        0
    }
}

/// How an instruction was fetched.
#[derive(Clone, Copy, Debug)]
struct FetchedAt {
    cycle: u64,
    slot: u32,
    lookup: Lookup,
}

/// One thread on the core.
#[derive(Debug)]
struct Thread<'a> {
    number: usize,
    /// Bits that make its addresses differ from those of the other thread.
    space: u64,
    code: Code<'a>,
    /// The next block that runs, and its addresses.
    run: usize,
    address: usize,
    fetched: u64,
    history: History,
    fetch_cycle: u64,
    fetch_slot: u32,
    /// The line and the aligned block that were fetched last.
    line: u64,
    group: u64,
    fetch_queue: Ring,
    map_cycle: u64,
    mapped_in_cycle: u32,
    waiting: [u32; 2],
    windows: [u32; 2],
    reorder: Ring,
    load_queue: Ring,
    store_queue: Ring,
    stores: Stores,
    returns: ReturnStack,
    now: Speculative,
    retire_cycle: u64,
    retired_in_cycle: u32,
    totals: Totals,
}

impl<'a> Thread<'a> {
    fn new(number: usize, trace: &'a Trace, machine: &Machine, threads: u32) -> Self {
        let map = &machine.map;
        // Threads share the entries half and half.
        let share = |entries: u32| (entries / threads).max(1);
        let (queue, reorder) = (share(machine.fetch.queue), share(map.reorder));
        Self {
            number,
            space: (number as u64) << 56,
            code: Code::new(trace, machine),
            run: 0,
            address: 0,
            fetched: 0,
            history: History::default(),
            fetch_cycle: 0,
            fetch_slot: 0,
            line: NEVER,
            group: NEVER,
            fetch_queue: Ring::new(queue, queue + reorder),
            map_cycle: 0,
            mapped_in_cycle: 0,
            waiting: [0; 2],
            windows: [share(map.integer_window), share(map.float_window)],
            reorder: Ring::new(reorder, reorder),
            load_queue: Ring::new(share(map.load_queue), reorder),
            store_queue: Ring::new(share(map.store_queue), reorder),
            stores: Stores::new(share(map.store_queue)),
            returns: ReturnStack::new(machine.predictor.return_stack),
            now: Speculative::default(),
            retire_cycle: 0,
            retired_in_cycle: 0,
            totals: Totals::default(),
        }
    }

    fn is_done(&self) -> bool {
        self.run >= self.code.trace.runs.len()
    }

    /// Runs the next block, and what is fetched after a wrong prediction at its end.
    fn run_block(&mut self, core: &mut Shared<'_>, visit: &mut impl FnMut(usize, &Fetched)) {
        let trace = self.code.trace;
        let Some(&number) = trace.runs.get(self.run) else { return };
        self.run += 1;
        let (Some(block), Some(&place)) =
            (trace.block(number), self.code.blocks.get(number as usize))
        else {
            return;
        };
        let next = trace.runs.get(self.run).and_then(|&next| trace.block(next));
        let next = next.map(|next| next.start);
        let mut pc = block.start;
        for instruction in block.instructions.clone() {
            let Some(&needs) = self.code.needs.get(instruction as usize) else { break };
            let Some(at) = self.fetch(core, pc, NEVER) else { break };
            let first = self.address;
            self.address += usize::from(needs.accesses);
            let addresses = trace.addresses.get(first..self.address).unwrap_or(&[]);
            let (times, mut events) = self.execute(core, &needs, at, Some(addresses), NEVER);
            let mut fetched = Fetched {
                number: self.fetched,
                instruction,
                block: number,
                pc,
                address: addresses.first().copied(),
                times,
                slot: at.slot,
                events,
                history: self.history,
                abort: None,
            };
            self.fetched += 1;
            pc = pc.wrapping_add(needs.length.into());
            let wrong = match needs.class {
                Class::Branch(branch) => {
                    let target = block.target;
                    self.branch(core, branch, &mut fetched, target, place, next)
                }
                Class::SystemCall => {
                    fetched.events.trap = true;
                    self.redirect(times.retire);
                    None
                }
                _ => None,
            };
            events = fetched.events;
            self.count(&needs, events, times);
            visit(self.number, &fetched);
            if let Some(wrong) = wrong {
                self.run_wrong(core, wrong, times.completion, visit);
                self.redirect(times.completion);
            }
        }
    }

    /// Predicts a branch, and learns where it really goes. Returns the wrong way that fetch takes.
    fn branch(
        &mut self,
        core: &mut Shared<'_>,
        branch: Branch,
        fetched: &mut Fetched,
        target: Option<u64>,
        place: Place,
        next: Option<u64>,
    ) -> Option<Wrong> {
        let pc = fetched.pc ^ self.space;
        let predictor = &mut core.predictor;
        let mut wrong = None;
        let mut goes_taken = true;
        match branch {
            Branch::Conditional => {
                let taken = next.is_some() && next == target && next != Some(place.end);
                let predicted = predictor.direction(pc, self.history);
                fetched.events.taken = taken;
                goes_taken = predicted;
                if next.is_some() {
                    predictor.learn(pc, self.history, taken);
                    if predicted != taken {
                        let to = if predicted { place.branches_to } else { place.falls_to };
                        let history = self.history.with(predicted);
                        wrong = Some(Wrong { to, history, reason: AbortReason::Direction });
                    }
                }
                self.history = self.history.with(taken);
            }
            Branch::Jump => fetched.events.taken = true,
            Branch::Call => {
                fetched.events.taken = true;
                self.returns.call(place.end);
            }
            Branch::Return => {
                fetched.events.taken = true;
                let predicted = self.returns.take();
                if next.is_some_and(|next| next != predicted) {
                    wrong = Some(self.wrong_target(Some(predicted), AbortReason::Return));
                }
            }
            Branch::ComputedJump | Branch::ComputedCall => {
                fetched.events.taken = true;
                let predicted = predictor.target(pc, self.history);
                if let Some(next) = next {
                    fetched.address = Some(next);
                    predictor.learn_target(pc, self.history, next);
                    if predicted != Some(next) {
                        wrong = Some(self.wrong_target(predicted, AbortReason::Target));
                    }
                }
                if branch == Branch::ComputedCall {
                    self.returns.call(place.end);
                }
            }
        }
        fetched.events.mispredicted = wrong.is_some();
        if goes_taken {
            self.leave_group(core);
        }
        wrong
    }

    fn wrong_target(&self, predicted: Option<u64>, reason: AbortReason) -> Wrong {
        let to = predicted.and_then(|at| self.code.at(at));
        Wrong { to, history: self.history, reason }
    }

    /// Ends the instructions of this cycle: fetch goes to the target of a branch.
    fn leave_group(&mut self, core: &Shared<'_>) {
        self.fetch_cycle =
            self.fetch_cycle.saturating_add(1 + u64::from(core.machine.fetch.taken_bubble));
        self.fetch_slot = 0;
        self.group = NEVER;
    }

    /// Fetch begins again in the cycle after this one.
    fn redirect(&mut self, cycle: u64) {
        self.fetch_cycle = cycle.saturating_add(1);
        self.fetch_slot = 0;
        self.group = NEVER;
        self.line = NEVER;
    }

    fn count(&mut self, needs: &Needs, events: Events, times: Times) {
        let totals = &mut self.totals;
        totals.retired += 1;
        totals.cycles = totals.cycles.max(times.retire + 1);
        totals.branches += u64::from(needs.class.branch().is_some());
        totals.mispredicted += u64::from(events.mispredicted);
        totals.icache_misses += u64::from(events.icache_miss);
        totals.itlb_misses += u64::from(events.itlb_miss);
        totals.data_accesses += u64::from(needs.accesses > 0);
        totals.dcache_misses += u64::from(events.dcache_miss);
        totals.dtlb_misses += u64::from(events.dtlb_miss);
    }

    /// Fetches an instruction. `None` if that would be after `until`.
    fn fetch(&mut self, core: &mut Shared<'_>, pc: u64, until: u64) -> Option<FetchedAt> {
        let fetch = &core.machine.fetch;
        let group = pc >> fetch.block_bytes.trailing_zeros();
        if group != self.group {
            self.group = group;
            if self.fetch_slot > 0 {
                self.start_cycle(self.fetch_cycle.saturating_add(1));
            }
        }
        if self.fetch_slot == fetch.width {
            self.start_cycle(self.fetch_cycle.saturating_add(1));
        }
        let free = self.fetch_queue.free_from(self.now.fetched);
        if free > self.fetch_cycle {
            self.start_cycle(free);
        }
        self.wait_for_turn(core.threads);
        if self.fetch_cycle > until {
            return None;
        }
        let mut lookup = Lookup::default();
        let line = pc >> core.machine.l1i.line_bytes.trailing_zeros();
        if line != self.line {
            self.line = line;
            lookup = core.caches.fetch(pc ^ self.space);
            if lookup.latency > 0 {
                self.start_cycle(self.fetch_cycle.saturating_add(lookup.latency.into()));
                self.wait_for_turn(core.threads);
                if self.fetch_cycle > until {
                    return None;
                }
            }
        }
        let slot = self.fetch_slot;
        self.fetch_slot += 1;
        Some(FetchedAt { cycle: self.fetch_cycle, slot, lookup })
    }

    fn start_cycle(&mut self, cycle: u64) {
        self.fetch_cycle = cycle;
        self.fetch_slot = 0;
    }

    /// Two threads fetch in turn.
    fn wait_for_turn(&mut self, threads: u64) {
        if threads > 1 && self.fetch_cycle % threads != self.number as u64 {
            self.start_cycle(self.fetch_cycle.saturating_add(1));
        }
    }

    /// The times of an instruction that was fetched. Stages after `until` are not reached.
    /// `addresses` is `None` on a wrong path.
    fn execute(
        &mut self,
        core: &mut Shared<'_>,
        needs: &Needs,
        at: FetchedAt,
        addresses: Option<&[u64]>,
        until: u64,
    ) -> (Times, Events) {
        let machine = core.machine;
        let map = self.map(core, needs, at.cycle, until);
        self.fetch_queue.push(self.now.fetched, map);
        self.now.fetched += 1;
        let mut lookups = [Lookup::default(); ACCESSES_MAX];
        let mut data = Lookup { latency: machine.l1d.latency, ..Lookup::default() };
        let mut ready = map.saturating_add(1);
        let mut sources = needs.sources;
        while sources != 0 {
            ready = ready.max(self.now.registers[sources.trailing_zeros() as usize]);
            sources &= sources - 1;
        }
        for (lookup, &address) in lookups.iter_mut().zip(addresses.unwrap_or(&[])) {
            *lookup = core.caches.access(address ^ self.space);
            data.latency = data.latency.max(lookup.latency);
            data.translation = data.translation.max(lookup.translation);
            data.is_cache_miss |= lookup.is_cache_miss;
            data.is_tlb_miss |= lookup.is_tlb_miss;
            if needs.reads {
                data.mark = data.mark.max(lookup.mark);
                ready = ready.max(self.stores.completion(self.now.stores, address));
            }
        }
        match needs.class {
            Class::Fence | Class::SystemCall => ready = ready.max(self.now.all_complete),
            _ if needs.reads || needs.writes => ready = ready.max(self.now.fence),
            _ => {}
        }
        let mut from = ready;
        if machine.issue.in_order {
            from = from.max(self.now.last_issue);
        }
        if let Some(divider) = needs.divider {
            from = from.max(self.now.dividers[usize::from(divider)]);
        }
        let issue = if from > until { NEVER } else { core.take_slot(from, needs, until) };
        let window = usize::from(needs.window);
        if map != NEVER {
            let leaves = &mut core.cycle(issue.min(until)).leaves[self.number];
            leaves[window] = leaves[window].saturating_add(1);
        }
        let loaded = issue.saturating_add(data.latency.into()).max(data.mark);
        let completion = match (needs.reads, needs.class) {
            (true, Class::Load) => loaded,
            (true, _) => loaded.saturating_add(needs.latency.into()),
            (false, _) => issue.saturating_add(needs.latency.into()),
        };
        for (lookup, &address) in lookups.iter().zip(addresses.unwrap_or(&[])) {
            if lookup.is_cache_miss {
                core.caches.mark(address ^ self.space, issue.saturating_add(lookup.latency.into()));
            }
        }
        self.now.last_issue = issue;
        if let Some(divider) = needs.divider {
            self.now.dividers[usize::from(divider)] = issue.saturating_add(needs.latency.into());
        }
        self.now.all_complete = self.now.all_complete.max(completion);
        if needs.class == Class::Fence {
            self.now.fence = completion;
        }
        let mut destinations = needs.late;
        while destinations != 0 {
            self.now.registers[destinations.trailing_zeros() as usize] = completion;
            destinations &= destinations - 1;
        }
        let mut early = needs.early;
        while early != 0 {
            self.now.registers[early.trailing_zeros() as usize] = issue.saturating_add(1);
            early &= early - 1;
        }
        let mut retire_ready = completion;
        if needs.class == Class::Load && machine.retire.early_loads {
            let checked = u64::from(machine.l1d.latency) + u64::from(data.translation);
            retire_ready = issue.saturating_add(checked).min(completion);
        }
        let retire = if until == NEVER { self.retire(machine, retire_ready) } else { NEVER };
        if map != NEVER {
            self.reorder.push(self.now.mapped, retire);
            self.now.mapped += 1;
            if needs.reads {
                self.load_queue.push(self.now.loads, retire);
                self.now.loads += 1;
            }
            if needs.writes {
                self.store_queue.push(self.now.stores, retire);
                if let Some(&address) = addresses.and_then(<[u64]>::last) {
                    self.stores.push(self.now.stores, address, completion);
                }
                self.now.stores += 1;
            }
        }
        let reached = |at: u64| if at > until { NEVER } else { at };
        let ready = reached(ready);
        let times = Times {
            fetch: at.cycle,
            map,
            ready,
            issue,
            completion: reached(completion),
            retire_ready: reached(retire_ready),
            retire,
        };
        let events = Events {
            icache_miss: at.lookup.is_cache_miss,
            itlb_miss: at.lookup.is_tlb_miss,
            dcache_miss: data.is_cache_miss,
            dtlb_miss: data.is_tlb_miss,
            conflict: ready != NEVER && issue > ready,
            ..Events::default()
        };
        (times, events)
    }

    /// The cycle in which an instruction is mapped; [`NEVER`] if it is not until `until`.
    fn map(&mut self, core: &mut Shared<'_>, needs: &Needs, fetch: u64, until: u64) -> u64 {
        let map = &core.machine.map;
        let mut from = fetch.saturating_add(map.delay.into());
        from = from.max(self.reorder.free_from(self.now.mapped));
        if needs.reads {
            from = from.max(self.load_queue.free_from(self.now.loads));
        }
        if needs.writes {
            from = from.max(self.store_queue.free_from(self.now.stores));
        }
        let window = usize::from(needs.window);
        if self.now.map_is_stopped || from.max(self.map_cycle) > until {
            self.now.map_is_stopped = true;
            return NEVER;
        }
        self.advance_map(core, from);
        while self.mapped_in_cycle == core.machine.map.width
            || self.waiting[window] >= self.windows[window]
        {
            if self.map_cycle >= until {
                self.now.map_is_stopped = true;
                return NEVER;
            }
            self.advance_map(core, self.map_cycle + 1);
        }
        self.mapped_in_cycle += 1;
        self.waiting[window] += 1;
        self.map_cycle
    }

    /// Goes on to a cycle. What has issued until then has left the windows.
    fn advance_map(&mut self, core: &mut Shared<'_>, to: u64) {
        while self.map_cycle < to {
            if self.waiting == [0; 2] {
                self.map_cycle = to - 1;
            } else {
                let leaves = core.cycle(self.map_cycle).leaves[self.number];
                for (waiting, leaves) in self.waiting.iter_mut().zip(leaves) {
                    *waiting = waiting.saturating_sub(leaves.into());
                }
            }
            self.map_cycle += 1;
            self.mapped_in_cycle = 0;
        }
    }

    fn retire(&mut self, machine: &Machine, retire_ready: u64) -> u64 {
        let from = retire_ready.saturating_add(1);
        if from > self.retire_cycle {
            self.retire_cycle = from;
            self.retired_in_cycle = 0;
        } else if self.retired_in_cycle == machine.retire.width {
            self.retire_cycle += 1;
            self.retired_in_cycle = 0;
        }
        self.retired_in_cycle += 1;
        self.retire_cycle
    }

    /// Fetches along a wrong way until a cycle, and takes everything back.
    fn run_wrong(
        &mut self,
        core: &mut Shared<'_>,
        wrong: Wrong,
        until: u64,
        visit: &mut impl FnMut(usize, &Fetched),
    ) {
        let before = self.now;
        let Wrong { to: mut next, mut history, reason } = wrong;
        'way: while let Some(number) = next {
            let trace = self.code.trace;
            let (Some(block), Some(&place)) =
                (trace.block(number), self.code.blocks.get(number as usize))
            else {
                break;
            };
            next = place.falls_to;
            let mut pc = block.start;
            for instruction in block.instructions.clone() {
                let Some(&needs) = self.code.needs.get(instruction as usize) else { break 'way };
                let Some(at) = self.fetch(core, pc, until) else { break 'way };
                let (times, events) = self.execute(core, &needs, at, None, until);
                let mut fetched = Fetched {
                    number: self.fetched,
                    instruction,
                    block: number,
                    pc,
                    address: None,
                    times,
                    slot: at.slot,
                    events,
                    history,
                    abort: Some((reason, until)),
                };
                self.fetched += 1;
                self.totals.aborted += 1;
                match needs.class {
                    Class::Branch(Branch::Conditional) => {
                        let taken = core.predictor.direction(pc ^ self.space, history);
                        fetched.events.taken = taken;
                        history = history.with(taken);
                        if taken {
                            next = place.branches_to;
                        }
                    }
                    Class::Branch(Branch::Jump | Branch::Call) => {
                        fetched.events.taken = true;
                        next = place.branches_to;
                    }
                    // Fetch waits for these; on a wrong path, in vain.
                    Class::Branch(_) | Class::SystemCall => next = None,
                    _ => {}
                }
                if fetched.events.taken {
                    self.leave_group(core);
                }
                pc = pc.wrapping_add(needs.length.into());
                visit(self.number, &fetched);
            }
        }
        self.now = before;
    }
}

/// A way that fetch takes, and the program does not.
#[derive(Clone, Copy, Debug)]
struct Wrong {
    /// `None` if it leads to no known code: fetch waits.
    to: Option<BlockNumber>,
    history: History,
    reason: AbortReason,
}

/// Runs a trace, and calls `visit` with each instruction in the order of fetch.
pub fn run(trace: &Trace, machine: &Machine, mut visit: impl FnMut(&Fetched)) -> Totals {
    let mut core = Shared::new(machine, 1);
    let mut thread = Thread::new(0, trace, machine, 1);
    while !thread.is_done() {
        thread.run_block(&mut core, &mut |_, fetched| visit(fetched));
    }
    thread.totals
}

/// Runs two traces on one core until one of them ends: an experiment. They fetch in turn, share
/// caches, predictor, issue slots and units, and have half of each queue.
pub fn run_beside(
    traces: [&Trace; 2],
    machine: &Machine,
    mut visit: impl FnMut(usize, &Fetched),
) -> [Totals; 2] {
    let mut core = Shared::new(machine, 2);
    let mut number = 0;
    let mut threads = traces.map(|trace| {
        number += 1;
        Thread::new(number - 1, trace, machine, 2)
    });
    while !threads.iter().any(Thread::is_done) {
        let [one, other] = &mut threads;
        // The one that is behind: the other has no say in the cycles before it.
        let next = if one.fetch_cycle <= other.fetch_cycle { one } else { other };
        next.run_block(&mut core, &mut visit);
    }
    threads.map(|thread| thread.totals)
}
