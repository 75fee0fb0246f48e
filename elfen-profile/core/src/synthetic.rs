//! Traces that are made in code: random ones for tests, and the loops of the paper's figures.

use rand::{Rng, RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::instruction::{Access, Branch, Class, Instruction, RegisterSet};
use crate::trace::{BlockNumber, Trace, TraceBuilder};

/// An instruction with registers.
pub fn operation(class: Class, sources: &[u8], destinations: &[u8]) -> Instruction {
    let set = |registers: &[u8]| {
        registers.iter().fold(RegisterSet::default(), |set, &register| set.with(register))
    };
    Instruction {
        sources: set(sources),
        destinations: set(destinations),
        ..Instruction::new(class)
    }
}

/// A load of eight bytes.
pub fn load(sources: &[u8], destinations: &[u8]) -> Instruction {
    let access = Access { reads: true, writes: false, bytes: 8 };
    Instruction { accesses: [Some(access), None], ..operation(Class::Load, sources, destinations) }
}

/// A store of eight bytes.
pub fn store(sources: &[u8]) -> Instruction {
    let access = Access { reads: false, writes: true, bytes: 8 };
    Instruction { accesses: [Some(access), None], ..operation(Class::Store, sources, &[]) }
}

/// A random program of `blocks` blocks, and a random way of about `instructions` instructions
/// through it.
pub fn random(seed: u64, blocks: u32, instructions: u64) -> Trace {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut builder = TraceBuilder::new("random");
    let count = blocks.max(2);
    // Blocks lie behind each other, with gaps.
    let mut code: Vec<Vec<Instruction>> = Vec::new();
    let mut starts = Vec::new();
    let mut at = 0x40_0000;
    for _ in 0..count {
        let mut body: Vec<Instruction> =
            (0..random.random_range(0..6)).map(|_| random_instruction(&mut random)).collect();
        body.push(random_last(&mut random));
        starts.push(at);
        at += body.iter().map(|one| u64::from(one.length)).sum::<u64>();
        if random.random_range(0..8) == 0 {
            at += random.random_range(0..5000);
        }
        code.push(body);
    }
    let mut targets = Vec::new();
    for (body, &start) in code.iter().zip(&starts) {
        use Branch::{Call, Conditional, Jump};
        let to = random.random_range(0..count);
        let has_target = body.last().and_then(|last| last.class.branch());
        let has_target = matches!(has_target, Some(Conditional | Jump | Call));
        // Some targets have no known code.
        let address = if random.random_range(0..20) == 0 { 1 } else { starts[to as usize] };
        let target = has_target.then_some(address);
        builder.block(start, body, target);
        targets.push(target.map(|_| to));
    }
    let mut executed = 0;
    let mut calls: Vec<u32> = Vec::new();
    let mut now = 0_u32;
    while executed < instructions {
        let body = &code[now as usize];
        executed += body.len() as u64;
        let count_of = |one: &Instruction| one.addresses();
        let addresses = body.iter().map(count_of).sum::<usize>();
        let addresses: Vec<u64> = (0..addresses).map(|_| random_address(&mut random)).collect();
        builder.run(now, &addresses);
        let after = (now + 1) % count;
        let target = targets[now as usize].unwrap_or(after);
        now = match body.last().and_then(|last| last.class.branch()) {
            None => after,
            // Each branch has a direction that it mostly takes.
            Some(Branch::Conditional) if random.random_range(0..8) == 0 => {
                if now.is_multiple_of(3) { after } else { target }
            }
            Some(Branch::Conditional) => {
                if now.is_multiple_of(3) {
                    target
                } else {
                    after
                }
            }
            Some(Branch::Jump) => target,
            Some(Branch::Call) => {
                calls.push(after);
                target
            }
            Some(Branch::ComputedCall) => {
                calls.push(after);
                (now * 7 + random.random_range(0..2)) % count
            }
            Some(Branch::ComputedJump) => (now * 5 + random.random_range(0..2)) % count,
            Some(Branch::Return) => match calls.pop() {
                Some(to) if random.random_range(0..16) > 0 => to,
                _ => random.random_range(0..count),
            },
        };
        calls.truncate(50);
    }
    builder.finish().unwrap_or_default()
}

fn random_set(random: &mut impl Rng, most: u32) -> RegisterSet {
    let count = random.random_range(0..=most);
    (0..count).fold(RegisterSet::default(), |set, _| set.with(random.random_range(0..12)))
}

fn random_address(random: &mut impl Rng) -> u64 {
    match random.random_range(0..4) {
        0 => 0x10_0000 + random.random_range(0..16) * 8,
        1 => 0x20_0000 + random.random_range(0..512) * 64,
        2 => random.random_range(0..1 << 24),
        _ => 0x10_0000 + random.random_range(0..4096),
    }
}

fn random_instruction(random: &mut impl Rng) -> Instruction {
    const BODY: [Class; 16] = [
        Class::Integer,
        Class::Integer,
        Class::Integer,
        Class::Integer,
        Class::Multiply,
        Class::Divide,
        Class::FloatAdd,
        Class::FloatMultiply,
        Class::FloatDivide,
        Class::Vector,
        Class::Load,
        Class::Load,
        Class::Store,
        Class::Other,
        Class::Integer,
        Class::Fence,
    ];
    let class = BODY[random.random_range(0..BODY.len())];
    // Fences are rare.
    let class =
        if class == Class::Fence && random.random_range(0..4) > 0 { Class::Load } else { class };
    let destinations = random_set(random, 2);
    let mut one = Instruction {
        length: random.random_range(1..=9),
        sources: random_set(random, 3),
        destinations,
        early: if random.random_range(0..6) == 0 { destinations } else { RegisterSet::default() },
        ..Instruction::new(class)
    };
    let access = |reads, writes| Some(Access { reads, writes, bytes: 8 });
    one.accesses = match class {
        Class::Load => [access(true, false), None],
        Class::Store => [access(false, true), None],
        Class::Fence | Class::Other => [None; 2],
        _ => match random.random_range(0..12) {
            0 | 1 => [access(true, false), None],
            2 => [access(true, true), None],
            3 => [access(true, false), access(false, true)],
            _ => [None; 2],
        },
    };
    one
}

fn random_last(random: &mut impl Rng) -> Instruction {
    use Branch::{Call, ComputedCall, ComputedJump, Conditional, Jump, Return};
    let class = match random.random_range(0..40) {
        0..=1 => Class::Integer,
        2..=4 => Class::Branch(Jump),
        5..=7 => Class::Branch(Call),
        8..=11 => Class::Branch(Return),
        12 => Class::Branch(ComputedJump),
        13 => Class::Branch(ComputedCall),
        14 if random.random_range(0..4) == 0 => Class::SystemCall,
        _ => Class::Branch(Conditional),
    };
    let mut one = Instruction {
        length: random.random_range(2..=6),
        sources: random_set(random, 2),
        ..Instruction::new(class)
    };
    if class == Class::Branch(Return) {
        one.accesses[0] = Some(Access { reads: true, writes: false, bytes: 8 });
    }
    one
}

/// Makes a trace of one loop. `address` gives the addresses of an iteration.
pub fn repeat(
    name: &str,
    body: &[Instruction],
    iterations: u32,
    mut addresses: impl FnMut(u32) -> Vec<u64>,
) -> Trace {
    let mut builder = TraceBuilder::new(name);
    let number = push_loop(&mut builder, 0x40_0000, body);
    for iteration in 0..iterations {
        builder.run(number, &addresses(iteration));
    }
    builder.finish().unwrap_or_default()
}

/// A block that ends with a branch to its start.
fn push_loop(builder: &mut TraceBuilder, start: u64, body: &[Instruction]) -> BlockNumber {
    let mut code = body.to_vec();
    code.push(operation(Class::Branch(Branch::Conditional), &[15], &[]));
    builder.block(start, &code, Some(start))
}

/// The program of Figure 2: a loop of one load that hits, and `nops` instructions that do nothing.
/// Without the seed, each iteration would fetch its load in the same place of a cycle.
pub fn load_and_nops(nops: u32, iterations: u32, seed: u64) -> Trace {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut builder = TraceBuilder::new("a load and nops");
    let nop = Instruction::new(Class::Other);
    let mut start = 0x40_0000;
    // The same loop at different places of a block that is fetched at once.
    let copies: Vec<BlockNumber> = (0..4)
        .map(|copy| {
            let mut body = vec![nop; copy];
            body.push(load(&[1], &[2]));
            body.extend(vec![nop; nops as usize - copy]);
            let number = push_loop(&mut builder, start, &body);
            start += 0x1000;
            number
        })
        .collect();
    for _ in 0..iterations {
        builder.run(copies[random.random_range(0..copies.len())], &[0x10_0000]);
    }
    builder.finish().unwrap_or_default()
}

/// The three loops of Figure 7, which differ in how much else runs then: a chain of loads,
/// each with the address of the next one; arithmetic in some chains; and loads that little waits
/// for. They run `iterations` times, ten times and a hundred times as often.
pub fn three_loops(iterations: u32, seed: u64) -> Trace {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut builder = TraceBuilder::new("three loops");
    let add = |from: u8, to: u8| operation(Class::Integer, &[from], &[to]);
    let multiply = |register: u8| operation(Class::Multiply, &[register], &[register]);
    let chain = vec![load(&[1], &[1]), load(&[1], &[1]), add(1, 1)];
    let arithmetic = vec![multiply(1), add(1, 2), multiply(3), add(3, 4), add(5, 5), add(6, 6)];
    let mut streams = vec![load(&[2], &[10]), load(&[3], &[11]), add(10, 12), add(11, 13)];
    streams.extend((0..11).map(|number| add(4 + number % 4, 4 + number % 4)));
    let chain = push_loop(&mut builder, 0x40_0000, &chain);
    let arithmetic = push_loop(&mut builder, 0x41_0000, &arithmetic);
    let streams = push_loop(&mut builder, 0x42_0000, &streams);
    // A list and two arrays that the second cache holds, and the first does not.
    const LINES: u64 = 8192;
    for _ in 0..iterations {
        let mut node = || 0x100_0000 + random.random_range(0..LINES) * 64;
        builder.run(chain, &[node(), node()]);
    }
    for _ in 0..u64::from(iterations) * 10 {
        builder.run(arithmetic, &[]);
    }
    for iteration in 0..u64::from(iterations) * 100 {
        let next = 0x100_0000 + iteration % (LINES / 2) * 64;
        builder.run(streams, &[next, next + LINES / 2 * 64]);
    }
    builder.finish().unwrap_or_default()
}
