//! Stages of requests, as the service numbers them: where slow requests took longer than others.

use std::collections::BTreeSet;

use elfen_console::duration::show;
use elfen_console::table as lines;
use serde::Serialize;

use crate::explained::Explained;
use crate::rank::middle;
use crate::segment::total;

/// A screen has room for so many.
const MOST: usize = 16;

/// What a request of the tail had of a stage of the service's own, and one of the middle, on
/// average: from its begin to its end, whatever it did there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct StageRow {
    pub stage: u16,
    pub tail_ns: u64,
    pub middle_ns: u64,
}

pub(crate) fn rows(explained: &[Explained], slow: &[usize]) -> Vec<StageRow> {
    let of = |one: &Explained, stage: u16| {
        one.stages.iter().find(|(of, _)| *of == stage).map_or(0, |(_, ns)| *ns)
    };
    let all: BTreeSet<u16> =
        explained.iter().flat_map(|one| &one.stages).map(|(stage, _)| *stage).collect();
    // The first is all there is of a service that has none.
    if all.len() < 2 {
        return Vec::new();
    }
    let middle = middle(explained);
    let mean = |of_all: &[usize], stage| {
        let sum = total(of_all.iter().map(|&at| of(&explained[at], stage)));
        sum / (of_all.len() as u64).max(1)
    };
    let row = |stage| {
        let (tail_ns, middle_ns) = (mean(slow, stage), mean(&middle, stage));
        StageRow { stage, tail_ns, middle_ns }
    };
    // A number a request could fill any screen.
    all.into_iter().take(MOST).map(row).collect()
}

pub(crate) fn table(stages: &[StageRow]) -> String {
    let row = |row: &StageRow| vec![row.stage.to_string(), show(row.tail_ns), show(row.middle_ns)];
    let rows: Vec<Vec<String>> = stages.iter().map(row).collect();
    lines::lines(&["stage", "tail", "middle"], &rows)
}
