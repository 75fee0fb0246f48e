//! Where an event counter says that an event was: its interrupt comes some cycles later, at the
//! oldest instruction that has not retired (Figure 2).

use std::collections::{BTreeMap, VecDeque};

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::machine::Machine;
use crate::pipeline::{Fetched, Totals, run};
use crate::trace::Trace;

/// More than an event can be ahead of the oldest instruction.
const KEPT: usize = 8192;

/// How many instructions behind the one with the event the interrupt was.
pub type Skid = BTreeMap<i64, u64>;

/// Counts events of retired instructions, and interrupts after each overflow. `event` gives the
/// cycle of the event of an instruction, if it has one.
#[derive(Debug)]
pub struct EventCounter<E> {
    event: E,
    every: u64,
    /// Cycles from an overflow to its interrupt.
    delay: u64,
    left: u64,
    random: Xoshiro256PlusPlus,
    /// Number and retirement of the last instructions.
    retired: VecDeque<(i64, u64)>,
    count: i64,
    pending: Vec<(i64, u64)>,
    pub skid: Skid,
}

impl<E: Fn(&Fetched) -> Option<u64>> EventCounter<E> {
    pub fn new(event: E, every: u64, delay: u64, seed: u64) -> Self {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
        let left = random.random_range(1..=every.max(1) * 2 - 1);
        Self {
            event,
            every: every.max(1),
            delay,
            left,
            random,
            retired: VecDeque::new(),
            count: 0,
            pending: Vec::new(),
            skid: Skid::new(),
        }
    }

    /// Looks at the next instruction in the order of fetch.
    pub fn see(&mut self, fetched: &Fetched) {
        if fetched.abort.is_some() {
            return;
        }
        let (number, retire) = (self.count, fetched.times.retire);
        self.count += 1;
        if self.retired.len() == KEPT {
            self.retired.pop_front();
        }
        self.retired.push_back((number, retire));
        let skid = &mut self.skid;
        self.pending.retain(|&(cause, interrupt)| {
            let is_there = retire >= interrupt;
            if is_there {
                *skid.entry(number - cause).or_default() += 1;
            }
            !is_there
        });
        let Some(event) = (self.event)(fetched) else { return };
        self.left -= 1;
        if self.left > 0 {
            return;
        }
        self.left = self.random.random_range(1..=self.every * 2 - 1);
        let interrupt = event + self.delay;
        // An event of an instruction that overtakes others may be noticed at one before it.
        let oldest = self.retired.partition_point(|&(_, retire)| retire < interrupt);
        match self.retired.get(oldest) {
            Some(&(oldest, _)) => *self.skid.entry(oldest - number).or_default() += 1,
            None => self.pending.push((number, interrupt)),
        }
    }
}

/// The skid of a counter of accesses to the data cache.
pub fn data_references(
    trace: &Trace,
    machine: &Machine,
    every: u64,
    delay: u64,
    seed: u64,
) -> (Skid, Totals) {
    let uses = |one: &Fetched| {
        trace.instructions.get(one.instruction as usize).is_some_and(|code| code.addresses() > 0)
    };
    let issue = |one: &Fetched| uses(one).then_some(one.times.issue);
    let mut counter = EventCounter::new(issue, every, delay, seed);
    let totals = run(trace, machine, |fetched| counter.see(fetched));
    (counter.skid, totals)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic::{load_and_nops, random};

    fn spread(skid: &Skid) -> i64 {
        let all: Vec<i64> =
            skid.iter().flat_map(|(&at, &count)| (0..count).map(move |_| at)).collect();
        all[all.len() * 9 / 10] - all[all.len() / 10]
    }

    /// Goal: as in Figure 2, no counter names the load, and the interrupts of a core that issues in
    /// order come soon after it.
    #[test]
    fn a_counter_does_not_name_its_instruction() {
        let trace = load_and_nops(300, 4000, 1);
        for (name, delay, most) in [("21164", 6, 16), ("21264", 20, 100)] {
            let machine = Machine::built_in(name).unwrap();
            let (found, _) = data_references(&trace, &machine, 7, delay, 1);
            assert!(found.values().sum::<u64>() > 200, "{found:?}");
            assert!(found.keys().all(|at| (1..most).contains(at)), "{found:?}");
        }
    }

    /// Goal: in a program with misses, the interrupts of a core that issues out of order are spread
    /// more widely.
    #[test]
    fn an_out_of_order_core_spreads_the_interrupts() {
        let trace = random(5, 200, 200_000);
        let of = |name: &str| {
            let machine = Machine::built_in(name).unwrap();
            spread(&data_references(&trace, &machine, 50, 6, 1).0)
        };
        assert!(of("21164") * 2 < of("wide"), "{} {}", of("21164"), of("wide"));
    }
}
