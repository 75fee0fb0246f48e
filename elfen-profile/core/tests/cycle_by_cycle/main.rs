//! Goal: the one pass of the model gives the same times as a simulation cycle by cycle.
//! Method: random programs on random cores, each instruction compared.

mod simulation;

use elfen_core_model::machine::Machine;
use elfen_core_model::pipeline::{self, Fetched, Times};
use elfen_core_model::synthetic::random;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use simulation::{Simulation, reached};

const INSTRUCTIONS: u64 = 10_000;

/// A core with small queues and caches, so that each of them fills.
fn random_machine(seed: u64) -> Machine {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let name = ["21264", "21164", "wide"][random.random_range(0..3)];
    let mut machine = Machine::built_in(name).unwrap();
    let mut small = |most: u32| random.random_range(1..=most);
    machine.fetch.width = small(6);
    machine.fetch.queue = small(24);
    machine.fetch.block_bytes = 1 << small(6);
    machine.fetch.taken_bubble = small(3) - 1;
    machine.map.width = small(5);
    machine.map.delay = small(6);
    machine.map.reorder = small(60);
    machine.map.load_queue = small(16);
    machine.map.store_queue = small(16);
    machine.map.integer_window = small(20);
    machine.map.float_window = small(10);
    machine.issue.width = small(5);
    machine.units.integer = small(4);
    machine.units.load = small(2);
    machine.units.store = small(2);
    machine.latency.branch = small(5);
    machine.latency.divide = small(20);
    machine.retire.width = small(6);
    machine.retire.early_loads = small(2) == 1;
    machine.memory_latency = 80 + small(100);
    machine.l1i.bytes = 64 << small(6);
    machine.l1i.ways = 1;
    machine.l1i.line_bytes = 64;
    machine.l1i.latency = small(2) - 1;
    machine.l1d.bytes = 128 << small(5);
    machine.l1d.ways = 2;
    machine.l1d.line_bytes = 64;
    machine.l2.bytes = 4096 << small(5);
    machine.l2.ways = 4;
    machine.itlb.entries = 4;
    machine.itlb.ways = 4;
    machine.dtlb.entries = 8;
    machine.dtlb.ways = 4;
    machine.check().unwrap();
    machine
}

#[test]
fn one_pass_gives_the_times_of_a_simulation() {
    let mut aborted = 0;
    let mut stages = [0; 3];
    for seed in 0..12 {
        let trace = random(seed, 150, INSTRUCTIONS);
        // The cores themselves, too.
        let machine = match seed {
            0 => Machine::built_in("21264").unwrap(),
            1 => Machine::built_in("wide").unwrap(),
            2 => Machine::built_in("21164").unwrap(),
            _ => random_machine(seed),
        };
        let mut found: Vec<Fetched> = Vec::new();
        let totals = pipeline::run(&trace, &machine, |fetched| found.push(*fetched));
        let mut simulation = Simulation::new(&trace, &machine);
        simulation.run();
        for (number, (fast, slow)) in found.iter().zip(&simulation.flights).enumerate() {
            let abort = slow.abort;
            let times = Times {
                fetch: slow.fetch,
                map: reached(slow.map, abort),
                ready: reached(slow.ready, abort),
                issue: reached(slow.issue, abort),
                completion: reached(slow.completion, abort),
                retire_ready: reached(slow.retire_ready, abort),
                retire: reached(slow.retire, abort),
            };
            let expected = (slow.instruction, slow.slot, times, abort, slow.history);
            let actual = (fast.instruction, fast.slot, fast.times, fast.abort, fast.history);
            assert_eq!(actual, expected, "seed {seed}, instruction {number}: {fast:?}");
            let events = fast.events;
            let misses =
                [events.icache_miss, events.itlb_miss, events.dcache_miss, events.dtlb_miss];
            assert_eq!((misses, events.mispredicted), (slow.misses, slow.mispredicted));
            assert_eq!(fast.number, number as u64);
            let is_seen = [times.map, times.ready, times.issue].map(|at| at != pipeline::NEVER);
            for (count, is_seen) in stages.iter_mut().zip(is_seen) {
                *count += u32::from(abort.is_some() && is_seen);
            }
        }
        assert_eq!(found.len(), simulation.flights.len(), "seed {seed}");
        assert_eq!(totals.retired, trace.executed());
        aborted += totals.aborted;
    }
    // Aborted instructions that came to each stage were among them.
    assert!(aborted > 5000 && stages.iter().all(|&count| count > 500), "{aborted} {stages:?}");
}
