//! `dynamic-budget`: `refresh-budget` with a budget that is longer the less the request slows down.
//! Figure 5.9(d).
//!
//! `ref_ipc` is the IPC of a request that has the core to itself. A request that runs at `ipc`
//! loses `1 - ipc / ref_ipc` of every shared nanosecond. The figure's factor,
//! `ref_ipc / (ref_ipc - ipc)`, is the inverse of that. So the budget limits the time that the
//! request *loses*, and not the time that it shares. The policy computes the factor at every check,
//! so a falling IPC shortens a budget that is already running.
//!
//! Where the factor is singular or has no meaning:
//!
//! - The IPC is within 1/16 of the reference, or above it: the factor is [`RATIO_MAX`]. A loss
//!   below 1/16 is within the noise of an IPC over some microseconds, and within the difference
//!   between two kinds of requests. It counts as 1/16.
//! - No IPC, or a reference of 0: the factor is 1, which is `refresh-budget`.

/// The largest factor by which a budget is lengthened.
pub const RATIO_MAX: u64 = 16;

/// The budget at this IPC, from `budget_ns` to [`RATIO_MAX`] times `budget_ns`.
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
