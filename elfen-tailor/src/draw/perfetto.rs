//! Writes Chrome's trace format, which ui.perfetto.dev and chrome://tracing open. Each slow request
//! has a track with its segments, and each thread has a track with its states.
//!
//! Times are microseconds since the recording began, because a time since boot has more digits than
//! a JSON number can hold. Events are written one by one, because the output is larger than the
//! trace.

use std::io::{self, Write};

use elfen_console::duration::number;
use serde_json::{Value, json};

use crate::calls;
use crate::report::TailorReport;
use crate::timeline::{State, Stretch, Timeline};
use crate::trace::Trace;

/// The format groups tracks by process, so the two groups get made-up process ids.
const REQUESTS: u32 = 1;
const THREADS: u32 = 2;

/// Writes the slow requests of a report and the threads of a trace.
pub fn write_perfetto(
    report: &TailorReport,
    trace: &Trace,
    out: &mut impl Write,
) -> io::Result<()> {
    let began_ns = trace.head.began_ns;
    let other = json!({"start_monotonic_ns": began_ns});
    writeln!(out, "{{\"displayTimeUnit\":\"ns\",\"otherData\":{other},\"traceEvents\":[")?;
    write!(out, "{}", name_group(REQUESTS, "slow requests"))?;
    let mut writer = EventWriter { out, began_ns };
    writer.event(&name_group(THREADS, "threads"))?;
    for (track, one) in (1..).zip(&report.slowest) {
        writer.track(REQUESTS, track, &format!("request {}", one.request))?;
        for segment in &one.segments {
            let name = format!("{} {}", segment.kind, segment.who);
            writer.slice(REQUESTS, track, (segment.from_ns, segment.to_ns), &name)?;
        }
    }
    let last_ns = trace.events.iter().filter_map(|events| events.last()).map(|event| event.at_ns);
    let ended_ns = last_ns.max().unwrap_or(0);
    let timeline = Timeline::new(trace, &trace.events_in_order());
    let mut threads: Vec<(u32, &[Stretch])> = timeline.threads().collect();
    threads.sort_unstable_by_key(|(thread, _)| *thread);
    for (thread, stretches) in threads.into_iter().filter(|(thread, _)| *thread != 0) {
        writer.track(THREADS, thread, &trace.name_of(trace.identify(thread, ended_ns)))?;
        for (at, stretch) in stretches.iter().enumerate() {
            let to_ns = stretches.get(at + 1).map_or(ended_ns, |next| next.from_ns);
            writer.slice(THREADS, thread, (stretch.from_ns, to_ns), &state(stretch.state))?;
        }
    }
    writer.out.write_all(b"\n]}\n")
}

fn state(state: State) -> String {
    match state {
        State::Running { cpu } => format!("runs on CPU {cpu}"),
        State::Runnable { .. } => "runnable".to_owned(),
        State::Sleeping(sleep) if sleep.stopped => "stopped".to_owned(),
        State::Sleeping(sleep) => match sleep.call {
            Some(call) => format!("sleeps in {}", calls::name(call)),
            None => "sleeps".to_owned(),
        },
    }
}

fn name_group(group: u32, name: &str) -> Value {
    json!({"ph": "M", "name": "process_name", "pid": group, "args": {"name": name}})
}

struct EventWriter<'a, W> {
    out: &'a mut W,
    began_ns: u64,
}

impl<W: Write> EventWriter<'_, W> {
    fn event(&mut self, event: &Value) -> io::Result<()> {
        write!(self.out, ",\n{event}")
    }

    fn track(&mut self, group: u32, track: u32, name: &str) -> io::Result<()> {
        let args = json!({"name": name});
        self.event(&json!({"ph": "M", "name": "thread_name", "pid": group, "tid": track,
            "args": args}))
    }

    /// Writes a slice. Skips empty slices, and slices of a damaged file that end before they begin.
    fn slice(
        &mut self,
        group: u32,
        track: u32,
        (from_ns, to_ns): (u64, u64),
        name: &str,
    ) -> io::Result<()> {
        let from_ns = from_ns.max(self.began_ns);
        if from_ns >= to_ns {
            return Ok(());
        }
        let us = |ns: u64| number(ns) / 1e3;
        self.event(&json!({"ph": "X", "name": name, "pid": group, "tid": track,
            "ts": us(from_ns - self.began_ns), "dur": us(to_ns - from_ns)}))
    }
}
