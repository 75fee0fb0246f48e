//! Exports a recording as a profile of Firefox Profiler: tables by columns, format version 62.
//!
//! Each signal of tags becomes a thread. Each run of the signal becomes a sample, whose weight is
//! the length of the run. A gap has no stack. Signals of numbers become counters.

use std::collections::HashMap;
use std::io::{self, Write};

use elfen_console::duration::number;
use serde::Serialize;
use serde_json::{Value, json};

use crate::recording::{Kind, Recording, Row, State};

const VERSION: u32 = 62;
/// Version of the Gecko profile format, which every profile contains.
const GECKO_VERSION: u32 = 24;

#[derive(Serialize)]
struct Profile {
    meta: Value,
    libs: [(); 0],
    pages: [(); 0],
    #[serde(rename = "profilerOverhead")]
    overhead: [(); 0],
    counters: Vec<Value>,
    shared: Shared,
    threads: Vec<Value>,
}

/// The tables of names, functions, frames and stacks. Each name has one row in each table.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Shared {
    string_array: Vec<String>,
    func_table: Value,
    frame_table: Value,
    stack_table: Value,
    native_symbols: Value,
    resource_table: Value,
    sources: Value,
}

#[derive(Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Samples {
    length: usize,
    stack: Vec<Option<usize>>,
    time_deltas: Vec<f64>,
    weight: Vec<f64>,
    weight_type: &'static str,
}

pub(super) fn write(recording: &Recording, out: &mut dyn Write) -> io::Result<()> {
    let mut known = Names::default();
    let mut threads = Vec::new();
    let mut counters = Vec::new();
    for (index, signal) in recording.head.signals.iter().enumerate() {
        match signal.kind {
            Kind::Tags => threads.push(thread(recording, index, &mut known)),
            Kind::Values => counters.push(counter(recording, index)),
        }
    }
    if threads.is_empty() {
        // Firefox Profiler draws counters only with a thread.
        threads.push(about(recording, 0, "values", &Samples::default()));
    }
    let (libs, pages, overhead) = ([], [], []);
    let (meta, shared) = (meta(recording), known.tables());
    let profile = Profile { meta, libs, pages, overhead, counters, shared, threads };
    serde_json::to_writer(&mut *out, &profile)?;
    writeln!(out)
}

fn ms(ns: u64) -> f64 {
    number(ns) / 1e6
}

fn meta(recording: &Recording) -> Value {
    let began = recording.head.began.unwrap_or_default();
    json!({
        "preprocessedProfileVersion": VERSION,
        "version": GECKO_VERSION,
        "product": recording.head.program,
        "interval": ms(recording.head.period_ns.median.max(1)),
        // Milliseconds since 1970, and the same moment by CLOCK_MONOTONIC.
        "startTime": ms(began.realtime_ns),
        "startTimeAsClockMonotonicNanosecondsSinceBoot": began.monotonic_ns,
        "processType": 0,
        "oscpu": recording.head.machine,
        "categories": [{"name": "Other", "color": "grey", "subcategories": ["Other"]}],
        "debug": false,
        "extensions": {"baseURL": [], "id": [], "length": 0, "name": []},
        "markerSchema": [],
        "pausedRanges": [],
        "sampleUnits": {"time": "ms", "eventDelay": "ms", "threadCPUDelta": "ns"},
        "sourceCodeIsNotOnSearchfox": true,
        "symbolicated": true,
        "usesOnlyOneStackType": true,
    })
}

fn thread(recording: &Recording, index: usize, known: &mut Names) -> Value {
    let signal = &recording.head.signals[index];
    let names = signal.state_names();
    let mut samples = Samples { weight_type: "tracing-ms", ..Samples::default() };
    let mut last = 0;
    let mut stacks = HashMap::new();
    for Row { start_ns, end_ns, state, .. } in recording.rows(index) {
        let stack = match state {
            State::Gap | State::NotRunning => None,
            state => Some(*stacks.entry(state).or_insert_with(|| known.index(names.of(state)))),
        };
        samples.stack.push(stack);
        samples.time_deltas.push(ms(start_ns.saturating_sub(last)));
        samples.weight.push(if stack.is_some() { ms(end_ns - start_ns) } else { 0.0 });
        last = start_ns;
    }
    samples.length = samples.stack.len();
    about(recording, index, &signal.name, &samples)
}

fn about(recording: &Recording, index: usize, name: &str, samples: &Samples) -> Value {
    let process = recording.head.process.to_string();
    json!({
        "name": name,
        "isMainThread": index == 0,
        "pid": process,
        "tid": format!("{process}.{index}"),
        "processName": recording.head.program,
        "processType": "default",
        "processStartupTime": 0.0,
        "processShutdownTime": null,
        "registerTime": 0.0,
        "unregisterTime": null,
        "pausedRanges": [],
        "showMarkersInTimeline": false,
        "markers": {"length": 0, "category": [], "data": [], "endTime": [], "name": [],
            "phase": [], "startTime": []},
        "samples": samples,
    })
}

/// Converts a signal to a counter. Its samples are differences, whose sum is the number.
fn counter(recording: &Recording, index: usize) -> Value {
    let signal = &recording.head.signals[index];
    let name = &signal.name;
    let mut deltas = Vec::new();
    let mut counts = Vec::new();
    let mut last = 0;
    let mut before = 0.0;
    for Row { start_ns, state, .. } in recording.rows(index) {
        let State::Value(value) = state else { continue };
        let value = signal.number(value) as f64;
        deltas.push(ms(start_ns.saturating_sub(last)));
        counts.push(value - before);
        last = start_ns;
        before = value;
    }
    json!({
        "name": name,
        "category": "Elfen",
        "description": format!("{name} of {}", recording.head.program),
        "pid": recording.head.process.to_string(),
        "mainThreadIndex": 0,
        "display": {"color": "blue", "graphType": "line-accumulated", "label": name,
            "markerSchemaLocation": null, "sortWeight": index, "unit": ""},
        "samples": {"length": counts.len(), "timeDeltas": deltas, "count": counts},
    })
}

/// All names, and their common index in all tables.
#[derive(Default)]
struct Names {
    all: Vec<String>,
    numbers: HashMap<String, usize>,
}

impl Names {
    fn index(&mut self, name: String) -> usize {
        let Self { all, numbers } = self;
        *numbers.entry(name).or_insert_with_key(|name| {
            all.push(name.clone());
            all.len() - 1
        })
    }

    fn tables(self) -> Shared {
        let count = self.all.len();
        let each: Vec<usize> = (0..count).collect();
        let [none, zero] = [Value::Null, Value::from(0)].map(|value| vec![value; count]);
        let [minus, no] = [Value::from(-1), Value::from(false)].map(|value| vec![value; count]);
        Shared {
            string_array: self.all,
            func_table: json!({"length": count, "name": each, "isJS": no, "relevantForJS": no,
                "resource": minus, "source": none, "lineNumber": none, "columnNumber": none}),
            frame_table: json!({"length": count, "func": each, "address": minus,
                "category": zero, "subcategory": zero, "inlineDepth": zero, "nativeSymbol": none,
                "innerWindowID": zero, "line": none, "column": none}),
            stack_table: json!({"length": count, "frame": each, "prefix": none}),
            native_symbols: json!({"length": 0, "address": [], "functionSize": [], "libIndex": [],
                "name": []}),
            resource_table: json!({"length": 0, "host": [], "lib": [], "name": [], "type": []}),
            sources: json!({"length": 0, "filename": [], "id": [], "sourceMapURL": [],
                "startColumn": [], "startLine": []}),
        }
    }
}
