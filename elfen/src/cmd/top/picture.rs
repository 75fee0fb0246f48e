//! Draws the picture of `elfen top`: a pure function from rows to lines that fit the terminal.

/// The content of a picture, except the selection and the note.
#[derive(Debug, Default)]
pub(super) struct View {
    pub(super) summary: String,
    pub(super) sections: Vec<Section>,
}

/// Styles, by their numbers in terminal escapes.
pub(super) const PLAIN: &str = "0";
pub(super) const HEADING: &str = "1";
pub(super) const DIM: &str = "2";
pub(super) const SELECTED: &str = "7";
pub(super) const ALARM: &str = "31";

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Line {
    pub(super) style: &'static str,
    pub(super) text: String,
}

impl Line {
    fn new(style: &'static str, text: impl Into<String>) -> Self {
        Self { style, text: text.into() }
    }
}

/// A column of a table: its title, its width, and whether its cells are aligned at the right.
pub(super) type Column = (&'static str, usize, bool);

#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) style: &'static str,
    pub(super) text: String,
    pub(super) bar: Option<Bar>,
    /// The batch that keys change while this row is selected. A row without a pid belongs to the
    /// row above.
    pub(super) pid: Option<u32>,
}

/// A bar. Its width depends on the terminal.
#[derive(Clone, Debug)]
pub(super) struct Bar {
    /// Marks and their shares in thousandths, from left to right.
    pub(super) parts: Vec<(char, u64)>,
    /// The number of columns that the rest of the row takes.
    pub(super) rest: usize,
    pub(super) after: String,
}

const BAR_COLUMNS: std::ops::RangeInclusive<usize> = 8..=100;

impl Row {
    pub(super) fn new<const N: usize>(columns: &[Column; N], cells: [String; N]) -> Self {
        let text = line_of(columns, &cells.each_ref().map(String::as_str));
        Self { style: PLAIN, text, bar: None, pid: None }
    }

    fn line(&self, selected: Option<u32>, columns: usize) -> Line {
        let mut line = Line::new(self.style, self.text.as_str());
        if self.pid.is_some() && self.pid == selected {
            line.style = SELECTED;
            line.text.replace_range(0..1, ">");
        }
        if let Some(Bar { parts, rest, after }) = &self.bar {
            let width = columns.saturating_sub(*rest).min(*BAR_COLUMNS.end());
            if BAR_COLUMNS.contains(&width) {
                line.text += &format!(" [{}]", bar(parts, width));
            }
            line.text += after;
        }
        line
    }
}

#[derive(Clone, Debug)]
pub(super) struct Section {
    heading: String,
    pub(super) rows: Vec<Row>,
}

impl Section {
    pub(super) fn new<const N: usize>(columns: &[Column; N], rows: Vec<Row>) -> Self {
        Self { heading: line_of(columns, &columns.map(|(title, ..)| title)), rows }
    }

    /// A blank line, the heading, and as many rows as fit. They include the selected row and the
    /// rows that belong to it.
    fn lines(&self, selected: Option<u32>, columns: usize, room: usize) -> Vec<Line> {
        if self.rows.is_empty() || room == 0 {
            return Vec::new();
        }
        let mut lines = vec![Line::new(PLAIN, ""), Line::new(HEADING, self.heading.as_str())];
        let rows = self.rows.iter().map(|row| row.line(selected, columns));
        if self.rows.len() <= room {
            lines.extend(rows);
            return lines;
        }
        let shown = room - 1;
        let is_selected = |row: &Row| row.pid.is_some() && row.pid == selected;
        let first = self.rows.iter().position(is_selected).map_or(0, |at| {
            let below = self.rows.iter().skip(at + 1).take_while(|row| row.pid.is_none());
            (at + 1 + below.count()).saturating_sub(shown)
        });
        lines.extend(rows.skip(first).take(shown));
        lines.push(Line::new(DIM, format!("  {} more", self.rows.len() - shown)));
        lines
    }
}

const KEYS: &str = "q quit   up/down select   p policy   +/- budget";

/// The picture: `rows` lines of at most `columns` columns. The last line is the note, or lists the
/// keys.
pub(super) fn draw(
    view: &View,
    selected: Option<u32>,
    note: Option<&str>,
    columns: usize,
    rows: usize,
) -> Vec<Line> {
    let mut lines = vec![Line::new(HEADING, view.summary.as_str())];
    for (section, room) in view.sections.iter().zip(rooms(&view.sections, rows.saturating_sub(2))) {
        lines.extend(section.lines(selected, columns, room));
    }
    lines.resize(rows.saturating_sub(1), Line::new(PLAIN, ""));
    lines.push(note.map_or(Line::new(DIM, KEYS), |note| Line::new(SELECTED, note)));
    lines.iter_mut().for_each(|line| line.text = cut(&line.text, columns));
    lines
}

/// How many rows of each section fit. The longest section is shortened first.
fn rooms(sections: &[Section], left: usize) -> Vec<usize> {
    let mut rooms: Vec<usize> = sections.iter().map(|section| section.rows.len()).collect();
    let taken = |rooms: &[usize]| {
        rooms.iter().map(|&room| if room == 0 { 0 } else { room + 2 }).sum::<usize>()
    };
    while taken(&rooms) > left {
        let Some(longest) = rooms.iter_mut().max().filter(|room| **room > 0) else { break };
        *longest -= 1;
    }
    rooms
}

/// Formats a row. Names come from other processes, so control characters are replaced.
fn line_of(columns: &[Column], cells: &[&str]) -> String {
    let printable = |c: char| if c.is_control() { '?' } else { c };
    let cell = |(&(_, width, right), text): (&Column, &&str)| {
        let text = cut(&text.chars().map(printable).collect::<String>(), width);
        if right { format!("{text:>width$}") } else { format!("{text:width$}") }
    };
    let cells: Vec<String> = columns.iter().zip(cells).map(cell).collect();
    format!("  {}", cells.join(" ").trim_end())
}

/// Draws the shares of a bar one after the other, and dots for the rest.
fn bar(parts: &[(char, u64)], width: usize) -> String {
    let mut bar = String::with_capacity(width);
    let mut sum = 0;
    for &(mark, share) in parts {
        sum += share;
        let end = usize::try_from(sum.min(1000)).unwrap_or(1000) * width / 1000;
        while bar.chars().count() < end {
            bar.push(mark);
        }
    }
    format!("{bar:.<width$}")
}

fn cut(text: &str, columns: usize) -> String {
    if text.chars().count() <= columns {
        return text.to_owned();
    }
    let mut cut: String = text.chars().take(columns.saturating_sub(1)).collect();
    if columns > 0 {
        cut.push('~');
    }
    cut
}

#[cfg(test)]
mod tests;
