//! Fields of registers.

pub(super) fn bit(register: u64, at: u32) -> bool {
    register >> at & 1 != 0
}

/// A field of up to 32 bits.
pub(super) fn number(register: u64, at: u32, width: u32) -> u32 {
    let field = register >> at & ((1 << width) - 1);
    u32::try_from(field).unwrap_or(u32::MAX)
}

/// A latency of 16 bits. Processors write 0 if they did not measure it.
pub(super) fn latency(register: u64, at: u32, is_there: bool) -> Option<u32> {
    Some(number(register, at, 16)).filter(|&cycles| is_there && cycles > 0)
}
