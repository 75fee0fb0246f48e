//! A core that is simulated cycle by cycle, with all instructions in flight in one list.
//!
//! It follows the rules of `elfen_core_model::pipeline`, and shares only caches and predictor with
//! it: those change in the order of fetch, so when they are asked does not matter.

use std::collections::{HashMap, VecDeque};

use elfen_core_model::Caches;
use elfen_core_model::instruction::{Branch, Class, Instruction};
use elfen_core_model::machine::Machine;
use elfen_core_model::pipeline::{AbortReason, NEVER};
use elfen_core_model::predictor::{History, Predictor, ReturnStack};
use elfen_core_model::trace::Trace;

/// An instruction that was fetched. Times are `None` until they are known.
#[derive(Clone, Debug)]
pub(crate) struct Flight {
    pub(crate) instruction: u32,
    pub(crate) slot: u32,
    pub(crate) fetch: u64,
    pub(crate) map: Option<u64>,
    pub(crate) ready: Option<u64>,
    pub(crate) issue: Option<u64>,
    pub(crate) completion: Option<u64>,
    pub(crate) retire_ready: Option<u64>,
    pub(crate) retire: Option<u64>,
    pub(crate) abort: Option<(AbortReason, u64)>,
    /// I-cache, I-TLB, D-cache and D-TLB.
    pub(crate) misses: [bool; 4],
    pub(crate) mispredicted: bool,
    pub(crate) history: History,
    /// Instructions whose results it needs, and whether one cycle after issue is enough.
    producers: Vec<(usize, bool)>,
    /// Instructions that bring its lines, and how long these take.
    fillers: Vec<(usize, u64)>,
    loads_in: u64,
    translation: u64,
}

pub(crate) struct Simulation<'a> {
    trace: &'a Trace,
    machine: &'a Machine,
    caches: Caches,
    predictor: Predictor,
    returns: ReturnStack,
    starts: HashMap<u64, u32>,
    pub(crate) flights: Vec<Flight>,
    /// The eight bytes that each instruction writes.
    stored: Vec<Option<u64>>,
    // Fetch.
    way: Way,
    history: History,
    /// The right way, while fetch is on a wrong one: the branch, and where it goes on.
    branch: Option<(usize, AbortReason)>,
    right: VecDeque<(usize, u32)>,
    addresses: usize,
    line: Option<u64>,
    group: Option<u64>,
    arrives: Option<(u64, [bool; 2])>,
    fetch_from: u64,
    waits_for: Option<usize>,
}

/// What fetch takes next: a block, and an instruction of it.
#[derive(Clone, Copy)]
enum Way {
    Right,
    Wrong { block: u32, inside: usize, history: History },
    Nowhere,
}

impl<'a> Simulation<'a> {
    pub(crate) fn new(trace: &'a Trace, machine: &'a Machine) -> Self {
        let right = trace.runs.iter().enumerate().flat_map(|(run, &block)| {
            let length = trace.block(block).unwrap().instructions.len();
            (0..u32::try_from(length).unwrap()).map(move |inside| (run, inside))
        });
        Self {
            trace,
            machine,
            caches: Caches::new(machine),
            predictor: Predictor::new(&machine.predictor),
            returns: ReturnStack::new(machine.predictor.return_stack),
            starts: trace.by_start(),
            flights: Vec::new(),
            stored: Vec::new(),
            way: Way::Right,
            history: History::default(),
            branch: None,
            right: right.collect(),
            addresses: 0,
            line: None,
            group: None,
            arrives: None,
            fetch_from: 0,
            waits_for: None,
        }
    }

    pub(crate) fn run(&mut self) {
        let mut cycle = 0;
        let is_open = |one: &Flight| one.abort.is_none() && one.retire.is_none();
        let mut oldest = 0;
        while !self.right.is_empty() || oldest < self.flights.len() {
            self.recover(cycle);
            self.retire(cycle, oldest);
            self.issue(cycle, oldest);
            self.map(cycle, oldest);
            self.fetch(cycle);
            let is_past = |one: &Flight| {
                let before = |at: Option<u64>| at.is_some_and(|at| at < cycle);
                one.abort.is_some() || before(one.retire) && before(one.completion)
            };
            while self.flights.get(oldest).is_some_and(is_past) {
                oldest += 1;
            }
            if self.right.is_empty() && !self.flights.iter().skip(oldest).any(is_open) {
                break;
            }
            cycle += 1;
            assert!(cycle < 100_000_000, "it does not end");
        }
    }

    /// After a wrong prediction has turned out, fetch goes back to the right way.
    fn recover(&mut self, cycle: u64) {
        if let Some(waits_for) = self.waits_for
            && self.flights[waits_for].retire.is_some_and(|at| at < cycle)
        {
            self.waits_for = None;
            (self.line, self.group) = (None, None);
        }
        let Some((branch, reason)) = self.branch else { return };
        let Some(at) = self.flights[branch].completion.filter(|&at| at < cycle) else { return };
        for wrong in self.flights.iter_mut().skip(branch + 1) {
            wrong.abort = Some((reason, at));
        }
        (self.branch, self.way, self.arrives) = (None, Way::Right, None);
        (self.line, self.group, self.fetch_from) = (None, None, cycle);
    }

    fn retire(&mut self, cycle: u64, oldest: usize) {
        let mut left = self.machine.retire.width;
        for flight in self.flights.iter_mut().skip(oldest) {
            if flight.abort.is_some() || flight.retire.is_some() {
                continue;
            }
            if left == 0 || flight.retire_ready.is_none_or(|ready| ready >= cycle) {
                break;
            }
            flight.retire = Some(cycle);
            left -= 1;
        }
    }

    fn code(&self, flight: usize) -> &Instruction {
        &self.trace.instructions[self.flights[flight].instruction as usize]
    }

    fn issue(&mut self, cycle: u64, oldest: usize) {
        let mut slots = self.machine.issue.width;
        let units = &self.machine.units;
        let mut free: HashMap<Class, u32> = HashMap::from([
            (Class::Integer, units.integer),
            (Class::Multiply, units.multiply),
            (Class::FloatAdd, units.float_add),
            (Class::FloatMultiply, units.float_multiply),
            (Class::Vector, units.vector),
            (Class::Branch(Branch::Jump), units.branch),
            (Class::Load, units.load),
            (Class::Store, units.store),
        ]);
        let mut is_divider_kept = HashMap::new();
        for flight in oldest..self.flights.len() {
            let known = &self.flights[flight];
            if known.abort.is_some() || known.issue.is_some() {
                continue;
            }
            self.note_ready(flight, oldest);
            let is_ready = self.flights[flight].ready.is_some_and(|ready| ready <= cycle);
            let code = *self.code(flight);
            let needed: Vec<Class> = match code.class {
                Class::Branch(_) => vec![Class::Branch(Branch::Jump)],
                class @ (Class::Load | Class::Store) => vec![class],
                class => vec![class],
            };
            let also = [(code.reads_memory(), Class::Load), (code.writes_memory(), Class::Store)];
            let also = also.into_iter().filter(|&(is, unit)| is && !needed.contains(&unit));
            let needed: Vec<Class> =
                needed.iter().copied().chain(also.map(|(_, unit)| unit)).collect();
            let is_division = matches!(code.class, Class::Divide | Class::FloatDivide);
            let is_divider_free = !is_division
                || !is_divider_kept.contains_key(&code.class)
                    && self.divider_is_free(code.class, flight, cycle);
            let has_units = needed.iter().all(|unit| free.get(unit).is_none_or(|&left| left > 0));
            if is_ready && slots > 0 && is_divider_free && has_units {
                self.flights[flight].issue = Some(cycle);
                slots -= 1;
                for unit in needed {
                    free.entry(unit).and_modify(|left| *left -= 1);
                }
            } else if self.machine.issue.in_order {
                // No younger one issues. Whether it is ready is noted all the same.
                slots = 0;
            }
            if is_division {
                is_divider_kept.insert(code.class, ());
            }
        }
        for flight in oldest..self.flights.len() {
            self.note_completion(flight);
        }
    }

    /// Whether all older divisions have issued, the last one long enough ago.
    fn divider_is_free(&self, class: Class, flight: usize, cycle: u64) -> bool {
        let takes = match class {
            Class::Divide => self.machine.latency.divide,
            _ => self.machine.latency.float_divide,
        };
        let older = (0..flight).rev().filter(|&one| self.flights[one].abort.is_none());
        let before = older.into_iter().take(5000).find(|&one| self.code(one).class == class);
        let issued = before.map(|one| self.flights[one].issue);
        issued.is_none_or(|issue| issue.is_some_and(|at| at + u64::from(takes) <= cycle))
    }

    fn note_ready(&mut self, flight: usize, oldest: usize) {
        let known = &self.flights[flight];
        let (Some(map), None) = (known.map, known.ready) else { return };
        let mut ready = map + 1;
        for &(producer, is_early) in &known.producers {
            let one = &self.flights[producer];
            let at = if is_early { one.issue.map(|at| at + 1) } else { one.completion };
            let Some(at) = at else { return };
            ready = ready.max(at);
        }
        if matches!(self.code(flight).class, Class::Fence | Class::SystemCall) {
            for older in self.flights[oldest..flight].iter().filter(|one| one.abort.is_none()) {
                let Some(at) = older.completion else { return };
                ready = ready.max(at);
            }
        }
        self.flights[flight].ready = Some(ready);
    }

    fn note_completion(&mut self, flight: usize) {
        let known = &self.flights[flight];
        let (Some(issue), None) = (known.issue, known.completion) else { return };
        let code = self.code(flight);
        let latency = &self.machine.latency;
        let own = match code.class {
            Class::Integer => latency.integer,
            Class::Multiply => latency.multiply,
            Class::Divide => latency.divide,
            Class::FloatAdd => latency.float_add,
            Class::FloatMultiply => latency.float_multiply,
            Class::FloatDivide => latency.float_divide,
            Class::Vector => latency.vector,
            Class::Load => 0,
            Class::Store => latency.store,
            Class::Branch(_) => latency.branch,
            Class::Fence | Class::SystemCall | Class::Other => 1,
        };
        let mut at = issue;
        if code.reads_memory() {
            at += known.loads_in;
            for &(filler, takes) in &known.fillers {
                let Some(issue) = self.flights[filler].issue else { return };
                at = at.max(issue + takes);
            }
        }
        let completion = at + u64::from(own);
        let mut retire_ready = completion;
        if code.class == Class::Load && self.machine.retire.early_loads {
            let hit = u64::from(self.machine.l1d.latency) + known.translation;
            retire_ready = completion.min(issue + hit);
        }
        let known = &mut self.flights[flight];
        (known.completion, known.retire_ready) = (Some(completion), Some(retire_ready));
    }

    fn map(&mut self, cycle: u64, oldest: usize) {
        let map = &self.machine.map;
        let mut in_flight = [0; 3];
        let mut waiting = [0; 2];
        let mut left = map.width;
        for flight in oldest..self.flights.len() {
            let one = &self.flights[flight];
            let code = self.code(flight);
            if one.abort.is_some() {
                continue;
            }
            let window = usize::from(code.class.is_float());
            let uses = [true, code.reads_memory(), code.writes_memory()];
            if one.map.is_none() {
                let sizes = [map.reorder, map.load_queue, map.store_queue];
                let has_room = (0..3).all(|queue| !uses[queue] || in_flight[queue] < sizes[queue]);
                let windows = [map.integer_window, map.float_window];
                let is_decoded = one.fetch + u64::from(map.delay) <= cycle;
                if !has_room || waiting[window] >= windows[window] || left == 0 || !is_decoded {
                    break;
                }
                left -= 1;
                self.flights[flight].map = Some(cycle);
            }
            let one = &self.flights[flight];
            if one.retire.is_none_or(|at| at >= cycle) {
                for (count, uses) in in_flight.iter_mut().zip(uses) {
                    *count += u32::from(uses);
                }
            }
            if one.issue.is_none_or(|at| at >= cycle) {
                waiting[window] += 1;
            }
        }
    }

    fn fetch(&mut self, cycle: u64) {
        let mut slot = 0;
        while cycle >= self.fetch_from && self.waits_for.is_none() {
            let Some((block, inside)) = self.next_fetched() else { break };
            let known = self.trace.block(block).unwrap();
            let before = self.trace.code(known)[..inside].iter();
            let pc = known.start + before.map(|one| u64::from(one.length)).sum::<u64>();
            let fetch = &self.machine.fetch;
            let group = Some(pc / u64::from(fetch.block_bytes));
            let queue = fetch.queue as usize;
            let mut misses = [false; 2];
            if let Some((at, found)) = self.arrives {
                if cycle < at {
                    break;
                }
                (misses, self.arrives) = (found, None);
            } else {
                if group != self.group && slot > 0 || slot == fetch.width {
                    break;
                }
                let is_queued =
                    |one: &&Flight| one.abort.is_none() && one.map.is_none_or(|map| map >= cycle);
                if self.flights.iter().rev().take(4 * queue + 800).filter(is_queued).count()
                    >= queue
                {
                    break;
                }
                let line = Some(pc / u64::from(self.machine.l1i.line_bytes));
                if line != self.line {
                    self.line = line;
                    let found = self.caches.fetch(pc);
                    misses = [found.is_cache_miss, found.is_tlb_miss];
                    if found.latency > 0 {
                        self.group = group;
                        self.arrives = Some((cycle + u64::from(found.latency), misses));
                        break;
                    }
                }
            }
            self.group = group;
            self.take(cycle, slot, block, inside, pc, misses);
            slot += 1;
        }
    }

    fn next_fetched(&self) -> Option<(u32, usize)> {
        match self.way {
            Way::Right => {
                let &(run, inside) = self.right.front()?;
                Some((self.trace.runs[run], inside as usize))
            }
            Way::Wrong { block, inside, .. } => Some((block, inside)),
            Way::Nowhere => None,
        }
    }

    fn take(
        &mut self,
        cycle: u64,
        slot: u32,
        block: u32,
        inside: usize,
        pc: u64,
        icache: [bool; 2],
    ) {
        let number = self.flights.len();
        let known = self.trace.block(block).unwrap().clone();
        let index = known.instructions.start + u32::try_from(inside).unwrap();
        let code = self.trace.instructions[index as usize];
        let is_right = matches!(self.way, Way::Right);
        let history = match self.way {
            Way::Wrong { history, .. } => history,
            _ => self.history,
        };
        let mut flight = Flight {
            instruction: index,
            slot,
            fetch: cycle,
            map: None,
            ready: None,
            issue: None,
            completion: None,
            retire_ready: None,
            retire: None,
            abort: None,
            misses: [icache[0], icache[1], false, false],
            mispredicted: false,
            history,
            producers: Vec::new(),
            fillers: Vec::new(),
            loads_in: self.machine.l1d.latency.into(),
            translation: 0,
        };
        self.add_producers(&mut flight, &code);
        self.stored.push(None);
        if is_right {
            let addresses = self.addresses..self.addresses + code.addresses();
            self.addresses = addresses.end;
            self.access(&mut flight, &code, &self.trace.addresses[addresses], number);
        }
        self.flights.push(flight);
        self.advance(cycle, block, inside, pc, &code, number);
    }

    fn add_producers(&self, flight: &mut Flight, code: &Instruction) {
        let older =
            || (0..self.flights.len()).rev().filter(|&one| self.flights[one].abort.is_none());
        for register in code.sources.iter() {
            let writes = |&one: &usize| self.code(one).destinations.contains(register);
            if let Some(producer) = older().find(writes) {
                flight.producers.push((producer, self.code(producer).early.contains(register)));
            }
        }
        if code.reads_memory() || code.writes_memory() {
            let fence = older().find(|&one| self.code(one).class == Class::Fence);
            flight.producers.extend(fence.map(|fence| (fence, false)));
        }
    }

    fn access(
        &mut self,
        flight: &mut Flight,
        code: &Instruction,
        addresses: &[u64],
        number: usize,
    ) {
        let mut missed = Vec::new();
        for &address in addresses {
            let found = self.caches.access(address);
            flight.loads_in = flight.loads_in.max(found.latency.into());
            flight.translation = flight.translation.max(found.translation.into());
            flight.misses[2] |= found.is_cache_miss;
            flight.misses[3] |= found.is_tlb_miss;
            if found.is_cache_miss {
                missed.push((address, found.latency));
            }
            if !code.reads_memory() {
                continue;
            }
            if found.mark > 0 {
                let filler = usize::try_from((found.mark >> 20) - 1).unwrap();
                flight.fillers.push((filler, found.mark & 0xf_ffff));
            }
            let stores = (0..self.flights.len())
                .rev()
                .filter(|&one| self.flights[one].abort.is_none() && self.code(one).writes_memory());
            let word = |one: &usize| self.stored[*one] == Some(address >> 3);
            let last = stores.take(self.machine.map.store_queue as usize).find(word);
            flight.producers.extend(last.map(|store| (store, false)));
        }
        for (address, latency) in missed {
            self.caches.mark(address, (number as u64 + 1) << 20 | u64::from(latency));
        }
        let stored = addresses.last().filter(|_| code.writes_memory()).map(|address| address >> 3);
        self.stored[number] = stored;
    }

    /// Moves fetch to the next instruction.
    fn advance(
        &mut self,
        cycle: u64,
        block: u32,
        inside: usize,
        pc: u64,
        code: &Instruction,
        number: usize,
    ) {
        let known = self.trace.block(block).unwrap();
        let end = self.trace.end(known);
        let is_last = inside + 1 == known.instructions.len();
        let taken_to = cycle + 1 + u64::from(self.machine.fetch.taken_bubble);
        let at = |address: u64| self.starts.get(&address).copied();
        let to = |block: Option<u32>, history| match block {
            Some(block) => Way::Wrong { block, inside: 0, history },
            None => Way::Nowhere,
        };
        if let Way::Wrong { history, .. } = self.way {
            self.way = Way::Wrong { block, inside: inside + 1, history };
            let mut is_taken = false;
            match code.class {
                Class::Branch(Branch::Conditional) => {
                    is_taken = self.predictor.direction(pc, history);
                    let next = if is_taken { known.target } else { Some(end) };
                    self.way = to(next.and_then(at), history.with(is_taken));
                }
                Class::Branch(Branch::Jump | Branch::Call) => {
                    is_taken = true;
                    self.way = to(known.target.and_then(at), history);
                }
                Class::Branch(_) | Class::SystemCall => self.way = Way::Nowhere,
                _ if is_last => self.way = to(at(end), history),
                _ => {}
            }
            if is_taken {
                (self.fetch_from, self.group) = (taken_to, None);
            }
            return;
        }
        self.right.pop_front();
        let next =
            self.right.front().map(|&(run, _)| self.trace.block(self.trace.runs[run]).unwrap());
        let next = next.map(|next| next.start).filter(|_| is_last);
        let history = self.history;
        let mut is_taken = true;
        let mut wrong = None;
        match code.class {
            Class::Branch(Branch::Conditional) => {
                let goes = next.is_some() && next == known.target && next != Some(end);
                is_taken = self.predictor.direction(pc, history);
                self.history = history.with(goes);
                if next.is_some() {
                    self.predictor.learn(pc, history, goes);
                    if goes != is_taken {
                        let to_block = if is_taken { known.target } else { Some(end) };
                        wrong = Some((to_block, history.with(is_taken), AbortReason::Direction));
                    }
                }
            }
            Class::Branch(Branch::Jump) => {}
            Class::Branch(Branch::Call) => self.returns.call(end),
            Class::Branch(Branch::Return) => {
                let predicted = self.returns.take();
                if next.is_some_and(|next| next != predicted) {
                    wrong = Some((Some(predicted), history, AbortReason::Return));
                }
            }
            Class::Branch(Branch::ComputedJump | Branch::ComputedCall) => {
                let predicted = self.predictor.target(pc, history);
                if let Some(next) = next {
                    self.predictor.learn_target(pc, history, next);
                    if predicted != Some(next) {
                        wrong = Some((predicted, history, AbortReason::Target));
                    }
                }
                if code.class == Class::Branch(Branch::ComputedCall) {
                    self.returns.call(end);
                }
            }
            Class::SystemCall => {
                self.waits_for = Some(number);
                is_taken = false;
            }
            _ => is_taken = false,
        }
        if is_taken {
            (self.fetch_from, self.group) = (taken_to, None);
        }
        if let Some((block, history, reason)) = wrong {
            self.flights[number].mispredicted = true;
            self.branch = Some((number, reason));
            self.way = to(block.and_then(at), history);
        }
    }
}

/// A time, or [`NEVER`] if an abort was earlier.
pub(crate) fn reached(at: Option<u64>, abort: Option<(AbortReason, u64)>) -> u64 {
    let until = abort.map_or(NEVER, |(_, at)| at);
    at.filter(|&at| at <= until).unwrap_or(NEVER)
}
