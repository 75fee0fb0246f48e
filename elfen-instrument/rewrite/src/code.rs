//! The instructions of one function.
//!
//! Read from its first byte to its last, as compilers lay them out. Where that cannot be right, as
//! the bytes do not decode or something goes to the middle of an instruction, nothing of the
//! function is used: data among code looks like that, and so does a wrong start.

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction};

use crate::effects;
use crate::flow::{self, DecodeError, Next};

/// `jmp rel32`: what is written over code.
pub const JUMP_BYTES: usize = 5;
/// No function that is worth a check is longer.
pub const MAX_BYTES: usize = 1 << 20;

/// A function, decoded and found sound.
#[derive(Clone, Debug)]
pub struct Function {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) code: Vec<Instruction>,
    /// What runs after each instruction.
    pub(crate) next: Vec<Next>,
    /// Whether somebody reads the flags as they are before each instruction.
    pub(crate) flags_live: Vec<bool>,
    /// Whether each instruction may raise a fault, for all that the function alone tells.
    pub(crate) faults: Vec<bool>,
    /// Reached from the function's start, or from where it was interrupted, by what is known to
    /// follow: these are instructions beyond doubt.
    pub(crate) reached: Vec<bool>,
    /// Addresses that direct branches of this function go to, in order.
    pub(crate) targets: Vec<u64>,
    /// It goes to an address that it computes: anywhere in it, for all that is known.
    pub(crate) jumps_anywhere: bool,
    /// It jumps out of itself: where that is another part of it, that comes back anywhere.
    pub(crate) jumps_out: bool,
}

impl Function {
    /// Decodes the bytes of a function that starts at `start`. `sample` is an address in it that
    /// was interrupted: the beginning of an instruction for certain.
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

    /// A thread was interrupted at an address, or none was: what is reached is found anew.
    pub fn set_sample(&mut self, sample: Option<u64>) -> Result<(), DecodeError> {
        let sampled = match sample {
            Some(ip) => Some(self.index(ip).ok_or(DecodeError::SampleInside(ip))?),
            None => None,
        };
        self.reached = flow::reached(&self.next, sampled);
        Ok(())
    }

    /// Its first address, and the one behind its last.
    pub fn range(&self) -> core::ops::Range<u64> {
        self.start..self.end
    }

    /// Whether it names an address in a range: by a jump, a call, or by computing it.
    pub fn refers_into(&self, range: &core::ops::Range<u64>) -> bool {
        let first = self.targets.partition_point(|&target| target < range.start);
        self.targets.get(first).is_some_and(|target| range.contains(target))
    }

    /// Which instruction begins at an address.
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
