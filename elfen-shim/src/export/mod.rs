//! Exports a recording for other tools: CSV rows for computations, slices for trace viewers, and
//! folded stacks for flame graphs.

mod firefox;

use std::collections::BTreeMap;
use std::io::{self, Write};

use elfen_console::duration::number;
use serde_json::json;

use crate::clock::Moment;
use crate::recording::{Kind, NO_NAME, Recording, Row, Signal, State};

/// The values of `--as`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum ExportFormat {
    Csv,
    Perfetto,
    Firefox,
    Folded,
}

impl ExportFormat {
    /// The maximum number of events that the format's viewers open.
    pub fn events_max(self) -> usize {
        match self {
            Self::Csv | Self::Folded => usize::MAX,
            Self::Perfetto => 5_000_000,
            Self::Firefox => 1_000_000,
        }
    }
}

/// The number of runs. Each becomes an event.
pub fn events(recording: &Recording) -> usize {
    recording.runs.iter().map(Vec::len).sum()
}

/// Writes a recording. Folded stacks contain only `signals`: see [`stacked`].
pub fn write(
    recording: &Recording,
    format: ExportFormat,
    signals: &[usize],
    out: &mut dyn Write,
) -> io::Result<()> {
    match format {
        ExportFormat::Csv => csv(recording, out),
        ExportFormat::Perfetto => perfetto(recording, out),
        ExportFormat::Firefox => firefox::write(recording, out),
        ExportFormat::Folded => folded(recording, signals, out),
    }
}

fn csv(recording: &Recording, out: &mut dyn Write) -> io::Result<()> {
    if let Some(Moment { monotonic_ns, realtime_ns, .. }) = recording.head.began {
        writeln!(
            out,
            "# 0 ns: CLOCK_MONOTONIC {monotonic_ns} ns, CLOCK_REALTIME {realtime_ns} ns"
        )?;
    }
    writeln!(out, "signal,start_ns,end_ns,state,samples")?;
    for index in 0..recording.runs.len() {
        let signal = &recording.head.signals[index];
        let names = signal.state_names();
        for Row { start_ns, end_ns, state, samples } in recording.rows(index) {
            let state = quoted(&names.of(state));
            writeln!(out, "{},{start_ns},{end_ns},{state},{samples}", quoted(&signal.name))?;
        }
    }
    Ok(())
}

fn quoted(field: &str) -> String {
    if field.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", field.replace('"', "\"\""))
    } else {
        field.to_owned()
    }
}

/// Chrome's trace format: tags are slices, numbers are counters. Times are in microseconds.
fn perfetto(recording: &Recording, out: &mut dyn Write) -> io::Result<()> {
    let process = recording.head.process;
    let began = recording.head.began.unwrap_or_default();
    let other = json!({"start_monotonic_ns": began.monotonic_ns,
        "start_realtime_ns": began.realtime_ns});
    write!(out, "{{\"displayTimeUnit\":\"ns\",\"otherData\":{other},\"traceEvents\":[")?;
    let about = json!({"name": "process_name", "ph": "M", "pid": process,
        "args": {"name": recording.head.program}});
    write!(out, "{about}")?;
    for index in 0..recording.runs.len() {
        let signal = &recording.head.signals[index];
        let names = signal.state_names();
        let thread = index + 1;
        let about = json!({"name": "thread_name", "ph": "M", "pid": process, "tid": thread,
            "args": {"name": signal.name}});
        write!(out, ",\n{about}")?;
        for Row { start_ns, end_ns, state, .. } in recording.rows(index) {
            let ts = number(start_ns) / 1e3;
            let event = match (state, signal.kind) {
                (State::Gap | State::NotRunning, _) => continue,
                (State::Value(value), Kind::Values) => json!({"name": signal.name, "ph": "C",
                    "ts": ts, "pid": process, "args": {"value": signal.number(value)}}),
                (state, _) => json!({"name": names.of(state), "ph": "X", "ts": ts,
                    "dur": number(end_ns - start_ns) / 1e3, "pid": process, "tid": thread}),
            };
            write!(out, ",\n{event}")?;
        }
    }
    writeln!(out, "]}}")
}

/// Folded stacks: `program;signal;name NANOSECONDS`.
fn folded(recording: &Recording, signals: &[usize], out: &mut dyn Write) -> io::Result<()> {
    let mut times: BTreeMap<String, u64> = BTreeMap::new();
    for &index in signals {
        let signal = &recording.head.signals[index];
        let names = signal.state_names();
        for Row { start_ns, end_ns, state, .. } in recording.rows(index) {
            if matches!(state, State::Gap | State::NotRunning) {
                continue;
            }
            let parts = [&recording.head.program, &signal.name, &names.of(state)];
            let stack = parts.map(|part| part.replace([';', '\n'], ":")).join(";");
            *times.entry(stack).or_default() += end_ns - start_ns;
        }
    }
    times.iter().try_for_each(|(stack, ns)| writeln!(out, "{stack} {ns}"))
}

/// Candidates for the default signal of a flame graph. The first one with names is chosen. Each
/// signal covers all of the time, so a graph of two signals would count the time twice.
const STACKED: [&str; 4] = ["function", "tag", "task", "state"];

/// The name of a signal without the number of its lane or thread.
fn base(signal: &Signal) -> &str {
    signal.name.split(['#', '@']).next().unwrap_or(&signal.name)
}

/// Finds the signals of a flame graph: all lanes or threads of one signal name. The error lists the
/// available names.
pub fn stacked(recording: &Recording, wanted: Option<&str>) -> Result<Vec<usize>, Vec<String>> {
    let all = recording.head.signals.iter().enumerate();
    let tags: Vec<(usize, &Signal)> = all.filter(|(_, one)| one.kind == Kind::Tags).collect();
    let of = |name: &str| -> Vec<usize> {
        let its = tags.iter().filter(|(_, one)| base(one) == name || one.name == name);
        its.map(|(index, _)| *index).collect()
    };
    let has_names = |index: &usize| {
        let names = &recording.head.signals[*index].names;
        names.iter().any(|(_, name)| name != NO_NAME)
    };
    let found = match wanted {
        Some(wanted) => of(wanted),
        None => {
            let mut each = STACKED.iter().map(|name| of(name));
            each.find(|its| its.iter().any(has_names)).unwrap_or_default()
        }
    };
    match (found.is_empty(), wanted) {
        (true, Some(_)) => {
            let mut names: Vec<String> = tags.iter().map(|(_, one)| base(one).to_owned()).collect();
            names.dedup();
            Err(names)
        }
        _ => Ok(found),
    }
}
