//! What speaks against a number: failures on top of the page, one by one; warnings in a table at
//! its end, alike ones together, for a load generator warns of much.

use std::collections::{BTreeMap, BTreeSet};

use crate::record::Run;
use crate::report::Table;
use crate::report::scale::percent;

/// A generator that sends later than this part of p99 is a part of what is measured.
const LATE_PART: f64 = 0.1;
const LATE: &str = "the load generator was late by more than a tenth of p99";

/// Runs that cannot be trusted, a sentence for each kind and place.
pub(super) fn failures(runs: &[&Run]) -> Vec<String> {
    let mut failures: BTreeMap<String, u32> = BTreeMap::new();
    for run in runs {
        let reasons = [
            (run.errors > 0, "requests failed"),
            (run.batch_verified == Some(false), "the batch found its results wrong"),
        ];
        for (_, reason) in reasons.into_iter().filter(|(is, _)| *is) {
            *failures.entry(format!("{}: {reason}", place(run))).or_default() += 1;
        }
    }
    let sentence = |(failure, count)| {
        let runs = if count == 1 { "run" } else { "runs" };
        format!("{failure}, in {count} {runs}.")
    };
    failures.into_iter().map(sentence).collect()
}

/// Warnings that say the same but for their numbers.
#[derive(Default)]
struct Doubt<'a> {
    first: &'a str,
    runs: u32,
    places: BTreeSet<String>,
}

/// All warnings; nothing if there are none.
pub(super) fn table(runs: &[&Run]) -> Option<Table> {
    let mut doubts: BTreeMap<String, Doubt<'_>> = BTreeMap::new();
    for run in runs {
        let late = (run.late_p99_ms > run.p99_ms * LATE_PART).then_some(LATE);
        let warnings = run.warnings.iter().map(String::as_str).chain(late);
        let kinds: BTreeMap<String, &str> =
            warnings.map(|one| (without_numbers(one), one)).collect();
        for (kind, warning) in kinds {
            let doubt = doubts.entry(kind).or_default();
            doubt.first = if doubt.runs == 0 { warning } else { doubt.first };
            doubt.runs += 1;
            doubt.places.insert(place(run));
        }
    }
    let row = |doubt: &Doubt<'_>| {
        let places: Vec<&str> = doubt.places.iter().map(String::as_str).collect();
        let places = if places.len() > PLACES { "many".to_owned() } else { places.join(", ") };
        vec![format!("{} of {}", doubt.runs, runs.len()), doubt.first.to_owned(), places]
    };
    (!doubts.is_empty()).then(|| Table {
        title: "Warnings".to_owned(),
        head: ["runs", "warning", "beside the service"].map(str::to_owned).to_vec(),
        rows: doubts.values().map(row).collect(),
        note:
            "Of the load generator, in the words of the first; the others differ in their numbers."
                .to_owned(),
    })
}

/// More places than this are not worth listing.
const PLACES: usize = 4;

/// The sentence that sends the reader to the table.
pub(super) fn pointer(table: &Table) -> String {
    match table.rows.as_slice() {
        [_] => "There is a warning, at the end of the page.".to_owned(),
        rows => format!("There are {} kinds of warnings, at the end of the page.", rows.len()),
    }
}

fn place(run: &Run) -> String {
    format!("{} at {} load", run.scenario.title(), percent(run.load))
}

/// Its words, without numbers and their units.
fn without_numbers(warning: &str) -> String {
    let units = ["ns", "us", "µs", "ms", "s"];
    let is_word =
        |word: &&str| !word.contains(|c: char| c.is_ascii_digit()) && !units.contains(word);
    warning.split_whitespace().filter(is_word).collect::<Vec<_>>().join(" ")
}
