//! Why nothing of a function is used.

/// Why a function is left alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refused {
    #[error("it has no bytes, or more than a mebibyte")]
    Length,
    #[error("its bytes at {0:#x} are no instruction")]
    NoInstruction(u64),
    #[error("it goes to {0:#x}, which is inside of an instruction")]
    TargetInside(u64),
    #[error("it was interrupted at {0:#x}, which is not where an instruction begins")]
    SampleInside(u64),
    #[error("it has transactions")]
    Transactions,
}
