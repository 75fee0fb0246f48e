//! The code of one computed branch: a chain of comparisons with the targets that it often goes to.

use elfen_rewrite::Code;

use crate::assembly::{Gs, Noting, Word, push_link};
use crate::layout::{SAVED_RCX, SAVED_RDX, TARGET};

/// A longer chain becomes a table of chains.
pub(crate) const CHAIN_MAX: usize = 6;
/// Chains of a table, chosen by eight bits of the target.
pub(crate) const CHAINS: usize = 256;
/// A site has at most this many targets with code of their own.
pub(crate) const TARGETS_MAX: usize = 512;

/// One computed branch.
#[derive(Clone, Debug)]
pub(crate) struct Site {
    /// Index of its block.
    pub(crate) block: u32,
    /// The distance of the jump that ends the block.
    pub(crate) jump: u64,
    /// The first comparison, or the search of the table of all blocks if no target is known.
    pub(crate) head: u64,
    pub(crate) targets: Vec<SiteTarget>,
    pub(crate) table: Option<ChainTable>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct SiteTarget {
    pub(crate) target: u64,
    pub(crate) counter: u32,
}

/// Chains by eight bits of the target.
#[derive(Clone, Debug)]
pub(crate) struct ChainTable {
    pub(crate) at: u64,
    pub(crate) bits: Bits,
    /// The head of each chain, which expects the target in `%rcx`.
    pub(crate) heads: Vec<u64>,
}

/// Which bits of a target choose its chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Bits {
    /// 0 to 7.
    Low,
    /// 8 to 15, where functions begin at multiples of 16.
    High,
}

impl Bits {
    /// The bits by which the targets differ most.
    pub(crate) fn of(targets: &[SiteTarget]) -> Self {
        let chains = |bits: Self| {
            let mut chains: Vec<usize> = targets.iter().map(|one| bits.chain(one.target)).collect();
            chains.sort_unstable();
            chains.dedup();
            chains.len()
        };
        if chains(Self::High) > chains(Self::Low) { Self::High } else { Self::Low }
    }

    pub(crate) fn chain(self, target: u64) -> usize {
        let [low, high, ..] = target.to_le_bytes();
        usize::from(match self {
            Self::Low => low,
            Self::High => high,
        })
    }
}

/// Appends the code that goes to the routine `lookup`. `%rcx` holds the target.
pub(crate) fn push_search(code: &mut Code, site: u32, lookup: u64) -> Option<u64> {
    let at = code.end()?;
    // mov $site,%edx; jmp lookup
    code.push(&[0xba]);
    code.push(&site.to_le_bytes());
    code.push_relative(&[0xe9], lookup, &[])?;
    Some(at)
}

/// Appends the comparison with one target: `next` is where a branch to other targets goes. Returns
/// the address of the code, and of the distance of its jump to the target.
pub(crate) fn push_target(
    code: &mut Code,
    target: SiteTarget,
    next: u64,
    noting: Noting,
) -> Option<(u64, u64)> {
    let padding = code.end()?.wrapping_neg() % 8;
    code.push(&[0x90; 8][..usize::try_from(padding).ok()?]);
    let constant = code.end()?;
    code.push(&target.target.wrapping_neg().to_le_bytes());
    let at = code.end()?;
    // mov %rcx,%rdx; mov constant(%rip),%rcx; lea (%rcx,%rdx),%rcx; jrcxz hit
    code.push(&[0x48, 0x89, 0xca]);
    code.push_relative(&[0x48, 0x8b, 0x0d], constant, &[])?;
    code.push(&[0x48, 0x8d, 0x0c, 0x11, 0xe3, 3 + 5]);
    // mov %rdx,%rcx; jmp next
    code.push(&[0x48, 0x89, 0xd1]);
    code.push_relative(&[0xe9], next, &[])?;
    noting.push_by_rcx(code, target.counter, target.target, true)?;
    code.load(Word::Rcx, SAVED_RCX);
    code.load(Word::Rdx, SAVED_RDX);
    Some((at, push_link(code)?))
}

/// Appends the code that chooses a chain by the table.
pub(crate) fn push_choice(code: &mut Code, table: u64, bits: Bits) -> Option<u64> {
    let at = code.end()?;
    code.store(TARGET, Word::Rcx);
    // movzx %cl,%ecx or movzx %ch,%ecx; lea table(%rip),%rdx; jmp *(%rdx,%rcx,8)
    code.push(match bits {
        Bits::Low => &[0x0f, 0xb6, 0xc9],
        Bits::High => &[0x0f, 0xb6, 0xcd],
    });
    code.push_relative(&[0x48, 0x8d, 0x15], table, &[])?;
    code.push(&[0xff, 0x24, 0xca]);
    Some(at)
}

/// Appends the entry of a chain: the table has overwritten the target.
pub(crate) fn push_chain(code: &mut Code, head: u64) -> Option<u64> {
    let at = code.end()?;
    code.load(Word::Rcx, TARGET);
    code.push_relative(&[0xe9], head, &[])?;
    Some(at)
}
