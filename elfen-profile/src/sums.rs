//! Sums of counts with their errors, and how tables show them.

use elfen_console::table;

use crate::profile::Source;

/// A sum of counts, and the bursts that at least one of them was seen in.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Sum {
    pub(crate) count: u64,
    pub(crate) bursts: u64,
}

impl Sum {
    pub(crate) fn add(&mut self, count: u64, bursts: u64) {
        self.count = self.count.saturating_add(count);
        // Which bursts is not known, so these may be the same ones.
        self.bursts = self.bursts.max(bursts);
    }
}

/// The lines of a table, without some of its columns.
pub(crate) fn without_columns(head: &[&str], rows: Vec<Vec<String>>, left: &[usize]) -> String {
    let keep = |at: usize| !left.contains(&at);
    let head: Vec<&str> =
        (0..).zip(head).filter(|&(at, _)| keep(at)).map(|(_, &one)| one).collect();
    let kept =
        |row: Vec<String>| (0..).zip(row).filter(|&(at, _)| keep(at)).map(|(_, one)| one).collect();
    let rows: Vec<Vec<String>> = rows.into_iter().map(kept).collect();
    table::lines(&head, &rows)
}

/// The sum of all counts. Those of a hostile file may be too large to add.
pub(crate) fn total<'a>(sums: impl Iterator<Item = &'a Sum>) -> u64 {
    sums.fold(0, |all, sum| all.saturating_add(sum.count))
}

/// How the counts of a profile came about, in words.
pub(crate) fn how(by: Source, bursts: u64) -> String {
    match by {
        Source::Everything => "all counted".to_owned(),
        Source::Bursts => format!("seen in {} bursts", grouped(bursts)),
        Source::Shadows => format!("seen in {} shadows", grouped(bursts)),
        Source::Samples => format!("seen in {} samples", grouped(bursts)),
    }
}

/// The relative error of a count that was seen in this number of bursts.
#[expect(clippy::cast_precision_loss, reason = "an error has few digits")]
pub(crate) fn relative_error(bursts: u64) -> f64 {
    1.0 / (bursts.max(1) as f64).sqrt()
}

/// The same in percent.
pub(crate) fn error(bursts: u64) -> String {
    format!("{:.0}", 100.0 * relative_error(bursts))
}

#[expect(clippy::cast_precision_loss, reason = "a share has few digits")]
pub(crate) fn share(part: u64, all: u64) -> f64 {
    if all == 0 { 0.0 } else { part as f64 / all as f64 * 100.0 }
}

/// A number with its digits in groups of three.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.char_indices() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::grouped;

    #[test]
    fn digits_are_grouped() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }
}
