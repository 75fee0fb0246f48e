//! Formats numbers and names for readers.

/// Shortens a text to at most `most` characters.
pub(super) fn clip(text: &str, most: usize) -> String {
    let mut clipped: String = text.chars().take(most).collect();
    if text.chars().nth(most).is_some() {
        clipped.pop();
        clipped.push('…');
    }
    clipped
}

/// Turns a clause into a sentence, with a capital letter and a full stop.
pub(crate) fn sentence(clause: &str) -> String {
    let clause = clause.trim_end_matches('.');
    let mut rest = clause.chars();
    rest.next().map_or_else(String::new, |first| {
        first.to_uppercase().chain(rest).collect::<String>() + "."
    })
}

/// Formats a number with four significant digits, or with all digits of its integer part. Removes
/// trailing zeros.
pub(super) fn short(value: f64) -> String {
    let rounded: f64 = format!("{value:.3e}").parse().unwrap_or(value);
    if rounded != 0.0 && !(1e-4..1e9).contains(&rounded.abs()) {
        return format!("{rounded:e}");
    }
    let decimals = rounded.to_string().split_once('.').map_or(0, |(_, rest)| rest.len());
    // Avoids a negative zero.
    format!("{:.decimals$}", value + 0.0).replace('-', "−")
}

/// Formats a fraction as a percentage.
pub(super) fn percent(part: f64) -> String {
    short(part * 100.0) + " %"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_for_people() {
        let numbers = [-0.0, 1.5, 76.4821, 117.49, 12345.6, 1e12, -0.5, 0.000_012, 0.3 - 0.1];
        let expected = ["0", "1.5", "76.48", "117.5", "12346", "1e12", "−0.5", "1.2e-5", "0.2"];
        assert_eq!(numbers.map(short), expected);
        assert_eq!(percent(0.638_24), "63.82 %");
        assert_eq!([clip("abc", 3), clip("漢字x", 2)], ["abc", "漢…"]);
    }
}
