//! Recorded arrivals: a file with one moment a line in seconds, or the CSV that an earlier run
//! wrote.

use super::arrivals::TraceEntry;
use crate::units::nanos_from_f64;
use std::path::Path;
use std::sync::Arc;
use std::{fs, io};
use thiserror::Error;

#[derive(Debug, Error)]
pub(crate) enum TraceError {
    #[error("reading arrivals from {path}: {error}; name a readable text file")]
    Read { path: String, error: io::Error },
    #[error(
        "{path}, line {line}: `{text}` is no time; write seconds from the start, never going back"
    )]
    Line { path: String, line: usize, text: String },
    #[error("{path} holds no arrivals after its start; write one time a line, in seconds")]
    Empty { path: String },
}

pub(crate) fn read(path: &Path) -> Result<Arc<[TraceEntry]>, TraceError> {
    let shown = path.display().to_string();
    match fs::read_to_string(path) {
        Ok(text) => parse(&text, &shown),
        Err(error) => Err(TraceError::Read { path: shown, error }),
    }
}

/// Where our own CSV holds what a trace needs.
struct Columns {
    intended_us: usize,
    query: Option<usize>,
    invocation: Option<usize>,
}

impl Columns {
    fn of_header(line: &str) -> Option<Self> {
        let place = |name| line.split(',').position(|column| column.trim() == name);
        let (query, invocation) = (place("query"), place("invocation"));
        Some(Self { intended_us: place("intended_us")?, query, invocation })
    }
}

fn parse(text: &str, path: &str) -> Result<Arc<[TraceEntry]>, TraceError> {
    let columns = text.lines().next().and_then(Columns::of_header);
    let header = usize::from(columns.is_some());
    let mut entries: Vec<TraceEntry> = Vec::new();
    for (number, line) in text.lines().enumerate().skip(header) {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let cell = |at: usize| line.split(',').nth(at).map(str::trim);
        // Of a CSV with several invocations the first is the trace.
        if columns.as_ref().and_then(|c| cell(c.invocation?)).is_some_and(|n| n != "0") {
            continue;
        }
        let (time, unit_ns) = match &columns {
            Some(columns) => (cell(columns.intended_us), 1e3),
            None => (cell(0), 1e9),
        };
        let at_ns = time.and_then(|time| nanos_from_f64(time.parse::<f64>().ok()? * unit_ns));
        let at_ns = at_ns.filter(|at| entries.last().is_none_or(|last| last.at_ns <= *at));
        let at_ns = at_ns.ok_or_else(|| TraceError::Line {
            path: path.to_owned(),
            line: number + 1,
            text: line.to_owned(),
        })?;
        let query = columns.as_ref().and_then(|c| cell(c.query?)?.parse().ok());
        entries.push(TraceEntry { at_ns, query });
    }
    match entries.last() {
        Some(last) if last.at_ns > 0 => Ok(entries.into()),
        _ => Err(TraceError::Empty { path: path.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Goal: plain times and our own CSV are both read. Method: one of each.
    #[test]
    fn traces_are_read() {
        let plain = parse("# seconds\n0.5\n\n1.25, anything\n", "t").expect("good");
        assert_eq!(plain[..], [(500, None), (1_250, None)].map(entry));
        let csv = "invocation,seed,query,intended_us\n0,1,7,500000.0\n0,1,2,1250000.0\n1,2,0,3.0\n";
        let csv = parse(csv, "t").expect("good");
        assert_eq!(csv[..], [(500, Some(7)), (1_250, Some(2))].map(entry));
    }

    fn entry((ms, query): (u64, Option<u32>)) -> TraceEntry {
        TraceEntry { at_ns: ms * 1_000_000, query }
    }

    /// Goal: what is no trace is refused with its line. Method: words, a step back, nothing, and
    /// one moment only.
    #[test]
    fn bad_traces_name_the_line() {
        for (text, part) in [
            ("1\nx\n", "line 2"),
            ("2\n1\n", "line 2"),
            ("-1\n", "line 1"),
            ("", "no arrivals"),
            ("0\n", "no arr"),
        ] {
            let error = parse(text, "t").expect_err(text).to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    proptest! {
        /// Goal: no file makes the reader panic, and what it accepts is in order. Method: arbitrary
        /// text.
        #[test]
        fn arbitrary_files_are_survived(text in "(intended_us,query\n)?([0-9.,a\n -]{0,60})") {
            if let Ok(entries) = parse(&text, "t") {
                prop_assert!(entries.windows(2).all(|pair| pair[0].at_ns <= pair[1].at_ns));
            }
        }
    }
}
