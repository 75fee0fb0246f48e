//! Formats tables: columns are left-aligned and two spaces apart. Lines have no trailing spaces.

/// The lines of a table. Every row has one cell for each heading.
pub fn lines(heading: &[&str], rows: &[Vec<String>]) -> String {
    let width = |(column, title): (usize, &&str)| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.max().unwrap_or(0).max(title.chars().count())
    };
    let widths: Vec<usize> = heading.iter().enumerate().map(width).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded: Vec<String> =
            cells.zip(&widths).map(|(cell, &width)| format!("{cell:width$}")).collect();
        padded.join("  ").trim_end().to_owned() + "\n"
    };
    let mut text = line(&mut heading.iter().copied());
    text.extend(rows.iter().map(|row| line(&mut row.iter().map(String::as_str))));
    text
}
