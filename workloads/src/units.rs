//! Durations as people write them at a command line (`100ms`, `1.5s`, `20us`) and as tables print
//! them.

pub type Nanos = u64;

const UNITS_NS: [(&str, f64); 6] =
    [("ns", 1.0), ("us", 1e3), ("ms", 1e6), ("s", 1e9), ("m", 60e9), ("h", 3600e9)];

/// Far beyond any run, and small enough that sums of a few never wrap.
const LONGEST_NS: f64 = 1e15;

/// Reads `100ms`, `1.5s`, `2m`; a bare number has no unit and is refused.
pub fn parse_nanos(text: &str) -> Result<Nanos, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let expected = || format!("`{text}` is no duration: write a number and a unit, as in 100ms");
    let number: f64 = number.parse().map_err(|_| expected())?;
    let (_, scale) = UNITS_NS.iter().find(|(name, _)| *name == unit).ok_or_else(expected)?;
    nanos_from_f64(number * scale).ok_or_else(|| format!("`{text}` is longer than 11 days"))
}

/// The nearest whole nanosecond; `None` for what is negative, not a number, or longer than any run
/// may be.
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

/// Microseconds as a person reads them in a table: `87 us`, `1.35 ms`, `2.10 s`.
pub(crate) fn show_us(us: f64) -> String {
    match us.abs() {
        us_abs if us_abs < 10.0 => format!("{us:.1} us"),
        us_abs if us_abs < 1_000.0 => format!("{us:.0} us"),
        us_abs if us_abs < 1_000_000.0 => format!("{:.2} ms", us / 1e3),
        _ => format!("{:.2} s", us / 1e6),
    }
}

pub(crate) fn show_nanos(ns: Nanos) -> String {
    show_us(micros(ns))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Goal: every unit scales as its name says. Method: one value of each.
    #[test]
    fn units_scale() {
        for (text, ns) in [
            ("7ns", 7),
            ("20us", 20_000),
            ("1.5ms", 1_500_000),
            ("2s", 2_000_000_000),
            ("2m", 120_000_000_000),
            ("1h", 3_600_000_000_000),
        ] {
            assert_eq!(parse_nanos(text), Ok(ns), "{text}");
        }
    }

    /// Goal: what has no unit, a sign, or no end is refused. Method: each once.
    #[test]
    fn nonsense_is_refused() {
        for text in
            ["", "5", "ms", "-1s", "1.2.3s", "infs", "nans", "1e3s", "999999h", "5 ms", "5MS"]
        {
            assert!(parse_nanos(text).is_err(), "{text}");
        }
    }

    /// Goal: a table's unit follows the size. Method: a value on each side of a border.
    #[test]
    fn shown_unit_follows_size() {
        assert_eq!(show_us(9.94), "9.9 us");
        assert_eq!(show_us(87.4), "87 us");
        assert_eq!(show_us(1_350.0), "1.35 ms");
        assert_eq!(show_us(2_100_000.0), "2.10 s");
        assert_eq!(show_nanos(1_500), "1.5 us");
    }

    proptest! {
        /// Goal: parsing never panics and never makes a value past the bound. Method: arbitrary
        /// text.
        #[test]
        fn arbitrary_text_never_panics(text in ".{0,24}") {
            if let Ok(ns) = parse_nanos(&text) {
                prop_assert!(ns <= 1_000_000_000_000_000);
            }
        }
    }
}
