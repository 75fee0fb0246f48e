//! Entry point for the fuzzer: what is printed of a profile.

use crate::diff::{Diff, DiffKey};
use crate::instructions::InstructionCounts;
use crate::profile::Profile;
use crate::report::{ProfileReport, SortKey};
use crate::source_lines;
use crate::symbols::ProfileSymbols;

/// Prints reports of a profile whose files do not exist.
pub fn report(profile: &Profile) {
    const ROWS: usize = 9;
    let mut profile = profile.clone();
    for file in &mut profile.files {
        file.path.insert_str(0, "/nonexistent/");
    }
    let (symbols, _) = ProfileSymbols::read(&profile);
    let report = ProfileReport::of(&profile, &symbols, ROWS);
    let _text = [SortKey::Function, SortKey::Call].map(|sort| report.text(sort));
    let _lines = source_lines::hottest(&profile, &symbols, ROWS);
    let _counts = InstructionCounts::of(&profile, 0, None);
    let side = (&profile, &symbols);
    for sort in [DiffKey::Function, DiffKey::Call, DiffKey::Edge] {
        let _text = Diff::of(side, side, sort, ROWS, true).text();
    }
}
