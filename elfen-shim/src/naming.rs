//! What values of signals are called.

use std::collections::BTreeSet;

use elfen_rt::signal::task::Running;

use crate::program::name_of;
use crate::recording::{Kind, Recording, Signal, Source, State};
use crate::symbols::Names;

/// What a tag of a signal is called.
pub fn name(names: &mut Names, signal: &Signal, value: u64, own: &(u32, String)) -> String {
    match signal.source {
        Source::Entries | Source::EntriesAndReturns => names.function(value),
        Source::SourceTags => names.tag(value),
        Source::TaskMap => match Running::from_word(value) {
            Running::Idle => "(idle)".to_owned(),
            Running::Unknown => "(not known yet)".to_owned(),
            Running::Task(task) => {
                // Threads of others have names of their own: a guard is none of its keeper's.
                let name = match task.process == own.0 {
                    true => own.1.clone(),
                    false => name_of(task.thread).unwrap_or_else(|| "(ended)".to_owned()),
                };
                match task.thread == task.process {
                    true => format!("{name} {}", task.process),
                    false => format!("{name} {}/{}", task.process, task.thread),
                }
            }
        },
        Source::ServicePage
        | Source::Mapped
        | Source::SharedAtStart
        | Source::Shared
        | Source::Read
        | Source::Proc => format!("{value}"),
    }
}

/// Gives all tags of a recording their names. `own` is the observed process, by id and name.
pub fn name_all(recording: &mut Recording, names: &mut Names, own: &(u32, String)) {
    for (index, runs) in recording.runs.iter().enumerate() {
        let signal = &recording.head.signals[index];
        if signal.kind != Kind::Tags || !signal.names.is_empty() {
            continue;
        }
        let values: BTreeSet<u64> = runs
            .iter()
            .filter_map(|run| match run.state {
                State::Value(value) => Some(value),
                State::Gap | State::NotRunning | State::Other => None,
            })
            .collect();
        let signal = signal.clone();
        let named = values.into_iter().map(|value| (value, name(names, &signal, value, own)));
        recording.head.signals[index].names = named.collect();
    }
}
