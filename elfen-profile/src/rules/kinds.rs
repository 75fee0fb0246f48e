//! The kinds of instructions that patterns tell apart.

/// What an instruction is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    CondBranch,
    Jump,
    IndirectJump,
    Call,
    IndirectCall,
    Return,
    Syscall,
    /// It reads or writes memory, and does not branch.
    Memory,
}

impl Kind {
    pub const ALL: [Self; 8] = [
        Self::CondBranch,
        Self::Jump,
        Self::IndirectJump,
        Self::Call,
        Self::IndirectCall,
        Self::Return,
        Self::Syscall,
        Self::Memory,
    ];

    pub fn index(self) -> usize {
        self as usize
    }
}

/// A set of kinds.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Kinds(u8);

/// The names that `T.OPCLASS` is compared with.
pub(super) const CLASSES: [(&str, Kinds); 6] = [
    ("branch", Kinds::of(&[Kind::CondBranch, Kind::Jump])),
    ("indirect_jump", Kinds::of(&[Kind::IndirectJump])),
    ("proc_call", Kinds::of(&[Kind::Call, Kind::IndirectCall])),
    ("return", Kinds::of(&[Kind::Return])),
    ("syscall", Kinds::of(&[Kind::Syscall])),
    ("mem_op", Kinds::of(&[Kind::Memory])),
];

/// The names that `T.INSN` is compared with.
pub(super) const INSTRUCTIONS: [(&str, Kinds); 6] = [
    ("cond_branch", Kinds::of(&[Kind::CondBranch])),
    ("jump", Kinds::of(&[Kind::Jump])),
    ("indirect_jump", Kinds::of(&[Kind::IndirectJump])),
    ("call", Kinds::of(&[Kind::Call])),
    ("indirect_call", Kinds::of(&[Kind::IndirectCall])),
    ("return", Kinds::of(&[Kind::Return])),
];

impl Kinds {
    pub const fn of(kinds: &[Kind]) -> Self {
        let (mut bits, mut at) = (0, 0);
        while at < kinds.len() {
            bits |= 1 << kinds[at] as u8;
            at += 1;
        }
        Self(bits)
    }

    pub fn contains(self, kind: Kind) -> bool {
        self.0 & 1 << kind as u8 != 0
    }

    /// The kinds of both sets.
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}
