//! The rows of a recording that several exports write.

use std::collections::HashMap;

use crate::recording::{Kind, Recording, Signal, State};
use crate::symbols::NO_NAME;

/// A run of a signal, with times in nanoseconds from the start of the recording.
pub(super) struct Row<'a> {
    pub(super) signal: &'a Signal,
    pub(super) start_ns: u64,
    pub(super) end_ns: u64,
    pub(super) state: State,
    pub(super) samples: u64,
}

/// All runs of a signal, joined through gaps in which nothing changed.
pub(super) fn rows(recording: &Recording, index: usize) -> impl Iterator<Item = Row<'_>> {
    let (clock, signal) = (recording.head.clock, &recording.head.signals[index]);
    let first = recording.span().map_or(0, |(first, _)| first);
    recording.joined(index).map(move |(run, end)| Row {
        signal,
        start_ns: clock.ns(run.start_ticks.saturating_sub(first)),
        end_ns: clock.ns(end.saturating_sub(first)),
        state: run.state,
        samples: run.samples,
    })
}

/// The names of a signal's values.
pub(super) fn names(signal: &Signal) -> HashMap<u64, &str> {
    signal.names.iter().map(|(value, name)| (*value, name.as_str())).collect()
}

/// The name of a state, or its number.
pub(super) fn shown(signal: &Signal, names: &HashMap<u64, &str>, state: State) -> String {
    match (state, signal.kind) {
        (State::Gap, _) => "(gap)".to_owned(),
        (State::NotRunning, _) => "(not running)".to_owned(),
        (State::Other, _) => "(others)".to_owned(),
        (State::Value(value), Kind::Values) => signal.number(value).to_string(),
        (State::Value(value), Kind::Tags) => match names.get(&value) {
            Some(name) => (*name).to_owned(),
            None if value == 0 => NO_NAME.to_owned(),
            None => format!("{value:#x}"),
        },
    }
}
