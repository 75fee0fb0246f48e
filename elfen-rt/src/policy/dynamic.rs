//! `dynamic-budget`: as `refresh-budget`, with the budget stretched by how little the request
//! suffers. Figure 5.9(d).
//!
//! A request that runs at `ipc` where it would run at `ref_ipc` alone loses `1 - ipc / ref_ipc` of
//! every shared nanosecond. The figure's factor, `ref_ipc / (ref_ipc - ipc)`, is the inverse: so
//! the budget is no longer time shared but time *lost* by the request. The policy looks at every
//! check, so a falling IPC cuts a budget that is already running.
//!
//! Where the factor is singular or has no meaning:
//!
//! - An IPC within 1/16 of the reference, at it or above it: [`RATIO_MAX`]. A loss below 1/16 is no
//!   larger than the noise of an IPC over some microseconds, or the difference between two kinds of
//!   requests: it counts as 1/16.
//! - No IPC, or a reference of 0: the factor is 1, which is `refresh-budget`.

/// The longest a budget is stretched.
pub const RATIO_MAX: u64 = 16;

/// The budget at this IPC; at least `budget_ns`, at most [`RATIO_MAX`] times that.
#[inline]
pub fn real_budget_ns(budget_ns: u64, ref_ipc_milli: u64, ipc_milli: Option<u64>) -> u64 {
    let Some(ipc_milli) = ipc_milli else { return budget_ns };
    let gap = ref_ipc_milli.saturating_sub(ipc_milli).max(ref_ipc_milli.div_ceil(RATIO_MAX));
    let stretched = u128::from(budget_ns) * u128::from(ref_ipc_milli);
    match stretched.checked_div(u128::from(gap)) {
        Some(real_ns) => u64::try_from(real_ns).unwrap_or(u64::MAX),
        None => budget_ns,
    }
}
