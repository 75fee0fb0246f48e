//! Numbers and names as people read them.

/// A text of so many characters at most, without those that XML has no place for.
pub(super) fn clip(text: &str, most: usize) -> String {
    let shown =
        |c: char| if c.is_control() || "\u{fffe}\u{ffff}".contains(c) { '\u{fffd}' } else { c };
    let mut clipped: String = text.chars().take(most).map(shown).collect();
    if text.chars().nth(most).is_some() {
        clipped.pop();
        clipped.push('…');
    }
    clipped
}

/// A number with its thousands apart.
fn grouped(value: f64, decimals: usize) -> String {
    let value = if value == 0.0 { 0.0 } else { value };
    if value.abs() >= 1e9 {
        return format!("{value:e}");
    }
    let text = format!("{value:.decimals$}");
    let (sign, digits) = text.strip_prefix('-').map_or(("", text.as_str()), |rest| ("−", rest));
    let (whole, fraction) = digits.split_at(digits.find('.').unwrap_or(digits.len()));
    let mut apart = String::new();
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index) % 3 == 0 && whole.len() > 4 {
            apart.push('\u{202f}');
        }
        apart.push(digit);
    }
    format!("{sign}{apart}{fraction}")
}

/// A number to four digits, for people.
pub(super) fn short(value: f64) -> String {
    let decimals = match value.abs() {
        0.0 => 0,
        size if size >= 1000.0 => 0,
        size if size >= 100.0 => 1,
        size if size >= 10.0 => 2,
        size if size >= 1e-3 => 3,
        _ => return format!("{value:.1e}"),
    };
    grouped(value, decimals)
}

/// A number to three digits and without zeros at its end, for sentences.
pub(super) fn said(value: f64) -> String {
    let decimals = match value.abs() {
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 => 2,
        _ => 3,
    };
    let text = grouped(value, decimals);
    if decimals == 0 || text.contains('e') {
        return text;
    }
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// A part as a percentage, for sentences.
pub(super) fn percent(part: f64) -> String {
    said(part * 100.0) + " %"
}

/// A number at an axis: to nine digits, without zeros at its end.
pub(super) fn tick(value: f64) -> String {
    let rounded: f64 = format!("{value:.8e}").parse().unwrap_or(value);
    if rounded != 0.0 && !(1e-6..1e9).contains(&rounded.abs()) {
        return format!("{rounded:e}");
    }
    let decimals = rounded.to_string().split_once('.').map_or(0, |(_, rest)| rest.len());
    grouped(rounded, decimals)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_for_people() {
        let numbers = [0.0, 1.49, 76.48, 117.5, 5705.0, 12345.6, 1e12, -0.5, 0.000_12];
        let text: Vec<String> = numbers.into_iter().map(short).collect();
        let expected =
            ["0", "1.490", "76.48", "117.5", "5705", "12\u{202f}346", "1e12", "−0.500", "1.2e-4"];
        assert_eq!(text, expected);
        let spoken: Vec<String> =
            [0.0, 1.5, 110.0, 0.9999, 51.63, 5.0].into_iter().map(said).collect();
        assert_eq!(spoken, ["0", "1.5", "110", "1", "51.6", "5"]);
        assert_eq!(percent(0.6382), "63.8 %");
        let ticks = [0.0, 0.3 - 0.1, 12_000.0, 1e-9, -2.5e12, 0.075].map(tick);
        assert_eq!([clip("a\u{1b}bc", 4), clip("漢字x", 2)], ["a\u{fffd}bc", "漢…"]);
        assert_eq!(ticks, ["0", "0.2", "12\u{202f}000", "1e-9", "-2.5e12", "0.075"]);
    }
}
