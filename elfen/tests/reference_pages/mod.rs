//! Compares generated pages with docs/reference, in the tests of each program.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use snapbox::data::DataFormat;
use snapbox::{Assert, Data};

pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference")
}

/// Compares the pages that a command writes with those in the repository. Returns their names.
pub(crate) fn assert_pages(command: &mut Command) -> Vec<String> {
    let written = tempfile::tempdir().unwrap();
    let output = command.arg(written.path()).output().expect("the command starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let entries = fs::read_dir(written.path()).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let names: Vec<String> = names.collect();
    for name in &names {
        let actual = fs::read_to_string(written.path().join(name)).unwrap();
        let expected = Data::read_from(&folder().join(name), Some(DataFormat::Text));
        let assert = Assert::new().action_env("SNAPSHOTS").normalize_paths(false);
        assert.eq(Data::text(actual), expected);
    }
    names
}
