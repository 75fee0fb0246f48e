//! The HTML around the figures: numbers to download are in the links.

use std::fmt::Write;
use std::io;

use elfen_console::page::document;

use super::csv::{csv, data_uri, place};
use super::document::{Report, Table};
use super::figure::{Across, Figure, Mark, Panel, Point, Refused, Series, Source, Style};
use super::scale::short;
use super::svg::{self, WIDTH, escape};
use super::{lines, rows};

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error(transparent)]
    Write(#[from] io::Error),
}

impl Report {
    /// Writes the report as one HTML file that needs nothing else.
    pub fn render(&self, out: &mut impl io::Write) -> Result<(), RenderError> {
        self.check()?;
        Ok(out.write_all(html(self).as_bytes())?)
    }
}

/// The whole file.
fn html(report: &Report) -> String {
    let notes: String = report.notes.iter().map(|note| element("p", note)).collect();
    let tables: String = report.tables.iter().map(table).collect();
    let figures: String = report.figures.iter().map(figure).collect();
    let appendix: String = report.appendix.iter().map(table).collect();
    let body = format!(
        "<header>\n<h1>{}</h1>\n{notes}{}</header>\n<main>\n{tables}{figures}{appendix}</main>\n\
         <footer><p>Written by</p>\n{}</footer>\n",
        escape(&report.title),
        contents(&report.figures),
        command(&report.command),
    );
    document(&report.title, "", &body)
}

fn contents(figures: &[Figure]) -> String {
    if figures.len() < 2 {
        return String::new();
    }
    let entry = |figure: &Figure| {
        format!("<li><a href=\"#{}\">{}</a></li>\n", escape(&figure.id), escape(&figure.title))
    };
    let entries: String = figures.iter().map(entry).collect();
    format!("<nav aria-label=\"Figures\"><ol>\n{entries}</ol></nav>\n")
}

fn figure(figure: &Figure) -> String {
    let (id, title) = (escape(&figure.id), escape(&figure.title));
    let (source, explained) = match figure.source {
        Source::Simulated => ("simulated", "Numbers of the model, not of a machine."),
        Source::Live => ("live", "Measured on this machine."),
        Source::Published => ("published", "Numbers that the thesis prints."),
    };
    let numbers: String = figure.panels.iter().map(|panel| panel_table(figure, panel)).collect();
    format!(
        "<figure id=\"{id}\">\n<h2>{title} <span class=\"source {source}\" title=\"{explained}\">\
         {source}</span></h2>\n{}{}<div class=\"scroll\">\n{}</div>\n<figcaption>\n{}{}\
         <p><a download=\"{id}.csv\" href=\"{}\">Numbers as CSV</a></p>\n\
         <details><summary>Numbers as a table</summary>\n{numbers}</details>\n\
         </figcaption>\n</figure>\n",
        element("p class=\"reading\"", &figure.reading),
        legend(figure),
        picture(figure),
        element("p", &figure.made_with),
        command(&figure.command),
        data_uri(&csv(figure)),
    )
}

/// The figure's picture.
fn picture(figure: &Figure) -> String {
    let (height, body) = match &figure.x {
        Across::Number(axis) => lines::draw(figure, axis),
        Across::Names { names, one_scale, .. } => rows::draw(figure, names, *one_scale),
    };
    let id = escape(&figure.id);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"plot\" viewBox=\"0 0 {WIDTH} {height}\" \
         role=\"img\" aria-labelledby=\"{id}-title {id}-desc\">\n\
         <title id=\"{id}-title\">{}</title>\n<desc id=\"{id}-desc\">{}</desc>\n{body}</svg>\n",
        escape(&figure.title),
        escape(&description(figure)),
    )
}

/// What a screen reader says instead of the picture.
fn description(figure: &Figure) -> String {
    let mut text = figure.reading.clone();
    for panel in &figure.panels {
        let names: Vec<&str> = panel.series.iter().map(|series| series.name.as_str()).collect();
        let (y, x) = (panel.y.label(), figure.x.label());
        write!(text, " {y} by {x}: {}.", names.join("; ")).expect("a string has room");
    }
    text + " The numbers are in the table below."
}

/// Every name once, if there is anything to tell apart.
fn legend(figure: &Figure) -> String {
    let mut seen: Vec<(&str, Mark, Style)> = Vec::new();
    for series in figure.panels.iter().flat_map(|panel| &panel.series) {
        let is_new =
            seen.iter().all(|(name, _, style)| *name != series.name || *style != series.style);
        if is_new {
            seen.push((&series.name, series.mark, series.style));
        }
    }
    if seen.len() < 2 {
        return String::new();
    }
    let entry = |(name, mark, style): &(&str, Mark, Style)| {
        format!("<li>{} {}</li>\n", svg::swatch(*mark, *style), escape(name))
    };
    let entries: String = seen.iter().map(entry).collect();
    format!("<ul class=\"legend\">\n{entries}</ul>\n")
}

/// The numbers of a panel: a row for each place, a column for each series.
fn panel_table(figure: &Figure, panel: &Panel) -> String {
    let mut places: Vec<f64> =
        panel.series.iter().flat_map(|series| &series.points).map(|point| point.x).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let cell = |series: &Series, x: f64| {
        let point = series.points.iter().find(|point| point.x == x);
        point.map_or_else(String::new, with_interval)
    };
    let row = |&x: &f64| {
        let place = match &figure.x {
            Across::Number(_) => short(x),
            Across::Names { .. } => place(&figure.x, x),
        };
        let cells = panel.series.iter().map(|series| cell(series, x));
        std::iter::once(place).chain(cells).collect()
    };
    let names = panel.series.iter().map(|series| series.name.clone());
    table(&Table {
        title: panel.y.label(),
        head: std::iter::once(figure.x.label()).chain(names).collect(),
        rows: places.iter().map(row).collect(),
        note: String::new(),
    })
}

/// A value with its interval, as tables show it.
pub(super) fn with_interval(point: &Point) -> String {
    let interval = point
        .interval
        .map_or_else(String::new, |(low, high)| format!(" ({}–{})", short(low), short(high)));
    short(point.y) + &interval
}

fn table(table: &Table) -> String {
    let numeric: Vec<bool> =
        (0..table.head.len()).map(|column| is_numeric(table, column)).collect();
    let row = |cells: &Vec<String>, tag: &str| {
        let cell = |(column, cell): (usize, &String)| {
            let class = match numeric.get(column) {
                Some(true) => " class=\"number\"",
                _ => "",
            };
            format!("<{tag}{class}>{}</{}>", with_small_interval(cell), &tag[..2])
        };
        format!("<tr>{}</tr>\n", cells.iter().enumerate().map(cell).collect::<String>())
    };
    let rows: String = table.rows.iter().map(|cells| row(cells, "td")).collect();
    let note = if table.note.is_empty() { String::new() } else { element("p", &table.note) };
    format!(
        "<div class=\"scroll\"><table><caption>{}</caption>\n<thead>{}</thead>\n<tbody>\n{rows}\
         </tbody></table></div>\n{note}",
        escape(&table.title),
        row(&table.head, "th scope=\"col\""),
    )
}

/// A value's interval stands below it, smaller.
fn with_small_interval(cell: &str) -> String {
    match cell.split_once(" (").filter(|_| cell.ends_with(')')) {
        Some((value, interval)) => {
            format!("{} <small>({}</small>", escape(value), escape(interval))
        }
        None => escape(cell),
    }
}

/// Whether a column reads better aligned at its right.
fn is_numeric(table: &Table, column: usize) -> bool {
    let cells = table.rows.iter().filter_map(|row| row.get(column));
    let digit = |c: char| c.is_ascii_digit() || "+−-–±≥≤".contains(c);
    cells.filter(|cell| !cell.is_empty()).all(|cell| cell.starts_with(digit))
}

fn command(command: &str) -> String {
    if command.is_empty() {
        return String::new();
    }
    format!("<pre><code>{}</code></pre>\n", escape(command))
}

/// `tag` may have attributes; nothing to say is no element.
fn element(tag: &str, text: &str) -> String {
    if text.is_empty() {
        return String::new();
    }
    let name = tag.split(' ').next().unwrap_or(tag);
    format!("<{tag}>{}</{name}>\n", escape(text))
}
