//! Renders a report as an HTML page. The numbers of its figures are included as tables and as CSV.

use elfen_console::page::{self, Block, Page, Table};

use super::draw;
use super::figure::{Figure, HtmlReport, Panel, Point, Refused, Series, Source};

impl HtmlReport {
    /// Returns the report as one self-contained HTML file.
    pub fn html(&self) -> Result<String, Refused> {
        self.check()?;
        let tables =
            |tables: &[Table]| tables.iter().cloned().map(Block::Table).collect::<Vec<_>>();
        let figures = self.figures.iter().map(|figure| Block::Figure(Box::new(whole(figure))));
        let blocks = tables(&self.tables).into_iter().chain(figures);
        let page = Page {
            title: self.title.clone(),
            notes: self.notes.clone(),
            blocks: blocks.chain(tables(&self.appendix)).collect(),
            command: self.command.clone(),
            style: draw::style(),
        };
        Ok(page.html())
    }
}

/// Converts a figure: its picture, its tables and its CSV.
fn whole(figure: &Figure) -> page::Figure {
    page::Figure {
        id: figure.id.clone(),
        title: figure.title.clone(),
        source: match figure.source {
            Source::Simulated => "simulated",
            Source::Live => "live",
            Source::Published => "published",
        },
        reading: figure.reading.clone(),
        legend: legend(figure),
        picture: draw::picture(figure),
        description: description(figure),
        caption: figure.made_with.clone(),
        command: figure.command.clone(),
        csv: csv(figure),
        tables: figure.panels.iter().map(|panel| panel_table(figure, panel)).collect(),
    }
}

fn description(figure: &Figure) -> String {
    let panels = figure.panels.iter().map(|panel| {
        let names: Vec<&str> = panel.series.iter().map(|series| series.name.as_str()).collect();
        format!(" {} by {}: {}.", panel.y.label(), figure.x.label(), names.join("; "))
    });
    format!("{}{} The numbers are in the table below.", figure.reading, panels.collect::<String>())
}

/// Returns each series once, or nothing if there is only one.
fn legend(figure: &Figure) -> Vec<(String, String)> {
    let mut seen: Vec<&Series> = Vec::new();
    for series in figure.series() {
        if seen.iter().all(|other| other.name != series.name || other.style != series.style) {
            seen.push(series);
        }
    }
    if seen.len() < 2 {
        return Vec::new();
    }
    seen.into_iter().map(|series| (draw::key(series), series.name.clone())).collect()
}

/// Returns the numbers of a figure as CSV (RFC 4180), with a line for each point that is drawn.
///
/// Parsing a printed number returns exactly the same value.
fn csv(figure: &Figure) -> String {
    let mut csv =
        csv::WriterBuilder::new().terminator(csv::Terminator::CRLF).from_writer(Vec::new());
    let mut write = |fields: [&str; 6]| csv.write_record(fields).expect("a vector has room");
    write(["measure", "series", &figure.x.label(), "value", "low", "high"]);
    for panel in &figure.panels {
        for series in &panel.series {
            for point in &series.points {
                let place =
                    figure.x.name(point.x).map_or_else(|| point.x.to_string(), str::to_owned);
                let [low, high] = point.interval.map_or_else(Default::default, |(low, high)| {
                    [low, high].map(|end| end.to_string())
                });
                let value = point.y.to_string();
                write([&panel.y.label(), &series.name, &place, &value, &low, &high]);
            }
        }
    }
    let bytes = csv.into_inner().expect("a vector has room");
    String::from_utf8(bytes).expect("CSV of texts is text")
}

/// Returns the numbers of a panel: a row for each place, a column for each series.
fn panel_table(figure: &Figure, panel: &Panel) -> Table {
    let mut places: Vec<f64> =
        panel.series.iter().flat_map(|series| &series.points).map(|point| point.x).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let cell = |series: &Series, x: f64| {
        let point = series.points.iter().find(|point| point.x == x);
        point.map_or_else(String::new, Point::shown)
    };
    let row = |&x: &f64| {
        let cells = panel.series.iter().map(|series| cell(series, x));
        std::iter::once(figure.x.place(x)).chain(cells).collect()
    };
    let names = panel.series.iter().map(|series| series.name.clone());
    Table {
        title: panel.y.label(),
        head: std::iter::once(figure.x.label()).chain(names).collect(),
        rows: places.iter().map(row).collect(),
        note: String::new(),
    }
}
