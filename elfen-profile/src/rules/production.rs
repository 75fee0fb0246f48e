//! The parts of productions, as the parser finds them and the engine reads them.

use serde::{Deserialize, Serialize};

use super::expression::Expression;

/// The productions that one file may have: the size of the paper's pattern table.
pub const PRODUCTIONS_MAX: usize = 32;
/// The productions of one file, with their registers.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct RuleSet {
    pub productions: Vec<Production>,
    pub(super) registers: Vec<(String, Register)>,
    /// What is done to the counters before the first instruction.
    pub(super) start: Vec<Control>,
    /// Of the random values of registers.
    pub(super) seed: u64,
}

/// One production.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Production {
    pub name: String,
    /// Pattern and condition together.
    pub matches: Expression,
    /// The same, as the file has it.
    pub text: String,
    /// What is called in front of the instruction; `None` if nothing is replaced.
    pub handler: Option<Handler>,
    pub(super) controls: Vec<Control>,
}

impl Production {
    /// Whether counters decide when it matches, so that what it collects is a sample.
    pub fn is_sampled(&self) -> bool {
        self.matches.has_flags()
    }
}

/// What a handler collects.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Handler {
    /// Which call instruction calls what.
    CallPair,
    /// The called function for a call, and for all else the function of the instruction.
    HotMethod,
    /// The memory that the instruction has used: sequences of these that repeat.
    DataStream,
}

/// What is done to a counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Control {
    Inc(usize),
    Dec(usize),
    Set(usize, Value),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Value {
    Number(u32),
    Register(usize),
}

/// A value that counters are set to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Register {
    /// As a number of 32 bits: a counter that is set to -5 overflows at the fifth increment.
    pub value: i32,
    /// Each use takes a random value from half to one and a half of it.
    pub is_random: bool,
}

impl RuleSet {
    /// Changes a register. `None` if the file has none of this name.
    pub fn with_register(mut self, name: &str, register: Register) -> Option<Self> {
        let found = self.registers.iter_mut().find(|(known, _)| known == name)?;
        found.1 = register;
        Some(self)
    }

    /// Whether a handler needs the addresses of memory accesses.
    pub fn needs_addresses(&self) -> bool {
        self.productions.iter().any(|one| one.handler == Some(Handler::DataStream))
    }

    pub fn with_seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }
}
