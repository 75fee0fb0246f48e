//! What the model knows of an instruction: not what it computes, but what it waits for.

use serde::{Deserialize, Serialize};

/// Which unit executes an instruction, and for how long.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    Integer,
    Multiply,
    Divide,
    FloatAdd,
    FloatMultiply,
    FloatDivide,
    /// Integer operations on vectors.
    Vector,
    /// Only moves from memory to a register.
    Load,
    /// Only moves from a register to memory.
    Store,
    Branch(Branch),
    /// Waits for all older instructions. Younger ones that use memory wait for it.
    Fence,
    /// Waits for all older instructions. Fetch waits until it has retired.
    SystemCall,
    /// Takes no unit.
    Other,
}

/// How an instruction chooses the next one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Branch {
    Conditional,
    Jump,
    Call,
    Return,
    ComputedJump,
    ComputedCall,
}

impl Class {
    /// All classes, by their numbers in a file.
    pub const ALL: [Self; 18] = [
        Self::Integer,
        Self::Multiply,
        Self::Divide,
        Self::FloatAdd,
        Self::FloatMultiply,
        Self::FloatDivide,
        Self::Vector,
        Self::Load,
        Self::Store,
        Self::Branch(Branch::Conditional),
        Self::Branch(Branch::Jump),
        Self::Branch(Branch::Call),
        Self::Branch(Branch::Return),
        Self::Branch(Branch::ComputedJump),
        Self::Branch(Branch::ComputedCall),
        Self::Fence,
        Self::SystemCall,
        Self::Other,
    ];

    pub fn branch(self) -> Option<Branch> {
        match self {
            Self::Branch(branch) => Some(branch),
            _ => None,
        }
    }

    /// Whether the instruction waits in the window for floating point and vectors.
    pub fn is_float(self) -> bool {
        matches!(self, Self::FloatAdd | Self::FloatMultiply | Self::FloatDivide | Self::Vector)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Integer => "integer",
            Self::Multiply => "multiply",
            Self::Divide => "divide",
            Self::FloatAdd => "float add",
            Self::FloatMultiply => "float multiply",
            Self::FloatDivide => "float divide",
            Self::Vector => "vector",
            Self::Load => "load",
            Self::Store => "store",
            Self::Branch(Branch::Conditional) => "branch",
            Self::Branch(Branch::Jump) => "jump",
            Self::Branch(Branch::Call) => "call",
            Self::Branch(Branch::Return) => "return",
            Self::Branch(Branch::ComputedJump) => "computed jump",
            Self::Branch(Branch::ComputedCall) => "computed call",
            Self::Fence => "fence",
            Self::SystemCall => "system call",
            Self::Other => "other",
        }
    }
}

/// How many registers the model knows.
pub const REGISTERS: u8 = 64;

/// Some registers, one bit each.
#[derive(Clone, Copy, PartialEq, Eq, Default, Hash, Debug)]
pub struct RegisterSet(pub u64);

impl RegisterSet {
    #[must_use]
    pub fn with(self, register: u8) -> Self {
        Self(self.0 | 1 << (register % REGISTERS))
    }

    pub fn contains(self, register: u8) -> bool {
        self.0 >> (register % REGISTERS) & 1 == 1
    }

    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The registers by their numbers.
    pub fn iter(self) -> impl Iterator<Item = u8> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let first = u8::try_from(left.trailing_zeros()).ok().filter(|_| left != 0)?;
            left &= left - 1;
            Some(first)
        })
    }
}

/// What an instruction does with one address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    pub reads: bool,
    pub writes: bool,
    /// 0 if it is not known.
    pub bytes: u16,
}

/// An instruction has at most this many addresses in a trace.
pub const ACCESSES_MAX: usize = 2;

/// An instruction of the program's code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Instruction {
    pub class: Class,
    /// Bytes of its code.
    pub length: u8,
    pub sources: RegisterSet,
    pub destinations: RegisterSet,
    /// Those of its destinations that are ready one cycle after issue, as the stack pointer of a
    /// `pop` is: they do not wait for memory.
    pub early: RegisterSet,
    /// Addresses that the trace holds for each execution, in this order.
    pub accesses: [Option<Access>; ACCESSES_MAX],
    /// It uses memory at addresses that the trace does not hold.
    pub has_unknown_addresses: bool,
}

impl Instruction {
    /// An instruction of four bytes without operands.
    pub fn new(class: Class) -> Self {
        Self {
            class,
            length: 4,
            sources: RegisterSet::default(),
            destinations: RegisterSet::default(),
            early: RegisterSet::default(),
            accesses: [None; ACCESSES_MAX],
            has_unknown_addresses: false,
        }
    }

    /// The number of addresses that the trace holds for each execution.
    pub fn addresses(&self) -> usize {
        self.accesses.iter().flatten().count()
    }

    pub fn reads_memory(&self) -> bool {
        self.class == Class::Load || self.accesses.iter().flatten().any(|one| one.reads)
    }

    pub fn writes_memory(&self) -> bool {
        self.class == Class::Store || self.accesses.iter().flatten().any(|one| one.writes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_lists_its_registers() {
        let set = RegisterSet::default().with(63).with(0).with(17);
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 17, 63]);
        assert_eq!(RegisterSet::default().iter().next(), None);
        assert_eq!(set.without(RegisterSet::default().with(0)).iter().next(), Some(17));
        assert!(set.contains(63) && !set.contains(1));
    }
}
