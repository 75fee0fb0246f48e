//! Decodes the instructions of one function.
//!
//! Compilers lay a function out as one run of instructions, and it is decoded as such. The whole
//! function is rejected if some bytes do not decode, or if a branch goes into the middle of an
//! instruction. Such a function contains data, or its start is wrong.

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction};

use crate::effects;
use crate::flow::{self, DecodeError, Next};

/// The length of `jmp rel32`, which is written over code.
pub const JUMP_BYTES: usize = 5;
/// Longer functions are not worth a check.
pub const MAX_BYTES: usize = 1 << 20;

/// A decoded function that passed all plausibility tests.
#[derive(Clone, Debug)]
pub struct Function {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) code: Vec<Instruction>,
    /// What can run after each instruction.
    pub(crate) next: Vec<Next>,
    /// Whether the flags before each instruction are read, by it or by later code.
    pub(crate) flags_live: Vec<bool>,
    /// Whether each instruction may raise a fault, as far as the function itself shows.
    pub(crate) faults: Vec<bool>,
    /// Whether each instruction can be reached from the start of the function or from the sample.
    /// Only these bytes certainly are instructions.
    pub(crate) reached: Vec<bool>,
    /// Addresses that this function refers to, in order.
    pub(crate) targets: Vec<u64>,
    /// It has computed jumps, which may go to any of its instructions.
    pub(crate) jumps_anywhere: bool,
    /// It jumps out of itself, possibly to another part of itself, which may come back anywhere.
    pub(crate) jumps_out: bool,
}

impl Function {
    /// Decodes a function that starts at `start`. `sample` is an address in it at which a thread
    /// was interrupted, and so certainly the start of an instruction.
    pub fn decode(bytes: &[u8], start: u64, sample: Option<u64>) -> Result<Self, DecodeError> {
        let end = u64::try_from(bytes.len()).ok().and_then(|bytes| start.checked_add(bytes));
        let end = end.filter(|_| !bytes.is_empty() && bytes.len() <= MAX_BYTES);
        let end = end.ok_or(DecodeError::Length)?;
        let code = instructions(bytes, start)?;
        let next = flow::next(&code, start..end)?;
        let mut function = Self {
            start,
            end,
            flags_live: effects::live_flags(&code, &next),
            faults: effects::faults(&code),
            reached: Vec::new(),
            targets: flow::targets(&code),
            jumps_anywhere: next.iter().any(|next| next.is_unknown),
            jumps_out: flow::jumps_out(&code, &(start..end)),
            code,
            next,
        };
        function.set_sample(sample)?;
        Ok(function)
    }

    /// Replaces the sample, and computes again which instructions are reached.
    pub fn set_sample(&mut self, sample: Option<u64>) -> Result<(), DecodeError> {
        let sampled = match sample {
            Some(ip) => Some(self.index(ip).ok_or(DecodeError::SampleInside(ip))?),
            None => None,
        };
        self.reached = flow::reached(&self.next, sampled);
        Ok(())
    }

    /// The first address, and the address after the last.
    pub fn range(&self) -> core::ops::Range<u64> {
        self.start..self.end
    }

    /// Whether the function refers to an address in a range by a jump, a call or an address
    /// computation.
    pub fn refers_into(&self, range: &core::ops::Range<u64>) -> bool {
        let first = self.targets.partition_point(|&target| target < range.start);
        self.targets.get(first).is_some_and(|target| range.contains(target))
    }

    /// The index of the instruction that begins at an address.
    pub(crate) fn index(&self, address: u64) -> Option<usize> {
        self.code.binary_search_by_key(&address, Instruction::ip).ok()
    }
}

fn instructions(bytes: &[u8], start: u64) -> Result<Vec<Instruction>, DecodeError> {
    let decoder = Decoder::with_ip(64, bytes, start, DecoderOptions::NONE);
    let mut code = Vec::with_capacity(bytes.len() / 4);
    for instruction in decoder {
        if instruction.is_invalid() {
            return Err(DecodeError::NoInstruction(instruction.ip()));
        }
        if instruction.flow_control() == FlowControl::XbeginXabortXend {
            return Err(DecodeError::Transactions);
        }
        code.push(instruction);
    }
    Ok(code)
}
