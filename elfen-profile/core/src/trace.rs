//! A trace: the blocks of a program's code, and the way of one thread through them.

use std::collections::HashMap;
use std::ops::Range;

use crate::instruction::{Branch, Class, Instruction};

/// Number of a block in [`Trace::blocks`].
pub type BlockNumber = u32;

/// A file that code belongs to.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct CodeFile {
    pub path: String,
    /// Hexadecimal; empty if the file has none.
    pub build_id: String,
}

/// Instructions that run one after the other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Block {
    /// Address of the first instruction.
    pub start: u64,
    /// Number of the file, and the offset there.
    pub place: Option<(u32, u64)>,
    /// Its instructions in [`Trace::instructions`].
    pub instructions: Range<u32>,
    /// Where the branch at its end leads to, if the code says so.
    pub target: Option<u64>,
}

/// A recorded or made trace.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Trace {
    /// The program and its arguments.
    pub program: Vec<String>,
    pub files: Vec<CodeFile>,
    /// Also blocks that did not run: fetch may go there after a wrong prediction.
    pub blocks: Vec<Block>,
    /// Instructions of all blocks.
    pub instructions: Vec<Instruction>,
    /// The blocks that ran, in their order.
    pub runs: Vec<BlockNumber>,
    /// An address for each access of each instruction that ran, in their order.
    pub addresses: Vec<u64>,
    /// Instructions that the program executed before the trace begins.
    pub skipped: u64,
    /// Executions of instructions that use memory at addresses that the trace does not hold.
    pub untraced_accesses: u64,
}

/// Why blocks and runs do not make a trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TraceFault {
    #[error("block {0} has no instructions, or others than the trace")]
    Instructions(BlockNumber),
    #[error("block {0} has a branch that is not at its end")]
    Branch(BlockNumber),
    #[error("block {0} ends behind the last address")]
    Address(BlockNumber),
    #[error("block {0} belongs to a file that the trace does not have")]
    File(BlockNumber),
    #[error("block {0} ran, but does not exist")]
    Run(BlockNumber),
    #[error("the blocks that ran have {expected} addresses, and the trace has {found}")]
    Addresses { expected: u64, found: u64 },
}

impl Trace {
    pub fn block(&self, number: BlockNumber) -> Option<&Block> {
        self.blocks.get(number as usize)
    }

    /// The instructions of a block.
    pub fn code(&self, block: &Block) -> &[Instruction] {
        let Range { start, end } = block.instructions;
        self.instructions.get(start as usize..end as usize).unwrap_or(&[])
    }

    /// The address behind the last instruction of a block.
    pub fn end(&self, block: &Block) -> u64 {
        let bytes: u64 = self.code(block).iter().map(|one| u64::from(one.length)).sum();
        block.start.wrapping_add(bytes)
    }

    /// How many instructions ran.
    pub fn executed(&self) -> u64 {
        let length =
            |&run: &u32| self.block(run).map_or(0, |block| block.instructions.len() as u64);
        self.runs.iter().map(length).sum()
    }

    /// Checks all that the model relies on.
    pub fn check(&self) -> Result<(), TraceFault> {
        let mut addresses = Vec::with_capacity(self.blocks.len());
        for (number, block) in (0..).zip(&self.blocks) {
            let Range { start, end } = block.instructions;
            let code = self.instructions.get(start as usize..end as usize);
            let code = code.filter(|code| !code.is_empty());
            let (last, body) =
                code.and_then(<[_]>::split_last).ok_or(TraceFault::Instructions(number))?;
            let leaves = |one: &Instruction| one.class.branch().is_some();
            if body.iter().any(leaves) || block.target.is_some() && !leaves(last) {
                return Err(TraceFault::Branch(number));
            }
            let bytes: u64 = code.unwrap_or(&[]).iter().map(|one| u64::from(one.length)).sum();
            block.start.checked_add(bytes).ok_or(TraceFault::Address(number))?;
            if block.place.is_some_and(|(file, _)| self.files.len() <= file as usize) {
                return Err(TraceFault::File(number));
            }
            let count: usize = code.unwrap_or(&[]).iter().map(Instruction::addresses).sum();
            addresses.push(count as u64);
        }
        let mut expected = 0;
        for &run in &self.runs {
            expected += addresses.get(run as usize).ok_or(TraceFault::Run(run))?;
        }
        let found = self.addresses.len() as u64;
        if expected == found { Ok(()) } else { Err(TraceFault::Addresses { expected, found }) }
    }

    /// The block that begins at each address. If several do, the last one that ran counts, because
    /// a library may have replaced another.
    pub fn by_start(&self) -> HashMap<u64, BlockNumber> {
        let mut ran = vec![false; self.blocks.len()];
        for &run in &self.runs {
            if let Some(ran) = ran.get_mut(run as usize) {
                *ran = true;
            }
        }
        let mut found: HashMap<u64, BlockNumber> = HashMap::new();
        for (number, block) in (0..).zip(&self.blocks) {
            let known = found.entry(block.start).or_insert(number);
            let length = |number: BlockNumber| {
                let ran = ran.get(number as usize).copied().unwrap_or(false);
                (ran, self.block(number).map_or(0, |one| one.instructions.len()))
            };
            // A longer block tells more of what fetch finds there.
            if length(number) >= length(*known) {
                *known = number;
            }
        }
        found
    }
}

/// Makes traces by hand.
#[derive(Debug, Default)]
pub struct TraceBuilder {
    trace: Trace,
}

impl TraceBuilder {
    pub fn new(name: &str) -> Self {
        Self { trace: Trace { program: vec![name.to_owned()], ..Trace::default() } }
    }

    /// Adds a block at an address.
    pub fn block(&mut self, start: u64, code: &[Instruction], target: Option<u64>) -> BlockNumber {
        let count = |length: usize| u32::try_from(length).unwrap_or(u32::MAX);
        let first = count(self.trace.instructions.len());
        self.trace.instructions.extend(code);
        let instructions = first..count(self.trace.instructions.len());
        self.trace.blocks.push(Block { start, place: None, instructions, target });
        count(self.trace.blocks.len() - 1)
    }

    /// Runs a block with an address for each of its accesses.
    pub fn run(&mut self, block: BlockNumber, addresses: &[u64]) {
        self.trace.runs.push(block);
        self.trace.addresses.extend(addresses);
    }

    pub fn finish(self) -> Result<Trace, TraceFault> {
        self.trace.check()?;
        Ok(self.trace)
    }
}

/// Whether a block ends by going on at its end, if its branch is not taken.
pub(crate) fn falls(class: Class) -> bool {
    match class.branch() {
        None | Some(Branch::Conditional) => true,
        Some(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instruction::Access;

    fn load() -> Instruction {
        let access = Access { reads: true, writes: false, bytes: 8 };
        Instruction { accesses: [Some(access), None], ..Instruction::new(Class::Load) }
    }

    #[test]
    fn a_trace_is_checked() {
        let jump = Instruction::new(Class::Branch(Branch::Jump));
        let build = |code: &[Instruction], target, addresses: &[u64]| {
            let mut builder = TraceBuilder::new("test");
            let block = builder.block(0x1000, code, target);
            builder.run(block, addresses);
            builder.finish().map(|trace| trace.executed())
        };
        assert_eq!(build(&[load(), jump], Some(0x1000), &[8]), Ok(2));
        let expected = TraceFault::Addresses { expected: 1, found: 2 };
        assert_eq!(build(&[load()], None, &[8, 8]), Err(expected));
        assert_eq!(build(&[jump, load()], None, &[8]), Err(TraceFault::Branch(0)));
        assert_eq!(build(&[load()], Some(0x1000), &[8]), Err(TraceFault::Branch(0)));
        assert_eq!(build(&[], None, &[]), Err(TraceFault::Instructions(0)));
        let mut builder = TraceBuilder::new("test");
        builder.run(3, &[]);
        assert_eq!(builder.finish().unwrap_err(), TraceFault::Run(3));
        let mut builder = TraceBuilder::new("test");
        builder.block(u64::MAX - 2, &[jump], None);
        assert_eq!(builder.finish().unwrap_err(), TraceFault::Address(0));
    }

    #[test]
    fn the_block_that_ran_is_found_at_an_address() {
        let mut builder = TraceBuilder::new("test");
        let old = builder.block(0x1000, &[Instruction::new(Class::Other)], None);
        let _other = builder.block(0x1000, &[Instruction::new(Class::Integer); 9], None);
        builder.run(old, &[]);
        assert_eq!(builder.finish().unwrap().by_start()[&0x1000], old);
    }
}
