//! Reads and writes traces: CSV files with one request in each line.

use std::io::{self, BufRead, Write};

/// One served request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Served {
    pub core: u64,
    pub arrived_ns: u64,
    pub started_ns: u64,
    pub ended_ns: u64,
    pub demand_ns: u64,
    pub overlapped_ns: u64,
}

/// The first line of the files of [`write`].
pub const HEADING: &str = "arrival_ns,demand_ns,core,start_ns,end_ns,overlapped_ns";

/// Writes one line. [`read`] uses its first two columns.
pub fn write(out: &mut dyn Write, served: &Served) -> io::Result<()> {
    let Served { core, arrived_ns, started_ns, ended_ns, demand_ns, overlapped_ns } = served;
    writeln!(out, "{arrived_ns},{demand_ns},{core},{started_ns},{ended_ns},{overlapped_ns}")
}

/// Why a trace file is invalid.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("{0}")]
    Read(#[from] io::Error),
    #[error("the header lacks column arrival_ns or demand_ns")]
    NoColumns,
    #[error("line {line} lacks an arrival and a demand in whole nanoseconds: {text:?}")]
    Line { line: usize, text: String },
    #[error("the request of line {line} arrives before the request of the previous line")]
    Order { line: usize },
    #[error("the file has no requests")]
    Empty,
}

/// Reads a CSV file with the columns `arrival_ns` and `demand_ns`. Returns both values of each
/// request, in the order of arrival.
pub fn read(lines: impl BufRead) -> Result<Vec<(u64, u64)>, TraceError> {
    let mut lines = lines.lines();
    let heading = lines.next().transpose()?.unwrap_or_default();
    let column = |name: &str| heading.trim().split(',').position(|field| field == name);
    let columns = column("arrival_ns").zip(column("demand_ns")).ok_or(TraceError::NoColumns)?;
    let mut requests: Vec<(u64, u64)> = Vec::new();
    for (index, text) in lines.enumerate() {
        let (text, line) = (text?, index + 2);
        let fields: Vec<&str> = text.trim().split(',').collect();
        let field = |column: usize| fields.get(column).and_then(|field| field.parse().ok());
        let request = field(columns.0).zip(field(columns.1));
        let request = request.ok_or_else(|| TraceError::Line { line, text: text.clone() })?;
        if requests.last().is_some_and(|last| last.0 > request.0) {
            return Err(TraceError::Order { line });
        }
        requests.push(request);
    }
    if requests.is_empty() { Err(TraceError::Empty) } else { Ok(requests) }
}
