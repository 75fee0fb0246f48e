//! The numbers of a figure as CSV (RFC 4180), a line for each point that is drawn.

use super::figure::{Across, Figure};

/// Numbers are written so that reading them gives the same bits.
pub(super) fn csv(figure: &Figure) -> String {
    let x = figure.x.label();
    let mut csv = line(&["measure", "series", &x, "value", "low", "high"]);
    for panel in &figure.panels {
        for series in &panel.series {
            for point in &series.points {
                let place = place(&figure.x, point.x);
                let (low, high) = point.interval.map_or_else(Default::default, |(low, high)| {
                    (low.to_string(), high.to_string())
                });
                let value = point.y.to_string();
                csv += &line(&[&panel.y.label(), &series.name, &place, &value, &low, &high]);
            }
        }
    }
    csv
}

/// A number, or the name that it counts.
pub(super) fn place(across: &Across, x: f64) -> String {
    match across {
        Across::Number(_) => x.to_string(),
        Across::Names { names, .. } => {
            let named = names.iter().enumerate().find(|(index, _)| *index as f64 == x);
            named.map_or_else(String::new, |(_, name)| name.clone())
        }
    }
}

fn line(fields: &[&str]) -> String {
    let quoted = |field: &&str| {
        if field.contains([',', '"', '\n', '\r']) {
            format!("\"{}\"", field.replace('"', "\"\""))
        } else {
            (*field).to_owned()
        }
    };
    fields.iter().map(quoted).collect::<Vec<_>>().join(",") + "\r\n"
}

/// The file as an address that needs no server.
pub(super) fn data_uri(csv: &str) -> String {
    let mut uri = String::from("data:text/csv;charset=utf-8,");
    for byte in csv.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            uri.push(char::from(byte));
        } else {
            uri += &format!("%{byte:02X}");
        }
    }
    uri
}
