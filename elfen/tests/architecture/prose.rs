//! Tests the language of comments and documents: things are not described as persons, and lines are
//! short enough to read.

use std::fs;
use std::path::Path;

use crate::{files, has_extension, root};

/// Words for persons. In this repository they nearly always describe things.
const PERSONS: [&str; 11] = [
    "who",
    "whom",
    "whoever",
    "whomever",
    "nobody",
    "somebody",
    "anybody",
    "everybody",
    "he",
    "him",
    "his",
];
/// The allowed number of such words, for sentences about users.
const PERSONS_MAX: usize = 30;
const DOCUMENT_COLUMNS: usize = 120;

/// The lines of a file that are prose, with their numbers.
fn text_lines<'a>(path: &Path, text: &'a str) -> Vec<(usize, &'a str)> {
    let is_document = has_extension(path, &["md"]);
    let mut in_code = false;
    let mut is_text = |line: &str| {
        if is_document && line.trim_start().starts_with("```") {
            in_code = !in_code;
            return false;
        }
        if is_document { !in_code } else { line.trim_start().starts_with("//") }
    };
    (1..).zip(text.lines()).filter(|(_, line)| is_text(line)).collect()
}

/// All lines of prose in which `wrong` finds something, with the number of findings.
fn lines_that(extensions: &[&str], wrong: impl Fn(&str) -> usize) -> (usize, String) {
    let (mut count, mut found) = (0, String::new());
    for path in files().iter().filter(|path| has_extension(path, extensions)) {
        let text = fs::read_to_string(path).expect("UTF-8");
        for (number, line) in text_lines(path, &text) {
            let wrong = wrong(line);
            if wrong > 0 {
                count += wrong;
                let name = path.strip_prefix(root()).unwrap_or(path).display();
                found += &format!("{name}:{number}: {}\n", line.trim());
            }
        }
    }
    (count, found)
}

fn persons(line: &str) -> usize {
    let words = line.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
    words.filter(|word| PERSONS.iter().any(|person| word.eq_ignore_ascii_case(person))).count()
}

/// Goal: a thread, a request or a file is "it", and is named by its noun. Method: count words for
/// persons in comments and documents.
#[test]
fn things_are_no_persons() {
    assert_eq!((persons("// Whoever waits, he sleeps"), persons("// the whole, she")), (2, 0));
    let (count, found) = lines_that(&["rs", "md"], persons);
    assert!(count <= PERSONS_MAX, "{count} words for people, most may be about things:\n{found}");
}

/// Goal: documents fit a terminal. Method: the columns of each line that is neither in a table nor
/// in an example.
#[test]
fn no_line_of_a_document_is_too_long() {
    let is_long =
        |line: &str| usize::from(!line.starts_with('|') && line.chars().count() > DOCUMENT_COLUMNS);
    let (count, found) = lines_that(&["md"], is_long);
    assert_eq!(count, 0, "lines of over {DOCUMENT_COLUMNS} columns:\n{found}");
}
