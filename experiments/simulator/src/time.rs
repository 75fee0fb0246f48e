//! Simulated time in whole nanoseconds, and conversions from and to real numbers.

/// Rounds to whole nanoseconds. Values out of range become the nearest value in range.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "`as` saturates for floating point, and that is what is wanted"
)]
pub fn nanoseconds(ns: f64) -> u64 {
    ns.round() as u64
}

pub const MS: u64 = 1_000_000;
pub const S: u64 = 1_000_000_000;
pub const DAY: u64 = 24 * 3600 * S;

/// Converts a count to a real number. The result is exact for up to 104 days in nanoseconds.
pub fn real(count: u64) -> f64 {
    count as f64
}

/// Converts nanoseconds to milliseconds, for output.
pub fn milliseconds(ns: u64) -> f64 {
    real(ns) / 1e6
}
