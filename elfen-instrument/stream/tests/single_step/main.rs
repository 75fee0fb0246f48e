//! Goal: a block in the cache has the same effect as the original. Method: blocks that begin at
//! random instructions of real programs. A traced child steps through each of them twice, from the
//! same random registers: first through the original, then through its copy. Registers, flags,
//! memory, faults and the next address must be equal. A copy with addresses must also have appended
//! what the original's registers say; a copy with results, what is in its registers.

#[path = "../../../rewrite/tests/single_step/draw.rs"]
mod draw;
#[path = "../../../rewrite/tests/single_step/object.rs"]
mod object;
#[path = "../../../rewrite/tests/single_step/puppet.rs"]
mod puppet;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

use iced_x86::{
    Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess,
    OpKind, Register,
};

use draw::{Draw, mapped, named};
use elfen_stream::{
    Accesses, Block, Cache, Cluster, CodeMemory, Exit, Indirect, Source, Trap, layout,
};
use object::Object;
use puppet::{Outcome, Puppet};

/// Instructions per object.
fn instructions() -> usize {
    let configured = std::env::var("STEPPED_INSTRUCTIONS").ok();
    configured.map_or(20_000, |count| count.parse().expect("STEPPED_INSTRUCTIONS is a number"))
}

/// More steps than a block of 64 instructions takes, with the search of the table.
const STEPS: usize = 500;
/// Addresses take up to eighteen steps for each instruction.
const STEPS_WITH_ADDRESSES: usize = 19 * STEPS;

/// Room for addresses: enough for a block that comes round until its steps are used up.
const FREE_ADDRESSES: i32 = 2000;

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

    /// The addresses that a run has appended, in their order.
    fn addresses(&self, puppet: &Puppet) -> Vec<u64> {
        let left = self.word(puppet, layout::ADDRESSES_LEFT);
        let free = u64::try_from(FREE_ADDRESSES).unwrap();
        let from = i32::try_from(left + 1).unwrap();
        let of = |number: i32| self.word(puppet, layout::ADDRESSES + 8 * number);
        assert!(left <= free);
        (from..=FREE_ADDRESSES).rev().map(of).collect()
    }

    fn word(&self, puppet: &Puppet, at: i32) -> u64 {
        let bytes = puppet.code(self.words + u64::try_from(at).unwrap(), 8);
        u64::from_le_bytes(bytes.try_into().unwrap())
    }
}

/// The kinds of copies that are tested.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Copies {
    Counted,
    WithAddresses,
    WithResults,
}

/// The register that an instruction leaves its result in, but for the stack pointer.
fn destination(instruction: &Instruction) -> Option<Register> {
    use Mnemonic::{Div, Idiv, Imul, Mul};
    let is_pair = instruction.op_count() == 1;
    if matches!(instruction.mnemonic(), Mul | Imul | Div | Idiv) && is_pair {
        return Some(Register::RAX);
    }
    let written = InstructionInfoFactory::new().info(instruction).op0_access();
    let reads = matches!(written, OpAccess::None | OpAccess::Read | OpAccess::NoMemAccess);
    let first = (instruction.op0_kind() == OpKind::Register).then(|| instruction.op0_register());
    let whole = first.filter(|first| first.is_gpr() && !reads).map(Register::full_register);
    whole.filter(|&register| register != Register::RSP)
}

/// Whether an instruction is one whose addresses are appended.
fn are_known(instruction: &Instruction) -> bool {
    !Accesses::of(&mut InstructionInfoFactory::new(), instruction).has_others
}

/// The addresses that an instruction uses, by the operands that the decoder lists and by what it
/// does to the stack.
fn addresses(instruction: &Instruction, registers: &[u64; 16], thread_pointer: u64) -> Vec<u64> {
    let value = |register: Register, _: usize, _: usize| match register {
        Register::FS => Some(thread_pointer),
        _ if register.is_segment_register() => Some(0),
        _ => Some(registers[register.full_register().number()]),
    };
    let accesses = InstructionInfoFactory::new().info(instruction).used_memory().to_vec();
    let is_used = accesses.iter().any(|one| one.access() != OpAccess::NoMemAccess);
    let is_memory = |&operand: &u32| {
        use OpKind::{Memory, MemoryESRDI, MemorySegRDI, MemorySegRSI};
        matches!(instruction.op_kind(operand), Memory | MemoryESRDI | MemorySegRSI | MemorySegRDI)
    };
    let operands = (0..instruction.op_count()).filter(is_memory).filter(|_| is_used);
    let mut found: Vec<u64> =
        operands.filter_map(|operand| instruction.virtual_address(operand, 0, value)).collect();
    let stack = registers[Register::RSP.number()];
    match (instruction.mnemonic(), instruction.stack_pointer_increment()) {
        (Mnemonic::Leave, _) => found.push(registers[Register::RBP.number()]),
        (_, below @ ..=-1) if instruction.is_stack_instruction() => {
            found.push(stack.wrapping_add_signed(below.into()));
        }
        (_, 1..) if instruction.is_stack_instruction() => found.push(stack),
        _ => {}
    }
    found.sort_unstable();
    found
}

/// What a copy appends for the instructions that run in the original: the addresses that they use,
/// and those of one that faults; or their results.
fn expected_words(
    puppet: &mut Puppet,
    code: &[Instruction],
    mut registers: [u64; 16],
    copies: Copies,
    mut is_inside: impl FnMut(u64) -> bool,
) -> Vec<Vec<u64>> {
    registers[Register::RSP.number()] = puppet.stack_pointer();
    let mut expected = Vec::new();
    let mut at = code.first().map_or(0, Instruction::ip);
    let mut was_at = 0;
    for _ in 0..STEPS {
        let Some(one) = code.iter().find(|one| one.ip() == at) else { break };
        // Each repetition is a step. The copy notes the first one.
        let is_repeated = was_at == at && one.is_string_instruction();
        if copies == Copies::WithAddresses && !is_repeated {
            expected.push(addresses(one, &registers, puppet.thread_pointer()));
        }
        was_at = at;
        let (outcome, _) = puppet.run_while(|_| false, 1, &[]);
        let result = destination(one).filter(|_| outcome.fault.is_none());
        if copies == Copies::WithResults && one.flow_control() == FlowControl::Next {
            expected.extend(result.map(|result| vec![outcome.registers[result.number()]]));
        }
        if outcome.fault.is_some() || !is_inside(outcome.rip) {
            break;
        }
        (registers, at) = (outcome.registers, outcome.rip);
    }
    expected
}

/// Runs one block and its copy, and compares the outcomes. Returns how many instructions it had;
/// `None` if the block cannot be compared.
fn compare(
    puppet: &mut Puppet,
    object: &Object,
    start: u64,
    draw: &mut Draw,
    is_known: bool,
    copies: Copies,
) -> Option<usize> {
    let parts = Parts::of(puppet);
    let mut code = Code(object, parts.landing.clone());
    let block = Block::decode(&mut code, start)?;
    let range = block.start..block.end;
    // A system call with random registers would do harm.
    if block.instructions() == 0 || block.exit == Exit::Syscall {
        return None;
    }
    let has_addresses = copies == Copies::WithAddresses;
    if has_addresses && !block.code().iter().all(are_known) {
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

    let has_words = copies != Copies::Counted;
    let expected = if has_words {
        puppet.prepare(&registers, flags, start);
        puppet.fill_stack(returns);
        let mut was_last = start == last.ip();
        let inside = |rip: u64| {
            let ends = was_last && (rip != last.ip() || block.exit != Exit::Falls);
            was_last = rip == last.ip();
            range.contains(&rip) && !ends
        };
        let expected = expected_words(puppet, block.code(), registers, copies, inside);
        puppet.write_all(&named, &contents);
        expected
    } else {
        Vec::new()
    };
    let mut cache = match copies {
        Copies::Counted => Cache::new(parts.table, 1),
        Copies::WithAddresses => Cache::with_addresses(parts.table, 1),
        Copies::WithResults => Cache::with_results(parts.table, 1),
    };
    let mut memory = &mut *puppet;
    cache.add_cluster(parts.cluster(), parts.table, &mut memory)?;
    if !parts.has_returns(memory) {
        let returns = cache.unexpected_return()?.to_le_bytes();
        let entries = usize::try_from(layout::RETURNS_ENTRIES).ok()?;
        memory.write(parts.returns(), &returns.repeat(entries));
    }
    let entry = cache.translate(start, &mut code, &mut memory);
    // A block is not left out because of its addresses.
    let mut is_elsewhere = || {
        let mut other = Cache::new(parts.table, 1);
        other.add_cluster(parts.cluster(), parts.table, &mut memory);
        other.translate(start, &mut code, &mut memory).is_ok()
    };
    assert!(entry.is_ok() || !is_elsewhere(), "{block:x?}");
    let entry = entry.ok()?;
    let target = before.rip;
    if is_known && matches!(block.exit, Exit::Indirect(_)) && before.fault.is_none() {
        know_target(&mut cache, &mut code, target, &mut memory)?;
    }
    let is_trap = |rip: u64| cache.trap(rip).is_some();
    let known = cache.entry(target);
    let log_at = parts.words + u64::try_from(layout::LOG_AT).unwrap();
    puppet.write(log_at, &i64::from(layout::LOG).to_le_bytes());
    for (word, value) in
        [(layout::EVENTS_LEFT, layout::EVENTS_MAX - 1), (layout::ADDRESSES_LEFT, FREE_ADDRESSES)]
    {
        let at = parts.words + u64::try_from(word).unwrap();
        puppet.write(at, &i64::from(value).to_le_bytes());
    }
    puppet.prepare(&registers, flags, entry);
    puppet.fill_stack(returns);
    let inside = |rip: u64| cache.holds(rip) && !is_trap(rip) && rip != entry && Some(rip) != known;
    let steps = if has_words { STEPS_WITH_ADDRESSES } else { STEPS };
    let (mut after, is_over) = puppet.run_while(inside, steps, &named);
    puppet.write_all(&named, &contents);
    assert!(is_over, "{block:x?}");
    // The next cache begins with an empty table, and expects no returns.
    let entry = layout::RETURNS + 8 * i32::from(u16::try_from(block.end & 0xffff).unwrap());
    let unexpected = cache.unexpected_return().unwrap();
    puppet.write(parts.words + u64::try_from(entry).unwrap(), &unexpected.to_le_bytes());

    if let Some(entry) = cache.table_entry(target) {
        puppet.write(entry, &[0; 16]);
    }
    if has_words {
        let noted = parts.addresses(puppet);
        let counts = expected.iter().map(Vec::len);
        let mut rest = &noted[..];
        let mut found = Vec::new();
        for count in counts {
            let Some((one, others)) = rest.split_at_checked(count) else { break };
            let mut one = one.to_vec();
            one.sort_unstable();
            found.push(one);
            rest = others;
        }
        // The base of a thread-local address is for the host to add.
        let pointer = puppet.thread_pointer();
        let is_equal = |(one, noted): (&Vec<u64>, &Vec<u64>)| {
            one == noted || one.iter().map(|at| at.wrapping_sub(pointer)).eq(noted.iter().copied())
        };
        let equal = expected.iter().zip(&found).all(is_equal);
        let is_same = equal && rest.is_empty() && found.len() == expected.len();
        let is_stable = (0..REPETITIONS).all(|_| run_original(puppet).0 == before);
        let what = || format!("{expected:x?} {noted:x?} {block:x?} {registers:x?}");
        assert!(is_same || !is_stable, "{}", what());
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

fn test_object(path: &Path, seed: u64, copies: Copies) {
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
        match compare(&mut puppet, &object, start, &mut draw, is_known, copies) {
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
    test_object(&mapped("libc.so"), 0x5eed_0001, Copies::Counted);
}

#[test]
fn blocks_of_a_rust_program() {
    test_object(&std::env::current_exe().unwrap(), 0x5eed_0002, Copies::Counted);
}

#[test]
fn addresses_of_the_c_library() {
    test_object(&mapped("libc.so"), 0x5eed_0004, Copies::WithAddresses);
}

#[test]
fn addresses_of_a_rust_program() {
    test_object(&std::env::current_exe().unwrap(), 0x5eed_0005, Copies::WithAddresses);
}

#[test]
fn results_of_the_c_library() {
    test_object(&mapped("libc.so"), 0x5eed_0006, Copies::WithResults);
}

#[test]
fn results_of_a_rust_program() {
    test_object(&std::env::current_exe().unwrap(), 0x5eed_0007, Copies::WithResults);
}

#[test]
#[ignore = "needs GCC"]
fn blocks_of_the_c_compiler() {
    let output = Command::new("cc").arg("-print-prog-name=cc1").output().unwrap();
    let path = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
    assert!(path.is_absolute(), "needs GCC: cc has no cc1");
    test_object(&path, 0x5eed_0003, Copies::Counted);
}
