//! The HTML page of a report: one file with tables and figures, for light and dark screens and for
//! paper. `page.html` is its template, `page.css` its style.
//!
//! The page loads nothing: pictures and style are in the file. A content security policy makes the
//! browser enforce this.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, HtmlEscape, Value, context};
use serde::Serialize;

/// The content of a page.
#[derive(Debug, Default, Serialize)]
pub struct Page {
    pub title: String,
    /// What the reader must know before the first figure, one sentence each.
    pub notes: Vec<String>,
    /// The blocks of the page, from top to bottom.
    pub blocks: Vec<Block>,
    /// The command that wrote the page; may be empty.
    pub command: String,
    /// CSS for the page's pictures.
    pub style: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Block {
    Table(Table),
    Figure(Box<Figure>),
}

/// A table of numbers.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Table {
    pub title: String,
    pub head: Vec<String>,
    pub rows: Vec<Vec<String>>,
    /// How the numbers were measured; may be empty.
    pub note: String,
}

/// A picture with its explanations. Every text except the title may be empty.
#[derive(Debug, Default, Serialize)]
pub struct Figure {
    /// Names the figure in links and files: lower-case words joined by hyphens.
    pub id: String,
    pub title: String,
    /// Where the figure's numbers come from, as one word.
    pub source: &'static str,
    /// What the figure shows, in one sentence.
    pub reading: String,
    /// The legend: the HTML of each mark, and its name.
    pub legend: Vec<(String, String)>,
    /// The picture, as SVG.
    pub picture: String,
    /// The text that a screen reader reads instead of the picture.
    pub description: String,
    pub caption: String,
    pub command: String,
    /// The numbers as CSV.
    pub csv: String,
    pub tables: Vec<Table>,
}

impl Table {
    pub fn new(title: impl Into<String>, head: &[&str], rows: Vec<Vec<String>>) -> Self {
        let head = head.iter().map(|&name| name.to_owned()).collect();
        Self { title: title.into(), head, rows, note: String::new() }
    }

    pub fn noted(self, note: impl Into<String>) -> Self {
        Self { note: note.into(), ..self }
    }
}

impl Page {
    /// Renders the page as one HTML file. Characters that XML forbids become U+FFFD.
    pub fn html(&self) -> String {
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .keep_trailing_newline(true)
            .lstrip_blocks(true)
            .build();
        let mut environment = Environment::new();
        environment.set_syntax(syntax.expect("these are no delimiters"));
        environment.add_filter("numeric_columns", numeric_columns);
        let template = environment.template_from_named_str("page.html", include_str!("page.html"));
        let context = context! { css => include_str!("page.css"), ..Value::from(Serde(self)) };
        let html = template.and_then(|template| template.render(context));
        let is_forbidden =
            |c: char| c.is_control() && !"\n\t".contains(c) || "\u{fffe}\u{ffff}".contains(c);
        html.expect("every page fits the template").replace(is_forbidden, "\u{fffd}")
    }
}

/// Which columns are aligned at their right, because all their cells are numbers.
fn numeric_columns(rows: Vec<Vec<String>>) -> Vec<bool> {
    let is_number = |cell: &String| {
        cell.is_empty() || cell.starts_with(|c: char| c.is_ascii_digit() || "+−-–±≥≤".contains(c))
    };
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let is_numeric = |column| rows.iter().filter_map(|row| row.get(column)).all(is_number);
    (0..columns).map(is_numeric).collect()
}

/// Escapes text for use inside an element or an attribute.
pub fn escape(text: &str) -> String {
    HtmlEscape(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: columns of numbers are aligned, and intervals are printed below their values. Method:
    /// a cell with an interval, and a cell of words.
    #[test]
    fn numbers_are_aligned() {
        let rows = vec![vec!["name".to_owned(), "1.5 (1–2)".to_owned()]];
        let table = Table::new("", &["a", "b"], rows);
        let html = Page { blocks: vec![Block::Table(table)], ..Page::default() }.html();
        assert!(html.contains("<th scope=\"col\">a</th><th scope=\"col\" class=\"number\">b</th>"));
        let row = "<tr><td>name</td><td class=\"number\">1.5 <small>(1–2)</small></td></tr>";
        assert!(html.contains(row), "{html}");
    }
}
