//! The generated pages in docs/reference are current. After an intended change,
//! `SNAPSHOTS=overwrite cargo test --test reference` writes them.

use std::process::Command;

#[path = "../../elfen/tests/reference_pages/mod.rs"]
mod reference_pages;

use reference_pages::assert_pages;

/// Goal: the page is that of this version. Method: write it into another folder.
#[test]
fn the_page_is_current() {
    let mut hedge = Command::new(env!("CARGO_BIN_EXE_elfen-hedge"));
    assert_eq!(assert_pages(hedge.arg("reference")), ["commands-hedge.md"]);
}
