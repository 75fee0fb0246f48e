//! Durations on the command line: a whole number and a unit.

use std::time::Duration;

/// Parses durations such as `500us`, `47ms` or `2s`, as a value parser of clap.
pub fn parse(text: &str) -> Result<Duration, String> {
    let error =
        || "a duration is a whole number with the unit ns, us, ms or s, such as 500us".to_owned();
    let unit = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(error)?;
    let (number, unit) = text.split_at(unit);
    let number: u64 = number.parse().map_err(|_| error())?;
    let unit_ns: u64 = match unit {
        "ns" => 1,
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        _ => return Err(error()),
    };
    number.checked_mul(unit_ns).map(Duration::from_nanos).ok_or_else(error)
}

/// Formats a time with three digits and a unit.
pub fn show(ns: u64) -> String {
    let ns = number(ns);
    let (value, unit) = match ns {
        ns if ns < 1e3 => (ns, "ns"),
        ns if ns < 1e6 => (ns / 1e3, "us"),
        ns if ns < 1e9 => (ns / 1e6, "ms"),
        ns => (ns / 1e9, "s"),
    };
    let digits = if unit == "ns" || value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    format!("{value:.digits$} {unit}")
}

/// A count or a time as a floating-point number. It is exact below 2^53, which is 104 days of
/// nanoseconds.
#[expect(clippy::cast_precision_loss, reason = "measurements are far below 2^53")]
pub fn number(value: u64) -> f64 {
    value as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_a_number_and_a_unit() {
        assert_eq!(parse("500us"), Ok(Duration::from_micros(500)));
        assert_eq!(parse("0ns"), Ok(Duration::ZERO));
        for wrong in ["", "5", "-5", "-5ms", "ms", "1.5ms", "5 ms", "5m", "99999999999999s"] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn times_are_shown_with_three_digits() {
        let shown = [999, 1_500, 47_000_000, 1_234_000_000].map(show);
        assert_eq!(shown, ["999 ns", "1.50 us", "47.0 ms", "1.23 s"]);
    }
}
