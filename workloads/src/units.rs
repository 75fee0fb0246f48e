//! Nanoseconds: parsing, and conversion to other units.

use elfen_console::duration;
use elfen_rt::clock::nanos;

pub type Nanos = u64;

/// Far longer than any run, and small enough that sums of a few values do not overflow.
const LONGEST_NS: f64 = 1e15;

/// Parses durations such as `100ms` and `2s`.
pub fn parse_nanos(text: &str) -> Result<Nanos, String> {
    let ns = duration::parse(text).map(nanos)?;
    nanos_from_f64(ns as f64).ok_or_else(|| format!("`{text}` is longer than 11 days"))
}

/// The nearest whole nanosecond. `None` if the value is negative, not a number, or longer than any
/// run may be.
pub fn nanos_from_f64(ns: f64) -> Option<Nanos> {
    if !(0.0..=LONGEST_NS).contains(&ns) {
        return None;
    }
    #[expect(clippy::cast_possible_truncation, reason = "within 0..=1e15, just checked")]
    #[expect(clippy::cast_sign_loss, reason = "within 0..=1e15, just checked")]
    let ns = ns.round() as u64;
    Some(ns)
}

/// Exact below 2^53 ns, which is 104 days.
pub(crate) fn seconds(ns: Nanos) -> f64 {
    ns as f64 / 1e9
}

pub(crate) fn micros(ns: Nanos) -> f64 {
    ns as f64 / 1e3
}

/// Formats microseconds for people.
pub(crate) fn show_us(us: f64) -> String {
    duration::show(nanos_from_f64(us * 1e3).unwrap_or(Nanos::MAX))
}
