//! Goal: a block in the cache has the same effect as the original. Method: blocks that begin at
//! random instructions of real programs. A traced child steps through each of them twice, from the
//! same random registers: first through the original, then through its copy. Registers, flags,
//! memory, faults and the next address must be equal.

#[path = "../../../rewrite/tests/single_step/draw.rs"]
mod draw;
#[path = "../../../rewrite/tests/single_step/object.rs"]
mod object;
#[path = "../../../rewrite/tests/single_step/puppet.rs"]
mod puppet;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

use iced_x86::{Decoder, DecoderOptions};

use draw::{Draw, mapped, named};
use elfen_stream::{Block, Cache, Cluster, CodeMemory, Exit, Indirect, Source, Trap, layout};
use object::Object;
use puppet::{Outcome, Puppet};

/// Instructions per object.
fn instructions() -> usize {
    let configured = std::env::var("STEPPED_INSTRUCTIONS").ok();
    configured.map_or(20_000, |count| count.parse().expect("STEPPED_INSTRUCTIONS is a number"))
}

/// More steps than a block of 64 instructions takes, with the search of the table.
const STEPS: usize = 500;

/// Runs of a block that show whether it always behaves alike.
const REPETITIONS: usize = 10;

/// The code of an object, and memory full of `nop`: the stack is full of addresses of the latter.
struct Code<'a>(&'a Object, Range<u64>);

static NOPS: [u8; 64] = [0x90; 64];

impl Source for Code<'_> {
    fn code(&mut self, at: u64) -> Option<(u32, &[u8])> {
        if self.1.contains(&at) {
            return Some((1, &NOPS));
        }
        let held = |one: &&object::Segment| {
            (one.address..one.address + one.bytes.len() as u64).contains(&at)
        };
        let segment = self.0.segments.iter().find(held)?;
        Some((0, &segment.bytes[usize::try_from(at - segment.address).unwrap()..]))
    }
}

impl CodeMemory for &mut Puppet {
    fn write(&mut self, at: u64, bytes: &[u8]) {
        Puppet::write(self, at, bytes);
    }
}

/// The parts of the puppet's memory.
struct Parts {
    words: u64,
    table: u64,
    code: u64,
    /// Where returns go.
    landing: Range<u64>,
}

impl Parts {
    fn of(puppet: &Puppet) -> Self {
        let words = puppet.near.space().next_multiple_of(4096);
        let code = words + 0x10_0000;
        let table = code + 0x8_0000;
        let landing = table + Cache::TABLE_BYTES;
        Self { words, code, table, landing: landing + 0x1000..landing + 0x1_0000 }
    }

    fn cluster(&self) -> Cluster {
        Cluster {
            hot: self.code..self.code + 0x3_0000,
            cold: self.code + 0x3_0000..self.code + 0x8_0000,
        }
    }

    fn returns(&self) -> u64 {
        self.words + u64::try_from(layout::RETURNS).unwrap()
    }

    fn has_returns(&self, puppet: &Puppet) -> bool {
        self.word(puppet, layout::RETURNS) != 0
    }

    fn word(&self, puppet: &Puppet, at: i32) -> u64 {
        let bytes = puppet.code(self.words + u64::try_from(at).unwrap(), 8);
        u64::from_le_bytes(bytes.try_into().unwrap())
    }
}

/// Runs one block and its copy, and compares the outcomes. Returns how many instructions it had;
/// `None` if the block cannot be compared.
fn compare(
    puppet: &mut Puppet,
    object: &Object,
    start: u64,
    draw: &mut Draw,
    is_known: bool,
) -> Option<usize> {
    let parts = Parts::of(puppet);
    let mut code = Code(object, parts.landing.clone());
    let block = Block::decode(&mut code, start)?;
    let range = block.start..block.end;
    // A system call with random registers would do harm.
    if block.instructions() == 0 || block.exit == Exit::Syscall {
        return None;
    }
    let bytes = puppet.code(start, usize::try_from(block.end - start).ok()?);
    let last = Decoder::with_ip(64, &bytes, start, DecoderOptions::NONE).iter().last()?;
    let named = named(&bytes, start, puppet.thread_pointer())?;
    let contents: Vec<Vec<u8>> = named.iter().map(|&named| puppet.named(named)).collect();
    let registers = std::array::from_fn(|_| draw.word());
    let flags = draw.next();
    puppet.set_gs_base(parts.words);
    puppet.returns = block.exit == Exit::Indirect(Indirect::Return { pops: 0 });
    let returns = parts.landing.start + draw.next() % 0xf000;
    let run_original = |puppet: &mut Puppet| {
        puppet.prepare(&registers, flags, start);
        puppet.fill_stack(returns);
        let mut was_last = start == last.ip();
        let inside = |rip: u64| {
            let ends = was_last && (rip != last.ip() || block.exit != Exit::Falls);
            was_last = rip == last.ip();
            range.contains(&rip) && !ends
        };
        let outcome = puppet.run_while(inside, STEPS, &named);
        puppet.write_all(&named, &contents);
        outcome
    };
    let (before, is_over) = run_original(puppet);
    // The host handles computed branches to addresses that no program can have.
    let is_far = before.fault.is_some() && matches!(block.exit, Exit::Indirect(_));
    if !is_over || is_far {
        return None;
    }

    let mut cache = Cache::new(parts.table, 1);
    let mut memory = &mut *puppet;
    cache.add_cluster(parts.cluster(), parts.table, &mut memory)?;
    if !parts.has_returns(memory) {
        let returns = cache.unexpected_return()?.to_le_bytes();
        let entries = usize::try_from(layout::RETURNS_ENTRIES).ok()?;
        memory.write(parts.returns(), &returns.repeat(entries));
    }
    let entry = cache.translate(start, &mut code, &mut memory).ok()?;
    let target = before.rip;
    if is_known && matches!(block.exit, Exit::Indirect(_)) && before.fault.is_none() {
        know_target(&mut cache, &mut code, target, &mut memory)?;
    }
    let is_trap = |rip: u64| cache.trap(rip).is_some();
    let known = cache.entry(target);
    let log_at = parts.words + u64::try_from(layout::LOG_AT).unwrap();
    puppet.write(log_at, &i64::from(layout::LOG).to_le_bytes());
    puppet.prepare(&registers, flags, entry);
    puppet.fill_stack(returns);
    let inside = |rip: u64| cache.holds(rip) && !is_trap(rip) && rip != entry && Some(rip) != known;
    let (mut after, is_over) = puppet.run_while(inside, STEPS, &named);
    puppet.write_all(&named, &contents);
    assert!(is_over, "{block:x?}");
    // The next cache begins with an empty table, and expects no returns.
    let entry = layout::RETURNS + 8 * i32::from(u16::try_from(block.end & 0xffff).unwrap());
    let unexpected = cache.unexpected_return().unwrap();
    puppet.write(parts.words + u64::try_from(entry).unwrap(), &unexpected.to_le_bytes());

    if let Some(entry) = cache.table_entry(target) {
        puppet.write(entry, &[0; 16]);
    }
    put_back(&cache, &parts, puppet, &mut after);
    let compared = match cache.blocks()[0].changes_flags {
        true => Outcome::without_flags,
        false => Outcome::whole,
    };
    let what = || format!("{block:x?}, registers {registers:x?}, flags {flags:x}");
    if compared(&before) != compared(&after) {
        // It may store through pointers that the object's data hold, to memory that is not
        // restored: such a block does not always behave like itself.
        let mut is_like_itself = || compared(&run_original(puppet).0) == compared(&before);
        let is_stable = (0..REPETITIONS).all(|_| is_like_itself());
        assert!(!is_stable, "{before:x?} {after:x?}, {}", what());
        return None;
    }
    Some(block.instructions())
}

/// Makes a target known to the cache by one of the two ways.
fn know_target(
    cache: &mut Cache,
    code: &mut Code<'_>,
    target: u64,
    memory: &mut &mut Puppet,
) -> Option<()> {
    if cache.translate(target, code, memory).is_err() {
        return Some(());
    }
    if target & 1 == 0 || cache.block_of_site(0).is_none() {
        cache.enter_table(target, memory)
    } else {
        assert!(cache.promote(0, target, memory));
        Some(())
    }
}

/// Translates the state back, as the host does.
fn put_back(cache: &Cache, parts: &Parts, puppet: &Puppet, outcome: &mut Outcome) {
    let rip = outcome.rip;
    if outcome.fault.is_some() {
        let original = cache.original(rip);
        let original = original
            .unwrap_or_else(|| panic!("{rip:x} {:x?} {:x?}", cache.blocks(), puppet.code(rip, 16)));
        if original.rcx_saved {
            outcome.registers[puppet::RCX] = parts.word(puppet, layout::SAVED_RCX);
        }
        return;
    }
    outcome.rip = match cache.trap(rip) {
        Some(Trap::Enter { target }) => target,
        Some(Trap::Unknown) => {
            let target = outcome.registers[puppet::RCX];
            outcome.registers[puppet::RCX] = parts.word(puppet, layout::SAVED_RCX);
            outcome.registers[puppet::RCX + 1] = parts.word(puppet, layout::SAVED_RDX);
            target
        }
        Some(other) => panic!("{other:?}"),
        None => cache.original(rip).map_or(rip, |original| original.at),
    };
}

fn test_object(path: &Path, seed: u64) {
    let object = Object::read(path).unwrap_or_else(|| panic!("{}", path.display()));
    let mut puppet = Puppet::start(&object);
    let mut draw = Draw(seed);
    let (mut tested, mut blocks, mut computed) = (0, 0, 0);
    let wanted = instructions();
    let mut refused = 0;
    while tested < wanted {
        let frame = object.functions[draw.below(object.functions.len())];
        let Some(bytes) = object.bytes(frame.start, frame.bytes) else { continue };
        let starts: Vec<u64> = Decoder::with_ip(64, bytes, frame.start, DecoderOptions::NONE)
            .iter()
            .map(|one| one.ip())
            .collect();
        if starts.is_empty() {
            continue;
        }
        let start = starts[draw.below(starts.len())];
        let is_known = draw.next() & 1 == 0;
        match compare(&mut puppet, &object, start, &mut draw, is_known) {
            Some(instructions) => {
                tested += instructions;
                blocks += 1;
                let block = Block::decode(&mut Code(&object, 0..0), start).unwrap();
                let is_return = matches!(block.exit, Exit::Indirect(Indirect::Return { .. }));
                computed += usize::from(is_return);
            }
            None => refused += 1,
        }
        assert!(refused < 1000 + 10 * tested, "{}: few blocks run", path.display());
    }
    println!("{}: {tested} instructions, {blocks} blocks, {computed} return", path.display());
    assert!(computed > 20);
}

#[test]
fn blocks_of_the_c_library() {
    test_object(&mapped("libc.so"), 0x5eed_0001);
}

#[test]
fn blocks_of_a_rust_program() {
    test_object(&std::env::current_exe().unwrap(), 0x5eed_0002);
}

#[test]
#[ignore = "needs GCC"]
fn blocks_of_the_c_compiler() {
    let output = Command::new("cc").arg("-print-prog-name=cc1").output().unwrap();
    let path = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
    assert!(path.is_absolute(), "needs GCC: cc has no cc1");
    test_object(&path, 0x5eed_0003);
}
