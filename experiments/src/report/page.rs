//! The HTML around the figures, with their numbers as CSV in its links.

use std::fmt::Write;

use elfen_console::page::{document, escape};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use super::draw;
use super::figure::{Across, Figure, Panel, Point, Refused, Report, Series, Source, Table};
use super::text::short;

impl Report {
    /// The report as one HTML file that needs nothing else.
    pub fn html(&self) -> Result<String, Refused> {
        self.check()?;
        Ok(html(self))
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
    document(&report.title, &draw::style(), &body)
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
         <p><a download=\"{id}.csv\" href=\"data:text/csv;charset=utf-8,{}\">Numbers as CSV</a>\
         </p>\n\
         <details><summary>Numbers as a table</summary>\n{numbers}</details>\n\
         </figcaption>\n</figure>\n",
        element("p class=\"reading\"", &figure.reading),
        legend(figure),
        picture(figure),
        element("p", &figure.made_with),
        command(&figure.command),
        utf8_percent_encode(&csv(figure), NON_ALPHANUMERIC),
    )
}

/// The figure's picture.
fn picture(figure: &Figure) -> String {
    let id = escape(&figure.id);
    let attributes = format!(
        "xmlns=\"http://www.w3.org/2000/svg\" class=\"chart\" role=\"img\" \
         aria-labelledby=\"{id}-title {id}-desc\""
    );
    let head = format!(
        "<title id=\"{id}-title\">{}</title>\n<desc id=\"{id}-desc\">{}</desc>\n",
        escape(&figure.title),
        escape(&description(figure)),
    );
    draw::picture(figure, &attributes, &head)
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
    let mut seen: Vec<&Series> = Vec::new();
    for series in figure.series() {
        if seen.iter().all(|other| other.name != series.name || other.style != series.style) {
            seen.push(series);
        }
    }
    if seen.len() < 2 {
        return String::new();
    }
    let entry = |series: &&Series| {
        format!("<li>{} {}</li>\n", draw::key(series.mark, series.style), escape(&series.name))
    };
    let entries: String = seen.iter().map(entry).collect();
    format!("<ul class=\"legend\">\n{entries}</ul>\n")
}

/// The numbers of a figure as CSV (RFC 4180), a line for each point that is drawn.
///
/// Numbers are written so that reading them gives the same bits.
fn csv(figure: &Figure) -> String {
    let mut csv =
        csv::WriterBuilder::new().terminator(csv::Terminator::CRLF).from_writer(Vec::new());
    let mut write = |fields: [&str; 6]| csv.write_record(fields).expect("a vector has room");
    write(["measure", "series", &figure.x.label(), "value", "low", "high"]);
    for panel in &figure.panels {
        for series in &panel.series {
            for point in &series.points {
                let (low, high) = point.interval.map_or_else(Default::default, |(low, high)| {
                    (low.to_string(), high.to_string())
                });
                let (place, value) = (place(figure, point.x), point.y.to_string());
                write([&panel.y.label(), &series.name, &place, &value, &low, &high]);
            }
        }
    }
    let bytes = csv.into_inner().expect("a vector has room");
    String::from_utf8(bytes).expect("CSV of texts is text")
}

/// A number, or the name that it counts.
fn place(figure: &Figure, x: f64) -> String {
    figure.x.name(x).map_or_else(|| x.to_string(), str::to_owned)
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
            Across::Names { .. } => place(figure, x),
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
fn with_interval(point: &Point) -> String {
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
