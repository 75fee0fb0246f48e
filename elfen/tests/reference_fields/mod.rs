//! Compares the JSON of commands with its fields in run-report.md.

use std::collections::BTreeSet;
use std::fs;

use serde_json::Value;

use crate::reference_pages::folder;

/// The fields of an object of a command in run-report.md: all of them, and the required ones.
pub(crate) fn listed_fields(command: &str) -> (BTreeSet<String>, BTreeSet<String>) {
    let page = fs::read_to_string(folder().join("run-report.md")).unwrap();
    let begin = format!("| `{command}` | ");
    let row = page.lines().find_map(|line| line.strip_prefix(&begin)).expect(command);
    let codes = |text: &str| text.split('`').skip(1).step_by(2).map(str::to_owned).collect();
    let always: String =
        row.split('[').map(|part| part.split_once(']').map_or(part, |p| p.1)).collect();
    (codes(row), codes(&always))
}

/// Asserts that the output of a command has the fields of its row.
pub(crate) fn assert_fields(command: &str, output: &[u8]) {
    let object: Value = serde_json::from_slice(output).expect(command);
    let mut found: BTreeSet<String> =
        object.as_object().expect("an object").keys().cloned().collect();
    assert!(found.remove("schema"), "{command}");
    let (all, always) = listed_fields(command);
    assert!(found.is_subset(&all), "{command}: not listed: {:?}", found.difference(&all));
    assert!(always.is_subset(&found), "{command}: missing: {:?}", always.difference(&found));
}
